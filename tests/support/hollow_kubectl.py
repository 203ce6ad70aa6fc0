"""A kubectl of a cluster that keeps no promise: `empty` has nothing, `wrong` has pods and nodes with every fault.

A plugin of pytest: `python -m tests.conformance -p tests.support.hollow_kubectl`, with HOLLOW_WORLD in the environment.
A check that passes in both worlds cannot fail.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from typing import Any

from tests.conformance.cluster import Cluster

NODES = ("w-0", "w-1")
ROLES = {"role=controller": ("c-0",), "role=login": ("l-0",), "role=worker": NODES}
CONDITIONS = [{"type": "Ready", "status": "True"}]


NODE = "NodeAddr=10.9.9.9 State=IDLE CPUTot=4 CPUAlloc=0 RealMemory=999999 Version=99.1.1"
# How a command in a pod begins -> output, errors, exit code.
ANSWERS = (
    ("scontrol -o show node", ("".join(f"NodeName={name} {NODE}\n" for name in (*NODES, "ghost")), "", 0)),
    (
        "scontrol show config",
        ("StateSaveLocation = /state\nClusterName = hollow\nResvOverRun = 0 min\nSLURM_VERSION = 1.2.3\n", "", 0),
    ),
    ("scontrol ping", ("Slurmctld(primary) at c-0 is DOWN\n", "", 0)),
    ("scontrol --version", ("slurm 9.9.9\n", "", 0)),
    ("srun --version", ("slurm 99.1.1\n", "", 0)),
    ("srun --job-name=conformance --chdir=/tmp -w w-0 -n1", ("4\n", "", 0)),
    ("srun --job-name=conformance --chdir=/tmp df", ("1B-blocks\n67108864\n", "", 0)),
    ("id -u", ("1000\n", "", 0)),
    ("ssh -F", ("", "Permission denied (publickey,password).", 255)),
    ("grep CapBnd", ("CapBnd:\tffffffffffffffff\n", "", 0)),
    ("hostname", ("another\n", "", 0)),
    ("bash", ("HTTP/1.0 200 OK\r\n\r\nnot a sample\n", "", 0)),
    ("sh -c for d in", ("41\n", "", 0)),
)


def pod(name: str) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "uid": f"uid-{name}", "labels": {"pod": name}},
        "spec": {
            "nodeName": f"m-{name}",
            "hostPID": True,
            "volumes": [{"name": "state", "emptyDir": {}}],
            "containers": [
                {
                    "name": "slurm",
                    "securityContext": {"privileged": True},
                    "resources": {"limits": {"memory": "1Gi"}},
                    "volumeMounts": [{"name": "state", "mountPath": "/state"}],
                }
            ],
        },
        "status": {
            "podIP": "10.0.0.1",
            "conditions": CONDITIONS,
            "containerStatuses": [
                {"name": "slurm", "restartCount": 0, "state": {"waiting": {"reason": "CrashLoopBackOff"}}}
            ],
        },
    }


def get(words: tuple[str, ...]) -> Any:
    if words[1] == "pods":
        return {"items": [pod(name) for name in ROLES[words[words.index("-l") + 1]]]}
    if words[1] == "pod":
        return pod(words[2])
    if words[1] == "endpoints":
        return {"subsets": [{"addresses": [{"ip": "10.9.9.9"}]}]}
    if words[1] == "networkpolicies":
        return {"items": []}
    return {"metadata": {"name": words[2]}, "spec": {"replicas": 2}, "data": {"slurm.conf": ""}}


class Hollow:
    """Answers what the real kubectl would be asked."""

    def __init__(self, world: str) -> None:
        self.world = world
        self.job = "FAILED"

    def attempt(
        self, cluster: Cluster, *words: str, stdin: str = "", timeout: float = 0
    ) -> subprocess.CompletedProcess[str]:
        del cluster, timeout
        out, err, code = self.empty(words) if self.world == "empty" else self.wrong(words, stdin)
        return subprocess.CompletedProcess(words, code, out, err)

    def empty(self, words: tuple[str, ...]) -> tuple[str, str, int]:
        return json.dumps({"items": []}) if words[0] == "get" else "", "", 0

    def wrong(self, words: tuple[str, ...], stdin: str) -> tuple[str, str, int]:
        if words[0] == "get":
            return json.dumps(get(words)) if "json" in words else "all is wrong", "", 0
        if words[0] == "exec":
            return self.slurm(words[words.index("--") + 1 :], words[2], stdin)
        return "yes" if words[:2] == ("auth", "can-i") else "", "", 0

    def slurm(self, words: tuple[str, ...], pod_name: str, stdin: str) -> tuple[str, str, int]:
        """Answer a command in a pod."""
        text = re.sub(r"conformance-[0-9a-f]{8}", "conformance", " ".join(words))
        if words[0] == "sbatch":
            # A job whose script sleeps runs on, one that was held is held, every other one fails.
            self.job = "PENDING" if "--hold" in words else "RUNNING" if "sleep" in stdin else "FAILED"
            return "7\n", "", 0
        if text.startswith("scontrol -o show job"):
            about = "Reason=None Restarts=0 ExitCode=9:0 StartTime=1 EndTime=2"
            return f"JobId=7 JobState={self.job} {about}\n", "", 0
        if words[0] == "id" and "-u" not in words:
            return f"uid={pod_name}\n", "", 0
        return next((answer for begin, answer in ANSWERS if text.startswith(begin)), ("wrong\n", "", 0))


def pytest_configure() -> None:
    hollow = Hollow(os.environ["HOLLOW_WORLD"])
    Cluster.attempt = lambda cluster, *words, **more: hollow.attempt(cluster, *words, **more)  # type: ignore[method-assign]
