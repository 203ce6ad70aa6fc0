"""Bench: each figure in docs/performance.md, by one command, as a ratio against a peer or a floor."""
