"""Where workers are in the fabric: by the labels of their Nodes, in Slurm's words. Pure."""
