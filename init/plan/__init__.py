"""Service specifications: read, checked, and compiled into one plan per role. Pure."""
