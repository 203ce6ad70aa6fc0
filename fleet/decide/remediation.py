"""Remedies of a machine that is to be rebooted, replaced or switched off: once it is drained, cordoned and idle.

The intent is recorded first, with a number that the remedy carries, so that after an interruption the next leader knows
both. If the policy names no treatment for a goal, or only proposes, a person performs it; a reboot is still recognized.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fleet.decide.actions import Annotate, CallHook, StartJob, Withdraw
from fleet.decide.causes import silent_for
from fleet.decide.machines import DrainVerdict, Host, add, count, parse_verdict
from fleet.policy import Machines, Treatment
from fleet.world.kubernetes import KubernetesView
from fleet.world.machine import HistoryEntry, MachineObject, MachineStatus, Remedy
from fleet.world.pod_page import DeepResult, deep_result
from fleet.world.slurm import SlurmView

# The prefix in a machine's history of a deep check that disproved a remedy, and the entries that end its effect.
FAILED = "deep check: "
_ENDS = ("rebooted", "replaced", "forgiven")
ACTED = ("reboot", "replace", "down")
# Annotations beside the policy's: which remedy of which Machine asks, and why. A mark that the machine wrote itself
# prevents the remedy, which is reported when its time is over.
MARK, WHY = "minivm.io/remedy", "minivm.io/remedy-reason"
Act = Annotate | Withdraw | StartJob | CallHook
Step = tuple[MachineStatus, Act | None, str]  # the status after it, the change, and what it waits for


@dataclass(frozen=True, slots=True)
class RemedyTurn:
    """One machine in one pass. `machine` is as it is stored: only a stored intent counts."""

    machine: MachineObject
    host: Host
    goal: str
    why: str
    room: bool  # for one more machine in treatment
    kubernetes: KubernetesView
    slurm: SlurmView
    now: float
    rules: Machines

    def step(self, status: MachineStatus) -> Step:
        """Decide the next step of the remedy."""
        begun, node = self.machine.status.remedy, self.host.node
        if begun is not None and begun.goal != self.goal:
            return add(replace(status, remedy=None), self.now, "withdrawn", begun.goal), None, ""
        mark = node.annotations.get(MARK, "")
        if mark.startswith(f"{self.machine.uid}/") and (begun is None or mark != self._mark(begun)):
            policys = [name for treatment in self.rules.remedies.values() for name in treatment.annotate]
            return status, Withdraw(node.name, node.uid, node.version, (MARK, WHY, *policys)), ""
        if self.goal not in ACTED:
            return status, None, ""
        if begun is None:
            return self._begin(status)
        return self._wait(status, begun) if begun.done else self._perform(status, begun, mark)

    def _treatment(self) -> Treatment | None:
        """Return the policy's treatment; None: a person performs the remedy."""
        return self.rules.remedies.get(self.goal) if self.rules.mode == "act" else None

    def _mark(self, remedy: Remedy) -> str:
        return f"{self.machine.uid}/{remedy.number}"

    def _begin(self, status: MachineStatus) -> Step:
        # A person may request any number of remedies that help; the policy counts all of them.
        tries = count(status, "failed" if self.machine.goal else "reboot", self.now, self.rules.window_s)
        if self.goal == "reboot" and tries >= self.rules.attempts:
            return status, None, f"was rebooted {tries} times and is not well: a person is to look at it"
        if not self._is_idle():
            return status, None, "waits until it is drained, cordoned and idle"
        if not self.room:
            return status, None, "waits for its turn"
        by_hand = self._treatment() is None
        number = status.remedies + 1
        remedy = Remedy(self.goal, number, int(self.now), self.host.node.boot, by_hand)
        return add(replace(status, remedy=remedy, remedies=number), self.now, self.goal, self.why), None, "begins"

    def _is_idle(self) -> bool | None:
        """Return whether nothing runs there; None: no evidence against it, but not known."""
        nodes = self.host.slurm
        if not self.host.node.cordoned or not self.host.known:
            return False
        held = [self.slurm.holding(node.name) for node in nodes]
        if any(held) or not all(node.drained and not node.record.busy for node in nodes):
            return False
        return True if self.kubernetes.sees(self.host.node.name) and None not in held else None

    def _perform(self, status: MachineStatus, begun: Remedy, mark: str) -> Step:
        done = replace(status, remedy=replace(begun, done=True))
        treatment = self._treatment()
        if treatment is None or mark == self._mark(begun) or self._has_booted(begun):
            return done, None, "is told"
        idle = self._is_idle()
        if idle is None:
            return status, None, "waits until it is known whether it is idle"
        if not idle:
            # A person has resumed it since: the next attempt gets another number.
            return add(replace(status, remedy=None), self.now, "withdrawn", "it is not idle any more"), None, ""
        node = self.host.node
        name = f"{self.machine.name[:40].strip('-.')}-{self.machine.uid[:8]}-{begun.number}"
        if treatment.webhook is not None:
            pool = " ".join(sorted({worker.pod.pool for worker in self.host.workers}))
            fields = (name, node.name, self.machine, self.goal, self.why, treatment.webhook, pool)
            return status, CallHook(*fields, self._mark(begun), done), "is told"
        if treatment.job is None:
            annotations = {**treatment.annotate, MARK: self._mark(begun), WHY: self.why}
            return status, Annotate(node.name, node.uid, node.version, tuple(annotations.items())), "is told"
        job = StartJob(name, node.name, self.machine, self.goal, self.why, treatment.job, treatment.on_node, done)
        return status, job, "is told"

    def _has_booted(self, begun: Remedy) -> bool:
        return self.goal == "reboot" and has_booted(begun, self.host)

    def _wait(self, status: MachineStatus, begun: Remedy) -> Step:
        if self.goal != "reboot":
            return status, None, "is done: it is out of service" if self.goal == "down" else "is waited for"
        proof = self._proof(status) if self.rules.proof == "deep" and self._has_booted(begun) else None
        if proof is not None and proof.passed is False:
            # The verdict outlives the remedy; the next remedy follows from it.
            failed = add(add(status, self.now, "verdict", proof.text), self.now, "failed", f"{FAILED}{proof.text}")
            return replace(failed, remedy=None, verdict=proof.text, ill=True), None, "has failed"
        if proof is not None and not proof.passed and self._is_well():
            return status, None, f"is rebooted, and waits: {proof.text}"
        if self._has_booted(begun) and self._is_well():
            fulfilled = self.machine.generation if self.machine.goal else status.fulfilled
            return add(replace(status, remedy=None, fulfilled=fulfilled), self.now, "rebooted"), None, "is rebooted"
        if self._treatment() is not None and self.now - begun.at >= self.rules.verify_s:
            return add(replace(status, remedy=None), self.now, "failed", begun.goal), None, "has failed"
        return status, None, "waits for its next boot, and to be well after it"

    def _proof(self, status: MachineStatus) -> DeepResult:
        """Return the deep check after the boot. A pod that cannot be read counts as one that has not reported."""
        result = host_deep_result(self.host, status)
        known = result.passed is False or self.kubernetes.sees(self.host.node.name)
        return result if known else DeepResult(None, "a pod there cannot be read")

    def _is_well(self) -> bool:
        host = self.host
        if silent_for(host.node, self.now) >= 0 or not host.known or host.verdict() is not None:
            return False
        ready = all(worker.pod.ready and not worker.pod.deleting for worker in host.workers)
        return ready and all(node.record.responds and not node.down for node in host.slurm)


def has_booted(begun: Remedy, host: Host) -> bool:
    return bool(host.node.boot) and bool(begun.boot) and host.node.boot != begun.boot


def in_treatment(remedy: Remedy | None) -> bool:
    """Return whether a remedy counts against the budget; a machine that is switched off for good does not."""
    return remedy is not None and not (remedy.goal == "down" and remedy.done)


def host_deep_result(host: Host, status: MachineStatus) -> DeepResult:
    return deep_result(host.workers, host.node.boot, status.gpus)


def disproved(status: MachineStatus, host: Host | None) -> str:
    """Return the finding of the deep check that disproved the last remedy; empty once it is obsolete."""
    entries = (entry for entry in reversed(status.history) if entry.what in _ENDS or _has_failed(entry))
    last = next(entries, None)
    if last is None or not _has_failed(last):
        return ""
    return "" if host is not None and host_deep_result(host, status).passed else last.text


def _has_failed(entry: HistoryEntry) -> bool:
    return entry.what == "failed" and entry.text.startswith(FAILED)


def evidence(text: str) -> DrainVerdict | None:
    """Return the heaviest check in the text of a deep check."""
    return parse_verdict(text.removeprefix(FAILED))
