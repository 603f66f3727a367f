"""The program `flexla-dist generate`: text from the model of a checkpoint."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from flexla_dist.train import checkpoint
from flexla_dist.train.program import sample_text


def main(argv: Sequence[str] | None = None) -> int:
    """Print the prompt and its continuation."""
    parser = argparse.ArgumentParser(
        prog="flexla-dist generate",
        allow_abbrev=False,
        description="Continue a text with the model of a checkpoint.",
    )
    parser.add_argument("checkpoint", type=Path, help="a run folder or one of its checkpoints")
    parser.add_argument("--prompt", default="def ", help="text to continue (default: 'def ')")
    parser.add_argument("--tokens", type=int, default=400, help="bytes to generate (default: 400)")
    parser.add_argument(
        "--temperature", type=float, default=0.7, help="0 takes the likeliest byte (default: 0.7)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the sampling (default: 0)")
    parser.add_argument("--device", default="cpu", help="where to compute (default: cpu)")
    args = parser.parse_args(argv)
    try:
        folder = checkpoint.find(args.checkpoint)
        text = sample_text(
            folder, args.prompt, args.tokens, args.temperature, args.seed, args.device
        )
    except ValueError as error:
        print(f"flexla-dist generate: {error}", file=sys.stderr)
        return 2
    print(text)
    return 0
