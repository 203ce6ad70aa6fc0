"""The controller's state: its copies, made, listed, proven and restored; the lease on it."""
