"""Matrix products under the dot policy.

Contract: `MODE` is the policy of the whole kernel, one of

| MODE | operands of `mm` | arithmetic of `mm` | arithmetic of `mm_exact` |
|---|---|---|---|
| "bf16" | rounded to bfloat16 | tensor cores, fp32 sums | tf32x3 |
| "fp16" | rounded to float16 | tensor cores, fp32 sums | tf32x3 |
| "tf32x3" | float32 | three TF32 products, error about 2^-21 | tf32x3 |
| "ieee" | float32 | fused multiply-add, no tensor cores | ieee |

"ieee" is what the interpreter runs (its bfloat16 products are wrong) and what compiles for every
target. Results are fp32 blocks. Operands are two blocks `[M, D]` and `[D, N]`, or batches
`[G, M, D]` and `[G, D, N]`; M, N and D are powers of two of at least 16.
"""

import triton
import triton.language as tl


@triton.jit
def mm(a, b, MODE: tl.constexpr):
    """`a @ b` in fp32, operands cast as the policy says.

    a [M, D] and b [D, N] of any float dtype (or with one leading batch dim) give [M, N] fp32. Use
    it where the operands' rounding is within the error budget: scores, outputs, state updates of
    an elementwise decay. Cost: one tensor-core product ("tf32x3": three at half the rate).
    """
    if MODE == "bf16":
        return tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16), out_dtype=tl.float32)
    elif MODE == "fp16":
        return tl.dot(a.to(tl.float16), b.to(tl.float16), out_dtype=tl.float32)
    else:
        return mm_exact(a, b, MODE)


@triton.jit
def mm_exact(a, b, MODE: tl.constexpr):
    """`a @ b` in fp32 with fp32 operands whatever the policy: three TF32 products, or "ieee".

    a [M, D] and b [D, N] (or with one leading batch dim) give [M, N] fp32. Use it where products
    are chained, in the dense state map and the triangular inverse. Cost: six times a bfloat16
    product (measured at 64 x 64 x 64 on an H200); "ieee" runs on the ordinary units.
    """
    tl.static_assert(
        MODE == "bf16" or MODE == "fp16" or MODE == "tf32x3" or MODE == "ieee",
        'MODE is "bf16", "fp16", "tf32x3" or "ieee"',
    )
    if MODE == "ieee":
        return tl.dot(
            a.to(tl.float32), b.to(tl.float32), input_precision="ieee", out_dtype=tl.float32
        )
    else:
        return tl.dot(
            a.to(tl.float32), b.to(tl.float32), input_precision="tf32x3", out_dtype=tl.float32
        )
