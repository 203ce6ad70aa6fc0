"""Test the network file systems of a pod that runs no health checks, such as a login pod.

python3 -I -m health.checks.mounts

If one does not answer, the exit code is 1 and the only line names it: the reason for the pod's degraded state.
"""

from __future__ import annotations

import sys

from health.checks.builtin import ABANDONED_MOUNTS, mounts


def silent(table: str) -> list[str]:
    """List the mounts that hang or fail, from the collector's lines "state seconds type path"."""
    failures = []
    for line in table.splitlines():
        state, _, kind, path = [*line.split(" ", 3), "", "", ""][:4]
        if state == "hung":
            failures.append(f"{path} ({kind}) does not answer")
        elif state.startswith("error:"):
            failures.append(f"{path} ({kind}): {state.removeprefix('error:').replace('_', ' ')}")
    return failures


def main() -> int:
    ABANDONED_MOUNTS.parent.mkdir(parents=True, exist_ok=True)
    capture = mounts()
    failures = [capture.why] if capture.failure else silent(capture.text)
    if failures:
        print("; ".join(failures))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
