"""What the fleet answers over http: alive, ready, metrics.

Read only; who asks is not known, so it takes little and waits for nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping

from fleet.errors import FleetError

# A request's first line and heads, and all the time that it has.
LONGEST = 8192
WITHIN_S = 5.0
# So many at once ask nothing yet, and so many have asked; of the first the oldest give way, the others are closed.
MOST = 32
Page = Callable[[], tuple[int, str]]


class Pages:
    longest, whom = LONGEST, "the kubelet"

    def __init__(self, pages: Mapping[str, Page]) -> None:
        self.pages = pages
        self._silent: dict[asyncio.StreamWriter, None] = {}  # those that have asked nothing yet, the oldest first
        self._asked = 0

    async def serve(self, host: str, port: int) -> asyncio.Server:
        try:
            return await asyncio.start_server(self._answer, host, port, limit=self.longest)
        except OSError as error:
            raise FleetError(f"listen for {self.whom}", str(error), field=f"{host}:{port}") from error

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            heads = await self._heads(reader, writer)
            if self._asked < MOST:
                await self._reply(heads, writer)
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # whoever does not ask as http does is not answered
        finally:
            writer.close()
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(WITHIN_S):
                    await writer.wait_closed()

    async def _heads(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        """Who asks nothing gives way to who may: strangers who do so again and again would else keep the kubelet out,
        which would start us anew for that."""
        if len(self._silent) >= MOST:
            oldest = next(iter(self._silent))
            del self._silent[oldest]
            oldest.transport.abort()
        self._silent[writer] = None
        try:
            async with asyncio.timeout(WITHIN_S):
                return await reader.readuntil(b"\r\n\r\n")
        finally:
            self._silent.pop(writer, None)

    async def _reply(self, heads: bytes, writer: asyncio.StreamWriter) -> None:
        self._asked += 1
        try:
            said = await self.reply(heads)
            async with asyncio.timeout(WITHIN_S):
                writer.write(said)
                await writer.drain()
        finally:
            self._asked -= 1

    async def reply(self, heads: bytes) -> bytes:
        return reply(heads, self.pages)


def reply(heads: bytes, pages: Mapping[str, Page]) -> bytes:
    method, _, rest = heads.partition(b"\r\n")[0].partition(b" ")
    page = pages.get(rest.partition(b" ")[0].partition(b"?")[0].decode("ascii", "replace"))
    if method not in (b"GET", b"HEAD"):
        status, text = 405, "read only\n"
    elif page is None:
        status, text = 404, f"there are {' '.join(pages)}\n"
    else:
        status, text = page()
    body = text.encode()
    head = f"HTTP/1.1 {status} {'OK' if status == 200 else 'No'}\r\nContent-Type: text/plain; charset=utf-8\r\n"
    head += f"Content-Length: {len(body)}\r\nConnection: close\r\nX-Content-Type-Options: nosniff\r\n\r\n"
    return head.encode() + (b"" if method == b"HEAD" else body)
