"""Keys of a local cluster: created once, kept while it exists, readable by their owner alone."""

from __future__ import annotations

import base64
import os
import secrets
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from cluster import ClusterError
from cluster.pods import write_private


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


def load_or_make(directory: Path, *, users: tuple[str, ...]) -> Keys:
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    private = {user: directory / f"{user}_ed25519" for user in users}
    for path in private.values():
        ssh_key(path)
    return Keys(
        munge=base64.b64encode(once(directory / "munge.key", 1024)).decode(),
        slurm=base64.b64encode(once(directory / "slurm.key", 1024)).decode(),
        jwt=base64.b64encode(once(directory / "jwt_hs256.key", 32)).decode(),
        database=once(directory / "database", 24).hex(),
        ring=base64.b64encode(once(directory / "ring.key", 32).hex().encode()).decode(),
        ssh_host={"ssh_host_ed25519_key": ssh_key(directory / "ssh_host_ed25519_key")},
        ssh_host_public=public(directory / "ssh_host_ed25519_key"),
        worker_host={"ssh_host_ed25519_key": ssh_key(directory / "worker_host_ed25519_key")},
        worker_host_public=public(directory / "worker_host_ed25519_key"),
        users=private,
        users_public={user: public(path) for user, path in private.items()},
    )


def once(path: Path, size: int) -> bytes:
    if not path.exists():
        write_private(path, secrets.token_bytes(size))
    return path.read_bytes()


def ssh_key(path: Path) -> str:
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


def public(private: Path) -> str:
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
