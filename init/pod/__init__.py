"""Tools for any child of PID 1: its pod, PID 1's client, a directory watch, Kubernetes."""
