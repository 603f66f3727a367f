"""The program `flexla-dist explain`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from flexla_dist.compiler.explain.explanation import SECTIONS, explain
from flexla_dist.compiler.explain.load import load_spec
from flexla_dist.errors import FlexlaError
from flexla_dist.spec.variants.registry import variant_names

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
DEFAULT_SHAPE = "1,16384,32,128,128"
DESCRIPTION = """What the compiler makes of a variant for calls of a shape: the graph in your names
and beside your lines, what each pass changed, what M is, the plans of both executors, and for every
kernel its tiles, bytes and FLOPs against the fused floor and an H200. No kernel is run and no GPU
is needed."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the explanation; 2 for a spec or settings that do not fit."""
    args = _parser().parse_args(argv)
    try:
        shape = _shape(args.shape or DEFAULT_SHAPE)
        sizes = _sizes(args.size)
        if args.shape is not None:
            _refuse_twice(shape, sizes)
        _check_folder(args.html)
        explanation = explain(
            load_spec(args.spec),
            batch=shape.get("B", 1),
            tokens=shape.get("T", 16384),
            heads=shape.get("H", 32),
            K=shape.get("K", 128),
            V=shape.get("V"),
            value_heads=args.value_heads,
            sizes=sizes,
            dtype=DTYPES[args.dtype],
            chunk_size=args.chunk_size,
            stage=args.stage,
            source=args.source,
        )
        if args.html is None:
            print(explanation)
        else:
            print(f"wrote {explanation.write_html(args.html)}")
    except (FlexlaError, OSError) as error:
        print(f"flexla-dist explain: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `| head`
        sys.stderr.close()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="flexla-dist explain",
        allow_abbrev=False,
        description=DESCRIPTION,
        epilog=f"variants: {', '.join(variant_names())}",
    )
    parser.add_argument(
        "spec",
        metavar="VARIANT|FILE.py:SPEC",
        help="a variant of the package, or your own spec; the file is executed (imported)",
    )
    parser.add_argument(
        "--shape",
        metavar="B,T,H,K,V",
        help=f"sizes of the call; later ones may be left out (default: {DEFAULT_SHAPE})",
    )
    parser.add_argument(
        "--value-heads", metavar="HV", type=int, help="heads of v and the state (default: H)"
    )
    parser.add_argument(
        "--size",
        metavar="DIM=N",
        action="append",
        default=[],
        help="size of another dim of the spec, once for each (default: that of K)",
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, default="bf16", help="of the inputs (default: bf16)"
    )
    parser.add_argument("--chunk-size", metavar="C", type=int, help="tokens of a chunk")
    parser.add_argument(
        "--pass",
        metavar="NAME",
        dest="stage",
        default="all",
        help="only this pass, its graphs before and after in full, or only a section: "
        + ", ".join(SECTIONS),
    )
    parser.add_argument("--source", action="store_true", help="print the generated kernels too")
    parser.add_argument(
        "--html", metavar="PAGE.html", type=Path, help="write one self-contained page instead"
    )
    return parser


def _shape(text: str) -> dict[str, int]:
    names = ("B", "T", "H", "K", "V")
    numbers = [_number(word, "--shape B,T,H,K,V") for word in text.split(",")]
    if len(numbers) > len(names):
        raise _Usage(f"--shape has {len(numbers)} numbers; expected at most five: B,T,H,K,V")
    return dict(zip(names, numbers, strict=False))


def _sizes(words: Sequence[str]) -> dict[str, int]:
    out = {}
    for word in words:
        name, _, number = word.partition("=")
        out[name.strip()] = _number(number, f"--size {word}, which is DIM=N")
    return out


def _refuse_twice(shape: dict[str, int], sizes: dict[str, int]) -> None:
    for name in sizes:
        if name in shape:
            raise _Usage(
                f"{name} is given twice: --shape says {shape[name]} and --size says {sizes[name]}; "
                "leave one out"
            )


def _check_folder(page: Path | None) -> None:
    if page is not None and page.is_dir():
        raise _Usage(f"--html {page}: that is a folder; expected the name of the page's file")
    if page is not None and not page.parent.is_dir():
        raise _Usage(f"--html {page}: there is no folder {page.parent}; make it first")


def _number(word: str, where: str) -> int:
    try:
        return int(word)
    except ValueError:
        raise _Usage(f"{word!r} in {where} is no whole number") from None


class _Usage(FlexlaError, ValueError):
    """A word of the command line does not fit."""
