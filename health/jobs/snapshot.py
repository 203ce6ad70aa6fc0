"""Service `job-snapshot` of login pods: asks slurmctld for all users of `minivm job`, one request a second at most.

Questions that wait are put together into one command, and an answer serves for some seconds. The kernel names the
asker of a connection. A user gets his own jobs in full; for another user's job the command asks slurmctld itself, with
the user's rights. Nodes, partitions, reservations and licences are read as nobody: what PrivateData hides stays hidden.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pwd
import socket
import struct
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from ground.sockets import notify
from health.jobs.shared import PUBLIC, SOCKET
from init.slurm import client
from init.slurm.client import SCONTROL, SQUEUE, SlurmError
from init.slurm.node import PREFIX

FRESH_S = 5.0
FRESH_PUBLIC_S = 15.0  # nodes, partitions: of each the answer is large
ASK_S = 10.0
PATIENCE_S = 20.0  # of a question for its turn
HEAR_S = 5.0
SEND_S = 10.0
# One command in two seconds, since squeue and scontrol send two requests each; more after a pause: a page takes three.
EACH_S, BURST = 2.0, 5
TOGETHER = 500  # ids or users in one command
MOST_IDS = 64
MOST_KEPT = 10_000
MOST_OF_A_USER = 256
AT_ONCE, AT_ONCE_OF_A_USER = 64, 2  # answers under way: a reader may be slow
MOST_SHOWN = 64 << 20
LONGEST = 16 * 1024
NOBODY = 65534
UNKNOWN_JOB = ("Invalid job id", "invalid job id")
JsonJob = dict[str, Any]
Execute = Callable[[Sequence[str], bool], str]


class JobSnapshot:
    """Questions by kind, each put to slurmctld with all others of its kind that wait."""

    def __init__(self, execute: Execute, clock: Callable[[], float] = time.monotonic) -> None:
        self._execute, self._clock = execute, clock
        self._waiting: dict[str, dict[str, asyncio.Future[Any]]] = {}
        self._kept: dict[tuple[str, str], tuple[float, Any]] = {}
        self._woken = asyncio.Event()
        self._tokens, self._filled = float(BURST), clock()
        self._new: Counter[int] = Counter()  # questions of each user that nobody had asked before
        self._turns: dict[int, asyncio.Lock] = {}

    async def ask(self, uid: int, kind: str, key: str = "") -> Any:
        kept = self._kept.get((kind, key))
        if kept is not None and self._clock() - kept[0] <= (FRESH_PUBLIC_S if kind in PUBLIC else FRESH_S):
            return kept[1]
        waiting = self._waiting.setdefault(kind, {})
        if key not in waiting:
            if self._new[uid] >= MOST_IDS:
                raise SlurmError("ask slurmctld", f"you have {MOST_IDS} questions under way; try again")
            self._new[uid] += 1
            waiting[key] = asyncio.get_running_loop().create_future()
            waiting[key].add_done_callback(lambda _: self._new.subtract([uid]))
            self._woken.set()
        return await asyncio.shield(waiting[key])

    async def turn(self, uid: int) -> None:
        """Wait until the user may ask slurmctld directly; the users that wait take turns."""
        async with self._turns.setdefault(uid, asyncio.Lock()):
            await self.ask(uid, "turn", str(uid))

    async def work(self) -> None:
        """Answer the kinds in turn, forever."""
        while True:
            while not self._waiting:
                self._woken.clear()
                await self._woken.wait()
            await self._wait_for_token()
            kind = next(iter(self._waiting))
            waiting = self._waiting.pop(kind)
            batch = dict(list(waiting.items())[: 1 if kind == "turn" else TOGETHER])
            if left := {key: waiting[key] for key in waiting if key not in batch}:
                self._waiting[kind] = left
            await self._answer(kind, batch)

    async def _wait_for_token(self) -> None:
        while True:
            now = self._clock()
            self._tokens = min(float(BURST), self._tokens + (now - self._filled) / EACH_S)
            self._filled = now
            if self._tokens >= 1:
                self._tokens -= 1
                return
            await asyncio.sleep((1 - self._tokens) * EACH_S)

    async def _answer(self, kind: str, batch: dict[str, asyncio.Future[Any]]) -> None:
        try:
            found = await asyncio.to_thread(self._read, kind, list(batch))
        except Exception as error:  # a defect must not end the service
            for future in batch.values():
                future.set_exception(error)
                future.exception()  # its asker may have gone
            return
        now = self._clock()
        if len(self._kept) > MOST_KEPT:
            self._kept = {name: pair for name, pair in self._kept.items() if now - pair[0] <= FRESH_PUBLIC_S}
        for key, future in batch.items():
            if kind != "turn":
                self._kept[kind, key] = now, found[key]
            future.set_result(found[key])

    def _read(self, kind: str, keys: Sequence[str]) -> dict[str, Any]:
        if kind == "turn":
            return dict.fromkeys(keys)
        if kind in PUBLIC:
            return {keys[0]: self._execute((SCONTROL, "--json", "show", kind), True)}
        option = f"--{'jobs' if kind == 'jobs' else 'users'}={','.join(keys)}"
        try:
            jobs = json.loads(self._execute((SQUEUE, "--json", "--states=all", option), False))["jobs"]
        except SlurmError as error:
            if not any(words in error.said or words in error.why for words in UNKNOWN_JOB):
                raise
            jobs = []
        found: dict[str, list[JsonJob]] = {key: [] for key in keys}
        for job in jobs:
            for name in ids_of(job) if kind == "jobs" else {str(job.get("user_name"))}:
                if name in found:
                    found[name].append(job)
        return found

    async def reply(self, uid: int, request: Any) -> dict[str, Any]:
        """Answer one request of a user."""
        kind = request.get("ask") if isinstance(request, dict) else None
        try:
            if kind == "turn":
                await self.turn(uid)
                return {"direct": True}
            if kind in PUBLIC:
                return {"text": await self.ask(uid, str(kind))}
            if kind == "mine":
                name = (await asyncio.to_thread(pwd.getpwuid, uid)).pw_name
                return {"jobs": own(await self.ask(uid, "users", name), uid)}
            ids = request.get("ids") if kind == "jobs" else None
            if not isinstance(ids, list) or not 0 < len(ids) <= MOST_IDS or not all(map(_is_id, ids)):
                return {"why": "the job snapshot does not understand the request"}
            jobs = [
                job for found in await asyncio.gather(*(self.ask(uid, "jobs", id_) for id_ in ids)) for job in found
            ]
            if len(own(jobs, uid)) == len(jobs):
                return {"jobs": own(jobs, uid)}
            await self.turn(uid)
            return {"direct": True}
        except SlurmError as error:
            return {"why": error.why}
        except (KeyError, TooLongError):  # KeyError: a user whom this pod does not know
            return {"direct": True}


def _is_id(text: object) -> bool:
    return isinstance(text, str) and text.isascii() and text.isdigit() and len(text) <= 10


def _number(value: object) -> int | None:
    """Return a number of Slurm's JSON: 5, or {"set": true, "number": 5}."""
    if isinstance(value, dict):
        value = value.get("number") if value.get("set") else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def ids_of(job: JsonJob) -> set[str]:
    """Return the ids that mean this job: its own, its array's, its heterogeneous job's."""
    return {str(_number(job.get(key))) for key in ("job_id", "array_job_id", "het_job_id")}


def own(jobs: Iterable[JsonJob], uid: int) -> list[JsonJob]:
    """Keep the user's own jobs, without a comment that an operator wrote for operators."""
    mine = [job for job in jobs if _number(job.get("user_id")) == uid]
    return [
        job if str(job.get("admin_comment", "")).startswith(PREFIX) else {**job, "admin_comment": ""} for job in mine
    ]


class TooLongError(Exception):
    """The answer is larger than this process may hold: the command asks slurmctld itself."""


def execute(argv: Sequence[str], as_nobody: bool) -> str:
    """Run one of Slurm's clients as root or as nobody."""
    controller = client.address(os.environ)
    rights: dict[str, Any] = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if as_nobody else {}
    late = False

    def end() -> None:
        nonlocal late
        late = True
        process.kill()

    with TemporaryFile() as errors:
        try:
            process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors,
                env=client.environment(controller), **rights,
            )  # fmt: skip
        except OSError as error:
            raise SlurmError(f"run {argv[0]}", error.strerror or str(error)) from error
        timer = threading.Timer(ASK_S, end)
        timer.start()
        with process:
            text = process.stdout.read(MOST_SHOWN + 1) if process.stdout else b""
            if len(text) > MOST_SHOWN:
                process.kill()
        timer.cancel()
        errors.seek(0)
        said = errors.read(LONGEST).decode(errors="replace")
    if len(text) > MOST_SHOWN:
        raise TooLongError
    if late:
        raise SlurmError("ask slurmctld", f"no answer from {controller} within {ASK_S:g} s")
    if process.returncode:
        failed = SlurmError("ask slurmctld", client.judge(said, controller))
        failed.said = said
        raise failed
    return text.decode(errors="replace")


class Door:
    """The socket: so many connections of a user, so many answers at a time."""

    def __init__(self, snapshot: JobSnapshot) -> None:
        self._snapshot = snapshot
        self._users: Counter[int] = Counter()
        self._sending: dict[int, asyncio.Semaphore] = {}
        self._room = asyncio.Semaphore(AT_ONCE)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        _, uid, _ = struct.unpack("3i", peer)
        self._users[uid] += 1
        try:
            if self._users[uid] <= MOST_OF_A_USER:
                async with asyncio.timeout(HEAR_S):
                    line = await reader.readline()
                try:
                    async with asyncio.timeout(PATIENCE_S):
                        reply = await self._snapshot.reply(uid, json.loads(line))
                except TimeoutError:
                    reply = {"why": "too many questions wait, and slurmctld is asked seldom; try again"}
            else:
                reply = {"why": f"you have {MOST_OF_A_USER} questions under way; try again"}
            sending = self._sending.setdefault(uid, asyncio.Semaphore(AT_ONCE_OF_A_USER))
            async with sending, self._room, asyncio.timeout(SEND_S):
                writer.write(json.dumps(reply).encode() + b"\n")
                await writer.drain()
        except (OSError, ValueError, RecursionError):
            pass  # the asker has gone, or is none of ours
        finally:
            self._users[uid] -= 1
            if not self._users[uid]:
                del self._users[uid]
                self._sending.pop(uid, None)
            writer.transport.abort() if writer.transport.get_write_buffer_size() else writer.close()


async def serve(path: Path = SOCKET, ask: Execute = execute) -> None:
    snapshot = JobSnapshot(ask)
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
