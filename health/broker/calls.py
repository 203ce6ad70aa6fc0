"""The calls to the controller that the broker makes, each with a deadline."""

from __future__ import annotations

import time

from health.broker.decide import Act, Fleet, Node, Other
from init.slurm import client
from init.slurm.client import SlurmError

SINFO = "/usr/bin/sinfo"


def others(text: str, own: str) -> tuple[list[Other], int]:
    """What sinfo says: NAME|TIME|REASON; a node is told once for each of its partitions."""
    cells = ([cell.strip() for cell in line.split("|", 2)] for line in text.splitlines())
    rows = {row[0]: (row[1], row[2]) for row in cells if len(row) == 3}
    return [Other(said, _time(at)) for name, (at, said) in rows.items() if name != own], len(rows)


def _time(text: str) -> float | None:
    """Slurm's clients write this machine's local time."""
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except (ValueError, OverflowError):
        return None


class Slurm:
    """The controller, as far as the broker needs it."""

    def __init__(self, name: str, controller: str) -> None:
        self.name = name
        self.controller = controller

    def node(self) -> Node | None:
        found = client.node(self.name, self.controller)
        return None if found is None else Node("DRAIN" in found.flags, found.reason, found.busy)

    def known_node(self) -> Node:
        found = self.node()
        if found is None:
            raise SlurmError("find the node", f"slurmctld knows no node {self.name} yet")
        return found

    def others(self) -> tuple[list[Other], int]:
        """The reasons of the other nodes, and how many nodes there are."""
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
