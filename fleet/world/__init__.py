"""Snapshot types and parsers: both sides at one moment, parsed once, frozen, and unknown where they are not known."""
