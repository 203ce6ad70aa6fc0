"""Decides: a world, a memory and the hour in; actions and a memory out. Pure."""
