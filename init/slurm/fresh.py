"""Tell slurmctld before slurmd's start that this pod is new: the old jobs are requeued, the old address is dropped.

Runs once per boot of the pod only: after a restart of slurmd alone the jobs are alive, and this would kill them.
"""

from __future__ import annotations

import contextlib
import os
import sys

from init.errors import InitError
from init.places import pod_name
from init.pod.auth import signing
from init.slurm import client
from init.slurm.node import fresh
from init.slurm.offer import difference, offered
from init.slurm.proof import forget_birth

TYPE_CHECKING = False
if TYPE_CHECKING:
    from init.slurm.node import Node

SLURMD = "/usr/sbin/slurmd"
REASON = "minivm: the pod of node {} was replaced: the job is requeued, or ended where it cannot be requeued"
BORN = "MINIVM_SLURMD_BORN"  # further arguments of slurmd's --conf


def main() -> int:
    controller = client.address(os.environ)
    name = pod_name(os.environ)
    try:
        with signing(controller):
            node = client.node(name, controller)
            if node is None:
                print(f"slurmctld does not know {name} yet")
                return 0
            done = renew(node, controller)
    except InitError as error:
        print(error.why, file=sys.stderr)
        return 1
    print(f"{name} was {node.state}: {'; '.join(done) or 'nothing to tell'}")
    return 0


def renew(node: Node, controller: str) -> list[str]:
    done: list[str] = []
    differs = changed(node, controller) if node.dynamic else ""
    todo = fresh(node, os.environ.get("MINIVM_POD_IP", ""), differs=bool(differs))
    if not todo.born:
        forget_birth()  # from an earlier try, before a person lifted the drain
    if node.busy:
        with contextlib.suppress(InitError):  # the reason must not keep the pod from its start
            jobs = client.jobs(node.name, controller, within=5.0)
            running = [job for job, state in jobs.items() if state not in client.OVER]
            client.comment(running, REASON.format(node.name), controller, within=5.0)
    if todo.free:
        client.free(client.jobs(node.name, controller), controller, done.append)
    for changes in todo.updates:
        client.update(node.name, changes, controller)
        done.append(" ".join(changes))
    if todo.forget:
        publish(todo.born)
        client.delete(node.name, controller)
        done.append(f"registers anew, {differs}{': ' if todo.born else ''}{todo.born}")
    return done


def changed(node: Node, controller: str) -> str:
    """Return the first difference between this pod's resources and its record."""
    hardware = client.run([SLURMD, "-C"], controller).partition("\n")[0]
    return difference(dict(node.shown), offered(os.environ.get("MINIVM_SLURMD_CONF", ""), hardware))


def publish(born: str) -> None:
    """Write the argument for slurmd's start before the record is deleted, so that an interruption loses nothing."""
    if born:
        from init.pod.pod import Pod

        Pod(os.environ).publish("born", {BORN: born})


if __name__ == "__main__":
    raise SystemExit(main())
