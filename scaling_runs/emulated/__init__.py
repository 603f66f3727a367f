"""Hosts emulated on one machine: network namespaces, cables with a rate and a latency."""
