"""The values with which the chart makes a cluster of one machine. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cluster import cgroups
from cluster.errors import ClusterError
from cluster.keys import Keys

RELEASE = "slurm"
NAMESPACE = "minivm"
USERS = ("alice", "bob")
BASE_DN = "dc=minivm,dc=demo"
FIRST_UID = 20001
USERS_GID = 20000


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

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z][a-z0-9-]{0,20}", self.name):
            raise ClusterError(f"name a cluster {self.name!r}", "lower-case letters, digits and '-' only, 21 at most")
        if not 1 <= self.workers <= 64:
            raise ClusterError(f"start {self.workers} workers", "1 to 64 fit on one machine")


def proctrack(options: Options) -> str:
    """How Slurm is to track jobs: as was asked for, or else in cgroups if pods can have their own."""
    asked = options.overrides.get("slurm", {}).get("proctrack") or options.proctrack
    return str(asked or ("cgroup" if options.own_cgroups else "linuxproc"))


def local_values(options: Options, keys: Keys) -> dict[str, Any]:
    """What one machine needs said; everything else is the chart's default."""
    runtime_class = cgroups.RUNTIME_CLASS if options.own_cgroups else ""
    values: dict[str, Any] = {
        "clusterName": "minivm",
        "slurm": {"proctrack": proctrack(options)},
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
            "sshHostKeys": {"keys": dict(keys.ssh_host)},
            "sssd": {"config": sssd_conf()},
        },
        "accounting": {"database": {"password": keys.database}},
        # The demo's repository is made in its pod: there is nobody whose signature could be asked for.
        "scripts": {"repository": f"git://{RELEASE}-demo/scripts", "env": {"MINIVM_GITSYNC_VERIFY": "no"}},
        "demo": {"enabled": True, "ldif": ldif(keys.users_public)},
    }
    if options.overrides.get("scripts", {}).get("env", {}).get("MINIVM_GITSYNC_RING_URL"):
        values["secrets"]["ring"] = {"key": keys.ring}
    return merged(values, options.overrides)


def sssd_conf() -> str:
    return "\n".join(
        [
            "[sssd]",
            "services = nss, pam, ssh",
            "domains = demo",
            "",
            "[domain/demo]",
            "id_provider = ldap",
            "access_provider = permit",
            # Keys only: nobody has a password.
            "auth_provider = none",
            "sudo_provider = none",
            f"ldap_uri = ldap://{RELEASE}-demo",
            f"ldap_search_base = {BASE_DN}",
            "ldap_schema = rfc2307",
            "ldap_user_ssh_public_key = sshPublicKey",
            "ldap_id_use_start_tls = false",
            "ldap_network_timeout = 2",
            "ldap_opt_timeout = 3",
            "enumerate = false",
            # sssd doubles its pauses up to an hour while a directory is away: too long after it is back.
            "offline_timeout_max = 60",
            "entry_cache_timeout = 300",
            "",
        ]
    )


def ldif(users_public: Mapping[str, str]) -> str:
    """The demo's directory: one group, and each user with a key."""
    entries = [
        ["dn: {base}", "objectClass: dcObject", "objectClass: organization", "o: minivm demo", "dc: minivm"],
        ["dn: ou=people,{base}", "objectClass: organizationalUnit", "ou: people"],
        ["dn: ou=groups,{base}", "objectClass: organizationalUnit", "ou: groups"],
        [
            "dn: cn=researchers,ou=groups,{base}",
            "objectClass: posixGroup",
            "cn: researchers",
            f"gidNumber: {USERS_GID}",
        ],
    ]
    entries += [user_entry(user, FIRST_UID + index, key) for index, (user, key) in enumerate(users_public.items())]
    return "\n\n".join("\n".join(entry) for entry in entries).replace("{base}", BASE_DN) + "\n"


def user_entry(user: str, uid: int, public_key: str) -> list[str]:
    return [
        f"dn: uid={user},ou=people,{{base}}",
        "objectClass: inetOrgPerson",
        "objectClass: posixAccount",
        "objectClass: ldapPublicKey",
        f"uid: {user}",
        f"cn: {user.capitalize()}",
        f"sn: {user.capitalize()}",
        f"uidNumber: {uid}",
        f"gidNumber: {USERS_GID}",
        f"homeDirectory: /home/{user}",
        "loginShell: /bin/bash",
        f"sshPublicKey: {public_key}",
    ]


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` on top of `base`, maps merged key by key, as Helm merges values."""
    result = dict(base)
    for key, value in over.items():
        below = result.get(key)
        result[key] = merged(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return result
