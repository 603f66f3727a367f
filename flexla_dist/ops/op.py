"""A compiled spec as a callable operator.

Contract: `compile(spec)` returns a `LinearAttentionOp`; calling it runs forward, and backward
through autograd, on the executor asked for. Nothing falls back: an executor that cannot run is an
error, and `last_plan` says what ran.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flexla_dist.compiler.executor.bind import Binder, outline, read_offsets
from flexla_dist.compiler.executor.layout import check_chunk_size
from flexla_dist.compiler.executor.problem import Family, Outline, Problem
from flexla_dist.compiler.executor.registry import default_executor, make_executor
from flexla_dist.compiler.pipeline import Graphs, compile_graphs
from flexla_dist.errors import ArgumentError, ArgumentTypeError, NumericsWarning
from flexla_dist.ops import custom_ops
from flexla_dist.ops.autograd import Call, Executor, attend
from flexla_dist.ops.check import check_spec
from flexla_dist.ops.known_calls import KnownCall, KnownCalls, key_of, repeats
from flexla_dist.ops.plan import Plan, Ran, plan_of
from flexla_dist.shapes import nearest
from flexla_dist.spec.spec import LinearAttentionSpec

State = Tensor | tuple[Tensor, ...]


class LinearAttentionOp:
    """An operator compiled from a `LinearAttentionSpec`.

    Calling it computes, for every document and head, `S_n = decay_mode(S_{n-1}, chunk_n)` and
    `o_n = merge_mode(S_{n-1}, chunk_n)` over chunks of the sequence. `last_plan` tells what the
    last call ran, `last_backward_plan` what the last backward pass did; None before one.
    """

    def __init__(
        self,
        graphs: Graphs,
        executor: str | None,
        chunk_size: int | None,
        tuned: Path | None = None,
    ):
        self.graphs = graphs
        self.tuned = tuned
        self.spec = graphs.spec
        self.chunk_size = chunk_size
        self.last_plan: Plan | None = None
        self.ran = Ran()
        self._noted: Family | None = None  # what `last_plan` is of
        self._default = executor
        self._executors: dict[str, Executor] = {}
        self._bind = Binder(self.spec, chunk_size)
        self.known_calls = KnownCalls()
        if executor is not None:
            self.executor(executor)
        self.key = custom_ops.register(self, executor)

    def __copy__(self) -> LinearAttentionOp:
        """Itself: copies of a module share the operator, which holds no parameters."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> LinearAttentionOp:
        """Itself."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Spec and options: it is compiled again where it is loaded."""
        return _load, (self.spec, self._default, self.chunk_size, self.tuned)

    def __repr__(self) -> str:
        kinds = ", ".join(f"{t.state}: {t.kind}" for t in self.graphs.transitions.values())
        return f"LinearAttentionOp({self.spec.name}, M = {{{kinds}}})"

    def executor(
        self,
        name: str | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> Executor:
        """The executor called `name`, else the operator's default, else that of device and dtype.

        Raises ExecutorError for an unknown name, listing those that exist.
        """
        if name is None:
            name = self._default or default_executor(self.spec, device, dtype)
        if name not in self._executors:
            self._executors[name] = make_executor(name, self.graphs, self.tuned)
        return self._executors[name]

    def bind(
        self,
        inputs: Mapping[str, Tensor],
        params: Mapping[str, Tensor] | None = None,
        scalars: Mapping[str, float] | None = None,
        cu_seqlens: Tensor | Sequence[int] | None = None,
    ) -> Problem:
        """Check arguments and describe the call; see `flexla_dist.compiler.executor.bind.bind`."""
        return self._bind(inputs, params or {}, scalars or {}, cu_seqlens)

    def outline(
        self,
        inputs: Mapping[str, Tensor],
        params: Mapping[str, Tensor],
        documents: int | None = None,
    ) -> Outline:
        """Check shapes alone; `documents` is the N of a packed call."""
        return outline(self.spec, inputs, params, documents, self.chunk_size)

    def note_plan(self, executor: Executor, problem: Problem) -> None:
        """Set `last_plan` to what is being run."""
        last = self.last_plan
        if last is not None and self._noted is problem.family and last.executor == executor.name:
            return
        self._noted = problem.family
        self.last_plan = plan_of(executor, problem)

    @property
    def last_backward_plan(self) -> Plan | None:
        """What the last backward pass ran, of whichever call it was; None before the first."""
        return self.ran.backward

    def __call__(
        self,
        *unnamed: Any,
        initial_state: State | None = None,
        output_final_state: bool = False,
        cu_seqlens: Tensor | Sequence[int] | None = None,
        executor: str | None = None,
        **arguments: Any,
    ) -> tuple[Tensor, State | None]:
        """Run the operator.

        The dtypes of the tensors decide what is computed, inside autocast too: nothing is cast.
        float32 may stand beside bfloat16 or float16, for gates and parameters above all; float64
        beside anything else and bfloat16 beside float16 are refused.

        Args:
            initial_state: [N, HV, *dims] a state, a tuple in declared order for several (log-scaled
                specs have m [N, HV] last); None is zeros.
            output_final_state: also return the states after each document.
            cu_seqlens: [N + 1] offsets of documents packed along T; needs B = 1. On the CPU or a
                list: its numbers are read, which waits for the device if they are there.
            executor: name of the executor of this call.
            arguments: the inputs [B, T, H, ...], parameters [HV, ...] and scalars of the spec, by
                name.

        Returns:
            Output [B, T, HV, ...] in the dtype of the input that shares its last dim (v), and the
            final state (None unless asked for), float32, or float64 with float64 arguments.

        Raises:
            ArgumentError, ArgumentTypeError: names, shapes, heads, dtypes or offsets do not fit.
        """
        if unnamed:
            spec = self.spec
            raise ArgumentTypeError(
                f"{spec.name}: {len(unnamed)} argument(s) without a name; give all by name: "
                f"op({', '.join(f'{n}={n}' for n in (*spec.inputs, *spec.params))})"
            )
        output, exit_state = self._run(arguments, initial_state, cu_seqlens, executor)
        return output, (exit_state if output_final_state else None)

    def recurrent_step(
        self,
        state: State | None = None,
        *,
        executor: str | None = None,
        **arguments: Any,
    ) -> tuple[Tensor, State]:
        """One token of decoding: the spec at C = 1.

        Args:
            state: the states before the token, as `initial_state`; None is zeros.
            arguments: as for the call, with inputs [B, 1, H, ...].

        Returns:
            Output [B, 1, HV, ...] and the next state.
        """
        for name in self.spec.inputs:
            x = arguments.get(name)
            if isinstance(x, Tensor) and x.dim() > 1 and x.shape[1] != 1:
                raise ArgumentError(
                    f"{self.spec.name}: recurrent_step takes one token, input {name!r} has "
                    f"T = {x.shape[1]}; call the operator itself for a whole prompt"
                )
        return self._run(arguments, state, None, executor)

    def _run(
        self,
        arguments: Mapping[str, Any],
        initial: State | None,
        cu_seqlens: Tensor | Sequence[int] | None,
        executor: str | None,
    ) -> tuple[Tensor, State]:
        """Output and exit state, by the path that `custom_ops` explains."""
        if custom_ops.is_watched():
            return custom_ops.call(self.key, arguments, initial, cu_seqlens, executor)
        offsets = None if cu_seqlens is None else read_offsets(self.spec, cu_seqlens)
        key = key_of(arguments, offsets, executor)
        known = None if key is None else self.known_calls.find(key)
        if known is not None:
            output, *leave = known(tuple(arguments.values()), initial)
            self.last_plan, self._noted = known.plan, known.problem.family
            return output, pack_state(self.spec, tuple(leave))
        inputs, params, scalars = self._sort(arguments)
        problem = self.bind(inputs, params, scalars, offsets)
        chosen = self.executor(executor, problem.device, problem.compute_dtype)
        result = run_local(chosen, problem, initial, self.ran)
        self.note_plan(chosen, problem)
        if key is not None and repeats(chosen) and problem.layout.chunks:
            assert self.last_plan is not None
            self.known_calls.add(
                key, KnownCall(chosen, problem, arguments, self.last_plan, self.ran)
            )
        return result

    def _sort(
        self, arguments: Mapping[str, Any]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, float]]:
        inputs, params, scalars = {}, {}, {}
        spec = self.spec
        for name, value in arguments.items():
            if name in spec.inputs:
                inputs[name] = value
            elif name in spec.params:
                params[name] = value
            elif name in spec.scalars:
                scalars[name] = value
            else:
                known = (*spec.inputs, *spec.params, *spec.scalars)
                raise ArgumentTypeError(
                    f"{spec.name}: unexpected argument {name!r}{nearest(name, known)}; "
                    f"expected {', '.join(known)}"
                )
        return inputs, params, scalars


def _load(
    spec: LinearAttentionSpec,
    executor: str | None,
    chunk_size: int | None,
    tuned: Path | None = None,
) -> LinearAttentionOp:
    """A pickled operator; what its spec is warned of was told when it was compiled first."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NumericsWarning)
        graphs = compile_graphs(spec)
    return LinearAttentionOp(graphs, executor, chunk_size, tuned)


def run_local(
    executor: Executor, problem: Problem, initial: State | None, ran: Ran | None = None
) -> tuple[Tensor, State]:
    """Run a problem through autograd on one device; returns output and exit state.

    ran: told when the backward pass runs."""
    entry = problem.entry_state(initial)
    tensors = (*problem.inputs.values(), *problem.params.values())
    output, *leave = attend(executor, Call.of(problem, ran), entry, tensors)
    return output, pack_state(problem.spec, tuple(leave))


def pack_state(spec: LinearAttentionSpec, states: tuple[Tensor, ...]) -> State:
    """One tensor for a spec with one plain state, else the tuple."""
    return states[0] if spec.single_state and spec.log_scaled is None else states


def compile(
    spec: LinearAttentionSpec,
    *,
    executor: str | None = None,
    chunk_size: int | None = None,
    strict: bool = False,
    check: bool = False,
    tuned: str | Path | None = None,
) -> LinearAttentionOp:
    """Compile a spec into an operator with a derived backward.

    Args:
        executor: default executor; None chooses by device.
        chunk_size: tokens of a chunk, a power of two; None chooses 64, or 32 for float32 inputs
            whose states have a dim above 128.
        strict: turn numerics warnings (an exponential that may overflow) into errors.
        check: also run the spec on random data with C = 1, 5 and 64 and name the stage that
            differs; where the spec has a `recurrence`, compare output, states and all gradients
            with it in float64.
        tuned: a tuning database (`flexla-dist bench --tune --database FILE` writes one) that the
            triton executor asks before that of the package; None is the user's own,
            `tuned/<arch>.json` in `~/.cache/flexla_dist` or `$XDG_CACHE_HOME/flexla_dist`.
            `last_plan.configurations` tells what it gave.

    Raises:
        TraceError and its kinds: a callable breaks a rule; message with stage, line and fix.
        CheckError: `check=True` found a stage that depends on the chunk size, or a recurrence that
            describes another variant.
    """
    if not isinstance(spec, LinearAttentionSpec):
        raise ArgumentTypeError(f"compile takes a LinearAttentionSpec, got {type(spec).__name__}")
    check_chunk_size(chunk_size)
    file = None if tuned is None else Path(tuned)
    op = LinearAttentionOp(compile_graphs(spec, strict=strict), executor, chunk_size, file)
    if check:
        check_spec(op)
    return op
