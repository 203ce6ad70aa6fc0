"""A job's note reaches only a plain file of its user that the job has written, whatever lies at the path instead."""

from __future__ import annotations

import errno
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from health.runner import failed

pytestmark = pytest.mark.root

ALICE, BOB, GROUP = 61401, 61402, 61400
TEXT = "minivm: job 12 failed: x.\nminivm: more\n"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    for directory in (tmp_path, *tmp_path.parents[:2]):
        directory.chmod(0o755)
    home = tmp_path / "home"
    home.mkdir()
    os.chown(home, ALICE, GROUP)
    return home


def make(path: Path, data: bytes = b"out\n", owner: int = ALICE, mode: int = 0o644) -> Path:
    path.write_bytes(data)
    os.chown(path, owner, GROUP)
    path.chmod(mode)
    return path


def append(path: Path | str, started: float = 0.0, within: float = 20.0) -> str:
    return failed.append_note(str(path), TEXT, ALICE, GROUP, (started or time.time(), time.time()), within)


@pytest.mark.parametrize(
    ("before", "after"), [(b"out\n", b"out\n"), (b"out", b"out\n"), (b"", b""), (b"\xff\0", b"\xff\0\n")]
)
def test_the_note_is_two_whole_lines_at_the_end_and_is_written_once(place: Path, before: bytes, after: bytes) -> None:
    path = make(place / "out", before)
    assert [append(path), append(path)] == ["", ""]
    assert path.read_bytes() == after + TEXT.encode()
    assert (path.stat().st_uid, path.stat().st_mode & 0o777) == (ALICE, 0o644)


def test_a_link_to_the_users_own_file_is_followed(place: Path) -> None:
    target = make(place / "target")
    (place / "out").symlink_to(target)
    assert append(place / "out") == ""
    assert target.read_text().endswith(TEXT)


def test_a_file_that_its_user_cannot_read_gets_the_note_as_well(place: Path) -> None:
    path = make(place / "out", mode=0o200)
    assert append(path) == ""
    assert path.read_text() == f"out\n\n{TEXT}"


@pytest.mark.parametrize(("owner", "mode"), [(0, 0o666), (BOB, 0o666), (BOB, 0o600), (0, 0o644)])
@pytest.mark.parametrize("linked", [False, True])
def test_a_file_of_another_user_stays_as_it_is(place: Path, owner: int, mode: int, linked: bool) -> None:
    other = make(place / "other", b"secret\n", owner, mode)
    path = place / "out" if linked else other
    if linked:
        path.symlink_to(other)
    assert append(path) == failed.REFUSED
    assert other.read_bytes() == b"secret\n"


def test_the_users_own_file_behind_a_directory_that_is_closed_to_the_user_stays_as_it_is(place: Path) -> None:
    closed = place / "closed"
    closed.mkdir(mode=0o700)
    path = make(closed / "out")
    assert append(path) == os.strerror(errno.EACCES)
    assert path.read_bytes() == b"out\n"


def test_nothing_is_created(place: Path) -> None:
    (place / "link").symlink_to(place / "nothing")
    for path in (place / "gone", place / "link", place / "gone" / "out", ""):
        assert append(path) in (os.strerror(errno.ENOENT), failed.REFUSED)
    assert [entry.name for entry in place.iterdir()] == ["link"]


def test_a_fifo_a_device_and_a_directory_are_not_opened(place: Path) -> None:
    os.mkfifo(place / "fifo")
    os.chown(place / "fifo", ALICE, GROUP)
    reader = os.open(place / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    try:
        for path in (place / "fifo", "/dev/null", "/dev/tty", place):
            assert append(path) == failed.REFUSED
        assert os.read(reader, 100) == b"", "no writer came"
    finally:
        os.close(reader)


def test_a_file_that_was_there_long_before_the_job_is_not_its_output(place: Path) -> None:
    path = make(place / "out")
    os.utime(path, (0, time.time() - 3600))
    assert append(path) == failed.REFUSED
    assert append(path, started=time.time() - 3600) == ""


def test_the_output_that_the_next_job_writes_meanwhile_stays_as_it_is(place: Path) -> None:
    """A retry with the same --output begins the file anew within seconds."""
    path = make(place / "out")
    ended = path.stat().st_mtime - 5
    assert failed.append_note(str(path), TEXT, ALICE, GROUP, (ended - 60, ended), 20.0) == failed.REFUSED
    assert path.read_bytes() == b"out\n"


def test_a_huge_file_is_not_read(place: Path) -> None:
    path = make(place / "out")
    with path.open("r+b") as file:
        file.truncate(1 << 40)
    assert append(path) == ""
    assert path.stat().st_size == (1 << 40) + 1 + len(TEXT)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k,mode=0777", "none", disk], check=True)
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_a_full_disk_costs_the_note_alone(place: Path, small_disk: Path) -> None:
    path = make(small_disk / "out")
    with path.open("ab", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(b"x" * 4096)
    before = path.read_bytes()
    assert append(path) == os.strerror(errno.ENOSPC)
    assert path.read_bytes() == before


def test_a_file_system_that_hangs_is_given_up(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failed, "_append_as_user", lambda *_: time.sleep(600))
    assert "does not answer" in append(make(place / "out"), within=0.1)


def test_the_child_has_the_rights_of_the_user_alone(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def tell(*_: object) -> int:
        status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines())
        rights = [status[key].split() for key in ("Uid", "Gid", "Groups", "CapEff", "CapPrm")]
        wanted = [[str(ALICE)] * 4, [str(GROUP)] * 4, [str(GROUP)], ["0" * 16], ["0" * 16]]
        descriptors = {int(fd) for fd in os.listdir("/proc/self/fd")} - {0, 1, 2, 3}  # noqa: PTH208  # 3: this listing
        return 0 if rights == wanted and not descriptors else errno.EPERM

    monkeypatch.setattr(failed, "_append_as_user", tell)
    assert append(place / "out") == ""


def test_a_job_of_root_gets_no_note(place: Path) -> None:
    path = make(place / "out", owner=0)
    assert failed.append_note(str(path), TEXT, 0, 0, (time.time(), time.time()), 20.0) == failed.REFUSED
