"""Public operators: compiled specs and the functions named as in flash-linear-attention."""
