"""Cache of Kubernetes' objects by list and watch. A kind is unknown while its watch is silent for too long."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from fleet import FleetError
from fleet.act.api_client import GUESTS, WATCH_S, ApiClient, KubernetesError
from fleet.decide.causes import silent_for
from fleet.world import kubernetes
from fleet.world.fields import Object
from fleet.world.guests import Guest, parse_guest
from fleet.world.kubernetes import WORKER, KubeNode, KubernetesView
from fleet.world.machine import parse_machine
from fleet.world.slurm import SlurmView
from fleet.world.snapshot import Unknown, Worker
from fleet.world.worker_pool import parse_pool

PARSE: Mapping[str, Callable[[Object], Any]] = {
    "Pod": kubernetes.parse_pod,
    "StatefulSet": kubernetes.parse_stateful_set,
    "Machine": parse_machine,
    "WorkerPool": parse_pool,
    "Guest": parse_guest,
}
# A watch that ended is resumed within this time; after it the kind is unknown.
STALE_S = 2.0 * WATCH_S
PAUSES = (0.5, 1.0, 2.0, 5.0, 10.0)


class ParsedObjects:
    """The objects of one kind, parsed, or the reason why one cannot be."""

    def __init__(self, kind: str, fleet_mark: str) -> None:
        """`fleet_mark`: the mark of this fleet."""
        self.kind = kind
        self._parse = (
            partial(kubernetes.parse_node, fleet_mark=fleet_mark) if kind == "Node" else PARSE[kind.partition(" ")[0]]
        )
        self.objects: dict[str, Any] = {}
        self.unread: dict[str, str] = {}
        self.nodes_of_unread: dict[str, str] = {}  # the Nodes of unreadable pods, where at least those can be read

    def take(self, item: Object) -> bool:
        """Store an object; return whether it changed. A kubelet's heartbeat, which alters only times, is no change."""
        name = kubernetes.name_of(item)
        before = self.objects.get(name)
        self.drop(name)
        try:
            self.objects[name] = after = self._parse(item)
        except FleetError as error:
            self.unread[f"{self.kind}/{name}"] = str(error)
            if self.kind == "Pod" and (node := kubernetes.node_name_of(item)) is not None:
                self.nodes_of_unread[f"{self.kind}/{name}"] = node
            return True
        return before is None or _without_version(before) != _without_version(after)

    def drop(self, name: str) -> None:
        self.objects.pop(name, None)
        self.unread.pop(f"{self.kind}/{name}", None)
        self.nodes_of_unread.pop(f"{self.kind}/{name}", None)


def _without_version(item: Any) -> Any:
    return replace(item, version="") if hasattr(item, "version") else item


class KindWatch:
    """List and watch one kind."""

    def __init__(self, api: ApiClient, kind: str, changed: Callable[[], object]) -> None:
        self.api, self.kind, self.changed = api, kind, changed
        self.now = ParsedObjects(kind, api.mark)
        self.touched: set[str] = set()  # changed since `WatchCache.touched` was called
        self.heard = 0.0  # monotonic; 0: never
        self.why = "not asked yet"

    async def follow(self) -> None:
        failures = 0
        while True:
            try:
                await self._list_and_watch()
            except KubernetesError as error:
                self.why = str(error)
                # 410: the server has forgotten the version; list again, without counting a failure.
                failures = 0 if error.status == 410 or self._has_heard_lately() else failures + 1
                await asyncio.sleep(PAUSES[min(failures, len(PAUSES) - 1)])

    async def list(self) -> str:
        """Replace all objects at once, when the list is complete. Return the version for a watch."""
        listed, version = ParsedObjects(self.kind, self.api.mark), ""
        async for items, version in self.api.list(self.kind):  # noqa: B007 - the last one is used
            for item in items:
                listed.take(item)
        self.now = listed
        self.touched = set(listed.objects)
        self._hear(news=True)
        return version

    async def _list_and_watch(self) -> None:
        version = await self.list()
        while True:
            async for change, item in self.api.watch(self.kind, version):
                version = str(item.get("metadata", {}).get("resourceVersion", version))
                news, name = change == "DELETED", kubernetes.name_of(item)
                if news:
                    self.now.drop(name)
                    self.touched.discard(name)
                elif change != "BOOKMARK" and (news := self.now.take(item)):
                    self.touched.add(name)
                self._hear(news=news)
            self._hear(news=False)

    def _hear(self, *, news: bool) -> None:
        self.heard = time.monotonic()
        if news:
            self.changed()

    def _has_heard_lately(self) -> bool:
        return time.monotonic() - self.heard < WATCH_S

    def unknown(self) -> str:
        """Return why this kind is unknown; empty: it is known."""
        if not self.heard:
            return self.why
        silent = time.monotonic() - self.heard
        return f"nothing was heard of {self.kind}s for over {STALE_S:g} s: {self.why}" if silent > STALE_S else ""


class WatchCache:
    def __init__(
        self,
        api: ApiClient,
        changed: Callable[[], object] = lambda: None,
        *,
        machines: bool = False,
        pools: bool = False,
        guests: Iterable[str] = (),
    ) -> None:
        """`guests`: the namespaces of guest pods."""
        self.fleet_mark = api.mark
        self.machines = KindWatch(api, "Machine", changed) if machines else None
        self.pools = KindWatch(api, "WorkerPool", changed) if pools else None
        self.guests = [KindWatch(api, f"{GUESTS}{namespace}", changed) for namespace in guests]
        self.nodes = KindWatch(api, "Node", changed)
        self.pods = KindWatch(api, "Pod", changed)
        self.sets = KindWatch(api, "StatefulSet", changed)
        self._silent: dict[str, float] = {}  # since when a Node is seen as not ready; monotonic

    def kinds(self) -> list[KindWatch]:
        return [kind for kind in (self.nodes, self.pods, self.sets, self.machines, self.pools, *self.guests) if kind]

    async def list(self) -> None:
        """List every kind once, without a watch."""
        for kind in self.kinds():
            # Without the right to list these, no record is removed and nothing is lent.
            optional = kind is self.sets or kind in self.guests
            with contextlib.suppress(FleetError) if optional else contextlib.nullcontext():
                await kind.list()

    def unknown(self) -> str:
        return self.nodes.unknown() or self.pods.unknown()

    def world(self) -> KubernetesView | Unknown:
        """Kubernetes' side now."""
        if reason := self.unknown():
            return Unknown(reason)
        nodes, pods, sets = self.nodes.now, self.pods.now, self.sets.now
        # StatefulSets may be unknown: the fleet may lack the right to list them.
        sets_by_name = None if self.sets.unknown() or sets.unread else dict(sets.objects)
        unread = {**nodes.unread, **pods.unread, **sets.unread}
        machines, machines_unknown = _take_objects(self.machines, unread)
        pools, pools_unknown = _take_objects(self.pools, unread)
        guests, unknown_namespaces = self._guests(unread)
        side = kubernetes.assemble(
            dict(nodes.objects),
            dict(pods.objects),
            sets_by_name,
            unread,
            machines,
            machines_unknown=machines_unknown,
            pools=pools,
            pools_unknown=pools_unknown,
            fleet_mark=self.fleet_mark,
        )
        return replace(
            side, guests=guests, unknown_namespaces=unknown_namespaces, unread_pods_nodes=dict(pods.nodes_of_unread)
        )

    def _guests(self, unread: dict[str, str]) -> tuple[tuple[Guest, ...] | None, frozenset[str]]:
        """Return the guests of the known namespaces, and the unknown namespaces. An unreadable guest gets nothing."""
        silent = {kind.kind: reason for kind in self.guests if (reason := kind.unknown())}
        unread |= {kind.kind: _first(kind.now.unread) for kind in self.guests if kind.now.unread} | silent
        heard = [kind for kind in self.guests if kind.kind not in silent]
        guests = tuple(guest for kind in heard for guest in kind.now.objects.values())
        return guests if heard or not silent else None, frozenset(silent)

    def touched(self) -> set[str]:
        """Return the pods that changed themselves or by their Node since the last call."""
        names, nodes = self.pods.touched, self.nodes.touched
        self.pods.touched, self.nodes.touched = set(), set()
        return names | {pod.name for pod in self.pods.now.objects.values() if nodes and pod.node in nodes}

    def workers(self, names: Iterable[str], slurm: SlurmView) -> Iterator[Worker]:
        pods, nodes = self.pods.now.objects, self.nodes.now.objects
        for name in sorted(names):
            if (pod := pods.get(name)) and pod.component == WORKER:
                yield Worker(name, pod, nodes.get(pod.node), slurm.nodes.get(name))

    def take_view(self, wall: float | None = None) -> KubernetesView | Unknown:
        """Return Kubernetes' side for the leader; a Node is silent for at most as long as this process has observed it.

        The transition time in a condition comes from another machine's clock, and the fleet's own may be set: a clock
        that is put an hour ahead must not make an hour pass.
        """
        side, now, wall = self.world(), time.monotonic(), time.time() if wall is None else wall
        if isinstance(side, Unknown):
            self._silent = {}
            return side
        silent = [node for node in side.nodes.values() if silent_for(node, wall) >= 0]
        self._silent = {node.name: self._silent.get(node.name, now) for node in silent}
        adjusted = {node.name: _mark_silent(node, wall - (now - self._silent[node.name])) for node in silent}
        return replace(side, nodes={**side.nodes, **adjusted})


def _first(unread: Mapping[str, str]) -> str:
    """Name one unreadable object: a user may create thousands of them again and again."""
    first = min(unread)
    return f"{first.partition('/')[2]}: {unread[first]}{' (it is not the only one)' if len(unread) > 1 else ''}"


def _take_objects(kind: KindWatch | None, unread: dict[str, str]) -> tuple[dict[str, Any] | None, bool]:
    """Return the objects of a kind if it is switched on, and whether it is unknown now.

    One unreadable object makes the whole kind unknown, since it may concern any Node or pod.
    """
    if kind is None:
        return None, False
    problem = kind.unknown()
    unread |= {f"{kind.kind}s": problem} if problem else kind.now.unread
    unsure = bool(problem or kind.now.unread)
    return None if unsure else dict(kind.now.objects), unsure


def _mark_silent(node: KubeNode, at: float) -> KubeNode:
    ready = node.conditions["Ready"]
    return replace(node, conditions={**node.conditions, "Ready": replace(ready, since=max(ready.since, at))})
