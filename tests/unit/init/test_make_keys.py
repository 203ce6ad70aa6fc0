"""The Job that makes a cluster's keys, with an API server's Secrets over real TLS: each key is made only once."""

from __future__ import annotations

import base64
import json
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from init.helpers import make_keys
from init.pod.api_server import ApiServer
from tests.kube_api import TOKEN, serve

WANTED = (
    "slurm-munge:munge.key:bytes:1024",
    "slurm-ssh-host-keys:ssh_host_ed25519_key:ed25519",
    "slurm-database:password:letters:32",
)


class Secrets:
    """Fake API server with versioned Secrets, limited to GET and merge patches."""

    def __init__(self, account: Path) -> None:
        self.account = account
        self.lock = threading.Lock()
        self.there: dict[str, dict[str, Any]] = {}
        self.refuse: list[int] = []
        self.patches: list[str] = []
        self.between: list[dict[str, str]] = []
        self.written: dict[str, dict[str, str]] = {}  # ConfigMaps by path
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.answer(*outer.get(self.path, self.headers["Authorization"]))
                if outer.between:
                    outer.put("slurm-munge", outer.between.pop())

            def do_PATCH(self) -> None:
                assert self.headers["Content-Type"] == "application/merge-patch+json"
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self.answer(*outer.patch(self.path, body))

            def answer(self, status: int, found: dict[str, Any]) -> None:
                data = json.dumps(found).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = serve(account, Handler)

    def put(self, name: str, data: dict[str, str] | None = None) -> None:
        with self.lock:
            version = int(self.there[name]["metadata"]["resourceVersion"]) + 1 if name in self.there else 1
            self.there[name] = {"metadata": {"resourceVersion": str(version)}, **({"data": data} if data else {})}

    def get(self, path: str, authorization: str) -> tuple[int, dict[str, Any]]:
        assert authorization == f"Bearer {TOKEN}"
        if self.refuse:
            return self.refuse.pop(), {"message": "not yet"}
        found = self.there.get(path.removeprefix("/api/v1/namespaces/hpc/secrets/"))
        return (200, found) if found else (404, {"message": "no such Secret"})

    def patch(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        name = path.removeprefix("/api/v1/namespaces/hpc/secrets/").partition("?")[0]
        with self.lock:
            if name.startswith("/"):
                if name not in self.written:
                    return 404, {"message": "no such ConfigMap"}
                self.written[name] |= body["data"]
                return 200, {}
            found = self.there[name]
            if body["metadata"]["resourceVersion"] != found["metadata"]["resourceVersion"]:
                return 409, {"message": "it was changed"}
            self.patches.append(name)
            metadata = {"resourceVersion": str(int(found["metadata"]["resourceVersion"]) + 1)}
            metadata["annotations"] = body["metadata"]["annotations"]
            self.there[name] = {"metadata": metadata, "data": {**found.get("data", {}), **body["data"]}}
            return 200, self.there[name]

    def run(self, *wanted: str, known: tuple[str, ...] = (), patience: float = 20.0) -> int:
        server = ApiServer("make keys", self.account, f"localhost:{self.server.server_port}")
        todo = [make_keys.parse(each) for each in wanted]
        return make_keys.run(server, "hpc", todo, make_keys.parse_known(known), patience)

    def value(self, name: str, key: str) -> bytes:
        return base64.b64decode(self.there[name]["data"][key])


@pytest.fixture
def secrets(tmp_path: Path) -> Iterator[Secrets]:
    made = Secrets(tmp_path)
    yield made
    made.server.shutdown()
    made.server.server_close()


def test_each_key_is_made_once_and_stays_whatever_runs_again(secrets: Secrets, tmp_path: Path) -> None:
    for each in WANTED:
        secrets.put(each.partition(":")[0])
    assert secrets.run(*WANTED) == 0
    first = json.dumps(secrets.there)
    assert len(secrets.value("slurm-munge", "munge.key")) == 1024
    assert len(secrets.value("slurm-database", "password")) == 32
    assert secrets.value("slurm-database", "password").isalnum()
    assert secrets.there["slurm-munge"]["metadata"]["annotations"] == {"minivm.io/key": "made"}
    # ssh-keygen accepts the host key.
    key = tmp_path / "host"
    key.touch(mode=0o600)
    key.write_bytes(secrets.value("slurm-ssh-host-keys", "ssh_host_ed25519_key"))
    said = subprocess.run(["ssh-keygen", "-y", "-P", "", "-f", key], capture_output=True, text=True, check=True)
    assert said.stdout.startswith("ssh-ed25519 ")
    assert secrets.run(*WANTED) == 0
    assert json.dumps(secrets.there) == first, "nothing was written the second time"


def test_a_key_that_somebody_brought_is_not_changed(secrets: Secrets) -> None:
    brought = base64.b64encode(b"theirs" * 10).decode()
    secrets.put("slurm-munge", {"munge.key": brought})
    assert secrets.run(WANTED[0]) == 0
    assert secrets.there["slurm-munge"]["data"] == {"munge.key": brought} and not secrets.patches


def test_a_secret_with_something_else_in_it_is_left_alone_and_told(
    secrets: Secrets, capsys: pytest.CaptureFixture[str]
) -> None:
    secrets.put("slurm-munge", {"munge": "eA=="})
    assert secrets.run(WANTED[0]) == 1
    assert not secrets.patches
    assert "the Secret slurm-munge has munge without it" in capsys.readouterr().err


def test_of_two_at_once_one_writes(secrets: Secrets) -> None:
    """A Secret that another client fills between the Job's read and its write is not overwritten."""
    secrets.put("slurm-munge")
    theirs = {"munge.key": base64.b64encode(b"theirs").decode()}
    secrets.between = [theirs]
    assert secrets.run(WANTED[0]) == 0
    assert secrets.there["slurm-munge"]["data"] == theirs and not secrets.patches


def test_it_waits_for_its_secrets_and_its_rights(secrets: Secrets, capsys: pytest.CaptureFixture[str]) -> None:
    secrets.put("slurm-munge")
    secrets.refuse = [404, 403, 503]
    assert secrets.run(WANTED[0]) == 0
    assert secrets.patches == ["slurm-munge"]
    said = capsys.readouterr()
    assert "403 not yet; retrying" in said.out
    assert base64.b64encode(secrets.value("slurm-munge", "munge.key")).decode() not in said.out + said.err


def test_a_secret_that_never_comes_fails_the_job(secrets: Secrets) -> None:
    assert secrets.run(WANTED[0], patience=0.1) == 1


@pytest.mark.parametrize(
    "text", ["a", "a:b", "a:b:bytes", "a:b:bytes:1", "a:b:rsa", "a:b:bytes:9999999", "a:b:ed25519:1"]
)
def test_what_it_cannot_make_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"^{text}$"):
        make_keys.parse(text)


KNOWN = "/api/v1/namespaces/hpc/configmaps/slurm-known-hosts"


def test_ssh_is_told_of_the_public_halves_and_of_nothing_else(secrets: Secrets, tmp_path: Path) -> None:
    """known_hosts gets the public keys and nothing else.

    It reads two Secrets, one of them brought by the user with two keys, and one key from the values.
    """
    theirs = {}
    for kind in ("ed25519", "ecdsa"):
        made = tmp_path / f"ssh_host_{kind}_key"
        subprocess.run(["ssh-keygen", "-q", "-t", kind, "-N", "", "-C", "a word", "-f", made], check=True)
        theirs[made.name] = base64.b64encode(made.read_bytes()).decode()
        theirs[f"{made.name}.pub"] = base64.b64encode(b"ssh-ed25519 FORGED").decode()
    secrets.put("theirs", theirs)
    secrets.put("slurm-worker-host-keys")
    secrets.written[KNOWN] = {}
    known = ("slurm-known-hosts", "login,login-*=theirs", "[gpu-*]:2222=slurm-worker-host-keys", "x=ssh-rsa AAAA")
    assert secrets.run("slurm-worker-host-keys:ssh_host_ed25519_key:ed25519", known=known) == 0
    lines = secrets.written[KNOWN]["known_hosts"].splitlines()
    public = [
        " ".join((tmp_path / f"ssh_host_{kind}_key.pub").read_text().split()[:2]) for kind in ("ecdsa", "ed25519")
    ]
    assert lines[:2] == [f"login,login-* {key}" for key in public]
    key = tmp_path / "worker"
    key.touch(mode=0o600)
    key.write_bytes(secrets.value("slurm-worker-host-keys", "ssh_host_ed25519_key"))
    said = subprocess.run(["ssh-keygen", "-y", "-P", "", "-f", key], capture_output=True, text=True, check=True)
    assert lines[2:] == [f"[gpu-*]:2222 {' '.join(said.stdout.split()[:2])}", "x ssh-rsa AAAA"]
    assert secrets.patches == ["slurm-worker-host-keys"], "of the other it only reads"


def test_a_secret_without_host_keys_is_told_and_nothing_is_written(
    secrets: Secrets, capsys: pytest.CaptureFixture[str]
) -> None:
    secrets.put("theirs", {"munge.key": "eA=="})
    secrets.written[KNOWN] = {"known_hosts": "before"}
    assert secrets.run(known=("slurm-known-hosts", "login=theirs")) == 1
    assert secrets.written[KNOWN] == {"known_hosts": "before"}
    assert "the Secret theirs holds no ssh_host_*_key" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["login", "=theirs", "login="])
def test_a_host_without_a_name_or_a_key_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"^{text}$"):
        make_keys.parse_known(["slurm-known-hosts", text])
