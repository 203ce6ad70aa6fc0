"""Plans that move a cluster from another Slurm operator to this chart: objects in, values and a report out."""
