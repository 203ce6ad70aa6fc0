"""Init: the PID 1 of a Slurm pod. It starts the services in order and says, with reasons, when they are ready."""
