"""Decisions: events in, actions out. Pure: no clock, no process, no file."""
