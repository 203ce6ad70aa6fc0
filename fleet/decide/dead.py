"""A machine that looks dead: what would bring its pods back is proposed, with the proof. A person acts on it."""

from __future__ import annotations

from fleet.decide.actions import Tell
from fleet.decide.causes import silent_for
from fleet.policy import Policy
from fleet.world.kubernetes import Node

TAINT = "node.kubernetes.io/out-of-service"


def dead(node: Node, policy: Policy, now: float) -> Tell | None:
    silent = silent_for(node, now)
    if policy.fencing == "off" or silent < policy.dead_s or any(taint.key == TAINT for taint in node.taints):
        return None
    since = node.conditions["Ready"]
    # No number of seconds: it would be another sentence at each look.
    proof = f"its kubelet has not answered for over {policy.dead_s:g} s ({since.reason or since.status})"
    act = f"kubectl taint nodes {node.name} {TAINT}=nodeshutdown:NoExecute"
    return Tell(node.name, "dead", f"{proof}. Once it is certain that the machine is off: {act}")
