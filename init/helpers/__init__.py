"""Services of our own that run beside the daemons, each a process."""
