"""Measure what two honest users lose while two hostile users flood a cluster for some minutes.

`python -m bench hostile-users --minutes 10`. The hostile users hold idle connections to, and send garbage to, the ports
and sockets that users reach, from the login pod and from a job, and use up processes, descriptors and disk within their
limits. The honest ones log in for each command, and submit jobs. MINIVM_BENCH_AUTH=munge measures munge.

Where the machine's processors are the bottleneck, nothing but a larger machine helps. So the same is measured while the
hostile users only compute, as every user may: what the attack costs beyond that is the attack's.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from cluster.local import LocalCluster
from cluster.names import free_port
from cluster.values import AUTHS, USERS, Options
from images.engine.docker import DockerEngine

MINUTES = "MINIVM_BENCH_MINUTES"
HOSTILE = ("mallory", "trudy")
CONTROLLER, LOGIN, TARGETED = "slurm-controller-0", "slurm-login-0", "slurm-worker-0"
FLOOD = (Path(__file__).parent / "flood.py").read_text()
SOCKETS = {"munge": "/run/munge/munge.socket.2", "slurm": "/run/slurm/sack.socket"}
IN_A_JOB = f"srun -Q -n1 --mem=200 -w {TARGETED} "
SLOW_S, PATIENCE_S, SETTLED_S = 2.0, 30.0, 120.0
COMMANDS = {"login": "true", "squeue": "squeue", "sinfo": "sinfo", "srun": "srun -Q -n1 --mem=50 true"}
QUIET, BUSY, ATTACKED = "quiet", "beside users that compute", "under attack"
# As many processes as programs of a hostile user in an attack; each ends with its parent.
COMPUTE = """
import os, sys, time
until = time.monotonic() + float(sys.argv[1])
for _ in range(7):
    if os.fork() == 0: break
parent = os.getppid()
while time.monotonic() < until and os.getppid() == parent: pass
"""
BATCH = "sbatch --parsable -n1 --mem=50 -D /tmp -o /dev/null --wrap 'sleep 2; srun true'"
# As many processes and descriptors as the user gets, at most these; and files that come and go.
HOG = """
import os, sys, tempfile, time
until, parent, forks, held = time.monotonic() + float(sys.argv[1]), os.getppid(), 0, []
print("began", flush=True)
while time.monotonic() < until and os.getppid() == parent:
    try:
        if forks < 300:
            if os.fork() == 0:
                while time.monotonic() < until and os.getppid() != 1: time.sleep(1)
                os._exit(0)
            forks += 1
    except OSError: pass
    try:
        while len(held) < 20000: held.append(os.open("/dev/null", os.O_RDONLY))
    except OSError: pass
    try:
        with tempfile.TemporaryFile() as file:
            for _ in range(64): file.write(bytes(1 << 20))
    except OSError: pass
    time.sleep(0.05)
"""


@dataclass(frozen=True)
class CommandSample:
    """One honest command: when, its time, why it failed, and which pods were ready then."""

    phase: str
    command: str
    seconds: float
    failure: str = ""
    ready: tuple[str, ...] = ()


def main() -> int:
    minutes = float(os.environ.get(MINUTES, "10"))
    auth = os.environ.get("MINIVM_BENCH_AUTH", AUTHS[0])
    repository = os.environ.get("MINIVM_BUILD_PREFIX", "minivm")
    options = Options(name="bench-hostile", workers=2, repository=repository, overrides={"slurm": {"auth": auth}})
    with tempfile.TemporaryDirectory(prefix="minivm-bench-") as root:
        cluster = LocalCluster(DockerEngine().client, options, root=Path(root))
        cluster.down()
        try:
            key = cluster.keys().users_public[USERS[0]]
            people: dict[str, Any] = {"demo": {"users": dict.fromkeys(HOSTILE, key)}}
            cluster.options = replace(options, overrides={**options.overrides, **people})
            cluster.up(port=free_port(22400))
            samples, jobs = measure(cluster, auth, minutes * 60)
        finally:
            cluster.down()
    print(f"slurm.auth {auth}, {minutes:g} minutes, load {os.getloadavg()[0]:.1f}")
    for line in report(samples, jobs):
        print(line)
    return int(any(figures(samples, jobs).values()))


def measure(cluster: LocalCluster, auth: str, seconds: float) -> tuple[list[CommandSample], dict[str, str]]:
    samples: list[CommandSample] = []
    jobs: list[str] = []
    work_honestly(cluster, samples, jobs, QUIET, seconds / 5)
    with computing(cluster, seconds / 5):
        work_honestly(cluster, samples, jobs, BUSY, seconds / 5)
    with attack(cluster, auth, seconds):
        work_honestly(cluster, samples, jobs, ATTACKED, seconds)
    return samples, ends(cluster, jobs)


def work_honestly(
    cluster: LocalCluster, samples: list[CommandSample], jobs: list[str], phase: str, seconds: float
) -> None:
    """Let each honest user give one command after the other, and submit a job in each round."""
    until = time.monotonic() + seconds

    def work(user: str) -> None:
        while time.monotonic() < until:
            for name, command in {**COMMANDS, "sbatch": BATCH}.items():
                begun = time.monotonic()
                output, failure = try_command(cluster, user, command)
                took = time.monotonic() - begun
                ready = tuple(row.pod for row in cluster.status() if row.ready) if failure else ()
                samples.append(CommandSample(phase, name, took, failure, ready))
                if name == "sbatch" and not failure:
                    jobs.append(output.strip())

    threads = [threading.Thread(target=work, args=(user,)) for user in USERS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def try_command(cluster: LocalCluster, user: str, command: str) -> tuple[str, str]:
    """Return a command's output, and why it failed."""
    line = login(cluster, user, command)
    try:
        ended = subprocess.run(
            line, check=False, capture_output=True, text=True, timeout=PATIENCE_S, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return "", f"no end within {PATIENCE_S:.0f} s"
    return ended.stdout, ended.stderr.strip() or f"exit code {ended.returncode}" if ended.returncode else ""


def login(cluster: LocalCluster, user: str, command: str) -> list[str]:
    """Form the ssh command; hostile users have an honest user's key, which is not theirs to use."""
    line = cluster.ssh_command(user if user in USERS else USERS[0], command)
    line[-2] = f"{user}@127.0.0.1"
    # Debian 12's own ssh spends 0.25 s of a processor on sntrup761, and flood and people share this machine's.
    for option in (
        "KexAlgorithms=^curve25519-sha256",
        "LogLevel=ERROR",
        f"ConnectTimeout={PATIENCE_S:.0f}",
        "BatchMode=yes",
    ):
        line[1:1] = ["-o", option]
    return line


@contextmanager
def computing(cluster: LocalCluster, seconds: float) -> Iterator[None]:
    """Let the hostile users compute on the login pod and, in a job, on a worker."""
    with running(
        cluster, [(user, f"{within}python3 - {seconds:.0f}", COMPUTE) for user in HOSTILE for within in ("", IN_A_JOB)]
    ):
        yield


@contextmanager
def attack(cluster: LocalCluster, auth: str, seconds: float) -> Iterator[None]:
    address = cluster.kubelet.list_pods()[CONTROLLER].address
    floods = [
        (f"{address}:6817", 4000, 20, ""),
        (f"{address}:6819", 1000, 5, ""),
        (f"{address}:6820", 1000, 5, ""),
        (f"{TARGETED}.slurm-worker:6818", 1000, 5, ""),
        (SOCKETS[auth], 1000, 0, ""),
        ("/var/lib/sss/pipes/nss", 8300, 0, ""),
        ("localhost:22", 640, 0, ""),
        (SOCKETS[auth], 1000, 0, IN_A_JOB),
    ]
    programs = [
        (HOSTILE[number % 2], f"{within}python3 - {target} {idle} {busy} {seconds:.0f}", FLOOD)
        for number, (target, idle, busy, within) in enumerate(floods)
    ]
    programs += [(user, f"python3 - {seconds:.0f}", HOG) for user in HOSTILE]
    with running(cluster, programs) as outputs:
        yield
        # A flood that did not come about proves nothing, and is shown.
        for program, output in outputs:
            output.seek(0)
            print(f"{program}: {output.read().decode().strip() or 'says nothing'}", flush=True)


@contextmanager
def running(cluster: LocalCluster, programs: Iterable[tuple[str, str, str]]) -> Iterator[list[tuple[str, IO[bytes]]]]:
    """Run programs as (user, command, text); yield the file of each program's output, and end them."""
    outputs: list[tuple[str, IO[bytes]]] = []
    with ExitStack() as stack:
        for user, command, text in programs:
            file = stack.enter_context(tempfile.TemporaryFile())
            file.write(text.encode())
            file.seek(0)
            output = stack.enter_context(tempfile.TemporaryFile())
            outputs.append((f"{user}: {command}", output))
            program = subprocess.Popen(login(cluster, user, command), stdin=file, stdout=output)
            stack.callback(program.wait)
            stack.callback(program.terminate)
        yield outputs


def ends(cluster: LocalCluster, jobs: Iterable[str]) -> dict[str, str]:
    """Return the state of each job when all have ended, or after a deadline."""
    awaited, until = set(jobs), time.monotonic() + SETTLED_S
    while True:
        code, output = cluster.exec(CONTROLLER, ["sacct", "-a", "-n", "-X", "-P", "-o", "jobid,state"])
        states = dict(line.split("|", 1) for line in output.splitlines() if "|" in line) if code == 0 else {}
        final_states = {job: states.get(job, "unknown") for job in awaited}
        if all(state == "COMPLETED" for state in final_states.values()) or time.monotonic() > until:
            return final_states
        time.sleep(0.5)


def figures(samples: Iterable[CommandSample], jobs: dict[str, str]) -> dict[str, int]:
    """Return the three figures that have to be 0, and the commands that failed."""
    attacked = [sample for sample in samples if sample.phase == ATTACKED]
    return {
        "honest jobs lost": sum(state != "COMPLETED" for state in jobs.values()),
        "honest commands failed": sum(bool(sample.failure) for sample in attacked),
        f"honest commands over {SLOW_S:.0f} s": sum(sample.seconds > SLOW_S for sample in attacked),
        "failed commands while the controller and the login pod said ready": sum(
            bool(sample.failure) and {CONTROLLER, LOGIN} <= set(sample.ready) for sample in attacked
        ),
    }


def report(samples: list[CommandSample], jobs: dict[str, str]) -> list[str]:
    lines = [f"{name}: {count}" for name, count in figures(samples, jobs).items()]
    lines.append(f"of {len(jobs)} jobs and {sum(sample.phase == ATTACKED for sample in samples)} commands under attack")
    for command in dict.fromkeys(sample.command for sample in samples):
        for phase in (QUIET, BUSY, ATTACKED):
            matching = [sample for sample in samples if (sample.command, sample.phase) == (command, phase)]
            if matching:
                times = [sample.seconds for sample in matching]
                failed, slow = sum(bool(sample.failure) for sample in matching), sum(time > SLOW_S for time in times)
                bad = f"{failed} failed, {slow} over {SLOW_S:.0f} s of {len(matching)}"
                lines.append(
                    f"{command}, {phase}: median {statistics.median(times):.2f} s, longest {max(times):.2f} s; {bad}"
                )
    for sample in samples:
        if sample.failure:
            lines.append(f"failed {sample.phase}: {sample.command}: {sample.failure}")
    return lines
