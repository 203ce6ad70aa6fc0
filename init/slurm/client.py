"""Slurm's own clients, run with deadlines and judged by what they say. For short children: never in PID 1."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

from ground.commands import ran
from init.errors import InitError
from init.pod.addresses import CONTROLLER, host_and_port, joined
from init.slurm.node import Node, parse

SCONTROL = "/usr/bin/scontrol"
SQUEUE = "/usr/bin/squeue"
SCANCEL = "/usr/bin/scancel"
KEY_REJECTED = ("Protocol authentication error", "Invalid authentication credential")
NOT_REACHED = ("Unable to contact slurm controller", "Connection refused", "connect failure", "timed out")
FETCHED = "/run/slurm/conf/slurm.conf"
AT_ONCE = 8
REQUEUES = 0.75  # of the time for giving back jobs; the rest is for those that can only be cancelled
OVER = ("CG", "SO")  # a job's program has ended, and what comes after it has not
# slurmctld's words for a job that said --no-requeue, and for one of srun and salloc.
NEVER = ("Requested operation is presently disabled", "Only batch jobs are accepted or processed")


class SlurmError(InitError):
    """A client of Slurm failed, in words that tell the key, the network and the request apart."""

    said = ""  # all that it has printed
    late = False  # and it was not done


def environment(controller: str) -> dict[str, str]:
    """Until slurmd or sackd has fetched the configuration, the clients ask the controller for it."""
    env = {"PATH": "/usr/bin:/usr/sbin:/bin:/sbin", "LC_ALL": "C.UTF-8"}
    if not (os.path.exists("/etc/slurm/slurm.conf") or os.path.exists(FETCHED)):  # noqa: PTH110 (pathlib costs 8 ms)
        env["SLURM_CONF_SERVER"] = controller
    return env


def run(argv: Sequence[str], controller: str, *, within: float = 10.0) -> str:
    """The client's output; SlurmError otherwise. `within` bounds clients that retry a dead controller for minutes."""
    try:
        done = ran(argv, within=within, env=environment(controller))
    except subprocess.TimeoutExpired as error:
        late = SlurmError("ask slurmctld", f"no answer from {controller} within {round(within, 1):g} s")
        late.late = True
        # It may have had some of its answers, and been in the middle of a line.
        late.said = "".join(_text(error.stderr).rpartition("\n")[:2])
        raise late from None
    except OSError as error:
        raise SlurmError(f"run {argv[0]}", error.strerror or str(error)) from error
    if done.returncode:
        text = done.stderr or done.stdout
        clocks, releases = _causes(controller) if rejected(text) else ("", "")
        failed = SlurmError("ask slurmctld", judge(text, controller, clocks, releases))
        failed.said = text
        raise failed
    return done.stdout


def _text(said: bytes | str | None) -> str:
    return said.decode(errors="replace") if isinstance(said, bytes) else said or ""


def rejected(text: str) -> bool:
    """slurmctld has answered, and refuses who asks."""
    return "Munge encode failed" not in text and any(words in text for words in KEY_REJECTED)


def _causes(controller: str) -> tuple[str, str]:
    """That the two clocks are too far apart, and that the two releases are, where they are."""
    from init.pod import protocol  # a boot that goes well does without
    from init.slurm import clock

    ahead = clock.ahead_of(controller)
    releases = protocol.explain(protocol.own(), protocol.spoken_by(controller), controller)
    return "" if ahead is None else clock.explain(ahead), releases


def judge(text: str, controller: str, clocks: str = "", releases: str = "") -> str:
    """What a client's complaint means; `clocks`, `releases`: what is wrong with them, where that is known."""
    if "Munge encode failed" in text:
        return "this pod's munged does not answer"
    if rejected(text):
        if releases:
            return releases  # it has not looked at the credential
        refused = f"munge credential refused by {controller}: {clocks}"
        return refused if clocks else f"munge key rejected by {controller}"
    if "Name or service not known" in text or "getaddrinfo() failed" in text:
        return f"{controller} does not resolve"
    if any(words in text for words in NOT_REACHED):
        return f"{controller} cannot be reached"
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else "it failed and said nothing"


def unknown(error: SlurmError) -> bool:
    """slurmctld has no node of that name."""
    return "not found" in error.why or "Invalid node name" in error.why


def node(name: str, controller: str, *, within: float = 10.0) -> Node | None:
    """The node, or None where slurmctld knows none of that name."""
    try:
        text = run([SCONTROL, "--oneliner", "show", "node", name], controller, within=within)
    except SlurmError as error:
        if unknown(error):
            return None
        raise
    line = next((line for line in text.splitlines() if line.startswith("NodeName=")), "")
    return parse(line) if line else None


def nodes(names: Sequence[str], controller: str) -> list[Node]:
    """Those of that name that slurmctld knows, by one call."""
    if not names:
        return []
    text = run([SCONTROL, "--oneliner", "show", "node", ",".join(names)], controller)
    return [parse(line) for line in text.splitlines() if line.startswith("NodeName=")]


def update(name: str, changes: Sequence[str], controller: str, *, within: float = 10.0) -> None:
    run([SCONTROL, "update", f"nodename={name}", *changes], controller, within=within)


def jobs(name: str, controller: str, *, within: float = 10.0) -> dict[str, str]:
    """The jobs that hold the node, and in which state each is. Of an array each member by itself: the number alone of
    one of them is the whole array's, on other nodes too. Of a heterogeneous job the first part: it speaks for all."""
    states = "R,CG,S,CF,SI,SO"
    asked = [SQUEUE, "--noheader", "--nodelist", name, "--states", states, "--format", "%i %t"]
    text = run(asked, controller, within=within)
    found: dict[str, str] = {}
    for shown, state in sorted((line.split() for line in text.splitlines()), key=lambda words: (len(words[0]), words)):
        job = shown.partition("+")[0]
        if found.get(job, OVER[0]) in OVER:
            found[job] = state
    return found


def delete(name: str, controller: str) -> None:
    """The record of a dynamic node; slurmctld refuses while it has jobs or stands in a reservation."""
    try:
        run([SCONTROL, "delete", f"nodename={name}"], controller)
    except SlurmError as error:
        if not unknown(error):
            raise


def free(jobs: Mapping[str, str], controller: str, log: Callable[[str], object], *, within: float = 10.0) -> None:
    """Requeued, or cancelled where a job may not be. By a few clients at once, each with its part of them: a node of
    many small jobs has but seconds for them all, and what is asked second has what the first has left."""
    from concurrent.futures import ThreadPoolExecutor  # mostly there is no job left

    until = time.monotonic() + within
    left = [job for job in jobs if jobs[job] not in OVER]
    parts = [left[start::AT_ONCE] for start in range(min(AT_ONCE, len(left)))]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for said in pool.map(lambda part: _free(part, controller, until), parts):
            for text in said:
                log(text)


def _free(jobs: Sequence[str], controller: str, until: float) -> list[str]:
    refused: dict[str, str] = {}
    silent = ""
    try:
        # Incomplete: one that has ended since it was looked at is let alone. slurmctld would take the word for one that
        # waits for its epilog, and it would run once more.
        left = max(0.0, until - time.monotonic())
        run([SCONTROL, "requeue", "incomplete", ",".join(jobs)], controller, within=left * REQUEUES)
    except SlurmError as error:
        refused = {job: why for job in jobs if (why := _refusal(job, error.said))}
        silent = error.why if error.late or not refused else ""
    reasons = {job: judge(refused[job], controller) if job in refused else silent for job in jobs}
    said = [f"job {job} is not requeued: {reasons[job]}" if reasons[job] else f"requeued job {job}" for job in jobs]
    if never := [job for job in jobs if refused.get(job, "").startswith(NEVER)]:
        try:
            run([SCANCEL, *never], controller, within=max(0.0, until - time.monotonic()))
            said += [f"cancelled job {job}" for job in never]
        except SlurmError as error:
            said.append(f"not cancelled: {' '.join(never)}: {error.why}")
    return said


def _refusal(job: str, said: str) -> str:
    """scontrol goes on with the next one, and names each that was not taken."""
    for line in said.splitlines():
        for why, named in (line.rpartition(" for job ")[::2], line.partition(": ")[::-2]):
            if named == job:
                return why
    return ""


def address(env: Mapping[str, str]) -> str:
    """host:port of slurmctld from the pod's environment."""
    return joined(*host_and_port(env.get("MINIVM_CONTROLLER") or CONTROLLER))
