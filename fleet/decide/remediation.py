"""What is done to a machine that is to be rebooted, replaced or switched off: once it is drained, cordoned and idle, in
its turn, and once. What follows is waited for, and seen to be well.

The intent is noted first, with its number, and what is done carries that number: whoever goes on after a cut, at any
moment, knows of both. Where nothing is named for a goal, or the policy only proposes, a person does it; a reboot is
seen all the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fleet.decide.actions import Annotate, CallHook, StartJob, Withdraw
from fleet.decide.causes import silent_for
from fleet.decide.machines import Host, Verdict, add, count, named
from fleet.policy import Machines, Treatment
from fleet.world.deep_check import DeepResult, deep
from fleet.world.kubernetes import Kubernetes
from fleet.world.machine import HistoryEntry, Machine, MachineStatus, Remedy
from fleet.world.slurm import Slurm

# How a machine's history says that a deep check has disproved a remedy; and after what that stands no more.
FAILED = "deep check: "
_ENDS = ("rebooted", "replaced", "forgiven")
ACTED = ("reboot", "replace", "down")
# On a Node, beside what the policy names: which remedy of which machine asked for it, and why. A machine that writes it
# by itself is not done anything to, and when its time is over that is told.
MARK, WHY = "minivm.io/remedy", "minivm.io/remedy-reason"
Act = Annotate | Withdraw | StartJob | CallHook
Step = tuple[MachineStatus, Act | None, str]


@dataclass(frozen=True, slots=True)
class RemedyTurn:
    """One machine's, at one look. `machine` is as it is kept: only what is noted there has been intended."""

    machine: Machine
    place: Host
    goal: str
    why: str
    room: bool  # for one more
    kubernetes: Kubernetes
    slurm: Slurm
    now: float
    rules: Machines

    def step(self, status: MachineStatus) -> Step:
        """The status after it, what is done, and what is waited for."""
        begun = self.machine.status.remedy
        if begun is not None and begun.goal != self.goal:
            return add(replace(status, remedy=None), self.now, "withdrawn", begun.goal), None, ""
        mark = self.place.node.annotations.get(MARK, "")
        if mark.startswith(f"{self.machine.uid}/") and (begun is None or mark != self._mark(begun)):
            names = (MARK, WHY, *self._names())
            return status, Withdraw(self.place.node.name, self.place.node.uid, self.place.node.version, names), ""
        if self.goal not in ACTED:
            return status, None, ""
        if begun is None:
            return self._begin(status)
        return self._wait(status, begun) if begun.done else self._do(status, begun, mark)

    def _treatment(self) -> Treatment | None:
        """None: a person does it."""
        return self.rules.remedies.get(self.goal) if self.rules.mode == "act" else None

    def _mark(self, remedy: Remedy) -> str:
        return f"{self.machine.uid}/{remedy.number}"

    def _names(self) -> list[str]:
        return [name for one in self.rules.remedies.values() for name in one.annotate]

    def _begin(self, status: MachineStatus) -> Step:
        # A person may ask for as many as he likes, as long as they help.
        tries = count(status, "failed" if self.machine.goal else "reboot", self.now, self.rules.window_s)
        if self.goal == "reboot" and tries >= self.rules.attempts:
            return status, None, f"was rebooted {tries} times and is not well: a person is to look at it"
        if not self._idle():
            return status, None, "waits until it is drained, cordoned and idle"
        if not self.room:
            return status, None, "waits for its turn"
        by_hand = self._treatment() is None
        number = status.remedies + 1
        remedy = Remedy(self.goal, number, int(self.now), self.place.node.boot, by_hand)
        return add(replace(status, remedy=remedy, remedies=number), self.now, self.goal, self.why), None, "begins"

    def _idle(self) -> bool | None:
        """None: nothing speaks against it, and it is not known."""
        nodes = self.place.slurm
        if not self.place.node.cordoned or not self.place.known:
            return False
        held = [self.slurm.holding(node.name) for node in nodes]
        if any(held) or not all(node.drained and not node.record.busy for node in nodes):
            return False
        sees = self.kubernetes.sees(self.place.node.name)
        return True if sees and None not in held else None

    def _do(self, status: MachineStatus, begun: Remedy, mark: str) -> Step:
        done = replace(status, remedy=replace(begun, done=True))
        treatment = self._treatment()
        if treatment is None or mark == self._mark(begun) or self._booted(begun):
            return done, None, "is told"
        idle = self._idle()
        if idle is None:
            return status, None, "waits until it is known whether it is idle"
        if not idle:
            # Somebody has resumed it meanwhile: another turn, another number.
            return add(replace(status, remedy=None), self.now, "withdrawn", "it is not idle any more"), None, ""
        node = self.place.node
        name = f"{self.machine.name[:40].strip('-.')}-{self.machine.uid[:8]}-{begun.number}"
        if treatment.webhook is not None:
            pool = " ".join(sorted({worker.pod.pool for worker in self.place.workers}))
            about = (name, node.name, self.machine, self.goal, self.why, treatment.webhook, pool)
            return status, CallHook(*about, self._mark(begun), done), "is told"
        if treatment.job is None:
            told = {**treatment.annotate, MARK: self._mark(begun), WHY: self.why}
            return status, Annotate(node.name, node.uid, node.version, tuple(told.items())), "is told"
        job = StartJob(name, node.name, self.machine, self.goal, self.why, treatment.job, treatment.on_node, done)
        return status, job, "is told"

    def _booted(self, begun: Remedy) -> bool:
        return self.goal == "reboot" and booted(begun, self.place)

    def _wait(self, status: MachineStatus, begun: Remedy) -> Step:
        if self.goal != "reboot":
            return status, None, "is done: it is out of service" if self.goal == "down" else "is waited for"
        proof = self._proof(status) if self.rules.proof == "deep" and self._booted(begun) else None
        if proof is not None and proof.passed is False:
            # Its evidence outlives the remedy: by it the next one follows.
            said = add(add(status, self.now, "verdict", proof.text), self.now, "failed", f"{FAILED}{proof.text}")
            return replace(said, remedy=None, verdict=proof.text, ill=True), None, "has failed"
        if proof is not None and not proof.passed and self._well():
            return status, None, f"is rebooted, and waits: {proof.text}"
        if self._booted(begun) and self._well():
            fulfilled = self.machine.generation if self.machine.goal else status.fulfilled
            return add(replace(status, remedy=None, fulfilled=fulfilled), self.now, "rebooted"), None, "is rebooted"
        if self._treatment() is not None and self.now - begun.at >= self.rules.verify_s:
            return add(replace(status, remedy=None), self.now, "failed", begun.goal), None, "has failed"
        return status, None, "waits for its next boot, and to be well after it"

    def _proof(self, status: MachineStatus) -> DeepResult:
        """A pod there that cannot be read is one that has not said so."""
        said = deeply(self.place, status)
        seen = said.passed is False or self.kubernetes.sees(self.place.node.name)
        return said if seen else DeepResult(None, "a pod there cannot be read")

    def _well(self) -> bool:
        place = self.place
        if silent_for(place.node, self.now) >= 0 or not place.known or place.verdict() is not None:
            return False
        ready = all(worker.pod.ready and not worker.pod.deleting for worker in place.workers)
        return ready and all(node.record.responds and not node.down for node in place.slurm)


def booted(begun: Remedy, place: Host) -> bool:
    return bool(place.node.boot) and bool(begun.boot) and place.node.boot != begun.boot


def counts(remedy: Remedy | None) -> bool:
    """Against the budget: what is switched off for good stays so."""
    return remedy is not None and not (remedy.goal == "down" and remedy.done)


def deeply(place: Host, status: MachineStatus) -> DeepResult:
    return deep(place.workers, place.node.boot, status.gpus)


def disproved(status: MachineStatus, place: Host | None) -> str:
    """What a deep check after its last remedy has found, where that stands; "" where it does not."""
    shown = (one for one in reversed(status.history) if one.what in _ENDS or _failed(one))
    last = next(shown, None)
    if last is None or not _failed(last):
        return ""
    return "" if place is not None and deeply(place, status).passed else last.text


def _failed(one: HistoryEntry) -> bool:
    return one.what == "failed" and one.text.startswith(FAILED)


def evidence(said: str) -> Verdict | None:
    """The heaviest check that such words name."""
    return named(said.removeprefix(FAILED))
