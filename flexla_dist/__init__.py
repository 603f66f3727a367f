"""Linear attention from three chunk callables, compiled, and sharded over the sequence."""

__version__ = "0.1.0"
