"""Domain operators: the parts of a chunk that plain PyTorch spells slowly or unsafely.

Contract: every operator takes one chunk `[C, ...]` or any number of leading batch dims, is right
for any non-positive log gate (no overflow, no division by a decay), differentiates by plain
autograd, and accepts objects with `__torch_function__`. They may be called in any stage of a spec.

With `e[r,s] = exp(b_row[r] - b_col[s])` for r >= s (r > s when strict), else 0:

| operator | value |
|---|---|
| `decay_matrix(b_row, b_col)` | `e[r,s]`, one decay a token |
| `decay_scores(q, k, b_row, b_col)` | `sum_k q[r,k] k[s,k] e[r,s,k]`, a vector decay |
| `decay_rows(P, k, b_row, b_col)` | `sum_s P[r,s] k[s,k] e[r,s,k]`: gradient of the scores for q |
| `decay_cols(P, q, b_row, b_col)` | `sum_r P[r,s] q[r,k] e[r,s,k]`: gradient of the scores for k |
| `decay_rows_cols(P, q, k, b_row, b_col)` | the last two at once |
| `decay_scan(g, x)` | `h[r] = exp(g[r]) h[r-1] + x[r]` |
| `decay_scan_reverse(g, d)` | `e[r] = d[r] + exp(g[r+1]) e[r+1]`: gradient of the scan for x |
| `unit_tril_inverse(L)` | inverse of `I + tril(L, -1)` |
"""

from flexla_dist.spec.functional.matrix import decay_matrix
from flexla_dist.spec.functional.scan import decay_scan, decay_scan_reverse
from flexla_dist.spec.functional.scores import (
    decay_cols,
    decay_rows,
    decay_rows_cols,
    decay_scores,
)
from flexla_dist.spec.functional.tril_inverse import unit_tril_inverse

__all__ = [
    "decay_cols",
    "decay_matrix",
    "decay_rows",
    "decay_rows_cols",
    "decay_scan",
    "decay_scan_reverse",
    "decay_scores",
    "unit_tril_inverse",
]
