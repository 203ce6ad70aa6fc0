"""The broker: the only process that talks to Slurm about this node's health."""
