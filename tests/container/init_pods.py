"""Pods of the real images for tests of the init: as Kubernetes would make them, with named capabilities only."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import docker  # type: ignore[import-untyped]  # it carries no types
from docker.models.containers import Container  # type: ignore[import-untyped]  # it carries no types
from docker.models.networks import Network  # type: ignore[import-untyped]  # it carries no types

from images.definition.load import load
from init.prepare import slurm_config
from tests.support.docker_answers import read_whole
from tests.waiting import PATIENCE, until

read_whole()

ROOT = Path(__file__).resolve().parents[2]
# Images that were built under another name can be tested too: MINIVM_TEST_IMAGES=registry/prefix.
IMAGES = os.environ.get("MINIVM_TEST_IMAGES", "minivm")
# Two runs on one machine must not take each other's pods away.
RUN = str(os.getpid())
PREFIX = f"minivm-test-init-{RUN}"
LABELS = {"minivm-test": "init", "minivm-test-run": RUN}
PYTHON = "/opt/minivm/bin/python3"
PROBES = 8650


def image_of(role: str) -> str:
    return f"{IMAGES}/{role}:latest"


def role_capabilities(role: str) -> list[str]:
    """Return the capabilities in the role's data: the test grants these and no others."""
    return list(load(ROOT).roles[role].capabilities)


class Pod:
    """A container with minivm's init in it."""

    def __init__(self, container: Container) -> None:
        self.container = container
        self.name = str(container.name)

    def run(self, *argv: str, user: str = "root", check: bool = True, env: Mapping[str, str] | None = None) -> str:
        code, output = self.container.exec_run(list(argv), user=user, environment=dict(env or {}), demux=True)
        out, err = ((part or b"").decode(errors="replace") for part in output)
        if check and code != 0:
            raise AssertionError(f"{' '.join(argv)} in {self.name}: exit {code}\n{out}{err}")
        return str(out)

    def code(self, *argv: str) -> tuple[int, str]:
        code, output = self.container.exec_run(list(argv))
        return int(code), output.decode(errors="replace")

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.run("minivm", "status", "--json"))
        return found

    def service(self, name: str) -> dict[str, Any]:
        return next(view for view in self.status()["services"] if view["name"] == name)

    def ready(self) -> bool:
        self.container.reload()
        if self.container.status != "running":
            raise AssertionError(f"{self.name} has ended:\n{self.logs()}")
        status = self.probe()
        return status == 200 if status else self.code("minivm", "ready")[0] == 0

    def probe(self) -> int:
        """Return what the readiness probe answers, 0 without an answer; `minivm ready` costs 0.3 s of a processor."""
        for network in self.container.attrs["NetworkSettings"]["Networks"].values():
            with contextlib.suppress(OSError, http.client.HTTPException):
                connection = http.client.HTTPConnection(network["IPAddress"], PROBES, timeout=5)
                with contextlib.closing(connection):
                    connection.request("GET", "/readyz")
                    return connection.getresponse().status
        return 0

    def metrics(self) -> str:
        """Return /metrics as a scraper reads it, from outside the pod."""
        self.container.reload()
        (network,) = self.container.attrs["NetworkSettings"]["Networks"].values()
        with urllib.request.urlopen(f"http://{network['IPAddress']}:{PROBES}/metrics", timeout=PATIENCE) as reply:
            return str(reply.read().decode())

    def why(self) -> str:
        return self.code("minivm", "ready")[1].strip()

    def wait_ready(self, within: float = PATIENCE) -> Pod:
        until(self.ready, f"{self.name} is ready", within=within, seen=self.account)
        return self

    def account(self) -> str:
        """Describe the pod's state for a wait that failed."""
        return f"{self.why()}\n{self.logs()[-12000:]}"

    def wait_reason(self, words: str, within: float = PATIENCE) -> str:
        def found() -> str:
            text = self.why()
            return text if words in text else ""

        return until(found, f"{self.name} says {words!r}", within=within, seen=self.account)

    def logs(self) -> str:
        return str(self.container.logs().decode(errors="replace"))

    def add_user(self, name: str = "demo", uid: int = 20001) -> None:
        self.run("useradd", "--create-home", "--uid", str(uid), "--shell", "/bin/bash", name)

    def remove(self) -> None:
        with contextlib.suppress(docker.errors.NotFound):
            self.container.remove(force=True, v=True)


def _is_over(labels: Mapping[str, str]) -> bool:
    run = labels.get("minivm-test-run", "")
    return run.isdigit() and not Path(f"/proc/{run}").exists()


class World:
    """One docker network, one set of mounts, and the pods on it; all removed in the end, by name."""

    def __init__(self, directory: Path, tag: str) -> None:
        self.client = docker.from_env()
        self.tag = tag
        self.mounts = directory / "mounts"
        (self.mounts / "secrets" / "munge").mkdir(parents=True)
        (self.mounts / "config" / "slurm").mkdir(parents=True)
        self.key = os.urandom(128)
        (self.mounts / "secrets" / "munge" / "munge.key").write_bytes(self.key)
        self.pods: list[Pod] = []
        self._clean()
        self.network: Network = self.client.networks.create(f"{PREFIX}-{tag}", labels=LABELS)

    def _clean(self) -> None:
        """Remove leftovers of killed runs, whose process is gone. Another run may clean up at the same time."""
        left = {"label": "minivm-test=init"}
        for container in self.client.containers.list(all=True, filters=left, ignore_removed=True):
            if _is_over(container.labels):
                Pod(container).remove()
        for network in self.client.networks.list(filters=left):
            if _is_over(network.attrs["Labels"]):
                with contextlib.suppress(docker.errors.NotFound):
                    network.remove()

    def pod(
        self,
        role: str,
        host: str,
        *,
        env: Mapping[str, str] | None = None,
        mounts: Path | None = None,
        image: str = "",
        volumes: Mapping[Path, str] | None = None,
        extra_mounts: Sequence[Any] = (),
        **options: Any,
    ) -> Pod:
        """Start a pod. Further `volumes` are mounted read-only where each says; `extra_mounts` as they are."""
        name = f"{PREFIX}-{self.tag}-{host}"
        container = self.client.containers.create(
            image or image_of(role),
            name=name,
            hostname=host,
            cap_drop=["ALL"],
            cap_add=role_capabilities(role),
            environment={"MINIVM_POD_NAME": host, "MINIVM_GRACE_SECONDS": "20", **(env or {})},
            volumes={
                str(source): {"bind": target, "mode": "ro"}
                for source, target in {mounts or self.mounts: "/mnt/minivm", **(volumes or {})}.items()
            },
            network=self.network.name,
            labels=LABELS,
            mounts=list(extra_mounts),
            **options,
        )
        pod = Pod(container)
        self.pods.append(pod)
        # The pod's own name in DNS, as a headless service gives it: docker serves the container's name only.
        self.network.disconnect(container)
        self.network.connect(container, aliases=[host])
        container.start()
        return pod

    def configure(self, files: Mapping[str, str], *, mounts: Path | None = None) -> None:
        """Swap the mounted Slurm configuration as Kubernetes swaps a ConfigMap: `..data` is renamed over."""
        directory = (mounts or self.mounts) / "config" / "slurm"
        fresh = directory / f"..{time.time_ns()}"
        fresh.mkdir()
        for name, text in files.items():
            (fresh / name).write_text(text)
            link = directory / name
            if not link.is_symlink():
                link.symlink_to(Path("..data") / name)
        old = (directory / "..data").readlink() if (directory / "..data").is_symlink() else None
        temporary = directory / "..data_tmp"
        temporary.symlink_to(fresh.name)
        temporary.rename(directory / "..data")
        if old:
            shutil.rmtree(directory / old)

    def close(self) -> None:
        for pod in self.pods:
            pod.remove()
        self.network.remove()
        self.client.close()


@contextlib.contextmanager
def world(directory: Path, tag: str) -> Iterator[World]:
    made = World(directory, tag)
    try:
        yield made
    finally:
        made.close()


# What the tests' clusters have otherwise than the image's own slurm.conf: nobody waits for the scheduler, or for a job
# that is killed, and several jobs share a core.
CHANGED = {
    "KillWait": "5",
    "SchedulerParameters": "batch_sched_delay=0,sched_min_interval=0",
    "PartitionName": "main Nodes=ALL Default=YES OverSubscribe=FORCE:4 State=UP",
}


def slurm_conf(*extra: str, accounting: bool = True, auth: str = "munge") -> str:
    """Return the image's own slurm.conf for a controller of that name, with those changes and further lines."""
    host = "slurm-controller"
    text = slurm_config.DEFAULT.read_text().format(
        auth=auth,
        cluster="minivm",
        host=host,
        accounting=slurm_config.ACCOUNTING.format(host=host) if accounting else "",
        jwt="",
    )
    kept = [line for line in text.splitlines() if line.partition("=")[0] not in CHANGED]
    return "\n".join([*kept, *(f"{key}={value}" for key, value in CHANGED.items()), *extra]) + "\n"
