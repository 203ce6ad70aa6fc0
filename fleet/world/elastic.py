"""A pool that has as many pods as jobs ask for: between how many, and how quick."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from fleet.errors import FleetError
from fleet.world import reading
from fleet.world.pending import UNSAID, Offer, gpus
from fleet.world.reading import Object

# As a worker's image reads them.
FEATURES, CONF = "MINIVM_NODE_FEATURES", "MINIVM_NODE_CONF"
# What every worker has.
OF_ALL = "minivm"
_KEY = re.compile(r"(?:^|\s)(CPUs|RealMemory|Gres)=(\S+)", re.IGNORECASE)
USUAL = {"idleSeconds": 600, "pendingSeconds": 30, "step": 10}


@dataclass(frozen=True, slots=True)
class Elastic:
    least: int
    most: int
    idle_s: float
    pending_s: float
    # So many are on their way at a time.
    step: int
    # Partitions of Slurm whose jobs it serves; none: those of all.
    partitions: frozenset[str] = frozenset()
    # What its nodes have, as far as the template says it.
    says: Offer = UNSAID


def elastic(said: Object, template: Object, most: int) -> Elastic:
    def count(key: str, least: int = 0, *, bound: int = most) -> int:
        if key not in said and key not in USUAL:
            raise FleetError(f"read spec.elastic.{key}", "it is not there")
        found = reading.number(said.get(key, USUAL.get(key)), f"spec.elastic.{key}")
        if not least <= found <= bound:
            raise FleetError(f"read spec.elastic.{key}", f"wanted {least} to {bound}, not {found}")
        return found

    fewest = count("min")
    names = reading.items(said.get("partitions"), "spec.elastic.partitions")
    return Elastic(
        fewest,
        count("max", max(1, fewest)),
        float(count("idleSeconds", bound=1 << 40)),
        float(count("pendingSeconds", bound=1 << 40)),
        count("step", 1),
        frozenset(reading.text(name, "spec.elastic.partitions", needed=True) for name in names),
        _said(template),
    )


def offered(wants: Elastic, seen: Offer) -> Offer:
    """What its nodes have, as it is said, else as it was seen of one."""
    says = wants.says
    return Offer(
        wants.partitions or seen.partitions,
        says.features | seen.features,
        says.cpus or seen.cpus,
        says.memory or seen.memory,
        says.gpus or seen.gpus,
    )


def _said(template: Object) -> Offer:
    env = _env(template)
    conf = {key.lower(): value for key, value in _KEY.findall(env.get(CONF, ""))}
    # A name that is made of others is not known before the pod is there.
    features = frozenset(name for name in env.get(FEATURES, "").split(",") if name and "$" not in name)
    size = (_number(conf.get("cpus")), _number(conf.get("realmemory")), gpus(conf.get("gres", "")))
    return Offer(frozenset(), features | {OF_ALL}, *size)


def _env(template: Object) -> Mapping[str, str]:
    found = {}
    spec = reading.mapping(template.get("spec"), "spec.template.spec")
    for container in reading.items(spec.get("containers"), "containers"):
        for item in reading.items(reading.mapping(container, "containers").get("env"), "containers.env"):
            one = reading.mapping(item, "containers.env")
            found[str(one.get("name"))] = str(one.get("value") or "")
    return found


def _number(said: str | None) -> int:
    return int(said) if said and said.isdecimal() and len(said) < 10 else 0
