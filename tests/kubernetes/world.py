"""Actions on a Kubernetes: as its operator by kubectl and Helm, as a researcher by ssh."""

from __future__ import annotations

import json
import os
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from cluster.render import CHART
from cluster.values import merge
from tests.helm import KINDS, helm, rendered_for
from tests.kubernetes.kubectl import Kubernetes, Object, condition, going
from tests.kubernetes.ssh import Forwarded
from tests.waiting import until

# Images of another repository than this machine's own: MINIVM_TEST_IMAGES=registry.example.org/minivm
IMAGES = os.environ.get("MINIVM_TEST_IMAGES", "minivm")
# Machines of a test share two processors: what the chart asks for by default would not fit.
SMALL = {"resources": {"requests": {"cpu": "50m", "memory": "64Mi"}}}
# What kubectl says while a kubelet is away or does not know its pods yet: the command was not run.
NOT_REACHED = ("error dialing backend", "pod does not exist", "container not found", "unable to upgrade connection")
FAILED = {"FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT"}


@dataclass
class Release:
    """The chart, installed; every test finds it ready and leaves it so."""

    kubernetes: Kubernetes
    keys: Path
    name: str = "slurm"
    namespace: str = "hpc"
    over: Object = field(default_factory=dict)
    door: Forwarded | None = None

    # Helm

    def values(self) -> Object:
        public = {user: Path(f"{self.key(user)}.pub").read_text().strip() for user in ("alice", "bob")}
        base: Object = {
            "image": {"repository": IMAGES},
            "demo": {"enabled": True, "users": public, **SMALL},
            "podConditions": {"enabled": True},
            "controller": {"graceSeconds": 30, "persistence": {"size": "1Gi"}, **SMALL},
            "login": {"graceSeconds": 30, **SMALL},
            "home": {"size": "1Gi"},
            "workers": {
                "defaults": {"graceSeconds": 45, "drainSeconds": 30, "affinity": apart(self.name), **SMALL},
                "pools": {"worker": {"replicas": 2}},
            },
        }
        return merge(base, self.over)

    def key(self, user: str) -> Path:
        path = self.keys / user
        if not path.exists():
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", user, "-f", str(path)]
            subprocess.run(command, check=True, capture_output=True)
        return path

    def helm(self, word: str, *words: str, values: Object | None = None) -> None:
        helm(self.kubernetes.kubeconfig, word, self.name, *words, "--namespace", self.namespace, values=values)

    def install(self) -> None:
        self.helm("install", str(CHART), "--create-namespace", values=self.values())

    def upgrade(self, **over: Any) -> None:
        self.over = merge(self.over, over)
        self.helm("upgrade", str(CHART), values=self.values())

    def uninstall(self) -> None:
        self.helm("uninstall", "--ignore-not-found")

    # Whoever has the cluster in git has no Helm: what it renders is applied

    def rendered(self, values: Object | None = None) -> list[Object]:
        version = self.kubernetes.get_raw("/version")["gitVersion"]
        chosen = self.values() if values is None else values
        texts = rendered_for(version, chosen, release=self.name, namespace=self.namespace)
        whole = "\n---\n".join(text for name, text in sorted(texts.items()) if name.endswith(".yaml"))
        return [item for item in yaml.safe_load_all(whole) if item]

    def at_home(self, *words: str, stdin: str) -> str:
        """Run kubectl with `-n`, as docs/how-to/gitops.md says: it refuses objects of other namespaces."""
        return self.kubernetes("-n", self.namespace, *words, stdin=stdin)

    def apply(self) -> None:
        self.at_home("apply", "--server-side", "-f", "-", stdin=yaml.safe_dump_all(self.rendered()))

    def differences(self) -> list[str]:
        """List the objects that another `apply` would change."""
        text = yaml.safe_dump_all(self.rendered())
        there = json.loads(self.at_home("get", "-f", "-", "-o", "json", stdin=text))["items"]
        dry = ("apply", "--server-side", "--dry-run=server", "-f", "-", "-o", "json")
        would = json.loads(self.at_home(*dry, stdin=text))["items"]
        return [
            f"{one['kind']} {one['metadata']['name']}"
            for one, other in zip(there, would, strict=True)
            if lasting(one) != lasting(other)
        ]

    def delete(self) -> None:
        self.at_home("delete", "-f", "-", "--wait=false", stdin=yaml.safe_dump_all(self.rendered()))

    def secrets(self) -> dict[str, list[str]]:
        """The keys that outlive the release, by what they are for."""
        found = self.get("secrets", "-l", f"app.kubernetes.io/instance={self.name}")["items"]
        kept = (item for item in found if "helm.sh/resource-policy" in item["metadata"].get("annotations", {}))
        return {item["metadata"]["name"].removeprefix(f"{self.name}-"): sorted(item["data"].values()) for item in kept}

    # Pods

    def kubectl(self, *words: str, stdin: str = "") -> str:
        return self.kubernetes("-n", self.namespace, *words, stdin=stdin)

    def get(self, *words: str) -> Object:
        return self.kubernetes.get("-n", self.namespace, *words)

    def run(self, pod: str, *command: str, stdin: str = "") -> str:
        words = ("-n", self.namespace, "exec", "-i", f"{self.name}-{pod}", "--", *command)

        def reached() -> subprocess.CompletedProcess[str] | None:
            done = self.kubernetes.attempt(*words, stdin=stdin)
            return None if done.returncode and any(text in done.stderr for text in NOT_REACHED) else done

        done = until(reached, f"a way into {pod}")
        assert done and done.returncode == 0, f"{command} in {pod}: {done}"
        return done.stdout

    def begin(self, pod: str, *command: str) -> subprocess.Popen[str]:
        """As `run`, for what takes its time."""
        words = [*self.kubernetes.client, "-n", self.namespace, "exec", f"{self.name}-{pod}", "--", *command]
        return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def pods(self) -> dict[str, Object]:
        """Those that stay under their names: the one that makes the keys ends, and a fleet's is another each time."""
        items = self.get("pods", "-l", f"app.kubernetes.io/instance={self.name}")["items"]
        found = {item["metadata"]["name"].removeprefix(f"{self.name}-"): item for item in items}
        return {name: pod for name, pod in found.items() if not name.startswith(("keys-", "fleet-"))}

    def ready(self) -> dict[str, bool]:
        return {name: condition(pod, "Ready") and not going(pod) for name, pod in self.pods().items()}

    def wanted(self) -> set[str]:
        sets = self.get("statefulsets", "-l", f"app.kubernetes.io/instance={self.name}")["items"]
        names = [(item["metadata"]["name"].removeprefix(f"{self.name}-"), item["spec"]["replicas"]) for item in sets]
        return {f"{name}-{number}" for name, count in names for number in range(count)}

    def all_ready(self) -> bool:
        found = self.ready()
        return bool(found) and set(found) == self.wanted() and all(found.values())

    def wait_ready(self, *, within: float = 240) -> float:
        """Seconds that it took."""
        begun = time.monotonic()
        until(self.all_ready, "every pod is ready", within=within, seen=self.why)
        return time.monotonic() - begun

    def why(self) -> str:
        """Return what an operator would look at."""
        lines = [self.kubectl("get", "pods", "-o", "wide")]
        lines.append(self.kubectl("get", "events", "--sort-by=.lastTimestamp")[-3000:])
        for name, ready in self.ready().items():
            if not ready:
                said = self.kubernetes.attempt("-n", self.namespace, "logs", f"{self.name}-{name}", "--tail=15")
                lines.append(f"{name}:\n{said.stdout}{said.stderr}")
        return "\n".join(lines)

    def lives(self) -> dict[str, tuple[str, int]]:
        """Pod -> who it is, and how often its container was started again."""
        return {name: (pod["metadata"]["uid"], first(pod)["restartCount"]) for name, pod in self.pods().items()}

    def containers(self) -> dict[str, tuple[str, int]]:
        """Pod -> its container's name for the runtime, and how often it was started again."""
        return {name: (first(pod)["containerID"], first(pod)["restartCount"]) for name, pod in self.pods().items()}

    def node_of(self, pod: str) -> str:
        return str(self.pods()[pod]["spec"]["nodeName"])

    def away(self) -> str:
        """A worker on another machine than the controller, which forgets what it did in the seconds before it dies."""
        at = self.node_of("controller-0")
        return next(name for name in ("worker-0", "worker-1") if self.node_of(name) != at)

    def is_new(self, pod: str, old: str) -> bool:
        """Whether a pod of this name is there that is not the one with this identity."""
        found = self.pods().get(pod)
        return found is not None and found["metadata"]["uid"] != old

    def leaving(self) -> set[str]:
        """Pods that Kubernetes wants to see gone."""
        return {name for name, pod in self.pods().items() if going(pod)}

    # Slurm

    def slurm(self, *command: str) -> str:
        """Run a command as Slurm's administrator."""
        return self.run("controller-0", *command).strip()

    def slurm_as_user(self, *command: str) -> str:
        """As a user that every pod has: Slurm runs no job of root's."""
        return self.slurm("setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups", *command)

    def states(self) -> dict[str, str]:
        lines = self.slurm("sinfo", "-h", "-N", "-o", "%N %T").splitlines()
        return dict(line.split() for line in lines if line)

    def state(self, job: str) -> str:
        return self.slurm("scontrol", "-o", "show", "job", job).partition("JobState=")[2].split()[0]

    def restarts(self, job: str) -> int:
        return int(self.slurm("scontrol", "-o", "show", "job", job).partition("Restarts=")[2].split()[0])

    def wait_requeued(self, job: str) -> None:
        """Once, and to run again in two minutes, when what it left on its node is cleaned up. Nobody waits for that."""
        until(
            lambda: self.restarts(job) == 1 and self.state(job) == "PENDING",
            f"job {job} is requeued",
            within=180,
            seen=lambda: self.about(job),
        )
        self.slurm("scancel", job)

    def wait_for(self, job: str, *wanted: str, within: float = 120) -> None:
        def looked() -> bool:
            state = self.state(job)
            assert state not in FAILED - set(wanted), self.about(job)
            return state in wanted

        until(looked, f"job {job} is {' or '.join(wanted)}", within=within, seen=lambda: self.about(job))

    def wait_saved(self, job: str) -> None:
        """On slurmctld's volume: it writes each few seconds, and one that is killed forgets what it has not written."""
        look = ("stat", "-c", "%.9Y", "/var/spool/slurmctld/job_state")
        before = self.slurm(*look)
        self.slurm("scontrol", "update", f"jobid={job}", "comment=saved")
        until(lambda: self.slurm(*look) != before, f"job {job} is saved")

    def about(self, job: str) -> str:
        return self.slurm("scontrol", "show", "job", job) + "\n" + self.slurm("sinfo", "-N", "-l")

    def wait_idle(self) -> None:
        until(lambda: set(self.states().values()) == {"idle"}, "every node is idle", seen=self.states)

    def as_user(self, user: str, command: str, *, stdin: str = "") -> str:
        """Run a command by ssh, through the login Service."""
        if self.door is None or not self.door.open():
            self.shut()
            self.door = until(lambda: Forwarded.to(self), "a way to a login pod")
        assert self.door
        done = self.door.try_(user, command, key=self.key(user), stdin=stdin)
        assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout.strip()

    def shut(self) -> None:
        """The way to a login pod that goes; the next one opens another."""
        if self.door:
            self.door.close()
        self.door = None

    def submit(self, user: str, *options: str, script: str) -> str:
        command = " ".join(["sbatch", "--parsable", *options])
        return self.as_user(user, command, stdin=f"#!/bin/bash\n{script}\n")


def create_kinds(kubernetes: Kubernetes) -> None:
    """Create the fleet's kinds where they are missing, as before an upgrade that switches it on.

    Without validation: Kubernetes 1.20 does not know the rules in them.
    """
    for file in sorted(KINDS.glob("*.json")):
        if kubernetes.attempt("get", "crd", json.loads(file.read_text())["metadata"]["name"]).returncode:
            kubernetes("create", "--validate=false", "-f", str(file))


def apart(release: str) -> Object:
    """Workers on different machines where there are enough."""
    labels = {"app.kubernetes.io/instance": release, "app.kubernetes.io/component": "worker"}
    term = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": labels}}
    preferred = [{"weight": 100, "podAffinityTerm": term}]
    return {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}


def first(pod: Object) -> Object:
    """What is said of its container, of which there is one; before it is there it has no name."""
    return next(iter(pod["status"].get("containerStatuses", [])), {"containerID": "", "restartCount": 0})


def lasting(item: Object) -> Object:
    """What of an object changes by somebody's will alone; `kubectl diff` of 1.20 shows the time of each apply too."""
    meta = {key: value for key, value in item["metadata"].items() if key not in ("managedFields", "resourceVersion")}
    return {key: value for key, value in item.items() if key != "status"} | {"metadata": meta}
