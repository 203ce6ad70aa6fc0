"""Slurm commands that a user runs all the time while something happens to the cluster, and what became of each."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

# Each is run again and again, beside the others.
COMMANDS = ("sinfo -h", "squeue -h", "scontrol show partition", "sbatch --parsable -H -o /dev/null --wrap=true")
# They wait for slurmctld longer than the chart's clients: on a busy machine its next pod takes longer to answer.
SCRIPT = r"""
import json, os, re, shutil, subprocess, sys, tempfile, threading, time
conf = os.path.join(tempfile.mkdtemp(), "conf")
shutil.copytree("/run/slurm/conf", conf)
with open(os.path.join(conf, "slurm.conf"), "r+") as file:
    text = re.sub(r"(?im)^MessageTimeout *=.*$", "", file.read())
    file.seek(0)
    file.write(f"{text}\nMessageTimeout=100\n")
    file.truncate()
os.environ["SLURM_CONF"] = os.path.join(conf, "slurm.conf")
ended, said = threading.Event(), threading.Lock()
def call(command):
    while not ended.wait(0.5):
        begun = time.monotonic()
        done = subprocess.run(command.split(), capture_output=True, text=True)
        took = time.monotonic() - begun
        with said:
            print(json.dumps([command, done.returncode, took, done.stderr]), flush=True)
callers = [threading.Thread(target=call, args=(command,)) for command in json.loads(sys.argv[1])]
for caller in callers: caller.start()
sys.stdin.read()
ended.set()
for caller in callers: caller.join()
"""
# slurmctld closes the connections that it has not answered when it stops. No client repeats such a command.
RESET = "Connection reset by peer"


@dataclass
class Calls:
    """Counts and errors of the commands; complete once they have ended."""

    count: int = 0
    slowest: float = 0.0
    failed: list[str] = field(default_factory=list)
    reset: int = 0

    def add(self, command: str, code: int, took: float, error: str) -> None:
        self.count += 1
        self.slowest = max(self.slowest, took)
        if code and RESET in error:
            self.reset += 1
        elif code:
            self.failed.append(f"{command}: {code} after {took:.1f} s: {error.strip()}")

    def __str__(self) -> str:
        return f"{self.count} commands, {len(self.failed)} failed, {self.reset} reset, slowest {self.slowest:.1f} s"


@contextmanager
def calling(into_pod: Sequence[str], user: str, commands: Sequence[str] = COMMANDS) -> Iterator[Calls]:
    """`into_pod`: the words that run a command with standard input in a login pod, as root."""
    words = [*into_pod, "runuser", "-u", user, "--", "python3", "-c", SCRIPT, json.dumps(commands)]
    pipe = subprocess.PIPE
    callers = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    seen = Calls()
    try:
        yield seen
    finally:
        output, errors = callers.communicate("", timeout=300)
    assert callers.returncode == 0, f"the commands ended with {callers.returncode}: {errors}"
    for call in map(json.loads, output.splitlines()):
        seen.add(*call)
