"""The goal of each machine, and its remedy: a reboot, a replacement or a shutdown once it is drained and idle.

The flow in each pass:

1. `derive_goals`: a person's goal comes first. Without one, the policy derives a goal from verdicts, and proposes it or
   acts on it.
2. `goal_causes` and `cordons`: a machine whose goal is not `up` takes no new jobs. When a goal is withdrawn, the fleet
   lifts its own drain and cordon; those of other authors stay.
3. `record_machines`: `RemedyTurn.step` decides the next step of each machine's remedy, and the Machine object's status
   records it.

A remedy's steps: begin (record the intent with a number), request (annotate the Node, start a Job or call a webhook,
with that number), wait for its effect. After an interruption the next leader continues from the recorded intent. If the
policy names no treatment for a goal, or only proposes, a person performs the remedy; the fleet still recognizes a
reboot.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from fleet import crd
from fleet.decide.actions import (
    Action,
    Annotate,
    CallHook,
    ChangeKey,
    Cordon,
    Notice,
    Record,
    RefusedChange,
    StartJob,
    Uncordon,
    Withdraw,
    change_key,
)
from fleet.decide.causes import OF_GOAL, TEXTS, cause, silent_for
from fleet.decide.machines import (
    DrainVerdict,
    Host,
    add_history,
    choose_believed_gpus,
    count,
    create_missing_machines,
    find_hosts,
    line,
    match_machines,
    parse_verdict,
    update_status,
)
from fleet.policy import Machines, Policy, Treatment
from fleet.world.kubernetes import KubernetesView
from fleet.world.machine import HistoryEntry, MachineObject, MachineStatus, Remedy
from fleet.world.pod_page import DeepResult, deep_result
from fleet.world.slurm import SlurmView
from fleet.world.snapshot import FleetSnapshot, Unknown, Worker

ACTED = ("reboot", "replace", "down")  # goals that a remedy fulfils
# The prefix in a machine's history of a deep check that disproved a remedy, and the entries that end its effect.
FAILED = "deep check: "
_ENDS = ("rebooted", "replaced", "forgiven")
# Goals after which a machine must be proven well.
PROVEN = frozenset({"reboot", "replace"})
BY_CLASS = {"reboot": "reboot", "rma": "replace"}  # a verdict's class, and the policy's goal
# Annotations in addition to the policy's: Machine and number of the remedy, and its reason. A mark that the machine
# wrote itself prevents the remedy; the fleet reports that when the remedy's time is over.
MARK, REASON = "minivm.io/remedy", "minivm.io/remedy-reason"
# Letters shown of a refusal: its end, which has the reason.
MOST_REFUSAL = 160


@dataclass(frozen=True, slots=True)
class Goal:
    goal: str = "up"
    reason: str = ""
    person: bool = False  # set by a person
    prove: bool = False  # a deep check must pass before the machine is up again

    @property
    def up(self) -> bool:
        return self.goal == "up"

    @property
    def text(self) -> str:
        return "" if self.up else f"{self.goal} {self.reason}".strip()


UP = Goal()


@dataclass(frozen=True, slots=True)
class Goals:
    """The goals of all machines."""

    hosts: Mapping[str, Host]  # by Node
    machine_at: Mapping[str, str]  # the machine of a Node
    active: Mapping[str, Goal]
    proposed: Mapping[str, Goal]
    common: frozenset[str]  # verdicts against many machines at once
    deep: bool = False  # whether a deep check must prove that a remedy has helped
    without_worker: frozenset[str] = frozenset()  # Nodes that wait for a deep check and have no worker for it
    statuses: Mapping[str, MachineStatus] = field(default_factory=dict)  # the stored status of each Node's machine

    def of_node(self, name: str) -> Goal:
        return self.active.get(self.machine_at.get(name, ""), UP)


def derive_goals(snapshot: FleetSnapshot, now: float, policy: Policy) -> Goals | None:
    """Derive the goal of every machine; None: Machine objects are switched off, or not known."""
    kubernetes = snapshot.kubernetes
    if isinstance(kubernetes, Unknown) or isinstance(snapshot.slurm, Unknown) or kubernetes.machines is None:
        return None
    machines = kubernetes.machines
    hosts = choose_believed_gpus(machines, find_hosts(kubernetes, list(snapshot.workers())))  # by Node
    machine_at = match_machines(machines, hosts)
    host_of = {machine: hosts[node_name] for node_name, machine in machine_at.items()}
    statuses = {node_name: machines[name].status for node_name, name in machine_at.items()}
    common = _common_verdicts(hosts, statuses, policy)
    active: dict[str, Goal] = {}
    proposed: dict[str, Goal] = {}
    for name, machine in machines.items():
        goal = _by_person(machine) or _by_policy(machine.status, host_of.get(name), now, policy.machines, common)
        (active if goal.person or policy.machines.mode == "act" else proposed)[name] = goal
    if policy.machines.proof != "deep":
        return Goals(hosts, machine_at, active, proposed, common)
    rebooted = (node_name for node_name, status in statuses.items() if _is_rebooted(status, hosts[node_name]))
    without_worker = frozenset(
        node_name for node_name in rebooted if not hosts[node_name].workers and kubernetes.can_read_pods_on(node_name)
    )
    return Goals(hosts, machine_at, active, proposed, common, True, without_worker, statuses)


def _is_rebooting(status: MachineStatus) -> bool:
    return status.remedy is not None and status.remedy.goal == "reboot"


def _is_rebooted(status: MachineStatus, host: Host) -> bool:
    """Return whether the requested reboot has happened."""
    remedy = status.remedy
    return remedy is not None and remedy.goal == "reboot" and remedy.done and has_booted(remedy, host)


def _by_person(machine: MachineObject) -> Goal | None:
    if not machine.goal:
        return None
    if machine.goal == "up" or (machine.goal == "reboot" and machine.generation == machine.status.fulfilled):
        return Goal(person=True)
    return Goal(machine.goal, line(machine.reason), True, machine.goal in PROVEN)


def _by_policy(status: MachineStatus, host: Host | None, now: float, rules: Machines, common: frozenset[str]) -> Goal:
    if rules.mode == "off":
        return UP
    if _is_rebooting(status) and status.remedy and status.remedy.done:
        return Goal("reboot", status.verdict, prove=True)  # see a requested reboot to its end
    # An intended reboot that has not been performed is no attempt.
    tries = count(status, "reboot", now, rules.window_s) - _is_rebooting(status)
    if rules.proof == "deep" and (text := find_disproof(status, host)):
        return _after_failed_proof(text, tries, rules, common)
    verdict = host.verdict() if host else None
    if verdict and verdict.class_ in BY_CLASS and verdict.key not in common:
        if verdict.class_ == "reboot" and tries >= rules.attempts:
            return Goal("replace", line(f"rebooted {rules.attempts} times; {verdict.text}"), prove=True)
        return Goal(BY_CLASS[verdict.class_], verdict.text, prove=True)
    if rules.flaps and count(status, "verdict", now, rules.window_s) >= rules.flaps:
        return Goal("drain", f"{rules.flaps} verdicts or more within {rules.window_s / 86400:g} days")
    return UP


def _after_failed_proof(text: str, tries: int, rules: Machines, common: frozenset[str]) -> Goal:
    verdict = evidence(text)
    if verdict and verdict.key in common:
        return Goal("drain", text, prove=True)
    if tries >= rules.attempts or (verdict and verdict.class_ == "rma"):
        return Goal("replace", line(f"rebooted {tries} times; {text}"), prove=True)
    return Goal("reboot", text, prove=True)


def _common_verdicts(
    hosts: Mapping[str, Host], statuses: Mapping[str, MachineStatus], policy: Policy
) -> frozenset[str]:
    """Return the checks, each at one commit, that condemn many machines: then the commit is more likely at fault."""
    with_workers = {node_name: host for node_name, host in hosts.items() if host.workers}
    proves = policy.machines.proof == "deep"

    def against(node_name: str, host: Host) -> DrainVerdict | None:
        return host.verdict() or (
            evidence(find_disproof(statuses[node_name], host)) if proves and node_name in statuses else None
        )

    counts = Counter(verdict.key for node_name, host in with_workers.items() if (verdict := against(node_name, host)))
    most = policy.most_unwell(len(with_workers))
    return frozenset(key for key, machines in counts.items() if machines > most)


def goal_causes(worker: Worker, goals: Goals | None, kubernetes: KubernetesView) -> Mapping[str, str]:
    """Return why the worker's machine takes no new jobs. While goals are unknown, an existing drain for them stays."""
    if goals is None:
        if not kubernetes.machines_unknown:
            return {}
        before = worker.slurm.kinds if worker.slurm else frozenset[str]()
        return dict.fromkeys(before & OF_GOAL, "requested for its machine before")
    goal = goals.of_node(worker.pod.node)
    if goal.up:
        return {} if goal.person else dict.fromkeys(_find_owed(worker, goals), TEXTS["proof"])
    proof = cause("proof") if goals.deep and goal.prove else {}
    return {"goal" if goal.person else "machine": goal.text, **proof}


def _find_owed(worker: Worker, goals: Goals) -> Mapping[str, str]:
    """Return the proof that a drained worker still owes before it is undrained.

    A pod that started on a drain that demands a deep check owes it, on any machine. So does a machine that came to
    the Node after the drain. A withdrawn goal demands nothing if pod and machine are those that were drained.
    """
    node, machine = worker.slurm, worker.node
    if not goals.deep or node is None or machine is None or "proof" not in node.kinds:
        return {}
    status = goals.statuses.get(machine.name)
    same_machine = status is not None and _find_arrival(status) <= node.since
    is_newer_pod = 0 < node.since < worker.pod.created
    if node.kinds & {"goal", "machine"} and same_machine and not is_newer_pod:
        return {}
    result = deep_result((worker,), machine.boot, status.gpus if status else ())
    return {} if result.passed else {"proof": result.text}


def _find_arrival(status: MachineStatus) -> float:
    """Return when the machine was first seen on its Node; 0: before the beginning of its history."""
    return next((entry.at for entry in reversed(status.history) if entry.what == "node"), 0.0)


def cordon_without_worker(goals: Goals) -> Iterator[Cordon | Uncordon]:
    """Cordon Nodes without workers by their goal; `conditions.follow_cordon` decides about Nodes with workers."""
    for node_name in goals.machine_at:
        node, goal = goals.hosts[node_name].node, goals.of_node(node_name)
        if goals.hosts[node_name].workers:
            continue
        # A Node without a worker must be open for the worker that checks it; that worker is drained.
        is_open = goal.up or node_name in goals.without_worker
        if not is_open and not node.cordoned:
            yield Cordon(*node.identity, f"goal {goal.text}")
        elif is_open and node.cordoned_by_fleet:
            yield Uncordon(*node.identity)


def record_machines(
    goals: Goals,
    kubernetes: KubernetesView,
    slurm: SlurmView,
    now: float,
    policy: Policy,
    failed: Mapping[ChangeKey, RefusedChange] | None = None,
) -> Iterator[Action]:
    """Record each machine's changed status, and take the next step of its remedy.

    Skips machines whose Node cannot be read. `failed`: changes that failed, such as a remedy.
    """
    machines, rules = kubernetes.machines or {}, policy.machines
    yield from _report_common(goals)
    room = _count_room(machines, rules)
    yield from create_missing_machines(machines, goals.hosts, goals.machine_at)
    node_of = {machine: node_name for node_name, machine in goals.machine_at.items()}
    for name, machine in machines.items():
        node_name = node_of.get(name, machine.status.node)
        if machine.deleting or f"Node/{node_name}" in kubernetes.unread:
            continue
        goal = goals.active.get(name, UP)
        host = goals.hosts[node_name] if name in node_of else None
        keeps_verdict = rules.proof == "deep" and bool(find_disproof(machine.status, host))
        after = update_status(machine, host, now, rules.window_s, keeps_verdict=keeps_verdict)
        request, text = None, "is on no Node"
        if host is not None:
            turn = RemedyTurn(machine, host, goal.goal, goal.reason, room > 0, kubernetes, slurm, now, rules)
            after, request, text = turn.step(after)
        room -= machine.status.remedy is None and after.remedy is not None
        if goal.up:
            text = "" if goal.person else _find_owed_proof(host, goals)
        if (refusal := _find_refusal(request, failed or {})) is not None:
            text = f"the request failed: {refusal}"
        proposal = goals.proposed.get(name, UP) if goal.up else UP
        after = replace(after, goal=goal.goal, why=_explain(goal, proposal, text))
        if after.why:
            subject = "goal" if proposal.up else "propose"
            yield Notice(node_name or name, subject, f"{name}: {goal.goal}: {after.why}")
        yield from _request_and_record(machine, after, request)


def _count_room(machines: Mapping[str, MachineObject], rules: Machines) -> int:
    """Count the machines that may begin a treatment now."""
    return rules.most_in_treatment(len(machines)) - sum(
        in_treatment(machine.status.remedy) for machine in machines.values()
    )


def _report_common(goals: Goals) -> Iterator[Notice]:
    """Report the verdicts that so many machines have that the check is at fault rather than they."""
    for verdict in sorted(goals.common):
        text = f"many machines report {verdict}, so the check is probably wrong: the fleet treats none for it"
        yield Notice("fleet", "common", text)


def _request_and_record(machine: MachineObject, after: MachineStatus, request: Request | None) -> Iterator[Action]:
    """Yield the request of a remedy's next step, if any, and the new status; a Job or a webhook records it itself."""
    if isinstance(request, StartJob | CallHook):
        yield replace(request, new_status=replace(after, remedy=request.new_status.remedy))
        return
    if request is not None:
        yield request
    if after != machine.status:
        yield Record(machine.name, machine.version, after)


def _find_owed_proof(host: Host | None, goals: Goals) -> str:
    """Return the proof that a worker of the machine still owes; empty if none does."""
    owed = (text for worker in (host.workers if host else ()) for text in _find_owed(worker, goals).values())
    return next(owed, "")


def _find_refusal(request: Request | None, failed: Mapping[ChangeKey, RefusedChange]) -> str | None:
    """Return why the same request was refused before; None if it was not."""
    if not isinstance(request, Annotate | StartJob | CallHook):
        return None
    refused = failed.get(change_key(request))
    return line(refused.text, len(refused.text))[-MOST_REFUSAL:] if refused is not None else None


def _explain(goal: Goal, proposal: Goal, text: str) -> str:
    """Explain the goal in one line: the proposal, or the reason of the goal and what the machine waits for."""
    if not proposal.up:
        return line(f"would be {proposal.text}")
    reason = goal.reason[: crd.TEXT - len(text) - 2]
    return line("; ".join(filter(None, (reason, text))))


Request = Annotate | Withdraw | StartJob | CallHook
Step = tuple[MachineStatus, Request | None, str]  # the status after it, the change, and what the machine waits for


@dataclass(frozen=True, slots=True)
class RemedyTurn:
    """One machine in one pass. `machine`: the stored object, since only a stored intent counts."""

    machine: MachineObject
    host: Host
    goal: str
    reason: str
    has_room: bool  # for one more machine in treatment
    kubernetes: KubernetesView
    slurm: SlurmView
    now: float
    rules: Machines

    def step(self, status: MachineStatus) -> Step:
        """Decide the next step of the remedy."""
        begun, node = self.machine.status.remedy, self.host.node
        if begun is not None and begun.goal != self.goal:
            return add_history(replace(status, remedy=None), self.now, "withdrawn", begun.goal), None, ""
        mark = node.annotations.get(MARK, "")
        if mark.startswith(f"{self.machine.uid}/") and (begun is None or mark != self._mark(begun)):
            policy_keys = [key for treatment in self.rules.remedies.values() for key in treatment.annotate]
            return status, Withdraw(*node.identity, (MARK, REASON, *policy_keys)), ""
        if self.goal not in ACTED:
            return status, None, ""
        if begun is None:
            return self._begin(status)
        return self._wait(status, begun) if begun.done else self._request(status, begun, mark)

    def _treatment(self) -> Treatment | None:
        """Return the policy's treatment; None: a person performs the remedy."""
        return self.rules.remedies.get(self.goal) if self.rules.mode == "act" else None

    def _mark(self, remedy: Remedy) -> str:
        return f"{self.machine.uid}/{remedy.number}"

    def _begin(self, status: MachineStatus) -> Step:
        """Record the intent once the machine is idle and has its turn."""
        # For a person's goal only failed remedies count; for the policy's, all reboots.
        tries = count(status, "failed" if self.machine.goal else "reboot", self.now, self.rules.window_s)
        if self.goal == "reboot" and tries >= self.rules.attempts:
            return status, None, f"was rebooted {tries} times and is not well: an operator must look at it"
        if not self._is_idle():
            return status, None, "waits until it is drained, cordoned and idle"
        if not self.has_room:
            return status, None, "waits for its turn"
        number, by_hand = status.remedies + 1, self._treatment() is None
        remedy = Remedy(self.goal, number, int(self.now), self.host.node.boot, by_hand)
        begun = replace(status, remedy=remedy, remedies=number)
        return add_history(begun, self.now, self.goal, self.reason), None, "begins"

    def _is_idle(self) -> bool | None:
        """Return whether nothing runs there; None: no evidence against it, but not known."""
        nodes = self.host.slurm
        if not self.host.node.cordoned or not self.host.is_known_to_slurm:
            return False
        jobs_of_nodes = [self.slurm.holding(node.name) for node in nodes]
        if any(jobs_of_nodes) or not all(node.drained and not node.record.busy for node in nodes):
            return False
        return True if self.kubernetes.can_read_pods_on(self.host.node.name) and None not in jobs_of_nodes else None

    def _request(self, status: MachineStatus, remedy: Remedy, mark: str) -> Step:
        done = replace(status, remedy=replace(remedy, done=True))
        treatment = self._treatment()
        if treatment is None or mark == self._mark(remedy) or self._has_booted(remedy):
            return done, None, "is requested"
        idle = self._is_idle()
        if idle is None:
            return status, None, "waits until it is known whether it is idle"
        if not idle:
            # A person has resumed it meanwhile: the next attempt gets another number.
            return add_history(replace(status, remedy=None), self.now, "withdrawn", "it is not idle any more"), None, ""
        return status, self._treat(treatment, remedy, done), "is requested"

    def _treat(self, treatment: Treatment, remedy: Remedy, done: MachineStatus) -> Request:
        """Build the policy's request: a webhook, an annotation or a Job. `done`: the status after it."""
        node = self.host.node
        name = f"{self.machine.name[:40].strip('-.')}-{self.machine.uid[:8]}-{remedy.number}"
        if treatment.webhook is not None:
            pool = " ".join(sorted({worker.pod.pool for worker in self.host.workers}))
            fields = (name, node.name, self.machine, self.goal, self.reason, treatment.webhook, pool)
            return CallHook(*fields, self._mark(remedy), done)
        if treatment.job is None:
            annotations = {**treatment.annotate, MARK: self._mark(remedy), REASON: self.reason}
            return Annotate(*node.identity, tuple(annotations.items()))
        return StartJob(name, node.name, self.machine, self.goal, self.reason, treatment.job, treatment.on_node, done)

    def _has_booted(self, begun: Remedy) -> bool:
        return self.goal == "reboot" and has_booted(begun, self.host)

    def _wait(self, status: MachineStatus, begun: Remedy) -> Step:
        """Wait for the effect of a requested remedy, and for the proof that the policy demands."""
        if self.goal != "reboot":
            return status, None, "is out of service" if self.goal == "down" else "waits for the replacement"
        has_booted = self._has_booted(begun)
        proof = self._proof(status) if self.rules.proof == "deep" and has_booted else None
        if proof is not None and proof.passed is False:
            return self._disprove(status, proof), None, "has failed"
        if has_booted and self._is_well():
            if proof is not None and not proof.passed:
                return status, None, f"is rebooted, and waits: {proof.text}"
            fulfilled = self.machine.generation if self.machine.goal else status.fulfilled
            after = add_history(replace(status, remedy=None, fulfilled=fulfilled), self.now, "rebooted")
            return after, None, "is rebooted"
        if self._treatment() is not None and self.now - begun.at >= self.rules.verify_s:
            return add_history(replace(status, remedy=None), self.now, "failed", begun.goal), None, "has failed"
        return status, None, "waits for its next boot, and to be well after it"

    def _disprove(self, status: MachineStatus, proof: DeepResult) -> MachineStatus:
        """End a remedy whose deep check failed. The verdict outlives it; the next remedy follows from the verdict."""
        noted = add_history(status, self.now, "verdict", proof.text)
        failed = add_history(noted, self.now, "failed", f"{FAILED}{proof.text}")
        return replace(failed, remedy=None, verdict=proof.text, ill=True)

    def _proof(self, status: MachineStatus) -> DeepResult:
        """Return the deep check after the boot. A pod that cannot be read counts as one that has not reported."""
        result = host_deep_result(self.host, status)
        is_readable = result.passed is False or self.kubernetes.can_read_pods_on(self.host.node.name)
        return result if is_readable else DeepResult(None, "a pod there cannot be read")

    def _is_well(self) -> bool:
        host = self.host
        if silent_for(host.node, self.now) >= 0 or not host.is_known_to_slurm or host.verdict() is not None:
            return False
        pods_ready = all(worker.pod.ready and not worker.pod.deleting for worker in host.workers)
        return pods_ready and all(node.record.responds and not node.down for node in host.slurm)


def has_booted(begun: Remedy, host: Host) -> bool:
    return bool(host.node.boot) and bool(begun.boot) and host.node.boot != begun.boot


def in_treatment(remedy: Remedy | None) -> bool:
    """Return whether a remedy counts against the budget; a machine that is switched off for good does not."""
    return remedy is not None and not (remedy.goal == "down" and remedy.done)


def host_deep_result(host: Host, status: MachineStatus) -> DeepResult:
    return deep_result(host.workers, host.node.boot, status.gpus)


def find_disproof(status: MachineStatus, host: Host | None) -> str:
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
