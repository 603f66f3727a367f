"""The program `flexla-dist explain`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from flexla_dist.compiler.explain.arguments import (
    DTYPES,
    Usage,
    parse_shape,
    parse_sizes,
    refuse_twice,
)
from flexla_dist.compiler.explain.explanation import SECTIONS, explain
from flexla_dist.compiler.explain.load import load_spec
from flexla_dist.errors import FlexlaError
from flexla_dist.spec.variants.registry import variant_names

DEFAULT_SHAPE = "1,16384,32,128,128"
DESCRIPTION = """What the compiler makes of a variant for calls of a shape: the graph in your names
and beside your lines, what each pass changed, what M is, the plans of both executors, and for every
kernel its tiles, bytes and FLOPs against the fused floor and an H200. No kernel is run and no GPU
is needed."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the explanation; 2 for a spec or settings that do not fit."""
    args = _parser().parse_args(argv)
    try:
        shape = parse_shape(args.shape or DEFAULT_SHAPE)
        sizes = parse_sizes(args.size)
        if args.shape is not None:
            refuse_twice(shape, sizes)
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
            tuned=args.database,
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
        "--database",
        metavar="FILE",
        type=Path,
        help="a tuning database to use (default: tuned/<arch>.json in the package's cache folder, "
        "then that of the package)",
    )
    parser.add_argument(
        "--html", metavar="PAGE.html", type=Path, help="write one self-contained page instead"
    )
    return parser


def _check_folder(page: Path | None) -> None:
    if page is not None and page.is_dir():
        raise Usage(f"--html {page}: that is a folder; expected the name of the page's file")
    if page is not None and not page.parent.is_dir():
        raise Usage(f"--html {page}: there is no folder {page.parent}; make it first")
