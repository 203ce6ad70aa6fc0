"""Introduce this pod to slurmctld: before slurmd's start as a new pod, afterwards by a proof of key and registration.

`announce` requeues the old pod's jobs and drops its address. It runs once per boot of the pod only: after a restart of
slurmd alone the jobs are alive, and this would kill them. `prove` runs once slurmd is there, and after a set clock.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Mapping

from init.errors import InitError
from init.fields import number
from init.places import pod_name
from init.pod.auth import mode, sign_requests
from init.slurm import client
from init.slurm.node import plan_fresh_start, unproven

TYPE_CHECKING = False
if TYPE_CHECKING:
    from init.slurm.node import Node

SLURMD = "/usr/sbin/slurmd"
REASON = "minivm: the pod of node {} was replaced: the job is requeued, or ended where it cannot be requeued"
BORN_FILE = "/run/minivm/env/born"
BORN = "MINIVM_SLURMD_BORN"  # its variable: further arguments of slurmd's --conf

# Comparison of a node's record with its pod's resources.
#
# slurmctld reads a dynamic node's description once, when it creates the record. Slurm would drain a pod that returns
# with less ("Low RealMemory"), and ignore the additions of one that returns with more.

# Names of the keys in `scontrol show node`.
SHOWN_AS = {"cpus": "CPUTot", "feature": "AvailableFeatures", "features": "AvailableFeatures"}
# Keys that slurmd detects unless one of them is given.
TOPOLOGY = frozenset({"cpus", "boards", "socketsperboard", "corespersocket", "threadspercore"})
# Values of missing keys.
DEFAULTS = {"Gres": "", "AvailableFeatures": "", "CoreSpecCount": "0", "MemSpecLimit": "0", "Weight": "1"}
EMPTY = ("(null)", "N/A")


def describe_registration(configuration: str, hardware: str) -> dict[str, str]:
    """Return the description that slurmd would register: minivm's values over those of `slurmd -C`."""
    own, detected = parse_pairs(configuration), parse_pairs(hardware)
    if TOPOLOGY & set(own):
        detected = {key: value for key, value in detected.items() if key not in TOPOLOGY}
    return detected | own


def parse_pairs(text: str) -> dict[str, str]:
    pairs = (word.partition("=") for word in text.split())
    return {key.lower(): value for key, equals, value in pairs if equals}


def difference(shown: Mapping[str, str], offer: Mapping[str, str]) -> str:
    """Return the first difference to the record, else "". Keys that slurmctld does not show are not compared."""
    names = {key.lower(): key for key in (*shown, *DEFAULTS)}
    expected = dict(DEFAULTS)
    for key, value in offer.items():
        name = SHOWN_AS.get(key) or names.get(key)
        if name and key != "nodename":
            expected[name] = value
    for name, value in expected.items():
        current = shown.get(name, DEFAULTS.get(name, ""))
        current = "" if current in EMPTY else current
        if not _is_same(name, current, value):
            return f"{name} was {current or 'nothing'} and is {value or 'nothing'}"
    return ""


def _is_same(name: str, current: str, offered_value: str) -> bool:
    if name != "Gres":
        return current == offered_value
    return resources(offered_value) in (resources(current), resources_without_types(current))


def resources(gres: str) -> dict[str, int]:
    """Parse gpu:h100:8(S:0-1),nvme:2 as {gpu:h100: 8, nvme: 2}; slurmctld adds the sockets."""
    counts: dict[str, int] = {}
    for part in re.sub(r"\([^)]*\)", "", gres).split(","):
        name, _, count = part.rpartition(":")
        many = number(count)
        if part and many is None:
            name, many = part, 1
        if name:
            counts[name] = counts.get(name, 0) + (many or 0)
    return counts


def resources_without_types(gres: str) -> dict[str, int]:
    """Count the resources without their types, which slurmd may have detected."""
    counts: dict[str, int] = {}
    for name, count in resources(gres).items():
        kind = name.partition(":")[0]
        counts[kind] = counts.get(kind, 0) + count
    return counts


def announce() -> int:
    """Run the built-in `fresh-node`."""
    controller = client.address(os.environ)
    name = pod_name(os.environ)
    try:
        with sign_requests(controller):
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
    """Bring the record up to date before slurmd starts; return what was done, for the log."""
    done: list[str] = []
    differs = find_difference(node, controller) if node.dynamic else ""
    if node.busy:
        with contextlib.suppress(InitError):  # the reason must not keep the pod from its start
            jobs = client.jobs(node.name, controller, within=5.0)
            running = [job for job, state in jobs.items() if state not in client.OVER]
            client.comment(running, REASON.format(node.name), controller, within=5.0)
        # That may take seconds, in which a person may have drained the node.
        current = client.node(node.name, controller)
        if current is None:
            return done
        node = current
    plan = plan_fresh_start(node, os.environ.get("MINIVM_POD_IP", ""), differs=bool(differs))
    if not plan.born:
        forget_birth()  # from an earlier try, before a person lifted the drain
    if plan.free_jobs:
        client.free(client.jobs(node.name, controller), controller, done.append)
    for changes in plan.updates:
        client.update(node.name, changes, controller)
        done.append(" ".join(changes))
    if plan.delete_record:
        publish(plan.born)
        client.delete(node.name, controller)
        done.append(f"registers anew, {differs}{': ' if plan.born else ''}{plan.born}")
    return done


def find_difference(node: Node, controller: str) -> str:
    """Return the first difference between this pod's resources and its record."""
    hardware = client.run([SLURMD, "-C"], controller).partition("\n")[0]
    return difference(dict(node.shown), describe_registration(os.environ.get("MINIVM_SLURMD_CONF", ""), hardware))


def publish(born: str) -> None:
    """Write the argument for slurmd's start before the record is deleted, so that an interruption loses nothing."""
    if born:
        from init.pod.pod import Pod

        Pod(os.environ).publish("born", {BORN: born})


# Proof at boot: one authenticated call proves the cluster's key, which `munge | unmunge` cannot. On a worker the same
# call proves that slurmctld knows this slurmd: registered since its start, at this address. A failed proof exits with
# its reason; the service's backoff with jitter repeats it.

# Only a worker has it: its preparation wrote its resources (`environment-files` of the service).
WORKER = "MINIVM_SLURMD_CONF"
# slurmd sends READY a moment before its registration arrives: pauses between looks, one second in all.
STEPS = (0.05, 0.1, 0.2, 0.3, 0.35)
ONE_START = 5.0  # seconds that one start of slurmd may take


def prove() -> int:
    """Run the built-in `cluster-proof`."""
    controller = client.address(os.environ)
    try:
        with sign_requests(controller):
            reason = find_obstacle(controller)
    except InitError as error:
        reason = error.why
    if reason:
        print(reason, file=sys.stderr)
        return 1
    print(f"{mode()} key proven by {controller}")
    return 0


def find_obstacle(controller: str) -> str:
    """Return why slurmctld does not accept this pod, else ""."""
    if WORKER in os.environ:
        return worker(controller)
    client.run([client.SCONTROL, "--oneliner", "show", "partition"], controller)
    return ""


def worker(controller: str) -> str:
    """Return why the node is not proven, else ""."""
    name = pod_name(os.environ)
    own = os.environ.get("MINIVM_POD_IP", "")
    reason = since = ""
    for step in (0.0, *STEPS):
        time.sleep(step)
        # The controller first: a refused key or a wrong clock also keeps slurmd from answering.
        node = client.node(name, controller)
        since = since or local_start(controller)
        reason = unproven(node, name, [own] if own else []) or _old(node, since)
        if not reason:
            forget_birth()
            break
    return reason


def forget_birth() -> None:
    """Remove the drain for a new pod's slurmd: it applies once, and a later start must not repeat it."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(BORN_FILE)  # noqa: PTH108 - pathlib costs 8 ms of boot


def _old(node: Node | None, since: str) -> str:
    """Return an error if the registration is older than this pod's slurmd, hence the last pod's."""
    if node is not None and since and node.started < since and not _same_start(node.started, since):
        return f"slurmctld knows {node.name} as of {node.started}, and slurmd started at {since}: not registered"
    return ""


def _same_start(registered: str, started: str) -> bool:
    """Tell if two times are one start: slurmd reads the clock twice, on a busy machine a second or more apart."""
    from datetime import datetime  # imported late: usually they are equal

    return (datetime.fromisoformat(started) - datetime.fromisoformat(registered)).total_seconds() <= ONE_START


def local_start(controller: str) -> str:
    """Ask slurmd for its start time, in slurmctld's format."""
    try:
        text = client.run([client.SCONTROL, "show", "slurmd"], controller)
    except client.SlurmError:
        raise client.SlurmError("ask slurmd", "slurmd of this pod does not answer") from None
    match = re.search(r"^Boot time\s*=\s*(\S+)", text, re.MULTILINE)
    return match[1] if match else ""
