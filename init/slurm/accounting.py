"""Does the accounting database answer? slurmdbd keeps its port open when it has lost its database, and tells only
whoever asks it for something of there.

    python3 -I -m init.slurm.accounting

Exit code 1, and what is wrong as the only line: it becomes the reason for which the pod is degraded.
"""

from __future__ import annotations

import subprocess
import sys

from ground.commands import ran
from init.pod.connections import crowd_at

# Anything that slurmdbd has to look up will do.
QUESTION = ("/usr/bin/sacctmgr", "--noheader", "show", "cluster")
PATIENCE = 8.0
PORT = 6819
LOST = "Unable to connect to database"


def wrong(code: int, said: str) -> str:
    """What a person is told of an answer; empty if it is as it should be."""
    if code == 0:
        return ""
    if LOST in said:
        return "slurmdbd cannot reach its database; jobs go on, and what they did is accounted when it is back"
    return "slurmdbd does not answer; jobs go on, and what they did is accounted when it is back"


def main() -> int:
    try:
        done = ran(QUESTION, within=PATIENCE)
        found = wrong(done.returncode, done.stderr)
    except subprocess.TimeoutExpired:
        crowd = crowd_at(PORT)
        found = f"slurmdbd has not answered within {PATIENCE:.0f} s; jobs go on" + (f"; {crowd}" if crowd else "")
    if found:
        print(found)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
