"""Times an operator's kernels on a GPU, and searches their configurations; see `program`."""
