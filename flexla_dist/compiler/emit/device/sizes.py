"""Arithmetic on sizes that are known when a kernel is compiled."""

import triton


@triton.constexpr_function
def log2(size: int) -> int:
    """Exponent of a power of two.

    Raises:
        ValueError: `size` is not a power of two; the message names it.
    """
    if size < 1 or size & (size - 1):
        raise ValueError(f"a block size is {size}; expected a power of two")
    return size.bit_length() - 1
