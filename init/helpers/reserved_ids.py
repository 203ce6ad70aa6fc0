"""Check that no user of the site's directory has a user id that the epilog works under.

    python3 -I -m init.helpers.reserved_ids

A user with such an id could end the processes that clean up after other users' jobs. Exit code 1 and one line, which
becomes the reason for which the pod is degraded.
"""

from __future__ import annotations

import pwd
import sys
import time
from collections.abc import Iterable, Iterator

# The same as RESERVED in scripts/lib/jobs.py, which a git commit delivers and which imports nothing from here.
RESERVED = range(64500, 65000)
SHOWN = 3
# A directory that answers slowly is asked again in the next run.
PATIENCE = 60.0


def find_users(ids: Iterable[int]) -> Iterator[str]:
    until = time.monotonic() + PATIENCE
    for number in ids:
        if time.monotonic() > until:
            return
        try:
            yield f"{pwd.getpwuid(number).pw_name} ({number})"
        except KeyError:
            continue


def main() -> int:
    users = list(find_users(RESERVED))
    if not users:
        return 0
    shown = ", ".join(users[:SHOWN]) + (f" and {len(users) - SHOWN} more" if len(users) > SHOWN else "")
    ids = f"{RESERVED[0]} to {RESERVED[-1]}"
    print(f"the directory has users with ids that minivm reserves ({ids}): {shown}; give them other ids")
    return 1


if __name__ == "__main__":
    sys.exit(main())
