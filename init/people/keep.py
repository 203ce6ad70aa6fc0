"""Make the people of the mounted `people.yaml` known to this pod, and end what runs of people who lost access.

    python3 -I -m init.people.keep [--boot]

The services `people-at-boot` and `people` run it, at the start and every minute. Each run (`keep`):

1. Read the file, and take it over into the saved state (`take_over`). A file that cannot be read changes nothing: the
   last good one counts, and its times of expiry too.
2. Write passwd, group, shadow and the ssh keys of all people who have access now (`publish`).
3. On a login pod, end the processes of people without access (`end_sessions`).

On a problem the exit code is 1, and the only line is the reason for which the pod is degraded. With --boot the exit
code is 0 unless the file is refused and no person is known: only then does the pod wait for a better file.
"""

from __future__ import annotations

import contextlib
import grp
import hashlib
import os
import pwd
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path

from ground.errors import one_line
from ground.files import locked, read_json, write_json
from ground.version import VERSION
from init.errors import InitError, ManyErrors
from init.lean import record, replace
from init.people import read
from init.people.spec import FILE, IDS, NOBODY, PeopleList, Taken, from_state, has_access, settle, to_state, valid_keys
from init.places import LATEST_PEOPLE, PLAN
from init.pod.pod import MOUNTS, Pod, run_as, write

MOUNT = f"{MOUNTS}/people"
# On the controller it is on the state volume: a uid that was seen once is known to each later pod.
STATE = "/var/lib/minivm/people"
# The file by which a pod has a directory service.
DIRECTORY = "secrets/sssd/sssd.conf"
# Parent of the homes, unless MINIVM_HOME names another one.
HOMES = "/home"
DAMAGED = "state.json.damaged"
JUST_EXPIRED_S = 120.0  # longer than the pause between two runs
MOST_PROBLEMS, LONGEST_PROBLEM = 3, 600  # in the pod's status
LOCK_WAIT_S = 30.0
# The databases of libnss-extrausers.
EXTRA = "/var/lib/extrausers"
# images/src/login/authorized-keys.c reads it.
KEYS = "/run/minivm/people/keys"
# Days since 1970: an account without a day of its last change would have to change its password.
CHANGED = 19000
PROC = Path("/proc")
# Seconds after SIGHUP and again after SIGTERM, in which a shell and its editor save what they can before SIGKILL.
PATIENCE = 3.0
KILL_ROUNDS = 20
UNUSED = 64998  # of the reserved ids: no process runs as it


@record(frozen=True, slots=True)
class PeopleState:
    """State of this pod: the people taken over, the ids ever seen, the file's digest, and its mistakes."""

    people: PeopleList = NOBODY
    ids: Mapping[str, int] = {}  # never written to
    digest: str = ""
    problems: tuple[str, ...] = ()
    moved: frozenset[int] = frozenset()  # uids that left the file for a directory, which knows them


def load(pod: Pod) -> PeopleState:
    """Read the state; a damaged one is kept under another name, and `keep` says so."""
    path = pod.path(f"{STATE}/state.json")
    data = read_json(path)
    try:
        ids = {str(name): int(uid) for name, uid in data["ids"].items()}
        moved = frozenset(int(uid) for uid in data.get("moved", ()))
        problems = tuple(map(str, data["problems"]))
        return PeopleState(from_state(data["people"]), ids, str(data["digest"]), problems, moved)
    except (KeyError, ValueError, TypeError, AttributeError):
        with contextlib.suppress(FileNotFoundError):
            path.rename(path.with_name(DAMAGED))
        return PeopleState()


def save(pod: Pod, state: PeopleState) -> None:
    data = {"people": to_state(state.people), "ids": dict(state.ids), "digest": state.digest,
            "problems": state.problems, "moved": sorted(state.moved)}  # fmt: skip
    write_json(pod.path(f"{STATE}/state.json"), data, mode=0o600)


@contextlib.contextmanager
def hold_state(pod: Pod) -> Iterator[None]:
    """Hold the state: the service at boot, the periodic one and the command line change it one at a time."""
    directory = pod.path(STATE)
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    fd = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if not locked(fd, LOCK_WAIT_S):
            raise InitError("take over the people", f"another process holds {directory}/lock for {LOCK_WAIT_S:g} s")
        yield
    finally:
        os.close(fd)


def compute_digest(data: bytes) -> str:
    """Return the digest that the state has once this version has taken over, or refused, a file of these bytes."""
    return hashlib.sha256(VERSION.encode() + data).hexdigest()


def take_over(state: PeopleState, data: bytes, taken: Taken) -> PeopleState:
    """Take over the file; one that is refused leaves people and ids as they were."""
    digest = compute_digest(data)
    if digest == state.digest:
        return state
    try:
        people = read.parse(data)
    except InitError as error:
        consequence = (
            f"the {len(state.people.users)} people before stay" if state.people.users else "no person of it is known"
        )
        mistake = one_line(str(error))
        if isinstance(error, ManyErrors):  # a condition of the pod has room for one
            more = len(error.errors) - 1
            mistake = f"{one_line(str(error.errors[0]))}; `minivm people check` tells {more} more"
        return replace(state, digest=digest, problems=(f"{mistake}; {consequence}",))
    settled = settle(people, state.ids, state.people, taken)
    return PeopleState(settled.people, settled.ids, digest, settled.refused, state.moved)


def read_taken(pod: Pod) -> Taken:
    """Return names and numbers of the image's own users and groups."""

    def rows(name: str) -> list[list[str]]:
        return [line.split(":") for line in (pod.text(f"/etc/{name}") or "").splitlines()]

    users, groups = rows("passwd"), rows("group")

    def numbers(entries: list[list[str]]) -> frozenset[int]:
        all_ids = {int(entry[2]) for entry in entries if len(entry) > 2 and entry[2].isdecimal()}
        return frozenset(number for number in all_ids if any(number in ids for ids in IDS))

    names = {entry[0] for entry in users} | {entry[0] for entry in groups}
    return Taken(frozenset(names), numbers(users), numbers(groups))


def publish(pod: Pod, people: PeopleList, now: float) -> None:
    """Write the people with access, and their keys. People without access lose their keys first, then their name.

    A key that cannot be written, on a full disk, is removed: it may be the one before, which was withdrawn.
    """
    homes = pod.setting("MINIVM_HOME", HOMES)
    valid = format_keys(people, now)
    directory = pod.path(KEYS)
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    for path in sorted(directory.iterdir()):
        if path.name not in valid:
            path.unlink()
    failed: Exception | None = None
    for name, text in valid.items():
        try:
            write(directory / name, text.encode(), mode=0o600, owner=(0, 0))
        except (OSError, InitError) as error:
            failed = error
            (directory / name).unlink(missing_ok=True)
    root, shadow = (0, 0), (0, grp.getgrnam("shadow").gr_gid)
    extra = pod.path(EXTRA)
    extra.mkdir(parents=True, exist_ok=True, mode=0o755)
    for name, text in format_databases(people, now, homes).items():
        mode, owner = (0o640, shadow) if name == "shadow" else (0o644, root)
        write(extra / name, text.encode(), mode=mode, owner=owner)
    if failed:
        raise failed


def keep(pod: Pod, now: float) -> tuple[list[str], bool]:
    """Apply the file once; return the problems, and if people can use the pod nevertheless."""
    problems = []
    with hold_state(pod):
        before = state = load(pod)
        try:
            state = take_over(state, read.read_bytes(file_to_read(pod)), read_taken(pod))
        except InitError as error:
            problems.append(f"{error}; mount a ConfigMap or Secret with the key {FILE}; the people before stay")
        if pod.path(f"{STATE}/{DAMAGED}").exists():
            problems.append(f"{STATE}/state.json was damaged: earlier uids are not known; look at {DAMAGED}, remove it")
        try:
            if state != before:
                save(pod, state)  # before any person gets a new uid
        except OSError as error:
            problems.append(f"cannot store the people: {error}; no person is added meanwhile")
            state = replace(state, people=merge_lists(before.people, state.people))
        try:
            publish(pod, state.people, now)
        finally:
            end_sessions(pod, before, state, now)
    problems += state.problems
    # An absent file may come later, and a directory service may know all users.
    has_directory = pod.path(f"{MOUNTS}/{DIRECTORY}").exists()
    return problems, bool(state.people.users) or not state.problems or has_directory


def file_to_read(pod: Pod) -> Path:
    """Return the file to read: the kubelet renews no mounted file of a pod that leaves, so a newer copy counts."""
    latest = pod.path(LATEST_PEOPLE)
    return latest if latest.exists() else pod.path(f"{MOUNT}/{FILE}")


def merge_lists(before: PeopleList, after: PeopleList) -> PeopleList:
    """Return the people of both, with the keys of both and the later word on their access."""
    earlier = {(person.name, person.uid): person for person in before.users}
    users = []
    for person in after.users:
        if old := earlier.get((person.name, person.uid)):
            users.append(replace(old, keys=tuple(key for key in old.keys if key in person.keys), until=person.until))
    return PeopleList(before.groups, tuple(users))


def end_sessions(pod: Pod, before: PeopleState, state: PeopleState, now: float) -> None:
    """On a login pod, end what runs of people without access. Jobs on workers go on.

    A person who is not in the file may have moved to the directory service. The state remembers that, because the
    directory may be away later.
    """
    role = str(read_json(pod.path(PLAN)).get("role", ""))
    if not role.startswith("login") or not directory_answers(pod):
        return
    present = {person.uid for person in state.people.users if has_access(person, now)}
    removed = {uid: name for name, uid in state.ids.items() if uid not in present | state.moved}
    moved: set[int] = set()

    def is_in_directory(uid: int) -> bool:
        with contextlib.suppress(KeyError):
            pwd.getpwuid(uid)
            moved.add(uid)
        return uid in moved

    ended = end_processes(removed, is_in_directory, _newly_without_access(before.people, state.people, now))
    for name in ended:
        print(f"{name} has no access any more: sessions ended", file=sys.stderr)
    known_moved = (state.moved | moved) - present
    if known_moved != state.moved:
        with contextlib.suppress(OSError):
            save(pod, replace(state, moved=frozenset(known_moved)))


def _newly_without_access(before: PeopleList, after: PeopleList, now: float) -> set[int]:
    """Return the uids of people who lost access since the last run; later a look at /proc is enough."""
    removed = {person.uid for person in before.users} - {person.uid for person in after.users}
    return removed | {person.uid for person in after.users if now - JUST_EXPIRED_S < person.until <= now}


def directory_answers(pod: Pod) -> bool:
    """Tell if sssd takes connections, where it is configured: without sssd it is unknown who moved to the directory."""
    if not pod.path("/etc/sssd/sssd.conf").exists():
        return True
    with socket.socket(socket.AF_UNIX) as stream:
        stream.settimeout(1)
        try:
            stream.connect(str(pod.path("/var/lib/sss/pipes/nss")))
        except OSError:
            return False
    return True


def format_problems(problems: Iterable[str]) -> str:
    listed = [*problems]
    more = f"; and {len(listed) - MOST_PROBLEMS} more: `minivm people show`" if len(listed) > MOST_PROBLEMS else ""
    return one_line("; ".join(problem[:LONGEST_PROBLEM] for problem in listed[:MOST_PROBLEMS]) + more)


def format_databases(people: PeopleList, now: float, homes: str) -> dict[str, str]:
    """Return passwd, group and shadow for all people who have access now."""
    gids = {group.name: group.gid for group in people.groups}
    users = [person for person in people.users if has_access(person, now)]
    members: dict[str, list[str]] = {}
    for person in users:
        for name in person.groups:
            members.setdefault(name, []).append(person.name)
    passwd = [
        f"{user.name}:x:{user.uid}:{gids[user.group]}:{user.gecos}:{homes}/{user.name}:{user.shell}\n" for user in users
    ]
    group = [f"{item.name}:x:{item.gid}:{','.join(members.get(item.name, []))}\n" for item in people.groups]
    shadow = [f"{user.name}:*:{CHANGED}:0:99999:7:::\n" for user in users]
    return {"passwd": "".join(passwd), "group": "".join(group), "shadow": "".join(shadow)}


def format_keys(people: PeopleList, now: float) -> dict[str, str]:
    """Return each person's valid keys; a person without any gets an empty file, so that sshd uses no other source."""
    return {
        person.name: "".join(f"{key.line}\n" for key in valid_keys(person, now))
        for person in people.users
        if has_access(person, now)
    }


def end_processes(
    removed: Mapping[int, str], is_known: Callable[[int], bool], suspects: Collection[int] = ()
) -> list[str]:
    """End everything that runs under these uids, except those that `is_known`; return the names.

    A chain of forks, each of which ends at once, may be in no look at /proc. So `suspects` are signalled unseen.
    """
    may_be_ended = {uid for uid in removed if any(uid in ids for ids in IDS)}
    unseen = {uid for uid in may_be_ended.intersection(suspects) if not is_known(uid)}
    running = {uid for uid in may_be_ended & _list_running_uids() if not is_known(uid)}
    for number in (signal.SIGHUP, signal.SIGTERM):
        for uid in running:
            _signal(uid, number)
        deadline = time.monotonic() + PATIENCE
        while running & _list_running_uids() and time.monotonic() < deadline:
            time.sleep(0.1)
    remaining = running | unseen
    for _ in range(KILL_ROUNDS):
        for uid in remaining:
            _signal(uid, signal.SIGKILL)
        remaining = running and running & _list_running_uids()
        if not remaining:
            break
        time.sleep(0.05)
    return sorted(removed[uid] for uid in running - remaining)


def _signal(uid: int, number: signal.Signals) -> None:
    """Signal all processes of the uid in one call, against which no fork can win, with that user's rights alone."""
    run_as(uid, UNUSED, lambda: os.kill(-1, number), unused=UNUSED)


def _list_running_uids() -> set[int]:
    """Return the real and effective uids of all processes that have not ended."""
    uids: set[int] = set()
    for entry in PROC.iterdir():
        if not entry.name.isdecimal():
            continue
        with contextlib.suppress(OSError, ValueError):
            lines = dict(
                line.split(":", 1)
                for line in (entry / "status").read_text(errors="replace").splitlines()
                if ":" in line
            )
            if lines["State"].split()[0] not in ("Z", "X"):
                uids.update(map(int, lines["Uid"].split()))
    return uids


def main(arguments: list[str]) -> int:
    try:
        problems, is_usable = keep(Pod(os.environ), time.time())
    except (InitError, OSError) as error:
        problems, is_usable = [str(error)], False
    if text := format_problems(problems):
        print(text)
        return 0 if "--boot" in arguments and is_usable else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
