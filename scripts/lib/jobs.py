"""Users' processes and files on this node, and how root ends and removes what a job left.

All of it may be hostile. So root only looks: a child with the user's own rights sends each signal and removes each
file, and the kernel keeps it from everything else.
"""

# Pathlib costs an epilog more than all it does here.
# ruff: noqa: PTH103, PTH104, PTH106, PTH110, PTH115, PTH119, PTH123, PTH208
import contextlib
import fcntl
import marshal
import os
import stat
import time
from collections.abc import Callable, Iterable

JOB = os.environ["SLURM_JOB_ID"]
UID = int(os.environ["SLURM_JOB_UID"])
GID = int(os.environ.get("SLURM_JOB_GID", UID))
# The prolog creates one directory per job inside a directory of root's: a list of jobs that no user can forge.
WORK = os.environ.get("MINIVM_JOB_WORK", "/var/tmp/minivm/jobs")
LOGS = os.environ.get("MINIVM_JOB_LOGS", "/var/log/minivm/jobs")
DCGM = os.environ.get("MINIVM_DCGM_JOBS", "/run/minivm/dcgm-jobs")
ENDED = ".ended"
# Accessible to root only; without it each process scans for itself.
SHARED = os.environ.get("MINIVM_RUNNER", "/run/minivm/runner")
PATIENCE_TURN = 1.0
CGROUPS = os.environ.get("MINIVM_CGROUPS", "/sys/fs/cgroup")
# Debian adds a suffix to Slurm's programs.
STEP_PROGRAMS = ("slurmstepd", "slurmstepd-wlm")
# Below are system users; a job of root is not cleaned up at all.
FIRST_UID = int(os.environ.get("MINIVM_FIRST_UID", "1000"))
# Unused user ids (see as_user). Two children that signal all processes may end each other and retry, but none of the
# rest.
RESERVED = range(64500, 65000)
SPARES_TO_SIGNAL = RESERVED[:400]
SPARES = RESERVED[400:]


# Pid -> user ids, group ids.
Processes = dict[int, tuple[list[int], list[int]]]


def is_our_own(place: str) -> bool:
    """Tell if it is a directory of root's and no link: no user created it first."""
    try:
        status = os.lstat(place)
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()


def read(path: str) -> bytes:
    # Called for hundreds of processes each time: Python's file objects take twice as long.
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return read_all(fd)
    except OSError:
        return b""
    finally:
        os.close(fd)


def read_all(fd: int) -> bytes:
    parts = []
    while part := os.read(fd, 65536):
        parts.append(part)
    return b"".join(parts)


def numbers(status: bytes, name: bytes) -> list[int]:
    """Return the real, effective, saved and file-system id from /proc/PID/status."""
    return [int(word) for word in status.partition(b"\n" + name + b":")[2].partition(b"\n")[0].split()]


def processes() -> Processes:
    """Return the processes of now, or of a moment later.

    When jobs end together, one caller scans for all: a waiting caller takes a scan that began after its call.
    """
    came = time.monotonic()
    fd = turn(came + PATIENCE_TURN)
    if fd is None:
        return look()
    try:
        text = read_all(fd)
        with contextlib.suppress(ValueError, TypeError, EOFError):
            began, scanned = marshal.loads(text)
            if came <= began <= time.monotonic():
                return dict(scanned)
        began, scanned = time.monotonic(), look()
        os.pwrite(fd, marshal.dumps((began, scanned)), 0)
        return scanned
    except OSError:
        return look()
    finally:
        os.close(fd)


def turn(until: float) -> int | None:
    """Return the locked file in a directory of root's; None without it, or if it stays locked too long."""
    try:
        if not is_our_own(SHARED) or os.lstat(SHARED).st_mode & 0o077:
            return None
        fd = os.open(f"{SHARED}/processes", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:
        return None
    while True:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd
        if time.monotonic() >= until:
            os.close(fd)
            return None
        time.sleep(0.001)


def look() -> Processes:
    """Scan /proc. The owner of /proc/PID would be the effective user: root for a setuid program."""
    processes_by_pid = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        status = read(f"/proc/{name}/status")
        if (uids := numbers(status, b"Uid")) and b"\nState:\tZ" not in status:
            processes_by_pid[int(name)] = uids, numbers(status, b"Gid")
    return processes_by_pid


def is_step(pid: int) -> bool:
    """Tell if it is slurmstepd: the caller checks that its real user is root, which no user can fake.

    A slurmstepd that has acted as a user may hide its program from a root without CAP_SYS_PTRACE; then its name must
    do.
    """
    try:
        is_named_so = os.path.basename(os.readlink(f"/proc/{pid}/exe")).removesuffix(" (deleted)") in STEP_PROGRAMS
    except PermissionError:
        is_named_so = read(f"/proc/{pid}/comm") == b"slurmstepd\n"
    except OSError:
        return False
    # More ids: in a nested container, another node's.
    return is_named_so and len(numbers(read(f"/proc/{pid}/status"), b"NSpid")) <= 1


def step_of(pid: int) -> str:
    """Return the job whose step this slurmstepd runs, from "slurmstepd: [JOB.STEP]"."""
    begin, _, rest = read(f"/proc/{pid}/cmdline").partition(b"slurmstepd: [")
    job, dot, _ = rest.partition(b".")
    return job.decode() if dot and job.isdigit() and not begin else ""


def other_jobs(seen: Processes | None = None) -> dict[str, int | None]:
    """Map each other job to its user, None if unknown. Call it before each step: the next job may start at any time.

    `seen` is a recent scan of the processes. Directories are read again: they exist before processes.
    """
    users_by_job: dict[str, int | None] = {}
    for pid, (uids, _) in (processes() if seen is None else seen).items():
        if uids[0] == 0 and is_step(pid) and (job := step_of(pid)):
            users_by_job[job] = None
    users_by_job |= places()
    users_by_job.pop(JOB, None)
    return users_by_job


def places() -> dict[str, int]:
    """Map jobs to users by the directories that prologs created and epilogs have not yet moved away."""
    users_by_job: dict[str, int] = {}
    with contextlib.suppress(OSError):
        if os.lstat(WORK).st_uid == os.getuid():
            for entry in os.scandir(WORK):
                if entry.name.isdigit() and entry.name != JOB:
                    with contextlib.suppress(OSError):
                        users_by_job[entry.name] = entry.stat(follow_symlinks=False).st_uid
    return users_by_job


def is_anybody_here() -> bool:
    """Ask the kernel if the user has any process, even one that forks faster than a scan."""
    try:
        os.getpriority(os.PRIO_USER, UID)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


def is_beside_another() -> bool:
    """Tell if the user has another job here with a cgroup while this job's cgroup is gone.

    Then nothing belongs to this job, since no process leaves its cgroup, and Slurm ends its processes before an epilog
    begins.
    """
    above = tracked()
    job_paths = (f"{above}{job}" for job, uid in places().items() if uid == UID)
    return bool(above) and not os.path.exists(f"{above}{JOB}") and any(map(os.path.exists, job_paths))


def tracked() -> str:
    """Return the path of a job's cgroup up to the job's number; "" if jobs are not tracked by cgroups."""
    for above, below in (("system.slice", "job_"), ("freezer", f"uid_{UID}/job_")):
        with contextlib.suppress(OSError):
            for name in os.listdir(f"{CGROUPS}/{above}"):
                # With the node's name in a Slurm built for several slurmd on one machine.
                if name.endswith("slurmstepd.scope") or name.partition("_")[0] == "slurm":
                    return f"{CGROUPS}/{above}/{name}/{below}"
    return ""


def users_last(seen: Processes | None = None) -> bool:
    """Tell if no other job of the user is on this node."""
    return all(uid not in (None, UID) for uid in other_jobs(seen).values())


def sign_off() -> None:
    """Remove this job's directory before any scan: of two jobs that end together, the later one finds itself alone."""
    with contextlib.suppress(OSError):
        if JOB.isdecimal() and os.lstat(WORK).st_uid == os.getuid():
            try:
                # Empty, as usual.
                os.rmdir(f"{WORK}/{JOB}")
            except OSError:
                os.makedirs(f"{WORK}/{ENDED}", mode=0o700, exist_ok=True)
                # A requeued job may have ended here before.
                os.rename(f"{WORK}/{JOB}", f"{WORK}/{ENDED}/{JOB}.{time.time_ns()}")


def as_user(
    uid: int,
    gid: int,
    work: Callable[[], Iterable[object]],
    spares: range = SPARES,
    seen: Processes | None = None,
) -> list[str]:
    """Run `work` with the user's rights alone, in a child that the user cannot signal; return its results.

    For a signal the kernel compares the sender's effective id with the target's real one: with an unused real id, the
    processes to be ended cannot stop the child. It must not be root's: `kill -1` checks both.
    """
    if min(uid, gid) < 1 or uid < FIRST_UID:
        return []
    taken = {number for uids, _ in (processes() if seen is None else seen).values() for number in uids}
    order = (spares[(os.getpid() + step) % len(spares)] for step in range(len(spares)))
    spare = next(number for number in order if number not in taken and number != uid)
    source, sink = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(source)
            os.setgroups([])
            os.setresgid(gid, gid, gid)
            os.setresuid(spare, uid, spare)
            if os.getresuid() == (spare, uid, spare):
                os.write(sink, "\n".join(map(str, work())).encode())
                code = 0
        except BaseException as error:
            os.write(2, f"as {uid}: {error}\n".encode(errors="replace"))
        finally:
            os._exit(code)
    os.close(sink)
    with open(source, encoding="utf-8") as answer:
        lines = answer.read().split("\n")
    os.waitpid(pid, 0)
    return [line for line in lines if line]
