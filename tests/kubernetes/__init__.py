"""A real Kubernetes of several machines on this one, and the tests that need it."""
