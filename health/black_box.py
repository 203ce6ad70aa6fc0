"""Black boxes: what root saw of this node while a job ran here, in one file a job.

A line of JSON each: `begin` from the prolog, `step` with failed tasks and `end` with the counters' differences from the
epilog, `seen` from the broker. A counter is the node's: other jobs, and on a shared machine other pods, may have moved
it. The files are root's alone. A run that was cut has no `end`, and nothing here ever fails a job.

`find_failed_steps` reads the ends of tasks from slurmd's log: slurmstepd writes a line for each
(SlurmdDebug=verbose). A user may bring line ends into the log, as in the name of a program, and so write lines of
another job: a step counts only if its lines agree, from its start to each end, and forged ones beside the real ones do
not. A step that is forged as a whole is no step to accounting: `health.jobs.boxes` compares.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping

OPEN, CLOSED = ".run", ".jsonl"
LARGEST = 64 * 1024
LARGEST_LINE = 16 * 1024
DEEPEST = 4  # lists and mappings in each other
# Bounds of all files together.
MOST_BYTES = 64 * 1024 * 1024
MOST_FILES = 4096
DAY_S = 86400.0
OPEN_DAYS = 60.0
# A check after a job may find what happened in it.
AFTER_S = 60.0
MOST_INTERFACES = 32
NETWORK = (("rx_errors", 2), ("rx_dropped", 3), ("tx_errors", 10), ("tx_dropped", 11))
IB = ("link_downed", "symbol_error", "port_rcv_errors")
MOST_PORTS = 16
PORTS_S = 0.2
FULL = ("/tmp", "/dev/shm", "/var/spool/slurmd")  # their room is looked at, nothing else
NEARLY_FULL = 0.02
LONGEST_TEXT = 300


def directory() -> str:
    return f"{os.environ.get('MINIVM_LOG', '/var/log/minivm')}/boxes"


def counters(root: str = "") -> dict[str, int]:
    """Read what the kernel counts on this node, without a program and without a device that may hang."""
    counts = {**_network(root), **_ports(f"{root}/sys/class/infiniband")}
    slices = f"{root}/sys/fs/cgroup/system.slice"
    killed = {"oom_kills": _oom_kills(f"{root}/proc/vmstat")}
    for scope in _names(slices):
        if scope.endswith("slurmstepd.scope"):
            killed["oom_kills_of_jobs"] = _oom_kills(f"{slices}/{scope}/memory.events")
    errors = {
        f"disk/{disk}/errors": _number(f"{root}/sys/fs/ext4/{disk}/errors_count")
        for disk in _names(f"{root}/sys/fs/ext4")[:MOST_INTERFACES]
    }
    return counts | {name: number for name, number in (killed | errors).items() if number is not None}


def _oom_kills(path: str) -> int | None:
    for line in _read(path).splitlines():
        if line.startswith("oom_kill ") and line[9:].isdigit():
            return int(line[9:])
    return None


def _network(root: str) -> dict[str, int]:
    counts: dict[str, int] = {}
    for line in _read(f"{root}/proc/net/dev").splitlines()[2 : 2 + MOST_INTERFACES]:
        name, _, rest = line.partition(":")
        name, numbers = name.strip(), rest.split()
        # veth: another pod's end, where the node has its machine's network.
        if name == "lo" or name.startswith("veth") or len(numbers) < 12:
            continue
        counts |= {f"net/{name}/{counter}": int(numbers[place]) for counter, place in NETWORK}
        if (losses := _number(f"{root}/sys/class/net/{name}/carrier_down_count")) is not None:
            counts[f"net/{name}/link_losses"] = losses
    return counts


def _ports(folder: str) -> dict[str, int]:
    ports = [f"{card}/ports/{port}" for card in _names(folder) for port in _names(f"{folder}/{card}/ports")]
    counts: dict[str, int] = {}
    until = time.monotonic() + PORTS_S
    for port in ports[:MOST_PORTS]:
        for name in IB:
            # The driver asks the adapter at each read: one that is stuck must not hold the job's start for long.
            if time.monotonic() > until:
                return counts
            if (number := _number(f"{folder}/{port}/counters/{name}")) is not None:
                counts[f"ib/{port.replace('/ports', '')}/{name}"] = number
    return counts


def stamp(now: float) -> dict[str, float]:
    """Return a time beside the seconds since the boot: the difference tells later if the clock was set meanwhile."""
    return {"at": round(now, 3), "boot": round(time.clock_gettime(time.CLOCK_BOOTTIME), 3)}


def grown(before: Mapping[str, object], after: Mapping[str, int]) -> dict[str, int]:
    """Return the counters that moved. One that shrank was reset: its whole value is new."""
    changed: dict[str, int] = {}
    for name, count in after.items():
        old = before.get(name)
        if isinstance(old, int):
            changed[name] = count - old if count >= old else count
    return {name: number for name, number in changed.items() if number}


def begin(env: Mapping[str, str], now: float) -> None:
    """Open the job's box. A requeued job goes on in its own."""
    if (path := _path(env)) is None:
        return
    with contextlib.suppress(Exception):  # a defect here must cost no job its scripts
        os.makedirs(directory(), mode=0o700, exist_ok=True)  # noqa: PTH103
        with contextlib.suppress(FileNotFoundError):
            # A full box begins anew: the last run matters most.
            if os.stat(path + CLOSED).st_size > LARGEST // 4:  # noqa: PTH116
                os.unlink(path + CLOSED)  # noqa: PTH108
            os.rename(path + CLOSED, path + OPEN)  # noqa: PTH104
        entry: dict[str, object] = {"kind": "begin", **stamp(now), "counters": counters()}
        if gpus := [int(gpu) for gpu in env.get("SLURM_JOB_GPUS", "")[:LONGEST_TEXT].split(",") if _is_number(gpu)]:
            entry["gpus"] = gpus
        _append(path + OPEN, entry, create=True)


def end(env: Mapping[str, str], now: float) -> None:
    """Write the differences, and close the box."""
    if (path := _path(env)) is None:
        return
    with contextlib.suppress(Exception):  # a defect here must cost no job its scripts
        started = [line for line in parse_lines(_read_whole(path + OPEN)) if line.get("kind") in ("begin", "end")]
        # An epilog may run twice, and the prolog may have been cut.
        if started and started[-1]["kind"] == "begin":
            before = started[-1].get("counters")
            began = started[-1].get("at")
            # A job that ended well pays nothing for the log.
            if env.get("SLURM_JOB_EXIT_CODE", "") != "0" and isinstance(began, float | int):
                # a run without the resident runner pays for each import

                for step in find_failed_steps(int(env["SLURM_JOB_ID"]), began):
                    _append(path + OPEN, step)
            entry: dict[str, object] = {"kind": "end", **stamp(now)}
            entry["grown"] = grown(before if isinstance(before, dict) else {}, counters())
            _append(path + OPEN, entry | ({"full": full} if (full := _full()) else {}))
        os.rename(path + OPEN, path + CLOSED)  # noqa: PTH104


def see(texts: Iterable[str], now: float) -> None:
    """Note changes of the node's health in the boxes of the jobs that run here, or ended a moment ago."""
    noted = [{"kind": "seen", "at": round(now, 1), "text": text[:LONGEST_TEXT]} for text in texts]
    for name, status in _files() if noted else ():
        if name.endswith(OPEN) or abs(now - status.st_mtime) <= AFTER_S:
            for entry in noted:
                with contextlib.suppress(OSError):
                    _append(f"{directory()}/{name}", entry)


def changes(before: Mapping[str, str] | None, after: Mapping[str, str]) -> list[str]:
    """Return the texts of problems that came and went, by check. None: nothing was known before."""
    if before is None:
        return []
    came = [f"{check}: {reason}" for check, reason in after.items() if check not in before]
    return came + [f"no longer: {check}" for check in before if check not in after]


def prune(days: float, now: float) -> None:
    """Remove the closed boxes that are older, then the oldest beyond the bounds of all."""
    with contextlib.suppress(OSError):
        os.chmod(directory(), 0o700)  # noqa: PTH101 (a volume's directory is the kubelet's)
    files = sorted(_files(), key=lambda item: item[1].st_mtime, reverse=True)
    total = 0
    for number, (name, status) in enumerate(files):
        total += status.st_size
        # An open box is a running job's, or was left by a kill.
        is_old = now - status.st_mtime > DAY_S * (max(days, OPEN_DAYS) if name.endswith(OPEN) else days)
        if is_old or (name.endswith(CLOSED) and (number >= MOST_FILES or total > MOST_BYTES)):
            with contextlib.suppress(OSError):
                os.unlink(f"{directory()}/{name}")  # noqa: PTH108


def find(job: int, uid: int | None) -> bytes:
    """Return the box of the user's job; of any user's for None. Empty where there is none."""
    for name, _ in _files():
        number, owner, *_ = name.split(".")
        if number == str(job) and (uid is None or owner == str(uid)):
            with contextlib.suppress(OSError):  # it was closed or removed meanwhile
                return _read_whole(f"{directory()}/{name}")
    return b""


def parse_lines(text: bytes) -> list[dict[str, object]]:
    """Parse a box. A line that was cut, or that no node of minivm writes, is left out."""
    parsed: list[dict[str, object]] = []
    for line in text[: LARGEST + LARGEST_LINE].split(b"\n"):  # a node's answer has a line more
        with contextlib.suppress(ValueError, RecursionError):
            entry = json.loads(line)
            if isinstance(entry, dict) and _is_plain(entry):
                parsed.append(entry)
    return parsed


def _is_plain(value: object, levels: int = DEEPEST) -> bool:
    """Tell if a value is not nested deeply and all its numbers are finite and of usual size."""
    if isinstance(value, dict | list):
        parts = value.values() if isinstance(value, dict) else value
        return levels > 0 and all(_is_plain(part, levels - 1) for part in parts)
    return not isinstance(value, int | float) or abs(value) < 1 << 63


def _path(env: Mapping[str, str]) -> str | None:
    """Return the box's path without its suffix: the job and its user, so that no other user's box has this name."""
    job, uid = env.get("SLURM_JOB_ID", ""), env.get("SLURM_JOB_UID", "")
    is_named = _is_number(job) and _is_number(uid)
    return f"{directory()}/{int(job)}.{int(uid)}" if is_named else None


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 10


def _append(path: str, entry: Mapping[str, object], *, create: bool = False) -> None:
    text = json.dumps(entry, separators=(",", ":")).encode() + b"\n"
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if create else 0), 0o600)
    try:
        # Room for the end is kept: what the broker notes stops earlier.
        room = LARGEST - (2 * LARGEST_LINE if entry["kind"] in ("seen", "step") else 0)
        size = os.fstat(fd).st_size
        if len(text) <= LARGEST_LINE and size + len(text) <= room and os.write(fd, text) < len(text):
            os.ftruncate(fd, size)  # a full volume cut the line, and the next one would continue it
    finally:
        os.close(fd)


def _files() -> Iterator[tuple[str, os.stat_result]]:
    try:
        entries = list(os.scandir(directory()))
    except OSError:
        return
    for entry in entries:
        if entry.name.endswith((OPEN, CLOSED)):
            with contextlib.suppress(OSError):
                yield entry.name, entry.stat(follow_symlinks=False)


def _full() -> list[str]:
    shown = []
    for place in FULL:
        with contextlib.suppress(OSError):
            room = os.statvfs(place)
            if room.f_blocks and room.f_bavail < NEARLY_FULL * room.f_blocks:
                shown.append(place)
    return shown


def _read_whole(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        return os.read(fd, LARGEST)
    finally:
        os.close(fd)


def _read(path: str) -> str:
    # Python's file objects take twice as long, and each prolog waits for these.
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return os.read(fd, LARGEST).decode("ascii", "replace")
    except OSError:
        return ""
    finally:
        os.close(fd)


def _number(path: str) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isascii() and text.isdigit() else None


def _names(path: str) -> list[str]:
    try:
        return sorted(os.listdir(path))  # noqa: PTH208
    except OSError:
        return []


# How a node gives a box to a person: over TCP, in credentials (health/credentials.py) both ways.
#
# The asker's credential names job and node, and root alone can open it: another user that gets it cannot use it
# elsewhere. Only the asker's own credential opens the answer.

PORT = 8652
LARGEST_SENT = 4 * LARGEST


def port() -> int:
    """Return the port; 0: the node gives no boxes."""
    text = os.environ.get("MINIVM_BOX_PORT", str(PORT))
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 5 else 0


def question(job: int, node: str, word: str = "") -> str:
    """Return the question; `word`: what the node said first, where credentials can be sent again (auth/slurm)."""
    return f"minivm-box 1 {job} {node}" + (f" {word}" if word else "")


LARGEST_SLURMD_LOG = 1 << 20  # of the log; beyond that its last half stays
MOST_STEPS = 16
MOST_FAILED = 16  # tasks of a step
OUT_OF_MEMORY = 253  # Slurm's own "signal"
_LINE = re.compile(
    rb"\[([0-9-]{10}T[0-9:]{8})(\.\d{3})?\] \[\d+\.(\d{1,10})(?:\+\d+)?\] "
    rb"(?:starting (?P<tasks>\d{1,7}) tasks"
    rb"|task (?P<rank>\d{1,7}) \((?P<pid>\d{1,10})\) "
    rb"(?:(?P<started>started) |exited with exit code (?P<code>\d{1,3})\."
    rb"|exited\. Killed by signal (?P<signal>\d{1,3})|(?P<memory>Out Of Memory)))"
)


def slurmd_log() -> str:
    return f"{os.environ.get('MINIVM_LOG', '/var/log/minivm')}/slurmd.log"


class _StepEnds:
    def __init__(self) -> None:
        self.tasks: list[int] = []  # of each line that tells how many start
        self.started: dict[int, int] = {}
        self.ended: set[int] = set()
        self.failed: list[tuple[int, int, int, float]] = []
        self.is_odd = False

    def add(self, match: re.Match[bytes]) -> None:
        if match["tasks"]:
            self.tasks.append(int(match["tasks"]))
            return
        rank, pid = int(match["rank"]), int(match["pid"])
        if match["started"]:
            self.is_odd |= rank in self.started
            self.started[rank] = pid
            return
        self.is_odd |= rank in self.ended or self.started.get(rank) != pid
        self.ended.add(rank)
        code, signal = int(match["code"] or 0), int(match["signal"] or 0) or (OUT_OF_MEMORY if match["memory"] else 0)
        if (code or signal) and len(self.failed) < MOST_FAILED:
            self.failed.append((rank, code, signal, _time(match)))

    @property
    def agrees(self) -> bool:
        return not self.is_odd and self.tasks == [len(self.started)]


def find_failed_steps(job: int, since: float) -> list[Mapping[str, object]]:
    """Return the job's last steps with failed tasks, as entries for a box: tasks are rank, code, signal, time."""
    # Local time as in the log: its lines are compared as texts, and a requeued job numbers its steps again.
    earliest = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(since)).encode()
    steps: dict[int, _StepEnds] = {}
    for line in _lines(_read_slurmd_log(), b"] [%d." % job):
        if (match := _LINE.match(line)) and match[1] >= earliest:
            steps.setdefault(int(match[3]), _StepEnds()).add(match)
    entries: list[Mapping[str, object]] = []
    for number in sorted(steps):
        step = steps[number]
        if step.failed:
            entry = {"kind": "step", "step": number, "tasks": len(step.started)}
            entries.append(entry | ({"failed": step.failed} if step.agrees else {"odd": True}))
    return entries[-MOST_STEPS:]


def trim_slurmd_log() -> None:
    """Keep the last half of a log that became large. slurmd appends, so that it goes on at the new end."""
    with contextlib.suppress(OSError):
        if os.stat(slurmd_log()).st_size > LARGEST_SLURMD_LOG:  # noqa: PTH116
            tail = _read_slurmd_log()[-LARGEST_SLURMD_LOG // 2 :]
            os.truncate(slurmd_log(), 0)
            fd = os.open(slurmd_log(), os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                os.write(fd, tail[tail.find(b"\n") + 1 :])
            finally:
                os.close(fd)


def _lines(text: bytes, part: bytes) -> Iterator[bytes]:
    at = 0
    while (at := text.find(part, at)) >= 0:
        end = text.find(b"\n", at)
        end = end if end >= 0 else len(text)
        yield text[text.rfind(b"\n", 0, at) + 1 : end]
        at = end


def _read_slurmd_log() -> bytes:
    try:
        fd = os.open(slurmd_log(), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return b""
    try:
        size = os.fstat(fd).st_size
        return os.pread(fd, 2 * LARGEST_SLURMD_LOG, max(0, size - 2 * LARGEST_SLURMD_LOG))
    finally:
        os.close(fd)


def _time(match: re.Match[bytes]) -> float:
    try:
        whole = time.mktime(time.strptime(match[1].decode(), "%Y-%m-%dT%H:%M:%S"))
    except (ValueError, OverflowError):
        return 0.0
    return round(whole + float(match[2] or 0), 3)
