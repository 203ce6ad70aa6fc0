"""Run the scripts of one commit, in order, before, after and beside a job for Slurm."""
