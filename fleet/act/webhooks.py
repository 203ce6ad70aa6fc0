"""Webhooks of remedies, called beside all else: nobody waits for who is called, and what he answers is taken up in a
later look. Of an answer its status is read and nothing more; no redirect is followed, and no proxy is asked.

A call that was cut, or whose answer was not heard, is made again with the same key. So is one that nobody has noted.
One that waits for its turn is not made when it is not wanted any more, or when another fleet leads: by then a person
may have taken his word back, and jobs may run there.
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

from fleet.decide.actions import CallHook
from fleet.errors import FleetError
from fleet.policy import Webhook

# All of it, names and TLS among it.
WITHIN_S = 10.0
# Who has refused what he was asked for refuses it again, until a person has mended one of both.
REFUSED_S = 300.0
# So many at a time, and so many that are remembered.
HANDS, MOST = 4, 256
LINE = 8192
FILE = 1 << 20  # a Secret holds no more
# Of a 4xx, these say that it may be otherwise soon.
RETRIABLE = (408, 425, 429)
_STATUS = re.compile(rb"HTTP/1\.[01] ([1-5][0-9][0-9])(?: [^\r\n]*)?\r?\n")
Key = tuple[str, Webhook]


@dataclass(slots=True)
class Call:
    task: asyncio.Task[int]
    sent: bool = False
    told: float = 0.0  # when its refusal was; monotonic


class WebhookCaller:
    def __init__(self, files: Path, fleet: str, heard: Callable[[], object], leads: Callable[[], bool]) -> None:
        """`files`: where the Secret with tokens and authorities is mounted. `fleet`: who calls, while it `leads`."""
        self.files, self.fleet, self.heard, self.leads = files, fleet, heard, leads
        self._calls: dict[Key, Call] = {}
        self._hands = asyncio.Semaphore(HANDS)
        # Names are looked for in threads of its own: one that is not found for long keeps no thread from Slurm.
        self._threads = ThreadPoolExecutor(2, "webhook")

    def ready(self, act: CallHook) -> bool:
        """Whether its answer is there. If nobody has asked yet he is asked now."""
        key = (act.key, act.hook)
        call = self._calls.get(key)
        if call is not None and call.told and time.monotonic() - call.told >= REFUSED_S:
            call = None
        if call is None:
            self._forget()
            self._calls[key] = Call(asyncio.create_task(self._call(act)))
            self._calls[key].task.add_done_callback(self._heard)
            return False
        return call.task.done() and not call.told

    def want(self, acts: Iterable[CallHook]) -> None:
        """What follows from this look: what has not been sent yet, and does not follow any more, is not sent."""
        wanted = {(act.key, act.hook) for act in acts}
        for key in [key for key, call in self._calls.items() if not (call.sent or call.task.done() or key in wanted)]:
            self._calls.pop(key).task.cancel()

    def _heard(self, task: asyncio.Task[int]) -> None:
        if not task.cancelled():
            task.exception()  # whoever is not asked for it any more need not be told
        self.heard()

    def took(self, act: CallHook) -> None:
        """FleetError: why who was called did not take it. That he did is known until it is noted."""
        key = (act.key, act.hook)
        call = self._calls.pop(key)  # asked anew when it is tried anew
        status, what = call.task.result(), f"call {act.hook.where}"
        if 200 <= status < 300:
            self._calls[key] = call
        elif 400 <= status < 500 and status not in RETRIABLE:
            self._calls[key], call.told = call, time.monotonic()
            raise FleetError(what, f"it refuses: HTTP {status}; it is asked again after {REFUSED_S:g} s")
        elif 300 <= status < 400:
            raise FleetError(what, f"HTTP {status}: redirects are not followed")
        else:
            raise FleetError(what, f"HTTP {status}")

    async def end(self) -> None:
        calls = [call.task for call in self._calls.values()]
        for task in calls:
            task.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _forget(self) -> None:
        """What was asked for and then not wanted any more."""
        over = [key for key, call in self._calls.items() if call.task.done()]
        for key in over[: max(0, len(self._calls) - MOST)]:
            del self._calls[key]

    async def _call(self, act: CallHook) -> int:
        what = f"call {act.hook.where}"
        async with self._hands:
            try:
                async with asyncio.timeout(WITHIN_S):
                    return await self._asked(act, what)
            except TimeoutError:
                raise FleetError(what, f"no answer within {WITHIN_S:g} s") from None
            except ssl.SSLCertVerificationError as error:
                raise FleetError(what, f"its certificate: {error.verify_message}") from None
            except UnicodeError:
                raise FleetError(what, "there is no such name") from None
            except ValueError:
                raise FleetError(what, f"a line of its answer is longer than {LINE >> 10} KiB") from None
            except OSError as error:
                # The system's words and none of its: what came from there may repeat what was sent.
                said = getattr(error, "reason", "") or error.strerror or type(error).__name__
                raise FleetError(what, str(said)) from None

    async def _asked(self, act: CallHook, what: str) -> int:
        loop = asyncio.get_running_loop()
        context, token = await loop.run_in_executor(self._threads, self._secrets, act.hook)
        reader, writer = await self._connected(act.hook, context)
        try:
            if not self.leads():
                raise FleetError(what, "not asked: another fleet leads")
            self._calls[act.key, act.hook].sent = True
            writer.write(request(act, self.fleet, token))
            await writer.drain()
            while (status := _status(what, await reader.readline())) < 200:
                while (await reader.readline()).strip():
                    pass  # it goes on after these
            return status
        finally:
            writer.transport.abort()  # whatever else it says, and however long

    def _secrets(self, hook: Webhook) -> tuple[ssl.SSLContext | None, str]:
        """Read at each call: a Secret may be replaced under us."""
        token = ""
        if hook.token:
            token = self._file(hook.token).strip()
            if not re.fullmatch(r"[!-~]+", token):
                raise FleetError("read a token", "wanted printable ASCII, no blank", file=self._path(hook.token))
        if hook.parts.scheme != "https":
            return None, token
        if not hook.ca:
            return ssl.create_default_context(), token
        try:
            # Between certificates stand the names of authorities, in whatever letters.
            context = ssl.create_default_context(cadata=self._file(hook.ca, "ignore"))
        except (ssl.SSLError, ValueError):
            raise FleetError("read an authority", "no PEM certificate", file=self._path(hook.ca)) from None
        # Python 3.13 asks of an authority what many of a site's own lack; chain, name and time still count.
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        return context, token

    def _file(self, name: str, otherwise: str = "strict") -> str:
        try:
            with (self.files / name).open("rb") as file:
                return file.read(FILE).decode("ascii", otherwise)
        except OSError as error:
            raise FleetError("read it for a webhook", error.strerror or "?", file=self._path(name)) from None
        except UnicodeDecodeError:
            raise FleetError("read it for a webhook", "wanted ASCII", file=self._path(name)) from None

    def _path(self, name: str) -> str:
        return str(self.files / name)

    async def _connected(
        self, hook: Webhook, context: ssl.SSLContext | None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._threads, _addresses, hook.host, hook.port)
        name = hook.host if context else None
        for number, address in enumerate(found, 1):
            try:
                # One of several that does not answer leaves time for the others.
                async with asyncio.timeout(WITHIN_S / len(found) / 2 if number < len(found) else None):
                    return await asyncio.open_connection(
                        address, hook.port, ssl=context, server_hostname=name, limit=LINE
                    )
            except OSError:
                if number == len(found):
                    raise
        raise OSError("it has no address")


def _addresses(host: str, port: int) -> list[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(one[4][0]) for one in found))[:HANDS]


def _status(what: str, line: bytes) -> int:
    if not line:
        raise FleetError(what, "the connection ended before an answer")
    found = _STATUS.fullmatch(line)
    if not found:
        raise FleetError(what, "the answer is no HTTP/1.1")
    return int(found[1])


def request(act: CallHook, fleet: str, token: str) -> bytes:
    """Texts of others stand in the JSON alone."""
    said = {
        "key": act.key,
        "fleet": fleet,
        "machine": act.machine.name,
        "node": act.node,
        "pool": act.pool,
        "goal": act.goal,
        "reason": act.why,
        "evidence": act.machine.status.verdict,
    }
    body = json.dumps(said).encode()
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
