"""The values with which the chart makes a cluster of one machine. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from cluster import cgroups
from cluster.errors import ClusterError
from cluster.keys import Keys

RELEASE = "slurm"
NAMESPACE = "minivm"
USERS = ("alice", "bob")


@dataclass(frozen=True, slots=True)
class Options:
    """What a person may choose of a local cluster."""

    name: str = "local"
    workers: int = 2
    tag: str = "latest"
    # Role -> tag, where it is another than `tag`: a tag is the hash of one image, so the roles' differ.
    tags: Mapping[str, str] = field(default_factory=dict)
    repository: str = "minivm"
    port: int = 2222
    # How Slurm tracks jobs; empty: in cgroups, where pods of this machine may have their own.
    proctrack: str = ""
    # Whether they may.
    own_cgroups: bool = False
    overrides: Mapping[str, Any] = field(default_factory=dict)

    def image(self, role: str) -> str:
        return f"{self.repository}/{role}:{self.tags.get(role) or self.tag}"

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z][a-z0-9-]{0,20}", self.name):
            raise ClusterError(f"name a cluster {self.name!r}", "lower-case letters, digits and '-' only, 21 at most")
        if not 1 <= self.workers <= 64:
            raise ClusterError(f"start {self.workers} workers", "1 to 64 fit on one machine")


def proctrack(options: Options) -> str:
    """How Slurm is to track jobs: as was asked for, or else in cgroups if pods can have their own."""
    asked = options.overrides.get("slurm", {}).get("proctrack") or options.proctrack
    return str(asked or ("cgroup" if options.own_cgroups else "linuxproc"))


def slurm_of(labels: Mapping[str, str]) -> dict[str, str]:
    """What the chart is to know of the Slurm in the controller's image, whose tag may be `latest` and not say it."""
    version = re.match(r"[0-9]{2}[.][0-9]{2}", labels.get("org.opencontainers.image.version", ""))
    found = {"version": version[0]} if version else {}
    # One from a tarball has what its release's packages may lack.
    return found | ({"mpiDefault": "pmix"} if "pmix" in labels.get("io.minivm.capabilities", "").split() else {})


def local_values(options: Options, keys: Keys, slurm: Mapping[str, str] = MappingProxyType({})) -> dict[str, Any]:
    """What one machine needs said; everything else is the chart's default."""
    runtime_class = cgroups.RUNTIME_CLASS if options.own_cgroups else ""
    values: dict[str, Any] = {
        "clusterName": "minivm",
        "slurm": {"proctrack": proctrack(options), **slurm},
        "image": {"repository": options.repository, "tag": options.tag, "tags": dict(options.tags)},
        "controller": {"graceSeconds": 30},
        "login": {
            "graceSeconds": 30,
            "runtimeClassName": runtime_class,
            "service": {"type": "NodePort", "nodePort": options.port},
            "motd": "A demo cluster on one machine.",
        },
        "workers": {
            "defaults": {"graceSeconds": 30, "drainSeconds": 15, "runtimeClassName": runtime_class},
            "pools": {"worker": {"replicas": options.workers}},
        },
        "secrets": {
            "munge": {"key": keys.munge},
            "jwt": {"key": keys.jwt},
            "sshHostKeys": {"keys": dict(keys.ssh_host), "public": [keys.ssh_host_public]},
            "workerHostKeys": {"keys": dict(keys.worker_host), "public": [keys.worker_host_public]},
        },
        "accounting": {"database": {"password": keys.database}},
        # The demo's repository is made in its pod: there is nobody whose signature could be asked for.
        "scripts": {"repository": f"git://{RELEASE}-demo/scripts", "env": {"MINIVM_GITSYNC_VERIFY": "no"}},
        "demo": {"enabled": True, "users": dict(keys.users_public)},
    }
    if options.overrides.get("scripts", {}).get("env", {}).get("MINIVM_GITSYNC_RING_URL"):
        values["secrets"]["ring"] = {"key": keys.ring}
    return merged(values, options.overrides)


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` on top of `base`, maps merged key by key, as Helm merges values."""
    result = dict(base)
    for key, value in over.items():
        below = result.get(key)
        result[key] = merged(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return result
