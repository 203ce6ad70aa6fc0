"""Chart values and keys of a cluster on one machine. A key is made once, and only its owner may read it."""

from __future__ import annotations

import base64
import json
import os
import re
import secrets
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from cluster import ClusterError, cgroups
from cluster.pods import write_private

RELEASE = "slurm"
NAMESPACE = "minivm"
CONTROLLER = f"{RELEASE}-controller-0"
USERS = ("alice", "bob")
AUTHS = ("slurm", "munge")
# For stored options of an older version, which had no authentication.
OLDER_AUTH = "munge"


@dataclass(frozen=True, slots=True)
class Options:
    """A person's choices for a local cluster."""

    name: str = "local"
    workers: int = 2
    # One is active, the rest are standbys.
    controllers: int = 1
    tag: str = "latest"
    # Role -> tag, if it differs from `tag`: a tag is the hash of one image, so the roles' differ.
    tags: Mapping[str, str] = field(default_factory=dict)
    repository: str = "minivm"
    port: int = 2222
    # How Slurm tracks jobs; empty: in cgroups if pods of this machine may have their own.
    proctrack: str = ""
    # How daemons authenticate (AUTHS), unless the overrides set it.
    auth: str = AUTHS[0]
    # Whether pods may have cgroups of their own.
    own_cgroups: bool = False
    # The content of the values file, and its path.
    overrides: Mapping[str, Any] = field(default_factory=dict)
    values_file: str = ""
    # The people of a people.yaml, as the chart's values have them.
    people: Mapping[str, Any] = field(default_factory=dict)

    def image(self, role: str) -> str:
        """Return the role's image, as the chart names it."""
        image_values = self.overrides.get("image")
        image_values = image_values if isinstance(image_values, Mapping) else {}
        tag = (image_values.get("tags") or {}).get(role) or self.tags.get(role) or image_values.get("tag") or self.tag
        digest = (image_values.get("digests") or {}).get(role)
        return f"{repository_of(self.overrides, self.repository)}/{role}:{tag}" + (f"@{digest}" if digest else "")

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z][a-z0-9-]{0,20}", self.name):
            raise ClusterError(f"name a cluster {self.name!r}", "lower-case letters, digits and '-' only, 21 at most")
        if not 1 <= self.workers <= 64:
            raise ClusterError(f"start {self.workers} workers", "1 to 64 fit on one machine")
        if self.controllers not in (1, 2):
            raise ClusterError(
                f"start {self.controllers} controllers",
                "a cluster has one controller, or two: an active and a standby one",
            )


def dump(options: Options) -> bytes:
    return json.dumps(asdict(options)).encode()


def load(text: str | bytes, file: str) -> Options:
    """Read stored options; ClusterError for those of another version of minivm.

    An older version stored no authentication, or an empty one: such a cluster uses munge.
    """
    try:
        raw = json.loads(text)
        unknown = sorted(set(raw) - {item.name for item in fields(Options)})
        if not unknown:
            return Options(**{**raw, "auth": raw.get("auth") or OLDER_AUTH})
        problem = f"this version does not know {', '.join(unknown)}"
    except (ValueError, TypeError) as error:
        problem = str(error)
    raise ClusterError("read the stored options of a cluster", problem, file=file,
                       hint="use the checkout that brought it up; or `make down` and `make up`")  # fmt: skip


@dataclass(frozen=True, slots=True)
class UpRequest:
    """Options given to `up`; None or empty: not given."""

    workers: int | None = None
    controllers: int | None = None
    proctrack: str | None = None
    auth: str | None = None
    overrides: Mapping[str, Any] | None = None
    values_file: str = ""
    repository: str = ""
    people: Mapping[str, Any] | None = None
    # Forget the stored workers, values, people and proctrack. Images and port are separate and stay.
    reset: bool = False


def settle(name: str, stored: Options | None, request: UpRequest) -> Options:
    """Combine a cluster's options: those given now, then the stored ones, then the defaults."""
    options = stored or Options(name=name)
    if request.reset:
        options = replace(options, workers=Options().workers, controllers=1, proctrack="", overrides={}, values_file="",
                          people={})  # fmt: skip
    if request.overrides is not None:
        options = replace(options, overrides=request.overrides, values_file=request.values_file)
    if request.people is not None:
        refuse_other_uids(stored.people if stored else {}, request.people)
        options = replace(options, people=request.people)
    if options.people and {"existingConfigMap", "existingSecret", "groups", "users"} & {
        *(options.overrides.get("people") or {})
    }:
        raise ClusterError("use --people", "the values have people too", file=options.values_file, field="people",
                           hint="keep one of them; --reset forgets a stored file")  # fmt: skip
    if request.controllers is not None:
        options = replace(options, controllers=request.controllers)
    if request.proctrack is not None:
        options = replace(options, proctrack=request.proctrack)
    # Another authentication ends running steps: only --auth and a value change it.
    options = replace(options, auth=request.auth or (auth(stored) if stored else options.auth))
    if request.auth is not None and auth(options) != request.auth:
        raise ClusterError(f"use the authentication {request.auth}", f"the values say {auth(options)}",
                           file=options.values_file, field="slurm.auth",
                           hint="change it there, or leave it out there")  # fmt: skip
    if request.repository:
        options = replace(options, repository=request.repository)
    if request.workers is not None:
        replicas = read_replicas(options.overrides)
        if replicas not in (None, request.workers):
            raise ClusterError(f"start {request.workers} workers", f"the values say {replicas}",
                               file=options.values_file, field="workers.pools.worker.replicas",
                               hint="change it there, or leave it out there")  # fmt: skip
        options = replace(options, workers=request.workers)
    return options


def refuse_other_uids(before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Refuse a file that changes a stored person's uid or name: files and jobs carry the uid alone."""
    uid_before = {person["name"]: person["uid"] for person in before.get("users", [])}
    for person in after["users"]:
        uid = uid_before.get(person["name"], person["uid"])
        if uid != person["uid"]:
            raise ClusterError("take over the people", f"{person['name']} had the uid {uid}, and has {person['uid']}",
                               field=f"users ({person['name']}).uid",
                               hint="give the uid back, or use another name")  # fmt: skip
    owners = {uid: name for name, uid in uid_before.items()}
    for person in after["users"]:
        owner = owners.get(person["uid"], person["name"])
        if owner != person["name"]:
            raise ClusterError("take over the people", f"{person['uid']} is the uid of {owner}",
                               field=f"users ({person['name']}).uid",
                               hint=f"keep the name {owner}, or give {person['name']} another uid")  # fmt: skip


def read_replicas(overrides: Mapping[str, Any]) -> Any:
    """Return the number of workers in the user's values, which --workers cannot change; None without one."""
    value: Any = overrides
    for key in ("workers", "pools", "worker", "replicas"):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def repository_of(overrides: Mapping[str, Any], default: str) -> str:
    """Return the repository of the images with these chart values; tags of another one may not exist there."""
    image = overrides.get("image")
    if not isinstance(image, Mapping):
        return default
    return "/".join(filter(None, (image.get("registry"), image.get("repository") or default)))


def proctrack(options: Options) -> str:
    """Return how Slurm tracks jobs: as requested, else in cgroups if pods can have their own."""
    requested = options.overrides.get("slurm", {}).get("proctrack") or options.proctrack
    return str(requested or ("cgroup" if options.own_cgroups else "linuxproc"))


def auth(options: Options) -> str:
    return str(options.overrides.get("slurm", {}).get("auth") or options.auth)


def read_accounting_mode(options: Options, key: str = "mode") -> str:
    """Return where accounting is, or where it was before (`from`)."""
    settings = options.overrides.get("accounting")
    value = settings.get(key) if isinstance(settings, Mapping) else None
    return str(value or ("embedded" if key == "mode" else ""))


def find_origin_of_records(before: Options, after: Options) -> str:
    """Return the place from which the change moves the records; "" if it moves none.

    ClusterError for a change to or from an accounting pod without them: slurmdbd would begin with an empty database.
    """
    old, new = read_accounting_mode(before), read_accounting_mode(after)
    if old not in (new, "none") and read_accounting_mode(after, "from") == old:
        return old
    if old != new and "pod" in (old, new):
        raise ClusterError(f"change accounting.mode from {old} to {new}",
                           "the cluster's records would stay behind, and slurmctld does not start with a database that"
                           " never knew it; nothing was changed",
                           file=after.values_file or None, field="accounting.mode",
                           hint=(f"accounting.from: {old} moves them (docs/how-to/accounting-pod.md)" if old != "none"
                                 else "keep none; or a new cluster: make down, then make up")
                           )  # fmt: skip
    return ""


def read_login_pools(values: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the login pools beside `login`, as far as they are mappings: the chart's schema refuses others."""
    pools = values["login"].get("pools")
    return {name: pool for name, pool in (pools or {}).items() if isinstance(pool, Mapping)}


def name_slurm(labels: Mapping[str, str]) -> dict[str, str]:
    """Return chart values for the Slurm in the controller's image, since a tag `latest` does not name it."""
    version = re.match(r"[0-9]{2}[.][0-9]{2}", labels.get("org.opencontainers.image.version", ""))
    values = {"version": version[0]} if version else {}
    # A build from the tarball has what the release's packages may lack.
    return values | ({"mpiDefault": "pmix"} if "pmix" in labels.get("io.minivm.capabilities", "").split() else {})


def local_values(options: Options, keys: Keys, slurm: Mapping[str, str] = MappingProxyType({})) -> dict[str, Any]:
    """Return the values that one machine needs; everything else is the chart's default."""
    runtime_class = cgroups.RUNTIME_CLASS if options.own_cgroups else ""
    several = options.controllers > 1
    values: dict[str, Any] = {
        "clusterName": "minivm",
        "slurm": {"proctrack": proctrack(options), "auth": auth(options), **slurm},
        "image": {"repository": options.repository, "tag": options.tag, "tags": dict(options.tags)},
        "controller": {"graceSeconds": 30}
        | ({"replicas": options.controllers, "moveAddress": True} if several else {}),
        "login": {
            "graceSeconds": 30,
            "runtimeClassName": runtime_class,
            "service": {"type": "NodePort", "nodePort": options.port},
            "motd": "A demo cluster on one machine.",
        },
        "workers": {
            "defaults": {"graceSeconds": 35, "drainSeconds": 15, "runtimeClassName": runtime_class},
            "pools": {"worker": {"replicas": options.workers}},
        },
        "secrets": {
            "munge": {"key": keys.munge},
            "slurm": {"key": keys.slurm},
            "jwt": {"key": keys.jwt},
            "sshHostKeys": {"keys": dict(keys.ssh_host), "public": [keys.ssh_host_public]},
            "workerHostKeys": {"keys": dict(keys.worker_host), "public": [keys.worker_host_public]},
        },
        "accounting": {"database": {"password": keys.database}},
        # The demo's repository is created in its pod: there is no signer.
        "scripts": {"repository": f"git://{RELEASE}-demo/scripts", "env": {"MINIVM_GITSYNC_VERIFY": "no"}},
        "demo": {"enabled": True, "users": dict(keys.users_public)},
    }
    if options.people:
        values["people"] = {key: options.people[key] for key in ("groups", "users")}
    if options.overrides.get("scripts", {}).get("env", {}).get("MINIVM_GITSYNC_RING_URL"):
        values["secrets"]["ring"] = {"key": keys.ring}
    values = merge(values, options.overrides)
    pools = {"login": values["login"]} | {
        f"login.pools.{name}": pool for name, pool in read_login_pools(values).items()
    }
    for name, pool in pools.items():
        if pool.get("keepSeconds"):
            raise ClusterError("keep the sessions of the login pod", "one container has its ssh port here",
                               file=options.values_file, field=f"{name}.keepSeconds",
                               hint="leave it out; `up` says which sessions end")  # fmt: skip
    # An empty value means the cluster's own, which the chart cannot look up here.
    values["slurm"]["auth"] = auth(options)
    return values


def login_host_keys(options: Options, keys: Keys) -> list[str]:
    """Return the login pod's public host keys: those of the user's values, else those that this machine made."""
    return list(local_values(options, keys)["secrets"]["sshHostKeys"]["public"])


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge `over` into `base`, maps key by key, as Helm merges values."""
    result = dict(base)
    for key, value in over.items():
        below = result.get(key)
        result[key] = merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return result


@dataclass(frozen=True, slots=True)
class Keys:
    munge: str = field(repr=False)  # base64
    slurm: str = field(repr=False)  # base64
    jwt: str = field(repr=False)  # base64
    database: str = field(repr=False)
    ring: str = field(repr=False)  # base64
    ssh_host: dict[str, str] = field(repr=False)
    ssh_host_public: str
    worker_host: dict[str, str] = field(repr=False)
    worker_host_public: str
    users: dict[str, Path]  # user -> private key file
    users_public: dict[str, str]


def load_or_make_keys(directory: Path, *, users: tuple[str, ...]) -> Keys:
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    private = {user: directory / f"{user}_ed25519" for user in users}
    for path in private.values():
        load_or_make_ssh_key(path)
    return Keys(
        munge=base64.b64encode(load_or_make_secret(directory / "munge.key", 1024)).decode(),
        slurm=base64.b64encode(load_or_make_secret(directory / "slurm.key", 1024)).decode(),
        jwt=base64.b64encode(load_or_make_secret(directory / "jwt_hs256.key", 32)).decode(),
        database=load_or_make_secret(directory / "database", 24).hex(),
        ring=base64.b64encode(load_or_make_secret(directory / "ring.key", 32).hex().encode()).decode(),
        ssh_host={"ssh_host_ed25519_key": load_or_make_ssh_key(directory / "ssh_host_ed25519_key")},
        ssh_host_public=read_public_key(directory / "ssh_host_ed25519_key"),
        worker_host={"ssh_host_ed25519_key": load_or_make_ssh_key(directory / "worker_host_ed25519_key")},
        worker_host_public=read_public_key(directory / "worker_host_ed25519_key"),
        users=private,
        users_public={user: read_public_key(path) for user, path in private.items()},
    )


def load_or_make_secret(path: Path, size: int) -> bytes:
    if not path.exists():
        write_private(path, secrets.token_bytes(size))
    return path.read_bytes()


def load_or_make_ssh_key(path: Path) -> str:
    """Return the private key's text; ssh-keygen creates it with mode 0600."""
    if not path.exists():
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", path.name, "-f", str(path)]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | {"LC_ALL": "C"})
        except FileNotFoundError as error:
            raise ClusterError(
                f"make {path.name}", "ssh-keygen is not installed", hint="install openssh-client"
            ) from error
        except subprocess.CalledProcessError as error:
            raise ClusterError(f"make {path.name}", error.stderr.strip()) from error
    return path.read_text()


def read_public_key(private: Path) -> str:
    return private.with_name(f"{private.name}.pub").read_text().strip()


def make_known_hosts(public_keys: Iterable[str], port: int) -> str:
    """Format the known_hosts lines of the login pod's host keys, for ssh on this machine."""
    return "".join(f"[127.0.0.1]:{port} {key}\n" for key in public_keys)


def ssh_command(keys: Keys, user: str, *command: str, port: int, known_hosts: Path) -> list[str]:
    identity = keys.users.get(user)
    if identity is None:
        raise ClusterError(f"log in as {user}", f"the demo's users are {', '.join(keys.users)}")
    return [
        "ssh",
        *("-p", str(port), "-i", str(identity)),
        *("-o", f"UserKnownHostsFile={known_hosts}", "-o", "IdentitiesOnly=yes"),
        f"{user}@127.0.0.1",
        *command,
    ]
