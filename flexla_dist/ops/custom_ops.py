"""Compiled operators as `torch.library` ops, for compilers and whatever watches dispatch.

    flexla_dist::attention(key, tensors, entry, scalars, cu_seqlens, executor)
        -> (output, exit states, saved)
    flexla_dist::attention_backward(the same, saved, grad_output, grad_exit)
        -> (gradients of tensors, gradients of entry)
    flexla_dist::packed_attention, packed_attention_backward: the same of packed documents

The host reads document bounds to lay out a call, so the packed ops are not captured in the CUDA
graphs that inductor makes: a graph replayed with other bounds would compute with the old ones.

`key` names a live operator: a hash of its graphs, its arguments and its options. The operator
object keeps its entry alive; a graph that outlives it gets a MissingOperatorError, never another
operator. `tensors` are inputs, then parameters, in the order of the spec; `entry` is empty where
states start from zero.

Which path a call takes: under `torch.compile`, `torch.export` or a dispatch mode (fake tensors,
selective checkpointing, counters of FLOPs) one of these ops, so that a graph holds one node that
tracers do not look into. Otherwise the node of `flexla_dist.ops.autograd`. Measured on a CPU with
T = 64 and simple_gla, forward and backward take 0.67 ms through that node and 0.88 ms through
these ops (lists of tensors are flattened and restored in Python, arguments are checked again in
backward, saved tensors padded), and `torch.func` has no rule for the autograd of custom ops. Both
run the same executors.

Shapes without numbers: the fake kernels read no values, so B, T and the number of documents stay
symbolic and packings of one shape share a graph; heads and dims become constants of the graph.
What forward saves is padded with zeros to what `saved_shapes` tells in advance, and backward takes
the padding off: T in 2 .. C share a graph, though their chunks have fewer tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from flexla_dist.compiler.executor.bind import check_offset_type
from flexla_dist.compiler.executor.problem import Outline, Problem
from flexla_dist.compiler.executor.results import Saved
from flexla_dist.errors import ArgumentTypeError, MissingOperatorError
from flexla_dist.ops.autograd import (
    Executor,
    exit_seeds,
    full_precision,
    output_seed,
    refuse_double_backward,
    refuse_vmap,
)
from flexla_dist.ops.plan import plan_of
from flexla_dist.shapes import whole_numbers

if TYPE_CHECKING:
    from flexla_dist.ops.op import LinearAttentionOp

NAMESPACE = "flexla_dist"
_CALL = (
    "str key, Tensor[] tensors, Tensor[] entry, float[] scalars, Tensor? cu_seqlens, str executor"
)
_SCHEMAS = {
    "attention": f"({_CALL}) -> (Tensor, Tensor[], Tensor[])",
    "attention_backward": (
        f"({_CALL}, Tensor[] saved, Tensor grad_output, Tensor[] grad_exit) -> (Tensor[], Tensor[])"
    ),
}
Key = str
Tensors = list[Tensor]

# -- operators by key -------------------------------------------------------------------------

_OPERATORS: WeakValueDictionary[Key, LinearAttentionOp] = WeakValueDictionary()


def register(op: LinearAttentionOp, executor: str | None) -> Key:
    """Enter an operator for as long as it lives; equal ones beside each other are numbered."""
    spec = op.spec
    parts = (
        op.graphs.structural_hash,
        dict(spec.inputs),
        dict(spec.params),
        dict(spec.scalars),
        op.chunk_size,
        executor,
        *([] if op.tuned is None else [str(op.tuned)]),
    )
    name = f"{spec.name}-{hashlib.sha256(repr(parts).encode()).hexdigest()[:16]}"
    key, count = name, 1
    while key in _OPERATORS:
        count += 1
        key = f"{name}-{count}"
    _OPERATORS[key] = op
    return key


def find(key: Key) -> LinearAttentionOp:
    """The live operator of a key."""
    op = _OPERATORS.get(key)
    if op is None:
        raise MissingOperatorError(
            f"no operator {key!r} is alive: a compiled or exported graph was run after the "
            "operator it was made from had been dropped, or in a process that never made it. Keep "
            "what flexla_dist.compile returned for as long as the graph is used, and compile the "
            "same spec with the same options before a stored graph is run"
        )
    return op


class Published:
    """Holds operators that the package makes for its callers, by key, for as long as it runs.

    Dynamo cannot see into a cache of operators, but it can guard an attribute of a global object.
    """

    def add(self, op: LinearAttentionOp) -> Key:
        """Keep an operator; returns the name of its attribute."""
        setattr(self, op.key, op)
        return op.key


PUBLISHED = Published()

# -- calls ------------------------------------------------------------------------------------


def is_watched() -> bool:
    """True where a call should appear as one op: under a compiler or a dispatch mode."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


@torch.compiler.assume_constant_result
def signature(key: Key) -> tuple[tuple[str, ...], tuple[tuple[str, float | None], ...], bool]:
    """Names of tensors in order, scalars with defaults, whether the state is a single tensor.

    Plain constants: a compiled graph has one guard on the key instead of one on each of them.
    """
    spec = find(key).spec
    single = spec.single_state and spec.log_scaled is None
    return (*spec.inputs, *spec.params), tuple(spec.scalars.items()), single


def call(
    key: Key,
    arguments: Mapping[str, Any],
    initial: Tensor | Sequence[Tensor] | None,
    cu_seqlens: Tensor | Sequence[int] | None,
    executor: str | None,
) -> tuple[Tensor, Any]:
    """Call an operator as one op; returns output and exit state. Traceable by Dynamo."""
    names, defaults, single = signature(key)
    known = (*names, *(name for name, _ in defaults))
    for name in arguments:
        if name not in known:
            raise ArgumentTypeError(
                f"{key}: unexpected argument {name!r}; expected {', '.join(known)}"
            )
    tensors = []
    for name in names:
        value = arguments.get(name)
        if not isinstance(value, Tensor):
            kind = "missing" if value is None else f"{type(value).__name__}, not a tensor"
            raise ArgumentTypeError(f"{key}: {name!r} is {kind}")
        tensors.append(value)
    scalars = []
    for name, default in defaults:
        number = arguments.get(name)
        number = default if number is None else number
        if number is None or isinstance(number, Tensor):
            kind = "missing and has no default" if number is None else "a tensor, not a number"
            raise ArgumentTypeError(f"{key}: scalar {name!r} is {kind}")
        scalars.append(float(number))
    if cu_seqlens is not None and not isinstance(cu_seqlens, Tensor):
        numbers = whole_numbers(f"{key}: cu_seqlens", cu_seqlens, ArgumentTypeError)
        cu_seqlens = torch.tensor(numbers, dtype=torch.int64)
    ops = torch.ops.flexla_dist
    run = ops.attention if cu_seqlens is None else ops.packed_attention
    output, leave, _ = run(
        key, tensors, _in_compute_dtype(initial, tensors), scalars, cu_seqlens, executor or ""
    )
    return output, leave[0] if single else tuple(leave)


def _in_compute_dtype(
    initial: Tensor | Sequence[Tensor] | None, tensors: Sequence[Tensor]
) -> Tensors:
    if initial is None:
        return []
    double = any(x.dtype == torch.float64 for x in tensors)
    dtype = torch.float64 if double else torch.float32
    given = (initial,) if isinstance(initial, Tensor) else initial
    return [state.to(dtype) for state in given]


# -- kernels ----------------------------------------------------------------------------------


def _named(op: LinearAttentionOp, tensors: Tensors) -> tuple[dict, dict]:
    count = len(op.spec.inputs)
    inputs = dict(zip(op.spec.inputs, tensors[:count], strict=True))
    return inputs, dict(zip(op.spec.params, tensors[count:], strict=True))


def _bind(
    op: LinearAttentionOp,
    tensors: Tensors,
    entry: Tensors,
    scalars: list[float],
    cu_seqlens: Tensor | None,
    executor: str,
) -> tuple[Problem, tuple[Tensor, ...], Executor]:
    inputs, params = _named(op, tensors)
    numbers = dict(zip(op.spec.scalars, scalars, strict=True))
    problem = op.bind(inputs, params, numbers, cu_seqlens)
    states = problem.entry_state(entry or None)
    return problem, states, op.executor(executor or None, problem.device, problem.compute_dtype)


def _attention(
    key: Key,
    tensors: Tensors,
    entry: Tensors,
    scalars: list[float],
    cu_seqlens: Tensor | None,
    executor: str,
) -> tuple[Tensor, Tensors, Tensors]:
    op = find(key)
    problem, states, chosen = _bind(op, tensors, entry, scalars, cu_seqlens, executor)
    with full_precision(problem.device):
        result = chosen.forward(problem, states)
    op.note_plan(chosen, problem)
    saved = _padded(result.saved, chosen.saved_shapes(problem), problem.device)
    return result.output, [_owned(x) for x in result.exit], saved


def _attention_backward(
    key: Key,
    tensors: Tensors,
    entry: Tensors,
    scalars: list[float],
    cu_seqlens: Tensor | None,
    executor: str,
    saved: Tensors,
    grad_output: Tensor,
    grad_exit: Tensors,
) -> tuple[Tensors, Tensors]:
    op = find(key)
    problem, states, chosen = _bind(op, tensors, entry, scalars, cu_seqlens, executor)
    seeds = exit_seeds(states, grad_exit)
    kept = _unpadded(saved, chosen, problem)
    op.ran.backward = plan_of(chosen, problem, "backward")
    with full_precision(problem.device):
        found = chosen.backward(problem, kept, states, grad_output, seeds)
    named = {**found.inputs, **found.params}
    ordered = [_owned(named[name]) for name in (*op.spec.inputs, *op.spec.params)]
    return ordered, [_owned(x) for x in found.entry] if entry else []


def _owned(x: Tensor) -> Tensor:
    """x contiguous from the start of its memory, as the fake kernels promise."""
    return x.clone() if x.storage_offset() else x.contiguous()


def _padded(saved: tuple[Tensor, ...], shapes: tuple[Saved, ...], device: torch.device) -> Tensors:
    """What a forward pass saved, in the shapes told in advance; zeros beyond it."""
    out = []
    for at, wanted in enumerate(shapes):
        found = saved[at] if saved else None
        if found is None or tuple(found.shape) != wanted.shape:
            room = torch.zeros(wanted.shape, dtype=wanted.dtype, device=device)
            if found is not None:
                room[tuple(slice(size) for size in found.shape)] = found
            found = room
        out.append(found)
    return out


def _unpadded(saved: Tensors, chosen: Executor, problem: Problem) -> tuple[Tensor, ...]:
    """What a forward pass saved, without the padding of chunks that are shorter than the longest;
    rows beyond the last may stay."""
    size = problem.layout.chunk_size
    if size == problem.longest_chunk:
        return tuple(saved)
    own = chosen.saved_shapes(replace(problem, longest_chunk=size))
    return tuple(
        x[(slice(None), *(slice(n) for n in wanted.shape[1:]))].contiguous()
        for x, wanted in zip(saved, own, strict=True)
    )


# -- fake kernels -----------------------------------------------------------------------------


def _outline(op: LinearAttentionOp, tensors: Tensors, cu_seqlens: Tensor | None) -> Outline:
    documents = None
    if cu_seqlens is not None:
        check_offset_type(op.spec, cu_seqlens)
        documents = cu_seqlens.shape[0] - 1
    return op.outline(*_named(op, tensors), documents)


def _fake_attention(
    key: Key,
    tensors: Tensors,
    entry: Tensors,
    scalars: list[float],
    cu_seqlens: Tensor | None,
    executor: str,
) -> tuple[Tensor, Tensors, Tensors]:
    op = find(key)
    outline = _outline(op, tensors, cu_seqlens)
    if entry:
        outline.entry_state(entry)
    chosen = op.executor(executor or None, outline.device, outline.compute_dtype)
    like = tensors[0]
    exits = [
        like.new_empty(outline.state_shape(name), dtype=outline.compute_dtype)
        for name in outline.state_names
    ]
    saved = [like.new_empty(s.shape, dtype=s.dtype) for s in chosen.saved_shapes(outline)]
    output = like.new_empty(outline.output_shape(), dtype=outline.output_dtype)
    return output, exits, saved


def _fake_attention_backward(
    key: Key,
    tensors: Tensors,
    entry: Tensors,
    scalars: list[float],
    cu_seqlens: Tensor | None,
    executor: str,
    saved: Tensors,
    grad_output: Tensor,
    grad_exit: Tensors,
) -> tuple[Tensors, Tensors]:
    return [x.new_empty(x.shape) for x in tensors], [x.new_empty(x.shape) for x in entry]


# -- autograd ---------------------------------------------------------------------------------


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    key, tensors, entry, scalars, cu_seqlens, executor = inputs
    _, leave, saved = output
    ctx.options = (key, scalars, executor)
    ctx.counts = (len(tensors), len(entry))
    ctx.set_materialize_grads(False)
    log_scaled = find(key).spec.log_scaled is not None
    ctx.mark_non_differentiable(*saved, *leave[len(leave) - log_scaled :])
    ctx.save_for_backward(*tensors, *entry, *saved, cu_seqlens)
    ctx.like_exit = [(x.shape, x.dtype) for x in leave]


def _backward(ctx: Any, grad_output: Any, grad_exit: Any, grad_saved: Any) -> tuple[Any, ...]:
    key, scalars, executor = ctx.options
    num_tensors, num_entry = ctx.counts
    kept = ctx.saved_tensors
    tensors, entry = list(kept[:num_tensors]), list(kept[num_tensors : num_tensors + num_entry])
    saved = list(kept[num_tensors + num_entry : -1])
    if grad_output is None:
        outline = _outline(find(key), tensors, kept[-1])
        grad_output = output_seed(outline, None)
    like = tensors[0]
    seeds = [
        like.new_zeros(shape, dtype=dtype) if g is None else g
        for g, (shape, dtype) in zip(grad_exit, ctx.like_exit, strict=True)
    ]
    ops = torch.ops.flexla_dist
    run = ops.attention_backward if kept[-1] is None else ops.packed_attention_backward
    grads, grad_entry = run(
        key, tensors, entry, scalars, kept[-1], executor, saved, grad_output, seeds
    )
    return None, grads, grad_entry, None if scalars else [], None, None


def _refuse_second(ctx: Any, *grads: Any) -> None:
    refuse_double_backward(ctx.name)


def _remember_name(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.name = find(inputs[0]).spec.name


def _refuse_vmap(info: Any, in_dims: Any, key: Key, *rest: Any) -> None:
    refuse_vmap(find(key).spec.name)


def _define() -> torch.library.Library:
    library = torch.library.Library(NAMESPACE, "DEF")
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)
    kernels: dict[str, tuple[Any, ...]] = {
        "attention": (_attention, _fake_attention, _backward, _setup_context),
        "attention_backward": (
            _attention_backward,
            _fake_attention_backward,
            _refuse_second,
            _remember_name,
        ),
    }
    for kind, functions in kernels.items():
        _define_op(library, kind, _SCHEMAS[kind], tags, functions)
        unsafe = (*tags, torch.Tag.cudagraph_unsafe)
        _define_op(library, f"packed_{kind}", _SCHEMAS[kind], unsafe, functions)
    return library


def _define_op(
    library: torch.library.Library,
    name: str,
    schema: str,
    tags: tuple[torch.Tag, ...],
    functions: tuple[Any, ...],
) -> None:
    real, fake, backward, setup = functions
    full = f"{NAMESPACE}::{name}"
    library.define(name + schema, tags=tags)
    library.impl(name, real, "CompositeExplicitAutograd")
    torch.library.register_fake(full, fake, lib=library)
    torch.library.register_autograd(full, backward, setup_context=setup, lib=library)
    torch.library.register_vmap(full, _refuse_vmap, lib=library)


_LIBRARY = _define()
