"""Slurm as a pod meets it: its clients, its node, its configuration, its controller."""
