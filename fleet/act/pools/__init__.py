"""Pods of pools, made and taken over."""
