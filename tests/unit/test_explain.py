"""What `explain` tells: names, passes, facts, plans with their numbers, page and command."""

import re
import sys
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from itertools import combinations
from pathlib import Path

import pytest
import torch

import flexla_dist
from flexla_dist import LinearAttentionSpec, explain
from flexla_dist.cli import main
from flexla_dist.compiler.explain.costs import H200, product_flops
from flexla_dist.compiler.explain.layers import Box, place_boxes
from flexla_dist.compiler.explain.plans import DirectionPlan, Missing, TritonPlan
from flexla_dist.compiler.explain.statements import Names
from flexla_dist.compiler.ir import operators as ops
from flexla_dist.compiler.ir.graph import Builder
from flexla_dist.compiler.pipeline import compile_graphs
from flexla_dist.errors import ArgumentError, ArgumentTypeError
from flexla_dist.spec.variants.registry import get_variant, variant_names

from .extra_specs import EXTRA_SPECS

OWN = '''"""Written plainly, so that passes have something to do."""
import torch
from flexla_dist import LinearAttentionSpec

def chunk_mode(x, p):
    b = x.g.cumsum(0)
    weights = torch.exp(b[:, None] - b[None, :]).tril()
    return {"q": x.q * b.exp()[:, None], "scores": torch.einsum("ck,dk->cd", x.q, x.k) * weights,
            "k": x.k * (b[-1] - b).exp()[:, None], "v": x.v, "decay": b[-1].exp()}

def decay_mode(S, c):
    return c.decay * S + c.k.T @ c.v

def merge_mode(S, c):
    return c.q @ S + c.scores @ c.v

SHAPES = {"q": "C K @qk", "k": "C K @qk", "v": "C V", "g": "C <=0"}
MINE = LinearAttentionSpec("mine", inputs=SHAPES, chunk_mode=chunk_mode, decay_mode=decay_mode,
                           merge_mode=merge_mode)
'''
SMALL = {"tokens": 256, "heads": 4, "K": 32}


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own_spec.py"
    path.write_text(OWN)
    return path


def plan_of(explanation: object, direction: str) -> DirectionPlan:
    triton = explanation.triton  # type: ignore[attr-defined]
    assert isinstance(triton, TritonPlan)
    return next(plan for plan in triton.directions if plan.direction == direction)


# -- text -----------------------------------------------------------------------------------------


def test_simple_gla_in_the_users_names() -> None:
    lines = str(explain("simple_gla", **SMALL)).splitlines()
    assert lines[0] == "simple_gla   B 1  T 256  H 4  HV 4  K 32  V 32  C 64  bfloat16"
    for expected in (
        r" +\d+ \| b = x.g.cumsum\(0\)",
        r" +b \[C\] += cumsum\(g\)",
        r" +k_out \[C, K\] += k \* exp\(b\[-1\] - b\)",
        r" +scores \[C, C\] += \(q_\d+ @ k.T\) \* decay_matrix\(b, b\)",
        r" +output \[C, V\] += q_in @ S \+ scores @ v",
        r"  S \[K, V\]   S <- decay \* S \+ S_hat",
        r"    M is    scalar: one factor a chunk and head for the whole state",
        r"    S_hat   k_out.T @ v",
        r"  decay_matrix .*<= 0  simple_gla.py:\d+  .*",
        r"  \d  scan +\d+ x 4 .*",
        r" +floor +.* ms .*",
    ):
        assert any(re.fullmatch(expected, line) for line in lines), expected
    assert "at its 790 TFLOP/s" in " ".join(line.strip() for line in lines)


def test_gated_delta_rule_has_a_dense_transition_and_all_kernels() -> None:
    explanation = explain("gated_delta_rule", batch=2, value_heads=8, **SMALL)
    text = str(explanation)
    assert "dense: a K x K matrix a chunk and head" in text
    assert "matrix  k_out.T @ -W" in text and "S_hat   k_out.T @ U" in text
    assert "T @ (beta * v)" in text and "in tf32x3" in text
    backward = plan_of(explanation, "backward")
    assert [s.name for s in backward.kernels][:3] == ["before_scan", "scan", "before_reverse"]
    first = backward.kernels[0]
    assert {str(move) for move in first.reads} >= {"k x2", "v", "g"}  # two heads share a key


@pytest.mark.parametrize("name", variant_names())
def test_every_variant_fits_the_width_and_has_unique_names(name: str) -> None:
    explanation = explain(name, **SMALL)
    for line in str(explanation).splitlines():
        assert len(line) <= 100 or "|" in line or " = " in line or "from " in line, line
    names = [s.name for s in explanation.graph.statements]
    assert len(set(names)) == len(names)
    assert not isinstance(explanation.triton, Missing)
    cell = compile_graphs(get_variant(name)).kernel_backward
    labels = Names(cell).of
    padded = {n for n in labels if n.op == "call_function" and n.target is ops.where}
    distinct = [shown for node, shown in labels.items() if node not in padded]
    assert len(set(distinct)) == len(distinct)


def test_kinds_of_transition_in_words() -> None:
    kinds = {name: explain(name, **SMALL).states[0].kind for name in ("linear_attn", "gla", "kda")}
    assert kinds == {"linear_attn": "identity", "gla": "rows", "kda": "dense"}
    slot_keys, slot_values = explain(EXTRA_SPECS["gsa"], **SMALL).states
    assert (slot_keys.kind, slot_values.kind) == ("columns", "rows")
    assert "each column of the state, M numbers" in slot_keys.words
    assert explain("hgrn", tokens=100, heads=1, K=48).states[0].dims == ("D",)


def test_log_scaled_states_say_why_there_are_no_kernels() -> None:
    explanation = explain(EXTRA_SPECS["mlstm"], **SMALL)
    assert isinstance(explanation.triton, Missing) and explanation.source == {}
    text = str(explanation)
    assert "log-scaled states run on executor='torch'" in text
    assert "S <- carry * S + fresh * S_hat" in text
    assert "log-scaled states run on" in explanation.html()


def test_an_exponential_that_may_overflow_is_shown_and_not_warned_of_again(
    recwarn: pytest.WarningsRecorder,
) -> None:
    spec = get_variant("simple_gla")
    risky = LinearAttentionSpec(
        name="risky",
        inputs={**spec.inputs, "g": "C"},  # not declared a decay
        scalars=dict(spec.scalars),
        chunk_mode=spec.chunk_mode,
        decay_mode=spec.decay_mode,
        merge_mode=spec.merge_mode,
    )
    explanation = explain(risky, stage="signs", **SMALL)
    assert "NOT PROVED" in str(explanation) and not recwarn.list
    assert "class='n bad'>NOT PROVED" in explanation.html()


def test_operator_is_explained_with_its_chunk_size() -> None:
    op = flexla_dist.compile(get_variant("gla"), chunk_size=32)
    explanation = explain(op, **SMALL)
    assert explanation.problem.layout.chunk_size == 32
    assert explanation.spec is op.spec


def test_source_is_shown_when_asked_for() -> None:
    explanation = explain("linear_attn", stage="state", source=True, **SMALL)
    text = str(explanation)
    assert text.count("@triton.jit") == explanation.source["forward"].count("@triton.jit") + (
        explanation.source["backward"].count("@triton.jit")
    )
    assert "Source, backward" in text and "Executor torch" not in text
    assert "@triton.jit" not in str(explain("linear_attn", **SMALL))


def test_arguments_are_checked() -> None:
    with pytest.raises(ArgumentError, match=r"no stage 'tranpose' \(did you mean 'transpose'\?\)"):
        explain("gla", stage="tranpose")
    with pytest.raises(ArgumentError, match="gla has no dim 'Q'"):
        explain("gla", sizes={"Q": 3})
    with pytest.raises(ArgumentError, match="T is 0; expected at least 1"):
        explain("gla", tokens=0)
    with pytest.raises(ArgumentTypeError, match=r"H is 2\.5; expected a whole number"):
        explain("gla", heads=2.5)  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match="got int"):
        explain(3)
    with pytest.raises(ValueError, match="did you mean 'gla'"):
        explain("glaa")


# -- bytes and FLOPs ------------------------------------------------------------------------------


def test_numbers_of_linear_attention_by_hand() -> None:
    """B 2, T 256 = 4 chunks of 64, 4 heads, K 32, V 16, bfloat16: 8 chunks, 32 programs."""
    explanation = explain("linear_attn", batch=2, tokens=256, heads=4, K=32, V=16)
    key, value, state = 2 * 256 * 4 * 32 * 2, 2 * 256 * 4 * 16 * 2, 2 * 4 * 32 * 16 * 4
    states = 8 * 4 * 32 * 16 * 2
    write, scores = 2 * 32 * 64 * 16, 2 * 64 * 32 * 64
    read, apply = 2 * 64 * 32 * 16, 2 * 64 * 64 * 16
    forward = plan_of(explanation, "forward")
    assert forward.segments == 0
    (fused,) = forward.kernels
    assert (fused.name, fused.grid) == ("scan", (2, 4))
    reads = {"q": key, "k": key, "v": value, "S entering": state}
    assert {str(m).removesuffix(" x2"): m.bytes for m in fused.reads} == reads
    assert {str(m): m.bytes for m in fused.writes} == {"output": value, "S leaving": state}
    assert fused.flops == 32 * (write + scores + read + apply)
    floor = forward.floor
    assert (floor.bytes_read, floor.bytes_written) == (2 * key + value, value)
    assert floor.flops == 32 * (write + scores + read + apply)
    assert floor.seconds(H200) == pytest.approx((2 * key + 2 * value) / 4.3e12)
    scan = plan_of(explanation, "backward").kernels[0]
    assert {str(m): m.bytes for m in scan.reads} == {"k": key, "v": value, "S entering": state}
    assert {str(m): m.bytes for m in scan.writes} == {"S of chunks": states, "S leaving": state}
    assert scan.flops == 32 * write and [p.text for p in scan.products] == ["k.T @ v"]
    backward = plan_of(explanation, "backward").floor
    assert backward.bytes_read == 2 * key + 2 * value
    assert backward.bytes_written == 2 * key + value


@pytest.mark.parametrize("name", sorted({*variant_names(), *EXTRA_SPECS}))
def test_no_plan_is_below_its_floor(name: str) -> None:
    for tokens, K in ((64, 64), (256, 64), (8192, 128)):
        explanation = explain(EXTRA_SPECS.get(name) or name, tokens=tokens, heads=2, K=K)
        if isinstance(explanation.triton, Missing):
            assert K > 64 or "log-scaled" in explanation.triton.reason
            continue
        for plan in explanation.triton.directions:
            assert plan.floor.flops <= plan.flops, (plan.direction, tokens)
            assert plan.floor.bytes_read <= plan.bytes_read, (plan.direction, tokens)
            assert plan.floor.bytes_written <= plan.bytes_written, (plan.direction, tokens)
            assert 0 < plan.floor.seconds(H200) <= plan.seconds()


def test_backward_need_not_make_again_what_forward_kept() -> None:
    """kda's scores and inverse: no product of the floor, though gradients go through them."""
    explanation = explain("kda", tokens=4096, heads=4)
    forward, backward = (plan_of(explanation, d) for d in ("forward", "backward"))
    assert [plan.plan for plan in explain("gla", **SMALL).triton.directions] == [  # type: ignore[union-attr]
        "fused",
        "unfused",
    ]
    assert any("inverse" in p.text for p in forward.floor.products)
    assert not any("inverse" in p.text for p in backward.floor.products)
    text = str(explanation)
    for plan in (forward, backward):
        assert f"\nExecutor triton, {plan.direction}, {plan.plan} ---" in text
        page = explanation.html()
        assert f"<h3>{plan.direction}, {plan.plan}: " in page


def test_floor_of_the_reference_shape() -> None:
    """16K tokens, 32 heads of 128: four tensors of 134 MB, 0.125 ms at 4.3 TB/s."""
    explanation = explain("linear_attn")
    forward = plan_of(explanation, "forward")
    assert forward.floor.bytes_read + forward.floor.bytes_written == 4 * 16384 * 32 * 128 * 2
    assert forward.floor.seconds(H200) == pytest.approx(0.125e-3, rel=0.01)
    assert forward.seconds() > forward.floor.seconds(H200)


def test_long_documents_of_one_head_are_cut_into_segments() -> None:
    forward = plan_of(explain("linear_attn", heads=1), "forward")
    assert forward.segments > 1
    first, folded, second = forward.kernels
    assert (first.kind, folded.kind, second.kind) == ("summary", "fold", "scan")
    assert first.purpose == "over every segment, from zero: S_hat"
    assert "output" in map(str, second.writes) and "output" not in map(str, first.writes)
    assert first.flops == 256 * 2 * 128 * 64 * 128 < second.flops
    assert "S_hat of segments" in map(str, folded.reads)
    assert "S entering" in map(str, folded.writes) and "S entering" in map(str, second.reads)
    assert not any("add" in step.purpose for step in forward.steps if step.kind == "torch")


def test_flops_of_operators() -> None:
    builder = Builder()
    a, b = (
        builder.placeholder("a", ("C", "K"), "input"),
        builder.placeholder("b", ("K", "V"), "state"),
    )
    square = builder.placeholder("s", ("C", "C"), "input")
    size = {"C": 64, "K": 32, "V": 16}.__getitem__
    product = builder.matmul(a, b)
    inverse = builder.emit(ops.unit_tril_inverse, square)
    scores = builder.emit(ops.decay_scores, a, a, a, a)
    assert product_flops(product, size) == 2 * 64 * 32 * 16
    assert product_flops(scores, size) == 2 * 64 * 64 * 32
    blocks = 15 * 16 * 64 * 2  # substitution of four blocks, one column of 16 at a time
    merges = 2 * 2 * (2 * 16**3) + 2 * (2 * 32**3)  # two pairs of 16, one pair of 32
    assert product_flops(inverse, size) == blocks + merges
    assert product_flops(builder.emit(ops.exp, a), size) == 0


def test_dtype_decides_policy_and_refusals_are_told() -> None:
    single = plan_of(explain("linear_attn", dtype=torch.float32, **SMALL), "forward")
    half = plan_of(explain("linear_attn", **SMALL), "forward")
    assert {p.policy for s in single.kernels for p in s.products} == {"tf32x3"}
    assert single.floor.bytes_read == 2 * half.floor.bytes_read
    refused = explain("linear_attn", dtype=torch.float64, **SMALL).triton
    assert isinstance(refused, Missing) and "float64" in refused.reason
    wide = explain("linear_attn", tokens=64, heads=1, K=512).triton
    assert isinstance(wide, Missing) and "at most 256" in wide.reason


def test_packed_documents_read_offsets() -> None:
    explanation = explain("linear_attn", cu_seqlens=[0, 100, 130, 256], **SMALL)
    assert "3 documents" in str(explanation)
    scan = plan_of(explanation, "forward").kernels[0]
    assert next(m.bytes for m in scan.reads if m.name == "offsets") == 2 * 4 * 4
    assert plan_of(explanation, "forward").kernels[-1].grid[0] == 3  # documents
    assert plan_of(explanation, "backward").kernels[-1].grid[0] == 2 + 1 + 2  # chunks


# -- passes, command ------------------------------------------------------------------------------


def test_own_spec_through_the_command(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(own), "--shape", "1,256,4,32,16"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("mine   B 1  T 256  H 4  HV 4  K 32  V 16")
    assert "masked decay x1" in text
    assert "    8 | weights" not in text and "7 | weights = torch.exp" in text
    assert "- weights [C, C] = tril(exp(b[:, None] - b[None, :]))" in text
    assert "+ weights [C, C] = decay_matrix(b, b)" in text
    assert main(["explain", f"{own}:MINE", "--pass", "domain-operators"]) == 0
    text = capsys.readouterr().out
    assert "Before domain-operators" in text and "After domain-operators" in text
    assert "Executor" not in text


def test_command_writes_a_page_and_refuses_what_does_not_fit(
    own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    assert main(["explain", f"{own}:MINE", "--shape", "1,64,2,16", "--html", str(page)]) == 0
    assert capsys.readouterr().out == f"wrote {page}\n"
    assert page.read_text().startswith("<!DOCTYPE html>")
    for arguments, message in (
        ([f"{own}:MIN"], "did you mean 'MINE'"),
        ([str(tmp_path / "none.py")], "there is no file"),
        (["simple_glu"], "did you mean 'simple_gla'"),
        (["own_spec:MINE"], "'own_spec:MINE' is neither a variant nor FILE.py:SPEC; give the file"),
        (["gla", "--shape", "1,x"], "'x' in --shape B,T,H,K,V is no whole number"),
        (["gla", "--shape", "1,2,3,4,5,6"], "at most five"),
        (["gla", "--size", "Q=4"], "gla has no dim 'Q'"),
        (["gla", "--chunk-size", "48"], "chunk_size must be a power of two, got 48"),
        (["gla", "--chunk-size", "0"], "chunk_size must be a power of two, got 0"),
        (["gla", "--shape", "1,64,2,16", "--size", "K=32"], "--shape says 16 and --size says 32"),
        (["gla", "--html", str(tmp_path / "none" / "a.html")], "there is no folder"),
        (["gla", "--html", str(tmp_path)], "that is a folder"),
        (["gla", "--value-heads", "48"], "which must divide the 48 heads"),
    ):
        assert main(["explain", *arguments]) == 2
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["explain", "gla", "--chunk", "64"])
    assert "unrecognized arguments: --chunk" in capsys.readouterr().err
    assert main(["explain", "gla", "--size", "K=32", "--pass", "state"]) == 0
    assert "K 32" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("import torch\nimport nosuchmodule\n", "2: ModuleNotFoundError: No module named"),
        ("def f():\n    1 / 0\n\nf()\n", "2: ZeroDivisionError: division by zero"),
        ("x = (\n", "1: SyntaxError: '(' was never closed"),
        ("import sys\nsys.exit('no')\n", "2: SystemExit: no"),
    ],
)
def test_a_file_that_cannot_be_imported_is_one_line(
    text: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "broken_spec.py"
    path.write_text(text)
    assert main(["explain", f"{path}:spec"]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"flexla-dist explain: {path}:{line}")
    assert "broken_spec" not in sys.modules


def test_help_says_that_files_are_executed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["explain", "--help"])
    assert "the file is executed" in " ".join(capsys.readouterr().out.split())


# -- page -----------------------------------------------------------------------------------------


class Balanced(HTMLParser):
    """Fails where tags do not close in order; collects what the page refers to."""

    VOID = frozenset({"meta", "br", "input"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: set[str] = set()
        self.links: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = dict(attrs)
        if known.get("id"):
            assert known["id"] not in self.ids, f"two elements are called {known['id']}"
            self.ids.add(str(known["id"]))
        for name in ("href", "src"):
            if name in known:
                self.links.add(str(known[name]))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("name", ["simple_gla", "gated_delta_rule", "mine"])
def test_page_is_well_formed_and_self_contained(name: str, own: Path) -> None:
    namespace: dict[str, object] = {}
    exec(compile(OWN, str(own), "exec"), namespace)
    explanation = explain(namespace["MINE"] if name == "mine" else name, **SMALL)
    page = explanation.html()
    parser = Balanced()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    assert all(link.startswith("#") and link[1:] in parser.ids for link in parser.links)
    assert set(re.findall(r"https?://[^\"'\s<]*", page)) == {"http://www.w3.org/2000/svg"}
    pictures = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(pictures) >= 5  # traced, final, backward graphs; two plans
    for picture in pictures:
        root = ElementTree.fromstring(picture)
        boxes = {g.get("data-key") for g in root.iter("{http://www.w3.org/2000/svg}g")}
        edges = list(root.iter("{http://www.w3.org/2000/svg}path"))
        assert boxes and {e.get("data-from") for e in edges} <= boxes
    assert "<script src" not in page and "@import" not in page


def test_boxes_do_not_overlap_and_edges_go_down() -> None:
    generator = torch.Generator().manual_seed(0)
    keys = [f"n{i}" for i in range(30)]
    widths = (torch.rand(30, generator=generator) * 150 + 30).tolist()
    boxes = [
        Box(key, width, 30.0, late=i < 4)
        for i, (key, width) in enumerate(zip(keys, widths, strict=True))
    ]
    pairs = torch.randint(0, 30, (60, 2), generator=generator).tolist()
    edges = [(keys[min(a, b)], keys[max(a, b)]) for a, b in pairs if a != b]
    picture = place_boxes(boxes, edges)
    assert picture.paths == place_boxes(boxes, edges).paths
    for one, other in combinations(boxes, 2):
        (x0, y0), (x1, y1) = picture.centres[one.key], picture.centres[other.key]
        apart = abs(x0 - x1) >= (one.width + other.width) / 2
        assert apart or abs(y0 - y1) >= (one.height + other.height) / 2
    for (a, b), points in picture.paths.items():
        assert picture.centres[a][1] < picture.centres[b][1]
        assert [y for _, y in points] == sorted(y for _, y in points)
    for box in boxes:
        x, y = picture.centres[box.key]
        assert box.width / 2 <= x <= picture.width - box.width / 2 and 0 < y < picture.height
