"""A real API server beside a real Slurm, with one fleet or more."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import urllib.error
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.container.init_pods import Pod, World, slurm_conf, world
from tests.kubernetes import programs
from tests.kubernetes.apiserver import ApiServer, api_server
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]
JWT = ("AuthAltTypes=auth/jwt", "AuthAltParameters=jwt_key=/etc/slurm/jwt_hs256.key")
PODS = "/api/v1/namespaces/default/pods"
LABELS = {
    f"app.kubernetes.io/{key}": said
    for key, said in {"name": "minivm", "instance": "slurm", "component": "worker"}.items()
}


class Both:
    """Two workers in Slurm, the objects of their pods and Nodes in Kubernetes, and a fleet between them."""

    names: tuple[str, ...] = ("w1", "w2")
    # Further lines of slurm.conf.
    conf: tuple[str, ...] = ()
    # Of another release of Slurm: role -> image.
    images: Mapping[str, str] = {}
    # Beside slurm.conf.
    files: Mapping[str, str] = {}
    worker_env: Mapping[str, str] = {}

    def __init__(self, api: ApiServer, slurm: World, directory: Path) -> None:
        self.api, self.directory, self.slurm = api, directory, slurm
        self.policy = directory / "policy.json"
        (slurm.mounts / "secrets" / "slurm").mkdir()
        self.key = slurm.mounts / "secrets" / "slurm" / "jwt_hs256.key"
        self.key.write_bytes(os.urandom(32))
        slurm.configure({"slurm.conf": slurm_conf(*JWT, *self.conf, accounting=False), **self.files})
        env = {"MINIVM_ACCOUNTING": "none", "MINIVM_SLURMRESTD": "0.0.0.0:6820"}
        self.controller = slurm.pod("controller", "slurm-controller", env=env, image=self.images.get("controller", ""))
        self.workers = {name: self.worker(name) for name in self.names}
        for pod in (self.controller, *self.workers.values()):
            pod.add_user()
            pod.wait_ready()
        self.controller.container.reload()
        networks = self.controller.container.attrs["NetworkSettings"]["Networks"]
        self.rest = f"{networks[slurm.network.name]['IPAddress']}:6820"
        self.api.ask("POST", "/api/v1/namespaces/default/serviceaccounts", {"metadata": {"name": "default"}})
        for name in self.workers:
            self.api.ask(
                "POST", "/api/v1/nodes", {"metadata": {"name": f"n-{name}"}, "status": {"conditions": [READY]}}
            )
            self.new_pod(name)

    def worker(self, name: str) -> Pod:
        env = {"MINIVM_ACCOUNTING": "none", **self.worker_env}
        return self.slurm.pod("worker", name, env=env, image=self.images.get("worker", ""))

    def new_pod(self, name: str, node: str = "") -> None:
        spec = {"nodeName": node or f"n-{name}", "containers": [{"name": "worker", "image": "x"}]}
        self.api.ask("POST", PODS, {"metadata": {"name": name, "labels": LABELS}, "spec": spec})
        # One that is pending is evicted whatever its budget says: nothing runs on it.
        self.api.merge(f"{PODS}/{name}/status", {"status": {"phase": "Running", "conditions": [READY]}})

    # What people do.

    def cordon(self, name: str, reason: str | None, *, on: bool = True) -> None:
        said = {"minivm.io/cordon-reason": reason}
        self.api.merge(f"/api/v1/nodes/n-{name}", {"metadata": {"annotations": said}, "spec": {"unschedulable": on}})

    def scontrol(self, *words: str) -> str:
        return self.controller.run("scontrol", *words)

    # What there is.

    def node(self, name: str) -> Mapping[str, str]:
        """State, reason and comment of the node, as scontrol tells them to a person."""
        text = self.scontrol("show", "node", name)
        assert "State=" in text, text
        lines = [line.strip() for line in text.splitlines()]
        state = next(line for line in lines if line.startswith("State=")).split()[0].partition("=")[2]
        found = {
            key: line.partition("=")[2] for line in lines for key in ("Reason", "Comment") if line.startswith(f"{key}=")
        }
        return {"state": state.replace("+DYNAMIC_NORM", "").rstrip("*"), **found}

    def reason(self, name: str) -> str:
        found = self.node(name)
        return found.get("Reason", "").partition(" [")[0] if "DRAIN" in found["state"] else ""

    def shown(self, name: str) -> str:
        """Return the pod's condition."""
        conditions = self.api.ask("GET", f"{PODS}/{name}")["status"]["conditions"]
        found = [one for one in conditions if one["type"] == "minivm.io/SlurmState"]
        return f"{found[0]['reason']} {found[0].get('message', '')}".strip() if found else ""

    def shown_on_node(self, name: str) -> str:
        conditions = self.api.ask("GET", f"/api/v1/nodes/n-{name}")["status"]["conditions"]
        found = [one for one in conditions if one["type"] == "minivm.io/SlurmState"]
        return f"{found[0]['reason']} {found[0].get('message', '')}".strip() if found else ""

    def free(self, name: str) -> bool:
        return "minivm.io/free" in self.api.ask("GET", f"{PODS}/{name}")["metadata"]["labels"]

    def eviction(self, name: str) -> int:
        """Anybody's: what the API server answers."""
        version = self.api.newest("policy")
        body = {"apiVersion": version, "kind": "Eviction", "metadata": {"name": name, "namespace": "default"}}
        try:
            self.api.ask("POST", f"{PODS}/{name}/eviction", body)
        except urllib.error.HTTPError as error:
            return error.code
        return 200

    def events(self) -> set[tuple[str, str]]:
        found = self.api.ask("GET", "/api/v1/namespaces/default/events")["items"]
        return {(one["involvedObject"]["name"], one["reason"]) for one in found}

    # The fleet.

    def env(self, **more: str) -> dict[str, str]:
        return {
            **{key: value for key, value in os.environ.items() if key in ("PATH", "HOME")},
            "KUBECONFIG": str(self.api.kubeconfig),
            "MINIVM_POD_NAMESPACE": "default",
            "MINIVM_FLEET_RELEASE": "slurm",
            "MINIVM_FLEET_SLURM": self.rest,
            "MINIVM_FLEET_KEY": str(self.key),
            "MINIVM_FLEET_POLICY": str(self.policy),
            **more,
        }

    def ask(self, *words: str, **more: str) -> str:
        command = [sys.executable, "-m", "fleet", *words]
        done = subprocess.run(command, env=self.env(**more), cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    @contextlib.contextmanager
    def running(self, *, cut: int = 0, again: int = 0) -> Iterator[Running]:
        fleet = Running(self, cut, again)
        try:
            yield fleet
            assert fleet.there(), "it runs to the end"
        finally:
            fleet.process.kill()
            fleet.process.wait()

    def log(self) -> str:
        return (self.directory / "fleet.log").read_text()

    def quiet(self) -> None:
        until(lambda: self.ask("plan") == "nothing to do\n", "there is nothing to do", seen=self.log)


class Running:
    """One fleet, started anew when it is killed, as Kubernetes does it; and killed `again` before that change of it."""

    def __init__(self, both: Both, cut: int, again: int) -> None:
        self.both, self.again, self.killed = both, again, 0
        self.process = self._start(cut)

    def _start(self, cut: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-u", "-m", "tests.process.fleet_faults", str(cut)]
        with (self.both.directory / "fleet.log").open("ab") as log:
            env = self.both.env()
            return subprocess.Popen(command, env=env, cwd=ROOT, stdout=log, stderr=log)

    def there(self) -> bool:
        if self.process.poll() is not None:
            assert self.process.returncode == -signal.SIGKILL, self.both.log()[-4000:]
            self.killed += 1
            self.process = self._start(self.again)
        return True


B = TypeVar("B", bound=Both)
READY: dict[str, Any] = {
    "type": "Ready",
    "status": "True",
    "lastTransitionTime": "2026-11-20T00:00:00Z",
    "lastHeartbeatTime": "2026-11-20T00:00:00Z",
}


@contextlib.contextmanager
def both_sides(directory: Path, name: str, kind: type[B]) -> Iterator[B]:
    # Its programs alone: no machine is needed.
    if not programs.built() and (why := programs.refusal()):
        pytest.skip(f"no Kubernetes: {why}")
    (directory / "slurm").mkdir()
    with (
        api_server(programs.build(), directory) as api,
        world(directory / "slurm", name) as slurm,
    ):
        yield kind(api, slurm, directory)
