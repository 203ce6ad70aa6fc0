"""The login pods from outside: their Service by a forwarded port, or one of them by its own address."""

from __future__ import annotations

import base64
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.kubernetes.world import Release


class Door:
    """Where somebody knocks with a key, and knows whom to expect."""

    def __init__(self, release: Release, address: str, port: int) -> None:
        self.address, self.port = address, port
        self.known = release.keys / f"known-{release.name}-{port}"
        at = f"[{address}]:{port}" if port != 22 else address
        self.known.write_text(f"{at} {host_key(release)}\n")

    def begin(self, user: str, command: str, *, key: Path) -> subprocess.Popen[str]:
        """With this key and no other; a host key that is not the cluster's is refused."""
        options = [
            "BatchMode=yes",
            "IdentitiesOnly=yes",
            "StrictHostKeyChecking=yes",
            f"UserKnownHostsFile={self.known}",
        ]
        line = ["ssh", "-F", "none", *(word for option in options for word in ("-o", option))]
        where = ["-p", str(self.port), "-i", str(key), f"{user}@{self.address}", command]
        pipe = subprocess.PIPE
        return subprocess.Popen([*line, *where], stdin=pipe, stdout=pipe, stderr=pipe, text=True)

    def try_(self, user: str, command: str, *, key: Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
        with self.begin(user, command, key=key) as started:
            said, complained = started.communicate(stdin, timeout=120)
        return subprocess.CompletedProcess(command, started.returncode, said, complained)


class Forwarded(Door):
    """A port of this host that leads to one of the login pods, as docs/how-to says."""

    @classmethod
    def to(cls, release: Release) -> Forwarded | None:
        """None while its kubelet is away."""
        words = ("-n", release.namespace, "port-forward", f"service/{release.name}-ssh", ":22")
        forward = subprocess.Popen([*release.kubernetes.client, *words], stdout=subprocess.PIPE, text=True)
        assert forward.stdout
        if found := re.search(r"127\.0\.0\.1:(\d+) ->", forward.stdout.readline()):
            return cls(release, int(found[1]), forward)
        end(forward)
        return None

    def __init__(self, release: Release, port: int, forward: subprocess.Popen[str]) -> None:
        super().__init__(release, "127.0.0.1", port)
        self.forward = forward

    def open(self) -> bool:
        """It closes when the kubelet that it leads through ends."""
        return self.forward.poll() is None

    def close(self) -> None:
        end(self.forward)


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def host_key(release: Release) -> str:
    """The public half of what is in the cluster's Secret."""
    secret = release.get("secret", f"{release.name}-ssh-host-keys")
    private = release.keys / "host-key"
    private.touch(mode=0o600)
    private.write_bytes(base64.b64decode(secret["data"]["ssh_host_ed25519_key"]))
    done = subprocess.run(["ssh-keygen", "-y", "-f", private], capture_output=True, text=True, check=True)
    return done.stdout.strip()
