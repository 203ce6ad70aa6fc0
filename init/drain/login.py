"""Drain of a login pod: refuse new logins, warn the users, wait, then end their `srun` and `salloc`.

`drain` runs one of two ways, then `end_clients`:

- `end_sessions`, by default: refuse logins with /run/nologin, warn the terminals, and wait for the sessions.
- `Stay`, for a pod that keeps its sessions while another replaces it: wait up to the pod's grace period, follow the
  pod's own object and people.yaml (`PeopleReader`), and name this pod in people's homes (`Records`).

`end_clients` is needed because an srun or salloc that is killed with the pod would leave its nodes allocated.

Process names are no proof, since any user can choose them: a session is a child of root's sshd, and messages go to
terminals only (`find_sessions`, `find_keepers`, `message_terminals`).
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import re
import signal
import stat
import subprocess
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ground.commands import ran
from ground.errors import counted
from ground.files import write_whole
from init.drain.deadline import (
    PROC,
    Deadline,
    budget,
    compute_budget_of_pid_1,
    is_own,
    list_own_processes,
    read_status,
    report,
    seconds,
)
from init.errors import InitError
from init.places import LATEST_PEOPLE, PEOPLE_FILE, pod_name
from init.pod.api_server import ApiServer

MESSAGE = "This login pod is about to stop. Batch jobs are not affected. Log in again for a new pod.\n"
LOOK_EVERY = 0.5
# Part of the budget for interactive jobs to release their nodes.
RESERVE = 5.0
CLIENTS = ("srun", "salloc")
ADVICE = "Save your work and log out; srun and salloc end with it."


def drain(controller: str, deadline: Deadline) -> None:
    reserve = min(RESERVE, deadline.left / 4)
    if is_wanted(os.environ):
        Stay(deadline, reserve, pod_name(os.environ), os.environ.get("MINIVM_POD_IP", "")).run()
    else:
        end_sessions(deadline, reserve)
    end_clients(deadline)


def end_sessions(deadline: Deadline, reserve: float) -> None:
    """Refuse new logins, warn the users, and wait for their sessions until `reserve` is left."""
    try:
        NOLOGIN.write_text(MESSAGE)
    except OSError as error:  # a user may have filled the disk: the sessions still get their time
        report(f"cannot refuse new logins: {error.strerror}")
    sessions = find_sessions()
    if not sessions:
        report("no sessions")
        return
    count = len(message_terminals(terminals(sessions), f"this pod stops in {deadline.left:.0f} s. {ADVICE}"))
    report(f"warned {counted(count, 'terminal')} of {counted(len(sessions), 'session')}")
    # At the end of the budget sshd's own stop hangs up on the remaining sessions.
    while (sessions := find_sessions()) and deadline.left > reserve:
        deadline.pause(min(LOOK_EVERY, deadline.left - reserve))
    report(f"{counted(len(sessions), 'session is', 'sessions are')} left" if sessions else "all sessions have ended")


def resume(controller: str) -> None:
    NOLOGIN.unlink(missing_ok=True)
    forget()
    report("logins are open")


def end_clients(deadline: Deadline) -> None:
    """End every srun and salloc, also those in screen or tmux.

    Killed with the pod, they would not notify slurmctld, and their nodes would stay allocated. On SIGHUP, as after a
    lost terminal, they print what they do and end their jobs.
    """
    clients = find_clients()
    if not clients:
        return
    # A process started to survive its terminal ignores SIGHUP, so send SIGTERM next.
    for number, limit in ((signal.SIGHUP, deadline.left / 2), (signal.SIGTERM, 1.0)):
        for pid in clients:
            signal_client(pid, number)
        while (clients := find_clients()) and deadline.left > limit:
            deadline.pause(0.1)
    report(f"{len(clients)} srun and salloc are left" if clients else "every srun and salloc has ended its job")


def find_clients() -> list[int]:
    """Find srun and salloc by name, which is enough: another process of that name ends with the pod anyway."""
    return list_own_processes(_is_client)


def _is_client(status: Mapping[str, str]) -> bool:
    return status["Uid"].split()[0] != "0" and status["Name"] in CLIENTS


def signal_client(pid: int, number: int) -> None:
    """Signal by a pidfd: the number may belong to another process by now, even one of root."""
    with contextlib.suppress(OSError):
        descriptor = os.pidfd_open(pid)
        try:
            if is_own(PROC / str(pid), _is_client):
                signal.pidfd_send_signal(descriptor, number)
        finally:
            os.close(descriptor)


# The stay: a login pod that is replaced keeps its people, while new logins go to the new pod.
#
# A person stays for an ssh session, tmux or screen; a background process keeps no pod. All services run on. The stay
# ends with the last person, or with the pod's grace period, which the pod reads from its own object, because Kubernetes
# may shorten it. A person with tmux or screen may log in here again, and finds this pod by a file in the home, written
# with that person's rights, which only that person's login shows.
#
# The kubelet renews no mounted file of a pod that leaves, so the pod reads people.yaml from the API server: a person
# who loses access loses the sessions here too.


NOLOGIN = Path("/run/nologin")
# Users whom /etc/pam.d/sshd admits in spite of NOLOGIN.
RETURNING = Path("/run/minivm/may-return")
REFUSAL = "This login pod is being replaced. Log in again for a new pod.\n"
ACCOUNT = Path("/mnt/minivm/secrets/api")
# Until no proxy sends new connections here: earlier logins are still served.
SETTLE = 5.0
STAY_LOOK_EVERY = 2.0
ASK_EVERY = 10.0
ANSWER = 10.0  # of the API server, at most
NOTICES = (3600.0, 600.0, 60.0)  # seconds before the end
WRITERS, PATIENCE = 8, 10.0
# The object of people.yaml in this namespace, such as `configmaps/slurm-people`; empty without people.
PEOPLE = "MINIVM_PEOPLE_OBJECT"
NAME = re.compile(r"[^\s:#][^\n:]{0,255}")
# $1 the home, $2 the pod, $3 the record; without a record the file goes. Runs with the person's rights alone.
RECORD = """
umask 077
cd -- "$1" || exit 1
if [ -z "$3" ]; then rm -f ".minivm/login-pods/$2"; exit; fi
mkdir -p .minivm/login-pods && printf '%s\\n' "$3" > ".minivm/login-pods/.$2" &&
    mv -f ".minivm/login-pods/.$2" ".minivm/login-pods/$2"
"""


@dataclass(frozen=True, slots=True)
class PasswdEntry:
    name: str
    uid: int
    gid: int
    home: str


def is_wanted(env: Mapping[str, str]) -> bool:
    return env.get("MINIVM_KEEP_SESSIONS", "") == "yes"


def forget() -> None:
    RETURNING.unlink(missing_ok=True)
    Path(LATEST_PEOPLE).unlink(missing_ok=True)


class Stay:
    """One stay, from the drain's start to its end."""

    def __init__(self, deadline: Deadline, reserve: float, pod: str, address: str) -> None:
        self.deadline, self.reserve, self.pod = deadline, reserve, pod
        self.grace = float("inf")
        self.reason = "is being replaced"
        self.asked_at = float("-inf")
        self.warned: set[Path] = set()  # terminals that have the last notice
        self.returning: str | None = None  # names of people who may log in; None: all may
        self.records = Records(pod, address)
        self.people = PeopleReader(os.environ.get(PEOPLE, ""))
        self._plan_notices()

    def run(self) -> None:
        settled = time.monotonic() + SETTLE
        while self.left:
            self._update_end()
            self.people.read(self.left)
            sessions, keepers = find_sessions(), find_keepers()
            is_settled = time.monotonic() >= settled
            if is_settled and not (sessions or keepers) and self.returning == "":
                break  # no login succeeded meanwhile
            if is_settled:
                self._close(keepers)
            windows = (DEV / f"pts/{number}" for numbers in keepers.values() for number in numbers)
            self._warn([*terminals(sessions), *windows])
            self.records.follow(keepers, f"{self.until:.0f}")
            self._report({*keepers, *_owners(sessions)})
            self.deadline.pause(min(STAY_LOOK_EVERY, self.left))
        sessions_left = len(find_sessions())
        report(
            f"{counted(sessions_left, 'session is', 'sessions are')} left"
            if sessions_left
            else "all sessions have ended"
        )
        self.records.end()

    @property
    def left(self) -> float:
        return max(0.0, self.deadline.left - self.reserve)

    def _report(self, people: Collection[int]) -> None:
        if people:
            count = "1 person stays" if len(people) == 1 else f"{len(people)} people stay"
            unread = f"; {self.people.problem}" if self.people.problem else ""
            report_change(f"{count} until {clock(self.until)}: this pod {self.reason}{unread}")

    def _plan_notices(self) -> None:
        """Compute the end in wall-clock time once: computed at each look it could flicker by a minute."""
        self.until = time.time() + self.left
        self.notices = [before_end for before_end in NOTICES if before_end < self.left]

    def _update_end(self) -> None:
        """Learn from Kubernetes if the pod must end earlier, and if because of its machine."""
        if not may_ask(self.asked_at, self.left):
            return
        self.asked_at = time.monotonic()
        try:
            item = ApiServer("see when this pod must end", ACCOUNT).ask("GET", path_of(f"pods/{self.pod}"))
            metadata = item.get("metadata") or {}
            grace = metadata.get("deletionGracePeriodSeconds")
            reasons = _disruption_reasons(item)
        except (InitError, OSError, AttributeError) as error:
            log_change(f"{error}")
            return
        is_deleted = bool(metadata.get("deletionTimestamp"))
        if reasons:
            self.reason = "leaves its machine, which is being emptied"
        if not is_deleted:
            self.reason = "must stop"
        # The kubelet's own ends leave the object's grace period as it is: a probe that failed, an eviction, a shutdown.
        if "TerminationByKubelet" in reasons or not is_deleted:
            short = seconds(os.environ, "MINIVM_SHORT_GRACE_SECONDS", float("inf"))
            grace = min(short, grace) if isinstance(grace, int) else short
        # A full grace period is known already; `kubectl delete --grace-period` and evictions give less.
        full = seconds(os.environ, "MINIVM_GRACE_SECONDS", float("inf"))
        if isinstance(grace, int | float) and grace < min(self.grace, full):
            self._shorten(grace)

    def _shorten(self, grace: float) -> None:
        """End with this grace period, and warn all terminals of the new end."""
        self.grace = grace
        allowed = budget({"MINIVM_GRACE_SECONDS": str(max(1.0, grace - ASK_EVERY))}, compute_budget_of_pid_1)
        self.deadline.shorten(allowed)
        self.reserve = min(self.reserve, allowed / 4)
        self.warned.clear()
        self._plan_notices()

    def _close(self, keepers: Collection[int]) -> None:
        """Refuse new logins, but for people whose tmux or screen is here."""
        names = "".join(f"{person.name}\n" for person in self.records.people(keepers))
        try:
            if names != self.returning:
                write_whole(RETURNING, names.encode(), mode=0o644)
            if self.returning is None:
                NOLOGIN.write_text(REFUSAL)
        except OSError as error:  # a user may have filled the disk: the sessions still get their time
            log_change(f"cannot refuse new logins: {error.strerror}")
        self.returning = names

    def _warn(self, paths: Collection[Path]) -> None:
        """Warn each new terminal once, and all of them again when a notice is due."""
        if self.notices and self.left <= self.notices[0]:
            self.warned.clear()
            self.notices = [before_end for before_end in self.notices if before_end < self.left]
        self.warned &= set(paths)
        text = (
            f"login pod {self.pod} {self.reason}. You may stay until {clock(self.until)} (for {duration(self.left)}). "
            "New logins go to another pod. Save your work and log out; srun, salloc and tmux end with this pod."
        )
        self.warned.update(message_terminals(sorted(set(paths) - self.warned), text))


def _disruption_reasons(pod: Mapping[str, Any]) -> set[object]:
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return {
        condition.get("reason")
        for condition in conditions
        if condition.get("type") == "DisruptionTarget" and condition.get("status") == "True"
    }


class PeopleReader:
    """Copy the cluster's people.yaml to where the service `people` looks first, each time it changes.

    Without the object or its key nothing changes, as with an absent file; the status says so: a person who lost access
    keeps the sessions here then.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.asked_at = float("-inf")
        self.digest = b""
        self.problem = ""

    def read(self, left: float) -> None:
        if not self.name or not may_ask(self.asked_at, left):
            return
        self.asked_at = time.monotonic()
        before = self.problem
        try:
            item = ApiServer(f"read the people of {self.name}", ACCOUNT).ask("GET", path_of(self.name))
            text = people_text(self.name, item)
            digest = hashlib.sha256(text or b"").digest()
            if text is not None and digest != self.digest:
                write_whole(Path(LATEST_PEOPLE), text, mode=0o600)
                self.digest = digest
            self.problem = "" if text is not None else f"{self.name} has no {PEOPLE_FILE}"
        except (InitError, OSError, AttributeError, TypeError, ValueError) as error:
            self.problem = str(error)
        if self.problem != before:
            print(self.problem or f"{self.name} is read again", flush=True)


def may_ask(asked_at: float, left: float) -> bool:
    """Tell if it is time to ask the API server again, and time is left for its answer."""
    return time.monotonic() >= asked_at + ASK_EVERY and left >= ANSWER and (ACCOUNT / "token").exists()


def path_of(name: str) -> str:
    return f"/api/v1/namespaces/{os.environ.get('MINIVM_POD_NAMESPACE', '')}/{name}"


def people_text(name: str, item: Mapping[str, Any]) -> bytes | None:
    """Return people.yaml of a ConfigMap or Secret; None without that key."""
    text, encoded = (item.get("data") or {}).get(PEOPLE_FILE), (item.get("binaryData") or {}).get(PEOPLE_FILE)
    if name.startswith("secrets/"):
        text, encoded = None, text
    if encoded is not None:
        return base64.b64decode(encoded, validate=True)
    return None if text is None else text.encode()


class Records:
    """Files in people's homes that name this pod: each is written by a short-lived child with that person's rights.

    Nothing waits for these children: a home's file server may hang.
    """

    def __init__(self, pod: str, address: str) -> None:
        self.pod, self.address = pod, address
        self.known: dict[int, PasswdEntry] = {}
        self.asked_at = float("-inf")
        self.tried: set[int] = set()
        self.written: dict[int, str] = {}
        self.writers: dict[subprocess.Popen[bytes], float] = {}

    def people(self, uids: Collection[int]) -> list[PasswdEntry]:
        """Look people up, with a limit: a directory may not answer."""
        # A user may have thousands of user ids without a name: look up each before any is looked up again.
        batch = sorted(set(uids) - set(self.known) - self.tried)[:256]
        if batch:
            self.tried.update(batch)
            self.asked_at = time.monotonic()
            with contextlib.suppress(subprocess.TimeoutExpired, OSError):
                self._learn(ran(["/usr/bin/getent", "passwd", *map(str, batch)], within=5).stdout)
        elif time.monotonic() >= self.asked_at + ASK_EVERY:
            self.tried.clear()
        return [self.known[uid] for uid in sorted(uids) if uid in self.known]

    def _learn(self, text: str) -> None:
        for line in text.splitlines():
            with contextlib.suppress(ValueError):
                name, _, uid, gid, _, home, _ = line.split(":")
                if NAME.fullmatch(name) and home.startswith("/") and int(uid):
                    self.known[int(uid)] = PasswdEntry(name, int(uid), int(gid), home)

    def follow(self, uids: Collection[int], until: str) -> None:
        """Write the record of each of these people, and remove all other records."""
        notices = {person.uid: f"{until} {self.address}" for person in self.people(uids)}
        self._reap()
        for uid in [uid for uid in self.written if uid not in notices]:
            self._start(uid, "")
        for uid, text in notices.items():
            if self.written.get(uid) != text:
                self._start(uid, text)

    def end(self) -> None:
        """Remove the files, for a moment only: a file that stays names its own end."""
        limit = time.monotonic() + 1.0
        while (self.written or self.writers) and time.monotonic() < limit:
            self.follow((), "")
            time.sleep(0.05)
        for writer in self.writers:
            writer.kill()

    def _start(self, uid: int, text: str) -> None:
        if len(self.writers) >= WRITERS or not self.address:
            return
        person = self.known[uid]
        command = ["/bin/sh", "-c", RECORD, "sh", person.home, self.pod, text]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            child = subprocess.Popen(
                command, user=person.uid, group=person.gid, extra_groups=[], cwd="/", env={"PATH": "/usr/bin:/bin"},
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
            self.writers[child] = time.monotonic() + PATIENCE
        if text:
            self.written[uid] = text
        else:
            self.written.pop(uid, None)

    def _reap(self) -> None:
        for child, limit in list(self.writers.items()):
            if child.poll() is not None:
                del self.writers[child]
            elif time.monotonic() > limit:
                child.kill()  # in vain while its file server hangs; then it keeps its place


def _owners(sessions: Collection[int]) -> set[int]:
    owners = set()
    for pid in sessions:
        with contextlib.suppress(OSError, ValueError, KeyError, IndexError):
            owners.add(int(read_status(PROC / str(pid))["Uid"].split()[0]))
    return owners


_last = {"report": "", "log": ""}


def report_change(text: str) -> None:
    """Report a text unless it was the last report."""
    if _last["report"] != text:
        _last["report"] = text
        report(text)


def log_change(text: str) -> None:
    """Log an error once; the status still says how many people stay."""
    if _last["log"] != text:
        _last["log"] = text
        print(text, flush=True)


def clock(moment: float) -> str:
    near = moment - time.time() < 20 * 3600
    return time.strftime("%H:%M %Z" if near else "%a %H:%M %Z", time.localtime(moment))


def duration(length_s: float) -> str:
    minutes = round(length_s / 60)
    if length_s < 90:
        return f"{length_s:.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


# Sessions, and tmux or screen, as the kernel shows them.


DEV = Path("/dev")
PROGRAMS = ("/usr/sbin/sshd", "/usr/lib/openssh/sshd-session")
# `sshd-session: NAME@pts/3,pts/4`; a session without a terminal (scp, an editor) has `@notty`. `[priv]` is its monitor.
_TITLE = re.compile(rb"sshd(?:-session)?: .+@([^@\s]+)")
_TERMINAL = re.compile(r"pts/[0-9]+")
# The servers of tmux and screen by the kernel's name of their processes. Another process that a user gives
# this name keeps the pod until its limit, as an idle tmux does.
KEEPERS = ("tmux: server", "screen")
MAJORS = range(136, 144)  # the kernel's device numbers of /dev/pts


def find_sessions() -> dict[int, str]:
    """Return the sshd processes that serve one user each, with the terminals in their titles."""
    sessions = {}
    for directory in PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            title = _TITLE.fullmatch((directory / "cmdline").read_bytes().partition(b"\0")[0].rstrip())
            if title and (_is_sshd(directory) or _is_sshd(PROC / read_status(directory)["PPid"])):
                sessions[int(directory.name)] = title[1].decode(errors="replace")
    return sessions


def _is_sshd(directory: Path) -> bool:
    """Tell if it is root's own sshd.

    A session's process runs as its user, and its program is not readable without SYS_PTRACE: check its parent, which is
    root's and has no other children.
    """
    if set(read_status(directory)["Uid"].split()) != {"0"}:
        return False
    try:
        return str((directory / "exe").readlink()) in PROGRAMS
    except PermissionError:
        return True  # a process that has been another user hides its program, even from root without SYS_PTRACE


def terminals(sessions: Mapping[int, str]) -> list[Path]:
    return [DEV / name for names in sessions.values() for name in names.split(",") if _TERMINAL.fullmatch(name)]


def find_keepers() -> dict[int, set[int]]:
    """Return the user ids that run tmux or screen here, with the numbers of the terminals of their windows."""
    keepers: dict[int, int] = {}
    windows: list[tuple[int, int, int]] = []
    for directory in PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, KeyError, IndexError):
            status = read_status(directory)
            uid = int(status["Uid"].split()[0])
            if not uid or status["State"].startswith("Z"):
                continue
            if status["Name"] in KEEPERS:
                keepers[int(directory.name)] = uid
            # After the name, which may hold anything: state, parent, group, session, terminal.
            fields = (directory / "stat").read_text(errors="replace").rpartition(")")[2].split()
            if (terminal := int(fields[4])) and terminal >> 8 & 0xFFF in MAJORS:
                number = (terminal & 0xFF | terminal >> 12 & 0xFFF00) + 256 * ((terminal >> 8 & 0xFFF) - MAJORS.start)
                windows.append((int(status["PPid"]), uid, number))
    keepers_by_user: dict[int, set[int]] = {uid: set() for uid in keepers.values()}
    for parent, uid, number in windows:
        if keepers.get(parent) == uid:
            keepers_by_user[uid].add(number)
    return keepers_by_user


def message_terminals(paths: Iterable[Path], text: str) -> list[Path]:
    """Write to terminals like wall, which needs a utmp that containers lack; return those that took the message.

    A stopped terminal must not block the drain.
    """
    message = f"\r\n*** minivm: {text} ***\r\n".encode()
    reached = []
    for path in paths:
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if stat.S_ISCHR(os.fstat(descriptor).st_mode) and os.isatty(descriptor):
                    os.write(descriptor, message)
                    reached.append(path)
            finally:
                os.close(descriptor)
    return reached
