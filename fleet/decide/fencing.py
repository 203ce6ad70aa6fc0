"""Fencing of dead machines, whose pods Kubernetes keeps for ever because it cannot know whether they still run.

With proof of a machine's death the fleet taints its Node out-of-service, sets its workers down in Slurm, and deletes
its pods by force, so that they start elsewhere. One sign alone is no proof, and the fleet never fences many machines at
once.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass

from fleet.decide.actions import Action, Delete, Fence, Notice, Unfence
from fleet.decide.causes import cause, silent_for
from fleet.policy import Policy
from fleet.world.kubernetes import CONTROLLER, RETURNING, TAINT, WORKER, KubeNode, KubePod, KubernetesView, is_true
from fleet.world.slurm import SlurmView
from fleet.world.snapshot import DeathProof, Unknown

# The kind of notices about a Node with the out-of-service taint.
GIVEN_UP = "givenup"


def pods_on(kubernetes: KubernetesView) -> Mapping[str, list[KubePod]]:
    """Return the release's pods by Node, the controller's Node first: without the controller no user can submit."""
    pods_by_node: dict[str, list[KubePod]] = {}
    pods = [*kubernetes.others.values(), *kubernetes.pods.values()]
    for pod in sorted(pods, key=lambda pod: (pod.component != CONTROLLER, pod.name)):
        if pod.node in kubernetes.nodes and pod.component in RETURNING:
            pods_by_node.setdefault(pod.node, []).append(pod)
    return pods_by_node


def find_suspects(kubernetes: KubernetesView, policy: Policy, now: float) -> list[KubeNode]:
    """Return the Nodes that need a proof of death, the controller's first."""
    if policy.fencing == "off":
        return []
    nodes = (kubernetes.nodes[name] for name in pods_on(kubernetes))
    return [node for node in nodes if silent_for(node, now) >= policy.dead_s]


@dataclass(frozen=True, slots=True)
class FencingPlan:
    """The plan for all dead machines in one pass."""

    actions: tuple[Action, ...]
    # The drain causes of workers on given-up Nodes, proven again in each pass, since they end jobs.
    causes: Mapping[str, Mapping[str, str]]


def plan_fencing(
    kubernetes: KubernetesView, slurm: SlurmView | Unknown, proofs: Mapping[str, DeathProof], policy: Policy, now: float
) -> FencingPlan:
    """Decide about every dead machine; while Slurm is unknown, only about the machine of Slurm's controller."""
    pods_by_node = pods_on(kubernetes)
    too_many = _too_many(kubernetes, pods_by_node, policy, now)
    dead = find_suspects(kubernetes, policy, now)
    actions: list[Action] = [too_many] if dead and too_many else []
    causes: dict[str, Mapping[str, str]] = {}
    for node in dead:
        pods = pods_by_node[node.name]
        if isinstance(slurm, Unknown) and pods[0].component != CONTROLLER:
            continue
        lacking = _explain_lack(node, pods, slurm, proofs.get(node.name), policy)
        if lacking or policy.fencing != "act":
            actions.append(_proposal(node, pods, lacking, policy))
        elif node.fenced:
            causes[node.name] = cause("dead", node.name)
            actions.append(Notice(node.name, GIVEN_UP, explain_given_up(policy)))
            actions += [Delete(pod.name, pod.uid, node.name, node.version) for pod in pods if _may_delete(pod, slurm)]
        elif not too_many and not _is_tainted(node):
            actions.append(Fence(*node.identity, f"not heard of for over {policy.dead_s:g} s"))
    return FencingPlan((*actions, *_take_back(kubernetes, {node.name for node in dead}, policy, now)), causes)


def _take_back(kubernetes: KubernetesView, suspected: Container[str], policy: Policy, now: float) -> Iterator[Action]:
    """Take machines back that are well again, and report the others that are given up."""
    for node in kubernetes.nodes.values():
        ready_s = _ready_for(node, now)
        if node.fenced and ready_s >= policy.not_ready_s:
            yield Unfence(*node.identity)
        elif node.fenced and node.name not in suspected:
            yield Notice(node.name, GIVEN_UP, explain_given_up(policy))
        elif _is_tainted(node) and not node.fenced and ready_s >= 0:
            text = f"the Node is Ready, but the taint {TAINT} keeps pods away, and the fleet did not set it"
            yield Notice(node.name, GIVEN_UP, f"{text}; remove it: {take_back(node.name)}")


def _is_tainted(node: KubeNode) -> bool:
    return any(taint.key == TAINT for taint in node.taints)


def take_back(node: str) -> str:
    """Return the command that lifts the taint of a machine that is given up."""
    return f"kubectl taint nodes {node} {TAINT}-"


def explain_given_up(policy: Policy) -> str:
    # No time in it: it would be another sentence in each pass.
    return (
        f"given up: the machine does not answer, and its pods start elsewhere. The fleet lifts the taint {TAINT} once "
        f"the Node has been Ready for {policy.not_ready_s:g} s; delete the Node if the machine does not come back"
    )


def _too_many(kubernetes: KubernetesView, on: Mapping[str, list[KubePod]], policy: Policy, now: float) -> Notice | None:
    """Refuse to give up many machines at once. Those given up before count until they are back."""
    nodes = kubernetes.nodes.values()
    silent = [node for node in nodes if silent_for(node, now) >= 0 and (node.name in on or node.fenced)]
    most = policy.most_unwell(len(on))
    if len(silent) <= most:
        return None
    text = f"more than {most} of {len(on)} machines do not answer, probably for a common cause: the fleet gives up none"
    return Notice("fleet", "fencing", text)


def _explain_lack(
    node: KubeNode, pods: list[KubePod], slurm: SlurmView | Unknown, proof: DeathProof | None, policy: Policy
) -> str:
    """Say what the proof of death lacks; empty: it is complete."""
    if proof is None:
        return "it has not been probed yet"
    heard = next((pod.name for pod in pods if _is_heard(pod, slurm)), "")
    # A refused connection is an answer of the machine, also where no kubelet runs.
    kubelet = "its address answers at the kubelet's port" if proof.kubelet else "it has no address"
    by_provider = any(taint.key in policy.provider for taint in node.taints)
    doubts = (
        (not proof.witness, "the fleet reaches no other kubelet either, so its own network may be cut"),
        (proof.lease_age is None, "the lease of its kubelet cannot be read"),
        ((proof.lease_age or 0.0) < policy.dead_s, "its kubelet has renewed its lease since"),
        (proof.kubelet is not False, kubelet),
        (bool(proof.pods), f"{proof.pods[0] if proof.pods else ''} answers on it"),
        (bool(heard), f"slurmctld still hears {heard} on it"),
        (bool(policy.provider) and not by_provider, "the provider has not reported it off"),
    )
    return next((text for doubt, text in doubts if doubt), "")


def _is_heard(pod: KubePod, slurm: SlurmView | Unknown) -> bool:
    """Return whether slurmctld hears the worker: it may reach machines that the fleet does not."""
    node = None if isinstance(slurm, Unknown) or pod.component != WORKER else slurm.nodes.get(pod.name)
    return node is not None and node.record.responds and not node.down


def _proposal(node: KubeNode, pods: list[KubePod], lacking: str, policy: Policy) -> Notice:
    # No number of seconds: it would be another sentence in each pass.
    text = f"its kubelet has not been ready for over {policy.dead_s:g} s"
    names = [pod.name for pod in pods[:8]]
    if lacking:
        text += f"; its death is not proven: {lacking}"
    else:
        all_names = ", ".join(names)
        text += f", its lease is as old, and neither it nor {all_names} can be reached: `fencing: act` would give it up"
    by_hand = f"kubectl taint nodes {node.name} {TAINT}=nodeshutdown:NoExecute"
    # Kubernetes deletes the pods of a Node with this taint from 1.26 on.
    by_hand += f" (before Kubernetes 1.26 also: kubectl delete pod --force --grace-period=0 {' '.join(names)})"
    back = f"When the machine is back: {take_back(node.name)}"
    return Notice(node.name, "dead", f"{text}. Once you are certain that the machine is off: {by_hand}. {back}")


def _may_delete(pod: KubePod, slurm: SlurmView | Unknown) -> bool:
    """Return whether the pod's jobs are requeued already, or a person holds its node in Slurm."""
    if isinstance(slurm, Unknown) or pod.component != WORKER or pod.name not in slurm.nodes:
        return True
    node = slurm.nodes[pod.name]
    return node.down or (node.drained and not node.by_fleet)


def _ready_for(node: KubeNode, now: float) -> float:
    ready = node.conditions.get("Ready")
    return now - ready.since if ready and is_true(ready) else -1.0
