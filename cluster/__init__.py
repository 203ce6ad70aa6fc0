"""Cluster: the pods together, on one machine (local.py) and on Kubernetes (chart/)."""
