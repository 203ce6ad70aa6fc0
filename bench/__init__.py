"""Benchmarks: each figure in docs/performance.md by one command, as a ratio to a peer or a floor."""
