"""Entry point of `python -m bench [AREA ...]`: measures the documentation's figures, by area."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys

AREAS = (
    "images", "init", "faults", "lease", "gitsync", "scripts", "jobs", "cluster", "logins", "waits", "hostile-users",
    "kubernetes", "controller", "failover", "fleet", "why", "active", "make-room", "blame", "restore",
)  # fmt: skip
# The module and function of an area; by default `main` of the module of its name.
ELSEWHERE = {
    "controller": ("kubernetes", "controller"), "why": ("waits", "why"), "make-room": ("active", "make_room"),
}  # fmt: skip
ENDS = (signal.SIGTERM, signal.SIGHUP)


def end_well() -> None:
    """End by SystemExit at a signal, so that an area removes what it started; ignore further signals meanwhile."""

    def end(number: int, _: object) -> None:
        for each in ENDS:
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    for each in ENDS:
        signal.signal(each, end)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description="The figures of docs/performance.md.")
    parser.add_argument("areas", nargs="*", metavar="AREA", help=f"{', '.join(AREAS)}; default: all of them")
    parser.add_argument("--minutes", type=float, help="of the attack of hostile-users; default: 10")
    chosen = parser.parse_args(arguments)
    areas = chosen.areas
    if unknown := [name for name in areas if name not in AREAS]:
        parser.error(f"no bench {unknown[0]!r}; there are: {', '.join(AREAS)}")
    if chosen.minutes is not None:
        os.environ["MINIVM_BENCH_MINUTES"] = str(chosen.minutes)
    end_well()
    worst = 0
    for name in areas or AREAS:
        print(f"## {name}\n", flush=True)
        # Imported late: the bench of one area must not need the libraries of another.
        module, function = ELSEWHERE.get(name, (name.replace("-", "_"), "main"))
        worst = max(worst, getattr(importlib.import_module(f"bench.{module}"), function)() or 0)
        print(flush=True)
    return worst


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
