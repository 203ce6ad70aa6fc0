"""Sources that no tool in a small image prints: processes, mounts that may hang, the kernel log, the kernel's clock.

Each prints text of a fixed form with a first and a last line that a parser checks, so that truncated text never counts
as healthy.

`python3 -I -m health.checks.builtin` tests the network file systems of a pod that runs no health checks, such as a
login pod. If one does not answer, the exit code is 1 and the only line names it: the reason for the pod's degraded
state.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import select
import signal
import stat
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from ground.errors import one_line
from ground.files import read_json, write_json
from health.api import Capture, Failure
from health.checks.active_checks import active_results
from health.checks.failed_jobs import failed_jobs

KMSG_LIMIT = 1024 * 1024
KMSG_RECORDS = 200_000
MOUNT_DEADLINE_S = 4.0
NETWORK_FILE_SYSTEMS = frozenset(
    {"nfs", "nfs4", "lustre", "ceph", "fuse.ceph-fuse", "gpfs", "wekafs", "beegfs", "cifs", "smb3", "afs", "virtiofs"}
)
# Most FUSE file systems in a pod are on the network: JuiceFS, GlusterFS, buckets. These two are local.
LOCAL_FUSE = frozenset({"fuse.lxcfs", "fuse.fuse-overlayfs"})
MOUNTS = Path("/proc/self/mounts")
# Where auth/slurm is used (init/prepare/secrets.py).
SLURM_KEYS = ("/etc/slurm/slurm.key", "/etc/slurm/slurm.jwks")
NCCL_LOGS = Path("/var/log/minivm/jobs")
MOST_LOGS = 1000  # per job: NCCL writes one log per process of this node
ABANDONED_MOUNTS = Path("/run/minivm/health/abandoned-mounts")


# Processes in /proc: all of them, and those that wait in the kernel.

# The real user: root owns the directory where a user runs a set-uid program.
_UID = re.compile(r"^Uid:\t(\d+)\t", re.MULTILINE)
_PENDING = re.compile(r"^S(?:ig|hd)Pnd:\t([0-9a-f]+)$", re.MULTILINE)
_SWITCHES = re.compile(r"^(?:non)?voluntary_ctxt_switches:\t(\d+)$", re.MULTILINE)
KILL = 1 << 8  # SIGKILL's bit in a signal set


@dataclass(frozen=True, slots=True)
class _Process:
    pid: str
    state: str
    parent: str
    start: int
    uid: str
    name: str
    command: str
    status: str

    @property
    def shown(self) -> str:
        return " ".join((self.command or f"[{self.name}]").split())


def _all() -> Iterator[_Process]:
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            head, _, tail = _head(f"{entry.path}/stat").rpartition(")")
            command = _head(f"{entry.path}/cmdline").replace("\0", " ").strip()
            # The kernel escapes a line break in the name (the first line) as two characters.
            status = _head(f"{entry.path}/status", 8192)
        except OSError:
            # The process ended meanwhile.
            continue
        fields = tail.split()
        uid = _UID.search(status)
        if uid is not None:
            name = head.partition("(")[2]
            yield _Process(entry.name, fields[0], fields[1], int(fields[19]), uid[1], name, command, status)


def processes() -> Capture:
    """Print one line per process: pid, start, parent, state, seconds since its start, real user, command line."""
    ticks = os.sysconf("SC_CLK_TCK")
    try:
        uptime = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError) as error:
        return Capture("", Failure.FAILED, f"/proc/uptime: {error}")
    lines = ["# processes: pid start ppid state age uid command"]
    for process in _all():
        age = max(0, int(uptime - process.start / ticks))
        lines.append(
            f"{process.pid} {process.start} {process.parent} {process.state} {age} {process.uid} {process.shown}"
        )
    return Capture("\n".join([*lines, f"# end: {len(lines) - 1} processes"]))


def waiting() -> Capture:
    """Print one line per process in uninterruptible sleep: its number of context switches and whether it was killed.

    Kernel threads rest like this by design and are left out.
    """
    lines = ["# waiting: pid start uid switches killed command"]
    for process in _all():
        if process.state != "D" or not process.command:
            continue
        switches = sum(map(int, _SWITCHES.findall(process.status)))
        killed = any(int(pending, 16) & KILL for pending in _PENDING.findall(process.status))
        lines.append(
            f"{process.pid} {process.start} {process.uid} {switches} {'yes' if killed else 'no'} {process.shown}"
        )
    return Capture("\n".join([*lines, f"# end: {len(lines) - 1} processes"]))


def measure_delay(pid: int) -> float:
    """Return how many seconds its most delayed thread was ready to run but got no processor.

    A process that hangs in a driver or on a server waits for something else.
    """
    longest = 0
    with contextlib.suppress(OSError):
        for thread in os.scandir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError, ValueError, IndexError):
                longest = max(longest, int(_head(f"{thread.path}/schedstat").split()[1]))
    return longest / 1e9


def read_start(pid: int | str) -> str:
    """Return the kernel's start time, which with the pid identifies one process; "" if there is none."""
    try:
        return _stat(pid)[19]
    except (OSError, ValueError, IndexError):
        return ""


def is_there(pid: str, start: str) -> bool:
    """Tell if this very process is still running."""
    try:
        fields = _stat(pid)
        return fields[19] == start and fields[0] not in "ZX"
    except (OSError, ValueError, IndexError):
        return False


def _stat(pid: int | str) -> list[str]:
    """Return the fields after the name, starting with the state; the name may contain any text."""
    return _head(f"/proc/{int(pid)}/stat").rpartition(")")[2].split()


def _head(path: str, size: int = 1024) -> str:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, size).decode(errors="replace")
    finally:
        os.close(fd)


# The kernel log.


def kernel_log() -> Capture:
    """Read the kernel's ring buffer, one line per record. Reading consumes nothing: each check keeps its own cursor."""
    try:
        fd = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        return Capture("", Failure.MISSING, f"/dev/kmsg: {error.strerror}")
    lines: deque[str] = deque()
    size = 0
    try:
        # Bounded: a process that keeps the kernel logging must not keep this loop running.
        for _ in range(KMSG_RECORDS):
            try:
                record = os.read(fd, 8192).decode(errors="replace")
            except BlockingIOError:
                break
            except BrokenPipeError:
                # The buffer wrapped during the read; the next read continues at the oldest line left.
                continue
            except OSError as error:
                return Capture("", Failure.FAILED, f"/dev/kmsg: {error.strerror}")
            line = kernel_line(record)
            if line is None:
                continue
            lines.append(line)
            size += len(line)
            # Above this size drop the oldest lines: a flood would hide the newest.
            while size > KMSG_LIMIT:
                size -= len(lines.popleft())
    finally:
        os.close(fd)
    now = time.clock_gettime(time.CLOCK_BOOTTIME)
    return Capture("\n".join([f"# kernel log, now={now:.6f}", *lines, f"# end: {len(lines)} lines"]))


def kernel_line(record: str) -> str | None:
    r"""Format a record as "[time] <priority> text", as `dmesg -r` does; None for anything that is no record.

    The priority is facility * 8 + level. Only the kernel can write with its facility, 0, so a check can tell its
    messages from text written into /dev/kmsg. The kernel writes unprintable characters as \xNN, and each record's text
    on one line; lines after that hold the device's dictionary.
    """
    head, semicolon, rest = record.partition(";")
    fields = head.split(",")
    if not semicolon or len(fields) < 4 or not (fields[0].isdecimal() and fields[2].isdecimal()):
        return None
    text = one_line(rest.split("\n", 1)[0])
    return f"[{int(fields[2]) / 1e6:12.6f}] <{fields[0]}> {text}"


# Mounts of network file systems. Children ask them, since one may hang for ever.


def mounts() -> Capture:
    """Print one line per mount: its state, path, type and the duration of statvfs. A hung mount costs its deadline."""
    try:
        table = MOUNTS.read_text()
    except OSError as error:
        return Capture("", Failure.FAILED, f"/proc/self/mounts: {error.strerror}")
    # The kernel escapes blanks in a name, except unusual ones: a user who mounts with FUSE chooses the name.
    entries = [row for row in (line.split(" ") for line in table.split("\n")) if len(row) >= 4]
    # Skip local mounts: if the root file system hangs, nothing here runs, and a busy machine must not look hung.
    file_systems = {
        _unescape(row[1]): row[2] for row in entries if is_on_network(row[2]) and not _is_served_by_user(row[3])
    }
    left = _find_still_hung()
    hung = {path for paths in left.values() for path in paths}
    states = {path: "hung -" for path in file_systems if path in hung}
    answers, waited = _ask([path for path in file_systems if path not in hung], left)
    if waited > MOUNT_DEADLINE_S / 2:
        return Capture("", Failure.FAILED, f"the mounts could not be checked: waited {waited:.1f} s for a processor")
    states |= answers
    lines = [f"{states.get(path, 'hung -')} {kind} {path}" for path, kind in sorted(file_systems.items())]
    other_lines = [f"other - {row[2]} {_unescape(row[1])}" for row in entries if _unescape(row[1]) not in file_systems]
    lines, other_lines = ([re.sub(r"[^\S ]", "?", line) for line in shown] for shown in (lines, other_lines))
    return Capture(
        "\n".join(["# mounts: state seconds type path", *lines, *other_lines, f"# end: {len(file_systems)} asked"])
    )


def is_on_network(kind: str) -> bool:
    return kind in NETWORK_FILE_SYSTEMS or (kind.split(".", 1)[0] == "fuse" and kind not in LOCAL_FUSE)


def _is_served_by_user(options: str) -> bool:
    """Tell if a user's program serves the mount: its silence says nothing about the node."""
    owner = next((part[8:] for part in options.split(",") if part.startswith("user_id=")), "0")
    return owner != "0"


def _ask(paths: list[str], hang: dict[str, list[str]]) -> tuple[dict[str, str], float]:
    """Return the state of each mount that answered, and, if some did not, how long the child waited for a processor."""
    if not paths:
        return {}, 0.0
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            _ask_each(paths, writer)
        finally:
            os._exit(0)
    os.close(writer)
    text, deadline = b"", time.monotonic() + MOUNT_DEADLINE_S
    while (remaining := deadline - time.monotonic()) > 0 and select.select([reader], [], [], remaining)[0]:
        chunk = os.read(reader, 65536)
        if not chunk:
            break
        text += chunk
        if text.count(b"\n") == len(paths):
            break
    os.close(reader)
    waited = measure_delay(child) if text.count(b"\n") < len(paths) else 0.0
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, 9)
    states = {}
    for line in text.decode(errors="replace").splitlines():
        state, seconds, path = line.split(" ", 2)
        states[path] = f"{state} {seconds}"
    for _ in range(20):
        if os.waitpid(child, os.WNOHANG)[0]:
            break
        time.sleep(0.01)
    else:
        with contextlib.suppress(OSError):
            silent = [path for path in paths if path not in states]
            write_json(ABANDONED_MOUNTS, {**hang, f"{child} {read_start(child)}": silent})
    return states, waited


def _ask_each(paths: list[str], writer: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.setsid()
    # The child may hang for ever with what it holds: the round's lock stays locked until its last copy is closed.
    os.closerange(3, writer)
    os.closerange(writer + 1, 1 << 20)
    for path in paths:
        threading.Thread(target=_statvfs, args=(path, writer), daemon=True).start()
    for thread in threading.enumerate():
        if thread is not threading.current_thread():
            thread.join(MOUNT_DEADLINE_S * 4)


def _statvfs(path: str, writer: int) -> None:
    start = time.monotonic()
    try:
        os.statvfs(path)
        state = "ok"
    except OSError as error:
        state = f"error:{(error.strerror or 'unknown').replace(' ', '_')}"
    # One write of less than PIPE_BUF is atomic.
    with contextlib.suppress(OSError):
        os.write(writer, f"{state} {time.monotonic() - start:.3f} {path}\n".encode())


def _find_still_hung() -> dict[str, list[str]]:
    """Return the abandoned children that still hang, each with its mounts.

    Those mounts are not called again while the child lives.
    """
    recorded = {process: paths for process, paths in read_json(ABANDONED_MOUNTS).items() if isinstance(paths, list)}
    hang = {process: paths for process, paths in recorded.items() if is_there(*process.partition(" ")[::2])}
    with contextlib.suppress(OSError):
        if not hang:
            ABANDONED_MOUNTS.unlink()
        elif hang != recorded:
            write_json(ABANDONED_MOUNTS, hang)
    return hang


def _unescape(path: str) -> str:
    for code, char in ((r"\040", " "), (r"\011", "\t"), (r"\012", "\n"), (r"\134", "\\")):
        path = path.replace(code, char)
    return path


# The clock, the credentials of Slurm, and logs of NCCL.


class _Timex(ctypes.Structure):
    # struct timex of <sys/timex.h>, up to the last field read; the kernel fills 208 bytes on 64 bits.
    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * 256),
    )


def clock() -> Capture:
    """Read the kernel's view of its clock discipline, which the host's daemon sets and a pod may read."""
    timex = _Timex()
    libc = ctypes.CDLL(None, use_errno=True)
    state = libc.adjtimex(ctypes.byref(timex))
    if state < 0:
        return Capture("", Failure.FAILED, f"adjtimex: {os.strerror(ctypes.get_errno())}")
    # STA_NANO (0x2000): the offset is in nanoseconds.
    offset = timex.offset / (1e9 if timex.status & 0x2000 else 1e6)
    return Capture(
        f"# adjtimex\nstate: {state}\nstatus: 0x{timex.status:04x}\noffset_s: {offset:.9f}\n"
        f"maxerror_s: {timex.maxerror / 1e6:.6f}\nesterror_s: {timex.esterror / 1e6:.6f}\n# end"
    )


def identity() -> Capture:
    """Encode with munge and decode with unmunge: the two ends of one pipe, without a shell."""
    import shutil
    import subprocess

    if any(map(os.path.lexists, SLURM_KEYS)):
        return Capture("auth/slurm: munge is not used")
    programs = [shutil.which(name, path="/usr/local/bin:/usr/bin:/bin") for name in ("munge", "unmunge")]
    if programs[0] is None or programs[1] is None:
        return Capture("", Failure.MISSING, "munge is not installed")
    try:
        encoded = subprocess.run(
            [programs[0], "-n"], stdin=subprocess.DEVNULL, capture_output=True, timeout=5, check=False
        )
        if encoded.returncode:
            return Capture(encoded.stderr.decode(errors="replace"), None, "")
        decoded = subprocess.run([programs[1]], input=encoded.stdout, capture_output=True, timeout=5, check=False)
    except subprocess.TimeoutExpired as error:
        return Capture("", Failure.TIMEOUT, f"{error.cmd[0]} did not answer within 5 s")
    # The payload is empty (-n) and the metadata holds no secret.
    return Capture((decoded.stdout + decoded.stderr).decode(errors="replace"))


def nccl_log() -> Capture:
    """Read the end of the newest log that a job's NCCL wrote on this node (the default task prolog names the place)."""
    logs = (log for directory in NCCL_LOGS.glob("*") for log in _newest_log(directory))
    path = max(logs, default=(0.0, ""))[1]
    if not path:
        return Capture("", Failure.MISSING, "no job has left an NCCL log")
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        return Capture("", Failure.FAILED, f"{path}: {error.strerror}")
    with os.fdopen(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):  # its user has replaced it since
            return Capture("", Failure.FAILED, f"{path}: not a regular file")
        file.seek(max(0, found.st_size - 65536))
        return Capture(f"==> {path} <==\n{file.read(65536).decode(errors='replace')}")


def _newest_log(directory: Path) -> list[tuple[float, str]]:
    """Find the newest log in a user's directory: follow no links, and read at most MOST_LOGS names."""
    logs = []
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in islice(entries, MOST_LOGS):
            with contextlib.suppress(OSError):
                if entry.name.startswith("nccl") and entry.is_file(follow_symlinks=False):
                    logs.append((entry.stat(follow_symlinks=False).st_mtime, entry.path))
    return [max(logs)] if logs else []


BUILTINS: dict[str, Callable[[], Capture]] = {
    "processes": processes,
    "waiting": waiting,
    "kernel_log": kernel_log,
    "mounts": mounts,
    "clock": clock,
    "munge": identity,
    "nccl_log": nccl_log,
    "active_results": active_results,
    "failed_jobs": failed_jobs,
}


def list_silent_mounts(table: str) -> list[str]:
    """List the mounts that hang or fail, from the collector's lines "state seconds type path"."""
    failures = []
    for line in table.splitlines():
        state, _, kind, path = [*line.split(" ", 3), "", "", ""][:4]
        if state == "hung":
            failures.append(f"{path} ({kind}) does not answer")
        elif state.startswith("error:"):
            failures.append(f"{path} ({kind}): {state.removeprefix('error:').replace('_', ' ')}")
    return failures


def main() -> int:
    """Test the mounts, for the service `mounts`."""
    ABANDONED_MOUNTS.parent.mkdir(parents=True, exist_ok=True)
    capture = mounts()
    failures = [capture.why] if capture.failure else list_silent_mounts(capture.text)
    if failures:
        print("; ".join(failures))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
