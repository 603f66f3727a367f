"""Choice of a strategy and an engine for a scan over ranks, from a cost model."""
