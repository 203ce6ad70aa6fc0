"""Poll what no watch delivers: Slurm's nodes and jobs, clocks, probes of dead machines, pods' pages.

`Observer.slurm` reads Slurm for each pass, and its jobs only when a decision needs them. `Observer.prove` collects for
silent machines what may prove their death: a kubelet that does not answer, an old lease, silent pods, and another
kubelet that answers as witness that the fleet's own network works. `PodPages` asks the pods for their conditions.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from ipaddress import IPv4Address, IPv6Address, ip_address
from urllib.parse import urlsplit

from fleet import FleetError
from fleet.act.api_client import SLURM, ApiClient, Object, steady
from fleet.act.slurm_client import SlurmClient
from fleet.act.watch_cache import WatchCache
from fleet.decide.causes import LEAVE, is_leaving, silent_for
from fleet.decide.conditions import strip_durations
from fleet.decide.drain import is_removable
from fleet.decide.fencing import find_suspects, pods_on
from fleet.decide.remediation import ACTED
from fleet.policy import Policy
from fleet.world.fields import Fields
from fleet.world.kubernetes import (
    COMPONENTS,
    CONTROLLER,
    WITH_PAGE,
    KubeCondition,
    KubeNode,
    KubePod,
    KubernetesView,
    is_true,
)
from fleet.world.pod_page import MOST_BYTES, READY, parse_page
from fleet.world.slurm import SlurmView
from fleet.world.snapshot import DeathProof, FleetSnapshot, Unknown, Worker

# Probes of machines that look dead: lease, kubelet, pods, and healthy kubelets as witnesses of the network.
LEASES = "kube-node-lease"
# The time in which a healthy machine answers; and the machines and witnesses that are probed in one pass.
WITHIN_S = 3.0
MOST = 8
WITNESSES = 3


class LeaseAges:
    """Time since each kubelet's lease last changed, by the fleet's clock: the times in them are the kubelets' own."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[str, float]] = {}

    async def follow(self, api: ApiClient, kubernetes: KubernetesView, policy: Policy) -> None:
        """Watch the leases of all silent Nodes, so that their age is known when one looks dead."""
        silent = find_suspects(kubernetes, replace(policy, dead_s=0.0), steady())[: 4 * MOST]
        self._seen = {node.name: self._seen[node.name] for node in silent if node.name in self._seen}
        await asyncio.gather(*(self.age(api, node.name) for node in silent))

    async def age(self, api: ApiClient, node: str) -> float | None:
        lease = await read_lease(api, node)
        if lease is None:
            return None
        version, now = str(Fields(lease).sub("metadata").data.get("resourceVersion")), time.monotonic()
        if self._seen.get(node, ("", 0.0))[0] != version:
            self._seen[node] = (version, now)
        return now - self._seen[node][1]


async def prove(
    api: ApiClient, kubernetes: KubernetesView, policy: Policy, leases: LeaseAges | None = None
) -> Mapping[str, DeathProof]:
    """Probe the machines that look dead. Without `leases`, the time in a lease gives its age."""
    if leases:
        await leases.follow(api, kubernetes, policy)
    nodes = find_suspects(kubernetes, policy, steady())[:MOST]
    if not nodes:
        return {}
    pods_by_node = pods_on(kubernetes)
    witness = asyncio.create_task(_is_witnessed(api, kubernetes.nodes.values()))
    results = await asyncio.gather(*(_probe(api, node, pods_by_node[node.name], leases) for node in nodes))
    network_is_up = await witness
    return {
        node.name: DeathProof(age, kubelet, pods, network_is_up)
        for node, (age, kubelet, pods) in zip(nodes, results, strict=True)
    }


async def _is_witnessed(api: ApiClient, nodes: Iterable[KubeNode]) -> bool:
    """Return whether most of a few random healthy kubelets answer. One kubelet could lie about its address."""
    nodes = list(nodes)
    claimed = Counter(node.address for node in nodes)
    server = urlsplit(api.server).hostname
    healthy = [
        node
        for node in nodes
        if silent_for(node, steady()) < 0 and claimed[node.address] == 1 and is_elsewhere(node.address, server)
    ]
    chosen = random.sample(healthy, min(WITNESSES, len(healthy)))
    return sum(await asyncio.gather(*(answers(node.address, node.port) for node in chosen))) * 2 > len(chosen)


def is_elsewhere(address: str, server: str | None) -> bool:
    """Return whether a kubelet there can be a witness: exclude the API server's machine and the fleet's own."""
    ip = _ip(address)
    if ip is None or not _is_of_a_host(ip) or address == server:
        return False
    with socket.socket(socket.AF_INET if ip.version == 4 else socket.AF_INET6, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # sends nothing; chooses the own address for this destination
        except OSError:
            return False
        return bool(ip_address(probe.getsockname()[0]) != ip)


async def _probe(
    api: ApiClient, node: KubeNode, pods: Iterable[KubePod], leases: LeaseAges | None
) -> tuple[float | None, bool | None, tuple[str, ...]]:
    addressed = [pod for pod in pods if pod.address]
    ports = [(node.address, node.port), *((pod.address, COMPONENTS[pod.component].port) for pod in addressed)]
    age = asyncio.create_task(leases.age(api, node.name) if leases else measure_lease_age(api, node.name))
    kubelet, *pod_answers = await asyncio.gather(*(answers(host, port) for host, port in ports))
    alive = tuple(pod.name for pod, up in zip(addressed, pod_answers, strict=True) if up)
    # Silence at an unusable address is no sign of death.
    usable = _ip(node.address) is not None and 0 < node.port < 1 << 16
    return await age, kubelet if usable else None, alive


def _ip(address: str) -> IPv4Address | IPv6Address | None:
    """Parse an address that means the same everywhere; a kubelet may report any text as its address."""
    try:
        return None if "%" in address else ip_address(address)
    except ValueError:
        return None


def _is_of_a_host(ip: IPv4Address | IPv6Address) -> bool:
    """Return whether the address may belong to another host or pod, and not only to this one or to a network."""
    return not (ip.is_loopback or ip.is_unspecified or ip.is_link_local or ip.is_multicast)


async def read_lease(api: ApiClient, node: str) -> Object | None:
    """Read a kubelet's lease; None: it cannot be read, or was never renewed."""
    words = {"name": node, "namespace": LEASES}
    try:
        lease = await api.ask(f"read the lease of {node}", (api.leases.read_namespaced_lease, words))
        return lease if read_renewal_time(lease) else None
    except FleetError:
        return None


def read_renewal_time(lease: Object) -> float:
    return Fields(lease).sub("spec").moment("renewTime")


async def measure_lease_age(api: ApiClient, node: str) -> float | None:
    lease = await read_lease(api, node)
    return None if lease is None else time.time() - read_renewal_time(lease)


async def answers(host: str, port: int) -> bool:
    """Return whether a connection is accepted or refused: both prove life."""
    if not host:
        return False
    try:
        async with asyncio.timeout(WITHIN_S):
            _, writer = await asyncio.open_connection(host, port)
        writer.close()
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError, OverflowError, ValueError):  # no such port, no such name
        return False
    return True


CLAIMS_S = 15.0
# Interval of new proofs; a proof is valid for three intervals.
PROOFS_S = 5.0
# How often slurmctld's clock is compared.
CLOCK_S = 30.0


def needs_jobs(snapshot: FleetSnapshot) -> bool:
    """Return whether a decision depends on the jobs: they are many, and mostly none does."""
    waiting = _list_awaiting_remedy(snapshot)
    return any(_needs_jobs(worker) or (worker.name in waiting and _is_idle(worker)) for worker in snapshot.workers())


def _list_awaiting_remedy(snapshot: FleetSnapshot) -> frozenset[str]:
    """Return the workers whose machines get a remedy once they are idle."""
    kubernetes = snapshot.kubernetes
    machines = {} if isinstance(kubernetes, Unknown) else kubernetes.machines or {}
    statuses = (machine.status for machine in machines.values() if machine.status.goal in ACTED)
    due = (status for status in statuses if not (status.remedy and status.remedy.done))
    return frozenset(name for status in due for name in status.worker.split())


def _is_idle(worker: Worker) -> bool:
    return worker.slurm is not None and worker.slurm.drained and not worker.slurm.record.busy


def _needs_jobs(worker: Worker) -> bool:
    """Return whether the pod may go: a node's record does not show suspended jobs."""
    node = worker.slurm
    if node is None or not node.drained or worker.pod.deleting:
        return False
    leaves = bool(worker.pod.ended) or LEAVE in worker.pod.annotations or is_leaving(node)
    return leaves or not (node.record.busy or worker.pod.free)


def needs_claims(snapshot: FleetSnapshot) -> bool:
    """Return whether a decision depends on waiting jobs and reservations: for removals, elastic pools, and lending."""
    kubernetes = snapshot.kubernetes
    if isinstance(kubernetes, Unknown):
        return False
    if any(guest.waits for guest in kubernetes.guests or ()):
        return True
    if any(pool.elastic for pool in (kubernetes.pools or {}).values()):
        return True
    return any(is_removable(node) and kubernetes.will_exist(node.name) is False for node in snapshot.orphans())


class Observer:
    def __init__(self, api: ApiClient, slurm: SlurmClient, policy: Callable[[], Policy]) -> None:
        self.api, self.rest, self.policy = api, slurm, policy
        self._claims_at = self._clock_at = float("-inf")
        # Claims that could not be read; valid until the next request.
        self._doubts: Mapping[str, str] = {}
        self._proofs: tuple[float, Mapping[str, DeathProof]] = (0.0, {})
        self._leases = LeaseAges()

    async def slurm(self, kubernetes: KubernetesView | Unknown) -> SlurmView | Unknown:
        try:
            side = await asyncio.to_thread(self.rest.look, jobs=False)
            await self._compare_clock()
            snapshot = FleetSnapshot(kubernetes, side)
            # Removals are not urgent, and a claim may last for months.
            needed = needs_claims(snapshot)
            claims = needed and time.monotonic() - self._claims_at >= CLAIMS_S
            self._doubts = self._doubts if needed else {}
            if claims or needs_jobs(snapshot):
                side = await self._with_jobs(side, claims=claims)
            return replace(side, doubts={**self._doubts, **side.doubts})
        except FleetError as error:
            return Unknown(str(error))

    async def _with_jobs(self, side: SlurmView, *, claims: bool) -> SlurmView:
        self._claims_at = time.monotonic() if claims else self._claims_at
        try:
            side = await asyncio.to_thread(self.rest.look, jobs=True, claims=claims)
        except FleetError as error:
            # Users decide how many jobs there are and how long their texts are. Drains must not depend on them.
            side = replace(side, doubts={"jobs": str(error)})
        self._doubts = side.doubts if claims else self._doubts
        return side

    async def _compare_clock(self) -> None:
        began = time.monotonic()
        if began - self._clock_at < CLOCK_S and not self.api.clocks.wrong(SLURM):
            return
        self._clock_at = began
        # A clock that cannot be read does not count as wrong.
        with contextlib.suppress(FleetError):
            if reported := await asyncio.to_thread(self.rest.server_time):
                self.api.clocks.note(SLURM, began, reported)

    async def prove_forever(self, cache: WatchCache, leads: Callable[[], bool]) -> None:
        """Renew the proofs concurrently with the main loop, because a dead machine answers late."""
        while True:
            if leads():
                proofs = await self.prove(cache.take_view(steady()), self._leases)
                self._proofs = (time.monotonic(), proofs)
            await asyncio.sleep(PROOFS_S)

    def proofs(self) -> Mapping[str, DeathProof]:
        """Return the proofs, unless they are too old."""
        at, proofs = self._proofs
        return proofs if time.monotonic() - at < 3 * PROOFS_S else {}

    async def prove(
        self, kubernetes: KubernetesView | Unknown, leases: LeaseAges | None = None
    ) -> Mapping[str, DeathProof]:
        if isinstance(kubernetes, Unknown):
            return {}
        return await prove(self.api, kubernetes, self.policy(), leases)


# The pods' pages `/conditions`, which the leader copies into their status. Any client that may write a pod's status
# chooses the address, so the request is a plain GET without a token or a name of the fleet. The fleet asks a pod that
# is not ready and a controller, which may take over, every few seconds, a ready one of another role every minute, and
# each at once when the kubelet's probe disagrees.

PAGE_WITHIN_S = 3.0
EVERY_S, SOON_S, LATER_S = 1.0, 5.0, 60.0
# Pods asked in one round, and at a time: 5,000 ready pods are 83 a second.
PAGES_MOST, AT_ONCE = 100, 50
LINE = 4096
_LENGTH = re.compile(rb"content-length: ([0-9]{1,6})\r?\n", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class PageAnswer:
    at: float  # monotonic
    ready: bool  # as the kubelet found it
    conditions: tuple[KubeCondition, ...]  # empty: no answer


class PodPages:
    def __init__(self, changed: Callable[[], object] = lambda: None, now: Callable[[], float] = time.monotonic) -> None:
        self.changed, self.now = changed, now
        self._answers: dict[str, PageAnswer] = {}

    def shown(self) -> Mapping[str, tuple[KubeCondition, ...]]:
        """Return the last conditions of each pod by uid; empty: the pod did not answer."""
        return {uid: answer.conditions for uid, answer in self._answers.items()}

    async def follow(self, world: Callable[[], KubernetesView | Unknown], leads: Callable[[], bool]) -> None:
        while True:
            kubernetes = world() if leads() else None
            if isinstance(kubernetes, KubernetesView):
                await self.ask_due([*kubernetes.pods.values(), *kubernetes.others.values()])
            elif kubernetes is None:
                self._answers = {}
            await asyncio.sleep(EVERY_S)

    async def ask_due(self, pods: Iterable[KubePod]) -> None:
        """Ask the pods that are due, the longest waiting first."""
        running = {pod.uid: pod for pod in pods if can_answer(pod)}
        self._answers = {uid: answer for uid, answer in self._answers.items() if uid in running}
        due = [pod for pod in running.values() if self._is_due(pod)]
        due.sort(key=lambda pod: self._answers[pod.uid].at if pod.uid in self._answers else 0.0)
        slots = asyncio.Semaphore(AT_ONCE)

        async def ask(pod: KubePod) -> None:
            async with slots:
                conditions = await read_page(pod)
            before = self._answers.get(pod.uid)
            self._answers[pod.uid] = PageAnswer(self.now(), is_ready(pod), conditions)
            if before is None or [*map(strip_durations, before.conditions)] != [*map(strip_durations, conditions)]:
                self.changed()

        await asyncio.gather(*(ask(pod) for pod in due[:PAGES_MOST]))

    def _is_due(self, pod: KubePod) -> bool:
        answer = self._answers.get(pod.uid)
        if answer is None or answer.ready != is_ready(pod):
            return True
        shows_ready = any(condition.type == READY and is_true(condition) for condition in answer.conditions)
        settled = answer.ready and shows_ready and not pod.deleting and pod.component != CONTROLLER
        return self.now() - answer.at >= (LATER_S if settled else SOON_S)


def is_ready(pod: KubePod) -> bool:
    """Return whether the kubelet's own probe finds the pod ready."""
    return is_true(pod.conditions.get("ContainersReady"))


def can_answer(pod: KubePod) -> bool:
    """Return whether the pod runs and has the page, at an address of a pod or a host: not one of this machine."""
    if not pod.http or pod.ended or pod.component not in WITH_PAGE:
        return False
    ip = _ip(pod.address)
    return ip is not None and _is_of_a_host(ip)


async def read_page(pod: KubePod) -> tuple[KubeCondition, ...]:
    """Return the conditions that the pod shows; none: it does not answer, or not in form."""
    try:
        async with asyncio.timeout(PAGE_WITHIN_S):
            return parse_page(await _get(pod.address, pod.http), pod.name)
    except (FleetError, OSError, TimeoutError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        return ()


async def _get(address: str, port: int) -> bytes:
    reader, writer = await asyncio.open_connection(address, port, limit=LINE)
    try:
        host = f"[{address}]" if ":" in address else address
        writer.write(f"GET /conditions HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n".encode())
        await writer.drain()
        head = await reader.readuntil(b"\r\n\r\n")
        length = _LENGTH.search(head)
        if not head.startswith(b"HTTP/1.1 200 ") or length is None or int(length[1]) > MOST_BYTES:
            raise FleetError("read the page /conditions", "wanted 200 with at most 64 KiB")
        return await reader.readexactly(int(length[1]))
    finally:
        writer.transport.abort()
