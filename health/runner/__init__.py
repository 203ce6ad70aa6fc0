"""What Slurm runs before, after and beside a job: the scripts of one commit, in their order."""
