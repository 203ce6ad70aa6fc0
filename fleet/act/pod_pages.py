"""Read the pods' pages `/conditions`, for the leader to write into their status.

The request carries no token and no name of the fleet's: an address in a pod's status gets nothing but a GET. A pod that
is not ready is asked every few seconds, a ready one every minute, and each at once when the kubelet finds otherwise.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from fleet.decide.conditions import lasting
from fleet.errors import FleetError
from fleet.world.kubernetes import KubeCondition, KubePod, KubernetesView
from fleet.world.pod_page import MOST_BYTES, READY, parse_page
from fleet.world.snapshot import Unknown

WITHIN_S = 3.0
EVERY_S, SOON_S, LATER_S = 1.0, 5.0, 60.0
# Pods asked in one round, and at a time: 5,000 ready pods are 83 a second.
MOST, AT_ONCE = 100, 50
LINE = 4096
COMPONENTS = ("controller", "login", "worker")
_LENGTH = re.compile(rb"content-length: ([0-9]{1,6})\r?\n", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class PageAnswer:
    at: float  # monotonic
    ready: bool  # as the kubelet found it
    told: tuple[KubeCondition, ...]  # empty: no answer


class PodPages:
    def __init__(self, changed: Callable[[], object] = lambda: None, now: Callable[[], float] = time.monotonic) -> None:
        self.changed, self.now = changed, now
        self._asked: dict[str, PageAnswer] = {}

    def told(self) -> Mapping[str, tuple[KubeCondition, ...]]:
        """Return what each pod showed at last, by its uid; empty: it did not answer."""
        return {uid: asked.told for uid, asked in self._asked.items()}

    async def follow(self, world: Callable[[], KubernetesView | Unknown], leads: Callable[[], bool]) -> None:
        while True:
            kubernetes = world() if leads() else None
            if isinstance(kubernetes, KubernetesView):
                await self.ask_due([*kubernetes.pods.values(), *kubernetes.others.values()])
            elif kubernetes is None:
                self._asked = {}
            await asyncio.sleep(EVERY_S)

    async def ask_due(self, pods: Iterable[KubePod]) -> None:
        """Ask the pods that are due, those first that were asked longest ago."""
        running = {pod.uid: pod for pod in pods if can_answer(pod)}
        self._asked = {uid: asked for uid, asked in self._asked.items() if uid in running}
        due = [pod for pod in running.values() if self._is_due(pod)]
        due.sort(key=lambda pod: self._asked[pod.uid].at if pod.uid in self._asked else 0.0)
        slots = asyncio.Semaphore(AT_ONCE)

        async def ask(pod: KubePod) -> None:
            async with slots:
                told = await read_page(pod)
            before = self._asked.get(pod.uid)
            self._asked[pod.uid] = PageAnswer(self.now(), is_ready(pod), told)
            if before is None or [*map(lasting, before.told)] != [*map(lasting, told)]:
                self.changed()

        await asyncio.gather(*(ask(pod) for pod in due[:MOST]))

    def _is_due(self, pod: KubePod) -> bool:
        asked = self._asked.get(pod.uid)
        if asked is None or asked.ready != is_ready(pod):
            return True
        shows_ready = any(each.type == READY and each.status == "True" for each in asked.told)
        settled = asked.ready and shows_ready and not pod.deleting
        return self.now() - asked.at >= (LATER_S if settled else SOON_S)


def is_ready(pod: KubePod) -> bool:
    """Return whether the kubelet's own probe finds the pod ready, whatever the conditions say."""
    found = pod.conditions.get("ContainersReady")
    return found is not None and found.status == "True"


def can_answer(pod: KubePod) -> bool:
    """Return whether the pod runs and has the page, at an address of a pod or a host: not one of this machine."""
    if not pod.http or pod.ended or pod.component not in COMPONENTS:
        return False
    try:
        ip = ipaddress.ip_address(pod.address)
    except ValueError:
        return False
    return not (ip.is_loopback or ip.is_unspecified or ip.is_link_local or ip.is_multicast)


async def read_page(pod: KubePod) -> tuple[KubeCondition, ...]:
    """Return the conditions that the pod shows; none: it does not answer, or not in form."""
    try:
        async with asyncio.timeout(WITHIN_S):
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
