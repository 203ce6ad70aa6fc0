"""Preparation steps: short children that PID 1 runs before a daemon starts, one module a step."""

from __future__ import annotations

# Step, and the module and function that do it: a module is imported only when its step is asked for.
STEPS = {
    "cgroups": ("cgroups", "run"),
    "directories": ("directories", "run"),
    "hostkeys": ("hostkeys", "run"),
    "identity": ("identity", "run"),
    "jwt-key": ("secrets", "jwt"),
    "mariadb": ("database", "mariadb"),
    "munge-key": ("secrets", "munge"),
    "node": ("node", "run"),
    "pam-adopt": ("pam", "run"),
    "profile": ("profile", "run"),
    "slurm-config": ("slurm_config", "run"),
    "slurmdbd-config": ("database", "slurmdbd"),
    "sssd": ("secrets", "sssd"),
    "stale": ("stale", "run"),
    "user-limits": ("user_limits", "run"),
}
