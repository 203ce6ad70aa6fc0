"""Saved state before slurmctld starts.

Interrupted saves are completed, missing files are allowed if none was saved, and numbers continue.
"""

from __future__ import annotations

import os
import pwd
import sys
from pathlib import Path

import pytest

from images.definition.load import choose_build, load
from images.make.content import serialise_slurm
from init.pod import release
from init.pod.pod import Pod
from init.prepare import saved_state
from init.slurm import accounting, lost_jobs
from init.slurm import place as saved

ROOT = Path(__file__).resolve().parents[3]
DEFINITION = load(ROOT)
NEEDED = ("assoc_usage", "fed_mgr_state", "job_state", "node_state", "resv_state", "trigger_state")
CONF = "ClusterName=C1\nAccountingStorageType=accounting_storage/slurmdbd\n"
CLIENT = "#!{python}\nimport sys\nopen({asked!r}, 'w').write(sys.argv[-2])\nprint({answer!r})\n"


@pytest.fixture(autouse=True)
def slurm_user(monkeypatch: pytest.MonkeyPatch) -> None:
    me = pwd.getpwuid(os.getuid())
    monkeypatch.setattr(saved_state, "user", lambda name: (me.pw_uid, me.pw_gid))


class Here:
    """File system of a controller, with a MariaDB client that gives the test's answer."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch, version: str = "26.05.5", conf: str = CONF) -> None:
        self.state = root / "var/spool/slurmctld"
        for directory in ("usr/share/minivm", "etc/slurm", "var/spool/slurmctld"):
            (root / directory).mkdir(parents=True)
        facts = serialise_slurm(DEFINITION, choose_build(DEFINITION, "debian", version[:5]), version)
        (root / release.FILE[1:]).write_text(facts)
        (root / "etc/slurm/slurm.conf").write_text(conf)
        self.client, self.asked = root / "mariadb", root / "asked"
        monkeypatch.setattr(accounting, "CLIENT", str(self.client))
        self.accounting("NULL")
        self.pod = Pod({}, root)

    def accounting(self, answer: str) -> None:
        self.client.write_text(CLIENT.format(python=sys.executable, asked=str(self.asked), answer=answer))
        self.client.chmod(0o755)

    def put(self, **files: bytes) -> None:
        for name, data in files.items():
            (self.state / name.replace("__", ".")).write_bytes(data)

    def files(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in self.state.iterdir()}

    def run(self) -> str:
        return saved_state.repair(self.pod)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Here:
    return Here(tmp_path, monkeypatch)


def jobs(following: int, number: int = 45, rest: bytes = b"") -> bytes:
    """Return a job_state file as slurmctld writes it."""
    return (
        b"\0\0\0\x11PROTOCOL_VERSION\0" + bytes([number, 0]) + bytes(8) + following.to_bytes(4, "big") + bytes(8) + rest
    )


def all_of_them(**but: bytes) -> dict[str, bytes]:
    return {**dict.fromkeys(NEEDED, b"x"), "job_state": jobs(1), **but}


@pytest.mark.parametrize(
    ("what", "files", "after"),
    [
        ("cut between the renames", {"a.new": b"2", "a.old": b"1"}, {"a": b"2", "a.old": b"1"}),
        ("cut in the write", {"a": b"1", "a.new": b"2"}, {"a": b"1", "a.new": b"2"}),
        ("cut in the first write", {"a.new": b"2"}, {"a.new": b"2"}),
        ("lost", {"a.old": b"1"}, {"a.old": b"1"}),
        ("cut before the last step of 24.11", {"a": b"2", "a.new": b"2", "a.old": b"1"}, None),
    ],
)
def test_a_save_that_a_kill_cut_is_finished(
    here: Here, what: str, files: dict[str, bytes], after: dict[str, bytes] | None
) -> None:
    for name, data in files.items():
        (here.state / name).write_bytes(data)
    for _ in range(2):
        here.run()
        assert here.files() == (files if after is None else after), what


def test_what_is_no_file_is_no_save(here: Here) -> None:
    (here.state / "a.new").symlink_to("/etc/passwd")
    (here.state / "b.new").mkdir()
    here.put(a__old=b"1", b__old=b"1")
    assert here.run() == "whole"
    assert (here.state / "a.new").is_symlink() and not (here.state / "b").exists()


@pytest.mark.parametrize("missing", NEEDED)
def test_a_slurmctld_that_was_killed_before_its_first_saves_starts(here: Here, missing: str) -> None:
    files = all_of_them()
    del files[missing]
    here.put(clustername=b"c1|77", **files)
    assert "asks slurmdbd for the cluster's number again" in here.run()
    assert here.files()["clustername"] == b"c1"
    assert here.run() == "whole", "nothing more to do for the next start, had this one been cut, too"


@pytest.mark.parametrize(
    ("what", "files", "name"),
    [
        ("everything is there", all_of_them(), b"c1|77"),
        ("a file was lost, and not cut", {**all_of_them(node_state__old=b"x"), "node_state": b""}, b"c1|77"),
        ("the number was never there", {}, b"c1"),
    ],
)
def test_else_the_number_stays(here: Here, what: str, files: dict[str, bytes], name: bytes) -> None:
    here.put(clustername=name, **{key: data for key, data in files.items() if data})
    here.run()
    assert here.files()["clustername"] == name, what


@pytest.mark.parametrize("version", ["24.11.5", "26.05.5"])
def test_a_cut_clustername_gets_the_name_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """An empty clustername file is filled again.

    slurmctld writes the file in place, and with an empty one it exits on every start, as for another cluster's state.
    """
    here = Here(tmp_path, monkeypatch, version)
    here.put(clustername=b"", **all_of_them())
    here.run()
    assert here.files()["clustername"] == b"c1"


def test_without_need_or_slurmdbd_the_number_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place, version, conf in (("old", "24.11.5", CONF), ("none", "26.05.5", "ClusterName=c1\n")):
        here = Here(tmp_path / place, monkeypatch, version, conf)
        here.put(clustername=b"c1|77")
        assert here.run() == "whole" and here.files() == {"clustername": b"c1|77"}


@pytest.mark.parametrize(
    ("what", "following", "known", "then"),
    [
        ("the state is older than the accounting", 8, "12", 13),
        ("the very job whose record was not saved", 8, "8", 9),
        ("the accounting is older than the state", 8, "3", 8),
        ("no job yet", 1, "NULL", 1),
        ("a database that does not answer", 8, "", 8),
        ("numbers began again after the largest", 8, "67000000", 8),
    ],
)
def test_the_next_number_is_above_all_that_the_accounting_knows(
    here: Here, what: str, following: int, known: str, then: int
) -> None:
    rest = b"jobs" * 999
    here.put(job_state=jobs(following, rest=rest))
    here.accounting(known)
    before = (here.state / "job_state").stat().st_ino
    here.run()
    assert here.files() == {"job_state": jobs(then, rest=rest)}, what
    assert (here.state / "job_state").stat().st_ino == before
    assert "FROM `c1_job_table`" in here.asked.read_text()


def test_a_new_state_begins_above_what_the_accounting_knows(here: Here) -> None:
    here.accounting("41")
    assert "the next job gets number 42" in here.run()
    data = here.files()["job_state"]
    assert saved.read_next_job(data, release.parse_release((here.pod.path(release.FILE)).read_text())) == 42  # type: ignore[arg-type]
    assert release.find_writer({"job_state": data}) == 45 and len(data) == saved.WHOLE_HEAD


@pytest.mark.parametrize(("version", "protocol"), [("24.11.5", 42), ("26.05.5", 45)])
@pytest.mark.parametrize(
    ("following", "scripts", "then"),
    [
        (8, (5, 11, 9), 12),
        (8, (8,), 9),
        (8, (3, 7), 8),
        (8, (), 8),
        (8, (67000000,), 8),
        (8, (10**20,), 8),
    ],
)
def test_a_job_that_was_accepted_and_not_saved_keeps_its_number(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    version: str,
    protocol: int,
    following: int,
    scripts: tuple[int, ...],
    then: int,
) -> None:
    """slurmctld removes the scripts of jobs that it does not know, and would give their numbers to other jobs."""
    here = Here(tmp_path, monkeypatch, version, "ClusterName=c1\n")
    here.put(job_state=jobs(following, protocol))
    for job in scripts:
        (here.state / f"hash.{job % 10}/job.{job}").mkdir(parents=True)
    (here.state / "hash.0").mkdir(exist_ok=True)
    (here.state / "hash.0/job.x").mkdir()
    assert (f"the next job gets number {then}: slurmctld had accepted" in here.run()) == (then > following)
    assert (here.state / "job_state").read_bytes() == jobs(then, protocol)


@pytest.mark.parametrize("data", [b"", b"x" * 99, jobs(8, 46), jobs(8, 30), jobs(8)[:-1]])
def test_a_job_state_that_this_release_does_not_read_stays(here: Here, data: bytes) -> None:
    here.put(job_state=data)
    here.accounting("41")
    here.run()
    assert here.files() == {"job_state": data}


def test_what_cannot_be_repaired_keeps_slurmctld_from_nothing(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    (here.state / "job_state").symlink_to("/etc/passwd")
    here.accounting("41")
    assert here.run() == "whole"
    monkeypatch.setattr(saved_state, "finish_saves", lambda state: (_ for _ in ()).throw(OSError("read-only")))
    assert here.run() == "the saved state stays as it is: read-only"


def test_a_lost_job_without_the_charts_filter_is_kept_and_never_brought_back(here: Here) -> None:
    here.put(job_state=jobs(8))
    (here.state / "hash.8/job.8").mkdir(parents=True)
    (here.state / "hash.8/job.8/script").write_bytes(b"#!/bin/sh\n\0")
    (here.state / "hash.8/job.8/environment").write_bytes(b"\x01\0\0\0MINIVM_JOB_OWNER=1001:0\0")
    assert "none of them is brought back: without the chart's job_submit.lua" in here.run()
    assert [lost.state for lost in lost_jobs.entries(here.pod.path(lost_jobs.LOST))] == ["refused"]
