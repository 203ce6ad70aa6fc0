"""Services' output and /dev/log, as lines of one log."""
