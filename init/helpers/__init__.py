"""Services of minivm that run beside Slurm's daemons, one process each."""
