"""Drain of a worker: refuse new jobs, wait for running ones, requeue them, then set the node down.

Otherwise slurmctld notices the lost node only after SlurmdTimeout, and its jobs stay RUNNING until then. The node's
record stays: it holds the state that people set, and a job that names a node without a record fails at the next
reconfigure. See docs/decisions/worker-record-outlives-pod.md.
"""

from __future__ import annotations

import contextlib
import os
import socket

from ground.errors import counted
from init.drain.deadline import LEAST, Deadline, list_own_processes, report
from init.engine import order
from init.errors import InitError
from init.places import pod_name
from init.pod.addresses import host_and_port
from init.slurm import client
from init.slurm.client import SlurmError
from init.slurm.node import BACK, STOPPING

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    T = TypeVar("T")

RESERVE = order.REQUEUE
KEPT = 2.0  # part of it kept from the last look at the jobs
LEFT = 1.0  # part of it for the removal
EXPLAINS = 0.25  # share of the rest for the reason in the jobs' comments and outputs
REASON = "minivm: the pod of node {} stops: the job is requeued, or cancelled where it cannot be requeued"
LOOK_EVERY = 0.5
# Seconds that the controller's name must not exist before the cluster counts as deleted.
GONE = 20.0


def name_of_node() -> str:
    return pod_name(os.environ)


def drain(controller: str, deadline: Deadline) -> None:
    name = name_of_node()
    if not retry_while_jobs_run(lambda: refuse_jobs(name, controller, deadline), controller, deadline):
        report(f"slurmctld knows no node {name}: nothing to drain")
        return
    jobs = wait_for_jobs(name, controller, deadline)
    if jobs:
        running = [job for job, state in jobs.items() if state not in client.OVER]
        client.explain(running, REASON.format(name), controller, within=EXPLAINS * deadline.within(LEFT))
        client.free(jobs, controller, report, within=deadline.within(LEFT))
        wait_until_idle(name, controller, deadline)
    retry_for_reserve(lambda: leave(name, controller, deadline), deadline)


def refuse_jobs(name: str, controller: str, deadline: Deadline) -> bool:
    """Drain the node, unless another actor holds it; False if slurmctld knows no such node.

    Each try looks again: while slurmctld is silent to this pod, it may answer a person who drains the node.
    """
    node = client.node(name, controller, within=max(LEAST, deadline.left / 2))
    if node is None:
        return False
    if not (node.held_by_others or (node.held_by_us and "DRAIN" in node.flags)):
        changes = ["state=drain", f"reason={STOPPING}"]
        client.update(name, changes, controller, within=deadline.within(KEPT))
    return True


def leave(name: str, controller: str, deadline: Deadline) -> None:
    """Set the node down, unless a person drained it meanwhile: no jobs come then, and down would replace the reason."""
    node = client.node(name, controller, within=deadline.within(deadline.left / 2))
    if node is not None and node.held_by_others:
        report(f"{name} stays as it is in Slurm: {node.reason}")
    elif node is not None:
        client.update(name, ["state=down", f"reason={STOPPING}"], controller, within=deadline.within())
        report(f"{name} is down in Slurm until the pod is back")


def retry_for_reserve(ask: Callable[[], T], deadline: Deadline) -> T:
    """Retry for the reserved time: nothing runs here any more, and a pod must not stay for a message to Slurm alone."""
    reserved = Deadline(min(RESERVE, deadline.left))
    while True:
        try:
            return ask()
        except SlurmError:
            if not reserved.pause(LOOK_EVERY):
                raise


def retry_while_jobs_run(
    ask: Callable[[], T], controller: str, deadline: Deadline, missed: Callable[[], None] = lambda: None
) -> T:
    """Retry a request to slurmctld while jobs run here and time is left: giving up would end them now.

    An absent controller comes back: its pod is replaced together with this one, for example. If its name stays gone,
    its Service was deleted with the release, and no slurmctld will learn how a job ends.
    """
    last, unnamed = "", 0.0
    while True:
        try:
            return ask()
        except SlurmError as error:
            if deadline.left <= RESERVE or not steps():
                raise
            unnamed = 0.0 if is_named(controller) else unnamed or deadline.left
            if unnamed and unnamed - deadline.left >= GONE:
                raise SlurmError("drain", f"there is no {controller} any more: the cluster was deleted") from error
            text = f"jobs run here, so the drain asks slurmctld again: {error.why}"
        if text != last:
            report(text)
            missed()
            last = text
        deadline.pause(min(LOOK_EVERY, deadline.left))


def is_named(controller: str) -> bool:
    """Tell if the controller's name resolves; False only if a name server denies that it exists."""
    host, port = host_and_port(controller)
    try:
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        # The name of a headless Service whose pod is absent exists, without an address.
        return error.errno != socket.EAI_NONAME
    return True


def steps() -> list[int]:
    """Find this pod's slurmstepd processes by name and real user root, which no other user can have."""
    return list_own_processes(
        lambda status: status["Uid"].split()[0] == "0" and status["Name"].startswith("slurmstepd")
    )


def wait_for_jobs(name: str, controller: str, deadline: Deadline) -> dict[str, str]:
    """Wait for the jobs; return those left at the end of the budget, with their states."""
    last = ""

    def missed() -> None:
        nonlocal last
        last = ""

    while True:
        jobs = retry_while_jobs_run(
            lambda: client.jobs(name, controller, within=deadline.within(KEPT)), controller, deadline, missed
        )
        if not jobs:
            return {}
        text = f"waiting for {counted(len(jobs), 'job')}: {' '.join([*jobs][:8])}{' ...' if len(jobs) > 8 else ''}"
        if text != last:
            report(text)
            last = text
        if deadline.left <= RESERVE:
            return jobs
        deadline.pause(min(LOOK_EVERY, deadline.left - RESERVE))


def wait_until_idle(name: str, controller: str, deadline: Deadline) -> None:
    with contextlib.suppress(SlurmError):  # the node must be down in Slurm, sooner or later
        while (remaining := deadline.left - LEFT) > 0 and client.jobs(name, controller, within=remaining):
            deadline.pause(0.2)


def register_again(name: str) -> None:
    """Restart slurmd, which registers a dynamic node at its start, because the drained record was deleted."""
    from init.pod.client import Client

    with Client(within=60.0) as init:
        services = [view.name for view in init.snapshot().services]
        for service in ("slurmd", "slurmd-static"):
            if service in services:
                reply = init.request("restart", service=service, wait=True)
                report(f"{name} is registered again" if reply.get("ready") else f"{service} is {reply.get('state')}")


def resume(controller: str) -> None:
    """Take back the drain of this pod's own; fail where another one holds the node, since no job comes then."""
    name = name_of_node()
    node = client.node(name, controller)
    if node is None:
        register_again(name)
    elif node.held_by_others:
        state, author = "drained" if "DRAIN" in node.flags else "down", f", by {node.author}" if node.author else ""
        raise InitError(
            f"give {name} jobs again",
            f"the pod takes work again, but {name} stays {state} in Slurm{author}: {node.reason or 'no reason given'}",
            hint=f"run `scontrol update nodename={name} state=resume` to lift it",
        )
    elif node.held_by_us:
        client.update(name, ["state=resume", f"reason={BACK}"], controller)
        report(f"{name} is resumed")
    else:
        report(f"{name} is not drained")
