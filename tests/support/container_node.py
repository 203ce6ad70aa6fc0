"""A node that runs containers in jobs."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.container.conftest import docker

ROOT = Path(__file__).resolve().parents[2]
PROFILE = ROOT / "cluster/chart/files/seccomp-containers.json"
PROGRAM = "/usr/libexec/minivm/container"
JOBS = "/var/tmp/minivm/jobs"
UID = "20001:20001"
# Of the machine, for the job's directories: an image that is larger must not take what others need.
ROOM = "400m"


@dataclass(frozen=True, slots=True)
class Node:
    container: str
    home: Path

    def root(self, *command: str) -> str:
        return docker("exec", self.container, *command)

    def user(self, *command: str) -> str:
        """Run a command as the job's user. No other reaches the image's place, not root without a capability."""
        return docker("exec", "--user", UID, self.container, *command)

    def without_tls(self, registry: str) -> None:
        """Write what a site sets in containers.registries."""
        text = f'[[registry]]\nlocation = "{registry}"\ninsecure = true\n'
        place = f"/etc/containers/registries.conf.d/{registry.rpartition(':')[2]}.conf"
        self.root("sh", "-c", f"printf '{text}' > {place}")

    def task(self, image: str, *program: str, job: str = "7", step: str = "0", **env: str) -> tuple[int, str, str]:
        """Act as slurmstepd: write the task's environment, and start RunTimeRun as the job's user."""
        given = {"SLURM_CONTAINER": image, "SLURM_JOB_ID": job, "HOME": "/home/u", "PATH": "/usr/bin:/bin", **env}
        (self.home / "environment").write_bytes(b"".join(f"{key}={value}\0".encode() for key, value in given.items()))
        line = ["docker", "exec", "--user", UID, "--workdir", "/home/u", self.container, "env", "-i", PROGRAM, "run"]
        line += [job, step, "/spool/task-0/", "/home/u/environment", "--", *program]
        done = subprocess.run(line, capture_output=True, text=True, timeout=240)
        return done.returncode, done.stdout, done.stderr

    def say(self, image: str, *program: str, **env: str) -> str:
        code, out, err = self.task(image, *program, **env)
        assert code == 0, (code, out, err)
        return out


def started(image: str, home: Path, *options: str) -> Node:
    home.chmod(0o777)
    (home / "spool/task-0").mkdir(parents=True)
    command = ["run", "--detach", "--network", "host", "--cap-drop", "ALL", "--cap-add", "CHOWN", *options]
    command += ["--tmpfs", f"{JOBS}:size={ROOM},mode=755,exec", "--volume", f"{home}:/home/u"]
    command += ["--volume", f"{home}/spool:/spool"]
    container = docker(*command, "--entrypoint", "/bin/sleep", image, "infinity")
    for job in ("7", "8"):
        docker("exec", container, "install", "-d", "-m", "0700", "-o", "20001", "-g", "20001", f"{JOBS}/{job}")
    return Node(container, home)
