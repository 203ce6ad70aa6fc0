"""The one wait, and the event sources for it."""
