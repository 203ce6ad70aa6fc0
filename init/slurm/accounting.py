"""Check that the accounting database answers; slurmdbd keeps its port open even without its database.

python3 -I -m init.slurm.accounting

On failure the exit code is 1, and the only line is the reason for the pod's degraded state.
"""

from __future__ import annotations

import subprocess
import sys

from ground.commands import ran
from init.pod.connections import crowd_at

# Any request for which slurmdbd needs its database.
QUESTION = ("/usr/bin/sacctmgr", "--noheader", "show", "cluster")
PATIENCE = 8.0
PORT = 6819
LOST = "Unable to connect to database"


def problem_of(code: int, said: str) -> str:
    """Return what a person must know about the answer; "" if it is fine."""
    if code == 0:
        return ""
    if LOST in said:
        return "slurmdbd cannot reach its database; jobs continue, and their accounting is recorded when it is back"
    return "slurmdbd does not answer; jobs continue, and their accounting is recorded when it is back"


def main() -> int:
    try:
        done = ran(QUESTION, within=PATIENCE)
        problem = problem_of(done.returncode, done.stderr)
    except subprocess.TimeoutExpired:
        crowd = crowd_at(PORT)
        problem = f"slurmdbd has not answered within {PATIENCE:.0f} s; jobs continue" + (f"; {crowd}" if crowd else "")
    if problem:
        print(problem)
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main())
