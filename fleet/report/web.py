"""The HTTP servers: probes and metrics for the kubelet and Prometheus, and a read-only page for people.

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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any
from urllib.parse import parse_qs, urlsplit

from fleet.act.safe_decide import decide
from fleet.act.slurm_client import SlurmClient
from fleet.act.watch_cache import WatchCache
from fleet.decide.actions import about
from fleet.decide.decide import Decision
from fleet.decide.machines import line
from fleet.decide.memory import FleetMemory
from fleet.errors import FleetError
from fleet.policy import Policy
from fleet.report.events import in_words
from fleet.report.status import Report, budgets, controller_, pools, unknown, worker_
from fleet.world.controllers import controllers
from fleet.world.kubernetes import KubeNode, KubernetesView
from fleet.world.machine import MachineObject, MachineStatus, machine_status_json
from fleet.world.slurm import SlurmView
from fleet.world.snapshot import FleetSnapshot, Unknown, Worker

# The data of the page: each machine with its state and what holds it, and all details of one machine.
# Text from users and Kubernetes becomes one short printable line, and every list is bounded. Jobs appear as numbers
# only: the operator asks as Slurm's own user, and Slurm may hide names and owners from the reader.
# Labels of a Node with its location, the nearest first.
RACKS = ("topology.kubernetes.io/rack", "network.topology.nvidia.com/leaf", "topology.kubernetes.io/zone")
CELLS, SAID = 20_000, 200
SHORT, LONG = 200, 1024
# The kinds of notices that propose something.
PROPOSED = frozenset({"propose", "dead"})
WHOLE = frozenset({"fleet", "Slurm", "Kubernetes"})
Jobs = Mapping[str, tuple[str, ...]]


def picture(snapshot: FleetSnapshot, decision: Decision, policy: Policy, now: float) -> Report:
    kubernetes = None if isinstance(snapshot.kubernetes, Unknown) else snapshot.kubernetes
    workers = list(snapshot.shown_workers())
    answers, missing = isinstance(snapshot.slurm, SlurmView), unknown(snapshot)
    # Notices about the whole fleet come first, so that the limit does not cut them.
    first = sorted(decision.notices, key=lambda notice: notice.about not in WHOLE)
    notices = [(notice.about, notice.kind, line(notice.text, LONG)) for notice in first]
    proposals = [_notice(*notice) for notice in notices if notice[1] in PROPOSED]
    holds = [_notice(*notice) for notice in notices if notice[1] not in PROPOSED]
    cells = (
        list(_cells(kubernetes, workers, {about: kind for about, kind, _ in notices}, answers)) if kubernetes else []
    )
    return {
        "unknown": [f"{side.capitalize()} does not answer: {gone['why'][:SHORT]}" for side, gone in missing.items()],
        # When slurmctld answered last, where it does not answer now and this process has seen an answer.
        "slurmAt": int(snapshot.last_at) if not answers and snapshot.last is not None else None,
        "cells": cells[:CELLS],
        "controllers": [controller_(each) for each in controllers(kubernetes)] if kubernetes else [],
        "pools": pools(workers, snapshot, policy),
        "budgets": budgets(workers, snapshot, policy, now),
        "due": [line(in_words(change), SHORT) for change in decision.changes[:SAID]],
        "holds": holds[:SAID],
        "proposals": proposals[:SAID],
        # The full numbers, beyond the limits.
        "all": {
            "cells": len(cells),
            "due": len(decision.changes),
            "holds": len(holds),
            "proposals": len(proposals),
        },
    }


def _notice(about: str, kind: str, text: str) -> Report:
    return {"about": about, "kind": kind, "text": text}


def _cells(
    kubernetes: KubernetesView, workers: list[Worker], kinds: Mapping[str, str], answers: bool
) -> Iterator[Report]:
    """Yield one cell for each worker, and one for each machine without a worker.

    Empty fields are left out: a page of 5,000 cells is sent every few seconds.
    """
    machines = kubernetes.machines or {}
    machine_of_node = _by_node(machines)
    for worker in workers:
        machine = machine_of_node.get(worker.node.uid if worker.node else "")
        kind = kinds.get(worker.name) or kinds.get(worker.pod.node)
        yield _without_empty(
            name=worker.name,
            pool=line(worker.pod.pool, SHORT),
            rack=rack(worker.node),
            node=worker.pod.node,
            state=state(worker, known=answers),
            reason=reason(worker, known=answers),
            cordoned=bool(worker.node and worker.node.cordoned),
            goal=machine.status.goal if machine and machine.status.goal != "up" else "",
            told="proposal" if kind in PROPOSED else "hold" if kind else "",
        )
    node_uids_with_workers = {worker.node.uid for worker in workers if worker.node}
    for name, machine in sorted(machines.items()):
        if machine.status.node_uid not in node_uids_with_workers:
            status = machine.status
            yield _without_empty(
                name=name,
                rack=rack(kubernetes.nodes.get(status.node)),
                node=status.node,
                state=_without_worker(status, kubernetes),
                reason=line(status.why or status.verdict, SHORT),
                goal=status.goal if status.goal != "up" else "",
            )


def _without_empty(**values: object) -> Report:
    return {key: value for key, value in values.items() if value}


def _by_node(machines: Mapping[str, MachineObject]) -> Mapping[str, MachineObject]:
    return {machine.status.node_uid: machine for machine in machines.values() if machine.status.node_uid}


def _is_held(worker: Worker) -> bool:
    return worker.slurm is not None and (worker.slurm.drained or worker.slurm.down)


def _without_worker(status: MachineStatus, kubernetes: KubernetesView) -> str:
    """Return the state of a machine without a worker; its object may still have an older state."""
    node = kubernetes.nodes.get(status.node)
    if node is not None and node.fenced:
        return "GivenUp"
    return status.state if status.state in ("NoWorker", "GivenUp", "Absent") else "NoWorker"


def state(worker: Worker, *, known: bool = True) -> str:
    """Return the state that the pod's condition shows, and whether the worker has jobs."""
    shown = str(worker_(worker, known=known)["state"])
    return "Busy" if shown == "TakesJobs" and worker.slurm and worker.slurm.record.busy else shown


def reason(worker: Worker, *, known: bool) -> str:
    """Return why the worker takes no jobs; Slurm may keep an old reason of a worker that takes jobs."""
    if worker.slurm is not None:
        return line(worker.slurm.reason, SHORT) if _is_held(worker) else ""
    return line(str(worker_(worker, known=known)["reason"]), SHORT)


def rack(node: KubeNode | None) -> str:
    return line(next((node.labels[key] for key in RACKS if node.labels.get(key)), ""), SHORT) if node else ""


def detail(name: str, snapshot: FleetSnapshot, decision: Decision, jobs: Jobs | None) -> Report | None:
    """Return all facts about one cell; None: no such cell. `jobs`: by node; None: not known."""
    kubernetes = snapshot.kubernetes
    if isinstance(kubernetes, Unknown):
        return None
    machines = kubernetes.machines or {}
    answers = isinstance(snapshot.slurm, SlurmView)
    worker = next((candidate for candidate in snapshot.shown_workers() if candidate.name == name), None)
    if worker is None and name not in machines:
        return None
    if worker is not None:
        node = worker.node
        machine = _by_node(machines).get(node.uid if node else "")
    else:
        machine = machines[name]
        node = kubernetes.nodes.get(machine.status.node)
    names = {name, *([node.name] if node else []), *([machine.name] if machine else [])}
    shown: dict[str, Any] = {"name": name, "rack": rack(node)}
    if worker is not None:
        holding = None if jobs is None else jobs.get(name, ())
        shown |= worker_(worker, known=answers) | {"state": state(worker, known=answers), "leaves": worker.pod.deleting}
        shown |= {"jobs": None if holding is None else list(holding[:SAID]), "jobsInAll": len(holding or ())}
    elif machine is not None:
        shown["state"] = _without_worker(machine.status, kubernetes)
    if node is not None:
        shown["signs"] = [
            {
                "type": line(key, SHORT),
                "status": line(condition.status, SHORT),
                "text": line(condition.message or condition.reason, LONG),
            }
            for key, condition in sorted(node.conditions.items())[:SAID]
        ]
    if machine is not None:
        shown["machine"] = {"name": machine.name, **_short(machine_status_json(machine.status))}
    shown["stands"] = [
        _notice(notice.about, notice.kind, line(notice.text, LONG))
        for notice in decision.notices
        if notice.about in names
    ]
    shown["due"] = [line(in_words(change), SHORT) for change in decision.changes if about(change) in names]
    return shown


def _short(value: Any) -> Any:
    if isinstance(value, str):
        return line(value, LONG)
    if isinstance(value, dict):
        return {key: _short(item) for key, item in value.items()}
    return [_short(item) for item in value[:SAID]] if isinstance(value, list) else value


# The bytes of a request's head, and the time for it.
LONGEST = 8192
WITHIN_S = 5.0
# The most idle connections, of which the oldest are closed first, and the most requests at a time.
MOST = 32
Page = Callable[[], tuple[int, str]]
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
# How often the page asks Slurm at most.
SLURM_S = 15.0
DATA = "/fleet.json"
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
        self._lock = asyncio.Lock()
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
                decision = await asyncio.to_thread(decide, snapshot, FleetMemory(), time.time(), self.policy())
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
            path, about = target.path, parse_qs(target.query, max_num_fields=4).get("about", [""])[0]
        except ValueError:
            path, about = "", ""
        found = await self._data(about) if path == DATA else self._files.get(path)
        if found is None:
            return _page_response(404, method, content("text/plain", b"no such page, or no such machine\n"), sent)
        return _page_response(304 if sent.get("if-none-match") == found.tag else 200, method, found, sent)

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

    def _draw(self, snapshot: FleetSnapshot, decision: Decision) -> Content:
        data = {"acts": self.source.acts(), **picture(snapshot, decision, self.source.policy(), time.time())}
        return content("application/json", json.dumps(data, separators=(",", ":")).encode())


def _host_name(host: str) -> str:
    name = host[: host.rindex("]") + 1] if host.startswith("[") and "]" in host else host.partition(":")[0]
    return name.strip("[]").lower()


def _page_response(status: int, method: str, found: Content, sent: Mapping[str, str]) -> bytes:
    packs = "gzip" in sent.get("accept-encoding", "") and len(found.plain) > 512
    body = b"" if status == 304 else found.packed if packs else found.plain
    headers = {
        **HEADERS,
        "Content-Type": f"{found.type}; charset=utf-8",
        "ETag": found.tag,
        "X-Fleet-Age": f"{found.age:.0f}",
        **({} if status == 304 else {"Content-Length": str(len(body))}),
        **({"Content-Encoding": "gzip"} if packs and status != 304 else {}),
    }
    return _response(status, headers, b"" if method == "HEAD" else body)
