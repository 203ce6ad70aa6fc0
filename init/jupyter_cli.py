"""The `minivm jupyter` command: run the user's Jupyter in a job, and print how to reach it.

The server listens on a socket file in a new directory, which only the user may enter: it needs no port, and no other
user of the node can connect, or listen in its place. ssh forwards a port of the user's machine to that file. A record
in the home directory names the node, the socket and the token; the job writes it once the server listens.
"""

from __future__ import annotations

import getpass
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from ground.files import read_plain
from init.errors import InitError

STATE = ".local/state/minivm"
# The first that is in PATH; all take the same options.
SERVERS = ("jupyter-lab", "jupyter-notebook", "jupyter-server")
PAGE = {"jupyter-lab": "lab", "jupyter-notebook": "tree"}
PORT = 8888
NAME = "minivm-jupyter"
TIME = "--time=4:00:00"
POLL_S = 2.0
# After the job has started: an environment on a slow volume takes its time to import.
STARTS_WITHIN_S = 180.0
OVER = ("", "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "DEADLINE")
SCRIPT = """#!/bin/bash
umask 077
directory=$(mktemp -d) || exit
socket=$directory/jupyter.sock
record={record}/jupyter-$SLURM_JOB_ID.json
trap 'rm -rf "$directory" "$record"' EXIT
export JUPYTER_TOKEN=$(od -An -N24 -tx1 /dev/urandom | tr -d ' \\n')
{server} --no-browser --ServerApp.sock="$socket" --ServerApp.sock_mode=0600 &
trap 'kill $!; wait; exit 143' TERM
until [ -S "$socket" ]; do
    kill -0 $! 2> /dev/null || {{ wait $!; exit; }}
    sleep 0.2
done
printf '{{"node": "%s", "socket": "%s", "token": "%s", "page": "{page}"}}\\n' \\
    "$SLURMD_NODENAME" "$socket" "$JUPYTER_TOKEN" > "$record.new" && mv "$record.new" "$record"
wait $!
"""
# The record and a node's address come from a worker, and the user copies them into a shell.
WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,252}", re.ASCII)
SOCKET = re.compile(r"/[A-Za-z0-9_./-]{1,106}", re.ASCII)


@dataclass(frozen=True, slots=True)
class JupyterServer:
    """A server that listens, as its job recorded it."""

    job: str
    node: str
    socket: str
    token: str
    page: str


def state_directory() -> Path:
    directory = Path.home() / STATE
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise InitError("start Jupyter", error.strerror or str(error), file=str(directory)) from error
    return directory


def find_record(job: str) -> Path:
    return state_directory() / f"jupyter-{job}.json"


def read_server(job: str) -> JupyterServer | None:
    """Read the record of a job; None while there is none."""
    try:
        if (text := read_plain(find_record(job), 4096)) is None:
            return None
        data = json.loads(text)
        server = JupyterServer(job, *(str(data[key]) for key in ("node", "socket", "token", "page")))
        words = (server.node, server.token, server.page or "tree")
        if not SOCKET.fullmatch(server.socket) or not all(WORD.fullmatch(word) for word in words):
            raise ValueError("found characters that a shell or a browser would change")
        return server
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InitError("read the server's record", str(error), file=str(find_record(job)),
                        hint=f"end the job: scancel {job}") from error  # fmt: skip


def find_server() -> tuple[str, str]:
    """Return the path and the page of the user's Jupyter."""
    for name in SERVERS:
        if path := shutil.which(name):
            return str(Path(path).absolute()), PAGE.get(name, "")
    hint = "python3 -m venv ~/env && ~/env/bin/pip install jupyterlab, then: . ~/env/bin/activate"
    raise InitError("start Jupyter", f"found none of {', '.join(SERVERS)} in PATH", hint=hint)


def slurm(*command: str, text: str = "") -> str:
    """Run one of Slurm's commands as the user would, in the user's environment."""
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise InitError(f"run {command[0]}", lines[-1] if lines else f"exit code {done.returncode}")
    return done.stdout.strip()


def submit(options: Sequence[str]) -> str:
    path, page = find_server()
    directory = state_directory()
    script = SCRIPT.format(record=shlex.quote(str(directory)), server=shlex.quote(path), page=page)
    given = [] if any(option.startswith(("--time", "-t")) for option in options) else [TIME]
    log = f"--output={directory}/jupyter-%j.log"
    return slurm("sbatch", "--parsable", log, *given, *options, f"--job-name={NAME}", text=script).partition(";")[0]


def job_state(job: str) -> tuple[str, str]:
    """Return a job's state and slurmctld's reason; "" for a job that slurmctld has forgotten."""
    try:
        line = slurm("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T|%r")
    except InitError as error:
        if "Invalid job id" in error.why:
            return "", ""
        raise
    state, _, reason = line.partition("|")
    return state, reason


def find_job() -> str:
    """Return the user's job that runs a server or waits to; "" if none does. Records of other jobs are removed."""
    states = "--states=PENDING,CONFIGURING,RUNNING"
    jobs = slurm("squeue", "--me", "--noheader", f"--name={NAME}", states, "--format=%A").split()
    for path in state_directory().glob("jupyter-*.json"):
        if path.stem.removeprefix("jupyter-") not in jobs:
            path.unlink(missing_ok=True)
    return jobs[0] if jobs else ""


def wait_for(job: str) -> JupyterServer:
    """Wait until the job's server listens, and say what the job waits for; InitError if it ends before."""
    log, last_text, late = state_directory() / f"jupyter-{job}.log", "", None
    while (server := read_server(job)) is None:
        state, reason = job_state(job)
        if state in OVER:
            raise InitError("start Jupyter", f"job {job} ended before the server listened: {state or 'it is gone'}",
                            hint=f"see {log}, and: minivm job {job}")  # fmt: skip
        if state == "RUNNING":
            late = late or time.monotonic() + STARTS_WITHIN_S
            if time.monotonic() > late:
                raise InitError("reach Jupyter", f"job {job} runs, and has recorded no server in {find_record(job)}",
                                hint=f"see {log}; end it: scancel {job}")  # fmt: skip
        text = f"job {job} waits: {reason}" if state == "PENDING" else f"job {job}: {state.lower()}"
        if text != last_text:
            click.echo(text, err=True)
            last_text = text
        time.sleep(POLL_S)
    return server


def find_address(node: str) -> str:
    """Return the name by which ssh reaches a node from the login pod."""
    shown = slurm("scontrol", "--oneliner", "show", "node", node)
    address = next((word.partition("=")[2] for word in shown.split() if word.startswith("NodeAddr=")), "")
    return address if WORD.fullmatch(address) else node


def tell(server: JupyterServer) -> None:
    user, end = getpass.getuser(), slurm("squeue", "--noheader", f"--jobs={server.job}", "--format=%e")
    forward = f"-L {PORT}:{server.socket} {user}@{find_address(server.node)}"
    click.echo(f"""Jupyter runs in job {server.job} on {server.node} until {end}.

On your own machine, with LOGIN as you log in here:

    ssh -N -J {user}@LOGIN {forward}

Then open http://127.0.0.1:{PORT}/{server.page}?token={server.token}

Its log: {state_directory()}/jupyter-{server.job}.log. End it: scancel {server.job}""")


@click.command(context_settings={"ignore_unknown_options": True, "help_option_names": ["-h", "--help"]})
@click.option("--new", is_flag=True, help="Start another server beside one that runs.")
@click.argument("options", nargs=-1, type=click.UNPROCESSED, metavar="[SBATCH OPTIONS]...")
def main(new: bool, options: tuple[str, ...]) -> None:
    """Run Jupyter in a job, and print how to reach it from your own machine.

    The options are sbatch's: minivm jupyter --gpus=1 --mem=32G --time=8:00:00. Without --time the job ends after four
    hours. A server that runs already is shown again.
    """
    try:
        start(new=new, options=options)
    except InitError as error:
        click.echo(f"minivm: {error}", err=True)
        sys.exit(1)


def start(*, new: bool, options: Sequence[str]) -> None:
    if os.geteuid() == 0:
        raise InitError("start Jupyter", "found user root, expected a user with a home directory")
    job = "" if new else find_job()
    if job and options:
        click.echo(f"job {job} is there already, perhaps without these options: --new starts another", err=True)
    job = job or submit(options)
    try:
        tell(wait_for(job))
    except KeyboardInterrupt:
        click.echo(f"job {job} goes on: `minivm jupyter` shows its server, `scancel {job}` ends it", err=True)
        sys.exit(130)


if __name__ == "__main__":
    main(prog_name="minivm jupyter")
