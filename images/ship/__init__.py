"""Push to a registry, verify, and compare images."""
