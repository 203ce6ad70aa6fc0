"""One log from the services' output and /dev/log."""
