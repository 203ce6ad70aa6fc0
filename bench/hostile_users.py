"""Measure what two honest users lose while two hostile users flood a cluster for some minutes.

`python -m bench hostile-users --minutes 10`. The hostile users hold idle connections to, and send garbage to, the ports
and sockets that users reach, from the login pod and from a job, and use up processes, descriptors and disk within their
limits. The honest ones log in for each command, and submit jobs. MINIVM_BENCH_AUTH=munge measures munge.
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
from typing import Any

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
    """One honest command: its time, whether it succeeded, and which pods were ready when it failed."""

    flooded: bool
    command: str
    seconds: float
    failed: bool = False
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
    honest(cluster, samples, jobs, seconds / 5, flooded=False)
    with attack(cluster, auth, seconds):
        honest(cluster, samples, jobs, seconds, flooded=True)
    return samples, ends(cluster, jobs)


def honest(
    cluster: LocalCluster, samples: list[CommandSample], jobs: list[str], seconds: float, *, flooded: bool
) -> None:
    """Let each honest user give one command after the other, and submit a job in each round."""
    until = time.monotonic() + seconds

    def work(user: str) -> None:
        while time.monotonic() < until:
            for name, command in {**COMMANDS, "sbatch": BATCH}.items():
                begun = time.monotonic()
                said = tried(cluster, user, command)
                took = time.monotonic() - begun
                ready = () if said is not None else tuple(row.pod for row in cluster.status() if row.ready)
                samples.append(CommandSample(flooded, name, took, said is None, ready))
                if name == "sbatch" and said is not None:
                    jobs.append(said.strip())

    threads = [threading.Thread(target=work, args=(user,)) for user in USERS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def tried(cluster: LocalCluster, user: str, command: str) -> str | None:
    """Return a command's output; None if it fails or does not end."""
    line = login(cluster, user, command)
    try:
        return subprocess.run(
            line, check=True, capture_output=True, text=True, timeout=PATIENCE_S, stdin=subprocess.DEVNULL
        ).stdout
    except subprocess.SubprocessError:
        return None


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
def attack(cluster: LocalCluster, auth: str, seconds: float) -> Iterator[None]:
    address = cluster.kubelet.running()[CONTROLLER].address
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
    said = []
    with ExitStack() as stack:
        for user, command, text in programs:
            file = stack.enter_context(tempfile.TemporaryFile())
            file.write(text.encode())
            file.seek(0)
            output = stack.enter_context(tempfile.TemporaryFile())
            said.append((f"{user}: {command}", output))
            program = subprocess.Popen(login(cluster, user, command), stdin=file, stdout=output)
            stack.callback(program.wait)
            stack.callback(program.terminate)
        yield
        # A flood that did not come about proves nothing, and is shown.
        for what, output in said:
            output.seek(0)
            print(f"{what}: {output.read().decode().strip() or 'says nothing'}", flush=True)


def ends(cluster: LocalCluster, jobs: Iterable[str]) -> dict[str, str]:
    """Return the state of each job when all have ended, or after a deadline."""
    wanted, until = set(jobs), time.monotonic() + SETTLED_S
    while True:
        code, said = cluster.exec(CONTROLLER, ["sacct", "-a", "-n", "-X", "-P", "-o", "jobid,state"])
        states = dict(line.split("|", 1) for line in said.splitlines() if "|" in line) if code == 0 else {}
        found = {job: states.get(job, "unknown") for job in wanted}
        if all(state == "COMPLETED" for state in found.values()) or time.monotonic() > until:
            return found
        time.sleep(0.5)


def figures(samples: Iterable[CommandSample], jobs: dict[str, str]) -> dict[str, int]:
    """Return the three figures that have to be 0, and the commands that failed."""
    flooded = [one for one in samples if one.flooded]
    return {
        "honest jobs lost": sum(state != "COMPLETED" for state in jobs.values()),
        "honest commands failed": sum(one.failed for one in flooded),
        f"honest commands over {SLOW_S:.0f} s": sum(one.seconds > SLOW_S for one in flooded),
        "failed commands while the controller and the login pod said ready": sum(
            one.failed and {CONTROLLER, LOGIN} <= set(one.ready) for one in flooded
        ),
    }


def report(samples: list[CommandSample], jobs: dict[str, str]) -> list[str]:
    lines = []
    for what, count in figures(samples, jobs).items():
        lines.append(f"{what}: {count}")
    lines.append(f"of {len(jobs)} jobs and {sum(one.flooded for one in samples)} commands under attack")
    for command in dict.fromkeys(one.command for one in samples):
        quiet = [one.seconds for one in samples if one.command == command and not one.flooded]
        under = [one for one in samples if one.command == command and one.flooded]
        if quiet and under:
            times = [one.seconds for one in under]
            failed, slow = sum(one.failed for one in under), sum(time > SLOW_S for time in times)
            median = f"quiet {statistics.median(quiet):.2f} s, flooded {statistics.median(times):.2f} s"
            bad = f"{failed} failed, {slow} over {SLOW_S:.0f} s of {len(under)}"
            lines.append(f"{command}: {median}, longest {max(times):.2f} s; {bad}")
    return lines
