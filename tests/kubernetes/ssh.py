"""The login Service from outside, by a forwarded port, as docs/how-to says."""

from __future__ import annotations

import base64
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.kubernetes.world import Release


class Door:
    """A port of this host that leads to one of the login pods."""

    @classmethod
    def to(cls, release: Release) -> Door | None:
        """None while its kubelet is away."""
        door = cls(release)
        if door.port:
            return door
        door.close()
        return None

    def __init__(self, release: Release) -> None:
        self.release = release
        self.known = release.keys / f"known-{release.name}"
        words = [f"--kubeconfig={release.kubernetes.kubeconfig}", "-n", release.namespace]
        forward = ["port-forward", f"service/{release.name}-ssh", ":22"]
        self.forward = subprocess.Popen(
            [str(release.kubernetes.kubectl), *words, *forward], stdout=subprocess.PIPE, text=True
        )
        assert self.forward.stdout
        found = re.search(r"127\.0\.0\.1:(\d+) ->", self.forward.stdout.readline())
        self.port = int(found[1]) if found else 0
        self.known.write_text(f"[127.0.0.1]:{self.port} {host_key(release)}\n")

    def open(self) -> bool:
        """It closes when the kubelet that it leads through ends."""
        return self.forward.poll() is None

    def close(self) -> None:
        self.forward.kill()
        self.forward.communicate()

    def try_(self, user: str, command: str, *, key: Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
        """With this key and no other; a host key that is not the cluster's is refused."""
        options = [
            "BatchMode=yes",
            "IdentitiesOnly=yes",
            "StrictHostKeyChecking=yes",
            f"UserKnownHostsFile={self.known}",
        ]
        line = ["ssh", "-F", "none", *(word for option in options for word in ("-o", option))]
        where = ["-p", str(self.port), "-i", str(key), f"{user}@127.0.0.1", command]
        return subprocess.run([*line, *where], input=stdin, capture_output=True, text=True, timeout=120)


def host_key(release: Release) -> str:
    """The public half of what is in the cluster's Secret."""
    secret = release.get("secret", f"{release.name}-ssh-host-keys")
    private = release.keys / "host-key"
    private.touch(mode=0o600)
    private.write_bytes(base64.b64decode(secret["data"]["ssh_host_ed25519_key"]))
    done = subprocess.run(["ssh-keygen", "-y", "-f", private], capture_output=True, text=True, check=True)
    return done.stdout.strip()
