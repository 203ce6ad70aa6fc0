"""Slurm's own clients, run with deadlines; their output is classified. For short children, never in PID 1."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ground.commands import OutputTooLongError, ran, ran_bounded
from init.errors import InitError
from init.pod import auth
from init.pod.addresses import CONTROLLER, host_and_port, join_address
from init.pod.release import FILE, Release, parse_release
from init.slurm.node import Node, parse

SCONTROL = "/usr/bin/scontrol"
SQUEUE = "/usr/bin/squeue"
SCANCEL = "/usr/bin/scancel"
SDIAG = "/usr/bin/sdiag"
SINFO = "/usr/bin/sinfo"
SBATCH = "/usr/bin/sbatch"
SACCTMGR = "/usr/bin/sacctmgr"
SLURMCTLD = "/usr/sbin/slurmctld"
BACKFILLED = re.compile(r"^Data since .*\((\d+)\)|^\s*Total backfilled .*: (\d+)$", re.MULTILINE)
KEY_REJECTED = ("Protocol authentication error", "Invalid authentication credential")
NOT_REACHED = ("Unable to contact slurm controller", "Connection refused", "connect failure", "timed out")
FETCHED = "/run/slurm/conf/slurm.conf"
AT_ONCE = 8
REQUEUES = 0.75  # share of the time for requeues; the rest is for jobs that can only be cancelled
# A line of squeue with an AdminComment that is empty or minivm's own.
FREE_COMMENT = re.compile(r"[^|]*\|\s*(\(null\)|minivm: .*)?\s*\|?\s*")
OVER = ("CG", "SO")  # the job's program has ended, its cleanup has not
# slurmctld's refusals for a job with --no-requeue, and for one of srun or salloc.
NEVER = ("Requested operation is presently disabled", "Only batch jobs are accepted or processed")


class SlurmError(InitError):
    """A failed client of Slurm; the message distinguishes the key, the network and the request."""

    output = ""  # everything that it printed
    late = False  # it timed out
    is_too_long = False  # it printed more than its caller may hold


def is_slurmctld_installed() -> bool:
    """Tell if this image can run or save a controller's state; other roles' images have no slurmctld."""
    return os.path.exists(SLURMCTLD)  # noqa: PTH110 - pathlib costs 8 ms of boot


def environment(controller: str) -> dict[str, str]:
    """Return a client's environment; the controller provides the configuration until slurmd or sackd has fetched it."""
    env = {"PATH": "/usr/bin:/usr/sbin:/bin:/sbin", "LC_ALL": "C.UTF-8"}
    if not (os.path.exists("/etc/slurm/slurm.conf") or os.path.exists(FETCHED)):  # noqa: PTH110 (pathlib costs 8 ms)
        env["SLURM_CONF_SERVER"] = controller
    return env


def run(argv: Sequence[str], controller: str, *, within: float = 10.0, most: int = 0, **rights: Any) -> str:
    """Return the client's output, or raise SlurmError.

    `within` bounds clients that retry a dead controller for minutes. `most`: bytes of output; 0: any number.
    """
    try:
        if most:
            done = ran_bounded(argv, most, within=within, env=environment(controller), **rights)
        else:
            done = ran(argv, within=within, env=environment(controller), **rights)
    except OutputTooLongError:
        long = SlurmError("ask slurmctld", f"its answer is longer than {most >> 20} MiB")
        long.is_too_long = True
        raise long from None
    except subprocess.TimeoutExpired as error:
        late = SlurmError("ask slurmctld", f"no answer from {controller} within {round(within, 1):g} s")
        late.late = True
        # It may have been cut in the middle of a line.
        late.output = "".join(_text(error.stderr).rpartition("\n")[:2])
        raise late from None
    except OSError as error:
        raise SlurmError(f"run {argv[0]}", error.strerror or str(error)) from error
    if done.returncode:
        text = done.stderr or done.stdout
        clocks, releases = _causes(controller) if is_rejected(text) else ("", "")
        failed = SlurmError("ask slurmctld", judge(text, controller, clocks, releases))
        failed.output = text
        raise failed
    return done.stdout


def read_backfilled(text: str) -> str:
    """Return sdiag's counts of backfilled jobs and the time since which it counts; "" if there are none yet."""
    since, *counts = [begin or count for begin, count in BACKFILLED.findall(text)] or [""]
    return " ".join([since, *counts]) if any(map(int, counts)) else ""


def save_jobs(controller: str) -> None:
    """Let slurmctld save its jobs within 5 s.

    It saves them after each request to requeue, also for a number that no job has. Jobs that the main scheduler starts
    are saved by themselves. Those of sched/backfill are saved with the next change of another job, or after 5 minutes.
    """
    try:
        run([SCONTROL, "requeue", "0"], controller)
    except SlurmError as error:
        if "Invalid job id" not in error.output:
            raise


def _text(output: bytes | str | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def is_rejected(text: str) -> bool:
    """Tell if slurmctld answered and refused the credential."""
    return "Munge encode failed" not in text and any(words in text for words in KEY_REJECTED)


def _causes(controller: str) -> tuple[str, str]:
    """Return the explanations, if any: clocks too far apart, and releases that do not understand each other."""
    ahead = measure_clock_lead(controller)
    releases = explain_release(read_own_release(), find_protocol(controller), controller)
    return "" if ahead is None else explain_clock(ahead), releases


def judge(text: str, controller: str, clocks: str = "", releases: str = "") -> str:
    """Explain a client's error message; `clocks` and `releases` are known causes."""
    if "Munge encode failed" in text:
        return "this pod's munged does not answer"
    if "sack sockets" in text or "auth_g_create" in text:
        return "no daemon of Slurm in this pod signs requests"
    if is_rejected(text):
        if releases:
            return releases  # the controller has not read the credential
        refused = f"{auth.mode()} credential refused by {controller}: {clocks}"
        return refused if clocks else f"{auth.mode()} key rejected by {controller}"
    if "Name or service not known" in text or "getaddrinfo() failed" in text:
        return f"{controller} does not resolve"
    if any(words in text for words in NOT_REACHED):
        return f"{controller} cannot be reached"
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else "it failed and said nothing"


def unknown(error: SlurmError) -> bool:
    """Tell if slurmctld knows no node of that name."""
    return bool(re.search(r"Node \S+ not found|Invalid node name", error.why))


def node(name: str, controller: str, *, within: float = 10.0) -> Node | None:
    """Return the node; None if slurmctld does not know it."""
    try:
        text = run([SCONTROL, "--oneliner", "show", "node", name], controller, within=within)
    except SlurmError as error:
        if unknown(error):
            return None
        raise
    line = next((line for line in text.splitlines() if line.startswith("NodeName=")), "")
    return parse(line) if line else None


def nodes(names: Sequence[str], controller: str) -> list[Node]:
    """Return the known nodes among the names, with one call."""
    if not names:
        return []
    text = run([SCONTROL, "--oneliner", "show", "node", ",".join(names)], controller)
    return [parse(line) for line in text.splitlines() if line.startswith("NodeName=")]


def update(name: str, changes: Sequence[str], controller: str, *, within: float = 10.0) -> None:
    run([SCONTROL, "update", f"nodename={name}", *changes], controller, within=within)


def jobs(name: str, controller: str, *, within: float = 10.0) -> dict[str, str]:
    """Return the jobs on the node with their states.

    Array tasks are listed one by one: a task's bare number means the whole array, on other nodes too. Of a
    heterogeneous job the first component is listed, which represents the whole job.
    """
    states = "R,CG,S,CF,SI,SO"
    command = [SQUEUE, "--noheader", "--nodelist", name, "--states", states, "--format", "%i %t"]
    text = run(command, controller, within=within)
    states_by_job: dict[str, str] = {}
    for shown, state in sorted((line.split() for line in text.splitlines()), key=lambda words: (len(words[0]), words)):
        job = shown.partition("+")[0]
        if states_by_job.get(job, OVER[0]) in OVER:
            states_by_job[job] = state
    return states_by_job


def delete(name: str, controller: str) -> None:
    """Delete a dynamic node's record; slurmctld refuses while it has jobs or is in a reservation."""
    try:
        run([SCONTROL, "delete", f"nodename={name}"], controller)
    except SlurmError as error:
        if not unknown(error):
            raise


def comment(jobs: Sequence[str], text: str, controller: str, *, within: float = 10.0) -> None:
    """Write the reason of an action into the jobs' AdminComment, except where the site has written something.

    It stays in accounting with the run that ends; users can neither set nor change it.
    """
    if not jobs:
        return
    until = time.monotonic() + within
    command = [SQUEUE, "--noheader", "--jobs", ",".join(jobs), "--Format", "jobarrayid:|,admin_comment:|"]
    lines = run(command, controller, within=within).splitlines()
    commented = {line.partition("|")[0].partition("+")[0] for line in lines if not FREE_COMMENT.fullmatch(line)}
    if free := [job for job in jobs if job not in commented]:
        remaining = max(0.0, until - time.monotonic())
        run([SCONTROL, "update", f"jobid={','.join(free)}", f"admincomment={text}"], controller, within=remaining)


def notify(job: str, text: str, controller: str, *, within: float = 10.0) -> None:
    """Have the job's own srun, salloc or slurmstepd write a line into its output, if one of them lives."""
    with contextlib.suppress(SlurmError):
        run([SCONTROL, "notify", job, text], controller, within=within)


def explain(jobs: Sequence[str], text: str, controller: str, *, within: float) -> None:
    """Write the reason into the jobs' comments and outputs, as many as the time allows: jobs are freed after this."""
    from concurrent.futures import ThreadPoolExecutor  # imported late: usually no job is left

    until = time.monotonic() + within
    try:
        comment(jobs, text, controller, within=within)
    except SlurmError:
        return  # slurmctld needs the time for the jobs themselves
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for job in jobs:
            pool.submit(_notify_until, job, text, controller, until)


def _notify_until(job: str, text: str, controller: str, until: float) -> None:
    if (remaining := until - time.monotonic()) > 0:
        notify(job, text, controller, within=remaining)


def free(jobs: Mapping[str, str], controller: str, log: Callable[[str], object], *, within: float = 10.0) -> None:
    """Requeue the jobs, or cancel those that cannot be requeued.

    A few clients work in parallel, each on a share: a node with many small jobs has only seconds for all of them, and a
    later request gets the time that earlier ones leave.
    """
    from concurrent.futures import ThreadPoolExecutor  # imported late: usually no job is left

    until = time.monotonic() + within
    unfinished = [job for job in jobs if jobs[job] not in OVER]
    parts = [unfinished[start::AT_ONCE] for start in range(min(AT_ONCE, len(unfinished)))]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for lines in pool.map(lambda part: _free(part, controller, until), parts):
            for text in lines:
                log(text)


def _free(jobs: Sequence[str], controller: str, until: float) -> list[str]:
    refused: dict[str, str] = {}
    silent = ""
    try:
        # "incomplete" spares a job that has ended meanwhile: otherwise slurmctld would run a job again that only waits
        # for its epilog.
        remaining = max(0.0, until - time.monotonic())
        run([SCONTROL, "requeue", "incomplete", ",".join(jobs)], controller, within=remaining * REQUEUES)
    except SlurmError as error:
        refused = {job: reason for job in jobs if (reason := _refusal(job, error.output))}
        silent = error.why if error.late or not refused else ""
    reasons = {job: judge(refused[job], controller) if job in refused else silent for job in jobs}
    lines = [f"job {job} is not requeued: {reasons[job]}" if reasons[job] else f"requeued job {job}" for job in jobs]
    if never := [job for job in jobs if refused.get(job, "").startswith(NEVER)]:
        try:
            run([SCANCEL, *never], controller, within=max(0.0, until - time.monotonic()))
            lines += [f"cancelled job {job}" for job in never]
        except SlurmError as error:
            lines.append(f"not cancelled: {' '.join(never)}: {error.why}")
    return lines


def _refusal(job: str, output: str) -> str:
    """Find a job's refusal in the output: scontrol continues after an error, and names each failed job."""
    for line in output.splitlines():
        for reason, named in (line.rpartition(" for job ")[::2], line.partition(": ")[::-2]):
            if named == job:
                return reason
    return ""


def address(env: Mapping[str, str]) -> str:
    """Return slurmctld's host:port from the pod's environment."""
    return join_address(*host_and_port(env.get("MINIVM_CONTROLLER") or CONTROLLER))


# Why slurmctld refuses a credential: the clocks of the pods, or the releases of both sides.
#
# munge refuses credentials older than five minutes, or from the future, auth/slurm those older than one minute, and
# slurmctld then answers as for a wrong key. The controller's init sends the time with every HTTP answer, without a key.
# slurmctld answers a newer release's message like a wrong key, too: it never reads the credential. Its answer starts
# with the number of its own release, even to an invalid message. If nothing answers, the cause stays unknown.

HTTP_PORT = 8650  # the controller's MINIVM_HTTP in the chart
PATIENCE = 1.0
ROUNDING = 2.0  # `Date` has whole seconds, and the answer takes time
STAMP = "%a, %d %b %Y %H:%M:%S GMT"


def explain_clock(ahead: float) -> str:
    """Return the reason if the clocks are too far apart for a credential, else ""."""
    if abs(ahead) < auth.LIVES[auth.mode()] - ROUNDING:
        return ""
    return f"this node's clock is {abs(ahead):,.0f} s {'ahead of' if ahead > 0 else 'behind'} the controller's"


def parse_date(answer: bytes) -> float | None:
    """Return the `Date` of an HTTP answer, in seconds since the epoch."""
    from calendar import timegm  # imported late: a successful boot does not need it

    for line in answer.partition(b"\r\n\r\n")[0].split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"date":
            try:
                return float(timegm(time.strptime(value.strip().decode("latin-1"), STAMP)))
            except ValueError:
                return None
    return None


def measure_clock_lead(controller: str, port: int = HTTP_PORT) -> float | None:
    """Return by how many seconds this pod's clock is ahead of the controller's; None if its init does not answer."""
    import socket  # imported late, as above

    host, _ = host_and_port(controller)
    answer = b""
    try:
        with socket.create_connection((host, port), timeout=PATIENCE) as stream:
            stream.sendall(b"HEAD /livez HTTP/1.0\r\n\r\n")
            while len(answer) < 4096 and (chunk := stream.recv(4096)):
                answer += chunk
    except OSError:
        if not answer:
            return None
    controller_time = parse_date(answer)
    return None if controller_time is None else time.time() - controller_time


# A message's length in four bytes and a release number in two, which no release has; slurmctld ignores the rest.
QUESTION = b"\0\0\0\x42\xff\xff" + bytes(64)
BEGIN = 6  # bytes at the start of its answer, in the same format


def explain_release(own: Release | None, spoken: int | None, controller: str) -> str:
    """Return the reason if slurmctld does not understand this image, else ""."""
    if own is None or spoken is None or spoken >= own.protocol:
        return ""
    return (
        f"{controller} has Slurm {own.name_of(spoken)}, which does not understand this image's {own.name}:"
        " the controller is upgraded first"
    )


def find_protocol(controller: str) -> int | None:
    """Return its release's number; None if unknown: from 26.05 on slurmctld may take an invalid message for HTTP."""
    import socket  # imported late, as above

    answer = b""
    try:
        with socket.create_connection(host_and_port(controller), timeout=PATIENCE) as stream:
            stream.sendall(QUESTION)
            while len(answer) < BEGIN and (chunk := stream.recv(64)):
                answer += chunk
    except OSError:
        pass
    # A short message with a plausible release number, not any text.
    return answer[4] if len(answer) >= BEGIN and answer[:2] == b"\0\0" and answer[4] and not answer[5] else None


def read_own_release() -> Release | None:
    try:
        with open(FILE) as file:  # noqa: PTH123 (pathlib costs 8 ms)
            return parse_release(file.read())
    except OSError:
        return None
