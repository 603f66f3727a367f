"""Sequences sharded over ranks."""
