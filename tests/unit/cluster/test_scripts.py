"""Packing of a directory into a commit of the demo, and reading a pod's report about it."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest

from cluster import cli

COMMIT = "9c01" * 10


def test_a_developers_directory_is_packed_without_what_lies_beside_the_scripts(tmp_path: Path) -> None:
    for name in ("prolog.d/10-x", "health.d/a.py", "health.d/__pycache__/a.pyc", ".git/config", "lib/x"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / "prolog.d/10-x").chmod(0o4775)
    with tarfile.open(fileobj=io.BytesIO(cli.pack(tmp_path, "tree"))) as archive:
        files = {member.name: (member.mode, member.uid) for member in archive if member.isreg()}
    assert files == {
        "tree/prolog.d/10-x": (0o755, 65534), "tree/health.d/a.py": (0o644, 65534), "tree/lib/x": (0o644, 65534),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("status", "said"),
    [
        ({"current": COMMIT}, ""),
        ({"current": "zero", "quarantine": None}, None),
        ({"current": "zero", "quarantine": {"commit": "other", "reason": "old"}}, None),
        ({"current": "zero", "quarantine": {"commit": COMMIT, "reason": "broken"}}, "broken"),
    ],
)
def test_what_became_of_a_commit(status: dict[str, object], said: str | None) -> None:
    assert cli.read_result(json.dumps(status), COMMIT) == said
    assert cli.read_result("not up yet", COMMIT) is None
