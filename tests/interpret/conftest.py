"""Kernels in Triton's interpreter; its switch is read when Triton is imported, so set it here."""

import os
import sys

if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
    raise RuntimeError(
        "tests/interpret: this process has imported Triton for compiling already; run these tests "
        "in a process of their own: TRITON_INTERPRET=1 python -m pytest tests/interpret"
    )
os.environ["TRITON_INTERPRET"] = "1"
