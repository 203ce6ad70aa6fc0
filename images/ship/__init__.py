"""To a registry and back, and what differs."""
