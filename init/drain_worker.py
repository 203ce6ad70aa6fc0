"""A worker before it stops: no new jobs, time for the running ones, then their requeue, then the node's removal.

Without it slurmctld notices the lost node only after SlurmdTimeout, and its jobs stay RUNNING until then.
"""

from __future__ import annotations

import os

from init import slurm_client
from init.drain import Deadline, say
from init.slurm_client import SlurmError
from init.slurm_node import STOPPING

# Kept of the budget for the requeue and the removal that follow the wait for the jobs.
RESERVE = 5.0
LOOK_EVERY = 0.5


def name_of_node() -> str:
    return os.environ.get("MINIVM_POD_NAME") or os.uname().nodename.split(".")[0]


def drain(controller: str, deadline: Deadline) -> None:
    name = name_of_node()
    node = slurm_client.node(name, controller, within=max(1.0, deadline.left / 2))
    if node is None:
        say(f"slurmctld knows no node {name}: nothing to drain")
        return
    if not node.drained_by_others and not (node.reason == STOPPING and "DRAIN" in node.flags):
        slurm_client.update(name, ["state=drain", f"reason={STOPPING}"], controller)
    jobs = wait_for_jobs(name, controller, deadline)
    if jobs:
        requeue(jobs, controller)
        wait_until_idle(name, controller, deadline)
    if node.dynamic:
        remove(name, controller, deadline)
    else:
        # A static node stays in the controller's list: down, so that it offers nothing while it is away.
        slurm_client.update(name, ["state=down", f"reason={STOPPING}"], controller)
        say(f"{name} is down in Slurm until the pod is back")


def wait_for_jobs(name: str, controller: str, deadline: Deadline) -> list[str]:
    """The jobs that are still there when the time for them is over."""
    told = ""
    while True:
        jobs = slurm_client.jobs(name, controller)
        if not jobs:
            return []
        text = f"waiting for {len(jobs)} jobs: {' '.join(jobs[:8])}{' ...' if len(jobs) > 8 else ''}"
        if text != told:
            say(text)
            told = text
        if deadline.left <= RESERVE:
            return jobs
        deadline.pause(min(LOOK_EVERY, deadline.left - RESERVE))


def requeue(jobs: list[str], controller: str) -> None:
    """Each job by itself: one that may not be requeued must not keep the others."""
    for job in jobs:
        try:
            slurm_client.run([slurm_client.SCONTROL, "requeue", job], controller)
            say(f"requeued job {job}")
        except SlurmError as error:
            say(f"job {job} is not requeued: {error.why}")
            try:
                slurm_client.run([slurm_client.SCANCEL, job], controller)
                say(f"cancelled job {job}")
            except SlurmError as second:
                say(f"job {job} is not cancelled: {second.why}")


def wait_until_idle(name: str, controller: str, deadline: Deadline) -> None:
    while deadline.left > 1.0 and slurm_client.jobs(name, controller):
        deadline.pause(0.2)


def remove(name: str, controller: str, deadline: Deadline) -> None:
    """Slurm refuses to delete a busy node; after the requeue it is busy for the moment of completing."""
    while True:
        try:
            slurm_client.run([slurm_client.SCONTROL, "delete", f"nodename={name}"], controller)
        except SlurmError as error:
            if "not found" in error.why or "Invalid node name" in error.why:
                return
            if not deadline.pause(0.2) or deadline.left < 0.5:
                say(f"{name} stays in Slurm: {error.why}")
                return
        else:
            say(f"{name} is drained and removed from Slurm")
            return


def register_again(name: str) -> None:
    """slurmd registers a dynamic node when it starts; slurmctld has forgotten the one that was drained."""
    from init.client import Client

    with Client(within=60.0) as client:
        services = [view.name for view in client.snapshot().services]
        for service in ("slurmd", "slurmd-static"):
            if service in services:
                reply = client.request("restart", service=service, wait=True)
                say(f"{name} is registered again" if reply.get("ready") else f"{service} is {reply.get('state')}")


def resume(controller: str) -> None:
    """Takes back a drain of ours, and nobody else's."""
    name = name_of_node()
    node = slurm_client.node(name, controller)
    if node is None:
        register_again(name)
    elif node.drained_by_others:
        say(f"{name} stays drained: {node.reason}")
    elif node.reason.startswith(STOPPING) and node.flags & {"DRAIN", "DOWN"}:
        slurm_client.update(name, ["state=resume"], controller)
        say(f"{name} is resumed")
    else:
        say(f"{name} is not drained")
