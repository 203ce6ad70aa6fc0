"""A commit as a directory: written, checked, published."""
