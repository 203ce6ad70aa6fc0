"""Looks and acts: one adapter to each side, and the loop that asks what to do."""
