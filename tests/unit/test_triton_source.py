"""Generated source: golden files, cache of modules, and what the emitter refuses."""

from __future__ import annotations

import difflib
import inspect
import multiprocessing
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from triton.runtime.jit import JITFunction

from flexla_dist.compiler.aot import describe_call
from flexla_dist.compiler.build import load_module, module_text, without_comments
from flexla_dist.compiler.emit import device, expressions
from flexla_dist.compiler.executor.registry import make_executor
from flexla_dist.compiler.executor.triton_executor import TritonExecutor
from flexla_dist.compiler.ir import operators as ops
from flexla_dist.compiler.ir.operators import OPERATORS
from flexla_dist.compiler.pipeline import compile_graphs
from flexla_dist.errors import CacheFolderError, ExecutorError, TraceError
from flexla_dist.generated import cache_folder
from flexla_dist.spec import LinearAttentionSpec
from flexla_dist.spec.variants import get_variant

from .compiled import DISTINCT, SPECS, graphs_of

GOLDEN = Path(__file__).parent / "golden"
EVEN: frozenset[str] = frozenset()
DIRECTIONS = ("forward", "backward")


def source(name: str, direction: str, uneven: frozenset[str] = EVEN) -> str:
    return TritonExecutor(graphs_of(name)).source(direction, uneven)[0]


# -- golden files ---------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", ["simple_gla", "gated_delta_rule", "gla"])
def test_golden_source(name: str, direction: str, request: pytest.FixtureRequest) -> None:
    """What is generated is what was read and accepted; `--accept-golden` accepts it anew."""
    uneven = frozenset({"V"}) if name == "gla" else EVEN
    text = source(name, direction, uneven)
    path = GOLDEN / f"{name}_{direction}.py.txt"
    if request.config.getoption("--accept-golden"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    accepted = path.read_text() if path.exists() else ""
    changes = difflib.unified_diff(
        accepted.splitlines(), text.splitlines(), str(path), "generated", lineterm="", n=1
    )
    shown = "\n".join(list(changes)[:60])
    assert text == accepted, (
        f"generated source changed; read it, then run pytest --accept-golden {__file__}\n{shown}"
    )


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", [n for n in DISTINCT if SPECS[n].log_scaled is None])
def test_source_is_deterministic_python(name: str, direction: str) -> None:
    text = source(name, direction)
    assert text == TritonExecutor(compile_graphs(SPECS[name])).source(direction, EVEN)[0]
    compile(text, "generated", "exec")
    for line in text.splitlines():
        assert line == line.rstrip()


def test_lines_tell_stage_and_place() -> None:
    text = source("simple_gla", "forward")
    line, first = inspect.getsourcelines(get_variant("simple_gla").decay_mode)
    statement = line[1].strip()
    assert f"# decay_mode, simple_gla.py:{first + 1}: {statement}" in text


# -- the cache of modules -------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("flexla_dist_generated_"):
            del sys.modules[name]


def cumulative(constant: float, callable_: Callable[..., Any] | None = None) -> LinearAttentionSpec:
    """A small spec: linear attention with its keys multiplied by a constant."""
    chunk = callable_ or (
        lambda x, p: {"q": x.q, "k": x.k * constant, "v": x.v, "w": (x.q @ x.k.T).tril()}
    )
    return LinearAttentionSpec(
        name="small",
        inputs={"q": "C K", "k": "C K", "v": "C V"},
        chunk_mode=chunk,
        decay_mode=lambda S, c: S + c.k.T @ c.v,
        merge_mode=lambda S, c: c.q @ S + c.w @ c.v,
    )


def module_of(spec: LinearAttentionSpec, folder: Path) -> ModuleType:
    text = TritonExecutor(compile_graphs(spec)).source("forward", EVEN)[0]
    return load_module("small_forward", text, folder)


def kernels(module: ModuleType) -> dict[str, JITFunction]:
    found = {n: x for n, x in vars(module).items() if isinstance(x, JITFunction)}
    return {n: x for n, x in found.items() if x.module == module.__name__}


def test_a_callable_of_another_name_and_place_is_the_same_module(folder: Path) -> None:
    def elsewhere(inputs: Any, parameters: Any) -> dict[str, Any]:
        scores = (inputs.q @ inputs.k.T).tril()
        return {"q": inputs.q, "k": inputs.k * 2.0, "v": inputs.v, "w": scores}

    first = module_of(cumulative(2.0), folder)
    keys = {name: kernel.cache_key for name, kernel in kernels(first).items()}
    assert module_of(cumulative(2.0, elsewhere), folder) is first
    assert len(list(folder.glob("*.py"))) == 1
    del sys.modules[first.__name__]
    again = module_of(cumulative(2.0, elsewhere), folder)
    assert again is not first and "elsewhere" not in first.__name__
    assert {name: kernel.cache_key for name, kernel in kernels(again).items()} == keys


def test_another_constant_is_another_module(folder: Path) -> None:
    first, second = (module_of(cumulative(x), folder) for x in (2.0, 3.0))
    assert first.__name__ != second.__name__
    assert len(list(folder.glob("*.py"))) == 2
    name = next(iter(kernels(first)))
    assert kernels(first)[name].cache_key != kernels(second)[name].cache_key


@pytest.mark.parametrize(
    "content", [b"", b"raise SystemExit(3)\n", b"\xff\xfe not text", b"x = 1\n"]
)
def test_a_broken_file_is_written_again(folder: Path, content: bytes) -> None:
    module = module_of(cumulative(2.0), folder)
    del sys.modules[module.__name__]
    path = Path(str(module.__file__))
    good = path.read_bytes()
    path.write_bytes(content)
    again = module_of(cumulative(2.0), folder)
    assert kernels(again).keys() == kernels(module).keys()
    assert path.read_bytes() == good


def test_a_module_that_fails_is_not_kept(folder: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        load_module("bad", "x = 1 / 0\n", folder)
    assert not any(name.startswith("flexla_dist_generated_bad") for name in sys.modules)


def test_processes_may_write_at_once(folder: Path) -> None:
    """Eight processes load one module again and again, the file being broken at first."""
    text = TritonExecutor(graphs_of("linear_attn")).source("forward", EVEN)[0]
    path = Path(str(load_module("shared", text, folder).__file__))
    path.write_text("broken")
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=load_often, args=(text, folder)) for _ in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0] * 8
    assert [x for x in folder.iterdir() if x.name != "__pycache__"] == [path]
    assert path.read_text() == text


def load_often(text: str, folder: Path) -> None:
    for name in [name for name in sys.modules if name.startswith("flexla_dist_generated_shared")]:
        del sys.modules[name]
    for _ in range(10):
        module = load_module("shared", text, folder)
        assert kernels(module)
        del sys.modules[module.__name__]


def test_threads_get_whole_modules(folder: Path) -> None:
    """Four threads load one module at the same moment."""
    names = [f"k{at}" for at in range(60)]
    functions = [f"@triton.jit\ndef {name}(x):\n    tl.store(x, 1)\n" for name in names]
    for trial in range(5):
        text = module_text(f"trial {trial}", frozenset(), [*functions, f"trial = {trial}\n"])
        start, missing = threading.Barrier(4), []

        def load(text: str = text, start: Any = start, missing: Any = missing) -> None:
            start.wait()
            found = vars(load_module("threads", text, folder))
            missing.extend(name for name in ("trial", *names) if name not in found)

        threads = [threading.Thread(target=load) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not missing


def test_a_folder_that_cannot_be_written(folder: Path) -> None:
    """Each error names the path, the reason and the way to another folder."""
    text = "x = 1\n"
    file = folder / "file"
    file.write_text("")
    inside = Path(str(load_module("dir", text, folder).__file__))
    del sys.modules[f"flexla_dist_generated_{inside.stem}"]
    inside.unlink()
    inside.mkdir()
    for place, path in ((file, file), (file / "below", file), (folder, inside)):
        with pytest.raises(CacheFolderError, match="XDG_CACHE_HOME") as caught:
            load_module("dir", text, place)
        assert str(path) in str(caught.value) and "cannot write" in str(caught.value)
        assert isinstance(caught.value, OSError)
    assert [x.name for x in folder.iterdir() if x.suffix == ".py"] == [inside.name]


def test_the_folder_follows_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "flexla_dist"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "flexla_dist"


def test_comments_are_left_out_of_keys() -> None:
    text = 'a = "x # y"  # note  # more\n\nb = 1\n'
    assert without_comments(text) == 'a = "x # y"\n\nb = 1\n'


def test_device_functions_use_no_constant_of_a_module() -> None:
    """Triton's cache key of a kernel would depend on which functions were used before it."""
    from triton.language import constexpr

    for name in device.__all__:
        function = getattr(device, name)
        owner = sys.modules[function.__module__]
        found = [key for key, value in vars(owner).items() if isinstance(value, constexpr)]
        assert not found, f"{owner.__name__} has module constants {found}; write them in place"


# -- refusals -------------------------------------------------------------------------------------


def test_values_of_three_dims_are_refused_with_the_line() -> None:
    def chunk(x: Any, p: Any) -> dict[str, Any]:
        pairs = torch.tanh(x.q[:, None, :] + x.k[None, :, :])
        return {"q": x.q, "k": x.k, "v": x.v, "w": pairs.sum(-1).tril()}

    executor = TritonExecutor(compile_graphs(cumulative(1.0, chunk)))
    _, first = inspect.getsourcelines(chunk)
    with pytest.raises(TraceError, match="at most two dims") as caught:
        executor.source("forward", EVEN)
    message = str(caught.value)
    assert "small.chunk_mode: the triton executor does not support" in message
    assert f"test_triton_source.py:{first + 1}" in message and "torch.tanh" in message
    assert "use executor='torch'" in message


def test_an_operator_without_triton_form_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def chunk(x: Any, p: Any) -> dict[str, Any]:
        return {"q": x.q.tanh(), "k": x.k, "v": x.v, "w": (x.q @ x.k.T).tril()}

    monkeypatch.delitem(expressions._UNARY, ops.tanh)
    executor = TritonExecutor(compile_graphs(cumulative(1.0, chunk)))
    with pytest.raises(TraceError, match="operator tanh has no Triton form") as caught:
        executor.source("forward", EVEN)
    assert 'return {"q": x.q.tanh()' in str(caught.value)


def test_every_operator_has_a_triton_form() -> None:
    """But inverses, which no final graph has, and float64 exponents, the torch executor's own."""
    known = {*expressions.HANDLERS, *expressions._UNARY, *expressions._BINARY}
    missing = {
        fn for fn in OPERATORS if fn not in known and not fn.__module__.endswith("precision")
    }
    assert missing == {ops.inverse}


@pytest.mark.parametrize("sizes", [{"K": 512, "V": 64}, {"K": 257, "V": 64}])
def test_sizes_that_no_tile_holds_are_refused(sizes: dict[str, int]) -> None:
    graphs = graphs_of("gated_delta_rule")
    problem = describe_call(graphs, tokens=64, sizes=sizes)
    with pytest.raises(
        ExecutorError, match=rf"dim K is {sizes['K']}.*at most 256.*executor='torch'"
    ):
        TritonExecutor(graphs).forward(problem, problem.zero_state())


@pytest.mark.parametrize(("chunk_size", "documents"), [(8, None), (1, [0, 3, 5]), (512, None)])
def test_chunks_that_no_tile_holds_are_refused(
    chunk_size: int, documents: list[int] | None
) -> None:
    graphs = graphs_of("simple_gla")
    tokens = 600 if documents is None else documents[-1]
    problem = describe_call(graphs, tokens=tokens, cu_seqlens=documents, chunk_size=chunk_size)
    with pytest.raises(
        ExecutorError, match=rf"chunk_size is {chunk_size}.*16 to 256 tokens.*executor='torch'"
    ):
        TritonExecutor(graphs).forward(problem, problem.zero_state())


def test_float64_is_refused() -> None:
    graphs = graphs_of("simple_gla")
    problem = describe_call(graphs, tokens=64, dtype=torch.float64)
    with pytest.raises(ExecutorError, match="float64 inputs need executor='torch'"):
        TritonExecutor(graphs).forward(problem, problem.zero_state())


def test_log_scaled_states_are_refused() -> None:
    with pytest.raises(ExecutorError, match="mlstm: log-scaled states run on executor='torch'"):
        make_executor("triton", graphs_of("mlstm"))


def test_unknown_executors_are_refused() -> None:
    with pytest.raises(ExecutorError, match=r"'tritn' does not exist.*triton"):
        make_executor("tritn", graphs_of("simple_gla"))


def test_reserved_names_of_a_spec_do_not_collide() -> None:
    """Inputs and locals called like the emitter's own variables get other names."""
    spec = cumulative(1.0)

    def chunk(x: Any, p: Any) -> dict[str, Any]:
        start = x.q * 2.0
        return {"q": start, "k": x.k, "v": x.v, "w": (x.q @ x.k.T).tril(), "tile": x.v * 1.5}

    renamed = replace(spec, chunk_mode=chunk, merge_mode=lambda S, c: c.q @ S + c.w @ c.v + c.tile)
    text = TritonExecutor(compile_graphs(renamed)).source("forward", EVEN)[0]
    assert "tile_2 = " in text
    compile(text, "generated", "exec")
