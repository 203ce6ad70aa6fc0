"""The fleet asks the controller, and the controller alone asks the git server."""
