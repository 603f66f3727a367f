"""Hand-written Triton device functions, called by generated kernels.

Contract: `@triton.jit` functions over blocks in registers, fp32 unless said otherwise, with sizes
as constexpr. They know no variant, load and store nothing, and run on any Triton target and in the
interpreter (`MODE="ieee"`). They use no constexpr of a module: Triton's cache key of a kernel would
then depend on which functions were used before it, and kernels made ahead would not be found.
"""

from flexla_dist.compiler.emit.device.decay import (
    decay_cols,
    decay_matrix,
    decay_rows,
    decay_rows_cols,
    decay_scores,
    exp,
)
from flexla_dist.compiler.emit.device.dot import mm, mm_exact
from flexla_dist.compiler.emit.device.elementwise import expm1, log1p, logsigmoid, softplus, tanh
from flexla_dist.compiler.emit.device.rows import place_row, shift_rows, take_row
from flexla_dist.compiler.emit.device.scan import cumsum, decay_scan, decay_scan_reverse
from flexla_dist.compiler.emit.device.triangular import unit_tril_inverse

__all__ = [
    "cumsum",
    "decay_cols",
    "decay_matrix",
    "decay_rows",
    "decay_rows_cols",
    "decay_scan",
    "decay_scan_reverse",
    "decay_scores",
    "exp",
    "expm1",
    "log1p",
    "logsigmoid",
    "mm",
    "mm_exact",
    "place_row",
    "shift_rows",
    "softplus",
    "take_row",
    "tanh",
    "unit_tril_inverse",
]
