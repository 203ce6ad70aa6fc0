"""A Kubernetes as kubectl shows it, and what its objects say."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.kubernetes.lab import Lab

Object = dict[str, Any]


@dataclass
class Kubernetes:
    """One that answers; `lab` is there where it is ours, and its machines can be broken."""

    kubectl: Path
    kubeconfig: Path
    lab: Lab | None = None

    @property
    def client(self) -> tuple[str, ...]:
        return self.lab.client if self.lab else (str(self.kubectl), f"--kubeconfig={self.kubeconfig}")

    def attempt(self, *words: str, stdin: str = "", timeout: float = 300) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*self.client, *words], input=stdin, capture_output=True, text=True, timeout=timeout)

    def __call__(self, *words: str, stdin: str = "", timeout: float = 300) -> str:
        done = self.attempt(*words, stdin=stdin, timeout=timeout)
        assert done.returncode == 0, f"kubectl {' '.join(words)}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def get(self, *words: str) -> Object:
        found: Object = json.loads(self("get", *words, "-o", "json"))
        return found

    def get_raw(self, path: str) -> Object:
        found: Object = json.loads(self("get", "--raw", path))
        return found

    def nodes(self) -> list[str]:
        return [item["metadata"]["name"] for item in self.get("nodes")["items"]]


def condition_of(pod: Object, kind: str) -> dict[str, str]:
    conditions = pod.get("status", {}).get("conditions", [])
    return next((item for item in conditions if item["type"] == kind), {})


def condition(pod: Object, kind: str) -> bool:
    return condition_of(pod, kind).get("status") == "True"


def going(pod: Object) -> bool:
    return "deletionTimestamp" in pod["metadata"]
