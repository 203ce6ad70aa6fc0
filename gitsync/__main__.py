"""python -m gitsync"""

from .cli import main

main(prog_name="gitsync")
