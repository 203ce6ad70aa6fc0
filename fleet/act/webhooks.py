"""Call remedies' webhooks concurrently with the main loop; a later pass takes up the answer.

Only the status of an answer is read; no redirect is followed and no proxy is used. A call that was interrupted, or
whose answer was not recorded, is repeated with the same idempotency key. The fleet drops a waiting call once the
remedy is withdrawn or another process leads: by then jobs may run on the machine.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import ssl
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from fleet import FleetError
from fleet.decide.actions import CallHook
from fleet.policy import Webhook

# For the whole call, with name resolution and TLS.
WITHIN_S = 10.0
# A refusal is final until a person changes something, so it is tried again this late.
REFUSED_S = 300.0
# Calls at a time, and calls that are remembered.
AT_ONCE, MOST = 4, 256
LINE = 8192
FILE = 1 << 20  # the size of a Secret
# Statuses of 4xx after which a retry makes sense.
RETRIABLE = (408, 425, 429)
_STATUS = re.compile(rb"HTTP/1\.[01] ([1-5][0-9][0-9])(?: [^\r\n]*)?\r?\n")
Key = tuple[str, Webhook]


@dataclass(slots=True)
class WebhookCall:
    task: asyncio.Task[int]
    sent: bool = False
    refused_at: float = 0.0  # monotonic


class WebhookCaller:
    def __init__(self, files: Path, fleet: str, answered: Callable[[], object], leads: Callable[[], bool]) -> None:
        """`files`: the mounted Secret with tokens and authorities. `fleet`: the caller's name in the request."""
        self.files, self.fleet, self.answered, self.leads = files, fleet, answered, leads
        self._calls: dict[Key, WebhookCall] = {}
        self._slots = asyncio.Semaphore(AT_ONCE)
        # Threads of its own: a name that resolves slowly must not take a thread from requests to Slurm.
        self._threads = ThreadPoolExecutor(2, "webhook")

    def ready(self, act: CallHook) -> bool:
        """Return whether the answer has come. The first call of this method starts the request."""
        key = (act.key, act.hook)
        call = self._calls.get(key)
        if call is not None and call.refused_at and time.monotonic() - call.refused_at >= REFUSED_S:
            call = None
        if call is None:
            self._forget()
            self._calls[key] = WebhookCall(asyncio.create_task(self._call(act)))
            self._calls[key].task.add_done_callback(self._on_done)
            return False
        return call.task.done() and not call.refused_at

    def keep(self, acts: Iterable[CallHook]) -> None:
        """Drop the waiting calls that are not among the decided ones."""
        decided = {(act.key, act.hook) for act in acts}
        for key in [key for key, call in self._calls.items() if not (call.sent or call.task.done() or key in decided)]:
            self._calls.pop(key).task.cancel()

    def _on_done(self, task: asyncio.Task[int]) -> None:
        if not task.cancelled():
            task.exception()  # a dropped call may fail unreported
        self.answered()

    def check_taken(self, act: CallHook) -> None:
        """Raise FleetError if the receiver did not accept. An acceptance is remembered until it is recorded."""
        key = (act.key, act.hook)
        call = self._calls.pop(key)  # a retry sends a new request
        status, what = call.task.result(), f"call {act.hook.where}"
        if 200 <= status < 300:
            self._calls[key] = call
        elif 400 <= status < 500 and status not in RETRIABLE:
            self._calls[key], call.refused_at = call, time.monotonic()
            raise FleetError(what, f"it refuses: HTTP {status}; the fleet calls it again after {REFUSED_S:g} s")
        else:
            raise FleetError(what, f"HTTP {status}{': redirects are not followed' if 300 <= status < 400 else ''}")

    async def end(self) -> None:
        calls = [call.task for call in self._calls.values()]
        for task in calls:
            task.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _forget(self) -> None:
        """Drop the oldest ended calls beyond the limit."""
        ended = [key for key, call in self._calls.items() if call.task.done()]
        for key in ended[: max(0, len(self._calls) - MOST)]:
            del self._calls[key]

    async def _call(self, act: CallHook) -> int:
        what = f"call {act.hook.where}"
        async with self._slots:
            try:
                async with asyncio.timeout(WITHIN_S):
                    return await self._request(act, what)
            except TimeoutError:
                raise FleetError(what, f"no answer within {WITHIN_S:g} s") from None
            except ssl.SSLCertVerificationError as error:
                raise FleetError(what, f"its certificate: {error.verify_message}") from None
            except UnicodeError:
                raise FleetError(what, "there is no such name") from None
            except ValueError:
                raise FleetError(what, f"a line of its answer is longer than {LINE >> 10} KiB") from None
            except OSError as error:
                # Only the system's words: the receiver's may repeat the request with its token.
                text = getattr(error, "reason", "") or error.strerror or type(error).__name__
                raise FleetError(what, str(text)) from None

    async def _request(self, act: CallHook, what: str) -> int:
        loop = asyncio.get_running_loop()
        context, token = await loop.run_in_executor(self._threads, self._secrets, act.hook)
        reader, writer = await self._connect(act.hook, context)
        try:
            if not self.leads():
                raise FleetError(what, "not asked: another fleet leads")
            self._calls[act.key, act.hook].sent = True
            writer.write(build_request(act, self.fleet, token))
            await writer.drain()
            while (status := _parse_status(what, await reader.readline())) < 200:
                while (await reader.readline()).strip():
                    pass  # an informational answer ends with an empty line; the next one follows
            return status
        finally:
            writer.transport.abort()  # the rest of the answer may be endless

    def _secrets(self, hook: Webhook) -> tuple[ssl.SSLContext | None, str]:
        """Read token and authorities for each call, since Secrets change."""
        token = ""
        if hook.token:
            token = self._read_file(hook.token).strip()
            if not re.fullmatch(r"[!-~]+", token):
                raise FleetError("read a token", "wanted printable ASCII, no blank", file=self._path(hook.token))
        if hook.parts.scheme != "https":
            return None, token
        if not hook.ca:
            return ssl.create_default_context(), token
        try:
            # Comments between the certificates may have letters of any alphabet.
            context = ssl.create_default_context(cadata=self._read_file(hook.ca, "ignore"))
        except (ssl.SSLError, ValueError):
            raise FleetError("read an authority", "no PEM certificate", file=self._path(hook.ca)) from None
        # Python 3.13 wants extensions that many private authorities lack. Chain, name and time are still verified.
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        return context, token

    def _read_file(self, name: str, errors: str = "strict") -> str:
        try:
            with (self.files / name).open("rb") as file:
                return file.read(FILE).decode("ascii", errors)
        except OSError as error:
            raise FleetError("read it for a webhook", error.strerror or "?", file=self._path(name)) from None
        except UnicodeDecodeError:
            raise FleetError("read it for a webhook", "wanted ASCII", file=self._path(name)) from None

    def _path(self, name: str) -> str:
        return str(self.files / name)

    async def _connect(
        self, hook: Webhook, context: ssl.SSLContext | None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        loop = asyncio.get_running_loop()
        addresses = await loop.run_in_executor(self._threads, _resolve, hook.host, hook.port)
        name = hook.host if context else None
        for number, address in enumerate(addresses, 1):
            try:
                # An address that does not answer leaves time for the next one.
                async with asyncio.timeout(WITHIN_S / len(addresses) / 2 if number < len(addresses) else None):
                    return await asyncio.open_connection(
                        address, hook.port, ssl=context, server_hostname=name, limit=LINE
                    )
            except OSError:
                if number == len(addresses):
                    raise
        raise OSError("it has no address")


def _resolve(host: str, port: int) -> list[str]:
    entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in entries))[:AT_ONCE]


def _parse_status(what: str, line: bytes) -> int:
    if not line:
        raise FleetError(what, "the connection ended before an answer")
    match = _STATUS.fullmatch(line)
    if not match:
        raise FleetError(what, "the answer is no HTTP/1.1")
    return int(match[1])


def build_request(act: CallHook, fleet: str, token: str) -> bytes:
    """Build the request. Text from users is in the JSON body only, never in a header."""
    facts = {
        "key": act.key,
        "fleet": fleet,
        "machine": act.machine.name,
        "node": act.node,
        "pool": act.pool,
        "goal": act.goal,
        "reason": act.reason,
        "evidence": act.machine.status.verdict,
    }
    body = json.dumps(facts).encode()
    parts = act.hook.parts
    path = f"{parts.path or '/'}{f'?{parts.query}' if parts.query else ''}"
    host = f"[{act.hook.host}]" if ":" in act.hook.host else act.hook.host
    lines = [
        f"POST {path} HTTP/1.1",
        f"Host: {host}{f':{parts.port}' if parts.port else ''}",
        "User-Agent: minivm-fleet",
        "Accept: */*",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        f"Idempotency-Key: {json.dumps(act.key)}",
        *([f"Authorization: Bearer {token}"] if token else []),
        "Connection: close",
    ]
    return "\r\n".join([*lines, "", ""]).encode("ascii") + body
