"""Requests through a file that Kubernetes makes of the pod's annotation: slurmd restarts once for each word."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest

from init.helpers.configwatch import LONGEST_REQUEST, RESTART_PAUSE_S, RestartRequestWatch
from tests.process.init_world import NOTIFIES, World

pytestmark = pytest.mark.root
SLURMD = {"command": NOTIFIES, "ready": "notify"}


class Asked:
    """The watch of a running pod, its file, and a clock that a test sets."""

    def __init__(self, pod: World, directory: Path) -> None:
        self.pod, self.directory, self.clock = pod, directory, 1000.0
        self.watch, self.versions = self.begins(), itertools.count()

    def begins(self) -> RestartRequestWatch:
        return RestartRequestWatch(self.pod.run / "control.sock", self.directory, lambda: self.clock)

    def says(self, word: str | None) -> None:
        """Write the word as a kubelet does: a directory for each word, a link to it, and a link to a file in that."""
        version = self.directory / f"..{next(self.versions)}"
        version.mkdir()
        (version / "restart-slurmd").write_text(word or "")
        fresh = self.directory / "..data_tmp"
        fresh.symlink_to(version.name)
        fresh.rename(self.directory / "..data")
        if not (self.directory / "restart-slurmd").is_symlink():
            (self.directory / "restart-slurmd").symlink_to("..data/restart-slurmd")
        self.watch.look()

    def starts(self, name: str = "slurmd") -> int:
        """Once it is settled."""
        self.pod.until(lambda: self.pod.service(name).ready, f"{name} is ready")
        return self.pod.service(name).starts


@pytest.fixture
def asked(pod: World, tmp_path: Path) -> Asked:
    pod.start({"munged": SLURMD, "slurmd": SLURMD})
    pod.until_ready()
    directory = tmp_path / "asked"
    directory.mkdir()
    return Asked(pod, directory)


def restarted(asked: Asked, count: int) -> bool:
    asked.pod.until(lambda: asked.starts() >= count, f"slurmd has started {count} times")
    return asked.starts() == count


def test_a_new_word_restarts_slurmd_once_and_nothing_else(asked: Asked, capsys: pytest.CaptureFixture[str]) -> None:
    asked.says("1795438000")
    assert restarted(asked, 2)
    for _ in range(3):
        asked.watch.look()
    asked.says("1795438000")
    assert restarted(asked, 2)
    assert asked.starts("munged") == 1
    assert capsys.readouterr().out == "asked to restart slurmd (1795438000): slurmd restarts\n"


def test_the_word_that_is_there_when_it_begins_has_been_heeded(asked: Asked) -> None:
    asked.watch.handled = "1"
    asked.says("1")
    asked.watch = asked.begins()
    asked.watch.look()
    assert restarted(asked, 1)
    asked.says("2")
    assert restarted(asked, 2)


def test_no_word_asks_nothing_and_takes_nothing_back(asked: Asked) -> None:
    asked.says("1")
    assert restarted(asked, 2)
    asked.clock += RESTART_PAUSE_S
    asked.says(None)
    asked.says("  \n")
    (asked.directory / "restart-slurmd").unlink()
    asked.watch.look()
    assert restarted(asked, 2)
    asked.says("1")
    assert restarted(asked, 2), "the same word was heeded"


def test_whoever_asks_again_and_again_has_one_restart_a_minute(asked: Asked) -> None:
    for number in range(5):
        asked.says(str(number))
    assert restarted(asked, 2)
    assert asked.watch.look_again_in == RESTART_PAUSE_S
    asked.clock += RESTART_PAUSE_S - 1
    asked.watch.look()
    assert (asked.watch.look_again_in, asked.starts()) == (1, 2)
    asked.clock += 1
    asked.watch.look()
    assert restarted(asked, 3), "the last word, when its time has come"
    assert asked.watch.look_again_in is None


@pytest.mark.parametrize("kind", ["huge", "no text", "directory", "fifo"])
def test_whatever_is_there_holds_nobody_up(asked: Asked, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = asked.directory / "restart-slurmd"
    match kind:
        case "huge":
            file.write_text("x" * 10_000_000)
        case "no text":
            file.write_bytes(b"\xff\x1b[2J\n")
        case "directory":
            file.mkdir()
        case "fifo":
            os.mkfifo(file)
    asked.watch.look()
    said = capsys.readouterr().out
    assert len(said) < LONGEST_REQUEST + 100 and "\x1b" not in said and said.count("\n") == bool(said)
    assert restarted(asked, 2 if kind in ("huge", "no text") else 1)


def test_a_pod_without_slurmd_says_so(pod: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pod.start({"munged": SLURMD})
    pod.until_ready()
    Asked(pod, tmp_path).says("1")
    assert capsys.readouterr().out == "asked to restart slurmd (1): there is none\n"


def test_a_pid_1_that_does_not_answer_is_told_and_the_watch_goes_on(
    asked: Asked, capsys: pytest.CaptureFixture[str]
) -> None:
    asked.watch.control = asked.directory / "nobody"
    asked.says("1")
    assert "asked to restart slurmd (1): cannot speak to init: " in capsys.readouterr().out
