"""Measured configurations of kernels; see `database`."""
