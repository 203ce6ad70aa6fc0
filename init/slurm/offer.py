"""Compare a node's record with its pod's resources. Pure.

slurmctld reads a dynamic node's description once, when it creates the record. Slurm would drain a pod that returns with
less ("Low RealMemory"), and ignore the additions of one that returns with more.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from init.fields import number

# Names of the keys in `scontrol show node`.
SHOWN_AS = {"cpus": "CPUTot", "feature": "AvailableFeatures", "features": "AvailableFeatures"}
# Keys that slurmd detects unless one of them is given.
TOPOLOGY = frozenset({"cpus", "boards", "socketsperboard", "corespersocket", "threadspercore"})
# Values of missing keys.
DEFAULTS = {"Gres": "", "AvailableFeatures": "", "CoreSpecCount": "0", "MemSpecLimit": "0", "Weight": "1"}
EMPTY = ("(null)", "N/A")


def offered(configuration: str, hardware: str) -> dict[str, str]:
    """Return the description that slurmd would register: our own values over those of `slurmd -C`."""
    own, detected = words(configuration), words(hardware)
    if TOPOLOGY & set(own):
        detected = {key: value for key, value in detected.items() if key not in TOPOLOGY}
    return detected | own


def words(text: str) -> dict[str, str]:
    pairs = (word.partition("=") for word in text.split())
    return {key.lower(): value for key, equals, value in pairs if equals}


def difference(shown: Mapping[str, str], offer: Mapping[str, str]) -> str:
    """Return the first difference to the record, else "". Keys that slurmctld does not show are not compared."""
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
    """Parse gpu:h100:8(S:0-1),nvme:2 as {gpu:h100: 8, nvme: 2}; slurmctld adds the sockets."""
    counts: dict[str, int] = {}
    for part in re.sub(r"\([^)]*\)", "", gres).split(","):
        name, _, count = part.rpartition(":")
        many = number(count)
        if part and many is None:
            name, many = part, 1
        if name:
            counts[name] = counts.get(name, 0) + (many or 0)
    return counts


def untyped(gres: str) -> dict[str, int]:
    """Return the same without types, which slurmd may have detected."""
    counts: dict[str, int] = {}
    for name, count in resources(gres).items():
        kind = name.partition(":")[0]
        counts[kind] = counts.get(kind, 0) + count
    return counts
