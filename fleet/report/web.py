"""HTTP servers: probes and metrics for the kubelet and Prometheus, and a read-only page for people.

The page listens on the pod's loopback, so the API server authorizes the users that may forward a port to it. Other
pages in the same browser could send requests to it: the server refuses any host name but loopback's.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from math import inf
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from fleet import FleetError
from fleet.act.api_client import ApiClient
from fleet.act.leader_election import Leader
from fleet.act.slurm_client import SlurmClient
from fleet.act.watch_cache import WatchCache
from fleet.decide.actions import Change, FleetMemory, Notice
from fleet.decide.decide import Decision, decide_safely
from fleet.policy import WEBHOOK_FILES, Policy
from fleet.report.jobs import JobTable, read_table, report_jobs
from fleet.report.status import Jobs, detail, picture
from fleet.world.pod_page import ACTIVE, ControllerPod, controllers
from fleet.world.slurm import SlurmView
from fleet.world.snapshot import FleetSnapshot, Unknown
from ground.certificates import list_expiries
from ground.metrics import family

# The bytes of a request's head, and the time for it.
LONGEST = 8192
WITHIN_S = 5.0
# The most idle connections, of which the oldest are closed first, and the most requests at a time.
MOST = 32
Page = Callable[[], tuple[int, str]]
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
# How often the page asks Slurm at most.
SLURM_S = 15.0
JOBS_S = 30.0  # a list of jobs may have many megabytes
DATA, JOBS = "/fleet.json", "/jobs.json"
FILES = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "Content-Security-Policy": CONTENT_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
    "Vary": "Accept-Encoding",
    "Connection": "close",
}


class HttpServer:
    """Serve small pages by GET and HEAD. Bounds connections, bytes and time, since any client may connect."""

    longest, client = LONGEST, "the kubelet"

    def __init__(self, pages: Mapping[str, Page]) -> None:
        self.pages = pages
        self._idle: dict[asyncio.StreamWriter, None] = {}  # connections without a request, the oldest first
        self._requests = 0

    async def serve(self, host: str, port: int) -> asyncio.Server:
        try:
            return await asyncio.start_server(self._handle, host, port, limit=self.longest)
        except OSError as error:
            raise FleetError(f"listen for {self.client}", str(error), field=f"{host}:{port}") from error

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await self._read_head(reader, writer)
            if self._requests < MOST:
                await self._answer(head, writer)
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # no valid request
        finally:
            writer.close()
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(WITHIN_S):
                    await writer.wait_closed()

    async def _read_head(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        """Read a request's head. At the limit the oldest idle connection is closed.

        Otherwise idle connections could keep out the kubelet, which would restart the fleet.
        """
        if len(self._idle) >= MOST:
            oldest = next(iter(self._idle))
            del self._idle[oldest]
            oldest.transport.abort()
        self._idle[writer] = None
        try:
            async with asyncio.timeout(WITHIN_S):
                return await reader.readuntil(b"\r\n\r\n")
        finally:
            self._idle.pop(writer, None)

    async def _answer(self, head: bytes, writer: asyncio.StreamWriter) -> None:
        self._requests += 1
        try:
            answer = await self.reply(head)
            async with asyncio.timeout(WITHIN_S):
                writer.write(answer)
                await writer.drain()
        finally:
            self._requests -= 1

    async def reply(self, head: bytes) -> bytes:
        method, _, rest = head.partition(b"\r\n")[0].partition(b" ")
        page = self.pages.get(rest.partition(b" ")[0].partition(b"?")[0].decode("ascii", "replace"))
        if method not in (b"GET", b"HEAD"):
            status, text = 405, "read only\n"
        elif page is None:
            status, text = 404, f"there are {' '.join(self.pages)}\n"
        else:
            status, text = page()
        headers = {"Content-Type": "text/plain; charset=utf-8", "Content-Length": str(len(text.encode()))}
        headers |= {"Connection": "close", "X-Content-Type-Options": "nosniff"}
        return _response(status, headers, b"" if method == b"HEAD" else text.encode())


def _response(status: int, headers: Mapping[str, str], body: bytes) -> bytes:
    lines = [f"HTTP/1.1 {status} {'OK' if status == 200 else 'No'}", *(f"{key}: {headers[key]}" for key in headers)]
    return "\r\n".join([*lines, "", ""]).encode() + body


@dataclass(frozen=True, slots=True)
class Content:
    type: str
    plain: bytes
    packed: bytes
    tag: str
    age: float = 0.0  # seconds since the data was current


def content(type_: str, text: bytes, age: float = 0.0) -> Content:
    digest = hashlib.sha256(text).hexdigest()[:32]
    return Content(type_, text, gzip.compress(text, 5, mtime=0), f'"{digest}"', age)


class PageSource:
    """The data of the page: the leader's last decision; on a standby, a fresh look on request."""

    def __init__(
        self, cache: WatchCache, rest: SlurmClient, policy: Callable[[], Policy], acts: Callable[[], bool]
    ) -> None:
        self.cache, self.rest, self.policy, self.acts = cache, rest, policy, acts
        self._decided: tuple[float, FleetSnapshot, Decision] | None = None
        self._own: tuple[float, FleetSnapshot, Decision] | None = None
        self._jobs: tuple[float, Jobs | None] = (float("-inf"), None)
        self._table: tuple[float, JobTable | None, str] = (float("-inf"), None, "")
        self._lock, self._table_lock = asyncio.Lock(), asyncio.Lock()
        self._last: tuple[SlurmView | None, float] = (None, 0.0)

    def update(self, snapshot: FleetSnapshot, decision: Decision) -> None:
        self._decided, self._own = (time.monotonic(), snapshot, decision), None
        if isinstance(snapshot.slurm, SlurmView):
            self._last = (snapshot.slurm, time.time())

    async def now(self) -> tuple[float, FleetSnapshot, Decision]:
        if self.acts() and self._decided:
            return self._decided
        async with self._lock:
            if self._own is None or time.monotonic() - self._own[0] > SLURM_S:
                try:
                    slurm = await asyncio.to_thread(self.rest.look, jobs=False)
                    self._last, snapshot = (slurm, time.time()), FleetSnapshot(self.cache.world(), slurm)
                except FleetError as error:
                    last, at = self._last
                    snapshot = FleetSnapshot(self.cache.world(), Unknown(str(error)), last=last, last_at=at)
                decision = await asyncio.to_thread(decide_safely, snapshot, FleetMemory(), time.time(), self.policy())
                self._own = (time.monotonic(), snapshot, decision)
            return self._own

    async def jobs(self) -> Jobs | None:
        async with self._lock:
            if time.monotonic() - self._jobs[0] > SLURM_S:
                try:
                    jobs = await asyncio.to_thread(self.rest.holding)
                except FleetError:
                    jobs = None
                self._jobs = (time.monotonic(), jobs)
            return self._jobs[1]

    async def table(self) -> tuple[float, JobTable | None, str]:
        """Return when Slurm was asked for its jobs, the jobs, and why they are not known. Jobs are never old ones."""
        async with self._table_lock:
            if time.monotonic() - self._table[0] > JOBS_S:
                table, why = None, ""
                try:
                    table = await asyncio.to_thread(self._read_table)
                except FleetError as error:
                    why = str(error)
                self._table = (time.monotonic(), table, why)
            return self._table

    def _read_table(self) -> JobTable:
        return read_table(self.rest.jobs(), time.time(), names=self.policy().job_names)


class PageServer(HttpServer):
    # A browser sends all cookies that other programs left on localhost.
    longest, client = 32768, "people"

    def __init__(self, source: PageSource, host: str) -> None:
        super().__init__({})
        self.source, self.local = source, host in LOOPBACK
        folder = resources.files("fleet") / "page"
        self._files = {path: content(type_, (folder / name).read_bytes()) for path, (name, type_) in FILES.items()}
        self._all: tuple[Decision, Content] | None = None
        self._lock = asyncio.Lock()

    async def reply(self, head: bytes) -> bytes:
        first, *lines = head.decode("latin-1").split("\r\n")
        method, _, rest = first.partition(" ")
        sent = {key.strip().lower(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
        if method not in ("GET", "HEAD"):
            return _page_response(405, method, content("text/plain", b"read only\n"), sent)
        if self.local and _host_name(sent.get("host", "")) not in LOOPBACK:
            return _page_response(403, method, content("text/plain", b"not by this name\n"), sent)
        try:
            target = urlsplit(rest.partition(" ")[0])
            path, query = target.path, parse_qs(target.query, max_num_fields=4)
        except ValueError:
            path, query = "", {}
        about, find = (query.get(key, [""])[0] for key in ("about", "find"))
        if path == JOBS:
            page: Content | None = await self._job_data(find)
        else:
            page = await self._data(about) if path == DATA else self._files.get(path)
        if page is None:
            return _page_response(404, method, content("text/plain", b"no such page, or no such machine\n"), sent)
        return _page_response(304 if sent.get("if-none-match") == page.tag else 200, method, page, sent)

    async def _data(self, about: str) -> Content | None:
        at, snapshot, decision = await self.source.now()
        age = time.monotonic() - at
        if about:
            data = detail(about, snapshot, decision, await self.source.jobs())
            return None if data is None else content("application/json", json.dumps(data).encode(), age)
        async with self._lock:
            if self._all is None or self._all[0] is not decision:
                self._all = (decision, await asyncio.to_thread(self._draw, snapshot, decision))
            return replace(self._all[1], age=age)

    async def _job_data(self, find: str) -> Content:
        at, table, why = await self.source.table()
        data = await asyncio.to_thread(report_jobs, table, why, find)
        data["names"] = self.source.policy().job_names
        return content("application/json", json.dumps(data, separators=(",", ":")).encode(), time.monotonic() - at)

    def _draw(self, snapshot: FleetSnapshot, decision: Decision) -> Content:
        data = {"acts": self.source.acts(), **picture(snapshot, decision, self.source.policy(), time.time())}
        return content("application/json", json.dumps(data, separators=(",", ":")).encode())


def _host_name(host: str) -> str:
    name = host[: host.rindex("]") + 1] if host.startswith("[") and "]" in host else host.partition(":")[0]
    return name.strip("[]").lower()


def _page_response(status: int, method: str, page: Content, sent: Mapping[str, str]) -> bytes:
    packs = "gzip" in sent.get("accept-encoding", "") and len(page.plain) > 512
    body = b"" if status == 304 else page.packed if packs else page.plain
    headers = {
        **HEADERS,
        "Content-Type": f"{page.type}; charset=utf-8",
        "ETag": page.tag,
        "X-Fleet-Age": f"{page.age:.0f}",
        **({} if status == 304 else {"Content-Length": str(len(body))}),
        **({"Content-Encoding": "gzip"} if packs and status != 304 else {}),
    }
    return _response(status, headers, b"" if method == "HEAD" else body)


# A loop without a pass for this time hangs: a pass asks two servers, each with its deadlines.
HANGS_S = 300.0


@dataclass(slots=True)
class LoopStats:
    """Counts and times of the loop, for the kubelet's probes and for Prometheus."""

    last_pass: float  # monotonic: the last pass or change
    leader: bool = False
    lease_known: bool = False  # the Lease could be read
    kubernetes: str = "not asked yet"  # why it is unknown; "": it is known
    slurm: str = ""  # the same; only the leader asks Slurm
    mistake: str = ""  # the bug because of which nothing is decided
    workers: int = 0
    done: Counter[str] = field(default_factory=Counter)
    late: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    notices: Counter[str] = field(default_factory=Counter)
    controllers: tuple[ControllerPod, ...] = ()
    # When the first certificate of each of the webhooks' files expires.
    certificates: Mapping[str, float] = field(default_factory=dict)
    # By how much the fleet's clock is ahead of a server's, by server.
    clock_offsets: Mapping[str, float] = field(default_factory=dict)

    def update(self, snapshot: FleetSnapshot, notices: tuple[Notice, ...], mistake: str = "") -> None:
        self.mistake = mistake
        self.slurm = snapshot.slurm.why if isinstance(snapshot.slurm, Unknown) else ""
        self.workers = 0 if isinstance(snapshot.kubernetes, Unknown) else len(snapshot.kubernetes.pods)
        self.notices = Counter(notice.kind for notice in notices)
        kubernetes = snapshot.kubernetes
        self.controllers = () if isinstance(kubernetes, Unknown) else tuple(controllers(kubernetes))

    def alive(self, now: float) -> tuple[int, str]:
        silent = now - self.last_pass
        return (200, "ok\n") if silent < HANGS_S else (503, f"the loop has made no pass for {silent:.0f} s\n")

    def ready(self) -> tuple[int, str]:
        """Answer the readiness probe.

        An outage of Slurm does not count, since another fleet would not end it. A bug does: another release may be
        without it, and a roll-out to a release with it stops.
        """
        if self.kubernetes:
            return 503, f"Kubernetes is not known: {self.kubernetes}\n"
        if not self.lease_known:
            return 503, "the Lease cannot be read\n"
        if self.leader and self.mistake:
            return 503, f"{self.mistake}\n"
        return 200, f"{'acts' if self.leader else 'waits for the Lease'}\n"

    def metrics(self) -> str:
        sides = [({"side": "kubernetes"}, "01"[not self.kubernetes])]
        sides += [({"side": "slurm"}, "01"[not self.slurm])] if self.leader else []
        lines = family("minivm_fleet_leader", "1: this fleet acts.", [({}, "01"[self.leader])])
        lines += family("minivm_fleet_known", "0: this side is unknown, and nothing is done.", sides)
        if self.leader:
            about = "0: a bug in the fleet keeps it from deciding, and nothing is done."
            lines += family("minivm_fleet_decided", about, [({}, "01"[not self.mistake])])
        lines += family("minivm_fleet_workers", "Worker pods.", [({}, str(self.workers))])
        lines += self._of_controllers() if self.leader else []
        lines += family("minivm_fleet_stands", "Notices that hold now, by kind.", _samples("kind", self.notices))
        ahead = [({"of": server}, f"{seconds:.0f}") for server, seconds in sorted(self.clock_offsets.items())]
        about = "By how much the fleet's clock is ahead, at least."
        lines += family("minivm_fleet_clock_ahead_seconds", about, ahead)
        ends = [({"file": f"webhook/{name}"}, f"{end:.0f}") for name, end in sorted(self.certificates.items())]
        about = "End of the first certificate of a file for webhooks."
        lines += family("minivm_fleet_certificate_end_timestamp_seconds", about, ends)
        for name, about, counted in (
            ("changes", "Changes that were made.", self.done),
            ("late", "Changes that did nothing, because the state was no longer as it was seen.", self.late),
            ("failures", "Changes that were refused or not answered.", self.failed),
        ):
            lines += family(f"minivm_fleet_{name}_total", about, _samples("action", counted), "counter")
        return "\n".join(lines) + "\n"

    def _of_controllers(self) -> list[str]:
        """Return the metrics of several controllers; none of a single one, which always acts."""
        known = [controller for controller in self.controllers if controller.role]
        active = [({"pod": controller.pod.name}, "01"[controller.role == ACTIVE]) for controller in known]
        lines = family("minivm_fleet_controller_active", "1: this controller acts, 0: it stands by.", active)
        terms = [
            ({"pod": controller.pod.name}, str(controller.term)) for controller in known if controller.role == ACTIVE
        ]
        lines += family("minivm_fleet_controller_term", "The term of the controller that acts.", terms)
        took = [
            ({"pod": controller.pod.name}, f"{controller.takeover.seconds:.1f}")
            for controller in known
            if controller.takeover
        ]
        about = "How long the last hand-over or take-over took."
        return lines + family("minivm_fleet_controller_takeover_seconds", about, took)


# Certificates last for weeks, and reading one runs a program.
CERTIFICATES_S = 600.0


def stats_pages(
    stats: LoopStats, leader: Leader, cache: WatchCache, api: ApiClient, secret: Path = Path(WEBHOOK_FILES)
) -> HttpServer:
    """Serve probes and metrics; leadership and Kubernetes are read at each request."""
    read_at = -inf

    def ready() -> tuple[int, str]:
        stats.lease_known, stats.leader = leader.lease_known, leader.holds()
        stats.kubernetes, stats.clock_offsets = cache.unknown(), api.clocks.offsets
        return stats.ready()

    def metrics() -> tuple[int, str]:
        nonlocal read_at
        ready()
        if time.monotonic() - read_at > CERTIFICATES_S:
            read_at, stats.certificates = time.monotonic(), list_expiries(secret)
        return 200, stats.metrics()

    return HttpServer({"/livez": lambda: stats.alive(time.monotonic()), "/readyz": ready, "/metrics": metrics})


def _samples(label: str, counted: Counter[str]) -> list[tuple[dict[str, str], str]]:
    return [({label: key}, str(count)) for key, count in sorted(counted.items())]


def name_of(change: Change) -> str:
    return type(change).__name__.lower()
