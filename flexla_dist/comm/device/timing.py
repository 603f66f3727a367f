"""Waiting and clocks inside kernels, compiled or interpreted.

The interpreter runs kernels as Python, so there a wait can sleep and read the host's clock; a
compiled kernel spins and reads the GPU's timer.
"""

import time

import triton
import triton.language as tl

# How long an interpreted wait sleeps between looks: short beside a hop, long beside a busy loop.
PAUSE_SECONDS = 50e-6

if triton.knobs.runtime.interpret:

    def pause() -> None:
        """Let another process run before looking again."""
        time.sleep(PAUSE_SECONDS)

    def clock_ns() -> int:
        """Nanoseconds, comparable between the processes of one host."""
        return time.monotonic_ns()

else:

    @triton.jit
    def pause():
        """Nothing: a GPU's wait looks again at once."""

    @triton.jit
    def clock_ns():
        """Nanoseconds of the timer that all multiprocessors of a GPU share."""
        return tl.inline_asm_elementwise(
            "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
        )
