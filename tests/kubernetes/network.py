"""The lab's network: a switch in a namespace of its own, a cable to each machine and one to this host."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tests.kubernetes import plan
from tests.kubernetes.host import attempt, run
from tests.kubernetes.plan import Machine

NAMESPACES = Path("/run/netns")


def switch() -> None:
    if (NAMESPACES / plan.SWITCH).exists():
        return
    run("ip", "netns", "add", plan.SWITCH)
    inside = ("ip", "-n", plan.SWITCH, "link")
    run(*inside, "add", "br0", "type", "bridge")
    run("ip", "link", "add", plan.LINK, "type", "veth", "peer", "name", "host", "netns", plan.SWITCH)
    run(*inside, "set", "host", "master", "br0")
    for name in ("lo", "br0", "host"):
        run(*inside, "set", name, "up")
    run("ip", "addr", "add", f"{plan.HOST}/24", "dev", plan.LINK)
    run("ip", "link", "set", plan.LINK, "up")
    run("ip", "route", "add", f"{plan.SERVICES}.0/24", "via", plan.CONTROL_PLANE)


def cable(machine: Machine) -> None:
    """The machine's own network; it stays while the machine is off."""
    if (NAMESPACES / machine.netns).exists():
        return
    run("ip", "netns", "add", machine.netns)
    peer = ("type", "veth", "peer", "name", "eth0", "netns", machine.netns)
    run("ip", "-n", plan.SWITCH, "link", "add", machine.name, *peer)
    run("ip", "-n", plan.SWITCH, "link", "set", machine.name, "master", "br0", "up")
    inside = ("ip", "-n", machine.netns)
    run(*inside, "addr", "add", f"{machine.address}/24", "dev", "eth0")
    for name in ("eth0", "lo"):
        run(*inside, "link", "set", name, "up")
    run(*inside, "route", "add", "default", "via", plan.HOST)
    settings = ("net.ipv4.ip_forward=1", "net.ipv4.conf.all.rp_filter=0")
    run("ip", "netns", "exec", machine.netns, "sysctl", "-qw", *settings)


def routes(machines: Iterable[Machine]) -> None:
    """Every machine and this host know where each node's pods are."""
    known = list(machines)
    for node in (machine for machine in known if machine.number):
        run("ip", "route", "replace", node.pods, "via", node.address)
        for other in known:
            if other != node:
                run("ip", "-n", other.netns, "route", "replace", node.pods, "via", node.address)


def plug(machine: Machine, state: str) -> None:
    """`down` takes the cable out, `up` puts it back."""
    run("ip", "-n", plan.SWITCH, "link", "set", machine.name, state)


def remove(machines: Iterable[Machine]) -> None:
    """Links and routes go with the namespaces and the host's end of its cable."""
    attempt("ip", "link", "del", plan.LINK)
    for name in (*(machine.netns for machine in machines), plan.SWITCH):
        if (NAMESPACES / name).exists():
            run("ip", "netns", "del", name)
    if NAMESPACES.is_dir() and not any(NAMESPACES.iterdir()):
        attempt("umount", NAMESPACES)
        NAMESPACES.rmdir()
