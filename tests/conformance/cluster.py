"""A cluster as the checks see it: kubectl, and the Slurm commands in the pods that the adapter names."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

import pytest

from tests.conformance.adapter import Adapter, Field, Person

Object = dict[str, Any]
T = TypeVar("T")
# Where the environment names no other: `MINIVM_CONFORMANCE_KUBECTL="kubectl --context other"`.
KUBECTL = "kubectl"
# What kubectl says while a kubelet is away or does not know the pod yet: the command was not run.
NOT_REACHED = ("error dialing backend", "pod does not exist", "container not found", "unable to upgrade connection")
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "DEADLINE", "BOOT_FAIL"}
NOT_OFFERED, NOT_TRIED = "not offered: ", "not tried: "


def not_offered(why: str) -> NoReturn:
    """End the check: the product, as the adapter describes it, has no such thing."""
    pytest.skip(f"{NOT_OFFERED}{why}")


def not_tried(why: str) -> NoReturn:
    """End the check: this cluster is too small for it, or the caller left it out."""
    pytest.skip(f"{NOT_TRIED}{why}")


@dataclass
class Cluster:
    adapter: Adapter
    jobs: list[str] = field(default_factory=list)
    # Of all jobs of this run and of no others.
    job_name: str = field(default_factory=lambda: f"conformance-{secrets.token_hex(4)}")

    # Kubernetes

    def attempt(self, *words: str, stdin: str = "", timeout: float = 300) -> subprocess.CompletedProcess[str]:
        client = os.environ.get("MINIVM_CONFORMANCE_KUBECTL", KUBECTL).split()
        command = [*client, "-n", self.adapter.namespace, *words]
        return subprocess.run(
            command, input=stdin, capture_output=True, text=True, timeout=timeout, errors="replace", check=False
        )

    def kubectl(self, *words: str, stdin: str = "") -> str:
        done = self.attempt(*words, stdin=stdin)
        assert done.returncode == 0, f"kubectl {' '.join(words)}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def get(self, *words: str) -> Object:
        found: Object = json.loads(self.kubectl("get", *words, "-o", "json"))
        return found

    def items(self, *words: str) -> list[Object]:
        return list(self.get(*words)["items"])

    def pods(self, role: str, *, leaving: bool = False) -> list[Object]:
        """List the role's pods by name, without those that are being deleted."""
        found = self.items("pods", "-l", self.adapter.roles[role].selector)
        here = [pod for pod in found if leaving or "deletionTimestamp" not in pod["metadata"]]
        return sorted(here, key=lambda pod: str(pod["metadata"]["name"]))

    def all_pods(self) -> list[tuple[str, Object]]:
        return [(role, pod) for role in self.adapter.roles for pod in self.pods(role)]

    def pod(self, role: str) -> str:
        """Return the name of a pod of this role that is ready."""
        names = [name_of(pod) for pod in self.pods(role) if is_ready(pod)]
        assert names, f"no pod of the role {role} is ready: {self.adapter.roles[role].selector}"
        return names[0]

    def container(self, role: str, pod: Object) -> Object:
        """Return the container that has Slurm, as the pod's specification has it."""
        wanted = self.adapter.roles[role].container
        found = [part for part in pod["spec"]["containers"] if part["name"] == wanted]
        assert found, f"{name_of(pod)} has no container {wanted}"
        return dict(found[0])

    def containers(self) -> list[tuple[str, Object, Object]]:
        """List the containers that have Slurm, each with its role and pod."""
        found = [(role, pod, self.container(role, pod)) for role, pod in self.all_pods()]
        assert found, "no pod was found"
        return found

    def attempt_in(self, role: str, *command: str, pod: str = "", stdin: str = "", timeout: float = 300) -> Any:
        """Run a command in the role's container as the container's user; its exit code is the caller's to judge."""
        begun = time.monotonic()
        while True:
            name = pod or self.pod(role)
            words = ("exec", "-i", name, "-c", self.adapter.roles[role].container, "--", *command)
            done = self.attempt(*words, stdin=stdin, timeout=timeout)
            away = done.returncode and any(text in done.stderr for text in NOT_REACHED)
            if not away or time.monotonic() - begun > 60 * self.adapter.patience:
                return done
            time.sleep(1)

    def run_in(self, role: str, *command: str, pod: str = "", stdin: str = "") -> str:
        done = self.attempt_in(role, *command, pod=pod, stdin=stdin)
        assert done.returncode == 0, (
            f"{' '.join(command)} in {pod or role}: {done.returncode}\n{done.stdout}{done.stderr}"
        )
        return str(done.stdout)

    @contextlib.contextmanager
    def changed(self, of: Field, value: object) -> Iterator[None]:
        """Change a field, and set it to what it was before."""
        before = of.value_in(self.get(*of.object.split("/", 1)))
        self.patch(of, value)
        try:
            yield
        finally:
            self.patch(of, before)

    def patch(self, of: Field, value: object) -> None:
        kind, _, name = of.object.partition("/")
        self.kubectl("patch", kind, name, "--type=merge", "-p", json.dumps(of.merge_patch(value)))

    # Slurm

    def attempt_as(self, person: Person, *command: str, stdin: str = "", timeout: float = 300) -> Any:
        return self.attempt_in(person.role, *person.command, *command, stdin=stdin, timeout=timeout)

    def as_admin(self, *command: str, stdin: str = "") -> str:
        who = self.adapter.administrator
        return self.run_in(who.role, *who.command, *command, stdin=stdin).strip()

    def as_user(self, *command: str, stdin: str = "") -> str:
        who = self.adapter.user
        return self.run_in(who.role, *who.command, *command, stdin=stdin).strip()

    def srun(self, *words: str, stdin: str = "") -> str:
        return self.as_user("srun", f"--job-name={self.job_name}", "--chdir=/tmp", *words, stdin=stdin)

    def submit(self, *options: str, script: str = "true") -> str:
        """Submit a batch job as the user; it is cancelled when the check ends."""
        words = ("sbatch", "--parsable", f"--job-name={self.job_name}", "--chdir=/tmp", "--output=/dev/null", *options)
        job = self.as_user(*words, stdin=f"#!/bin/sh\n{script}\n").partition(";")[0]
        assert re.fullmatch(r"[0-9]+", job), f"sbatch answered {job!r}: expected the job's number"
        self.jobs.append(job)
        return job

    def cancel_jobs(self) -> None:
        if jobs := self.jobs:
            self.jobs = []
            self.as_admin("scancel", *jobs)

    def job(self, job: str) -> dict[str, str]:
        """Return the fields that `scontrol show job` has of the job, or of the first of an array."""
        lines = self.as_admin("scontrol", "-o", "show", "job", job).splitlines()
        return fields(lines[0] if lines else "")

    def states(self, job: str) -> list[str]:
        lines = self.as_admin("scontrol", "-o", "show", "job", job).splitlines()
        return [fields(line).get("JobState", "") for line in lines]

    def wait_job(self, job: str, *wanted: str, within: float = 180) -> None:
        def looked() -> bool:
            states = self.states(job)
            lost = [state for state in states if state in ENDED and state not in wanted]
            assert not lost, f"job {job} is {lost[0]}, expected {' or '.join(wanted)}: {self.job(job)}"
            return bool(states) and all(state in wanted for state in states)

        self.until(looked, f"job {job} is {' or '.join(wanted)}", within=within, seen=lambda: self.job(job))

    def nodes(self) -> dict[str, dict[str, str]]:
        """Return every node that Slurm knows, by name."""
        found = [fields(line) for line in self.as_admin("scontrol", "-o", "show", "node").splitlines()]
        return {node["NodeName"]: node for node in found if "NodeName" in node}

    def node_of(self, pod: Object) -> str:
        """Return the name of a worker pod's node in Slurm."""
        value = Field("", self.adapter.node_name).value_in(pod)
        assert value, f"{name_of(pod)} has no {'.'.join(self.adapter.node_name)}, the name of its node in Slurm"
        return str(value)

    def workers(self) -> dict[str, Object]:
        """Return the worker pods that are ready, by the name of their node in Slurm."""
        found = {self.node_of(pod): pod for pod in self.pods("worker") if is_ready(pod)}
        assert found, "no worker is ready"
        return found

    def worker(self) -> tuple[str, str]:
        """Return one worker: its node's name in Slurm and its pod's."""
        node, pod = min(self.workers().items())
        return node, name_of(pod)

    def config(self) -> dict[str, str]:
        """Return what `scontrol show config` says."""
        lines = self.as_admin("scontrol", "show", "config").splitlines()
        return {key.strip(): value.strip() for key, sign, value in (line.partition("=") for line in lines) if sign}

    # Waiting

    def until(
        self, look: Callable[[], T], what: str, *, within: float = 180, seen: Callable[[], object] | None = None
    ) -> T:
        """Look until the answer is true, and return it."""
        begun = time.monotonic()
        limit = within * self.adapter.patience
        while not (answer := look()):
            waited = time.monotonic() - begun
            if waited > limit:
                raise AssertionError(f"waited {waited:.0f} s in vain: {what}{f': {seen()}' if seen else ''}")
            time.sleep(min(0.1 + waited / 10, 1.0, limit))
        return answer

    def wait_quiet(self, within: float = 300) -> None:
        """Wait until every pod is ready and every worker's node takes jobs."""

        def quiet() -> bool:
            # While a controller is replaced commands fail; that is not what the caller judges.
            try:
                pods = [pod for role in self.adapter.roles for pod in self.pods(role, leaving=True)]
                nodes = self.nodes()
                names = [self.node_of(pod) for pod in self.pods("worker")]
            except AssertionError:
                return False
            settled = all(is_ready(pod) and "deletionTimestamp" not in pod["metadata"] for pod in pods)
            return settled and bool(names) and all(takes_jobs(nodes.get(name, {})) for name in names)

        self.until(quiet, "every pod is ready and every worker takes jobs", within=within, seen=self.overview)

    def overview(self) -> str:
        nodes = self.attempt_as(self.adapter.administrator, "sinfo", "-N", "-l")
        return f"{self.attempt('get', 'pods', '-o', 'wide').stdout}{nodes.stdout}{nodes.stderr}"


def name_of(item: Object) -> str:
    return str(item["metadata"]["name"])


def uid_of(item: Object) -> str:
    return str(item["metadata"]["uid"])


def is_ready(pod: Object) -> bool:
    conditions = pod.get("status", {}).get("conditions", [])
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def takes_jobs(node: dict[str, str]) -> bool:
    """Tell whether new jobs may start on the node."""
    flags = set(node.get("State", "DOWN").rstrip("*").split("+"))
    bad = {"DOWN", "DRAIN", "FAIL", "NOT_RESPONDING", "UNKNOWN", "FUTURE", "INVALID_REG", "POWERED_DOWN", "MAINT"}
    return not flags & bad and not node.get("State", "").endswith("*")


def fields(line: str) -> dict[str, str]:
    """Split a line of `scontrol -o`; a value with spaces keeps its first word, but for the reason."""
    found = dict(re.findall(r"(?:^|\s)([A-Za-z][\w:/]*)=(\S*)", line))
    if reason := re.search(r"\sReason=(.*?)(?= \[\S+@\S+\]|\s[A-Z]\w+=|$)", line):
        found["Reason"] = reason[1]
    return found
