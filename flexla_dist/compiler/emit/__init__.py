"""From a stage graph to the source of a Triton kernel."""
