"""Gitsync: verified, atomic git checkouts on every node, and the mirror and rings of a fleet."""
