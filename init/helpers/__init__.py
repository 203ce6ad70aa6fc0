"""Services of our own that run beside the daemons, one process each."""
