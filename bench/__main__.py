"""`python -m bench [images|init|gitsync|scripts|cluster ...]`: the figures of docs/performance.md, area by area."""

from __future__ import annotations

import importlib
import sys

AREAS = ("images", "init", "gitsync", "scripts", "cluster")


def main(arguments: list[str]) -> int:
    for name in arguments:
        if name not in AREAS:
            print(f"error: no bench {name!r}; there are: {', '.join(AREAS)}", file=sys.stderr)
            return 2
    worst = 0
    for name in arguments or AREAS:
        print(f"## {name}\n", flush=True)
        # Late, and each on its own: one area's bench must not need what another's does.
        worst = max(worst, importlib.import_module(f"bench.{name}").main() or 0)
        print(flush=True)
    return worst


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
