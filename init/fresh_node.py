"""Tells slurmctld, before slurmd starts, that this pod is new: jobs of the last one are requeued, its address goes.

Only ever run once per boot of the pod: after a restart of slurmd alone the jobs are alive, and `down` would kill them.
"""

from __future__ import annotations

import os
import sys

from init import slurm_client
from init.errors import InitError
from init.slurm_node import fresh_updates


def main() -> int:
    controller = slurm_client.address(os.environ)
    name = os.environ.get("MINIVM_POD_NAME") or os.uname().nodename.split(".")[0]
    try:
        node = slurm_client.node(name, controller)
        if node is None:
            print(f"slurmctld does not know {name} yet")
            return 0
        updates = fresh_updates(node, os.environ.get("MINIVM_POD_IP", ""))
        for changes in updates:
            slurm_client.update(name, changes, controller)
    except InitError as error:
        print(error.why, file=sys.stderr)
        return 1
    print(f"{name} was {node.state}: {'; '.join(' '.join(changes) for changes in updates) or 'nothing to tell'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
