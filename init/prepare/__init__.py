"""Preparation steps: short children that PID 1 runs before a daemon starts, one module per step."""
