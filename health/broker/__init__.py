"""The one who speaks to Slurm about this node's health."""
