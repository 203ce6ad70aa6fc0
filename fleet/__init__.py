"""Fleet: the operator that keeps Kubernetes and Slurm consistent."""
