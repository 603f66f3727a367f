"""Stands in for Triton-Distributed in tests; see the folder's README."""

from triton import jit

__all__ = ["jit"]
