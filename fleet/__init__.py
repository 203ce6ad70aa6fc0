"""Fleet: Kubernetes and Slurm kept in one mind."""
