"""The fast path and the main loop never make the same change twice, and never leave one undone to each other."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import cast

from fleet.act.api_client import ApiClient
from fleet.act.watch_cache import WatchCache
from fleet.decide.actions import Drain, FleetMemory
from fleet.policy import Policy
from fleet.reconciler import FRESH_S, Claims, FastPath
from fleet.world.slurm import SlurmView, parse_nodes
from fleet.world.snapshot import Unknown

NAMES = ("w0", "w1", "w2")


class People:
    """Fast path over a cluster in which people have cordoned the Nodes of the named workers."""

    def __init__(self, *names: str, policy: Policy | None = None) -> None:
        self.cache = WatchCache(cast(ApiClient, SimpleNamespace(mark="lab.slurm")))
        for kind in self.cache.kinds():
            kind.heard = time.monotonic()
        for name in NAMES:
            metadata = {"name": name, "uid": f"of-{name}", "resourceVersion": "1"}
            labels = {"app.kubernetes.io/component": "worker"}
            self.cache.pods.now.take({"metadata": {**metadata, "labels": labels}, "spec": {"nodeName": f"on-{name}"}})
            self.cordon(name, on=False)
        self.leads, self.news, self.drained = True, 0, list[str]()
        self.does: Callable[[Drain], Awaitable[bool]] = self.done
        self.claims = Claims()
        self.fast = FastPath(
            self.cache,
            self.claims,
            lambda: (FleetMemory(), policy or Policy()),
            lambda: self.leads,
            lambda drain: self.does(drain),
            self.told,
        )
        self.fast.update(self.slurm())
        self.cordon(*names)

    @staticmethod
    def slurm() -> SlurmView:
        return parse_nodes(
            {"name": name, "state": ["IDLE"], "reason": "", "comment": "", "alloc_cpus": 0} for name in NAMES
        )

    def cordon(self, *names: str, on: bool = True) -> None:
        for name in names:
            metadata = {"name": f"on-{name}", "uid": f"uid-{name}", "resourceVersion": "1"}
            self.cache.nodes.now.take({"metadata": metadata, "spec": {"unschedulable": on}})
            self.cache.nodes.touched |= {f"on-{name}"} if on else set()

    def told(self) -> None:
        self.news += 1

    async def done(self, drain: Drain) -> bool:
        self.drained.append(drain.name)
        return True

    async def not_as_seen(self, drain: Drain) -> bool:
        self.drained.append(drain.name)
        return False

    async def refused(self, drain: Drain) -> bool:
        self.drained.append(drain.name)
        raise OSError("no answer")

    def once(self) -> list[str]:
        """Run the fast path once and return the nodes that it drained."""
        self.drained.clear()
        asyncio.run(self.fast.run_once())
        return list(self.drained)


def a_drain() -> Drain:
    """Return the drain of w0 as the main loop decides it."""
    seen: list[Drain] = []

    async def looks(drain: Drain) -> bool:
        seen.append(drain)
        return True

    people = People("w0")
    people.does = looks
    people.once()
    return seen[0]


def test_what_is_done_here_is_not_done_again_by_whoever_decides_before_slurm_can_know_of_it() -> None:
    """The main loop leaves a drain of the fast path alone until Slurm's state must show it.

    A query that is already in flight may have been answered before the drain; only the query after it counts.
    """
    people, drain = People("w0"), a_drain()
    assert not people.claims.has(drain)
    assert people.once() == ["w0"] and people.news == 1
    assert [one.name for one in people.fast.unreported if isinstance(one, Drain)] == ["w0"]
    people.cordon("w0")
    assert people.claims.has(drain) and people.once() == []
    people.claims.next_pass()
    people.cordon("w0")
    assert people.claims.has(drain) and people.once() == []
    people.claims.next_pass()
    assert not people.claims.has(drain)


def test_in_the_moment_in_which_it_is_done_it_is_nobody_elses() -> None:
    people, drain = People("w0"), a_drain()
    seen: list[bool] = []

    async def looks(_: Drain) -> bool:
        seen.append(people.claims.has(drain))
        return False

    people.does = looks
    people.once()
    assert seen == [True] and not people.claims.has(drain), "it was not as it was seen, and is due still"
    assert people.fast.unreported == []


def test_what_somebody_else_has_begun_is_left_to_him_unless_he_gives_it_back() -> None:
    people, drain = People("w0", "w1"), a_drain()
    people.claims.take(drain)
    assert people.once() == ["w1"]
    people.claims.settle(drain, done=False)
    people.cordon("w0", "w1")
    assert people.once() == ["w0"]


def test_what_is_begun_by_somebody_else_in_the_meantime_is_left_to_him() -> None:
    people = People(*NAMES)

    async def slowly(drain: Drain) -> bool:
        people.claims.take(Drain("w1", drain.reason, drain.comment, drain.precondition))
        return await people.done(drain)

    people.does = slowly
    assert people.once() == ["w0", "w2"]


def test_after_a_refusal_nobody_is_tried_until_slurm_has_answered_once_more() -> None:
    """After an error the fast path stops until Slurm answers again.

    If Slurm does not answer one call it answers none, and each call might take its whole timeout to fail.
    """
    people = People(*NAMES)
    people.does = people.refused
    assert people.once() == ["w0"] and people.news == 1
    people.does = people.done
    people.cordon(*NAMES)
    assert people.once() == []
    people.fast.update(people.slurm())
    people.cordon(*NAMES)
    assert people.once() == [*NAMES]


def test_by_what_is_not_known_any_more_nothing_is_done() -> None:
    people = People("w0")
    people.fast.update(Unknown("it does not answer"))
    assert people.once() == []
    people.fast.update(people.slurm())
    people.cordon("w0")
    people.fast._slurm_at -= FRESH_S + 1
    assert people.once() == []
    people.fast.update(people.slurm())
    people.cordon("w0")
    people.cache.nodes.heard = 0.0
    assert people.once() == []
    people.cache.nodes.heard = time.monotonic()
    people.cordon("w0")
    people.leads = False
    assert people.once() == []
    people.leads = True
    people.cordon("w0")
    assert people.once() == ["w0"]


def test_more_than_a_policy_allows_wait_for_the_next_second_and_are_not_forgotten() -> None:
    people = People(*NAMES, policy=Policy(changes=2))
    assert people.once() == ["w0", "w1"]
    assert people.fast.changed.is_set(), "it goes on by itself"
    assert people.once() == ["w2"], "though nothing of it has changed since"
