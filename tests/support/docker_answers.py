"""Read what a command in a container says as a whole: docker's library loses the beginning of some answers.

The library asks for a raw connection and then reads the socket beside the buffer of the HTTP response. What the engine
sends together with the response's header is in that buffer, and lost: on a busy machine one of a hundred answers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from docker.api.client import APIClient  # type: ignore[import-untyped]  # it carries no types
from docker.utils.socket import consume_socket_output, demux_adaptor  # type: ignore[import-untyped]  # it has no types

from cluster.pods import read_frames


def read_whole() -> None:
    """Make every client of this process read through the buffer."""
    APIClient._read_from_socket = _read


def _read(self: Any, response: Any, stream: bool, tty: bool = True, demux: bool = False) -> Any:
    self._disable_socket_timeout(self._get_raw_response_socket(response))  # a command may be silent for long
    frames = _frames(response.raw._fp.fp, tty)
    pieces = (demux_adaptor(*frame) for frame in frames) if demux else (data for _, data in frames)
    if stream:
        return pieces
    try:
        return consume_socket_output(pieces, demux=demux)
    finally:
        response.close()


def _frames(reader: Any, tty: bool) -> Iterator[tuple[int, bytes]]:
    if tty:
        while data := reader.read1():
            yield 1, data
        return
    yield from read_frames(reader)
