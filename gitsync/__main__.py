"""Entry point of `python -m gitsync`."""

from gitsync.cli import main

main(prog_name="gitsync")
