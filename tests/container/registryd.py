"""Debian's docker-registry as a process of the test's own, on loopback."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import urllib.error
import urllib.request
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from images.ship.registry import Login, RegistryPath
from tests.container.conftest import docker
from tests.support.ports import free_port
from tests.waiting import PATIENCE, until

# "correct horse" by bcrypt, as `htpasswd -B` writes it.
HTPASSWD = "pusher:$2y$05$abcdefghijklmnopqrstuuHNbAKRhpaujgo33bRWs.NLUTJO3lOy2\n"
PUSHER = Login("pusher", "correct horse")
REPOSITORY = "minivm-test"


def layers(image: str) -> list[str]:
    found: list[str] = json.loads(docker("image", "inspect", "--format", "{{json .RootFS.Layers}}", image))
    return found


def root_of(image: str) -> str:
    """Return the smallest image here: Debian's root, and the one below this image.

    There may be another architecture's beside it, or another day's: all have the lock's creation time, and the engine
    lists images of the same age in any order.
    """
    listed = docker("image", "ls", "--format", "{{.Repository}}:{{.Tag}}", f"{image.rpartition('/')[0]}/layer-root")
    (root, *_) = [each for each in listed.split() if layers(each) == layers(image)[:1]]
    return root


class Registryd:
    """A docker-registry of the test's own; it survives being killed, as a real one would: its storage stays."""

    def __init__(self, root: Path, size: str = "", auth: Mapping[str, Any] | None = None) -> None:
        """`size` puts the storage on a small disk of its own; `auth` replaces the password file, {} lets all in."""
        self.root, self.size = root, size
        self.storage = root / "storage"
        self.storage.mkdir(parents=True)
        (root / "htpasswd").write_text(HTPASSWD)
        self.port = free_port()
        by_file = {"htpasswd": {"realm": "test", "path": str(root / "htpasswd")}}
        config: dict[str, Any] = {
            "version": "0.1",
            "log": {"level": "error"},
            "storage": {"filesystem": {"rootdirectory": str(self.storage)}},
            "http": {"addr": f"127.0.0.1:{self.port}"},
            "auth": by_file if auth is None else auth,
        }
        # JSON is YAML too.
        (root / "config.yml").write_text(json.dumps({key: value for key, value in config.items() if value}))
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = ["docker-registry", "serve", str(self.root / "config.yml")]
        if self.size:
            # A small disk that nobody else sees and that goes with the process.
            mount = f'mount -t tmpfs -o size={self.size} none "$0" && exec "$@"'
            command = ["unshare", "--mount", "sh", "-c", mount, str(self.storage), *command]
        with (self.root / "log").open("ab") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        until(self.listens, "docker-registry listens", seen=(self.root / "log").read_text)

    def listens(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
            return True
        assert self.process and self.process.poll() is None, (self.root / "log").read_text()
        return False

    def kill(self) -> None:
        if self.process:
            self.process.kill()
            self.process.wait()
            self.process = None

    def push(self, image: str, name: str) -> None:
        """Push an image of the engine by another name."""
        there = f"127.0.0.1:{self.port}/{name}"
        docker("tag", image, there)
        docker("push", "--quiet", there)
        docker("rmi", there)

    @property
    def place(self) -> RegistryPath:
        return RegistryPath.parse(f"127.0.0.1:{self.port}/site")

    def uploads(self) -> int:
        """Count the uploaded blobs in the access log.

        The registry writes a line after its answer: a request of the test's own ends what was asked before.
        """
        if self.process:
            mark = f"mark-{uuid.uuid4().hex}"
            with contextlib.suppress(urllib.error.HTTPError):
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/v2/site/{mark}/manifests/1", timeout=PATIENCE)
            until(lambda: mark in (self.root / "log").read_text(), "it is logged")
        return (self.root / "log").read_text().count(f'"PUT /v2/site/{REPOSITORY}/blobs/uploads/')
