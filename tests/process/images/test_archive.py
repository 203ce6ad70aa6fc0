"""Two builds of one tree at once: each asks an archive of its own repositories, and not what the other made of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from images import ImagesError
from images.archive import lock

ROOT = Path(__file__).resolve().parents[3]
# What a build asks with, for long enough to meet the other's; no repository is needed for it.
BUILD = """
import sys
from pathlib import Path
from images.archive.lock import LockContext, open_archive
from images.archive.apt import BaseFiles
from images.definition.load import load
from images.definition.spec import BuildChoice, SlurmSource
from images.settings import BuildSettings

root, tree, name = sys.argv[1:]
choice = BuildChoice("debian", SlurmSource.PACKAGE, release="24.11")
place = LockContext(Path(tree), load(Path(root)), choice, BuildSettings(http_proxy=f"http://{name}.test:1"))
for turn in range(20):
    with open_archive(place, BaseFiles("", ()), ()) as archive:
        assert f"//{name}.test" in (archive.directory / "apt.conf").read_text(), f"turn {turn}: it is another's"
"""


def test_two_builds_at_once_ask_each_its_own_archive(tmp_path: Path) -> None:
    line = [sys.executable, "-c", BUILD, str(ROOT), str(tmp_path)]
    builds = [
        subprocess.Popen([*line, name], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for name in ("one", "two")
    ]
    for build in builds:
        said, _ = build.communicate()
        assert build.returncode == 0, said


def test_a_build_that_waits_for_another_one_says_so_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = "import fcntl, os, sys; fcntl.flock(os.open(sys.argv[1], 0), fcntl.LOCK_EX); print(flush=True); input()"
    monkeypatch.setattr(lock, "OTHERS_S", 0.0)
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdin=pipe, stdout=pipe) as other:
        assert other.stdout is not None and other.stdout.readline() == b"\n"
        with pytest.raises(ImagesError, match="another build"), lock.lock_directory(tmp_path):
            pass
        other.communicate(b"\n")
    said = capsys.readouterr().err
    assert said == f"build: waiting for process {other.pid}, another build of this tree, which has {tmp_path}\n"
    with lock.lock_directory(tmp_path):
        assert not capsys.readouterr().err


def test_who_has_another_file_of_the_same_number_is_not_who_is_waited_for() -> None:
    """The kernel's list names a file by its number in its file system, and these two are the first of theirs."""
    one, other = Path("/proc"), Path("/sys")
    assert one.stat().st_ino == other.stat().st_ino and one.stat().st_dev != other.stat().st_dev
    script = "import fcntl, os, sys; fcntl.flock(os.open(sys.argv[1], 0), fcntl.LOCK_SH); print(flush=True); input()"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", script, str(other)], stdin=pipe, stdout=pipe) as stranger:
        assert stranger.stdout is not None and stranger.stdout.readline() == b"\n"
        fd = os.open(one, os.O_RDONLY)
        try:
            assert lock.describe_holder(fd) == "another build of this tree"
        finally:
            os.close(fd)
        stranger.communicate(b"\n")
