"""Copies of the controller's state: made, listed, proven, restored."""
