"""Lines of the user's files: where a callable is, where it fails, what it runs in.

Contract: looks at frames and never changes them; what belongs to the compiler, to the functional
spellings or to torch is nobody's line.
"""

from __future__ import annotations

import linecache
import os
import sys
from typing import Any

import torch

from flexla_dist.errors import SourceLine

_AUTOGRAD = torch.autograd.function.__file__
_TRACER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "tracer.py")
_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_OWN_CODE = (
    os.path.join(_PACKAGE, "compiler"),
    os.path.join(_PACKAGE, "ops"),
    os.path.join(_PACKAGE, "spec", "values.py"),
    os.path.join(_PACKAGE, "spec", "functional"),
    os.path.dirname(os.path.abspath(torch.__file__)),
)


def user_line() -> SourceLine | None:
    """The innermost line that belongs neither to the compiler nor to torch."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_OWN_CODE) and not name.startswith("<"):
            text = linecache.getline(name, frame.f_lineno).strip()
            return SourceLine(name, frame.f_lineno, frame.f_code.co_name, text)
        frame = frame.f_back  # type: ignore[assignment]
    return None


def raised_line(error: BaseException) -> SourceLine | None:
    """The innermost line, of those an error went through, that belongs to the user."""
    found, trace = None, error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        name = code.co_filename
        if not name.startswith(_OWN_CODE) and not name.startswith("<"):
            text = linecache.getline(name, trace.tb_lineno).strip()
            found = SourceLine(name, trace.tb_lineno, code.co_name, text)
        trace = trace.tb_next
    return found


def inside_autograd_function() -> bool:
    """Whether a callable of a spec runs the forward of a torch.autograd.Function."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "run" and code.co_filename == _TRACER:
            return False
        if code.co_name == "apply" and code.co_filename == _AUTOGRAD:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def definition_line(function: Any) -> SourceLine | None:
    """Where a function is defined, for mistakes in what it returns."""
    code = getattr(function, "__code__", None)
    if code is None:
        return None
    text = linecache.getline(code.co_filename, code.co_firstlineno).strip()
    return SourceLine(code.co_filename, code.co_firstlineno, code.co_name, text)
