"""Pools whose pods the fleet makes: which are to be there, which are to be others, and whose turn it is."""
