"""The tables of `flexla-dist doctor --strategies`: of this group, or of a described cluster."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

from flexla_dist.comm.chooser.choose import AUTO, choose, engines_of
from flexla_dist.comm.chooser.cost import STRATEGIES
from flexla_dist.comm.chooser.links import ASSUMED_LINKS, DEVICE, ENGINES, HOST
from flexla_dist.comm.chooser.payload import KINDS, Payload
from flexla_dist.comm.chooser.presets import PRESETS, described_settings, get_preset
from flexla_dist.comm.chooser.report import report
from flexla_dist.comm.chooser.setting import Setting
from flexla_dist.errors import ShardingError

DEFAULT_PRESET = "h200-nvlink-8"
DEFAULT_HEADS = 32


def main(words: Sequence[str]) -> int:
    """Print the tables; 2 for what does not fit together."""
    args = make_parser().parse_args(words)
    try:
        payload = _payload(args)
        started = {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys()
        if started and args.preset is None:
            _of_this_group(args, payload)
        else:
            _of_a_preset(args, payload)
    except ShardingError as error:
        print(f"flexla-dist doctor: {error}", file=sys.stderr)
        return 2
    return 0


def make_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="flexla-dist doctor --strategies",
        allow_abbrev=False,
        description="Topology, links and the predicted time of every strategy. Under torchrun of "
        "its group of ranks, with measured links; otherwise, or with --preset, of a described "
        "cluster. No GPU is needed.",
    )
    add = parser.add_argument
    add("--strategies", action="store_true", help="these tables")
    described = "; ".join(f"{name}: {preset.about}" for name, preset in PRESETS.items())
    add("--preset", choices=sorted(PRESETS), help=f"the cluster to describe. {described}")
    add("--ranks", type=_whole, metavar="P", help="ranks of the described group, default a node")
    add("--node-size", type=_whole, metavar="N", help="consecutive ranks of a node")
    add("--state-mib", type=_positive, metavar="X", help="a rank's state in MiB")
    add("--heads", type=_whole, help=f"batch x heads instead, default {DEFAULT_HEADS}")
    add("--key-dim", type=_whole, default=128, metavar="K", help="key width, default 128")
    add("--value-dim", type=_whole, default=128, metavar="V", help="value width, default 128")
    add("--kind", choices=KINDS, default="scalar", help="kind of M, default scalar")
    add(
        "--work-ms",
        type=_not_negative,
        default=0.0,
        metavar="W",
        help="milliseconds of work that needs no entering state, default 0",
    )
    add("--engine", choices=(AUTO, *ENGINES), default=AUTO, help="force an engine")
    add("--strategy", choices=(AUTO, *STRATEGIES), default=AUTO, help="force a strategy")
    add("--measure-again", action="store_true", help="under torchrun: ignore kept measurements")
    return parser


def _of_a_preset(args: argparse.Namespace, payload: Payload) -> None:
    preset = get_preset(args.preset or DEFAULT_PRESET)
    ranks = preset.node.size if args.ranks is None else args.ranks
    topology = preset.topology(ranks, args.node_size)
    settings = described_settings(preset, topology, payload, args.work_ms / 1e3)
    print(f"described cluster: {preset.about}")
    _print(settings, args)


def _print(settings: dict[str, Setting], args: argparse.Namespace) -> None:
    choice = choose(settings, strategy=args.strategy, engine=args.engine)
    print(report(settings, choice), flush=True)


def _of_this_group(args: argparse.Namespace, payload: Payload) -> None:
    """Survey the ranks that torchrun started; rank 0 prints."""
    import torch
    import torch.distributed as dist

    from flexla_dist.comm.exchange import StateExchanger

    if args.ranks is not None:
        raise ShardingError(
            f"--ranks {args.ranks} under torchrun, which has started {os.environ['WORLD_SIZE']}; "
            "give --preset to describe another group"
        )
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    try:
        exchanger = StateExchanger(None, node_size=args.node_size)
        survey = exchanger.survey(device, fresh=args.measure_again)
        setting = survey.setting(payload, args.work_ms / 1e3)
        settings = {HOST: setting}
        if DEVICE in engines_of(survey.topology):
            links = {name: ASSUMED_LINKS[DEVICE, name] for name in setting.links}
            settings[DEVICE] = replace(setting, links=links, ring=False)
        if exchanger.rank == 0:
            _print(settings, args)
        exchanger.flush()
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _payload(args: argparse.Namespace) -> Payload:
    """The element that the options describe."""
    if args.state_mib is not None and args.heads is not None:
        raise ShardingError(
            f"got --state-mib {args.state_mib:g} and --heads {args.heads}, expected one of them"
        )
    heads = args.heads or DEFAULT_HEADS
    if args.state_mib is not None:
        heads = round(args.state_mib * 2**20 / (4 * args.key_dim * args.value_dim))
        if heads < 1:
            least = 4 * args.key_dim * args.value_dim / 2**20
            raise ShardingError(
                f"--state-mib {args.state_mib:g} is less than one head of {args.key_dim} x "
                f"{args.value_dim}, expected at least {least:g}"
            )
    return Payload.of_heads(args.kind, heads, args.key_dim, args.value_dim)


def _number(text: str, read: Callable[[str], float], least: float, what: str) -> float:
    try:
        value = read(text)
    except ValueError:
        value = math.nan
    if not (least <= value < math.inf):
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return value


def _whole(text: str) -> int:
    return int(_number(text, int, 1, "a whole number of at least 1"))


def _positive(text: str) -> float:
    return _number(text, float, 1e-6, "a positive number")


def _not_negative(text: str) -> float:
    return _number(text, float, 0.0, "a number of at least 0")
