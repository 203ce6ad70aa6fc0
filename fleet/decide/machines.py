"""Which Node is which machine, and what is seen of each. A machine is known by its GPUs, where its worker tells them;
else by its provider's name for it; else by its Node. It outlives pods and Nodes: what was found of it stays with it.

What a pod says of its GPUs may be a lie, and be another pod's. Within one boot of a Node no GPU comes or goes, so there
it changes nothing; of several that claim one GPU it is the one's whose machine has it, or nobody's.
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
from fleet.world.kubernetes import Kubernetes, Node
from fleet.world.machine import HistoryEntry, Machine, MachineStatus
from fleet.world.slurm import SlurmNode
from fleet.world.snapshot import Worker
from ground.errors import one_line

# The condition in which a worker tells its GPUs.
GPUS = "minivm.io/Gpus"
_UUID = re.compile(r"GPU-[0-9a-fA-F-]{8,59}")
# As the broker posts it: "minivm: NAME[CLASS]@COMMIT words; ..." with the heaviest first.
_POSTED = "minivm: "
_VERDICT = re.compile(r"([\w.-]{1,80})\[(\w{1,16})\]@([0-9a-z]{1,40}).*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Verdict:
    check: str
    class_: str
    commit: str
    text: str

    @property
    def key(self) -> str:
        return f"{self.check}@{self.commit}"


@dataclass(frozen=True, slots=True)
class Host:
    """A Node with all the workers on it; those that Slurm does not know among them."""

    node: Node
    workers: Sequence[Worker] = ()
    said: frozenset[str] = frozenset()  # the GPUs that its pods tell of
    gpus: frozenset[str] = frozenset()  # and those of them that are believed
    same: str = ""  # the machine that it has been since its last boot, whatever is said

    @property
    def provider(self) -> str:
        return line(self.node.provider, 512)

    @property
    def slurm(self) -> list[SlurmNode]:
        return [worker.slurm for worker in self.workers if worker.slurm is not None]

    @property
    def known(self) -> bool:
        return len(self.slurm) == len(self.workers)

    def verdict(self) -> Verdict | None:
        found = (verdict(node) for node in self.slurm)
        return next((one for one in found if one), None)


def verdict(node: SlurmNode) -> Verdict | None:
    return named(node.reason.removeprefix(_POSTED)) if node.drained and node.reason.startswith(_POSTED) else None


def named(text: str) -> Verdict | None:
    found = _VERDICT.fullmatch(text)
    return Verdict(found[1], found[2], found[3], line(text)) if found else None


def line(text: str, most: int = crd.TEXT) -> str:
    """One printable line, whatever somebody has written."""
    return one_line(text)[:most].strip()


def places(kubernetes: Kubernetes, workers: Sequence[Worker]) -> Mapping[str, Host]:
    on: dict[str, list[Worker]] = {}
    for worker in workers:
        on.setdefault(worker.pod.node, []).append(worker)
    return {
        name: Host(node, on.get(name, ()), _said(on.get(name, ()))) for name, node in sorted(kubernetes.nodes.items())
    }


def _said(workers: Sequence[Worker]) -> frozenset[str]:
    told = (worker.pod.conditions.get(GPUS) for worker in workers)
    return frozenset(_UUID.findall(" ".join(one.message for one in told if one))[: crd.GPUS])


def believed(machines: Mapping[str, Machine], found: Mapping[str, Host]) -> Mapping[str, Host]:
    """The same places, with what is to be believed of their GPUs."""
    same = {(one.status.node_uid, one.status.boot): key for key, one in machines.items() if _stays(one)}
    here = {where: same.get((place.node.uid, place.node.boot), "") for where, place in found.items()}
    owned = {gpu: key for key in sorted(here.values()) if key for gpu in machines[key].status.gpus}
    claims = Counter(gpu for place in found.values() for gpu in place.said)

    def true(where: str) -> frozenset[str]:
        key, said = here[where], found[where].said
        mine = frozenset(gpu for gpu in said if owned.get(gpu, key) == key and (gpu in owned or claims[gpu] == 1))
        had = machines[key].status.gpus if key else ()
        if not key or not had:
            return mine
        return frozenset((*had, *sorted(mine - set(had)))[: crd.GPUS]) if mine & set(had) else frozenset(had)

    return {where: replace(place, gpus=true(where), same=here[where]) for where, place in found.items()}


def _stays(machine: Machine) -> bool:
    """One that was just made, and whose GPUs nobody has told yet, may turn out to be one that is known."""
    one = machine.status
    settled = bool(one.gpus or one.remedy or machine.goal not in ("", "up"))
    return bool(one.node_uid and one.boot) and settled and not machine.deleting


def matched(machines: Mapping[str, Machine], found: Mapping[str, Host]) -> Mapping[str, str]:
    """The machine of each Node that has one. None is at two places: who says so last is not believed."""
    result: dict[str, str] = {}
    free = {key: one.status for key, one in sorted(machines.items()) if not one.deleting}
    by_gpu, by_provider, by_node = _by_mark(free)
    here = {place.node.uid for place in found.values()}

    def take(where: str, candidates: Iterable[str]) -> None:
        """The first of them that is nowhere else."""
        mine = found[where].node.uid
        for key in candidates if where not in result else ():
            if key in free and (free[key].node_uid == mine or free[key].node_uid not in here):
                result[where] = key
                del free[key]
                return

    for where, place in found.items():
        take(where, [place.same] if place.same else ())
    # Of several that claim one, who has it keeps it.
    held = {one.node_uid for one in free.values()}
    for where in sorted(found, key=lambda name: (found[name].node.uid not in held, name)):
        shared = Counter(by_gpu[gpu] for gpu in found[where].gpus if gpu in by_gpu)
        take(where, sorted(shared, key=lambda key: (-shared[key], key)))

    def may_be(key: str, place: Host) -> bool:
        """No GPU of it is here that was there: then somebody has put other hardware behind the same name."""
        return not (machines[key].status.gpus and place.gpus)

    for where, place in found.items():
        take(where, [key for key in by_node.get(place.node.uid, ()) if may_be(key, place)])
    for where, place in found.items():
        take(where, [key for key in by_provider.get(place.provider, ()) if may_be(key, place)])
    for where, place in found.items():
        # Just made, or back; its name says which one it is.
        take(where, [key for key in (name(place),) if key in machines and may_be(key, place)])
    return result


def _by_mark(kept: Mapping[str, MachineStatus]) -> tuple[dict[str, str], dict[str, list[str]], dict[str, list[str]]]:
    by_gpu: dict[str, str] = {}
    by_provider: dict[str, list[str]] = {}
    by_node: dict[str, list[str]] = {}
    for key, one in kept.items():
        by_gpu.update(dict.fromkeys(one.gpus, key))
        if one.provider:
            by_provider.setdefault(one.provider, []).append(key)
        if one.node_uid:
            by_node.setdefault(one.node_uid, []).append(key)
    return by_gpu, by_provider, by_node


def name(place: Host) -> str:
    """The same for the same hardware, whoever makes it and however often."""
    node = place.node
    known = " ".join(sorted(place.gpus)) or place.provider or node.uid
    return f"{node.name[:200]}-{hashlib.sha256(known.encode()).hexdigest()[:8]}"


def made(machines: Mapping[str, Machine], found: Mapping[str, Host], at: Mapping[str, str]) -> Iterator[Make | Notice]:
    """Of each Node that has a worker, and no machine yet."""
    known = {gpu: key for key, machine in machines.items() for gpu in machine.status.gpus}
    claims = Counter(gpu for place in found.values() for gpu in place.said)
    for where, place in found.items():
        strange = place.said - set(machines[at[where]].status.gpus if where in at else ())
        if others := sorted({known[gpu] for gpu in strange if gpu in known}):
            yield Notice(where, "twice", f"says that it has GPUs of {others[0]}, which is elsewhere: not believed")
        elif any(claims[gpu] > 1 for gpu in strange):
            yield Notice(where, "twice", "says that it has GPUs that another one says it has: neither is believed")
        elif place.same and place.said and not place.said & place.gpus:
            yield Notice(
                where, "twice", f"says that it has other GPUs than {place.same} since its last boot: not believed"
            )
        if where in at or not place.workers:
            continue
        if not any(gpu in known for gpu in place.said) and name(place) not in machines:
            yield Make(name(place), where)


def seen(machine: Machine, place: Host | None, now: float, window_s: float, *, stands: bool = False) -> MachineStatus:
    """The status after a look; without a place it is nowhere. `stands`: what Slurm does not say is so all the same."""
    before = machine.status
    if place is None:
        after = replace(before, state="Absent", node="", node_uid="", worker="")
        if before.remedy is not None and before.remedy.goal == "replace":
            after = add(replace(after, remedy=None), now, "replaced")
        return add(after, now, "left", before.node) if before.node else after
    node, found = place.node, place.verdict()
    after = replace(
        before,
        node=node.name,
        node_uid=node.uid,
        boot=node.boot,
        provider=place.provider or before.provider,
        gpus=tuple(sorted(place.gpus)) or before.gpus,
        worker=" ".join(worker.name for worker in place.workers)[:2048],
        state=state(place),
    )
    if before.node_uid != node.uid:
        after = add(after, now, "node", node.name)
    if found is not None and not (before.ill and check(before.verdict) == found.check):
        after = add(after, now, "verdict", found.text)
    if found is not None:
        after = replace(after, verdict=found.text, ill=True)
    elif place.known and place.workers and before.ill and not stands:
        after = add(replace(after, ill=False), now, "well", "")
    if machine.goal == "up" and after.history and _counted(after):
        after = add(after, now, "forgiven", machine.reason)
    return replace(after, repeats=count(after, "verdict", now, window_s))


def check(said: str) -> str:
    return said.partition("[")[0]


def state(place: Host) -> str:
    if not place.workers:
        return "GivenUp" if place.node.fenced else "NoWorker"
    if not place.known:
        return "Unregistered"
    return max((condition(node).reason for node in place.slurm), key=WORST.index)


def _counted(status: MachineStatus) -> bool:
    return any(one.what in ("verdict", "reboot", "failed") for one in since_forgiven(status))


def since_forgiven(status: MachineStatus) -> tuple[HistoryEntry, ...]:
    last = max((number for number, one in enumerate(status.history) if one.what == "forgiven"), default=-1)
    return status.history[last + 1 :]


def count(status: MachineStatus, what: str, now: float, window_s: float) -> int:
    return sum(one.what == what and now - one.at < window_s for one in since_forgiven(status))


def add(status: MachineStatus, now: float, what: str, text: str = "") -> MachineStatus:
    return replace(status, history=(*status.history, HistoryEntry(int(now), what, line(text)))[-crd.EVENTS :])
