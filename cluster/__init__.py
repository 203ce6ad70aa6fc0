"""Cluster: the pods together, on one machine (local.py) and on Kubernetes (chart/)."""

from __future__ import annotations

from ground.errors import Problem


class ClusterError(Problem):
    """The cluster cannot be made; the command line prints the message with its hint, and nothing else."""
