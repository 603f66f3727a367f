"""The command `flexla-dist`.

A subcommand is one line of `COMMANDS`; its module is imported only when it is asked for, and has a
`main(argv) -> exit status` that understands --help.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

from flexla_dist.shapes import nearest


@dataclass(frozen=True)
class Command:
    """A subcommand: the module whose `main` runs it, and a line of help."""

    module: str
    help: str


COMMANDS: dict[str, Command] = {
    "train": Command("flexla_dist.train.program", "train a language model, sequences over ranks"),
    "generate": Command("flexla_dist.train.sample", "continue a text with a trained model"),
    "explain": Command(
        "flexla_dist.compiler.explain.program", "show graphs, plans and kernels of a variant"
    ),
    "bench": Command("flexla_dist.bench.program", "time a variant on a GPU, tune its kernels"),
    "doctor": Command("flexla_dist.doctor", "say what works on this machine and what is missing"),
}


def usage() -> str:
    """The list of subcommands."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: flexla-dist COMMAND [ARGUMENTS]",
            "",
            *lines,
            "",
            "flexla-dist COMMAND --help tells more; flexla-dist --version tells the version.",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    name = words[0] if words else "--help"
    if name in ("--help", "-h"):
        print(usage())
        return 0
    if name == "--version":
        from flexla_dist import __version__

        print(f"flexla_dist {__version__}")
        return 0
    command = COMMANDS.get(name)
    if command is None:
        print(f"flexla-dist: unknown command {name!r}{nearest(name, COMMANDS)}\n", file=sys.stderr)
        print(usage(), file=sys.stderr)
        return 2
    return import_module(command.module).main(words[1:])


if __name__ == "__main__":
    sys.exit(main())
