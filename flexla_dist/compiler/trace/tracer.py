"""Runs the user's callables on stand-ins and records the graph.

Contract: `Tracer` owns one builder; `run_stage` calls a callable and returns what it returned, with
every mistake turned into a `TraceError` that names spec, stage, source line and fix. Torch
functions reach `torch_function` through a function mode, constant factories included; the spellings
understood are the table `LOWERINGS`.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode

from flexla_dist.compiler.ir import operators as ops
from flexla_dist.compiler.ir.graph import Builder, Mark, is_mask
from flexla_dist.compiler.ir.operators import OPERATORS, ShapeRuleError
from flexla_dist.compiler.trace.lines import (
    definition_line,
    inside_autograd_function,
    raised_line,
    user_line,
)
from flexla_dist.compiler.trace.lowering import LOWERINGS, supported_names
from flexla_dist.compiler.trace.lowering.refused import REFUSED
from flexla_dist.compiler.trace.proxy import DimSize, Traced
from flexla_dist.compiler.trace.tokens import mixes_tokens
from flexla_dist.errors import FlexlaError, SourceLine, TraceError
from flexla_dist.shapes import TOKEN_DIM, UNIT_DIM, format_dims
from flexla_dist.spec.values import Values

_ALIASES = {
    "true_divide": "div",
    "divide": "div",
    "multiply": "mul",
    "subtract": "sub",
    "special_expit": "sigmoid",
    "negative": "neg",
    "absolute": "abs",
    "mm": "matmul",
    "mv": "matmul",
    "greater_equal": "ge",
    "greater": "gt",
    "less_equal": "le",
    "less": "lt",
    "linalg_inv": "inverse",
    "linalg_solve": "solve",
    "special_exp2": "exp2",
    "type": "to",
    "half": "float",
    "bfloat16": "float",
    "inv": "inverse",
    "linalg_solve_triangular": "solve_triangular",
    "log_sigmoid": "logsigmoid",
    "special_expm1": "expm1",
    "special_log1p": "log1p",
    "special_softmax": "softmax",
    "bitwise_not": "logical_not",
    "bitwise_and": "logical_and",
    "bitwise_or": "logical_or",
    "bitwise_xor": "logical_xor",
    "permute_dims": "permute",
    "swapaxes": "transpose",
    "t": "mT",
    "clip": "clamp",
}


LOGICAL = frozenset({ops.logical_not, ops.logical_and, ops.logical_or})


class _Mode(TorchFunctionMode):
    def __init__(self, tracer: Tracer):
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.tracer.torch_function(func, args, kwargs or {})


class Tracer:
    """Records callables of one spec into one graph; `sizes` and `dtype` are stand-ins."""

    def __init__(
        self,
        spec_name: str,
        dim_names: list[str],
        sizes: list[int],
        dtype: torch.dtype = torch.float32,
    ):
        self.builder = Builder()
        self.spec_name = spec_name
        self.dtype = dtype
        self.stage = ""
        self.defined: SourceLine | None = None
        self._sizes = {
            name: DimSize(size, name, self) for name, size in zip(dim_names, sizes, strict=True)
        }
        self._by_size = {int.__int__(size): size.name for size in self._sizes.values()}

    # -- errors -------------------------------------------------------------------------------

    def error(self, message: str) -> TraceError:
        """The error to raise at the user's current line."""
        return TraceError(message, spec=self.spec_name, stage=self.stage, origin=user_line())

    # -- values -------------------------------------------------------------------------------

    def dim_size(self, dim: str) -> int:
        """What `shape` shows for a dim."""
        return 1 if dim == UNIT_DIM else self._sizes[dim]

    def dim_named(self, size: Any) -> str:
        """The dim behind a size that the user passed to a factory or `expand`."""
        if isinstance(size, DimSize):
            return size.name
        if isinstance(size, int) and size == 1:
            return UNIT_DIM
        if isinstance(size, int) and size in self._by_size:
            return self._by_size[size]
        raise self.error(
            f"a fixed size {size!r}; sizes must come from x.shape, such as x.q.shape[0], so that "
            "one graph serves all"
        )

    def size(self, dim: str) -> Traced:
        """The size of a dim as a value."""
        return self.wrap(self.emit(ops.size, self.builder.sizes, dim=dim))

    def wrap(self, node: fx.Node) -> Traced:
        """A node as the user sees it."""
        return Traced(node, self)

    def emit(self, fn: Callable[..., Any], *operands: Any, **attrs: Any) -> fx.Node:
        """Add a node marked with stage and user line; misfits become TraceErrors."""
        origin = user_line()
        self.builder.mark = Mark(self.stage, origin)
        operands = self._typed(fn, operands)
        try:
            node = self.builder.emit(fn, *operands, **attrs)
        except ShapeRuleError as misfit:
            raise TraceError(
                str(misfit) if str(misfit).startswith(fn.__name__) else f"{fn.__name__}: {misfit}",
                spec=self.spec_name,
                stage=self.stage,
                origin=origin,
            ) from None
        if self.stage == "token_mode" and mixes_tokens(node):
            raise self.error(
                f"token_mode mixes tokens: {fn.__name__} along {TOKEN_DIM}. What it returns for a "
                "token may depend on that token alone, because chunks are cut later. Move this to "
                "chunk_mode, or into the layer around the operator"
            )
        return node

    def _typed(self, fn: Callable[..., Any], operands: tuple[Any, ...]) -> tuple[Any, ...]:
        """Masks that are computed with count as ones and zeros; logic needs masks."""
        info = OPERATORS[fn]
        if fn in LOGICAL:
            if not all(is_mask(x) for x in operands):
                raise self.error(
                    f"{info.name} (~, &, |) needs comparisons or masks; got a value of numbers"
                )
        elif info.kind != "shape":
            first = 1 if fn is ops.where else 0
            operands = (*operands[:first], *(self.as_number(x) for x in operands[first:]))
        return operands

    def as_number(self, operand: Any) -> Any:
        """A mask as ones and zeros; everything else as it is."""
        if not is_mask(operand):
            return operand
        ones = self.builder.expand(1.0, operand.meta["dims"])
        return self.builder.emit(ops.where, operand, ones, 0.0)

    def operand(self, value: Any) -> fx.Node | float:
        """A node or a plain number from what the user passed."""
        if isinstance(value, Traced):
            if value.tracer is not self:
                raise self.error("a value kept from another trace; callables must be pure")
            return value.node
        if isinstance(value, DimSize):
            return self.size(value.name).node
        if isinstance(value, bool | int | float):
            if value != value:
                raise self.error("a constant that is no number (NaN); write a finite one")
            return float(value)
        if isinstance(value, torch.Tensor):
            with torch._C.DisableTorchFunction():
                shape = tuple(value.shape)
            raise self.error(
                f"a tensor of shape {shape} from outside enters the callable (closure "
                "over a tensor). Declare it in `inputs` (per token), `params` (learned, per head) "
                "or `scalars` (a number)"
            )
        raise self.error(
            f"{type(value).__name__} is no operand; expected a value of the chunk or a number"
        )

    # -- dispatch -----------------------------------------------------------------------------

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Lower one operation by its canonical name."""
        if inside_autograd_function():
            raise self.error(
                "a torch.autograd.Function: its backward would be ignored, the compiler derives "
                "gradients itself. Write its forward plainly; use x.detach() for a value without "
                "a gradient"
            )
        lowering = LOWERINGS.get(name)
        if lowering is None:
            raise self._unsupported(name)
        try:
            return lowering(self, *args, **kwargs)
        except TypeError as wrong:
            if "argument" not in str(wrong):
                raise
            raise self.error(f"{name}: these arguments are not supported ({wrong})") from None

    def torch_function(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Lower a torch function or a domain operator."""
        name = getattr(func, "__name__", str(func))
        if name in ("__get__", "__set__"):
            owner = getattr(func, "__self__", None)
            name = getattr(owner, "__name__", name)
        name = name.removeprefix("__").removesuffix("__")
        name = _ALIASES.get(name, name)
        return self.call(name, *args, **kwargs)

    def method(self, value: Traced, name: str) -> Callable[..., Any]:
        """A tensor method by name."""
        canonical = _ALIASES.get(name, name)
        if canonical not in LOWERINGS:
            raise self._unsupported(name)
        return lambda *args, **kwargs: self.call(canonical, value, *args, **kwargs)

    def _unsupported(self, name: str) -> TraceError:
        if name in REFUSED:
            return self.error(f"{name} is not supported: {REFUSED[name]}")
        known = supported_names()
        if name.endswith("_") and name[:-1] in known:
            return self.error(
                f"in-place {name} is not supported; use the value that {name[:-1]} returns"
            )
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.7)
        hint = f" (did you mean {' or '.join(map(repr, near))}?)" if near else ""
        return self.error(
            f"operator {name!r} is not supported{hint}. Write it with the {len(known)} operators "
            "that flexla_dist.compiler.trace.lowering.supported_names() lists"
        )

    # -- stages -------------------------------------------------------------------------------

    @contextmanager
    def in_stage(self, stage: str, callable_: Any = None) -> Iterator[None]:
        """Operations inside belong to `stage`, whose results `callable_` returns."""
        before, self.stage = self.stage, stage
        self.defined = definition_line(callable_)
        try:
            with _Mode(self):
                yield
        finally:
            self.stage = before

    def run(self, callable_: Callable[..., Any], *named: tuple[str, Any]) -> Any:
        """What a callable returns for arguments, each with its name in messages; one that takes
        others is refused before it is called."""
        arguments = [value for _, value in named]
        try:
            inspect.signature(callable_).bind(*arguments)
        except ValueError:  # of C functions nothing is known
            pass
        except TypeError as wrong:
            shown = ", ".join(name for name, _ in named)
            raise TraceError(
                f"it must take {len(named)} arguments, ({shown}), but {wrong}",
                spec=self.spec_name,
                stage=self.stage,
                origin=self.defined,
            ) from None
        try:
            return callable_(*arguments)
        except FlexlaError:
            raise
        except Exception as wrong:
            raise TraceError(
                f"{type(wrong).__name__}: {wrong}. The arguments are no tensors while a spec is "
                "compiled: they take operators, tensor methods and torch functions, and a size "
                "stands for every size",
                spec=self.spec_name,
                stage=self.stage,
                origin=raised_line(wrong) or self.defined,
            ) from wrong

    def values(self, nodes: Mapping[str, fx.Node], kind: str) -> Values:
        """Nodes as the namespace that a callable receives."""
        wrapped = {name: self.wrap(node) for name, node in nodes.items()}
        return Values(wrapped, kind, self.error)

    def result(self, what: str, value: Any) -> fx.Node:
        """A returned value as a node; anything else is an error."""
        if isinstance(value, Traced) and value.tracer is self:
            return self.as_number(value.node)
        if isinstance(value, DimSize):
            return self.size(value.name).node
        if isinstance(value, bool | int | float):
            return self.builder.expand(float(value), ())
        got = "kept from another trace" if isinstance(value, Traced) else type(value).__name__
        raise TraceError(
            f"{what} is {got}; expected a tensor computed from the arguments",
            spec=self.spec_name,
            stage=self.stage,
            origin=self.defined,
        )

    def fit(self, what: str, node: fx.Node, dims: tuple[str, ...]) -> fx.Node:
        """The node broadcast to declared dims, or an error that shows both."""
        self.builder.mark = Mark(self.stage, node.meta["origin"])
        try:
            return self.builder.expand(node, dims)
        except ShapeRuleError:
            raise TraceError(
                f"{what} has dims {format_dims(node.meta['dims'])}; expected {format_dims(dims)}",
                spec=self.spec_name,
                stage=self.stage,
                origin=node.meta["origin"] or self.defined,
            ) from None
