"""Verified, atomic git checkouts on every node, with a mirror and canary rings for many nodes."""
