"""A machine that is dead keeps its pods for ever: Kubernetes does not know whether they still run. With proof of its
death they are given up: its Node is tainted out of service, its workers are set down in Slurm, its pods are deleted by
force, and come back elsewhere. Nothing of that is done on one sign alone, nor to many machines at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fleet.decide.actions import Action, Delete, Fence, Notice, Unfence
from fleet.decide.causes import silent_for
from fleet.policy import Policy
from fleet.world.kubernetes import TAINT, WORKER, Kubernetes, Node, Pod
from fleet.world.slurm import Slurm
from fleet.world.snapshot import Proof, Unknown

CONTROLLER = "controller"
# The kind of what is told about a Node that carries the out-of-service taint.
GIVEN_UP = "givenup"
# Those that come back under their own name once they are gone, and not before. Any other has its successor already, and
# the fleet has no leave to delete it.
RETURNS = frozenset({CONTROLLER, "login", "demo", WORKER})


def pods_on(kubernetes: Kubernetes) -> Mapping[str, list[Pod]]:
    """Of this release, by Node, the controller's first: without it nobody can submit."""
    found: dict[str, list[Pod]] = {}
    everyone = [*kubernetes.others.values(), *kubernetes.pods.values()]
    for pod in sorted(everyone, key=lambda pod: (pod.component != CONTROLLER, pod.name)):
        if pod.node in kubernetes.nodes and pod.component in RETURNS:
            found.setdefault(pod.node, []).append(pod)
    return found


def suspects(kubernetes: Kubernetes, policy: Policy, now: float) -> list[Node]:
    """Nodes of which a proof is wanted, the controller's first."""
    if policy.fencing == "off":
        return []
    nodes = (kubernetes.nodes[name] for name in pods_on(kubernetes))
    return [node for node in nodes if silent_for(node, now) >= policy.dead_s]


def fence(
    kubernetes: Kubernetes, slurm: Slurm | Unknown, proofs: Mapping[str, Proof], policy: Policy, now: float
) -> Iterator[Action]:
    """Where Slurm is not known its controller may lie on the dead machine: then that machine alone is a matter."""
    on = pods_on(kubernetes)
    many = _too_many(kubernetes, on, policy, now)
    wanted = suspects(kubernetes, policy, now)
    if wanted and many:
        yield many
    for node in wanted:
        if isinstance(slurm, Unknown) and on[node.name][0].component != CONTROLLER:
            continue
        lacking = _lacking(node, on[node.name], slurm, proofs.get(node.name), policy)
        given_up = node.fenced
        if lacking or policy.fencing != "act":
            yield _told(node, on[node.name], lacking, policy)
        elif given_up:
            yield Notice(node.name, GIVEN_UP, given_up_text(policy))
            yield from (
                Delete(pod.name, pod.uid, node.name, node.version) for pod in on[node.name] if _lost(pod, slurm)
            )
        elif not many and not any(taint.key == TAINT for taint in node.taints):
            yield Fence(node.name, node.uid, node.version, f"not heard of for over {policy.dead_s:g} s")
    suspected = {node.name for node in wanted}
    for node in kubernetes.nodes.values():
        tainted = any(taint.key == TAINT for taint in node.taints)
        if node.fenced and _well(node, now) >= policy.not_ready_s:
            yield Unfence(node.name, node.uid, node.version)
        elif node.fenced and node.name not in suspected:
            yield Notice(node.name, GIVEN_UP, given_up_text(policy))
        elif tainted and not node.fenced and _well(node, now) >= 0:
            text = f"the Node is Ready, and the taint {TAINT} keeps pods away; a person set it and takes it back"
            yield Notice(node.name, GIVEN_UP, f"{text}: {take_back(node.name)}")


def take_back(node: str) -> str:
    """The command that lifts the taint of a machine that is given up."""
    return f"kubectl taint nodes {node} {TAINT}-"


def given_up_text(policy: Policy) -> str:
    # No time in it: it would be another sentence in each pass.
    return (
        f"given up: the machine does not answer, and its pods start elsewhere. The fleet lifts the taint {TAINT} once "
        f"the Node has been Ready for {policy.not_ready_s:g} s; delete the Node if the machine does not come back"
    )


def _too_many(kubernetes: Kubernetes, on: Mapping[str, list[Pod]], policy: Policy, now: float) -> Notice | None:
    """Those that are given up already count as long as they are away: a fleet is not emptied one by one either."""
    nodes = kubernetes.nodes.values()
    away = [one for one in nodes if silent_for(one, now) >= 0 and (one.name in on or one.fenced)]
    most = max(1, int(len(on) * policy.share))
    if len(away) <= most:
        return None
    return Notice(
        "fleet", "fencing", f"of {len(on)} machines more than {most} do not answer: none is given up for that"
    )


def causes(
    kubernetes: Kubernetes, slurm: Slurm, proofs: Mapping[str, Proof], policy: Policy, now: float
) -> Mapping[str, Mapping[str, str]]:
    """Of the workers on a Node that is given up: asked anew at each look, for what follows ends their jobs."""
    on = pods_on(kubernetes)
    return {
        node.name: {"dead": f"node {node.name} is given up"}
        for node in suspects(kubernetes, policy, now)
        if node.fenced
        and policy.fencing == "act"
        and not _lacking(node, on[node.name], slurm, proofs.get(node.name), policy)
    }


def _lacking(node: Node, pods: list[Pod], slurm: Slurm | Unknown, proof: Proof | None, policy: Policy) -> str:
    """What is not proven, or nothing."""
    if proof is None:
        return "it was not asked yet"
    if not proof.witness:
        return "no other machine's kubelet can be reached from here either: it may be our own network"
    if proof.lease_age is None:
        return "the lease of its kubelet cannot be read"
    if proof.lease_age < policy.dead_s:
        return "its kubelet has renewed its lease since"
    if proof.kubelet is not False:
        return "its kubelet answers" if proof.kubelet else "it has no address"
    if proof.pods:
        return f"{proof.pods[0]} answers on it"
    if heard := next((pod.name for pod in pods if _heard(pod, slurm)), ""):
        return f"Slurm has not lost {heard} on it yet"
    if policy.provider and not any(taint.key in policy.provider for taint in node.taints):
        return "the provider has not said that it is off"
    return ""


def _heard(pod: Pod, slurm: Slurm | Unknown) -> bool:
    """slurmctld may reach what we do not."""
    node = None if isinstance(slurm, Unknown) or pod.component != WORKER else slurm.nodes.get(pod.name)
    return node is not None and node.record.responds and not node.down


def _told(node: Node, pods: list[Pod], lacking: str, policy: Policy) -> Notice:
    # No number of seconds: it would be another sentence at each look.
    said = f"its kubelet has not been ready for over {policy.dead_s:g} s"
    if lacking:
        said += f"; that it is dead is not proven: {lacking}"
    else:
        names = ", ".join(pod.name for pod in pods[:8])
        said += f", its lease is as old, and neither it nor {names} can be reached: `act` would give it up"
    by_hand = f"kubectl taint nodes {node.name} {TAINT}=nodeshutdown:NoExecute"
    back = f"When the machine is back: {take_back(node.name)}"
    return Notice(node.name, "dead", f"{said}. Once it is certain that the machine is off: {by_hand}. {back}")


def _lost(pod: Pod, slurm: Slurm | Unknown) -> bool:
    """A worker's jobs are told to run elsewhere first; one that a person holds is not touched in Slurm."""
    if isinstance(slurm, Unknown) or pod.component != WORKER or pod.name not in slurm.nodes:
        return True
    node = slurm.nodes[pod.name]
    return node.down or (node.drained and not node.ours)


def _well(node: Node, now: float) -> float:
    ready = node.conditions.get("Ready")
    return now - ready.since if ready and ready.status == "True" else -1.0
