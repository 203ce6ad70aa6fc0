"""A commit as a directory: write, check, publish."""
