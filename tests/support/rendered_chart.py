"""The chart rendered for a cluster on one machine."""

from __future__ import annotations

from cluster import values
from cluster.keys import Keys
from cluster.rendered import manifests
from cluster.rendered.manifests import Manifests
from cluster.rendered.render import render
from cluster.values import NAMESPACE, RELEASE, Options

KEYS = Keys(
    ring="cmlu" * 12,
    slurm="c2x1" * 12,
    munge="bXVu" * 12,
    jwt="and0" * 12,
    database="secret",
    ssh_host={"ssh_host_ed25519_key": "PRIVATE"},
    ssh_host_public="ssh-ed25519 AAAA",
    worker_host={"ssh_host_ed25519_key": "OTHER"},
    worker_host_public="ssh-ed25519 BBBB",
    users={},
    users_public={"alice": "ssh-ed25519 AAAA alice", "bob": "ssh-ed25519 BBBB bob"},
)


def local(options: Options | None = None) -> Manifests:
    chosen = values.local_values(options or Options(), KEYS)
    return manifests.parse(render(chosen, release=RELEASE, namespace=NAMESPACE), namespace=NAMESPACE)
