"""The calls to the controller that the broker makes, each with a deadline."""

from __future__ import annotations

from init import slurm_client
from init.verdicts import Node

SINFO = "/usr/bin/sinfo"


class Slurm:
    """The controller, as far as the broker needs it."""

    def __init__(self, name: str, controller: str) -> None:
        self.name = name
        self.controller = controller

    def node(self) -> Node | None:
        found = slurm_client.node(self.name, self.controller)
        return None if found is None else Node("DRAIN" in found.flags, found.reason)

    def others(self) -> tuple[list[str], int]:
        """The reasons of the other nodes, and how many nodes there are."""
        text = slurm_client.run([SINFO, "--noheader", "--Node", "--format", "%N|%E"], self.controller)
        rows = dict(line.split("|", 1) for line in text.splitlines() if "|" in line)
        return [said.strip() for name, said in rows.items() if name.strip() != self.name], len(rows)

    def drain(self, text: str) -> None:
        slurm_client.update(self.name, ["state=drain", f"reason={text}"], self.controller)

    def undrain(self) -> None:
        # Not "resume": that would bring up a node that is down for another reason.
        slurm_client.update(self.name, ["state=undrain"], self.controller)
