"""Starts processes, and knows whose they are."""
