"""Parsers that several checks share. Pure: a tool's text in, measurements out; Unreadable for any other text."""
