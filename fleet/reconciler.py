"""The reconcile loop of the fleet: observe, decide, act, report.

`Reconciler.run` starts the watches, the web server and the leader election, and then makes one pass after another while
this process leads: it takes a snapshot of Kubernetes and Slurm, calls `decide_safely`, makes the changes (`perform`),
and writes status and Events. `look`, `plan` and `report` serve the command line, which changes nothing.

`FastPath` runs beside the loop: it makes drains that a person requested at once. `Claims` keeps the two from making the
same drain.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from math import inf

from fleet import FleetError
from fleet.act.api_client import ApiClient, steady
from fleet.act.changes import apply_change
from fleet.act.leader_election import Leader, LeaderElection, Log, NoElection
from fleet.act.observer import Observer, PodPages
from fleet.act.slurm_client import SlurmClient
from fleet.act.watch_cache import WatchCache
from fleet.act.webhooks import WebhookCaller
from fleet.decide.actions import (
    CallHook,
    Change,
    ChangeKey,
    Drain,
    FleetMemory,
    Forget,
    Notice,
    Place,
    Protect,
    Remove,
    SlurmGuardedPodChange,
    Undrain,
    change_key,
)
from fleet.decide.decide import MANY, Backoff, Decision, decide_safely
from fleet.decide.drain import find_urgent_drains
from fleet.policy import FleetSettings, Policy, read_policy
from fleet.report.events import EventRateLimit, describe_action, events
from fleet.report.status import Report, report
from fleet.report.web import LoopStats, PageServer, PageSource, name_of, stats_pages
from fleet.world.slurm import SlurmView
from fleet.world.snapshot import FleetSnapshot, Unknown
from init.errors import InitError

# The time in which the fast path makes at most as many drains as the policy's `changes`.
PACE_S = 1.0
# The fast path uses no older state of Slurm than this.
FRESH_S = 15.0


class Claims:
    """Drains that are done or in progress, so that the loop and the fast path never repeat one.

    A claim lasts for the pass of the drain and for the next one, because Slurm's answer in the next pass may be older
    than the drain.
    """

    def __init__(self) -> None:
        self._pass = 0
        self.names: dict[str, float] = {}  # the pass in which the drain was made; inf: it is being made

    def next_pass(self) -> None:
        self._pass += 1
        self.names = {name: made_in for name, made_in in self.names.items() if made_in >= self._pass - 1}

    def has(self, change: Change) -> bool:
        return isinstance(change, Drain) and change.name in self.names

    def take(self, change: Change) -> None:
        if isinstance(change, Drain):
            self.names[change.name] = inf

    def settle(self, change: Change, *, done: bool) -> None:
        """Keep the claim of a drain that succeeded; drop the claim of one that failed."""
        if isinstance(change, Drain):
            self.names.pop(change.name, None)
            if done:
                self.names[change.name] = self._pass


class FastPath:
    """Make drains that a person requested at once; everything else waits for the main loop.

    It decides from Slurm's last known state, and re-checks each node in Slurm before it drains the node.
    """

    def __init__(
        self,
        cache: WatchCache,
        claims: Claims,
        state: Callable[[], tuple[FleetMemory, Policy]],
        leads: Callable[[], bool],
        perform: Callable[[Drain], Awaitable[bool]],
        attempted: Callable[[], None],
    ) -> None:
        """Store the callbacks; `attempted` runs after each attempt and triggers the main loop."""
        self.cache, self.claims, self.state, self.leads = cache, claims, state, leads
        self.perform, self.attempted = perform, attempted
        self.changed = asyncio.Event()
        self.unreported: list[Change | Notice] = []
        self._slurm: SlurmView | Unknown = Unknown("not asked yet")
        self._slurm_at = 0.0
        self._deferred: set[str] = set()  # workers that the rate limit leaves for the next second
        self._window = (0.0, 0)  # the start of the present second, and the drains in it

    def update(self, slurm: SlurmView | Unknown) -> None:
        """Store the loop's latest view of Slurm; Unknown disables the fast path."""
        self._slurm_at, self._slurm = time.monotonic(), slurm

    async def follow(self) -> None:
        while await self.changed.wait():
            self.changed.clear()
            await self.run_once()

    async def run_once(self) -> None:
        names, slurm = self.cache.touched() | self._deferred, self._slurm
        self._deferred = set()
        if isinstance(slurm, Unknown) or time.monotonic() - self._slurm_at > FRESH_S or self.cache.unknown():
            return
        memory, policy = self.state()
        workers = [worker for worker in self.cache.workers(names, slurm) if worker.name not in self.claims.names]
        drains = list(find_urgent_drains(workers, memory.marks, steady(), policy))
        now = time.monotonic()
        begun, many = self._window if now - self._window[0] < PACE_S else (now, 0)
        most = max(0, policy.changes - many)
        self._window, self._deferred = (begun, many + len(drains[:most])), {drain.name for drain in drains[most:]}
        for drain in drains[:most]:
            if not self.leads():
                return
            if not self.claims.has(drain) and not await self._attempt(drain):
                return
        if self._deferred:
            await asyncio.sleep(max(0.0, begun + PACE_S - time.monotonic()))
            self.changed.set()

    async def _attempt(self, drain: Drain) -> bool:
        """Make one drain. False: it failed, and further ones would fail too; the loop retries and reports the error."""
        self.claims.take(drain)
        done = False
        try:
            done = await self.perform(drain)
            self.unreported += [drain] if done else []
        except Exception as error:
            self._deferred, self._slurm = set(), Unknown(str(error))
            return False
        finally:
            self.claims.settle(drain, done=done)
            self.attempted()
        return True


# Bounded concurrency: independent changes at a limited rate, and threads that finish before a shutdown goes on.

# Fewer than the threads of the default executor, which requests to Slurm need.
AT_ONCE = 4


async def run_all(works: Iterable[Callable[[], Awaitable[None]]], rate: float) -> None:
    """Run independent works, `AT_ONCE` at a time and `rate` a second. Cancelled, it waits for those that have begun."""
    slots, begun = asyncio.Semaphore(AT_ONCE), time.monotonic()

    async def run(number: int, work: Callable[[], Awaitable[None]]) -> None:
        async with slots:
            await asyncio.sleep(max(0.0, begun + number / rate - time.monotonic()))
            await work()

    async with asyncio.TaskGroup() as group:
        for number, work in enumerate(works):
            group.create_task(run(number, work))


async def run_to_end(work: Callable[[], bool], executor: Executor | None = None) -> bool:
    """Run `work` in a thread. If cancelled, wait for it first: until then no other leader may begin."""
    thread = asyncio.get_running_loop().run_in_executor(executor, work)
    try:
        return await asyncio.shield(thread)
    except asyncio.CancelledError:
        with contextlib.suppress(FleetError):
            await thread
        raise


# Interval of requests to Slurm; slow answers take at most a quarter of the time.
EVERY_S = 1.0
# Passed time alone is a reason to decide again, and so are the fleet's own changes.
AT_LEAST_S, SOON_S = 5.0, 0.2


class Reconciler:
    def __init__(self, settings: FleetSettings, api: ApiClient, log: Log) -> None:
        self.settings, self.api, self.log = settings, api, log
        self.slurm, self._fast_slurm, page_slurm = (SlurmClient(settings.slurm, settings.key) for _ in range(3))
        # The fast path has a client and a thread of its own: a slow answer, or busy threads, must not hold it up.
        self._fast_thread = ThreadPoolExecutor(1, "fast-path")
        self.memory, self.policy = FleetMemory(), Policy()
        self.stop, self._news = asyncio.Event(), asyncio.Event()
        self.cache = WatchCache(
            api, self._on_change, machines=settings.machines, pools=settings.pools, guests=settings.guests
        )
        self.leader: Leader = NoElection()
        if settings.lease:
            self.leader = LeaderElection(api, settings.lease, settings.me, log, self._news.set)
        self.stats = LoopStats(time.monotonic())
        self.page = PageSource(self.cache, page_slurm, lambda: self.policy, self.leads)
        self.claims = Claims()
        self.fast_path = FastPath(
            self.cache,
            self.claims,
            lambda: (self.memory, self.policy),
            self.leads,
            lambda drain: self.perform(drain, fast=True),
            self._news.set,
        )
        self._observer = Observer(api, self.slurm, lambda: self.policy)
        self._pages = PodPages(self._news.set)
        fleet = f"{settings.namespace}/{settings.release}"
        self.webhooks = WebhookCaller(settings.webhook, fleet, self._news.set, self.leads)
        self.backoff = Backoff()
        self._event_limit = EventRateLimit()
        self._policy_error = ""
        self._late = False  # a change met another state than was seen
        self._last: tuple[float, SlurmView | None] = (0.0, None)  # the last answer of slurmctld, and when it came

    def leads(self) -> bool:
        return self.leader.holds()

    async def run(self) -> None:
        """Run until `stop` is set. The Lease is given back once no change is under way."""
        # Slurm's answer is a million objects without cycles; a full collection for each would block everything.
        gc.set_threshold(200_000, 20, 20)
        # The fast path must get its turn while a thread parses such an answer or decides on it.
        sys.setswitchinterval(0.001)
        async with contextlib.AsyncExitStack() as stack:
            if self.settings.http:
                pages = stats_pages(self.stats, self.leader, self.cache, self.api, self.settings.webhook)
                await stack.enter_async_context(await pages.serve(*self.settings.http))
            if self.settings.page:
                page = PageServer(self.page, self.settings.page[0])
                await stack.enter_async_context(await page.serve(*self.settings.page))
            async with asyncio.TaskGroup() as group:
                watching = [group.create_task(kind.follow()) for kind in self.cache.kinds()]
                watching.append(group.create_task(self._observer.prove_forever(self.cache, self.leads)))
                if self.settings.conditions:
                    watching.append(group.create_task(self._pages.follow(self.cache.world, self.leads)))
                leading = group.create_task(self.leader.keep())
                working = [group.create_task(self._loop()), group.create_task(self.fast_path.follow())]
                await self.stop.wait()
                for task in working:
                    task.cancel()
                await asyncio.wait(working)
                await self.webhooks.end()
                for task in (*watching, leading):
                    task.cancel()

    async def _loop(self) -> None:
        last: SlurmView | Unknown | None = None
        decided = 0.0
        while True:
            self.stats.last_pass = time.monotonic()
            changed = 0
            if not self.leads():
                self._news.clear()
                last = None
                self._follow_another_leader()
                await self._wait(AT_LEAST_S)
                continue
            begun = time.monotonic()
            slurm = await self._observer.slurm(self.cache.world())
            took = time.monotonic() - begun
            # Changes in Kubernetes during the request to Slurm count, too.
            kubernetes, fresh = self.cache.take_view(steady()), self._news.is_set()
            self._news.clear()
            due = fresh or slurm != last or begun - decided >= AT_LEAST_S
            if self.backoff.waits(time.monotonic()):
                last = None  # decide on it after the pause
            elif due:
                decided, self._late = begun, False
                if isinstance(slurm, SlurmView):
                    self._last = (steady(), slurm)
                at, last_slurm = self._last
                proofs, clocks = self._observer.proofs(), self.api.clocks.why()
                changed = await self._pass(
                    FleetSnapshot(kubernetes, slurm, proofs, clocks, last_slurm, at, pages=self._pages.shown())
                )
                # A change that came too late is decided again, although nothing else may change.
                last = None if self._late else slurm
            # Spend at most half of the time on requests to Slurm, or its answers to changes would be late.
            pause = 0.0 if isinstance(slurm, Unknown) else min(took, AT_LEAST_S)
            await asyncio.sleep(pause)
            # Do not burden an absent Slurm with requests; if its machine is dead, passed time alone proves it.
            seldom = AT_LEAST_S if isinstance(slurm, Unknown) else 3 * took
            await self._wait(SOON_S if changed else max(EVERY_S, seldom) - pause)

    def _follow_another_leader(self) -> None:
        """Drop the memory while another process leads; keep policy and silence times fresh for the first own pass."""
        self.memory = FleetMemory()
        self.fast_path.update(Unknown("not asked yet"))
        self._reload_policy()
        self.cache.take_view(steady())  # counts how long Nodes are silent

    async def _pass(self, snapshot: FleetSnapshot) -> int:
        """Decide on a snapshot and act; return the number of changes made. After a bug the fast path is disabled."""
        mistake = self.backoff.mistake
        self.fast_path.update(Unknown(mistake) if mistake else snapshot.slurm)
        self.memory = FleetMemory() if self.api.clocks.was_reset() else self.memory
        self.claims.next_pass()
        changed = await self.act(snapshot)
        if self.backoff.mistake:
            self.fast_path.update(Unknown(self.backoff.mistake))
        return changed

    async def _wait(self, most: float) -> None:
        # asyncio.wait_for before Python 3.12 can lose a cancellation that comes together with the event.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(most):
                await self._news.wait()

    def _on_change(self) -> None:
        self._news.set()
        self.fast_path.changed.set()

    async def act(self, snapshot: FleetSnapshot) -> int:
        """Decide, make the changes, and report them; return how many were made."""
        self._reload_policy()
        now = steady()
        # In a thread, since it takes long for many nodes and must not hold up the fast path.
        decision = await asyncio.to_thread(decide_safely, snapshot, self.memory, now, self.policy)
        self.memory = decision.memory
        self.backoff.update(decision, time.monotonic())
        self.stats.update(snapshot, decision.notices, self.backoff.mistake)
        self.page.update(snapshot, decision)
        self.webhooks.keep(change for change in decision.changes if isinstance(change, CallHook))
        for notice in decision.news:
            self.log(describe_action(notice))
        if decision.mistake and decision.news:
            self.log(decision.mistake)
        done, tried, failed = await self._make_all(decision)
        reported = {refusal.text for refusal in self.memory.refused.values()}
        for text in sorted({*failed.values()} - reported):
            self.log(text)
        self.memory = self.memory.after_pass(tried, failed, now)
        before, self.fast_path.unreported = self.fast_path.unreported, []
        await self._write_events(snapshot, before)
        await self._write_events(snapshot, [*done, *decision.news])
        return len(done)

    async def _make_all(self, decision: Decision) -> tuple[list[Change | Notice], list[Change], dict[ChangeKey, str]]:
        """Make the changes. Return those that were made, those that were tried, and why some failed."""
        done: list[Change | Notice] = []
        tried: list[Change] = []
        failed: dict[ChangeKey, str] = {}

        async def attempt(change: Change) -> None:
            if not self.leads() or self.claims.has(change):
                return
            if isinstance(change, CallHook) and not self.webhooks.ready(change):
                return  # a later pass takes up the answer
            tried.append(change)
            self.claims.take(change)
            is_done = False
            try:
                is_done = await self.perform(change)
                done.extend([change] if is_done else [])
            except FleetError as error:
                failed[change_key(change)] = f"{describe_action(change)}: {error}"
            except Exception:  # a bug with one object must not block the rest
                failed[change_key(change)] = (
                    f"{describe_action(change)}: a bug of the fleet: {traceback.format_exc(-8)}"
                )
            finally:
                self.claims.settle(change, done=is_done)
            if change_key(change) in failed:
                self.stats.failed[name_of(change)] += 1

        light = [change for change in decision.changes if isinstance(change, MANY)]
        # Pods that may get a job are protected before anything that may take long.
        await run_all([partial(attempt, change) for change in light if isinstance(change, Protect)], self.policy.rate)
        for change in decision.changes:
            if not isinstance(change, MANY):
                await attempt(change)
        await run_all(
            [partial(attempt, change) for change in light if not isinstance(change, Protect)], self.policy.rate
        )
        return done, tried, failed

    async def perform(self, change: Change, *, fast: bool = False) -> bool:
        """Make one change. False: the state has changed since it was read, or another process leads."""
        self.stats.last_pass = time.monotonic()
        if isinstance(change, Drain | Undrain | Remove | Forget | Place):
            done = not isinstance(change, Undrain) or await self.api.is_unchanged(change.seen)
            work = partial((self._fast_slurm if fast else self.slurm).change, change, self.leads)
            done = done and await run_to_end(work, self._fast_thread if fast else None)
        elif isinstance(change, SlurmGuardedPodChange) and not await asyncio.to_thread(
            self.slurm.is_unchanged, change.pod, change.precondition
        ):
            done = False  # a person has resumed it, and it may get a job now
        elif not self.leads():
            done = False  # the question took long
        else:
            if isinstance(change, CallHook):
                self.webhooks.check_taken(change)
            done = await apply_change(self.api, change)
        self._late |= not done
        (self.stats.done if done else self.stats.late)[name_of(change)] += 1
        self.log(
            describe_action(change)
            if done
            else f"{describe_action(change)}: not done, because the state had changed; decided again"
        )
        return done

    async def _write_events(self, snapshot: FleetSnapshot, actions: list[Change | Notice]) -> None:
        """Write Events for people. A failure is logged and holds up nothing."""
        if isinstance(snapshot.kubernetes, Unknown):
            return
        namespace, most = self.settings.namespace, self.policy.changes
        for event in events(actions, snapshot.kubernetes, namespace, most, self._event_limit, time.monotonic()):
            try:
                await self.api.create_event(event)
            except FleetError as error:
                self.log(str(error))
                return

    def _reload_policy(self) -> None:
        """Read the policy. After an error the last valid one stays, and the error is logged once."""
        text = ""
        try:
            self.policy = read_policy(self.settings.policy)
        except (FleetError, InitError) as error:
            text = str(error)
        if text not in ("", self._policy_error):
            self.log(text)
        self._policy_error = text

    # For `plan`, `status` and `why`: one look, without a watch.

    async def look(self) -> FleetSnapshot:
        await self.cache.list()
        kubernetes = self.cache.world()
        self._reload_policy()
        slurm = await self._observer.slurm(kubernetes)
        return FleetSnapshot(kubernetes, slurm, await self._observer.prove(kubernetes), self.api.clocks.why())

    async def plan(self) -> Decision:
        return (await self.look_and_plan())[1]

    async def look_and_plan(self) -> tuple[FleetSnapshot, Decision]:
        """Look once, and decide what `run` would do. Asks slurmctld once: during an outage each call waits."""
        snapshot = await self.look()
        return snapshot, decide_safely(snapshot, FleetMemory(), time.time(), self.policy)

    async def report(self) -> Report:
        snapshot, decision = await self.look_and_plan()
        return report(snapshot, decision, self.policy, time.time())
