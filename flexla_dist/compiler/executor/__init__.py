"""Executors: what runs the programs of a spec."""
