"""Test a tree's health checks on their recordings in a separate process: `python -m health.dry_run TREE`.

The exit status decides if a commit is published, so a check that ends the process itself (`sys.exit(0)` at its top)
must not set it.
"""

from __future__ import annotations

import sys


def main(tree: str) -> int:
    from health import cli as health_cli

    try:
        return 1 if health_cli.main(["selftest", tree]) else 0
    except SystemExit as end:
        print(f"a check ended the process with {end.code!r} instead of judging")
        return 3


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
