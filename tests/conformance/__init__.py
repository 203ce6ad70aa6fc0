"""What a Slurm on Kubernetes should do, as checks that run against any product by kubectl and an adapter file."""
