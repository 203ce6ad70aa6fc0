"""Do the network file systems of this pod answer? For a pod that runs no health checks, such as a login pod.

    python3 -I -m health.checks.mounts

Exit code 1, and what does not answer as the only line: it becomes the reason for which the pod is degraded.
"""

from __future__ import annotations

import sys

from health.checks.builtin import ABANDONED_MOUNTS, mounts


def silent(table: str) -> list[str]:
    """What hangs or fails, of the lines "state seconds type path" that the collector writes."""
    found = []
    for line in table.splitlines():
        state, _, kind, path = [*line.split(" ", 3), "", "", ""][:4]
        if state == "hung":
            found.append(f"{path} ({kind}) does not answer")
        elif state.startswith("error:"):
            found.append(f"{path} ({kind}): {state.removeprefix('error:').replace('_', ' ')}")
    return found


def main() -> int:
    ABANDONED_MOUNTS.parent.mkdir(parents=True, exist_ok=True)
    seen = mounts()
    wrong = [seen.why] if seen.failure else silent(seen.text)
    if wrong:
        print("; ".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
