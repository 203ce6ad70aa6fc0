"""Slurm takes seconds to tell of five thousand nodes: what else is done until it has."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
# News come in crowds.
PAUSE_S = 0.2


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
