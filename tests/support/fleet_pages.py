"""Requests to the fleet's HTTP ports."""

from __future__ import annotations

import asyncio

from tests.waiting import PATIENCE


async def asked(port: int, text: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(text)
        async with asyncio.timeout(PATIENCE):
            return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()
