"""Whether a node's record still says what its pod offers. Pure.

slurmctld reads the description of a dynamic node once, when it makes the record. A pod that comes back with less would
be drained by Slurm ("Low RealMemory"), one that comes back with more would not be believed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from init.fields import number

# The words of a description, as `scontrol show node` calls them.
SHOWN_AS = {"cpus": "CPUTot", "feature": "AvailableFeatures", "features": "AvailableFeatures"}
# What slurmd finds itself unless one of them is given.
TOPOLOGY = frozenset({"cpus", "boards", "socketsperboard", "corespersocket", "threadspercore"})
# What counts where nothing is said.
DEFAULTS = {"Gres": "", "AvailableFeatures": "", "CoreSpecCount": "0", "MemSpecLimit": "0", "Weight": "1"}
EMPTY = ("(null)", "N/A")


def offered(configuration: str, hardware: str) -> dict[str, str]:
    """The description that slurmd would register: our own words over those of `slurmd -C`."""
    own, found = words(configuration), words(hardware)
    if TOPOLOGY & set(own):
        found = {key: value for key, value in found.items() if key not in TOPOLOGY}
    return found | own


def words(text: str) -> dict[str, str]:
    found = (word.partition("=") for word in text.split())
    return {key.lower(): value for key, equals, value in found if equals}


def difference(shown: Mapping[str, str], offer: Mapping[str, str]) -> str:
    """The first thing that the record says otherwise, or nothing. What slurmctld does not show is not compared."""
    names = {key.lower(): key for key in (*shown, *DEFAULTS)}
    wanted = dict(DEFAULTS)
    for key, value in offer.items():
        name = SHOWN_AS.get(key) or names.get(key)
        if name and key != "nodename":
            wanted[name] = value
    for name, value in wanted.items():
        known = shown.get(name, DEFAULTS.get(name, ""))
        known = "" if known in EMPTY else known
        same = resources(known) == resources(value) if name == "Gres" else known == value
        if not same and not (name == "Gres" and untyped(known) == resources(value)):
            return f"{name} was {known or 'nothing'} and is {value or 'nothing'}"
    return ""


def resources(gres: str) -> dict[str, int]:
    """gpu:h100:8(S:0-1),nvme:2 as {gpu:h100: 8, nvme: 2}: slurmctld adds the sockets."""
    found: dict[str, int] = {}
    for part in re.sub(r"\([^)]*\)", "", gres).split(","):
        name, _, count = part.rpartition(":")
        many = number(count)
        if part and many is None:
            name, many = part, 1
        if name:
            found[name] = found.get(name, 0) + (many or 0)
    return found


def untyped(gres: str) -> dict[str, int]:
    """The same without types: slurmd may have found them itself."""
    found: dict[str, int] = {}
    for name, count in resources(gres).items():
        kind = name.partition(":")[0]
        found[kind] = found.get(kind, 0) + count
    return found
