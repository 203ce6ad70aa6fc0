"""The broker's calls to the controller, each with a deadline."""

from __future__ import annotations

import time

from health.broker.decide import Act, BrokerNode, Fleet, Other
from init.slurm import client
from init.slurm.client import SlurmError

SINFO = "/usr/bin/sinfo"


def others(text: str, own: str) -> tuple[list[Other], int]:
    """Parse sinfo's lines NAME|TIME|REASON; a node appears once per partition."""
    cells = ([cell.strip() for cell in line.split("|", 2)] for line in text.splitlines())
    rows = {row[0]: (row[1], row[2]) for row in cells if len(row) == 3}
    return [Other(text, _time(at)) for name, (at, text) in rows.items() if name != own], len(rows)


def _time(text: str) -> float | None:
    """Parse a time; Slurm's clients print this machine's local time."""
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except (ValueError, OverflowError):
        return None


class Slurm:
    """The controller's interface for the broker."""

    def __init__(self, name: str, controller: str) -> None:
        self.name = name
        self.controller = controller

    def node(self) -> BrokerNode | None:
        node = client.node(self.name, self.controller)
        if node is None:
            return None
        author, _, at = node.author.partition("@")
        return BrokerNode("DRAIN" in node.flags, node.reason, node.busy, author, _time(at))

    def known_node(self) -> BrokerNode:
        node = self.node()
        if node is None:
            raise SlurmError("find the node", f"slurmctld knows no node {self.name} yet")
        return node

    def others(self) -> tuple[list[Other], int]:
        """Return the reasons of the other nodes, and the number of nodes."""
        text = client.run([SINFO, "--noheader", "--Node", "--format", "%N|%H|%E"], self.controller)
        return others(text, self.name)

    def survey(self) -> Fleet:
        others, total = self.others()
        return Fleet(tuple(others), total)

    def change(self, act: Act) -> Act:
        if act.kind == "clear":
            self.undrain()
        else:
            self.drain(act.text)
        return act

    def drain(self, text: str) -> None:
        client.update(self.name, ["state=drain", f"reason={text}"], self.controller)

    def undrain(self) -> None:
        # Not "resume": that would bring up a node that is down for another reason.
        client.update(self.name, ["state=undrain"], self.controller)

    def cancel(self, job: int, text: str) -> bool:
        """Cancel a job that runs on this node, with the reason as its comment; tell whether it ran here."""
        command = [client.SQUEUE, "--noheader", "--nodelist", self.name, "--states", "R,S", "--format", "%A %i"]
        rows = (line.split() for line in client.run(command, self.controller).splitlines())
        # The bare number of an array's task may mean the whole array. A heterogeneous job is cancelled as a whole.
        shown = next((row[1].partition("+")[0] for row in rows if len(row) == 2 and row[0] == str(job)), "")
        if shown:
            client.comment([shown], text, self.controller)
            client.notify(shown, text, self.controller)
            client.run([client.SCANCEL, shown], self.controller)
        return bool(shown)
