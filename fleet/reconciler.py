"""The fleet at work: it looks at both sides, asks what to do, does it, and says so."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from fleet.act.api_client import ApiClient
from fleet.act.changes import apply_change
from fleet.act.clock import steady
from fleet.act.concurrency import at_once
from fleet.act.fast_path import FastPath
from fleet.act.leader_election import Leader, LeaderElection, NoElection, Say
from fleet.act.observer import Observer
from fleet.act.safe_decide import Backoff, decide
from fleet.act.slurm_client import SlurmClient, to_its_end
from fleet.act.watch_cache import WatchCache
from fleet.act.webhooks import WebhookCaller
from fleet.decide.actions import (
    CallHook,
    Change,
    Drain,
    Forget,
    Key,
    Notice,
    Protect,
    Remove,
    ToPod,
    Undrain,
    action_key,
)
from fleet.decide.decide import MANY, Decision
from fleet.decide.memory import Memory
from fleet.decide.topology import Place
from fleet.errors import FleetError
from fleet.policy import Policy, read_policy
from fleet.report.events import EventRateLimit, events
from fleet.report.messages import in_words
from fleet.report.stats import LoopStats, name_of, pages
from fleet.report.status import Report, report
from fleet.report.web import HttpServer, PageServer, PageSource
from fleet.settings import Settings
from fleet.world.slurm import Slurm
from fleet.world.snapshot import Snapshot, Unknown
from init.errors import InitError

# Slurm is asked so often, and where an answer takes long not more often than a quarter of the time.
EVERY_S = 1.0
# Time alone changes something too: a Node has not been ready for long enough.
AT_LEAST_S, SOON_S = 5.0, 0.2


class Reconciler:
    def __init__(self, settings: Settings, api: ApiClient, say: Say) -> None:
        self.settings, self.api, self.say = settings, api, say
        self.slurm = SlurmClient(settings.slurm, settings.key)
        # For whom is hurried: while the first one waits for its answer, and others for all threads that there are.
        self.beside, self._thread = SlurmClient(settings.slurm, settings.key), ThreadPoolExecutor(1, "hurry")
        self.memory = Memory()
        self.policy = Policy()
        self.stop = asyncio.Event()
        self._news = asyncio.Event()
        self.cache = WatchCache(
            api, self._changed, machines=settings.machines, pools=settings.pools, guests=settings.guests
        )
        self.leader: Leader = NoElection()
        if settings.lease:
            self.leader = LeaderElection(api, settings.lease, settings.me, say, self._news.set)
        self.seen = LoopStats(time.monotonic())
        # With a slurmrestd of its own: whoever only watches keeps nobody from an answer.
        shown = SlurmClient(settings.slurm, settings.key)
        self.watch = PageSource(self.cache, shown, lambda: self.policy, lambda: self.leader.holds())
        self._made = 0
        # A test kills it between two changes: none of them is under way then.
        self._turn = asyncio.Lock() if settings.cut else contextlib.nullcontext()
        self._refused = ""
        self.hurry = FastPath(
            self.cache,
            lambda: (self.memory, self.policy),
            lambda: self.leader.holds(),
            lambda drain: self._perform(drain, self.beside),
            self._news.set,
        )
        self._often = EventRateLimit()
        self._late = False  # something was not as it was seen when it was to be changed
        self._look = Observer(api, self.slurm, lambda: self.policy)
        who = f"{settings.namespace}/{settings.release}"
        self.hooks = WebhookCaller(settings.webhook, who, self._news.set, lambda: self.leader.holds())
        self.patience = Backoff()
        self._last: tuple[float, Slurm | None] = (0.0, None)  # the last answer of slurmctld, and when it came

    async def run(self) -> None:
        """Until `stop`. Who has ended gives the Lease back when nothing of his is begun any more."""
        # An answer of Slurm's is a million objects and no circle: a search of them all for one keeps everybody waiting.
        gc.set_threshold(200_000, 20, 20)
        # Whoever hurries takes turns with whoever reads such an answer, or decides by it.
        sys.setswitchinterval(0.001)
        async with contextlib.AsyncExitStack() as stack:
            if self.settings.http:
                await stack.enter_async_context(await self._pages().serve(*self.settings.http))
            if self.settings.page:
                people = PageServer(self.watch, self.settings.page[0])
                await stack.enter_async_context(await people.serve(*self.settings.page))
            async with asyncio.TaskGroup() as group:
                follow = [group.create_task(kind.follow()) for kind in self.cache.kinds()]
                follow.append(group.create_task(self._look.prove_on(self.cache, self.leader.holds)))
                leading = group.create_task(self.leader.keep())
                working = [group.create_task(self._decide()), group.create_task(self.hurry.follow())]
                await self.stop.wait()
                for task in working:
                    task.cancel()
                await asyncio.wait(working)
                await self.hooks.end()
                for task in (*follow, leading):
                    task.cancel()

    def _pages(self) -> HttpServer:
        return pages(self.seen, self.leader, self.cache, self.api)

    async def _decide(self) -> None:
        last: Slurm | Unknown | None = None
        decided = 0.0
        while True:
            self.seen.turned = time.monotonic()
            changed = 0
            if not self.leader.holds():
                self._news.clear()
                # Whoever acts meanwhile changes what we remember.
                last, self.memory = None, Memory()
                self.hurry.knows(Unknown("not asked yet"))
                self._reread()  # it is shown, and holds from the first moment that we lead
                self.cache.counted(steady())  # so that it need not begin to count when it begins to act
                await self._wait(AT_LEAST_S)
                continue
            begun = time.monotonic()
            slurm = await self._look.slurm(self.cache.world())
            took = time.monotonic() - begun
            # What came from Kubernetes while Slurm was asked counts too.
            kubernetes, fresh = self.cache.counted(steady()), self._news.is_set()
            self._news.clear()
            due = fresh or slurm != last or begun - decided >= AT_LEAST_S
            if self.patience.waits(time.monotonic()):
                last = None  # what is heard meanwhile is not forgotten
            elif due:
                last, decided, self._late = slurm, begun, False
                # Nobody is hurried for where nothing is decided.
                self.hurry.knows(Unknown(self.patience.why) if self.patience.why else slurm)
                self.memory = Memory() if self.api.clocks.anew() else self.memory
                if isinstance(slurm, Slurm):
                    self._last = (steady(), slurm)
                at, last = self._last
                world = Snapshot(kubernetes, slurm, self._look.proven(), self.api.clocks.why(), last, at)
                self.hurry.decided()
                changed = await self.act(world)
                if self.patience.why:
                    self.hurry.knows(Unknown(self.patience.why))
                # What has changed meanwhile need not be news by itself.
                last = None if self._late else last
            # Slurm is asked for no more than half of the time, whatever is heard: its answers to changes would be late.
            pause = 0.0 if isinstance(slurm, Unknown) else min(took, AT_LEAST_S)
            await asyncio.sleep(pause)
            # What we have changed ourselves comes back as news. One that does not answer has no work with us; and where
            # that is because its machine is dead, time alone makes the difference.
            seldom = AT_LEAST_S if isinstance(slurm, Unknown) else 3 * took
            await self._wait(SOON_S if changed else max(EVERY_S, seldom) - pause)

    async def _wait(self, most: float) -> None:
        # No `wait_for`: until Python 3.12 it forgets who cancels it in the turn in which the news come.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(most):
                await self._news.wait()

    def _changed(self) -> None:
        self._news.set()
        self.hurry.heard.set()

    async def act(self, world: Snapshot) -> int:
        """Whatever is to be done now; how much was."""
        self._reread()
        now = steady()
        # It takes long where there are many, and is no reason to keep a person's cordon waiting.
        decision = await asyncio.to_thread(decide, world, self.memory, now, self.policy)
        self.memory = decision.memory
        self.patience.saw(decision, time.monotonic())
        self.seen.looked(world, decision.stands, self.patience.why)
        self.watch.saw(world, decision)
        self.hooks.want(one for one in decision.changes if isinstance(one, CallHook))
        done: list[Change | Notice] = []
        tried: list[Change] = []
        failed: dict[Key, str] = {}

        async def attempt(change: Change) -> None:
            if not self.leader.holds() or self.hurry.has(change):
                return
            if isinstance(change, CallHook) and not self.hooks.ready(change):
                return  # nobody waits for his answer
            tried.append(change)
            self.hurry.leave(change)
            try:
                if await self._perform(change):
                    done.append(change)
            except FleetError as error:
                self.seen.failed[name_of(change)] += 1
                failed[action_key(change)] = f"{in_words(change)}: {error}"
            except Exception:  # a mistake of ours about one thing keeps nothing else from its turn
                self.seen.failed[name_of(change)] += 1
                failed[action_key(change)] = f"{in_words(change)}: a mistake of the fleet's: {traceback.format_exc(-8)}"
            if change not in done:
                self.hurry.give_back(change)

        for one in decision.news:
            self.say(in_words(one))
        if decision.mistake and decision.news:
            self.say(decision.mistake)
        # What may get a job is protected before anything that may take long.
        light = [one for one in decision.changes if isinstance(one, MANY)]
        await at_once([partial(attempt, one) for one in light if isinstance(one, Protect)], self.policy.rate)
        for change in decision.changes:
            if not isinstance(change, MANY):
                await attempt(change)
        await at_once([partial(attempt, one) for one in light if not isinstance(one, Protect)], self.policy.rate)
        told = {one.text for one in self.memory.refused.values()}
        for text in sorted({*failed.values()} - told):
            self.say(text)
        self.memory = self.memory.tried(tried, failed, now)
        before, self.hurry.untold = self.hurry.untold, []
        await self._tell(world, before)
        await self._tell(world, [*done, *decision.news])
        return len(done)

    async def _tell(self, world: Snapshot, actions: list[Change | Notice]) -> None:
        """Events are for people: one that cannot be written keeps nobody from anything."""
        if isinstance(world.kubernetes, Unknown):
            return
        where, most = self.settings.namespace, self.policy.changes
        for event in events(actions, world.kubernetes, where, most, self._often, time.monotonic()):
            try:
                await self.api.tell(event)
            except FleetError as error:
                self.say(str(error))
                return

    def _reread(self) -> None:
        """A policy with a mistake is told, and the last good one stays."""
        said = ""
        try:
            self.policy = read_policy(self.settings.policy)
        except (FleetError, InitError) as error:
            said = str(error)
        if said not in ("", self._refused):
            self.say(said)
        self._refused = said

    async def _perform(self, change: Change, slurm: SlurmClient | None = None) -> bool:
        async with self._turn:
            return await self._done(change, slurm)

    async def _done(self, change: Change, slurm: SlurmClient | None) -> bool:
        self._made, self.seen.turned = self._made + 1, time.monotonic()
        if self._made == self.settings.cut:
            os.kill(os.getpid(), signal.SIGKILL)
        if isinstance(change, Drain | Undrain | Remove | Forget | Place):
            still = not isinstance(change, Undrain) or await self.api.still(change.at)
            work = partial((slurm or self.slurm).change, change, self.leader.holds)
            done = still and await to_its_end(work, self._thread if slurm else None)
        elif isinstance(change, ToPod) and not await asyncio.to_thread(self.slurm.still, change.pod, change.was):
            done = False  # somebody has resumed it: it may get a job in this moment
        elif not self.leader.holds():
            done = False  # that took long
        else:
            if isinstance(change, CallHook):
                self.hooks.took(change)
            done = await apply_change(self.api, change)
        self._late |= not done
        (self.seen.done if done else self.seen.late)[name_of(change)] += 1
        self.say(in_words(change) if done else f"{in_words(change)}: not as it was seen, looked at again")
        return done

    async def look(self) -> Snapshot:
        """Once, without following: for `plan` and its like."""
        await self.cache.list()
        kubernetes = self.cache.world()
        self._reread()
        found = await self._look.slurm(kubernetes)
        return Snapshot(kubernetes, found, await self._look.prove(kubernetes), self.api.clocks.why())

    async def plan(self) -> Decision:
        return (await self.seen_and_planned())[1]

    async def seen_and_planned(self) -> tuple[Snapshot, Decision]:
        """One look, and what `run` would do after it. slurmctld is asked once: while it is away each call waits."""
        world = await self.look()
        return world, decide(world, Memory(), time.time(), self.policy)

    async def report(self) -> Report:
        world, decision = await self.seen_and_planned()
        return report(world, decision, self.policy, time.time())
