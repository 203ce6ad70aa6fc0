"""The page for people: served to a browser, read-only, without cookies; nothing in it is made where it is served.

It listens on the pod's own loopback: who sees it is who may forward a port of the pod, and that the API server decides.
A browser there has other pages open, too: what asks by another name than loopback's is such a page, and gets nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import resources
from urllib.parse import parse_qs, urlsplit

from fleet.act.safe_decide import decide
from fleet.act.slurm_client import SlurmClient
from fleet.act.watch_cache import WatchCache
from fleet.decide.decide import Decision
from fleet.decide.memory import Memory
from fleet.errors import FleetError
from fleet.policy import Policy
from fleet.report.page_data import Jobs, detail, picture
from fleet.world.slurm import Slurm
from fleet.world.snapshot import Snapshot, Unknown

# A request's first line and heads, and all the time that it has.
LONGEST = 8192
WITHIN_S = 5.0
# So many at once ask nothing yet, and so many have asked; of the first the oldest give way, the others are closed.
MOST = 32
Page = Callable[[], tuple[int, str]]


class HttpServer:
    longest, whom = LONGEST, "the kubelet"

    def __init__(self, pages: Mapping[str, Page]) -> None:
        self.pages = pages
        self._silent: dict[asyncio.StreamWriter, None] = {}  # those that have asked nothing yet, the oldest first
        self._asked = 0

    async def serve(self, host: str, port: int) -> asyncio.Server:
        try:
            return await asyncio.start_server(self._answer, host, port, limit=self.longest)
        except OSError as error:
            raise FleetError(f"listen for {self.whom}", str(error), field=f"{host}:{port}") from error

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            heads = await self._heads(reader, writer)
            if self._asked < MOST:
                await self._reply(heads, writer)
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # whoever does not ask as http does is not answered
        finally:
            writer.close()
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(WITHIN_S):
                    await writer.wait_closed()

    async def _heads(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        """Who asks nothing gives way to who may: strangers who do so again and again would else keep the kubelet out,
        which would start us anew for that."""
        if len(self._silent) >= MOST:
            oldest = next(iter(self._silent))
            del self._silent[oldest]
            oldest.transport.abort()
        self._silent[writer] = None
        try:
            async with asyncio.timeout(WITHIN_S):
                return await reader.readuntil(b"\r\n\r\n")
        finally:
            self._silent.pop(writer, None)

    async def _reply(self, heads: bytes, writer: asyncio.StreamWriter) -> None:
        self._asked += 1
        try:
            said = await self.reply(heads)
            async with asyncio.timeout(WITHIN_S):
                writer.write(said)
                await writer.drain()
        finally:
            self._asked -= 1

    async def reply(self, heads: bytes) -> bytes:
        return reply(heads, self.pages)


def reply(heads: bytes, pages: Mapping[str, Page]) -> bytes:
    method, _, rest = heads.partition(b"\r\n")[0].partition(b" ")
    page = pages.get(rest.partition(b" ")[0].partition(b"?")[0].decode("ascii", "replace"))
    if method not in (b"GET", b"HEAD"):
        status, text = 405, "read only\n"
    elif page is None:
        status, text = 404, f"there are {' '.join(pages)}\n"
    else:
        status, text = page()
    body = text.encode()
    head = f"HTTP/1.1 {status} {'OK' if status == 200 else 'No'}\r\nContent-Type: text/plain; charset=utf-8\r\n"
    head += f"Content-Length: {len(body)}\r\nConnection: close\r\nX-Content-Type-Options: nosniff\r\n\r\n"
    return head.encode() + (b"" if method == b"HEAD" else body)


LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
# Slurm is asked for people, and for nobody else, no more often than that.
SLURM_S = 15.0
DATA = "/fleet.json"
FILES = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
    "Vary": "Accept-Encoding",
    "Connection": "close",
}


@dataclass(frozen=True, slots=True)
class Content:
    type: str
    plain: bytes
    packed: bytes
    tag: str
    age: float = 0.0  # seconds since it was so


def content(type_: str, text: bytes, age: float = 0.0) -> Content:
    digest = hashlib.sha256(text).hexdigest()[:32]
    return Content(type_, text, gzip.compress(text, 5, mtime=0), f'"{digest}"', age)


class PageSource:
    """What there is to see. Whoever acts shows what he decided last; another one looks for himself when he is asked."""

    def __init__(
        self, cache: WatchCache, rest: SlurmClient, policy: Callable[[], Policy], acts: Callable[[], bool]
    ) -> None:
        self.cache, self.rest, self.policy, self.acts = cache, rest, policy, acts
        self._decided: tuple[float, Snapshot, Decision] | None = None
        self._own: tuple[float, Snapshot, Decision] | None = None
        self._jobs: tuple[float, Jobs | None] = (float("-inf"), None)
        self._one = asyncio.Lock()
        self._last: tuple[Slurm | None, float] = (None, 0.0)

    def saw(self, world: Snapshot, decision: Decision) -> None:
        self._decided, self._own = (time.monotonic(), world, decision), None
        if isinstance(world.slurm, Slurm):
            self._last = (world.slurm, time.time())

    async def now(self) -> tuple[float, Snapshot, Decision]:
        if self.acts() and self._decided:
            return self._decided
        async with self._one:
            if self._own is None or time.monotonic() - self._own[0] > SLURM_S:
                try:
                    slurm = await asyncio.to_thread(self.rest.look, jobs=False)
                    self._last, world = (slurm, time.time()), Snapshot(self.cache.world(), slurm)
                except FleetError as error:
                    last, at = self._last
                    world = Snapshot(self.cache.world(), Unknown(str(error)), last=last, last_at=at)
                decision = await asyncio.to_thread(decide, world, Memory(), time.time(), self.policy())
                self._own = (time.monotonic(), world, decision)
            return self._own

    async def jobs(self) -> Jobs | None:
        async with self._one:
            if time.monotonic() - self._jobs[0] > SLURM_S:
                try:
                    found = await asyncio.to_thread(self.rest.holding)
                except FleetError:
                    found = None
                self._jobs = (time.monotonic(), found)
            return self._jobs[1]


class PageServer(HttpServer):
    # A browser sends all the cookies that other programs have left on localhost.
    longest, whom = 32768, "people"

    def __init__(self, watch: PageSource, host: str) -> None:
        super().__init__({})
        self.watch, self.local = watch, host in LOOPBACK
        folder = resources.files("fleet") / "page"
        self._files = {path: content(type_, (folder / name).read_bytes()) for path, (name, type_) in FILES.items()}
        self._all: tuple[Decision, Content] | None = None
        self._one = asyncio.Lock()

    async def reply(self, heads: bytes) -> bytes:
        first, *lines = heads.decode("latin-1").split("\r\n")
        method, _, rest = first.partition(" ")
        asked = {key.strip().lower(): said.strip() for key, _, said in (line.partition(":") for line in lines)}
        if method not in ("GET", "HEAD"):
            return _whole(405, method, content("text/plain", b"read only\n"), asked)
        if self.local and _host(asked.get("host", "")) not in LOOPBACK:
            return _whole(403, method, content("text/plain", b"not by this name\n"), asked)
        try:
            target = urlsplit(rest.partition(" ")[0])
            path, about = target.path, parse_qs(target.query, max_num_fields=4).get("about", [""])[0]
        except ValueError:
            path, about = "", ""
        found = await self._data(about) if path == DATA else self._files.get(path)
        if found is None:
            return _whole(404, method, content("text/plain", b"no such page, or no such machine\n"), asked)
        return _whole(304 if asked.get("if-none-match") == found.tag else 200, method, found, asked)

    async def _data(self, about: str) -> Content | None:
        at, world, decision = await self.watch.now()
        age = time.monotonic() - at
        if about:
            said = detail(about, world, decision, await self.watch.jobs())
            return None if said is None else content("application/json", json.dumps(said).encode(), age)
        async with self._one:
            if self._all is None or self._all[0] is not decision:
                self._all = (decision, await asyncio.to_thread(self._draw, world, decision))
            return replace(self._all[1], age=age)

    def _draw(self, world: Snapshot, decision: Decision) -> Content:
        said = {"acts": self.watch.acts(), **picture(world, decision, self.watch.policy(), time.time())}
        return content("application/json", json.dumps(said, separators=(",", ":")).encode())


def _host(said: str) -> str:
    name = said[: said.rindex("]") + 1] if said.startswith("[") and "]" in said else said.partition(":")[0]
    return name.strip("[]").lower()


def _whole(status: int, method: str, found: Content, asked: Mapping[str, str]) -> bytes:
    packs = "gzip" in asked.get("accept-encoding", "") and len(found.plain) > 512
    body = b"" if status == 304 else found.packed if packs else found.plain
    headers = {
        **HEADERS,
        "Content-Type": f"{found.type}; charset=utf-8",
        "ETag": found.tag,
        "X-Fleet-Age": f"{found.age:.0f}",
        **({} if status == 304 else {"Content-Length": str(len(body))}),
        **({"Content-Encoding": "gzip"} if packs and status != 304 else {}),
    }
    head = f"HTTP/1.1 {status} {'OK' if status == 200 else 'No'}\r\n"
    head += "".join(f"{key}: {said}\r\n" for key, said in headers.items())
    return head.encode() + b"\r\n" + (b"" if method == "HEAD" else body)
