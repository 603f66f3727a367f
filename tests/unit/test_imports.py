"""Who may import whom, what imports without Triton, and how long files may be."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import flexla_dist

PACKAGE = Path(__file__).resolve().parents[2] / "flexla_dist"
GLOSSARY = {"errors", "shapes", ""}
KERNELS = GLOSSARY | {"assembler", "generated"}
MAY_IMPORT = {
    "spec": GLOSSARY | {"spec"},
    "compiler": KERNELS | {"spec", "compiler"},
    "ops": GLOSSARY | {"spec", "compiler", "ops"},
    "comm": KERNELS | {"comm"},
    "parallel": GLOSSARY | {"spec", "compiler", "ops", "comm", "parallel"},
    "layers": GLOSSARY | {"spec", "compiler", "ops", "comm", "parallel", "layers"},
    "train": GLOSSARY | {"spec", "compiler", "ops", "comm", "parallel", "layers", "train"},
    "testing": GLOSSARY | {"spec", "compiler", "ops", "comm", "parallel", "layers", "testing"},
    "bench": GLOSSARY | {"spec", "compiler", "ops", "testing", "bench"},
    "assembler": {"errors"},
    "generated": {"errors"},
    "errors": set(),
    "shapes": set(),
}
FILES = sorted(PACKAGE.rglob("*.py"))


def part_of(path: Path) -> str:
    """The part of the package that a file belongs to."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported_parts(path: Path) -> set[str]:
    """Parts of the package, such as `spec`, that a file imports; `` is the package itself."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import; write the whole name"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            root, _, rest = name.partition(".")
            if root == "flexla_dist":
                part = rest.split(".")[0]
                known = part in MAY_IMPORT or part in ("cli", "doctor")
                found.add(part if known else "")
    return found


@pytest.mark.parametrize("part", MAY_IMPORT)
def test_import_direction(part: str) -> None:
    inside = [path for path in FILES if part_of(path) == part]
    assert inside, f"flexla_dist/{part} has no files"
    for path in inside:
        wrong = imported_parts(path) - MAY_IMPORT[part]
        allowed = ", ".join(sorted(MAY_IMPORT[part] - {""})) or "nothing of the package"
        assert not wrong, f"{path} imports {sorted(wrong)}, but {part} may import {allowed}"


def test_every_part_has_a_rule() -> None:
    parts = {part_of(path) for path in FILES}
    assert parts - set(MAY_IMPORT) == {"__init__", "cli", "doctor"}


BLOCKED = """
import builtins, sys
original = builtins.__import__
def refuse(name, *args, **kwargs):
    if name.split(".")[0] in {blocked!r}:
        raise ImportError(name + " is blocked", name=name)
    return original(name, *args, **kwargs)
builtins.__import__ = refuse
import torch
assert not any(name.split(".")[0] in {blocked!r} for name in sys.modules), "blocked too late"
{body}
"""


def run_blocked(body: str, *blocked: str) -> None:
    source = BLOCKED.format(blocked=blocked, body=body)
    result = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("module", ["flexla_dist", "flexla_dist.spec", "flexla_dist.layers"])
def test_imports_without_triton(module: str) -> None:
    run_blocked(f"import {module}", "triton")


def test_layer_runs_without_triton_or_training_packages() -> None:
    body = """
from flexla_dist.layers import LayerConfig, LinearAttentionLayer
layer = LinearAttentionLayer(LayerConfig(width=16, heads=1, key_dim=8, value_dim=8))
layer(torch.randn(1, 5, 16)).sum().backward()
"""
    run_blocked(body, "triton", "jsonargparse", "rich", "tensorboard")


PUBLIC_NAMES = """
import flexla_dist
names = set(flexla_dist.__all__)
assert names <= set(dir(flexla_dist)), names - set(dir(flexla_dist))
for name in sorted(names):
    assert getattr(flexla_dist, name) is not None
assert flexla_dist.functional is flexla_dist.spec.functional
assert callable(flexla_dist.ops.chunk_gla) and callable(flexla_dist.layers.LinearAttentionLayer)
assert {"SequenceParallelLA", "compile", "explain", "sequence_context", "sequence_loss"} <= names
try:
    flexla_dist.sequence_contxt
except AttributeError as error:
    assert "sequence_contxt" in str(error)
else:
    raise AssertionError("a misspelt name must be an AttributeError")

explained = flexla_dist.explain("gla", tokens=100, heads=2, K=16)
for shown in (str(explained), explained.html()):
    assert "triton is not installed" in shown, shown
assert "S <- decay * S + S_hat" in str(explained)
"""


def test_public_names_and_explain_without_triton_or_training_packages() -> None:
    run_blocked(PUBLIC_NAMES, "triton", "jsonargparse", "rich", "tensorboard")


def test_package_itself_imports_nothing_heavy() -> None:
    code = "import sys, flexla_dist; print(sorted({'torch', 'triton'} & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    assert result.stdout.strip() == "[]", result.stderr


def test_type_checkers_see_every_public_name() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    blocks = [x for x in tree.body if isinstance(x, ast.If)]
    imports = [x for b in blocks for x in ast.walk(b) if isinstance(x, ast.ImportFrom)]
    seen = {alias.name for x in imports for alias in x.names}
    assert seen == set(flexla_dist.__all__) - {"__version__"}


def test_files_can_be_read_in_one_sitting() -> None:
    lengths = {str(p.relative_to(PACKAGE)): len(p.read_text().splitlines()) for p in FILES}
    assert not {name: lines for name, lines in lengths.items() if lines > 600}, "make it two files"
    assert not [name for name in lengths if name.endswith("utils.py")], "name it after its content"
