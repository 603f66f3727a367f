"""A compiled operator on sharded sequences, for code that has no layer."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from flexla_dist.errors import ArgumentTypeError
from flexla_dist.parallel.eager import eager
from flexla_dist.parallel.engine import ExchangePlan, HeadGroups
from flexla_dist.parallel.mesh import MeshOrGroup, sequence_group
from flexla_dist.parallel.runtime import DEFAULT_TIMEOUT
from flexla_dist.parallel.site import Site, State
from flexla_dist.shapes import nearest


class SequenceParallelOp:
    """A compiled operator whose tokens are sharded over a group; called like the operator itself.

    Every rank calls it with its own tokens [B, T_local, ...]; shards and documents come from the
    `sequence_context`. `initial_state`: states [N, HV, ...] of all documents (batch rows when
    unpacked), the same on every rank.

    `output_final_state`: False gives None. True or "owner" gives states [N, HV, ...] in which a
    document's row is filled on the rank that owns its last token (unpacked: the last rank), and is
    zero on the others. "broadcast" gives all rows on every rank.

    op: a `LinearAttentionOp`. mesh, group: exactly one, the ranks over which the sequence is cut.
    strategy: "auto", "chain", "log_scan", "hierarchical" or "all_gather". node_size: consecutive
    ranks that share a node. timeout: seconds that a rank waits for another at most. backend:
    "auto", "host" or "device"; groups: of heads; see `SequenceParallelLA`.
    """

    def __init__(
        self,
        op: Any,
        mesh: MeshOrGroup | None = None,
        *,
        group: ProcessGroup | None = None,
        strategy: str = "auto",
        node_size: int | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        backend: str = "auto",
        groups: HeadGroups = None,
    ) -> None:
        self.op = op
        chosen = sequence_group(mesh, group)
        name = f"operator {op.spec.name}"
        self._site = Site(chosen, name, strategy, node_size, timeout, backend, groups)

    @property
    def last_plan(self) -> ExchangePlan | None:
        """How the last call's states crossed the ranks; None before one did."""
        return self._site.last_plan

    @eager
    def __call__(
        self,
        *,
        initial_state: State | None = None,
        output_final_state: bool | str = False,
        executor: str | None = None,
        **arguments: Any,
    ) -> tuple[Tensor, State | None]:
        """(output [B, T_local, HV, V], final state or None); arguments as of the operator."""
        site = self._site
        with site.guard():
            inputs, params, scalars = _sort(self.op.spec, arguments)
            exchange = site.open(next(iter(inputs.values())))
            found = exchange.attend(
                self.op,
                inputs,
                params,
                scalars,
                initial_state=initial_state,
                output_final_state=output_final_state,  # type: ignore[arg-type]
                executor=executor,
            )
        return found if isinstance(found, tuple) else (found, None)


def _sort(
    spec: Any, arguments: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, float]]:
    """Inputs, parameters, scalars of a call; ArgumentTypeError for unknown or missing ones."""
    known = (*spec.inputs, *spec.params, *spec.scalars)
    for name in arguments:
        if name not in known:
            raise ArgumentTypeError(
                f"{spec.name}: unexpected argument {name!r}{nearest(name, known)}; expected "
                f"{', '.join(known)}"
            )
    for name in (*spec.inputs, *spec.params):
        if not isinstance(arguments.get(name), Tensor):
            raise ArgumentTypeError(f"{spec.name}: {name!r} must be given, as a tensor")
    inputs = {name: arguments[name] for name in spec.inputs}
    params = {name: arguments[name] for name in spec.params}
    return inputs, params, {name: arguments[name] for name in spec.scalars if name in arguments}
