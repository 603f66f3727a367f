"""Compile the kernels that time messages for sm_90 and print what each takes.

Run as a program: one JSON object a kernel. A process of its own, because Triton compiles only where
its interpreter was off at import.
"""

from __future__ import annotations

import json
from typing import Any

import triton
from device_compiler import cubin_usage
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from flexla_dist.comm.chooser.heap_kernels import products, rounds_of_messages

MESSAGES = {"COUNT": 1, "IN_TURN": True, "BR": 128, "BC": 64}
JOBS: list[tuple[Any, dict[str, Any], int]] = [
    (rounds_of_messages, MESSAGES, 4),
    (rounds_of_messages, {**MESSAGES, "COUNT": 5, "BR": 16}, 4),
    (rounds_of_messages, {**MESSAGES, "IN_TURN": False}, 4),
    (products, {"K": 128, "COLUMNS": 64, "SLICE": 32, "PREC": "tf32x3"}, 8),
]
TYPES = {"bases": "*i64", "sums": "*fp32", "matrices": "*fp32", "states": "*fp32"}
TYPES["copies"] = "*fp32"


def main() -> None:
    for kernel, constants, warps in JOBS:
        types = {
            name: "constexpr" if name in constants else TYPES.get(name, "i32")
            for name in kernel.arg_names
        }
        aligned = {
            (i,): [["tt.divisibility", 16]]
            for i, name in enumerate(kernel.arg_names)
            if types[name].startswith("*")
        }
        built = triton.compile(
            ASTSource(kernel, types, constexprs=constants, attrs=aligned),
            target=GPUTarget("cuda", 90, 32),
            options={"num_warps": warps},
        )
        ptx = built.asm["ptx"]
        report = {
            "kernel": kernel.__name__,
            "constants": constants,
            "shared": built.metadata.shared,
            "acquires": ptx.count("ld.global.sys.acquire.b64") + ptx.count("sys.acquire"),
            "releases": ptx.count("atom.global.sys.release.exch.b64"),
            **cubin_usage(built.asm["cubin"]),
        }
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
