"""Detection of a release mismatch behind a refused connection, with the first bytes of Slurm's protocol."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from images.definition.load import choose_build, load
from images.make.content import serialise_slurm
from init.pod.release import Release, parse_release
from init.slurm import client

DEFINITION = load(Path(__file__).resolve().parents[3])
REFUSED = "scontrol: error: _fetch_child: failed to fetch remote configs: Protocol authentication error"
# First bytes of slurmctld 24.11.5's answer, and of 26.05.5's answer to a message that is not Slurm's.
ANSWER = bytes.fromhex("000000142a0000401f410000")
OTHER = b"HTTP/1.1 405 METHOD_NOT_ALLOWED\r\n\r\n"


def of(version: str) -> Release | None:
    return parse_release(serialise_slurm(DEFINITION, choose_build(DEFINITION, "debian", version[:5]), version))


@contextmanager
def controller(*answer: bytes) -> Iterator[str]:
    """Serve as a controller that reads one message and answers in these pieces."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            stream, _ = listener.accept()
            with stream:
                assert stream.recv(256) == client.QUESTION
                for piece in answer:
                    stream.sendall(piece)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        thread.join()


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ((ANSWER,), 42),
        ((ANSWER[:3], ANSWER[3:5], ANSWER[5:]), 42),
        ((OTHER,), None),
        ((ANSWER[:5],), None),
        ((b"\0\0\0\x14\0\0",), None),
        ((b"\0\0\0\x14\x2a\x07",), None),
        ((), None),
    ],
)
def test_the_number_of_its_release_is_in_any_answer(answer: tuple[bytes, ...], number: int | None) -> None:
    with controller(*answer) as there:
        assert client.find_protocol(there) == number


def test_nobody_there_tells_nothing() -> None:
    assert client.find_protocol("127.0.0.1:1") is None


@pytest.mark.parametrize(
    ("version", "theirs", "said"),
    [
        ("26.05.5", 42, "ctl:6817 has Slurm 24.11, which does not understand this image's 26.05: the controller is"
                        " upgraded first"),
        ("26.05.5", 40, "ctl:6817 has Slurm older than 24.11, which does not understand this image's 26.05: the"
                        " controller is upgraded first"),
        ("26.05.5", 45, "munge key rejected by ctl:6817"),
        ("24.11.5", 45, "munge key rejected by ctl:6817"),
        ("26.05.5", None, "munge key rejected by ctl:6817"),
    ],
)  # fmt: skip
def test_the_key_is_blamed_only_where_the_controller_understands(version: str, theirs: int | None, said: str) -> None:
    assert client.judge(REFUSED, "ctl:6817", "", client.explain_release(of(version), theirs, "ctl:6817")) == said


def test_of_a_slurm_that_nothing_is_known_of_nothing_is_claimed() -> None:
    assert client.explain_release(None, 42, "ctl:6817") == ""
    assert client.read_own_release() is None, "there is no image here"
