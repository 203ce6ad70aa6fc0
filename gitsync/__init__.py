"""Gitsync: verified, atomic git checkouts on every node, and the runner of the scripts in them."""
