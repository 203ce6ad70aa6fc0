"""Kubernetes' side, followed: a list, then what changes. How old it may be is known, and what is older is not known."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from fleet.act.api_client import GUESTS, WATCH_S, ApiClient, ApiError
from fleet.decide.causes import silent_for
from fleet.errors import FleetError
from fleet.world import kubernetes
from fleet.world.fields import Object
from fleet.world.guests import Guest, guest
from fleet.world.kubernetes import WORKER, Kubernetes, Node
from fleet.world.machine import machine
from fleet.world.slurm import Slurm
from fleet.world.snapshot import Unknown, Worker
from fleet.world.worker_pool import worker_pool

PARSE: Mapping[str, Callable[[Object], Any]] = {
    "Pod": kubernetes.pod,
    "StatefulSet": kubernetes.stateful_set,
    "Machine": machine,
    "WorkerPool": worker_pool,
    "Guest": guest,
}
# A watch that the server has ended is begun anew within this; after it nothing is known.
STALE_S = 2.0 * WATCH_S
PAUSES = (0.5, 1.0, 2.0, 5.0, 10.0)


class ParsedObjects:
    """Those of one kind, read: or why one cannot be."""

    def __init__(self, kind: str, whose: str) -> None:
        """`whose`: the mark of this fleet."""
        self.kind = kind
        self.whose = whose
        self._parse = partial(kubernetes.node, whose=whose) if kind == "Node" else PARSE[kind.partition(" ")[0]]
        self.found: dict[str, Any] = {}
        self.unread: dict[str, str] = {}
        self.hidden: dict[str, str] = {}  # of those the Nodes of pods, where they can be read at least

    def take(self, item: Object) -> bool:
        """Whether it is news: each kubelet writes its Node's status every few minutes, mostly nothing but the hour."""
        name = kubernetes.name_of(item)
        before = self.found.get(name)
        self.drop(name)
        try:
            self.found[name] = after = self._parse(item)
        except FleetError as error:
            self.unread[f"{self.kind}/{name}"] = str(error)
            if self.kind == "Pod" and (where := kubernetes.placed(item)) is not None:
                self.hidden[f"{self.kind}/{name}"] = where
            return True
        return before is None or _but_version(before) != _but_version(after)

    def drop(self, name: str) -> None:
        self.found.pop(name, None)
        self.unread.pop(f"{self.kind}/{name}", None)
        self.hidden.pop(f"{self.kind}/{name}", None)


def _but_version(found: Any) -> Any:
    return replace(found, version="") if hasattr(found, "version") else found


class KindWatch:
    """All objects of one kind, as they change."""

    def __init__(self, api: ApiClient, kind: str, changed: Callable[[], object]) -> None:
        self.api, self.kind, self.changed = api, kind, changed
        self.now = ParsedObjects(kind, api.mark)
        self.touched: set[str] = set()  # since somebody has taken these names
        self.heard = 0.0  # monotonic; 0: never
        self.why = "not asked yet"

    async def follow(self) -> None:
        failures = 0
        while True:
            try:
                await self._from_the_beginning()
            except ApiError as error:
                self.why = str(error)
                # A version that the server has forgotten is no failure: everything is listed anew.
                failures = 0 if error.status == 410 or self._heard_lately() else failures + 1
                await asyncio.sleep(PAUSES[min(failures, len(PAUSES) - 1)])

    async def list(self) -> str:
        """Whole or not at all: until it is complete, what was there before stays."""
        listed, version = ParsedObjects(self.kind, self.api.mark), ""
        async for items, version in self.api.list(self.kind):  # noqa: B007 - the last one is used
            for item in items:
                listed.take(item)
        self.now = listed
        self.touched = set(listed.found)
        self._hear(news=True)
        return version

    async def _from_the_beginning(self) -> None:
        version = await self.list()
        while True:
            async for what, item in self.api.watch(self.kind, version):
                version = str(item.get("metadata", {}).get("resourceVersion", version))
                news, name = what == "DELETED", kubernetes.name_of(item)
                if news:
                    self.now.drop(name)
                    self.touched.discard(name)
                elif what != "BOOKMARK" and (news := self.now.take(item)):
                    self.touched.add(name)
                self._hear(news=news)
            self._hear(news=False)

    def _hear(self, *, news: bool) -> None:
        self.heard = time.monotonic()
        if news:
            self.changed()

    def _heard_lately(self) -> bool:
        return time.monotonic() - self.heard < WATCH_S

    def unknown(self) -> str:
        """Why nothing is known of this kind, or nothing."""
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
        """`guests`: namespaces of others."""
        self.whose = api.mark
        self.machines = KindWatch(api, "Machine", changed) if machines else None
        self.pools = KindWatch(api, "WorkerPool", changed) if pools else None
        self.guests = [KindWatch(api, f"{GUESTS}{namespace}", changed) for namespace in guests]
        self.nodes = KindWatch(api, "Node", changed)
        self.pods = KindWatch(api, "Pod", changed)
        self.sets = KindWatch(api, "StatefulSet", changed)
        self._silent: dict[str, float] = {}  # since when we see a Node not ready; monotonic

    def kinds(self) -> list[KindWatch]:
        return [kind for kind in (self.nodes, self.pods, self.sets, self.machines, self.pools, *self.guests) if kind]

    async def list(self) -> None:
        """Once, without following."""
        for kind in self.kinds():
            # Without leave for these no record goes, and nothing is lent.
            with contextlib.suppress(FleetError) if kind in (self.sets, *self.guests) else contextlib.nullcontext():
                await kind.list()

    def unknown(self) -> str:
        return self.nodes.unknown() or self.pods.unknown()

    def world(self) -> Kubernetes | Unknown:
        if why := self.unknown():
            return Unknown(why)
        nodes, pods, sets = self.nodes.now, self.pods.now, self.sets.now
        # Of these alone it is no trouble to know nothing, and nothing to tell either where nobody has leave to ask.
        known = None if self.sets.unknown() or sets.unread else dict(sets.found)
        unread = {**nodes.unread, **pods.unread, **sets.unread}
        kept, blind = _kept(self.machines, unread)
        pools, unsure = _kept(self.pools, unread)
        guests, silent = self._guests(unread)
        found = kubernetes.together(
            dict(nodes.found),
            dict(pods.found),
            known,
            unread,
            kept,
            blind=blind,
            pools=pools,
            unsure=unsure,
            whose=self.whose,
        )
        return replace(found, guests=guests, silent=silent, hidden=dict(pods.hidden))

    def _guests(self, unread: dict[str, str]) -> tuple[tuple[Guest, ...] | None, frozenset[str]]:
        """One that cannot be read gets nothing, and of a namespace that is not known nobody does. Which those are."""
        silent = {kind.kind: why for kind in self.guests if (why := kind.unknown())}
        unread |= {kind.kind: _one_of(kind.now.unread) for kind in self.guests if kind.now.unread} | silent
        known = [kind for kind in self.guests if kind.kind not in silent]
        found = tuple(one for kind in known for one in kind.now.found.values())
        return found if known or not silent else None, frozenset(silent)

    def touched(self) -> set[str]:
        """Pods of which there are news since they were asked for, of themselves or of their Nodes."""
        names, nodes = self.pods.touched, self.nodes.touched
        self.pods.touched, self.nodes.touched = set(), set()
        return names | {pod.name for pod in self.pods.now.found.values() if nodes and pod.node in nodes}

    def workers(self, names: Iterable[str], slurm: Slurm) -> Iterator[Worker]:
        pods, nodes = self.pods.now.found, self.nodes.now.found
        for name in sorted(names):
            if (pod := pods.get(name)) and pod.component == WORKER:
                yield Worker(name, pod, nodes.get(pod.node), slurm.nodes.get(name))

    def counted(self, wall: float | None = None) -> Kubernetes | Unknown:
        """The same for whoever acts: no Node has been silent for longer than we have seen it so. When it began says
        another machine's clock, and ours may be set: whoever puts it an hour ahead must not have made an hour pass."""
        world, now, wall = self.world(), time.monotonic(), time.time() if wall is None else wall
        if isinstance(world, Unknown):
            self._silent = {}
            return world
        silent = [node for node in world.nodes.values() if silent_for(node, wall) >= 0]
        self._silent = {node.name: self._silent.get(node.name, now) for node in silent}
        seen = {node.name: _since(node, wall - (now - self._silent[node.name])) for node in silent}
        return replace(world, nodes={**world.nodes, **seen})


def _one_of(unread: Mapping[str, str]) -> str:
    """Whoever makes pods may make thousands that cannot be read, and others in their place: one of them is told."""
    first = min(unread)
    return f"{first.partition('/')[2]}: {unread[first]}{' (it is not the only one)' if len(unread) > 1 else ''}"


def _kept(kind: KindWatch | None, unread: dict[str, str]) -> tuple[dict[str, Any] | None, bool]:
    """What is kept of this kind, if it is asked for; and whether it is not known just now. One that cannot be read may
    be any Node's, or any pod's."""
    if kind is None:
        return None, False
    why = kind.unknown()
    unread |= {f"{kind.kind}s": why} if why else kind.now.unread
    unsure = bool(why or kind.now.unread)
    return None if unsure else dict(kind.now.found), unsure


def _since(node: Node, at: float) -> Node:
    ready = node.conditions["Ready"]
    return replace(node, conditions={**node.conditions, "Ready": replace(ready, since=max(ready.since, at))})
