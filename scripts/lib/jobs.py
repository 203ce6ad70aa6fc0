"""Who is on this node, and how root ends and removes what users leave on it.

All of that may be hostile. So root looks, and never touches: whatever is signalled or removed is so by a child that has
the user's own rights, and the kernel keeps it from what is not his.
"""

# Pathlib costs an epilog more than all it does here.
# ruff: noqa: PTH103, PTH104, PTH115, PTH119, PTH123, PTH208
import contextlib
import os
import re
import time
from collections.abc import Callable, Iterable

JOB = os.environ["SLURM_JOB_ID"]
UID = int(os.environ["SLURM_JOB_UID"])
GID = int(os.environ.get("SLURM_JOB_GID", UID))
# Made by the prolog, one directory a job, in one of root's: who may be here, and nobody can forge it.
WORK = os.environ.get("MINIVM_JOB_WORK", "/var/tmp/minivm/jobs")
ENDED = ".ended"
# Debian adds a suffix to Slurm's programs.
STEP_PROGRAMS = ("slurmstepd", "slurmstepd-wlm")
STEP = re.compile(rb"slurmstepd: \[(\d+)\.")
# Below are the system's own users; a job of root's is not cleaned up after at all.
FIRST_UID = int(os.environ.get("MINIVM_FIRST_UID", "1000"))
# Nobody's user ids (see as_user). Two that signal everybody may end each other and ask again, but none of the rest.
SPARES = range(64950, 65000)
SPARES_TO_SIGNAL = range(64900, 64950)


def read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


def numbers(status: bytes, name: bytes) -> list[int]:
    """Real, effective, saved and file-system id of a /proc/PID/status."""
    return [int(word) for word in status.partition(b"\n" + name + b":")[2].partition(b"\n")[0].split()]


def processes() -> dict[int, tuple[list[int], list[int]]]:
    """Pid -> user ids, group ids. The owner of /proc/PID would be the effective one: root's own of a setuid program."""
    found = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        status = read(f"/proc/{name}/status")
        if (uids := numbers(status, b"Uid")) and b"\nState:\tZ" not in status:
            found[int(name)] = uids, numbers(status, b"Gid")
    return found


def is_step(pid: int) -> bool:
    """Of a process whose real user is root, as no user's can be, whatever he calls himself. A slurmstepd that has once
    acted as a user may hide what it runs from a root without CAP_SYS_PTRACE; then its name has to do."""
    if len(numbers(read(f"/proc/{pid}/status"), b"NSpid")) > 1:
        # In a container within this one: another node's.
        return False
    try:
        return os.path.basename(os.readlink(f"/proc/{pid}/exe")).removesuffix(" (deleted)") in STEP_PROGRAMS
    except PermissionError:
        return read(f"/proc/{pid}/comm") == b"slurmstepd\n"
    except OSError:
        return False


def other_jobs() -> dict[str, int | None]:
    """Job -> its user, None where that is not known. Asked again before each step: the next job may start any time."""
    found: dict[str, int | None] = {}
    for pid, (uids, _) in processes().items():
        if uids[0] == 0 and is_step(pid) and (step := STEP.match(read(f"/proc/{pid}/cmdline"))):
            found[step.group(1).decode()] = None
    with contextlib.suppress(OSError):
        if os.lstat(WORK).st_uid == os.getuid():
            for entry in os.scandir(WORK):
                if entry.name.isdigit():
                    with contextlib.suppress(OSError):
                        found[entry.name] = entry.stat(follow_symlinks=False).st_uid
    found.pop(JOB, None)
    return found


def users_last() -> bool:
    """Nothing of the user's on this node can belong to another job."""
    return all(uid not in (None, UID) for uid in other_jobs().values())


def sign_off() -> None:
    """Before anybody looks: of two jobs that end together, the one that looks last finds itself alone."""
    with contextlib.suppress(OSError):
        if os.lstat(WORK).st_uid == os.getuid():
            os.makedirs(f"{WORK}/{ENDED}", mode=0o700, exist_ok=True)
            # A requeued job may have ended here before.
            os.rename(f"{WORK}/{JOB}", f"{WORK}/{ENDED}/{JOB}.{time.time_ns()}")


def as_user(uid: int, gid: int, work: Callable[[], Iterable[object]], spares: range = SPARES) -> list[str]:
    """What `work` gave, done with the user's rights and no others, in a child that he cannot reach.

    The kernel asks the sender's effective id when he signals, and the target's real one when he is signalled: a real
    id that nobody has keeps him from being stopped by those he is to end. It must not be root's: `kill -1` asks both.
    """
    if min(uid, gid) < 1 or uid < FIRST_UID:
        return []
    taken = {number for uids, _ in processes().values() for number in uids}
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
