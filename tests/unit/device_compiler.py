"""Compile the kernels of the device functions for a target and print what each takes.

Run as a program: `python device_compiler.py cuda|hip` prints one JSON object a kernel. A process of
its own, because Triton compiles only where its interpreter was off at import.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

KERNELS = Path(__file__).resolve().parents[1] / "interpret" / "device_kernels.py"
BLOCK = {"C": 64, "K": 64}
PAIRS = {**BLOCK, "STRICT": False, "ONE_GATE": True}
TWO_GATES = {**BLOCK, "STRICT": True, "ONE_GATE": False}


def jobs(target: str) -> list[tuple[str, dict[str, Any], int]]:
    """Kernel, its constants and its warps."""
    portable: list[tuple[str, dict[str, Any], int]] = [
        ("product", {"M": 64, "D": 64, "N": 64, "EXACT": False, "MODE": "bf16"}, 4),
        ("product", {"M": 64, "D": 64, "N": 64, "EXACT": False, "MODE": "fp16"}, 4),
        ("product", {"M": 16, "D": 16, "N": 16, "EXACT": True, "MODE": "ieee"}, 4),
        ("scores", {**PAIRS, "MODE": "bf16"}, 4),
        ("pair_sums", {**PAIRS, "MODE": "bf16", "ROWS": True}, 4),
        ("pair_sums", {**PAIRS, "MODE": "bf16", "ROWS": False}, 4),
        ("both_sums", {**PAIRS, "MODE": "bf16"}, 8),
        ("both_sums", {**PAIRS, "K": 32, "MODE": "bf16"}, 4),
        ("scores", {**TWO_GATES, "C": 16, "K": 16, "MODE": "ieee"}, 4),
        ("inverse", {"C": 16, "MODE": "ieee"}, 4),
        ("inverse", {"C": 32, "MODE": "ieee"}, 4),
        ("ratios", {"C": 64, "STRICT": True}, 4),
        ("scan", {**BLOCK, "REVERSE": False}, 4),
        ("scan", {**BLOCK, "REVERSE": True}, 4),
        ("running_sum", {**BLOCK, "REVERSE": True}, 4),
        ("rows", {**BLOCK, "INDEX": -1, "BY": 1}, 4),
        ("entries", {"C": 64, "INDEX": 0, "BY": -1}, 4),
    ]
    if target == "hip":
        return portable
    return [
        *portable,
        ("product", {"M": 64, "D": 64, "N": 64, "EXACT": True, "MODE": "bf16"}, 4),
        ("scores", {**PAIRS, "MODE": "bf16"}, 8),
        ("scores", {**TWO_GATES, "MODE": "bf16"}, 8),
        ("scores", {**PAIRS, "MODE": "fp16"}, 4),
        ("scores", {**PAIRS, "MODE": "tf32x3"}, 8),
        ("pair_sums", {**PAIRS, "MODE": "bf16", "ROWS": True}, 8),
        ("pair_sums", {**PAIRS, "MODE": "tf32x3", "ROWS": False}, 8),
        ("inverse", {"C": 64, "MODE": "bf16"}, 4),
        ("inverse", {"C": 128, "MODE": "tf32x3"}, 8),
    ]


def cubin_usage(cubin: bytes) -> dict[str, int]:
    """Registers and bytes of stack (spills) of a thread, and instructions, of the only kernel."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tools = triton.knobs.nvidia

        def output(*words: str) -> str:
            done = subprocess.run([*words, file.name], capture_output=True, text=True, check=True)
            return done.stdout

        usage = output(tools.cuobjdump.path, "--dump-resource-usage")
        instructions = len(
            re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s", output(tools.nvdisasm.path, "-c"), re.M)
        )
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found, usage
    return {
        "registers": int(found[1]),
        "stack": int(found[2]),
        "instructions": instructions,
    }


def main(target_name: str) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    specification = importlib.util.spec_from_file_location("device_kernels", KERNELS)
    assert specification and specification.loader
    kernels = importlib.util.module_from_spec(specification)
    sys.modules["device_kernels"] = kernels
    specification.loader.exec_module(kernels)
    target = GPUTarget("cuda", 90, 32) if target_name == "cuda" else GPUTarget("hip", "gfx942", 64)
    for name, constants, warps in jobs(target_name):
        kernel = getattr(kernels, name)
        names = kernel.arg_names
        half = {"bf16": "*bf16", "fp16": "*fp16"}.get(str(constants.get("MODE")), "*fp32")
        pointers = {
            arg: half if arg in ("q", "k", "x", "a", "b") else "*fp32"
            for arg in names
            if arg not in constants
        }
        signature = {arg: pointers.get(arg, "constexpr") for arg in names}
        aligned = {(names.index(arg),): [["tt.divisibility", 16]] for arg in pointers}
        start = time.monotonic()
        source = ASTSource(kernel, signature, constexprs=constants, attrs=aligned)
        built = triton.compile(source, target=target, options={"num_warps": warps})
        report = {"kernel": name, "constants": constants, "warps": warps}
        report["seconds"] = round(time.monotonic() - start, 2)
        report["shared"] = built.metadata.shared
        if target_name == "cuda":
            report |= cubin_usage(built.asm["cubin"])
        else:
            report["binary"] = len(built.asm["hsaco"])
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
