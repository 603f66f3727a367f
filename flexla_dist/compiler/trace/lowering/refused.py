"""Spellings that are refused with the reason and the way to write them."""

from __future__ import annotations

_BUILD = (
    "values of a chunk are whole; they are not joined or cut. Return two values, or write the "
    "parts as separate products"
)
_SHAPE = "dims have names and are not merged or split; use unsqueeze, transpose, expand or einsum"
_INDEX = (
    "entries of a chunk are not picked by position; write a product with a mask, or torch.where"
)
_NUMBER = (
    "a Python number was asked of a value of the chunk (float(), int(), .item()). Keep it a tensor"
)
_RANDOM = "callables must be pure; draw random numbers outside and pass them as an input"
_LAYER = "projections belong to the layer around the operator; pass their results as inputs"
_PREVIOUS = (
    "stages work on whole dims. For the previous token use an exclusive sum (b - g) or a state"
)
_SORT = "the order of entries is not known when compiling"
_PROD = "write gates as natural logarithms: torch.exp(torch.cumsum(g, 0))"
_WHOLE = (
    "whole numbers are not made from values of a chunk, whose gradient would be zero; compute them "
    "outside and pass them as an input"
)
_CONTEXT = "the compiler derives gradients itself; use x.detach() for a value without one"

REFUSED: dict[str, str] = {
    **dict.fromkeys(("cat", "concat", "concatenate", "stack", "hstack", "vstack"), _BUILD),
    **dict.fromkeys(("chunk", "split", "unbind", "narrow", "tensor_split"), _BUILD),
    **dict.fromkeys(("view", "reshape", "flatten", "unflatten", "view_as", "reshape_as"), _SHAPE),
    **dict.fromkeys(("repeat", "tile", "repeat_interleave"), _SHAPE),
    **dict.fromkeys(("gather", "index_select", "take", "scatter", "masked_select"), _INDEX),
    **dict.fromkeys(("scatter_add", "index_add", "nonzero", "argwhere"), _INDEX),
    **dict.fromkeys(("item", "tolist", "numpy"), _NUMBER),
    **dict.fromkeys(("rand", "randn", "randint", "rand_like", "randn_like"), _RANDOM),
    **dict.fromkeys(("bernoulli", "dropout", "normal", "randperm"), _RANDOM),
    **dict.fromkeys(("linear", "conv1d", "layer_norm", "rms_norm", "embedding"), _LAYER),
    **dict.fromkeys(("roll", "pad", "diff"), _PREVIOUS),
    "flip": "a reversed sum is x.sum(0) - x.cumsum(0) + x",
    **dict.fromkeys(("sort", "argsort", "topk", "argmax", "argmin"), _SORT),
    **dict.fromkeys(("floor_divide", "remainder", "fmod", "round", "floor", "ceil"), _WHOLE),
    **dict.fromkeys(("trunc", "frac", "bitwise_left_shift", "bitwise_right_shift"), _WHOLE),
    **dict.fromkeys(("prod", "cumprod", "logcumsumexp"), _PROD),
    **dict.fromkeys(("_set_grad_enabled", "requires_grad_", "backward"), _CONTEXT),
    **dict.fromkeys(
        ("norm", "linalg_norm", "linalg_vector_norm"),
        "use torch.nn.functional.normalize, or (x * x).sum(-1).clamp_min(eps).sqrt()",
    ),
    **dict.fromkeys(
        ("bmm", "baddbmm"),
        "batch and heads are implicit; a chunk of one head is a matrix, use @",
    ),
}
