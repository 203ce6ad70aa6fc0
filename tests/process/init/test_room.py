"""The controller's disks, full and failing: real file systems of a few kilobytes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.root


def asked(*directories: Path) -> tuple[int, str]:
    command = [sys.executable, "-m", "init.helpers.pod_checks", "room", *map(str, directories)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_a_disk_that_fills_is_told_and_forgotten_when_it_has_room_again(disk: Path) -> None:
    assert asked(disk, disk / "not-of-this-pod") == (0, "")
    (disk / "nearly").write_bytes(bytes(248 << 10))
    assert asked(disk) == (1, f"{disk} is 97 % full\n")
    (disk / "all").write_bytes(bytes(8 << 10))
    assert asked(disk, Path("/proc")) == (1, f"{disk} is full\n")
    (disk / "nearly").unlink()
    assert asked(disk) == (0, "")
    assert {path.name for path in disk.iterdir()} == {"all"}  # its own try leaves nothing


def test_a_disk_without_inodes_is_full_too(disk: Path) -> None:
    with pytest.raises(OSError, match="No space left"):
        for number in range(200):
            (disk / str(number)).touch()
    assert asked(disk) == (1, f"{disk} is full: inodes\n")


def test_a_read_only_disk_is_told(disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    assert asked(disk) == (1, f"{disk} is read-only\n")


def test_a_file_may_not_grow(disk: Path) -> None:
    """A write that is refused for another reason than room, as by a quota."""
    limited = ["prlimit", "--fsize=1", sys.executable, "-m", "init.helpers.pod_checks", "room", str(disk)]
    done = subprocess.run(limited, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, f"{disk} cannot be written: File too large\n")


def test_one_file_system_under_several_directories_is_told_once(disk: Path) -> None:
    (disk / "a").mkdir()
    (disk / "all").write_bytes(bytes(256 << 10))
    assert asked(disk / "a", disk) == (1, f"{disk}/a is full\n")
