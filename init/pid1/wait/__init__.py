"""The one wait, and what it waits on."""
