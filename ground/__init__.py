"""Helpers that every package shares. Standard library only; imports no other package of the project."""
