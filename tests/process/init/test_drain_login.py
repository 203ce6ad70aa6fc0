"""A leaving login pod must recognise sessions correctly: a user may choose the name of a process."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from init.drain import deadline as drain
from init.drain import login as drain_login
from tests.process.init_world import PYTHON

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")


@contextlib.contextmanager
def process(title: str, uid: int) -> Iterator[int]:
    """Start a process of that user under that name, and yield its pid."""
    code = "import signal, sys; print('there', flush=True); signal.pause()"
    started = subprocess.Popen(
        [title, "-I", "-S", "-c", code], executable=PYTHON, user=uid, group=uid, extra_groups=[], stdout=subprocess.PIPE
    )
    try:
        assert started.stdout is not None and started.stdout.readline() == b"there\n"
        yield started.pid
    finally:
        started.kill()
        started.communicate()


@needs_root
def test_srun_and_salloc_end_with_the_pod_and_nothing_else_does(tmp_path: Path) -> None:
    """A client that ignores its terminal's end also ends; root's processes never do, whatever their names are."""
    for name in ("srun", "salloc", "other"):
        (tmp_path / name).write_text("#!/bin/sh\ntrap '' HUP\necho there\nsleep 600 & wait\n")
        (tmp_path / name).chmod(0o755)
    for above in [tmp_path, *tmp_path.parents][:-2]:
        above.chmod(above.stat().st_mode | 0o011)
    started = {}
    try:
        for name, uid in (("srun", NOBODY), ("salloc", NOBODY), ("other", NOBODY), ("srun", 0)):
            process = subprocess.Popen(
                [tmp_path / name], user=uid, group=uid, extra_groups=[], stdout=subprocess.PIPE, start_new_session=True
            )
            started[name, uid] = process
            assert process.stdout is not None and process.stdout.readline() == b"there\n"
        drain_login.end_clients(drain.Deadline(4.0))
        ended = {key for key, process in started.items() if process.poll() is not None}
        assert ended == {("srun", NOBODY), ("salloc", NOBODY)}
    finally:
        for process in started.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            process.communicate()


def test_a_full_disk_takes_nobodys_time(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The word to new logins cannot be written; the sessions that are there have their grace all the same."""
    monkeypatch.setattr(drain_login, "NOLOGIN", Path("/dev/full"))
    monkeypatch.setattr(drain_login, "find_sessions", dict)
    drain_login.drain("nowhere", drain.Deadline(4.0))
    assert "cannot refuse new logins: No space left on device" in capsys.readouterr().out


@needs_root
@pytest.mark.parametrize("uid", [NOBODY, 0])
@pytest.mark.parametrize(
    "title", ["sshd: eve@pts/../../tmp/file", "sshd-session: eve@pts/0", "sshd-session: eve@notty"]
)
def test_a_process_that_calls_itself_sshd_is_no_session(title: str, uid: int) -> None:
    with process(title, uid) as pid:
        assert pid not in drain_login.find_sessions()


@pytest.mark.parametrize("name", ["pts/../../tmp/file", "pts/", "pts/1/../2", "../tmp/file", "notty", "pts/٣", "tty1"])
def test_a_terminal_is_a_number_under_pts(name: str) -> None:
    assert drain_login.terminals({1: name}) == []
    assert drain_login.terminals({1: f"pts/3,{name}"}) == [Path("/dev/pts/3")]


def test_a_word_goes_to_a_terminal_and_to_nothing_else(tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    file, fifo, link, directory = (tmp_path / name for name in ("file", "fifo", "link", "directory"))
    file.write_text("whole")
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    link.symlink_to(os.ttyname(theirs))
    directory.mkdir()
    try:
        paths = [file, fifo, link, directory, tmp_path / "absent", Path("/dev/null"), Path(os.ttyname(theirs))]
        assert drain_login.tell(paths, 7) == 1
        assert b"this pod stops in 7 s" in os.read(ours, 1000)
        assert file.read_text() == "whole"
        with contextlib.suppress(BlockingIOError):
            assert os.read(reader, 1000) == b""
    finally:
        for descriptor in (ours, theirs, reader):
            os.close(descriptor)


def test_a_stopped_terminal_holds_nobody_up() -> None:
    ours, theirs = os.openpty()
    try:
        os.set_blocking(theirs, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(theirs, b"x" * 1000)
        assert drain_login.tell([Path(os.ttyname(theirs))], 7) == 0
    finally:
        os.close(ours)
        os.close(theirs)
