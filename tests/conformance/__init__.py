"""Checks of what a Slurm on Kubernetes should do, for any product: by kubectl and an adapter file."""
