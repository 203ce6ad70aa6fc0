"""Actions of a researcher, by ssh, and of an operator, by the cluster's own interface."""

from __future__ import annotations

import io
import os
import re
import select
import shlex
import subprocess
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from cluster import ClusterError
from cluster.local import LocalCluster
from cluster.manifests import Manifests
from cluster.pods import RunningPod
from cluster.report import Row
from tests.waiting import PATIENCE, until

# Words of a client whose question met a slurmctld that a reconfigure or a restart was replacing. No client asks again.
REPLACED = (
    "Connection reset by peer", "Unable to contact slurm controller", "Socket timed out", "Zero Bytes were",
    "failed to create token",  # beside slurmctld, which makes it with auth/slurm
)  # fmt: skip
# Of sinfo's long states: the node takes no jobs, or slurmctld does not hear from it.
TAKES_NO_JOBS = re.compile(r"drain|down|fail|unknown|\*")


class Shell:
    """A shell that stays open in a container: a command in it costs a fifth of a new `docker exec`."""

    END = "minivm-test-command-ended"
    ANSWER_S = 90.0  # longer than any of the commands

    def __init__(self, container: str) -> None:
        self.container = container
        command = ["docker", "exec", "-i", container, "sh"]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0
        )
        self.lock = threading.Lock()
        weakref.finalize(self, _close, self.process)

    def run(self, command: Sequence[str]) -> tuple[int, str]:
        """Return the exit code, and stdout and stderr together; OSError when the container is gone or silent."""
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin and stdout
        end, output = f"\n{self.END} ".encode(), b""
        with self.lock:
            stdin.write(f"{shlex.join(command)} < /dev/null 2>&1; printf '\\n%s %s\\n' {self.END} $?\n".encode())
            while end not in output or not output.endswith(b"\n"):
                part = os.read(stdout.fileno(), 65536) if select.select([stdout], [], [], self.ANSWER_S)[0] else b""
                if not part:
                    raise ConnectionError(f"the shell in {self.container} does not answer")
                output += part
        text, _, code = output.rpartition(end)
        return int(code), text.decode(errors="replace")


def _close(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe:
            pipe.close()


@dataclass
class World:
    cluster: LocalCluster
    manifests: Manifests = field(init=False)
    # Tags that a test has made, for the end.
    tags: list[str] = field(default_factory=list)
    shell: Shell | None = None

    def __post_init__(self) -> None:
        self.manifests = self.cluster.manifests()

    def reload(self) -> None:
        """Read the cluster's state again after another command has changed it."""
        self.cluster = LocalCluster.load(self.cluster.kubelet.client, self.cluster.options.name, log=print)
        self.manifests = self.cluster.manifests()

    def another_image(self, role: str) -> tuple[str, str]:
        """Build the role's image with one more label, as a new build would, and return its tag and identity."""
        image = f"{self.cluster.options.repository}/{role}"
        tag = f"{self.cluster.options.name}-rolled"
        recipe = io.BytesIO(f"FROM {image}:{self.cluster.options.tag}\nLABEL minivm.rolled=yes\n".encode())
        self.cluster.kubelet.client.images.build(fileobj=recipe, tag=f"{image}:{tag}", rm=True)
        self.tags.append(f"{image}:{tag}")
        return tag, self.cluster.kubelet.image_id(f"{image}:{tag}")

    def forget_images(self) -> None:
        for tag in self.tags:
            self.cluster.kubelet.api.remove_image(tag)

    def wait_ready(self, only: str = "", *, within: float = 180) -> None:
        self.cluster.wait_ready(self.manifests, timeout=within, only=only)

    def running(self, pod: str) -> RunningPod:
        return self.cluster.kubelet.list_pods()[pod]

    def run(self, pod: str, *command: str) -> str:
        code, output = self.cluster.exec(pod, command)
        assert code == 0, f"{command} in {pod}: {output}"
        return output

    def slurm(self, *command: str) -> str:
        """Run a Slurm command beside slurmctld, and again where slurmctld was being replaced meanwhile."""

        def answer() -> str | None:
            code, output = self.beside_slurmctld(["timeout", "60", *command])
            if code and any(words in output for words in REPLACED):
                return None
            assert code == 0, f"{command}: {output}"
            return f"{output}\n"

        return str(until(answer, f"slurmctld answers {command}"))[:-1]

    def beside_slurmctld(self, command: Sequence[str]) -> tuple[int, str]:
        """Run a command in the controller's pod, by a shell that the next one uses, too, while the pod lives."""
        if self.shell is not None:
            try:
                return self.shell.run(command)
            except OSError:
                self.shell = None
        pod = self.cluster.kubelet.list_pods().get("slurm-controller-0")
        if pod is not None and pod.running:
            self.shell = Shell(pod.container)
        return self.cluster.exec("slurm-controller-0", command)

    def wait_for_reason(self, pod: str, words: str) -> None:
        def reasons() -> str:
            return self.cluster.exec(pod, ["minivm", "why"])[1]

        until(lambda: words in reasons(), f"{pod} says {words!r}", seen=reasons)

    def row(self, pod: str) -> Row:
        (found,) = [row for row in self.cluster.status() if row.pod == pod]
        return found

    def node_states(self) -> dict[str, str]:
        lines = self.slurm("sinfo", "-h", "-N", "-o", "%N %T").split("\n")
        return dict(line.split() for line in lines if line)

    def wait_idle(self) -> None:
        """Wait also for a node that Slurm 24.11 drains after a job that outlived SIGTERM, until the broker lifts that.

        A SIGKILL that meets the end of the extern step makes slurmstepd wait for UnkillableStepTimeout, 180 s.
        """

        def idle() -> bool:
            states = self.node_states()
            return len(states) == 2 and set(states.values()) == {"idle"}

        until(idle, "both nodes are idle", within=400, seen=self.node_states)

    def last_words(self) -> dict[str, str]:
        """Return the end of the log of each pod."""
        logs = {}
        for name, pod in self.cluster.kubelet.list_pods().items():
            command = ["docker", "logs", "--tail", "25", pod.container]
            logs[name] = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True).stdout
        return logs

    def jobs(self) -> set[str]:
        """Return the numbers of the jobs that wait, run or complete."""
        return set(self.slurm("squeue", "--all", "-h", "-o", "%A").split())

    def end_jobs_except(self, kept: set[str]) -> None:
        """Cancel the jobs that a test has left, which would take the next test's room, and wait for their end."""

        def left() -> set[str]:
            return self.jobs() - kept

        if jobs := left():
            self.beside_slurmctld(["scancel", *sorted(jobs)])  # one that has just ended is no error
            until(lambda: not left(), "the jobs of this test end", seen=lambda: self.slurm("squeue", "--all"))

    def unusable(self) -> dict[str, str]:
        """Map each node that takes no jobs to its state and the reason."""
        rows = (line.split(" ", 2) for line in self.slurm("sinfo", "-h", "-N", "-o", "%N %T %E").splitlines() if line)
        return {node: f"{state}: {reason}" for node, state, reason in rows if TAKES_NO_JOBS.search(state)}

    def refuse_drains(self) -> None:
        """Fail if a test has left a node that takes no jobs; resume the node, so that later tests are not affected.

        A drain that the broker lifts by itself is waited for.
        """
        with suppress(AssertionError):
            until(lambda: not self.unusable(), "each node takes jobs")
        failures = []
        for node, state in self.unusable().items():
            logs = [f"{name} of {node}:\n{self.last_lines(node, name)}" for name in ("broker", "slurmd")]
            failures.append("\n".join((f"this test left {node} {state}\nThe next test gets it resumed.", *logs)))
            self.beside_slurmctld(["scontrol", "update", f"nodename={node}", "state=resume"])
        assert not failures, "\n".join(failures)

    def last_lines(self, pod: str, service: str) -> str:
        try:
            return self.cluster.exec(pod, ["minivm", "logs", service, "--lines", "60"])[1]
        except ClusterError as error:
            return str(error)


def push(world: World, script: str) -> str:
    """Commit to the scripts' repository in the demo's pod and return the hash."""
    steps = (
        "set -e; rm -rf /tmp/work; export HOME=/tmp; git clone -q /srv/git/scripts.git /tmp/work; cd /tmp/work;"
        f" {script};"
        " git add -A; git -c user.name=ops -c user.email=ops@localhost commit -q -m change; git push -q;"
        " git rev-parse HEAD"
    )
    code, output = world.cluster.exec("slurm-demo-0", ["bash", "-c", steps], user="nobody")
    assert code == 0, output
    return output.split()[-1]


@dataclass
class Researcher:
    world: World
    user: str

    def command(self, *command: str, options: tuple[str, ...] = ()) -> list[str]:
        """Return the ssh command; the first value of an option counts, so `options` override those given here.

        An ssh that Debian 12 ships spends 0.25 s of a processor on sntrup761, more than the whole login costs the pod.
        """
        line = self.world.cluster.ssh_command(self.user, *command)
        defaults = ("BatchMode=yes", "ConnectTimeout=20", "KexAlgorithms=^curve25519-sha256")
        return [line[0], *options, *(word for value in defaults for word in ("-o", value)), *line[1:]]

    def try_(
        self, *command: str, options: tuple[str, ...] = (), stdin: str = "", timeout: float = PATIENCE
    ) -> subprocess.CompletedProcess[str]:
        line = self.command(*command, options=options)
        return subprocess.run(line, input=stdin, capture_output=True, text=True, timeout=timeout)

    def __call__(self, *command: str, options: tuple[str, ...] = (), stdin: str = "", timeout: float = PATIENCE) -> str:
        done = self.try_(*command, options=options, stdin=stdin, timeout=timeout)
        assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def submit(self, *arguments: str, script: str) -> str:
        """Submit a batch job with this script and return its number."""
        return self("sbatch", "--parsable", *arguments, stdin=f"#!/bin/bash\n{script}\n").strip()

    def state(self, job: str) -> str:
        return self.world.slurm("scontrol", "-o", "show", "job", job).partition("JobState=")[2].partition(" ")[0]

    def wait_for(self, job: str, *states: str) -> None:
        until(
            lambda: self.state(job) in states,
            f"job {job} is {' or '.join(states)}",
            seen=lambda: self.world.slurm("scontrol", "show", "job", job) + self.world.slurm("sinfo", "-N", "-l"),
        )
