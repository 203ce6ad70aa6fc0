"""Decides: what happened in, what to do out. Pure: no clock, no process, no file."""
