"""python -m gitsync"""

from .cli import main

main()
