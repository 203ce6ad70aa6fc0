"""Bounded concurrency: independent changes at a limited rate, and threads that finish before a shutdown goes on."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Executor

from fleet.errors import FleetError

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
