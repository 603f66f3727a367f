"""Rewrite passes: rules as data, one engine."""
