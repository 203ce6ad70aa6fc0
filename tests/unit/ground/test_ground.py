"""Base library of all packages: atomic file writes, errors that are safe to print, and requests that end in time."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest

from ground import commands
from ground.errors import Problem, counted, nearest
from ground.files import read_json, read_plain, write_json, write_whole
from ground.metrics import family
from ground.sockets import ask


def test_a_file_has_its_mode_whatever_the_umask_and_nothing_lies_beside_it(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        write_whole(tmp_path / "a", "x", 0o644)
        write_whole(tmp_path / "b", b"y", 0o400)
    finally:
        os.umask(before)
    assert {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {"a": 0o644, "b": 0o400}


@pytest.mark.skipif(os.geteuid() != 0, reason="another user must own a file")
def test_a_file_that_anybody_may_have_written_is_read_as_what_it_is(tmp_path: Path) -> None:
    own, foreign, link, pipe = (tmp_path / name for name in ("own", "foreign", "link", "pipe"))
    own.write_text("root's")
    foreign.write_text("another user's")
    os.chown(foreign, 65534, 65534)
    link.symlink_to(own)
    os.mkfifo(pipe)
    files = (own, foreign, link, pipe, tmp_path / "absent")
    assert [read_plain(path, 4) for path in files] == [b"root", b"anot", None, None, None]
    assert [read_plain(path, 4, trusted=True) for path in files] == [b"root", None, None, None, None]


def test_a_write_that_is_cut_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_json(tmp_path / "a.json", {"a": 1})

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_json(tmp_path / "a.json", {"a": 2})
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"] and read_json(tmp_path / "a.json") == {"a": 1}


@pytest.mark.parametrize("text", ["", "[1]", "{", "[" * 100_000, "\0"])
def test_a_damaged_file_says_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    assert read_json(tmp_path / "a.json") == {}


def test_an_error_says_where_and_what_to_do_and_obeys_no_terminal() -> None:
    problem = Problem("read it", "\x1b[2Jgone", file=Path("/a"), field="b", hint="mend it")
    assert str(problem) == "cannot read it:  [2Jgone (/a, b)\nhint: mend it"
    assert nearest("workr", ["worker", "login"]) == "did you mean 'worker'?" and nearest("x", []) is None


def test_one_of_a_thing_is_no_plural() -> None:
    assert [counted(number, "job") for number in (0, 1, 2, 1200)] == ["0 jobs", "1 job", "2 jobs", "1,200 jobs"]
    assert [counted(number, "pod ends", "pods end") for number in (1, 2)] == ["1 pod ends", "2 pods end"]


def test_a_label_is_one_line_whatever_it_holds() -> None:
    assert family("a", "b", [({"c": 'd"\n\\'}, "1")])[-1] == 'a{c="d\\"\\n\\\\"} 1'


def test_a_question_ends_in_time_however_slowly_its_answer_drips(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen()

        def drip() -> None:
            caller, _ = listener.accept()
            with caller:
                while True:
                    try:
                        caller.sendall(b" ")
                    except OSError:
                        return
                    time.sleep(0.02)

        threading.Thread(target=drip, daemon=True).start()
        assert ask(path, {"ask": "look"}, 0.2) is None
    assert ask(path, {}, 0.2) is None, "nobody listens"


def test_a_command_that_prints_too_much_or_for_too_long_is_ended() -> None:
    done = commands.ran_bounded(["sh", "-c", "echo out; echo err >&2; exit 3"], 4, within=60)
    assert (done.stdout, done.stderr, done.returncode) == ("out\n", "err\n", 3)
    with pytest.raises(commands.OutputTooLongError):
        commands.ran_bounded(["cat", "/dev/zero"], 1 << 20, within=60)
    with pytest.raises(subprocess.TimeoutExpired) as late:
        commands.ran_bounded(["sleep", "600"], 100, within=0.1)
    assert late.value.stdout == b""
