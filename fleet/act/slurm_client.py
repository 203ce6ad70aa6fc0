"""slurmrestd, asked and told: every call with a deadline, every change of a node only if it is still as it was seen."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from pathlib import Path
from urllib.parse import quote, urlsplit

from fleet.decide.actions import Drain, Forget, Remove, Undrain
from fleet.decide.topology import Place
from fleet.errors import FleetError
from fleet.reasons import LIFTED
from fleet.world import slurm
from fleet.world.fields import Object, each, items, mapping, number
from fleet.world.slurm import Precondition, Slurm, SlurmNode

# Slurm lets its own user, and nobody below an operator, change nodes.
USER = "slurm"
LASTS_S = 300


def token(key: Path, now: float) -> str:
    """The key is read at each use: a Secret may be replaced under us."""
    try:
        secret = key.read_bytes()
    except OSError as error:
        raise FleetError("read the JWT key", error.strerror or str(error), file=str(key)) from error
    if len(secret) < 16:
        raise FleetError("use the JWT key", f"it holds {len(secret)} bytes", file=str(key))
    return signed({"iat": int(now), "exp": int(now) + LASTS_S, "sun": USER}, secret)


def signed(claims: dict[str, object], secret: bytes) -> str:
    parts = b".".join(_text(json.dumps(part).encode()) for part in ({"alg": "HS256", "typ": "JWT"}, claims))
    return b".".join([parts, _text(hmac.digest(secret, parts, hashlib.sha256))]).decode()


def _text(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")


# The newest that both sides know; each Slurm serves three or four of them. Of the keys that are read none differs.
VERSIONS = ("v0.0.44", "v0.0.43", "v0.0.42", "v0.0.41", "v0.0.40")
PORT = 6820
WITHIN_S = 20.0
# Ten thousand nodes are 25 MB of JSON; what is larger by far is no answer to our questions.
MOST_BYTES = 256 << 20
# Who does not even acknowledge what was sent is not there any more; whoever works at an answer does.
GONE_MS = 5000
UNCHANGED = 304
# That a node was deleted is no news to it: all of them are asked for so often.
WHOLE_S = 60.0
ToSlurm = Drain | Undrain | Remove | Forget | Place
# Of a request: method, path, body, headers.
Words = tuple[str, str, str | None, dict[str, str]]


class SlurmClient:
    """One slurmrestd. What it said last is kept, for it tells only whether something has changed since."""

    def __init__(self, address: str, key: Path) -> None:
        try:
            parts = urlsplit(f"//{address}")
            self.host, self.port = parts.hostname or "", parts.port or PORT
        except ValueError as error:
            raise FleetError("find slurmrestd", f"{address!r}: {error}") from error
        self.key = key
        self._version = ""
        self._last = Slurm()  # the same one as long as nothing changes
        self._whole = 0.0  # when all was asked for; monotonic
        self._asked = 0  # Slurm's clock at its last answer
        # A connection for each thread. slurmrestd looks for the name of each address that connects, and until it has
        # found it or given up, after seconds, it answers nobody.
        self._own = threading.local()
        # One looks at a time: an older answer that is read later must not be taken for what is so since the newer one.
        self._looking = threading.RLock()

    def look(self, *, jobs: bool, claims: bool = False) -> Slurm:
        """`jobs`: also which jobs hold nodes; they are asked for only where somebody needs to know. `claims`: also who
        names a node."""
        rest: dict[str, object] = {}
        with self._looking:
            text = self._changes()
            if text is not None:
                found = slurm.of_nodes(self._each(text, "nodes", rest))
                self._asked = number(rest.get("last_update"), "last_update")
                self._last = found
            last = self._last
        if not jobs:
            return last
        holding = self._list("jobs")
        return slurm.with_jobs(last, holding, self._list("reservations") if claims else None)

    def _anew(self, name: str) -> bool:
        """Whether it knows the node, by a whole answer."""
        with self._looking:
            self._asked = 0
            return name in self.look(jobs=False).nodes

    def hour(self) -> int:
        """slurmctld's clock; 0: it does not tell."""
        said = mapping((self._call("GET", "diag/") or {}).get("statistics"), "statistics")
        return number(said.get("req_time"), "statistics.req_time")

    def holding(self) -> Mapping[str, tuple[str, ...]] | None:
        """The jobs that hold nodes, by node, and nothing else; None: one of them cannot be read."""
        return slurm.with_jobs(Slurm(), self._list("jobs")).jobs

    def _changes(self) -> bytes | None:
        if time.monotonic() - self._whole >= WHOLE_S:
            self._asked = 0
        if self._asked:
            try:
                return self._text("GET", f"nodes/?update_time=uts{self._asked}")
            except FleetError:
                # It asks for partitions with the same time: where nodes alone have changed, that is an error to it.
                self._asked = 0
        self._whole = time.monotonic()
        return self._text("GET", "nodes/")

    def change(self, act: ToSlurm, may: Callable[[], bool] = lambda: True) -> bool:
        """False: the node is no longer as it was when this was decided, or `may` no longer says so: nothing is done."""
        # Asked may be for long, and whoever has lost the Lease meanwhile is not the one to write.
        before = self._placed(act) if isinstance(act, Place) else self.still(act.name, act.was)
        if not before or not may():
            return False
        if isinstance(act, Remove):
            self._call("DELETE", _path(act.name))
            with self._looking:
                self._asked = 0
        else:
            self._call("POST", _path(act.name), body(act))
        return True

    def still(self, name: str, was: Precondition | None) -> bool:
        if was is None:
            return not self._anew(name)
        found = self._node(name)
        return found is not None and found.seen == was

    def _placed(self, act: Place) -> bool:
        found = self._node(act.name)
        return found is not None and found.topology == act.was

    def _node(self, name: str) -> SlurmNode | None:
        try:
            answer = self._call("GET", _path(name)) or {}
        except FleetError:
            # It has no word of its own for a node that it does not know.
            if self._anew(name):
                raise
            return None
        return slurm.slurm(items(answer.get("nodes"), "nodes")).nodes.get(name)

    def _list(self, what: str) -> list[object]:
        return list(self._each(self._text("GET", f"{what}/") or b"{}", what, {}))

    def _each(self, text: bytes, key: str, rest: dict[str, object]) -> Iterator[object]:
        """Others have their turn between two of them: nobody hears a cordon while one call of the json library lasts,
        and of ten thousand nodes at once that is a quarter of a second."""
        try:
            yield from each(_words(text), key, rest)
        except (ValueError, RecursionError):
            raise FleetError("ask slurmrestd", "the answer is no JSON object") from None
        items(rest.get(key), key)  # it was no list
        self._complains(200, rest)

    def _call(self, method: str, path: str, data: dict[str, object] | None = None) -> dict[str, object] | None:
        """None: nothing has changed since the last answer."""
        text = self._text(method, path, data)
        if text is None:
            return None
        found = _read(text)
        self._complains(200, found)
        return found

    def _text(self, method: str, path: str, data: dict[str, object] | None = None) -> bytes | None:
        known = self._version
        for version in [known] if known else VERSIONS:
            status, text = self._ask(method, f"/slurm/{version}/{path}", data)
            if status != 404:
                break
            if self._version == version:
                self._version = ""  # an upgrade of Slurm drops the oldest
        if status == UNCHANGED:
            return None
        if status >= 300:
            self._complains(status, _read(text))
        self._version = version
        return text

    def _complains(self, status: int, found: Object) -> None:
        errors = items(found.get("errors"), "errors")
        if status >= 300 or errors:
            said = mapping(errors[0], "errors") if errors else {}
            why = str(said.get("error") or said.get("description") or f"HTTP {status}")
            raise FleetError("ask slurmrestd", f"{why}, says {self.host}:{self.port}")

    def _ask(self, method: str, path: str, data: dict[str, object] | None) -> tuple[int, bytes]:
        headers = {"X-SLURM-USER-NAME": USER, "X-SLURM-USER-TOKEN": token(self.key, time.time())}
        if data is not None:
            headers["Content-Type"] = "application/json"
        words = (method, path, None if data is None else json.dumps(data), headers)
        kept, self._own.kept = getattr(self._own, "kept", None), None
        try:
            try:
                status, text = self._over(kept or self._connection(), words)
            except (ConnectionError, http.client.HTTPException):
                # The other end may end what is kept when it likes. What changes something is not sent twice.
                if kept is None or method != "GET":
                    raise
                status, text = self._over(self._connection(), words)
        except (OSError, http.client.HTTPException) as error:
            raise FleetError("ask slurmrestd", f"{self.host}:{self.port}: {error or type(error).__name__}") from error
        if len(text) > MOST_BYTES:
            raise FleetError("ask slurmrestd", f"an answer of more than {MOST_BYTES >> 20} MiB")
        return status, text

    def _connection(self) -> http.client.HTTPConnection:
        # The address of a pod that is gone says nothing at all, and nothing is decided while it is waited for.
        connection = http.client.HTTPConnection(self.host, self.port, timeout=min(WITHIN_S, GONE_MS / 1000))
        connection.connect()
        connection.sock.settimeout(WITHIN_S)
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, GONE_MS)
        return connection

    def _over(self, connection: http.client.HTTPConnection, words: Words) -> tuple[int, bytes]:
        """Kept is what has answered, whole."""
        try:
            method, path, body, headers = words
            connection.request(method, path, body, headers)
            reply = connection.getresponse()
            text = reply.read(MOST_BYTES + 1)
            if reply.isclosed() and not reply.will_close:
                self._own.kept = connection
            return reply.status, text
        finally:
            if self._own.kept is not connection:
                connection.close()


async def to_its_end(work: Callable[[], bool], of: Executor | None = None) -> bool:
    """Also where we are told to end: no thread can be called back, and until it is through nobody else may begin."""
    thread = asyncio.get_running_loop().run_in_executor(of, work)
    try:
        return await asyncio.shield(thread)
    except asyncio.CancelledError:
        with contextlib.suppress(FleetError):
            await thread
        raise


def _path(name: str) -> str:
    return f"node/{quote(name, safe='')}"


def body(act: Drain | Undrain | Forget | Place) -> dict[str, object]:
    """State, reason and mark in one update: it happens as a whole or not at all."""
    match act:
        case Drain(_, reason, comment, _, down):
            said: dict[str, object] = {"state": ["DOWN" if down else "DRAIN"], "reason": reason}
        case Undrain(_, comment, _, _, down):
            said = {"state": ["RESUME" if down else "UNDRAIN"], "reason": LIFTED}
        case Forget():
            said, comment = {}, ""
        case Place(_, place):
            said, comment = {"topology_str": place}, None
    return said if comment is None else {**said, "comment": comment}


def _words(text: bytes) -> str:
    """Slurm hands on what it was given: a user's comment of his job may be any bytes, and must not hide all the others.
    What is compared later is read in the same way."""
    return text.decode("utf-8", "replace")


def _read(text: bytes) -> dict[str, object]:
    try:
        found = json.loads(_words(text))
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise FleetError("ask slurmrestd", "the answer is no JSON object")
    return found
