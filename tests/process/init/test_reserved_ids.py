"""Users of a site's directory who have an id that the epilog works under."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from init.helpers.pod_checks import RESERVED

pytestmark = pytest.mark.root
ROOT = Path(__file__).resolve().parents[3]


def asked(directory: Path, *users: tuple[str, int]) -> tuple[int, str]:
    """Run the check with these users beside the system's own."""
    file = directory / "passwd"
    lines = [f"{name}:x:{number}:100::/:/bin/sh\n" for name, number in users]
    file.write_text(Path("/etc/passwd").read_text() + "".join(lines))
    script = f'mount --bind {file} /etc/passwd && exec "$@"'
    command = [
        "unshare",
        "--mount",
        "sh",
        "-ec",
        script,
        "-",
        sys.executable,
        "-m",
        "init.helpers.pod_checks",
        "reserved-ids",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    return done.returncode, done.stdout + done.stderr


def test_users_with_a_reserved_id_are_told_by_their_ids(tmp_path: Path) -> None:
    first, last = RESERVED[0], RESERVED[-1]
    assert asked(tmp_path, ("below", first - 1), ("above", last + 1)) == (0, "")
    code, text = asked(tmp_path, ("eve", first), ("mallory", last))
    assert code == 1
    assert f"({first} to {last}): {first}, {last}; give them other ids" in text
    assert "eve" not in text, "the public page shows it"
    many = [(f"u{number}", first + number) for number in range(5)]
    assert f"{first + 2} and 2 more; give" in asked(tmp_path, *many)[1]


def test_the_epilog_works_under_these_ids_and_no_others() -> None:
    code = "import jobs; print(*sorted({*jobs.SPARES, *jobs.SPARES_TO_SIGNAL}))"
    env = {"PYTHONPATH": str(ROOT / "scripts" / "lib"), "SLURM_JOB_ID": "1", "SLURM_JOB_UID": "1000"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert [int(word) for word in done.stdout.split()] == list(RESERVED)
    assert f"{RESERVED[0]} to {RESERVED[-1]} are reserved" in (ROOT / "docs" / "architecture.md").read_text()
