"""The lab's NetworkPolicies: what the API says, as packet filters of each pod's own network.

`python -m tests.kubernetes.policies KEYS NODE ADDRESS`, on each node; it asks the API server each second. No network
plugin of the archive enforces them. Ingress alone, which is all that the chart has; what is refused is refused at once.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.kubernetes import plan
from tests.kubernetes.api import ERRORS, Api

Object = Mapping[str, Any]
NAMESPACES = Path("/run/netns")
PATHS = {
    "policies": "/apis/networking.k8s.io/v1/networkpolicies",
    "pods": "/api/v1/pods",
    "namespaces": "/api/v1/namespaces",
}


@dataclass(frozen=True, slots=True)
class World:
    """Everything that a rule may speak of."""

    policies: Sequence[Object] = ()
    pods: Sequence[Object] = ()
    namespaces: Sequence[Object] = ()


def matches(selector: Object, labels: Mapping[str, str]) -> bool:
    wanted = selector.get("matchLabels") or {}
    return all(labels.get(key) == value for key, value in wanted.items()) and all(
        _holds(rule, labels) for rule in selector.get("matchExpressions") or ()
    )


def _holds(rule: Object, labels: Mapping[str, str]) -> bool:
    there, values = labels.get(rule["key"]), rule.get("values") or ()
    match rule["operator"]:
        case "In":
            return there in values
        case "NotIn":
            return there not in values
        case "Exists":
            return there is not None
        case _:
            return there is None


def labels(item: Object) -> Mapping[str, str]:
    found: Mapping[str, str] = item["metadata"].get("labels") or {}
    return found


def address(pod: Object) -> str:
    """Return the IP of a pod that has a network of its own; otherwise ""."""
    status = pod.get("status", {})
    over = status.get("phase") in ("Succeeded", "Failed")
    return "" if over or pod["spec"].get("hostNetwork") else str(status.get("podIP") or "")


def filters(pod: Object, world: World) -> list[str] | None:
    """Return iptables rules for traffic to this pod, or None when no policy selects it."""
    namespace = pod["metadata"]["namespace"]
    chosen = [
        policy["spec"]
        for policy in world.policies
        if policy["metadata"]["namespace"] == namespace
        and "Ingress" in policy["spec"].get("policyTypes", ("Ingress",))
        and matches(policy["spec"]["podSelector"], labels(pod))
    ]
    if not chosen:
        return None
    rules = [rule for spec in chosen for rule in spec.get("ingress") or ()]
    return [
        " ".join(word for word in ("-A INPUT", source, port, "-j ACCEPT") if word)
        for rule in rules
        for source in sources(rule.get("from"), namespace, world)
        for port in ports(rule.get("ports"), pod)
    ]


def sources(peers: Sequence[Object] | None, namespace: str, world: World) -> list[str]:
    """List the allowed sources; an empty list of peers means everybody."""
    if not peers:
        return [""]
    found: list[str] = []
    for peer in peers:
        if block := peer.get("ipBlock"):
            # What is excepted within a block is not in the chart, and not told here.
            found.append(f"-s {block['cidr']}")
            continue
        inside = {namespace}
        if "namespaceSelector" in peer:
            chosen = (item for item in world.namespaces if matches(peer["namespaceSelector"], labels(item)))
            inside = {item["metadata"]["name"] for item in chosen}
        for pod in world.pods:
            known = pod["metadata"]["namespace"] in inside and matches(peer.get("podSelector") or {}, labels(pod))
            if known and (own := address(pod)):
                found.append(f"-s {own}")
    return sorted(set(found))


def ports(wanted: Sequence[Object] | None, pod: Object) -> list[str]:
    if not wanted:
        return [""]
    found = []
    for item in wanted:
        protocol = item.get("protocol", "TCP").lower()
        for number in numbers(item.get("port"), pod):
            last = f":{item['endPort']}" if "endPort" in item else ""
            found.append(f"-p {protocol}" + (f" --dport {number}{last}" if number else ""))
    return found


def numbers(port: int | str | None, pod: Object) -> Iterable[int]:
    """A port may have the name that the pod's container gives it; without a port all are meant."""
    if port is None or isinstance(port, int):
        return [port or 0]
    named = (item for container in pod["spec"]["containers"] for item in container.get("ports") or ())
    return [item["containerPort"] for item in named if item.get("name") == port]


def table(pod: Object, world: World, own: Sequence[str]) -> str:
    """The whole filter of a pod, for iptables-restore; `own` are the addresses of its node, which always reaches it."""
    first = ["-i lo", "-m conntrack --ctstate ESTABLISHED,RELATED", *(f"-s {node}" for node in own)]
    allowed = filters(pod, world)
    lines = ["*filter", ":INPUT ACCEPT [0:0]", ":FORWARD ACCEPT [0:0]", ":OUTPUT ACCEPT [0:0]"]
    if allowed is not None:
        lines += [f"-A INPUT {words} -j ACCEPT" for words in first]
        lines += [*allowed, "-A INPUT -j REJECT --reject-with icmp-admin-prohibited"]
    return "\n".join([*lines, "COMMIT", ""])


class Enforcer:
    def __init__(self, keys: str, node: str, node_address: str) -> None:
        self.api = Api(keys, plan.API)
        self.node = node
        number = plan.Machine(node, Path()).number
        self.own = (node_address, f"{plan.PODS}.{number}.1")
        self.networks: dict[str, str] = {}
        self.written: dict[str, str] = {}

    def turn(self) -> None:
        world = World(**{name: self.api.items(path) for name, path in PATHS.items()})
        here = {address(pod): pod for pod in world.pods if pod["spec"].get("nodeName") == self.node and address(pod)}
        self.look()
        for network, at in self.networks.items():
            if at not in here:
                continue
            wanted = table(here[at], world, self.own)
            if self.written.get(network) != wanted and self.enter(network, "iptables-restore", stdin=wanted)[0]:
                self.written[network] = wanted

    def look(self) -> None:
        """The networks of this node's pods, by their addresses."""
        there = {path.name for path in NAMESPACES.glob("cni-*")}
        for gone in set(self.networks) - there:
            del self.networks[gone]
            self.written.pop(gone, None)
        for new in there - set(self.networks):
            said = self.enter(new, "ip", "-4", "-o", "addr", "show", "eth0")[1].split()
            if "inet" in said:
                self.networks[new] = said[said.index("inet") + 1].partition("/")[0]

    def enter(self, network: str, *command: str, stdin: str = "") -> tuple[bool, str]:
        words = ("nsenter", f"--net={NAMESPACES / network}", *command)
        done = subprocess.run(words, input=stdin, capture_output=True, text=True)
        if done.returncode != 0:
            # A network that goes while it is looked at.
            print(f"{network}: {done.stderr.strip()}", flush=True)
        return done.returncode == 0, done.stdout


def main(keys: str, node: str, node_address: str) -> None:
    enforcer = Enforcer(keys, node, node_address)
    while True:
        try:
            enforcer.turn()
        except ERRORS as error:
            # An API server that is away: the filters stay as they were.
            print(error, flush=True)
        time.sleep(1)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3])
