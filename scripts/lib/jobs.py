"""Who is on this node, and how root ends and removes what users leave on it.

All of that may be hostile. So root looks, and never touches: whatever is signalled or removed is so by a child that has
the user's own rights, and the kernel keeps it from what is not his.
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
# Made by the prolog, one directory a job, in one of root's: who may be here, and nobody can forge it.
WORK = os.environ.get("MINIVM_JOB_WORK", "/var/tmp/minivm/jobs")
LOGS = os.environ.get("MINIVM_JOB_LOGS", "/var/log/minivm/jobs")
DCGM = os.environ.get("MINIVM_DCGM_JOBS", "/run/minivm/dcgm-jobs")
ENDED = ".ended"
# Root's alone; where there is none, each looks for himself.
SHARED = os.environ.get("MINIVM_RUNNER", "/run/minivm/runner")
PATIENCE_TURN = 1.0
CGROUPS = os.environ.get("MINIVM_CGROUPS", "/sys/fs/cgroup")
# Debian adds a suffix to Slurm's programs.
STEP_PROGRAMS = ("slurmstepd", "slurmstepd-wlm")
# Below are the system's own users; a job of root's is not cleaned up after at all.
FIRST_UID = int(os.environ.get("MINIVM_FIRST_UID", "1000"))
# User ids that no user may have (see as_user); `init.helpers.reserved_ids` looks for them in the site's directory. Two
# children that signal every process may end each other and try again, but none of the rest.
RESERVED = range(64500, 65000)
SPARES_TO_SIGNAL = RESERVED[:400]
SPARES = RESERVED[400:]


# Pid -> user ids, group ids.
Processes = dict[int, tuple[list[int], list[int]]]


def is_our_own(place: str) -> bool:
    """A directory of root's, and no link to one: nobody has made it before us."""
    try:
        found = os.lstat(place)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


def read(path: str) -> bytes:
    # Of hundreds of processes, each time: Python's own files take twice as long.
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
    """Real, effective, saved and file-system id of a /proc/PID/status."""
    return [int(word) for word in status.partition(b"\n" + name + b":")[2].partition(b"\n")[0].split()]


def processes() -> Processes:
    """As they are now, or a moment later.

    Of many that ask at once, as when jobs end together, one looks for all: who waits takes what began after he came.
    """
    came = time.monotonic()
    fd = turn(came + PATIENCE_TURN)
    if fd is None:
        return look()
    try:
        text = read_all(fd)
        with contextlib.suppress(ValueError, TypeError, EOFError):
            began, found = marshal.loads(text)
            if came <= began <= time.monotonic():
                return dict(found)
        began, found = time.monotonic(), look()
        os.pwrite(fd, marshal.dumps((began, found)), 0)
        return found
    except OSError:
        return look()
    finally:
        os.close(fd)


def turn(until: float) -> int | None:
    """The file, locked, in a directory of root's alone; None where there is none, or somebody keeps it too long."""
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
    """The owner of /proc/PID would be the effective one: root's own of a setuid program."""
    found = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        status = read(f"/proc/{name}/status")
        if (uids := numbers(status, b"Uid")) and b"\nState:\tZ" not in status:
            found[int(name)] = uids, numbers(status, b"Gid")
    return found


def is_step(pid: int) -> bool:
    """Of a process whose real user is root, as no user's can be, whatever he calls himself. A slurmstepd that has once
    acted as a user may hide what it runs from a root without CAP_SYS_PTRACE; then its name has to do."""
    try:
        found = os.path.basename(os.readlink(f"/proc/{pid}/exe")).removesuffix(" (deleted)") in STEP_PROGRAMS
    except PermissionError:
        found = read(f"/proc/{pid}/comm") == b"slurmstepd\n"
    except OSError:
        return False
    # In a container within this one: another node's.
    return found and len(numbers(read(f"/proc/{pid}/status"), b"NSpid")) <= 1


def step_of(pid: int) -> str:
    """The job whose step this slurmstepd runs: "slurmstepd: [JOB.STEP]"."""
    begin, _, rest = read(f"/proc/{pid}/cmdline").partition(b"slurmstepd: [")
    job, dot, _ = rest.partition(b".")
    return job.decode() if dot and job.isdigit() and not begin else ""


def other_jobs(seen: Processes | None = None) -> dict[str, int | None]:
    """Job -> its user, None where that is not known. Asked again before each step: the next job may start any time.

    `seen`: the processes, where somebody has just looked. Places are looked at anew: they are there before processes.
    """
    found: dict[str, int | None] = {}
    for pid, (uids, _) in (processes() if seen is None else seen).items():
        if uids[0] == 0 and is_step(pid) and (job := step_of(pid)):
            found[job] = None
    found |= places()
    found.pop(JOB, None)
    return found


def places() -> dict[str, int]:
    """Job -> its user, by the directories that prologs have made and epilogs not yet put aside."""
    found: dict[str, int] = {}
    with contextlib.suppress(OSError):
        if os.lstat(WORK).st_uid == os.getuid():
            for entry in os.scandir(WORK):
                if entry.name.isdigit() and entry.name != JOB:
                    with contextlib.suppress(OSError):
                        found[entry.name] = entry.stat(follow_symlinks=False).st_uid
    return found


def is_anybody_here() -> bool:
    """Whether the user has a process, by one question to the kernel: also who forks faster than one can look."""
    try:
        os.getpriority(os.PRIO_USER, UID)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


def is_beside_another() -> bool:
    """Whether the user has another job here, kept in a cgroup as this one was, and this one's is gone: then nothing is
    this job's, for no process leaves its cgroup. Slurm ends what is in it before an epilog begins."""
    above = tracked()
    others = (f"{above}{job}" for job, uid in places().items() if uid == UID)
    return bool(above) and not os.path.exists(f"{above}{JOB}") and any(map(os.path.exists, others))


def tracked() -> str:
    """What stands before a job's number in the name of its cgroup; empty where jobs are not tracked by cgroups."""
    for above, below in (("system.slice", "job_"), ("freezer", f"uid_{UID}/job_")):
        with contextlib.suppress(OSError):
            for name in os.listdir(f"{CGROUPS}/{above}"):
                # Of a Slurm built for several slurmd on a machine, with the node's name.
                if name.endswith("slurmstepd.scope") or name.partition("_")[0] == "slurm":
                    return f"{CGROUPS}/{above}/{name}/{below}"
    return ""


def users_last(seen: Processes | None = None) -> bool:
    """Nothing of the user's on this node can belong to another job."""
    return all(uid not in (None, UID) for uid in other_jobs(seen).values())


def sign_off() -> None:
    """Before anybody looks: of two jobs that end together, the one that looks last finds itself alone."""
    with contextlib.suppress(OSError):
        if JOB.isdecimal() and os.lstat(WORK).st_uid == os.getuid():
            try:
                # Empty, as most are.
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
    """What `work` gave, done with the user's rights and no others, in a child that he cannot reach.

    The kernel asks the sender's effective id when he signals, and the target's real one when he is signalled: a real
    id that nobody has keeps him from being stopped by those he is to end. It must not be root's: `kill -1` asks both.
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
