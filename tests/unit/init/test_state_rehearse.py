"""Report of a rehearsal of another Slurm, and the files that replace the copy's."""

from __future__ import annotations

from pathlib import Path

import pytest

from init.state import rehearse
from init.state.copies import CopyError, JobsAround, Manifest
from init.state.rehearse import Rehearsal


@pytest.fixture
def manifest() -> Manifest:
    return Manifest("20261127T010000Z", 0.0, "24.11", 42, "c", (), True, 0, 9, "no database here", (0, 0), ())


def test_losses_come_first_and_are_bounded(manifest: Manifest) -> None:
    losses = tuple(f"job {number}, running now, would be gone" for number in range(30))
    told = rehearse.lines(manifest, Rehearsal("26.05", 4, losses, ("slurmctld answered after 1.0 s",)))
    assert told[0].endswith("4 jobs are the same; it would lose or change")
    assert told[1] == "  job 0, running now, would be gone"
    assert told[-2:] == ["  and 10 more", "slurmctld answered after 1.0 s"]


def test_each_job_that_differs_is_told() -> None:
    expected = JobsAround({"1": "RUNNING", "2": "PENDING", "3_[1-9]": "PENDING"}, frozenset({"4"}))
    assert rehearse._lost_jobs(expected, {"1": "RUNNING", "3_[1-9]": "CANCELLED", "9": "PENDING"}) == [
        "job 2, pending now, would be gone",
        "job 3_[1-9] would be cancelled, and is pending",
    ]


def test_a_directory_without_a_slurm_conf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cgroup.conf").write_text("")
    with pytest.raises(CopyError, match=r"it has no slurm\.conf"):
        rehearse.read_conf(tmp_path)


def test_only_plain_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "slurm.conf").write_text("ClusterName=x\n")
    (tmp_path / "link.conf").symlink_to("/etc/shadow")
    (tmp_path / "directory").mkdir()
    assert list(rehearse.read_conf(tmp_path)) == ["slurm.conf"]
