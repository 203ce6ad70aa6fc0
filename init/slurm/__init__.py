"""Slurm from a pod's side: its clients, its node, its configuration, its controller."""
