"""The SCIM receiver's server: authenticate, bound connections, bytes and time, and write the Secret.

`_accept` takes connections and bounds handshakes, and `ScimConnection` bounds a connection's time and bytes.
`Receiver._guard` checks the token and turns errors into SCIM's answers; `_discover`, `_query` and `_write` serve the
requests. `_write` passes its change to `PeopleSecret.change`, which reads the Secret, applies the change and writes it.

Of two writers one wins: each write names the version that was read, and is decided anew on the version of the other.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hmac
import json
import logging
import signal
import socket
import ssl
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click
from aiohttp import web

from fleet import FleetError
from fleet.act.api_client import ApiClient, KubernetesError
from fleet.report.web import HttpServer
from fleet.scim import resources
from fleet.scim.filters import ScimError
from fleet.scim.roster import LARGEST, Roster, Rules, dump, load
from ground.certificates import read_expiry
from ground.errors import one_line
from ground.metrics import family
from init.people.spec import IDS

T = TypeVar("T")
PORT, PROBES = 8651, 8650
# A connection's whole time, connections at a time, and bytes that one may send.
CONNECTION_S, MOST_CONNECTIONS, MOST_BYTES = 60.0, 64, LARGEST + 65536
HANDSHAKE_S = 10.0
# Writers that came between before a request is given back.
MOST_TRIES = 5
CHECK_S = 10.0
SHORTEST_TOKEN = 32
SCIM_JSON = "application/scim+json"
TOKEN, CERTIFICATE = "/mnt/minivm/secrets/scim/token", "/mnt/minivm/secrets/scim-tls"


@dataclass(frozen=True, slots=True)
class ScimSettings:
    namespace: str
    secret: str
    rules: Rules
    token: Path = Path(TOKEN)
    # The folder with tls.crt and tls.key; None: HTTP, behind an Ingress.
    certificate: Path | None = None
    ports: tuple[int, int] = (PORT, PROBES)


def read_settings(env: Mapping[str, str]) -> ScimSettings:
    def needed(name: str) -> str:
        if not env.get(name):
            raise FleetError("read the receiver's settings", "it is not set", field=name)
        return env[name]

    first = needed("MINIVM_SCIM_FIRST")
    if not first.isdecimal() or not any(int(first) in ids for ids in IDS):
        raise FleetError("read the receiver's settings", f"{first} is no uid of a person", field="MINIVM_SCIM_FIRST")
    return ScimSettings(
        namespace=needed("MINIVM_POD_NAMESPACE"),
        secret=needed("MINIVM_SCIM_SECRET"),
        rules=Rules(needed("MINIVM_SCIM_GROUP"), int(first)),
        certificate=Path(CERTIFICATE) if env.get("MINIVM_SCIM_TLS") == "yes" else None,
    )


class PeopleSecret:
    """The Secret with people.yaml, through the API server."""

    def __init__(self, api: ApiClient, settings: ScimSettings) -> None:
        self.api, self.name, self.rules = api, settings.secret, settings.rules
        self._lock = asyncio.Lock()
        self._read: tuple[str, Roster] = ("", Roster(settings.rules))

    async def read(self) -> tuple[Roster, dict[str, Any]]:
        try:
            secret = await self.api.secret(self.name)
        except KubernetesError as error:
            hint = f"; kubectl create secret generic {self.name} makes it" if error.status == 404 else ""
            raise ScimError(503, f"{error}{hint}") from error
        metadata = secret["metadata"]
        version = f"{metadata['uid']}/{metadata['resourceVersion']}"
        if self._read[0] != version:
            data = {key: base64.b64decode(value) for key, value in (secret.get("data") or {}).items()}
            self._read = (version, load(data, self.rules, int(time.time())))
        return self._read[1], secret

    async def change(self, work: Callable[[Roster], T]) -> T:
        """Change the people. `work` may run again, on what another writer has made of them."""
        async with self._lock:
            for _ in range(MOST_TRIES):
                roster, secret = await self.read()
                roster = roster.copy()
                result = work(roster)
                data = secret.get("data") or {}
                changed = data | {key: base64.b64encode(text).decode() for key, text in dump(roster).items()}
                if changed == data:
                    return result
                size = sum(len(key) + len(value) * 3 // 4 for key, value in changed.items())
                if size > LARGEST:
                    raise ScimError(413, f"{size:,} bytes of people, and a Secret holds {LARGEST:,}: split the cluster")
                try:
                    await self.api.put_secret(self.name, secret | {"data": changed})
                except KubernetesError as error:
                    if error.status == 409:
                        continue
                    raise ScimError(503, str(error)) from error
                return result
        raise ScimError(
            503, f"other writers changed the Secret {self.name} {MOST_TRIES} times meanwhile; repeat the request"
        )


class ScimConnection(web.RequestHandler):
    """A connection with a bounded time and number of bytes. At the limit one without a valid token ends first."""

    bounds: dict[ScimConnection, None]
    is_known = False
    _received = 0
    _end: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.bounds[self] = None
        self._end = asyncio.get_running_loop().call_later(CONNECTION_S, self.abort)
        if len(self.bounds) > MOST_CONNECTIONS:
            next((other for other in self.bounds if not other.is_known), self).abort()

    def connection_lost(self, exc: BaseException | None) -> None:
        self.bounds.pop(self, None)
        if self._end:
            self._end.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._received += len(data)
        if self._received > MOST_BYTES:
            self.abort()
        else:
            super().data_received(data)

    def abort(self) -> None:
        self.bounds.pop(self, None)
        if isinstance(self.transport, asyncio.WriteTransport):
            self.transport.abort()


async def _accept(
    listener: socket.socket, protocol: Callable[[], ScimConnection], context: ssl.SSLContext | None
) -> None:
    """Accept connections. Each costs memory before its handshake ends: of too many, the oldest handshake ends first."""
    loop, handshakes = asyncio.get_running_loop(), dict[socket.socket, asyncio.Task[None]]()

    async def begin(accepted: socket.socket) -> None:
        within = HANDSHAKE_S if context else None
        try:
            with contextlib.suppress(OSError):  # also a handshake that fails or takes too long
                await loop.connect_accepted_socket(protocol, accepted, ssl=context, ssl_handshake_timeout=within)
        finally:
            handshakes.pop(accepted, None)

    def end_oldest() -> None:
        oldest = next(iter(handshakes))
        del handshakes[oldest]
        with contextlib.suppress(OSError):
            oldest.shutdown(socket.SHUT_RDWR)  # its transport closes it

    try:
        while True:
            try:
                accepted, _ = await loop.sock_accept(listener)
            except OSError:  # a connection that ended, or no descriptor
                await asyncio.sleep(0.1)
                continue
            handshakes[accepted] = loop.create_task(begin(accepted))
            if len(handshakes) > MOST_CONNECTIONS:
                end_oldest()
            await asyncio.sleep(0)  # a flood leaves the loop no other turn
    finally:
        while handshakes:
            end_oldest()


class Receiver:
    """Serve SCIM for one Secret."""

    def __init__(self, api: ApiClient, settings: ScimSettings, say: Callable[[str], object] = click.echo) -> None:
        self.settings, self.say = settings, say
        self.store = PeopleSecret(api, settings)
        self.problem = "the Secret was not read yet"
        self.answers: Counter[str] = Counter()
        self.stop = asyncio.Event()
        self._connections: dict[ScimConnection, None] = {}
        self._certificate: tuple[object, ...] = ()
        self._certificate_end: float | None = None  # unknown

    async def run(self) -> None:
        """Serve until `stop` is set."""
        quiet = logging.getLogger("minivm.scim")  # any client can send what is no HTTP
        quiet.addHandler(logging.NullHandler())
        quiet.propagate = False
        runner = web.AppRunner(self._make_application(), access_log=None, logger=quiet)
        await runner.setup()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER) if self.settings.certificate else None
        if context:
            self._load_certificate(context)
        port, probes = self.settings.ports
        server = await HttpServer(self._pages()).serve("0.0.0.0", probes)
        listener = socket.create_server(("0.0.0.0", port), backlog=socket.SOMAXCONN)
        listener.setblocking(False)
        accepting = asyncio.create_task(_accept(listener, self._connection_maker(runner, context, quiet), context))
        try:
            await self._check_until_stopped(accepting)
        finally:
            accepting.cancel()
            await asyncio.wait([accepting])
            listener.close()
            server.close()
            await runner.cleanup()

    def _make_application(self) -> web.Application:
        app = web.Application(middlewares=[self._guard], client_max_size=LARGEST)
        app.add_routes([
            web.get(resources.BASE + "/ServiceProviderConfig", self._discover),
            web.get(resources.BASE + "/{kind:ResourceTypes|Schemas}", self._discover),
            web.get(resources.BASE + "/{kind:ResourceTypes|Schemas}/{id}", self._discover),
            web.get(resources.BASE + "/{kind:Users|Groups}", self._query),
            web.post(resources.BASE + "/{kind:Users|Groups}", self._write),
            web.get(resources.BASE + "/{kind:Users|Groups}/{id}", self._query),
            web.put(resources.BASE + "/{kind:Users|Groups}/{id}", self._write),
            web.patch(resources.BASE + "/{kind:Users|Groups}/{id}", self._write),
            web.delete(resources.BASE + "/{kind:Users|Groups}/{id}", self._write),
        ])  # fmt: skip
        return app

    def _connection_maker(
        self, runner: web.AppRunner, context: ssl.SSLContext | None, quiet: logging.Logger
    ) -> Callable[[], ScimConnection]:
        manager, loop = runner.server, asyncio.get_running_loop()
        assert manager

        def make_connection() -> ScimConnection:
            if context:
                self._load_certificate(context)
            # Packed bodies are refused: a small one could grow without end.
            connection = ScimConnection(manager, loop=loop, logger=quiet, lingering_time=0, auto_decompress=False)
            connection.bounds = self._connections
            return connection

        return make_connection

    def _pages(self) -> dict[str, Callable[[], tuple[int, str]]]:
        """Return the pages for the kubelet and for Prometheus, which have a port of their own."""
        return {
            "/livez": lambda: (200, "ok\n"),
            "/readyz": self._report_readiness,
            "/metrics": lambda: (200, self._render_metrics()),
        }

    async def _check_until_stopped(self, accepting: asyncio.Task[None]) -> None:
        while not self.stop.is_set():
            if accepting.done():
                accepting.result()
            await self._check()
            try:
                await asyncio.wait_for(self.stop.wait(), CHECK_S)
            except TimeoutError:
                continue

    def _load_certificate(self, context: ssl.SSLContext) -> None:
        """Load the certificate if its files have changed; the present one stays if the new one is broken."""
        assert self.settings.certificate
        files = [self.settings.certificate / name for name in ("tls.crt", "tls.key")]
        try:
            stamp = tuple((file.stat().st_mtime_ns, file.stat().st_ino) for file in files)
            if stamp != self._certificate:
                context.load_cert_chain(files[0], files[1])
                self._certificate, self._certificate_end = stamp, read_expiry(files[0])
        except OSError as error:
            self.say(f"the certificate {files[0]} is not loaded: {one_line(str(error))}")

    def _read_tokens(self) -> list[bytes]:
        """Read the token for each request, since it changes: one a line, so that the old one may still count."""
        try:
            lines = self.settings.token.read_bytes().split()
        except OSError as error:
            raise ScimError(503, f"the token's file cannot be read: {error.strerror}") from None
        if not lines or any(len(line) < SHORTEST_TOKEN for line in lines):
            raise ScimError(503, f"a token has at least {SHORTEST_TOKEN} characters; put a longer one into the Secret")
        return lines

    def _authenticate(self, request: web.Request) -> None:
        scheme, _, sent = request.headers.get("Authorization", "").partition(" ")
        given = sent.strip().encode("utf-8", "surrogateescape")
        equal = [hmac.compare_digest(given, token) for token in self._read_tokens()]
        if not any(equal) or scheme.lower() != "bearer":
            raise ScimError(401, "the bearer token is absent or wrong")
        if isinstance(request.protocol, ScimConnection):
            request.protocol.is_known = True

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Let in the owner of the token alone, and answer every error as SCIM does."""
        try:
            self._authenticate(request)
            response: web.StreamResponse = await handler(request)
        except ScimError as error:
            response = _make_refusal(error.status, error.detail, error.scim_type)
        except web.HTTPException as error:
            response = _make_refusal(error.status, error.reason)
        except (ConnectionError, web.RequestPayloadError):
            response = _make_refusal(400, "the body did not arrive whole")
        except Exception:
            self.say(traceback.format_exc())
            response = _make_refusal(500, "a bug in the receiver; its log has more")
        self.answers[str(response.status)] += 1
        response.force_close()
        return response

    async def _discover(self, request: web.Request) -> web.Response:
        kind, key = request.match_info.get("kind"), request.match_info.get("id")
        if not kind:
            return _make_answer(resources.provider(LARGEST))
        if "filter" in request.query:
            raise ScimError(403, "what is discovered is not filtered")
        items = resources.schemas() if kind == "Schemas" else resources.resource_types()
        if not key:
            return _make_answer(resources.list_response(items, len(items)))
        match = next((item for item in items if item["id"].lower() == key.lower()), None)
        return _make_answer(match) if match else _make_refusal(404, "there is none of this id")

    async def _query(self, request: web.Request) -> web.Response:
        kind, key = request.match_info["kind"], request.match_info.get("id")
        roster, _ = await self.store.read()
        if key is None:
            return _make_answer(resources.find(roster, kind, request.query, int(time.time())))
        resource = _describe(roster, kind, key)
        etag = resource["meta"]["version"]
        if _matches(request.headers.get("If-None-Match", ""), etag):
            return web.Response(status=304, headers={"ETag": etag})
        return _make_answer(resources.select(resource, request.query), etag=etag)

    async def _write(self, request: web.Request) -> web.Response:
        kind, key = request.match_info["kind"], request.match_info.get("id", "")
        body = {} if request.method == "DELETE" else await _read_body(request)
        condition = request.headers.get("If-Match", "")

        def work(roster: Roster) -> dict[str, Any]:
            now = int(time.time())
            current = _describe(roster, kind, key) if key else {}
            if condition and key and not _matches(condition, current["meta"]["version"]):
                raise ScimError(412, "it has changed since the version of If-Match")
            if request.method == "DELETE":
                roster.delete(key, now)
                return current
            wanted = resources.patch(current, body, kind) if request.method == "PATCH" else body
            description = resources.read_request(wanted, kind, creates=not key)
            put = roster.put_user if kind == "Users" else roster.put_group
            return _describe(roster, kind, put(key, description, now))

        resource = await self.store.change(work)
        self.say(one_line(f"{request.method} {kind}/{resource['id']} {_find_name(resource)}"))
        if request.method == "DELETE":
            return web.Response(status=204)
        headers = {} if key else {"Location": resource["meta"]["location"]}
        answer = resources.select(resource, request.query)
        return _make_answer(answer, 200 if key else 201, etag=resource["meta"]["version"], **headers)

    async def _check(self) -> None:
        try:
            self._read_tokens()
            await self.store.read()
            problem = ""
        except ScimError as error:
            problem = error.detail
        if problem and problem != self.problem:
            self.say(problem)
        self.problem = problem

    def _report_readiness(self) -> tuple[int, str]:
        return (503, f"{self.problem}\n") if self.problem else (200, "ok\n")

    def _render_metrics(self) -> str:
        counts = [({"status": status}, str(count)) for status, count in sorted(self.answers.items())]
        lines = family("minivm_scim_ready", "1: people can be read and written.", [({}, "01"[not self.problem])])
        if self._certificate_end is not None:
            about, end = "End of the certificate in use.", f"{self._certificate_end:.0f}"
            lines += family("minivm_scim_certificate_end_timestamp_seconds", about, [({}, end)])
        return "\n".join([*lines, *family("minivm_scim_answers_total", "Answers.", counts, "counter")]) + "\n"


def _describe(roster: Roster, kind: str, key: str) -> dict[str, Any]:
    if key not in resources.keys_of(roster, kind):
        raise ScimError(404, f"there is no resource {key[:40]!r} in {kind}")
    return resources.with_meta(roster, kind, resources.describer(roster, kind, int(time.time()))(key))


def _find_name(resource: Mapping[str, Any]) -> str:
    return str(resource.get("userName") or resource.get("displayName"))


def _matches(header: str, etag: str) -> bool:
    listed = [item.strip().removeprefix("W/") for item in header.split(",")]
    return etag.removeprefix("W/") in listed or "*" in listed


async def _read_body(request: web.Request) -> dict[str, Any]:
    if request.headers.get("Content-Encoding", "identity") != "identity":
        raise ScimError(415, "packed bodies are refused; send plain JSON")
    try:
        body = json.loads(await request.read())
    except (ValueError, RecursionError):
        raise ScimError(400, "the body is no JSON", "invalidSyntax") from None
    if not isinstance(body, dict):
        raise ScimError(400, "the body is no JSON object", "invalidSyntax")
    return body


def _make_answer(data: Mapping[str, Any], status: int = 200, etag: str = "", **headers: str) -> web.Response:
    headers |= {"ETag": etag} if etag else {}
    headers |= {"Cache-Control": "no-store"} | ({"WWW-Authenticate": "Bearer"} if status == 401 else {})
    headers |= {"Retry-After": "5"} if status == 503 else {}
    return web.Response(text=json.dumps(data), status=status, content_type=SCIM_JSON, headers=headers)


def _make_refusal(status: int, detail: str, scim_type: str = "") -> web.Response:
    data = {"schemas": [resources.MESSAGE + "Error"], "status": str(status), "detail": detail}
    return _make_answer(data | ({"scimType": scim_type} if scim_type else {}), status)


async def serve(settings: ScimSettings) -> None:
    """Run until SIGTERM."""
    api = await ApiClient.open(settings.namespace, "")
    try:
        receiver = Receiver(api, settings)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, receiver.stop.set)
        await receiver.run()
    finally:
        await api.close()
