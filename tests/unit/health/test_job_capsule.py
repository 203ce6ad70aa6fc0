"""The archive for a support ticket: what is in it, what is masked, and where it may be written."""

from __future__ import annotations

import json
import os
import stat
import tarfile
from pathlib import Path

import pytest

from health.jobs import __main__ as command
from health.jobs import boxes, explain
from health.jobs.ask import Asker
from health.jobs.boxes import Box
from health.jobs.model import Job, Page, World
from init.errors import InitError

JOB = Job(
    id=12,
    shown="12_3",
    name="train --token=abc123",
    user="alice",
    states=frozenset({"FAILED"}),
    command="/home/alice/train.sh --api-key=xyz",
    nodes="w0",
)
SEEN: dict[str, object] = {"kind": "seen", "text": "mount https://bob:hunter2@nas/x failed"}


def page(job: Job = JOB) -> Page:
    return explain.explain(job, World(), 100.0)


def contents(path: Path) -> dict[str, str]:
    with tarfile.open(path) as archive:
        members = archive.getmembers()
        assert all(member.isfile() and member.mode == 0o600 and member.uid == 0 for member in members)
        files = {member.name: archive.extractfile(member) for member in members}
        return {name: file.read().decode() for name, file in files.items() if file is not None}


def test_a_capsule_has_the_page_and_the_boxes_that_were_reached(tmp_path: Path) -> None:
    path = tmp_path / "a.tar.gz"
    mask = os.umask(0)
    try:
        boxes.write_capsule(
            path, page(), (Box("w0", (SEEN,)), Box("../w\x1b1", (SEEN,)), Box("w2", obstacle="no")), 100.0
        )
    finally:
        os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    files = contents(path)
    assert sorted(files) == [
        f"minivm-job-12_3/{name}" for name in ("boxes/..-w-1.jsonl", "boxes/w0.jsonl", "page.json")
    ]
    shown = json.loads(files["minivm-job-12_3/page.json"])
    assert (shown["script"], shown["job"]["shown"], shown["job"]["name"]) == (
        "train.sh", "12_3", "train --token=********",
    )  # fmt: skip
    text = "".join(files.values())
    assert not [secret for secret in ("abc123", "xyz", "hunter2", "/home/alice/train.sh") if secret in text]
    assert "https://bob:********@nas/x" in text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("DB_PASSWORD=a b", "DB_PASSWORD=******** b"),
        ("Authorization: Bearer abc.def", "Authorization: Bearer ********"),
        ("hf_abcdefghijklmnop in a name", "******** in a name"),
        ("tokens of 3 jobs", "tokens ******** 3 jobs"),
        ("7 of 8 GPUs answer", "7 of 8 GPUs answer"),
    ],
)
def test_what_looks_like_a_secret_is_masked(text: str, shown: str) -> None:
    assert boxes.mask_secrets({"a": [text, 1, None]}) == {"a": [shown, 1, None]}


def test_a_file_that_exists_or_a_link_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    (tmp_path / "file").write_text("mine")
    for name in ("link", "file"):
        with pytest.raises(InitError, match="it exists; name another file"):
            boxes.write_capsule(tmp_path / name, page(), (), 100.0)
    assert (tmp_path / "file").read_text() == "mine" and not (tmp_path / "target").exists()
    with pytest.raises(InitError, match="name a file in a directory of yours"):
        boxes.write_capsule(tmp_path / "none/file", page(), (), 100.0)


def test_only_one_own_job_makes_a_capsule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    asker = Asker(run=lambda argv: "", user="bob", is_root=False, now=100.0)
    with pytest.raises(InitError, match="this is a job of alice"):
        command._pack(asker, [page()], "")
    asker.user = "alice"
    with pytest.raises(InitError, match="these are several: 12_3, 12_3"):
        command._pack(asker, [page(), page()], "")
    asker.fetched = (boxes.Box("w0", (SEEN,)),)
    command._pack(asker, [page()], "")
    assert len(contents(tmp_path / "minivm-job-12_3.tar.gz")) == 2


def test_capsule_wants_a_job(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        command.main(["--capsule"])
    assert end.value.code == 2 and "--capsule wants the JOB first" in capsys.readouterr().err
