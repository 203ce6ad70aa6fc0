"""The client of slurmrestd: every call has a deadline, every change of a node checks its precondition first."""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from urllib.parse import quote, urlsplit

from fleet import FleetError
from fleet.decide.actions import Drain, Forget, Place, Remove, Undrain
from fleet.world import slurm
from fleet.world.fields import Fields, Object, iterate_items
from fleet.world.slurm import LIFTED, Precondition, SlurmNode, SlurmView, words_in

# The newest version that both sides know is used; each Slurm serves three or four. The keys that are read are the same.
VERSIONS = ("v0.0.44", "v0.0.43", "v0.0.42", "v0.0.41", "v0.0.40")
PORT = 6820
WITHIN_S = 20.0
# Ten thousand nodes are 25 MB of JSON.
MOST_BYTES = 256 << 20
# A server that works on an answer still acknowledges data; one that does not is gone.
GONE_MS = 5000
# Seconds per minute for writing reasons into jobs' comments; after that, nodes are set down without them: users decide
# how long the list of jobs is, and a whole rack may die at once.
EXPLAINS_S, EXPLAINS_AGAIN_S = 5.0, 60.0
UNCHANGED = 304
# Interval of full lists: slurmrestd does not report deleted nodes as a change.
WHOLE_S = 60.0
# The only users that may change nodes are operators; this is Slurm's own.
USER = "slurm"
TOKEN_S = 300
ToSlurm = Drain | Undrain | Remove | Forget | Place
# Method, path, body and headers of a request.
Request = tuple[str, str, str | None, dict[str, str]]


def token(key: Path, now: float) -> str:
    """Make a token for auth/jwt: HMAC-SHA256 with the cluster's key, which is read each time since Secrets change."""
    try:
        secret = key.read_bytes()
    except OSError as error:
        raise FleetError("read the JWT key", error.strerror or str(error), file=str(key)) from error
    if len(secret) < 16:
        raise FleetError("use the JWT key", f"it holds {len(secret)} bytes", file=str(key))
    claims = {"iat": int(now), "exp": int(now) + TOKEN_S, "sun": USER}
    parts = b".".join(_base64(json.dumps(part).encode()) for part in ({"alg": "HS256", "typ": "JWT"}, claims))
    return b".".join([parts, _base64(hmac.digest(secret, parts, hashlib.sha256))]).decode()


def _base64(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")


class SlurmClient:
    """The client of one slurmrestd. It caches the last answer, because slurmrestd may reply "not modified"."""

    def __init__(self, address: str, key: Path) -> None:
        try:
            parts = urlsplit(f"//{address}")
            self.host, self.port = parts.hostname or "", parts.port or PORT
        except ValueError as error:
            raise FleetError("find slurmrestd", f"{address!r}: {error}") from error
        self.key = key
        self._version = ""
        self._last = SlurmView()  # the same object as long as nothing changes
        self._whole_at = 0.0  # when all nodes were requested; monotonic
        self._last_update = 0  # slurmctld's clock at its last answer
        self._explaining_since, self._explained_s = -EXPLAINS_AGAIN_S - 1.0, 0.0
        # One persistent connection per thread: slurmrestd resolves the name of each new peer, and answers no request
        # until that succeeds or times out.
        self._local = threading.local()
        # One look at a time: an older answer that is parsed later must not replace a newer one.
        self._looking = threading.RLock()

    def look(self, *, jobs: bool, claims: bool = False) -> SlurmView:
        """Read the nodes; `jobs`: also the jobs on them; `claims`: also the nodes that jobs and reservations name."""
        rest: dict[str, object] = {}
        with self._looking:
            text = self._changes()
            if text is not None:
                side = slurm.parse_nodes(self._each(text, "nodes", rest))
                self._last_update = Fields(rest).number("last_update")
                self._last = side
            last = self._last
        if not jobs:
            return last
        holding = self._list("jobs")
        return slurm.with_jobs(last, holding, self._list("reservations") if claims else None)

    def _is_known(self, name: str) -> bool:
        """Return whether slurmctld knows the node, by a fresh list of all nodes."""
        with self._looking:
            self._last_update = 0
            return name in self.look(jobs=False).nodes

    def server_time(self) -> int:
        """Return the time by slurmctld's clock; 0: it does not report it."""
        return Fields(self._call("GET", "diag/")).sub("statistics").number("req_time")

    def holding(self) -> Mapping[str, tuple[str, ...]] | None:
        """Return the jobs that hold nodes, by node; None: one of them cannot be read."""
        return slurm.with_jobs(SlurmView(), self._list("jobs")).jobs

    def jobs(self) -> Iterator[object]:
        """Yield slurmctld's jobs one by one: those that wait and run, and those that ended lately (MinJobAge)."""
        yield from self._each(self._text("GET", "jobs/") or b"{}", "jobs", {})

    def _changes(self) -> bytes | None:
        if time.monotonic() - self._whole_at >= WHOLE_S:
            self._last_update = 0
        if self._last_update:
            try:
                return self._text("GET", f"nodes/?update_time=uts{self._last_update}")
            except FleetError:
                # slurmrestd requests partitions with the same time, and fails if only nodes have changed.
                self._last_update = 0
        self._whole_at = time.monotonic()
        return self._text("GET", "nodes/")

    def change(self, act: ToSlurm, may: Callable[[], bool] = lambda: True) -> bool:
        """Make a change. False: the node has changed since it was read, or `may` refuses, and nothing was done."""

        def is_allowed() -> bool:
            before = self._is_at(act) if isinstance(act, Place) else self.is_unchanged(act.name, act.precondition)
            # The request may take long enough to lose the Lease.
            return before and may()

        if not is_allowed():
            return False
        if isinstance(act, Drain) and act.down and self._explain(act) and not is_allowed():
            return False
        if isinstance(act, Remove):
            self._call("DELETE", _path(act.name))
            with self._looking:
                self._last_update = 0
        else:
            self._call("POST", _path(act.name), body(act))
        return True

    def _explain(self, act: Drain) -> bool:
        """Write the reason into the AdminComment of the node's jobs, which Slurm ends or requeues after this.

        A site's own comment stays. True: it took time. An error keeps no dead machine from being given up.
        """
        begun = time.monotonic()
        if begun - self._explaining_since > EXPLAINS_AGAIN_S:
            self._explaining_since, self._explained_s = begun, 0.0
        if self._explained_s >= EXPLAINS_S:
            return False
        explanation = f"the fleet sets node {act.name} down ({words_in(act.reason)})"
        text = f"minivm: {explanation}: the job is requeued, or ended where it cannot be requeued"
        until = begun + EXPLAINS_S - self._explained_s
        try:
            for job in slurm.jobs_on(act.name, self._list("jobs")):
                if time.monotonic() > until:
                    break
                self._call("POST", f"job/{job}", {"admin_comment": text})
        except FleetError:
            pass
        finally:
            self._explained_s += time.monotonic() - begun
        return True

    def is_unchanged(self, name: str, expected: Precondition | None) -> bool:
        if expected is None:
            return not self._is_known(name)
        node = self._node(name)
        return node is not None and node.precondition == expected

    def _is_at(self, act: Place) -> bool:
        node = self._node(act.name)
        return node is not None and node.topology == act.old_place

    def _node(self, name: str) -> SlurmNode | None:
        try:
            answer = self._call("GET", _path(name))
        except FleetError:
            # slurmrestd has no error of its own for an unknown node.
            if self._is_known(name):
                raise
            return None
        return slurm.parse_slurm(Fields(answer).items("nodes")).nodes.get(name)

    def _list(self, what: str) -> list[object]:
        return list(self._each(self._text("GET", f"{what}/") or b"{}", what, {}))

    def _each(self, text: bytes, key: str, rest: dict[str, object]) -> Iterator[object]:
        """Parse a list item by item: one call of json for ten thousand nodes blocks the other threads for 0.25 s."""
        try:
            yield from iterate_items(_decode(text), key, rest)
        except (ValueError, RecursionError):
            raise FleetError("ask slurmrestd", "the answer is no JSON object") from None
        Fields(rest).items(key)  # fails if it is no list
        self._raise_errors(200, rest)

    def _call(self, method: str, path: str, data: dict[str, object] | None = None) -> dict[str, object] | None:
        """Return the answer; None: nothing has changed since the last one."""
        text = self._text(method, path, data)
        if text is None:
            return None
        answer = _parse(text)
        self._raise_errors(200, answer)
        return answer

    def _text(self, method: str, path: str, data: dict[str, object] | None = None) -> bytes | None:
        negotiated = self._version
        for version in [negotiated] if negotiated else VERSIONS:
            status, text = self._request(method, f"/slurm/{version}/{path}", data)
            if status != 404:
                break
            if self._version == version:
                self._version = ""  # an upgrade of Slurm drops the oldest version
        if status == UNCHANGED:
            return None
        if status >= 300:
            self._raise_errors(status, _parse(text))
        self._version = version
        return text

    def _raise_errors(self, status: int, answer: Object) -> None:
        errors = Fields(answer).subs("errors")
        if status >= 300 or errors:
            error = errors[0].data if errors else {}
            problem = str(error.get("error") or error.get("description") or f"HTTP {status}")
            raise FleetError("ask slurmrestd", f"{problem}, says {self.host}:{self.port}")

    def _request(self, method: str, path: str, data: dict[str, object] | None) -> tuple[int, bytes]:
        headers = {"X-SLURM-USER-NAME": USER, "X-SLURM-USER-TOKEN": token(self.key, time.time())}
        if data is not None:
            headers["Content-Type"] = "application/json"
        request = (method, path, None if data is None else json.dumps(data), headers)
        kept_connection, self._local.connection = getattr(self._local, "connection", None), None
        try:
            try:
                status, text = self._send(kept_connection or self._connect(), request)
            except (ConnectionError, http.client.HTTPException):
                # The server may close a kept connection at any time. A change is never sent twice.
                if kept_connection is None or method != "GET":
                    raise
                status, text = self._send(self._connect(), request)
        except (OSError, http.client.HTTPException) as error:
            raise FleetError("ask slurmrestd", f"{self.host}:{self.port}: {error or type(error).__name__}") from error
        if len(text) > MOST_BYTES:
            raise FleetError("ask slurmrestd", f"an answer of more than {MOST_BYTES >> 20} MiB")
        return status, text

    def _connect(self) -> http.client.HTTPConnection:
        # The address of a deleted pod does not refuse connections, and the fleet decides nothing while it waits.
        connection = http.client.HTTPConnection(self.host, self.port, timeout=min(WITHIN_S, GONE_MS / 1000))
        connection.connect()
        connection.sock.settimeout(WITHIN_S)
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, GONE_MS)
        return connection

    def _send(self, connection: http.client.HTTPConnection, request: Request) -> tuple[int, bytes]:
        """Send a request, and keep the connection if the answer is complete."""
        try:
            connection.request(*request)
            reply = connection.getresponse()
            text = reply.read(MOST_BYTES + 1)
            if reply.isclosed() and not reply.will_close:
                self._local.connection = connection
            return reply.status, text
        finally:
            if self._local.connection is not connection:
                connection.close()


def _path(name: str) -> str:
    return f"node/{quote(name, safe='')}"


def body(act: Drain | Undrain | Forget | Place) -> dict[str, object]:
    """Build one update of state, reason and mark, which happens as a whole or not at all."""
    comment: str | None
    match act:
        case Drain(_, reason, comment, _, down):
            update: dict[str, object] = {"state": ["DOWN" if down else "DRAIN"], "reason": reason}
        case Undrain(_, comment, _, _, down):
            update = {"state": ["RESUME" if down else "UNDRAIN"], "reason": LIFTED}
        case Forget():
            update, comment = {}, ""
        case Place(_, place):
            update, comment = {"topology_str": place}, None
    return update if comment is None else {**update, "comment": comment}


def _decode(text: bytes) -> str:
    """Decode an answer. A user's comment of a job may be any bytes and must not make the whole answer unreadable."""
    return text.decode("utf-8", "replace")


def _parse(text: bytes) -> dict[str, object]:
    try:
        answer = json.loads(_decode(text))
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict):
        raise FleetError("ask slurmrestd", "the answer is no JSON object")
    return answer
