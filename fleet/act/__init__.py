"""The edges: clients of the API server and slurmrestd, the watch cache, leader election, and the writes."""
