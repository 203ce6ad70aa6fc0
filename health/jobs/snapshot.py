"""Service `job-snapshot` of login pods: asks slurmctld for all users of `minivm job`, one request a second at most.

Questions that wait are put together into one command, and an answer serves for some seconds. The kernel names the
asker of a connection. A user gets own jobs in full. The user nobody reads nodes, partitions and the list of all waiting
jobs: what PrivateData hides stays hidden. For all else, and whenever an answer is late, large or dear, the command asks
slurmctld itself, with the user's rights. One user's huge array is put aside alone. In a long queue, which squeue loads
whole for several ids, some questions at a time get a command of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import socket
import struct
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from ground.sockets import notify
from health.jobs.shared import PUBLIC, SOCKET, WAITING, WAITING_JOBS, is_unknown_job
from init.slurm import client
from init.slurm.client import SCONTROL, SQUEUE, SlurmError
from init.slurm.node import PREFIX

FRESH_S = 5.0
FRESH_PUBLIC_S = 15.0  # nodes and partitions, whose answers are large
FRESH_WAITING_S = 60.0  # slurmctld packs its whole queue for it
ASK_S = 10.0
PATIENCE_S = 4.0  # of a question; the command waits a second longer, then asks slurmctld itself
HEAR_S = 4.0
SEND_S = 4.0
# Less than one command a second: each sends one request, `scontrol show nodes` two. More after a pause for a page.
EACH_S, BURST = 1.1, 5
TOGETHER = 500  # ids or users in one command
# squeue loads one id or one user alone, but the whole queue for two. Its CPU time shows how long the queue is.
DEAR_S = 0.5
APART_S = 60.0  # after a command that was dear, late or too long
LARGE = 1 << 20  # bytes of one id's or user's jobs that make a command dear: they alone are put aside, not all others
MOST_APART = 2  # ids or users that wait while each has a command of its own: as many as are served in time
MOST_IDS = 64
MOST_KEPT = 64 << 20  # bytes of kept answers
MOST_OF_A_USER = 256  # people may share an account
MOST_CONNECTIONS = 2048
AT_ONCE, AT_ONCE_OF_A_USER = 64, 2  # answers under way: a reader may be slow
MOST_SHOWN = 16 << 20
MOST_SENT = 4 << 20  # bytes of jobs in a reply
LONGEST = 16 * 1024
ASKER = "asker"  # beside the kinds
NOBODY = 65534
DIRECT = (b'{"direct": true}\n',)
JsonJob = dict[str, Any]
OwnedJob = tuple[int | None, bytes]  # its user, its JSON
TimedJobs = tuple[float, list[OwnedJob]]  # when slurmctld had answered, and its answer
Execute = Callable[[Sequence[str], bool], str]
Batch = dict[str, asyncio.Future[TimedJobs]]


class DirectError(Exception):
    """The service has no answer: the command asks slurmctld itself."""


class TooLongError(DirectError):
    """The answer is larger than this process may hold."""


def _cpu_of_commands() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


class JobSnapshot:
    """Questions by kind, each put to slurmctld with all waiting ones of its kind."""

    def __init__(
        self, execute: Execute, clock: Callable[[], float] = time.monotonic, cpu: Callable[[], float] = _cpu_of_commands
    ) -> None:
        self._execute, self._clock, self._cpu = execute, clock, cpu
        self._waiting: dict[str, Batch] = {}
        self._halves: deque[tuple[str, Batch]] = deque()  # of commands whose answer was too long
        self._kept: dict[tuple[str, str], TimedJobs] = {}
        self._coming: Batch = {}  # of the command under way, which has one kind
        self._coming_kind = ""
        self._served: set[tuple[str, str]] = set()  # kept answers that served another question
        self._woken = asyncio.Event()
        self._tokens, self._filled = float(BURST), clock()
        self._new: Counter[int] = Counter()  # questions of each user that no user had asked before
        self._apart_until = 0.0  # commands of several keys are dear
        self._aside: dict[tuple[str, str], float] = {}  # keys whose own answer is large, and their askers, until then
        self._askers: dict[tuple[str, str], int] = {}  # of the waiting questions

    async def ask(self, uid: int, kind: str, key: str = "") -> TimedJobs:
        now = self._clock()
        answer = self._kept.get((kind, key))
        if answer is not None and now - answer[0] <= _fresh(kind):
            self._served.add((kind, key))
            return answer
        if kind == self._coming_kind and key in self._coming:
            return await asyncio.shield(self._coming[key])
        names = ((kind, key), (ASKER, str(uid))) if kind not in PUBLIC else ()
        if any(self._aside.get(name, now) > now for name in names):
            raise DirectError
        waiting = self._waiting.setdefault(kind, {})
        if key not in waiting:
            is_full = kind not in PUBLIC and self._apart_until > now and (self._new[uid] or len(waiting) >= MOST_APART)
            if is_full or self._new[uid] >= MOST_IDS:
                if not waiting:
                    del self._waiting[kind]
                raise DirectError
            self._new[uid] += 1
            waiting[key] = asyncio.get_running_loop().create_future()
            waiting[key].add_done_callback(lambda _: self._forget(uid))
            self._askers[kind, key] = uid
            self._woken.set()
        return await asyncio.shield(waiting[key])

    def _put_aside(self, kind: str, key: str) -> None:
        """Let the key, and its asker's further ones, be asked directly for a while."""
        until = self._clock() + APART_S
        self._aside[kind, key] = until
        if (uid := self._askers.get((kind, key))) is not None:
            self._aside[ASKER, str(uid)] = until

    def _forget(self, uid: int) -> None:
        self._new[uid] -= 1
        if not self._new[uid]:
            del self._new[uid]

    async def work(self) -> None:
        """Answer the kinds in turn, forever."""
        is_half = False
        while True:
            while not self._waiting and not self._halves:
                self._woken.clear()
                await self._woken.wait()
            await self._wait_for_token()
            is_half = bool(self._halves) and (not self._waiting or not is_half)
            if is_half:
                await self._answer(*self._halves.popleft())
                continue
            kind = next(iter(self._waiting))
            waiting = self._waiting.pop(kind)
            together = 1 if kind not in PUBLIC and self._apart_until > self._clock() else TOGETHER
            batch = dict(list(waiting.items())[:together])
            if rest := {key: waiting[key] for key in waiting if key not in batch}:
                self._waiting[kind] = rest
            # Keys that are asked for often are read anew together: one command serves them for the same seconds.
            served = [key for each, key in self._served if each == kind and key not in {*batch, *rest}]
            for key in served[: TOGETHER - len(batch)] if together > 1 else ():
                batch[key] = asyncio.get_running_loop().create_future()
            self._coming_kind, self._coming = kind, batch
            await self._answer(kind, batch)
            self._coming = {}

    async def _wait_for_token(self) -> None:
        while True:
            now = self._clock()
            self._tokens = min(float(BURST), self._tokens + (now - self._filled) / EACH_S)
            self._filled = now
            if self._tokens >= 1 - 1e-9:  # a wait for exactly the rest may end a rounding error short
                self._tokens -= 1
                return
            await asyncio.sleep((1 - self._tokens) * EACH_S)

    async def _answer(self, kind: str, batch: Batch) -> None:
        used = self._cpu()
        self._served.difference_update((kind, key) for key in batch)
        try:
            if len(batch) > 1 and self._apart_until > self._clock():
                raise DirectError
            answers = await asyncio.to_thread(self._read, kind, list(batch))
        except Exception as error:  # a defect must not end the service
            self._fail(kind, batch, error)
            return
        now = self._clock()
        if kind not in PUBLIC and self._cpu() - used > DEAR_S:
            sizes = {key: sum(len(text) for _, text in answers[key]) for key in batch}
            large = [key for key in batch if len(batch) == 1 or sizes[key] > LARGE]
            for key in large:
                self._put_aside(kind, key)
            if not large:  # the queue is long
                self._apart_until = now + APART_S
        for key, future in batch.items():
            self._askers.pop((kind, key), None)
            self._kept.pop((kind, key), None)
            self._kept[kind, key] = now, answers[key]  # also an empty one: the command takes it for no proof of absence
            future.set_result((now, answers[key]))
        self._drop(now)

    def _fail(self, kind: str, batch: Batch, error: Exception) -> None:
        """Ask for fewer keys next where an answer was too long; else give the error to the questions."""
        if isinstance(error, TooLongError) and len(batch) > 1:
            keys = list(batch)
            middle = len(keys) // 2
            self._halves += [(kind, {key: batch[key] for key in half}) for half in (keys[:middle], keys[middle:])]
            return
        if isinstance(error, TooLongError):
            self._put_aside(kind, next(iter(batch)))
        elif isinstance(error, SlurmError) and error.late and len(batch) > 1:
            self._apart_until = self._clock() + APART_S
            error = DirectError()
        for key, future in batch.items():
            self._askers.pop((kind, key), None)
            future.set_exception(error)
            future.exception()  # its asker may have gone

    def _drop(self, now: float) -> None:
        """Forget old answers, and the oldest ones beyond MOST_KEPT bytes."""
        self._aside = {name: until for name, until in self._aside.items() if until > now}
        fresh, room = dict[tuple[str, str], TimedJobs](), MOST_KEPT
        for name, (at, jobs) in reversed(self._kept.items()):
            room -= 1000 + sum(len(text) for _, text in jobs)
            if room < 0:
                break
            if now - at <= _fresh(name[0]):
                fresh[name] = at, jobs
        self._kept = dict(reversed(fresh.items()))
        self._served &= self._kept.keys()

    def _read(self, kind: str, keys: Sequence[str]) -> dict[str, list[OwnedJob]]:
        """Ask slurmctld, and encode the answer: this runs in a thread, and the loop only sends."""
        if kind in PUBLIC:
            argv = WAITING_JOBS if kind == WAITING else (SCONTROL, "--json", "show", kind)
            text = self._execute(argv, True)
            return {keys[0]: [(None, json.dumps({"text": text}).encode()[1:] + b"\n")]}
        option = f"--{'jobs' if kind == 'jobs' else 'users'}={','.join(keys)}"
        try:
            # Without --local squeue first asks slurmctld for the federation: a second request.
            jobs = json.loads(self._execute((SQUEUE, "--local", "--json", "--states=all", option), False))["jobs"]
        except SlurmError as error:
            if not is_unknown_job(error):
                raise
            jobs = []
        except (ValueError, KeyError, TypeError) as error:
            raise DirectError("squeue gave no list of jobs") from error
        by_key: dict[str, list[OwnedJob]] = {key: [] for key in keys}
        for job in jobs:
            owner = _number(job.get("user_id"))
            names = [name for name in (list_ids(job) if kind == "jobs" else {str(owner)}) if name in by_key]
            if names:
                shown = json.dumps(drop_notes(job)).encode()
                for name in names:
                    by_key[name].append((owner, shown))
        return by_key

    async def reply(self, uid: int, request: Any) -> Sequence[bytes]:
        """Answer one request of a user, in the parts of a line of JSON."""
        kind = request.get("ask") if isinstance(request, dict) else None
        try:
            if kind in PUBLIC:
                at, texts = await self.ask(uid, str(kind))
                return [self._age(at), *(text for _, text in texts)]
            if kind == "mine":
                at, jobs = await self.ask(uid, "users", str(uid))
                return line(jobs, uid, self._age(at))
            ids = request.get("ids") if kind == "jobs" else None
            if not isinstance(ids, list) or not 0 < len(ids) <= MOST_IDS or not all(map(_is_id, ids)):
                return (b'{"why": "the job snapshot does not understand the request"}\n',)
            answers = await asyncio.gather(*(self.ask(uid, "jobs", id_) for id_ in dict.fromkeys(ids)))
            oldest = min(at for at, _ in answers)
            return line([job for _, jobs in answers for job in jobs], uid, self._age(oldest))
        except DirectError:
            return DIRECT
        except SlurmError as error:
            return (json.dumps({"why": error.why}).encode() + b"\n",)

    def _age(self, at: float) -> bytes:
        """Begin a reply with the seconds since slurmctld answered."""
        return b'{"age": %.1f, ' % max(0.0, self._clock() - at)


def _fresh(kind: str) -> float:
    if kind == WAITING:
        return FRESH_WAITING_S
    return FRESH_PUBLIC_S if kind in PUBLIC else FRESH_S


def line(jobs: Iterable[OwnedJob], uid: int, head: bytes = b"{") -> Sequence[bytes]:
    """Return the reply of own jobs; of another user's job not even that it exists."""
    once = list(dict.fromkeys(jobs))
    if any(owner != uid for owner, _ in once) or sum(len(text) for _, text in once) > MOST_SENT:
        return DIRECT
    parts = [part for _, text in once for part in (b", ", text)]
    return [head, b'"jobs": [', *parts[1:], b"]}\n"]


def _is_id(text: object) -> bool:
    return isinstance(text, str) and text.isascii() and text.isdigit() and len(text) <= 10


def _number(value: object) -> int | None:
    """Return a number of Slurm's JSON: 5, or {"set": true, "number": 5}."""
    if isinstance(value, dict):
        value = value.get("number") if value.get("set") else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def list_ids(job: JsonJob) -> set[str]:
    """Return the ids that mean this job: its own, its array's, its heterogeneous job's."""
    return {str(_number(job.get(key))) for key in ("job_id", "array_job_id", "het_job_id")}


def drop_notes(job: JsonJob) -> JsonJob:
    """Leave out a comment that an operator wrote for operators."""
    return job if str(job.get("admin_comment", "")).startswith(PREFIX) else {**job, "admin_comment": ""}


def execute(argv: Sequence[str], as_nobody: bool) -> str:
    """Run one of Slurm's clients as root or as the user `nobody`."""
    controller = client.address(os.environ)
    rights: dict[str, Any] = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if as_nobody else {}
    try:
        return client.run(argv, controller, within=ASK_S, most=MOST_SHOWN, **rights)
    except SlurmError as error:
        if error.is_too_long:
            raise TooLongError from None
        raise


class Door:
    """The socket: so many connections of a user, so many answers at a time, and a deadline for each wait."""

    def __init__(self, snapshot: JobSnapshot) -> None:
        self._snapshot = snapshot
        self._users: Counter[int] = Counter()
        self._sending: dict[int, asyncio.Semaphore] = {}
        self._room = asyncio.Semaphore(AT_ONCE)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        _, uid, _ = struct.unpack("3i", peer)
        if self._users[uid] >= MOST_OF_A_USER or self._users.total() >= MOST_CONNECTIONS:
            writer.transport.abort()  # the command asks slurmctld itself
            return
        writer.transport.set_write_buffer_limits(0)  # drain() returns when all is sent
        self._users[uid] += 1
        try:
            async with asyncio.timeout(HEAR_S):
                request = json.loads(await reader.readline())
            try:
                async with asyncio.timeout(PATIENCE_S):
                    parts = await self._snapshot.reply(uid, request)
            except TimeoutError:
                parts = DIRECT
            sending = self._sending.setdefault(uid, asyncio.Semaphore(AT_ONCE_OF_A_USER))
            async with asyncio.timeout(SEND_S), sending, self._room:
                writer.write(parts[0] if len(parts) == 1 else b"".join(parts))
                await writer.drain()
        except (OSError, ValueError, RecursionError):
            pass  # the asker has gone, is slow, or speaks no JSON
        finally:
            self._users[uid] -= 1
            if not self._users[uid]:
                del self._users[uid]
                self._sending.pop(uid, None)
            writer.transport.abort() if writer.transport.get_write_buffer_size() else writer.close()


async def serve(path: Path = SOCKET, ask: Execute = execute, clock: Callable[[], float] = time.monotonic) -> None:
    snapshot = JobSnapshot(ask, clock)
    mask = os.umask(0o111)
    server = await asyncio.start_unix_server(Door(snapshot).serve, path, limit=LONGEST, backlog=1024)
    os.umask(mask)
    notify("READY=1")
    async with server:
        await snapshot.work()


if __name__ == "__main__":
    SOCKET.unlink(missing_ok=True)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve())
