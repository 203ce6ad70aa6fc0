"""Parsers that several checks share. Pure: text of a tool in, measurements out, Unreadable where it is not that."""
