"""The training program: bytes of text, a model of the package's layers, ranks dp x cp."""
