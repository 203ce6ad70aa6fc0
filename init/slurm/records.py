"""Maintain, on the controller, the node records of absent pods.

python3 -I -m init.slurm.records

A pod cannot know if it comes back, so it never deletes its record. The chart lists the workers that it creates: a
record beyond them is deleted once it is down only because its pod is gone. slurmctld also overwrites the author of a
drain when a node is away for long, unless the node is down before: setting it down keeps the author. The same list of
nodes gives the metrics their number by state.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections import Counter

from ground.metrics import family
from init.errors import ConfigError, InitError
from init.fields import number
from init.lean import record
from init.slurm import client
from init.slurm.client import SlurmError
from init.slurm.node import PREFIX

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from init.slurm.node import Node

POOLS = "/mnt/minivm/config/slurm/pools.json"
METRICS = "/run/minivm/metrics.d/slurm/nodes.prom"
BUSY = ("alloc", "mix", "comp")


@record(frozen=True, slots=True)
class Pools:
    """Workers that the chart creates: POOL-0 to POOL-(count - 1); each pool's name starts with the release's."""

    release: str
    counts: tuple[tuple[str, int], ...]

    def beyond(self, name: str) -> bool:
        """Tell if it is a worker of this release that is no longer created. Nothing is known of other names."""
        match = re.fullmatch(rf"({re.escape(self.release)}-.+)-([0-9]+)", name)
        ordinal = number(match[2]) if match else None
        return match is not None and ordinal is not None and ordinal >= dict(self.counts).get(match[1], 0)


def pools_from_json(text: str, file: str = POOLS) -> Pools:
    try:
        data = json.loads(text)
        release, counts = data.pop("release"), data.pop("pools")
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
        raise ConfigError("read the pools", "wanted {release: NAME, pools: {NAME: COUNT}}", file=file) from None
    whole = isinstance(counts, dict) and all(type(count) is int for count in counts.values())
    if data or not (isinstance(release, str) and release and whole):
        raise ConfigError("read the pools", "wanted {release: NAME, pools: {NAME: COUNT}}", file=file)
    return Pools(release, tuple(sorted(counts.items())))


def read_pools(path: str = POOLS) -> Pools | None:
    try:
        with open(path, encoding="utf-8") as stream:  # noqa: PTH123 - it runs every half minute, and pathlib costs 8 ms
            return pools_from_json(stream.read(), path)
    except FileNotFoundError:
        return None  # the workers are unknown: keep every record


def forgotten(node: Node, pools: Pools | None) -> bool:
    """Tell if its pod is gone for good, and no person or broker holds the node."""
    lost = "DOWN" in node.flags and not node.held_by_others and not node.busy
    return lost and node.dynamic and pools is not None and pools.beyond(node.name)


def explain_down(node: Node, pools: Pools | None) -> str:
    """Return the reason with which an absent drained node is set down; "" to leave it."""
    if "DRAIN" not in node.flags or "DOWN" in node.flags or node.responds or node.busy:
        return ""
    if node.held_by_us:
        # Its pod set it down, and its slurmd answered once more before it ended. A pod that comes back lifts this drain
        # itself: a `down` a moment later would end its first jobs.
        return node.reason if pools is not None and pools.beyond(node.name) else ""
    # A verdict's drain belongs to the broker, even if Slurm shows another author.
    return "" if node.reason.startswith(PREFIX) or not node.author else f"{node.reason} [{node.author}]"


def parse_states(listed: str) -> dict[str, str]:
    """Parse `sinfo --Node --format %N|%t`, which has a line for each partition of a node."""
    return dict(line.strip().partition("|")[::2] for line in listed.splitlines() if "|" in line)


def candidates(rows: Mapping[str, str], pools: Pools | None) -> list[str]:
    """Select the nodes to examine; drain* does not answer."""
    away = {name for name, state in rows.items() if state.startswith("dr") and state.endswith("*")}
    return sorted(away | {name for name in rows if pools is not None and pools.beyond(name)})


def name_state(state: str) -> str:
    """Return the metrics' word for a state such as mix- or drain*. A node that does not answer is down."""
    if state.startswith("dr"):
        return "drained"
    if state.startswith(("down", "fail", "unk")) or state.endswith("*"):
        return "down"
    if state.startswith(BUSY):
        return "busy"
    return "idle" if state == "idle" else "other"


def render_metrics(rows: Mapping[str, str]) -> str:
    counts = Counter(map(name_state, rows.values()))
    samples = [({"state": name}, str(counts[name])) for name in ("busy", "down", "drained", "idle", "other")]
    return "\n".join(family("minivm_nodes_by_state", "Slurm's nodes; drained ones may still run jobs.", samples)) + "\n"


def write_metrics(text: str, path: str) -> None:
    """Replace the file, without the import of pathlib; PID 1 leaves an old one out."""
    with contextlib.suppress(OSError):
        temporary = f"{path}.new"
        with open(temporary, "w", encoding="ascii") as stream:  # noqa: PTH123 - as above
            stream.write(text)
        os.replace(temporary, path)  # noqa: PTH105 - as above


def look_after(node: Node, pools: Pools | None, controller: str) -> None:
    """Update one record. A node still in use or in a reservation is retried later and does not stop the others."""
    if not (forgotten(node, pools) or explain_down(node, pools)):
        return
    try:
        # Once more: while the records before it were updated, its pod came back, or a person resumed it.
        current = client.node(node.name, controller)
        if current is None:
            return
        if forgotten(current, pools):
            client.delete(node.name, controller)
            print(f"{node.name} is deleted from Slurm: the chart makes no such pod")
        elif reason := explain_down(current, pools):
            client.update(node.name, ["state=down", f"reason={reason}"], controller)
            print(f"{node.name} is away and now down: {reason}")
    except SlurmError as error:
        print(f"{node.name}: {error}")


def main() -> int:
    controller = client.address(os.environ)
    try:
        pools = read_pools()
        listed = client.run([client.SINFO, "--noheader", "--Node", "--format", "%N|%t"], controller)
        rows = parse_states(listed)
        write_metrics(render_metrics(rows), METRICS)
        for node in client.nodes(candidates(rows, pools), controller):
            look_after(node, pools, controller)
    except SlurmError as error:
        print(error)  # slurmctld's absence is reported elsewhere
    except InitError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
