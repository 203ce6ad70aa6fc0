"""Init: the PID 1 of a Slurm pod. Starts the services in order and reports readiness with reasons."""
