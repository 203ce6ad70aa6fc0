"""A shared home that users cannot use is named, with its volume and the way out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.root
USERS = 1000


def asked(home: Path) -> tuple[int, str]:
    command = [sys.executable, "-m", "init.helpers.pod_checks", "home", str(home), "claim slurm-home"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, (done.stdout + done.stderr).removeprefix(f"{home} (claim slurm-home): ").rstrip("\n")


@pytest.mark.parametrize(
    ("mode", "group", "fault"),
    [
        (0o755, 0, ""),
        (0o711, 0, ""),
        (0o750, USERS, ""),
        (0o1777, 0, ""),
        (0o750, 0, "users may not enter it: its mode is 0750, and jobs end with 0:53; chmod 0755 "),
        (0o700, USERS, "users may not enter it: its mode is 0700, and jobs end with 0:53; chmod 0755 "),
        (0o777, 0, "every user may rename and remove other users' homes: its mode is 0777; chmod 0755 "),
    ],
)
def test_what_users_may_do_there(disk: Path, mode: int, group: int, fault: str) -> None:
    os.chown(disk, 0, group)
    disk.chmod(mode)
    assert asked(disk) == (1 if fault else 0, f"{fault}{disk}" if fault else "")


def test_a_home_that_is_full_read_only_or_gone_is_named(disk: Path) -> None:
    disk.chmod(0o755)
    (disk / "all").write_bytes(bytes(256 << 10))
    assert asked(disk) == (1, "is full")
    (disk / "all").unlink()
    assert asked(disk) == (0, "")
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    assert asked(disk) == (1, "is read-only")
    assert asked(disk / "nowhere") == (1, "cannot be read: No such file or directory")
    assert asked(Path("/proc/version")) == (1, "is not a directory")
