"""Client of PID 1's control socket: one JSON request per line, one JSON reply per line (docs/reference/control.md)."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ground.errors import printable
from init import places
from init.errors import RequestError
from init.view.status import ServiceView, Snapshot, from_mapping

SOCKET = Path(places.SOCKET)
# Services of a worker: the first to contact slurmctld, and the proof that it accepts the cluster's key.
FIRST, PROOF = "fresh-node", "cluster-proof"
PUBLIC = "localhost:8650"  # the default of MINIVM_HTTP, which users' sessions do not know
PATIENCE_S, LARGEST = 3.0, 1 << 22


def control_socket() -> Path:
    """Return $MINIVM_SOCKET (formerly $MINIVM_CONTROL), or the default path."""
    return Path(os.environ.get("MINIVM_SOCKET") or os.environ.get("MINIVM_CONTROL") or SOCKET)


class Client:
    """One connection; its requests are answered in order. A context manager."""

    def __init__(self, path: Path | None = None, *, within: float | None = 10.0) -> None:
        self.path = path = path or control_socket()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._socket.settimeout(within)
        try:
            self._socket.connect(str(path))
        except OSError as error:
            self._socket.close()
            raise RequestError("speak to init", f"{path}: {_reason(error)}", hint=_hint(error)) from error
        self._lines = self._socket.makefile("rb")

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._lines.close()
        self._socket.close()

    def request(self, op: str, **keys: Any) -> dict[str, Any]:
        """Send a request and return the reply; RequestError with PID 1's message if it refuses."""
        self._send(op, keys)
        return self._reply(op)

    def stream(self, op: str, **keys: Any) -> Iterator[dict[str, Any]]:
        """Yield replies until PID 1 closes the connection; waits without limit."""
        self._send(op, keys)
        self._socket.settimeout(None)
        while True:
            try:
                yield self._reply(op)
            except EOFError:
                return

    def snapshot(self) -> Snapshot:
        return from_mapping(self.request("status")["snapshot"])

    def _send(self, op: str, keys: dict[str, Any]) -> None:
        try:
            self._socket.sendall(json.dumps({"op": op, **keys}).encode() + b"\n")
        except OSError as error:
            raise RequestError(f"ask init to {op}", _reason(error)) from error

    def _reply(self, op: str) -> dict[str, Any]:
        try:
            line = self._lines.readline()
        except OSError as error:
            raise RequestError(f"ask init to {op}", _reason(error)) from error
        if not line:
            raise EOFError(f"init hung up during {op}")
        reply: dict[str, Any] = json.loads(line)
        if not reply.get("ok"):
            raise Refused(op, str(reply.get("error", "no reason given")), hint=str(reply.get("hint", "")))
        return reply


def public_snapshot() -> Snapshot | None:
    """Read PID 1's public snapshot by HTTP, without services' output; None if there is none.

    Any process may have the port where PID 1 serves none: one deadline and one length bound the whole answer, its
    headers too, and it is shown without control characters.
    """
    deadline, answer = time.monotonic() + PATIENCE_S, bytearray()
    host, _, port = (os.environ.get("MINIVM_HTTP") or PUBLIC).rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), PATIENCE_S) as connection:
            connection.sendall(f"GET /status HTTP/1.0\r\nHost: {host}\r\n\r\n".encode())
            while True:
                connection.settimeout(max(0.001, deadline - time.monotonic()))
                chunk = connection.recv(1 << 16)
                if not chunk:
                    break
                answer += chunk
                if len(answer) > LARGEST:
                    return None
        return from_mapping(_printable(json.loads(answer.partition(b"\r\n\r\n")[2])))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _printable(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _printable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_printable(item) for item in value]
    return printable(value) if isinstance(value, str) else value


class Refused(RequestError):
    """A refusal of PID 1, with its own message."""

    def __str__(self) -> str:
        return f"{self.why} ({self.hint})" if self.hint else self.why


def _reason(error: OSError) -> str:
    if isinstance(error, PermissionError):
        return f"only root may, and you are user {os.geteuid()}"
    return "no answer in time" if isinstance(error, TimeoutError) else error.strerror or str(error)


def _hint(error: OSError) -> str:
    if isinstance(error, PermissionError):
        return (
            "a user has `minivm job` for why jobs wait, end or fail, `minivm why` for this pod, `sinfo -R` for nodes "
            "that take no jobs, and `seff JOBID` for what a job used"
        )
    if isinstance(error, FileNotFoundError | ConnectionRefusedError):
        return "is this a pod whose PID 1 is minivm's init?"
    return ""


def log(text: str) -> None:
    print(text, flush=True)


def condition(control: Path, name: str, text: str, *, expires: float | None = None) -> None:
    """Set a condition of the pod; an empty text removes it."""
    with Client(control) as client:
        client.request("condition", name=name, text=text, expires=expires)


def service(client: Client, name: str) -> ServiceView | None:
    return next((view for view in client.snapshot().services if view.name == name), None)


def prove_again(control: Path) -> None:
    """Run the proof of the cluster's key again; PID 1 retries a failed proof, with growing delays, until it passes."""
    with Client(control) as client:
        # This service contacts slurmctld before the proof does. Start it only from its backoff: once done, it stays
        # done.
        before = service(client, FIRST)
        if before is not None and before.state == "backoff":
            client.request("start", service=FIRST, wait=False)
        if service(client, PROOF) is not None:
            client.request("restart", service=PROOF, wait=False)
