"""Compile exchange kernels for sm_90 and print what each takes.

Run as a program: `python device_exchange_compiler.py` prints one JSON object a kernel of the p2p
dialect; with the path of NVSHMEM's device library as an argument, those of the nvshmem dialect. A
process of its own, because Triton compiles only where its interpreter was off at import.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import triton
from device_compiler import cubin_usage
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from flexla_dist.comm.device.layout import Layout, Signature
from flexla_dist.comm.device.panels import StateForm
from flexla_dist.comm.device.source import Dialect, exchange_source, load_source

FORMS = {
    "rows": StateForm((128, 128), (128, 1)),
    "full": StateForm((128, 128), (128, 128)),
    "vector": StateForm((4096,), (4096,)),
    "dense": StateForm((128, 128), None, True),
}
RANKS = 8
JOBS: list[tuple[str, str, Dialect, int]] = [
    ("chain", "rows", "p2p", 0),
    ("chain", "rows", "p2p", 30000),
    ("chain", "full", "p2p", 0),
    ("chain", "dense", "p2p", 0),
    ("log_scan", "rows", "p2p", 0),
    ("log_scan", "dense", "p2p", 0),
    ("hierarchical", "vector", "p2p", 0),
    ("all_gather", "rows", "p2p", 0),
]
NVSHMEM_JOBS: list[tuple[str, str, Dialect, int]] = [("chain", "rows", "nvshmem", 0)]
TENSORS = ("local", "decay", "matrix", "scratch", "entry", "entering")


def compile_exchange(
    strategy: str, form: str, dialect: Dialect, delay: int, library: str
) -> dict[str, Any]:
    """Compile one kernel; what it takes, and its PTX."""
    signature = Signature(32, (FORMS[form],))
    nodes = tuple(rank // 4 for rank in range(RANKS))
    layout = Layout.of(signature, strategy, RANKS, nodes, dialect != "p2p")
    kernel = load_source(exchange_source(signature, layout, dialect)).exchange
    constants = {"COMPOSED": True, "PRECISION": "tf32x3", "DELAY": delay}
    types: dict[str, str] = {}
    for name in kernel.arg_names:
        tensor = name.rsplit("_", 1)[0] in TENSORS
        types[name] = "*fp32" if tensor else "constexpr" if name in constants else "i32"
    types |= {"bases": "*i64", "plan": "*i64"}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if types[name].startswith("*")
    }
    options: dict[str, Any] = {"num_warps": 8 if FORMS[form].dense else 4}
    if dialect == "nvshmem":
        options["extern_libs"] = {"libnvshmem_device": library}
    start = time.monotonic()
    built = triton.compile(
        ASTSource(kernel, types, constexprs=constants, attrs=aligned),
        target=GPUTarget("cuda", 90, 32),
        options=options,
    )
    ptx = built.asm["ptx"]
    return {
        "kernel": [strategy, form, dialect, delay],
        "seconds": round(time.monotonic() - start, 2),
        "shared": built.metadata.shared,
        "acquires": ptx.count("ld.global.sys.acquire.b64"),
        "releases": ptx.count("atom.global.sys.release.exch.b64"),
        "other_reads_of_flags": ptx.count("atom.global.sys.acquire"),
        "wide_stores": ptx.count("st.global.v4.b32"),
        "clocks": ptx.count("%globaltimer"),
        "puts": ptx.count("nvshmemi_transfer_put_signal"),
        **cubin_usage(built.asm["cubin"]),
    }


def main(library: str) -> None:
    for job in NVSHMEM_JOBS if library else JOBS:
        print(json.dumps(compile_exchange(*job, library)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
