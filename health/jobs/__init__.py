"""Explain jobs: why a job waits, how it runs, and why it ended."""
