"""Launches of compiled kernels without Triton's argument binder.

Contract: `JITFunction.run` looks at every argument of every launch (type, divisibility of pointers
and numbers, constants, options) to find the compiled kernel, which takes tens of microseconds.
Within one launch plan the answer is always the same as long as what the binder looks at is: types,
constants, options and run-time integers belong to the plan, run-time floats are never specialised,
and pointers count only by whether 16 divides them. `Direct` keeps the kernel that the first launch
of that plan returned and hands it pointers as integers. A call must go the ordinary way where
`watched` says so (hooks of profilers, debug mode) and where a pointer is not a multiple of 16.

Written for Triton 3.6: `CompiledKernel.run(x, y, z, stream, function, packed metadata, launch
metadata, enter hook, exit hook, *arguments)`, arguments in the order of the signature, constants
included, pointers as integers. On CUDA `run` is a Python object that asks for scratch memory and
calls a function in C with two flags and two scratch pointers more; without scratch memory that
function is called at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from triton import knobs
from triton.backends.nvidia.driver import CudaLauncher
from triton.compiler.compiler import CompiledKernel
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction


class Direct:
    """A compiled kernel with its grid and the constants around its run-time arguments.

    `launch(columns, rows, 1, stream, *front, *arguments, *tail)` launches it.
    """

    __slots__ = ("front", "grid", "launch", "tail")

    def __init__(self, kernel: CompiledKernel, grid: tuple[int, int], tail: Sequence[Any]):
        self.launch, more = _launcher(kernel.run)
        self.front = (kernel.function, *more, kernel.packed_metadata, None, None, None)
        self.grid, self.tail = grid, tuple(tail)

    def __call__(self, stream: int, arguments: Sequence[Any]) -> None:
        """Launch on a stream; pointers and run-time numbers in the order of the signature."""
        columns, rows = self.grid
        self.launch(columns, rows, 1, stream, *self.front, *arguments, *self.tail)


def _launcher(run: Any) -> tuple[Any, tuple[Any, ...]]:
    """What launches a kernel, and its arguments between the function and the metadata."""
    plain = type(run) is CudaLauncher and not (run.global_scratch_size or run.profile_scratch_size)
    if not plain:
        return run, ()
    return run.launch, (run.launch_cooperative_grid, run.launch_pdl, None, None)


def direct(
    function: Any, kernel: Any, grid: tuple[int, int], constants: Mapping[str, Any]
) -> Direct | None:
    """How to launch again what `function[grid](...)` launched and returned; None if it cannot be.

    It cannot for whatever stands for a compiled function: interpreted and recording ones.
    """
    plain = isinstance(function, JITFunction) and isinstance(kernel, CompiledKernel)
    if not plain or function.pre_run_hooks:
        return None
    names = [parameter.name for parameter in function.params if parameter.is_constexpr]
    return Direct(kernel, grid, [constants[name] for name in names])


def watched() -> bool:
    """True while somebody listens to launches, or kernels are made differently for debugging."""
    runtime = knobs.runtime
    for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook):
        if hook is not None and getattr(hook, "calls", True):
            return True
    return bool(runtime.debug or knobs.compilation.instrumentation_mode)


def current_stream(device: torch.device) -> int:
    """Number of the stream that work for a device goes to."""
    if device.type != "cuda":
        return 0
    return driver.active.get_current_stream(device.index)
