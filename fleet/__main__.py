"""Entry point of `python -m fleet`."""

from fleet.cli import main

if __name__ == "__main__":
    main()
