"""Match Nodes to Machine objects, and update the status of each machine.

A machine is known by its GPUs if its worker reports them, else by the provider's name, else by its Node. It outlives
pods and Nodes. A pod's report of GPUs may be forged. Within one boot of a Node no GPU comes or goes, so reports change
nothing there; if several Nodes claim a GPU, its present machine keeps it, or no claim counts.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from fleet import crd
from fleet.decide.actions import Make, Notice
from fleet.decide.conditions import WORST, condition
from fleet.world.kubernetes import KubeNode, KubernetesView
from fleet.world.machine import ActiveHistory, HistoryEntry, MachineObject, MachineStatus
from fleet.world.pod_page import ACTIVE_CHECKS, GPUS
from fleet.world.slurm import SlurmNode
from fleet.world.snapshot import Worker
from ground.errors import one_line

_UUID = re.compile(r"GPU-[0-9a-fA-F-]{8,59}")
# As the broker posts it: "minivm: NAME[CLASS]@COMMIT words; ..." with the heaviest first.
_POSTED = "minivm: "
_VERDICT = re.compile(r"([\w.-]{1,80})\[(\w{1,16})\]@([0-9a-z]{1,40}).*", re.DOTALL)
# As a pod reports its active checks: "CHECK passed|failed TIME; ..." (init/view/conditions.py).
_ACTIVE_RESULT = re.compile(r"(?:^|; )([A-Za-z0-9_.-]{1,64}) (passed|failed) ([0-9]{1,11})(?=;|$)")
AHEAD_S = 300.0


@dataclass(frozen=True, slots=True)
class DrainVerdict:
    check: str
    class_: str
    commit: str
    text: str

    @property
    def key(self) -> str:
        return f"{self.check}@{self.commit}"


@dataclass(frozen=True, slots=True)
class Host:
    """A Node with all workers on it, also those that Slurm does not know."""

    node: KubeNode
    workers: Sequence[Worker] = ()
    reported_gpus: frozenset[str] = frozenset()  # GPUs that its pods report
    gpus: frozenset[str] = frozenset()  # GPUs that the fleet accepts
    machine: str = ""  # the Machine that it has been since its last boot

    @property
    def provider(self) -> str:
        return line(self.node.provider, 512)

    @property
    def slurm(self) -> list[SlurmNode]:
        return [worker.slurm for worker in self.workers if worker.slurm is not None]

    @property
    def is_known_to_slurm(self) -> bool:
        """Return whether Slurm knows all of its workers."""
        return len(self.slurm) == len(self.workers)

    def verdict(self) -> DrainVerdict | None:
        verdicts = (_read_posted_verdict(node) for node in self.slurm)
        return next((verdict for verdict in verdicts if verdict), None)


def _read_posted_verdict(node: SlurmNode) -> DrainVerdict | None:
    posted = node.drained and node.reason.startswith(_POSTED)
    return parse_verdict(node.reason.removeprefix(_POSTED)) if posted else None


def parse_verdict(text: str) -> DrainVerdict | None:
    match = _VERDICT.fullmatch(text)
    return DrainVerdict(match[1], match[2], match[3], line(text)) if match else None


def line(text: str, most: int = crd.TEXT) -> str:
    """Cut text from users and machines to one printable line."""
    return one_line(text)[:most].strip()


def find_hosts(kubernetes: KubernetesView, workers: Sequence[Worker]) -> Mapping[str, Host]:
    on: dict[str, list[Worker]] = {}
    for worker in workers:
        on.setdefault(worker.pod.node, []).append(worker)
    return {
        name: Host(node, on.get(name, ()), _read_reported_gpus(on.get(name, ())))
        for name, node in sorted(kubernetes.nodes.items())
    }


def _read_reported_gpus(workers: Sequence[Worker]) -> frozenset[str]:
    reports = (worker.pod.conditions.get(GPUS) for worker in workers)
    return frozenset(_UUID.findall(" ".join(report.message for report in reports if report))[: crd.GPUS])


def choose_believed_gpus(
    machines: Mapping[str, MachineObject], hosts_by_node: Mapping[str, Host]
) -> Mapping[str, Host]:
    """Return the same hosts with the GPUs that are believed."""
    same = {(machine.status.node_uid, machine.status.boot): key for key, machine in machines.items() if _stays(machine)}
    machine_at = {name: same.get((host.node.uid, host.node.boot), "") for name, host in hosts_by_node.items()}
    owned = {gpu: key for key in sorted(machine_at.values()) if key for gpu in machines[key].status.gpus}
    claims = Counter(gpu for host in hosts_by_node.values() for gpu in host.reported_gpus)

    def believed(name: str) -> frozenset[str]:
        key, reported = machine_at[name], hosts_by_node[name].reported_gpus
        accepted = frozenset(
            gpu for gpu in reported if owned.get(gpu, key) == key and (gpu in owned or claims[gpu] == 1)
        )
        known = machines[key].status.gpus if key else ()
        if not key or not known:
            return accepted
        return (
            frozenset((*known, *sorted(accepted - set(known)))[: crd.GPUS])
            if accepted & set(known)
            else frozenset(known)
        )

    return {name: replace(host, gpus=believed(name), machine=machine_at[name]) for name, host in hosts_by_node.items()}


def _stays(machine: MachineObject) -> bool:
    """Return whether its Node is settled. A new Machine without GPUs may turn out to be a known machine."""
    status = machine.status
    settled = bool(status.gpus or status.remedy or machine.goal not in ("", "up"))
    return bool(status.node_uid and status.boot) and settled and not machine.deleting


def match_machines(machines: Mapping[str, MachineObject], hosts_by_node: Mapping[str, Host]) -> Mapping[str, str]:
    """Return the Machine of each Node that has one. A Machine is at one Node; a second claim is ignored."""
    result: dict[str, str] = {}
    free = {key: machine.status for key, machine in sorted(machines.items()) if not machine.deleting}
    by_gpu, by_provider, by_node = _index(free)
    node_uids = {host.node.uid for host in hosts_by_node.values()}

    def take(name: str, candidates: Iterable[str]) -> None:
        """Take the first candidate that is at no other Node."""
        uid = hosts_by_node[name].node.uid
        for key in candidates if name not in result else ():
            if key in free and (free[key].node_uid == uid or free[key].node_uid not in node_uids):
                result[name] = key
                del free[key]
                return

    for name, host in hosts_by_node.items():
        take(name, [host.machine] if host.machine else ())
    # If several Nodes claim a machine, the Node that has it keeps it.
    claimed_uids = {status.node_uid for status in free.values()}
    for name in sorted(hosts_by_node, key=lambda name: (hosts_by_node[name].node.uid not in claimed_uids, name)):
        shared = Counter(by_gpu[gpu] for gpu in hosts_by_node[name].gpus if gpu in by_gpu)
        take(name, sorted(shared, key=lambda key: (-shared[key], key)))

    def may_be(key: str, host: Host) -> bool:
        """Return whether the hardware may be the same: GPUs known on both sides must have one in common."""
        return not (machines[key].status.gpus and host.gpus)

    for name, host in hosts_by_node.items():
        take(name, [key for key in by_node.get(host.node.uid, ()) if may_be(key, host)])
    for name, host in hosts_by_node.items():
        take(name, [key for key in by_provider.get(host.provider, ()) if may_be(key, host)])
    for name, host in hosts_by_node.items():
        # Just created, or back: then its name identifies it.
        take(name, [key for key in (machine_name(host),) if key in machines and may_be(key, host)])
    return result


def _index(statuses: Mapping[str, MachineStatus]) -> tuple[dict[str, str], dict[str, list[str]], dict[str, list[str]]]:
    by_gpu: dict[str, str] = {}
    by_provider: dict[str, list[str]] = {}
    by_node: dict[str, list[str]] = {}
    for key, status in statuses.items():
        by_gpu.update(dict.fromkeys(status.gpus, key))
        if status.provider:
            by_provider.setdefault(status.provider, []).append(key)
        if status.node_uid:
            by_node.setdefault(status.node_uid, []).append(key)
    return by_gpu, by_provider, by_node


def machine_name(host: Host) -> str:
    """Name a Machine after its hardware: the same for every fleet and every attempt."""
    identity = " ".join(sorted(host.gpus)) or host.provider or host.node.uid
    return f"{host.node.name[:200]}-{hashlib.sha256(identity.encode()).hexdigest()[:8]}"


def create_missing_machines(
    machines: Mapping[str, MachineObject], hosts_by_node: Mapping[str, Host], at: Mapping[str, str]
) -> Iterator[Make | Notice]:
    """Create a Machine for each Node that has a worker and no Machine, and report GPUs that contradict each other."""
    machine_of_gpu = {gpu: key for key, machine in machines.items() for gpu in machine.status.gpus}
    claims = Counter(gpu for host in hosts_by_node.values() for gpu in host.reported_gpus)
    for name, host in hosts_by_node.items():
        strange = host.reported_gpus - set(machines[at[name]].status.gpus if name in at else ())
        if claimants := sorted({machine_of_gpu[gpu] for gpu in strange if gpu in machine_of_gpu}):
            text = f"reports GPUs of machine {claimants[0]}, which is on another Node: the fleet ignores them"
            yield Notice(name, "twice", text)
        elif any(claims[gpu] > 1 for gpu in strange):
            yield Notice(name, "twice", "reports GPUs that another Node reports too: the fleet ignores both reports")
        elif host.machine and host.reported_gpus and not host.reported_gpus & host.gpus:
            yield Notice(
                name,
                "twice",
                f"reports other GPUs than {host.machine} has had since its last boot: the fleet ignores them",
            )
        if name in at or not host.workers:
            continue
        if not any(gpu in machine_of_gpu for gpu in host.reported_gpus) and machine_name(host) not in machines:
            yield Make(machine_name(host), name)


def update_status(
    machine: MachineObject, host: Host | None, now: float, window_s: float, *, keeps_verdict: bool = False
) -> MachineStatus:
    """Return the status after a pass. No host: the machine is at no Node. `keeps_verdict`: also one that Slurm lost."""
    before = machine.status
    if host is None:
        after = replace(before, state="Absent", node="", node_uid="", worker="")
        if before.remedy is not None and before.remedy.goal == "replace":
            after = add_history(replace(after, remedy=None), now, "replaced")
        return add_history(after, now, "left", before.node) if before.node else after
    node, verdict = host.node, host.verdict()
    after = replace(
        before,
        node=node.name,
        node_uid=node.uid,
        boot=node.boot,
        provider=host.provider or before.provider,
        gpus=tuple(sorted(host.gpus)) or before.gpus,
        worker=" ".join(worker.name for worker in host.workers)[:2048],
        state=host_state(host),
        active_checks=add_active_results(before.active_checks, host.workers, now),
    )
    if before.node_uid != node.uid:
        after = add_history(after, now, "node", node.name)
    if verdict is not None and not (before.ill and check_name(before.verdict) == verdict.check):
        after = add_history(after, now, "verdict", verdict.text)
    if verdict is not None:
        after = replace(after, verdict=verdict.text, ill=True)
    elif host.is_known_to_slurm and host.workers and before.ill and not keeps_verdict:
        after = add_history(replace(after, ill=False), now, "well", "")
    if machine.goal == "up" and any(
        entry.what in ("verdict", "reboot", "failed") for entry in list_since_forgiven(after)
    ):
        after = add_history(after, now, "forgiven", machine.reason)
    return replace(after, repeats=count(after, "verdict", now, window_s))


def add_active_results(
    known: Sequence[ActiveHistory], workers: Sequence[Worker], now: float
) -> tuple[ActiveHistory, ...]:
    """Add what the pods report of active checks: the machine's results outlive them. A report decides nothing.

    A result counts once, by its time. One of a clock that is ahead does not count, since none after it would.
    """
    by_check = {entry.check: entry for entry in known}
    reports = (worker.pod.conditions.get(ACTIVE_CHECKS) for worker in workers)
    results = _ACTIVE_RESULT.findall("; ".join(report.message for report in reports if report))
    for check, result, at in sorted(results, key=lambda item: int(item[2]))[-crd.CHECKS * len(workers) :]:
        entry = by_check.get(check, ActiveHistory(check, 0))
        if entry.at < int(at) <= now + AHEAD_S:
            passed_at = int(at) if result == "passed" else entry.passed_at
            letters = (entry.results + ("P" if result == "passed" else "F"))[-crd.RESULTS :]
            by_check[check] = ActiveHistory(check, int(at), passed_at, letters)
    latest = sorted(by_check.values(), key=lambda entry: entry.at)[-crd.CHECKS :]
    return tuple(sorted(latest, key=lambda entry: entry.check))


def check_name(text: str) -> str:
    return text.partition("[")[0]


def host_state(host: Host) -> str:
    if not host.workers:
        return "GivenUp" if host.node.fenced else "NoWorker"
    if not host.is_known_to_slurm:
        return "Unregistered"
    return max((condition(node).reason for node in host.slurm), key=WORST.index)


def list_since_forgiven(status: MachineStatus) -> tuple[HistoryEntry, ...]:
    last = max((number for number, entry in enumerate(status.history) if entry.what == "forgiven"), default=-1)
    return status.history[last + 1 :]


def count(status: MachineStatus, what: str, now: float, window_s: float) -> int:
    return sum(entry.what == what and now - entry.at < window_s for entry in list_since_forgiven(status))


def add_history(status: MachineStatus, now: float, what: str, text: str = "") -> MachineStatus:
    entry = HistoryEntry(int(now), what, line(text))
    return replace(status, history=(*status.history, entry)[-crd.EVENTS :])
