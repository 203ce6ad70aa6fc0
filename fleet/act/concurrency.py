"""Several things at a time, where none of them waits for another."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable

# Fewer than there are threads to ask Slurm in.
HANDS = 4


async def at_once(works: Iterable[Callable[[], Awaitable[None]]], rate: float) -> None:
    """Several at a time, and so many a second. Whoever cancels it waits until those that are begun have ended."""
    hands, begun = asyncio.Semaphore(HANDS), time.monotonic()

    async def one(number: int, work: Callable[[], Awaitable[None]]) -> None:
        async with hands:
            await asyncio.sleep(max(0.0, begun + number / rate - time.monotonic()))
            await work()

    async with asyncio.TaskGroup() as group:
        for number, work in enumerate(works):
            group.create_task(one(number, work))
