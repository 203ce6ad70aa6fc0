"""A real API server without machines: etcd and kube-apiserver alone on loopback, ready in seconds.

For what only watches and writes objects.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from fleet import crd
from tests.helm import KINDS
from tests.kubernetes.programs import Programs
from tests.support.ports import free_port
from tests.waiting import PATIENCE, until

Object = dict[str, Any]


class ApiServer:
    def __init__(self, programs: Programs, directory: Path) -> None:
        self.programs, self.directory = programs, directory
        self.token = secrets.token_hex(16)
        # Of the kubelet of a machine called n0.
        self.kubelet = secrets.token_hex(16)
        self.url = f"https://127.0.0.1:{free_port()}"
        self.kubeconfig = directory / "kubeconfig"
        # Made by the server for itself, on loopback, for as long as a test lasts.
        self.context = ssl._create_unverified_context()
        self.running: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        directory, bin_ = self.directory, self.programs.bin
        client, peer = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
        clients = ("--listen-client-urls", client, "--advertise-client-urls", client)
        self._run("etcd", bin_ / "etcd", "--data-dir", directory / "etcd", *clients,
                  "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
                  "--initial-cluster", f"default={peer}")  # fmt: skip
        key = directory / "accounts.key"
        subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
        kubelet = f"{self.kubelet},system:node:n0,n0,system:nodes\n"
        (directory / "tokens").write_text(f"{self.token},admin,admin,system:masters\n{kubelet}")
        self._run("kube-apiserver", bin_ / "kube-apiserver", f"--etcd-servers={client}", "--bind-address=127.0.0.1",
                  f"--secure-port={self.url.rpartition(':')[2]}", f"--cert-dir={directory / 'certs'}",
                  f"--token-auth-file={directory / 'tokens'}", "--authorization-mode=RBAC",
                  "--service-cluster-ip-range=10.96.0.0/24",
                  "--service-account-issuer=https://kubernetes.default.svc", f"--service-account-key-file={key}",
                  f"--service-account-signing-key-file={key}",
                  "--enable-admission-plugins=NodeRestriction",
                  "--disable-admission-plugins=ServiceAccount")  # fmt: skip
        until(self._ready, "the API server is ready", within=120, seen=self._logs)
        self.kubeconfig.write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "c",
                    "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
                    "clusters": [{"name": "c", "cluster": {"server": self.url, "insecure-skip-tls-verify": True}}],
                    "users": [{"name": "u", "user": {"token": self.token}}],
                }
            )
        )

    def _run(self, name: str, *command: str | Path) -> None:
        with (self.directory / f"{name}.log").open("wb") as log:
            self.running.append(subprocess.Popen([*map(str, command)], stdout=log, stderr=log, cwd=self.directory))

    def _ready(self) -> bool:
        assert all(one.poll() is None for one in self.running), self._logs()
        with contextlib.suppress(OSError):
            self.ask("GET", "/readyz", raw=True)
            self.ask("GET", "/api/v1/namespaces/default")
            return True
        return False

    def _logs(self) -> str:
        return "\n".join(path.read_text()[-2000:] for path in self.directory.glob("*.log"))

    def stop(self) -> None:
        # The API server first: without its etcd it takes a minute.
        for one in reversed(self.running):
            one.terminate()
            one.wait(timeout=PATIENCE)

    def ask(self, method: str, path: str, body: Object | None = None, *, kind: str = "", raw: bool = False) -> Object:
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": kind or "application/json"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        with urllib.request.urlopen(request, context=self.context, timeout=60) as reply:
            found: Object = {} if raw else json.load(reply)
        return found

    def newest(self, group: str) -> str:
        """Return the group's newest version here: `policy/v1`, before Kubernetes 1.21 `policy/v1beta1`."""
        return str(self.ask("GET", f"/apis/{group}")["preferredVersion"]["groupVersion"])

    def merge(self, path: str, body: Object) -> Object:
        return self.ask("PATCH", path, body, kind="application/merge-patch+json")


def install(api: ApiServer) -> None:
    """Create the chart's own kinds; an old API server drops the rules that it does not know."""
    made = [json.loads(file.read_text()) for file in sorted(KINDS.glob("*.json"))]
    for one in made:
        api.ask("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", one)

    def known(plural: str) -> bool:
        try:
            api.ask("GET", f"/apis/{crd.GROUP}/{crd.VERSION}/namespaces/default/{plural}")
        except urllib.error.HTTPError:
            return False
        return True

    for one in made:
        until(partial(known, one["spec"]["names"]["plural"]), "the kind is known")


@contextlib.contextmanager
def api_server(programs: Programs, directory: Path) -> Iterator[ApiServer]:
    server = ApiServer(programs, directory)
    os.umask(0o022)
    try:
        server.start()
        yield server
    finally:
        server.stop()
