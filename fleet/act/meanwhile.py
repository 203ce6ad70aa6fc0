"""Slurm takes seconds to tell of five thousand nodes: what else is done until it has."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")
# News come in crowds.
PAUSE_S = 0.2
# Fewer than threads that ask Slurm: whoever is hurried for has one.
HANDS = 4


async def meanwhile(look: Coroutine[Any, Any, T], news: asyncio.Event, hurry: Callable[[], Awaitable[None]]) -> T:
    """What it has seen. Until then `hurry`, where there are news; those that nobody has hurried for stay."""
    looking = asyncio.create_task(look)
    try:
        while not looking.done():
            heard = asyncio.create_task(news.wait())
            try:
                await asyncio.wait({looking, heard}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                heard.cancel()
            if not looking.done():
                news.clear()
                await hurry()
                await asyncio.wait({looking}, timeout=PAUSE_S)
        return await looking
    finally:
        looking.cancel()
        await asyncio.wait([looking])  # a change that is begun is seen to its end


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
