"""Report of a rehearsal of another Slurm, and the files that replace the copy's."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest

from init.slurm import change
from init.slurm.daemon import KnownJob
from init.state import rehearse
from init.state.copies import CopyError, JobsAround, Manifest
from init.state.rehearse import Rehearsal, Shadow, ShadowJob, ShadowPartition


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
    restored = {"1": "RUNNING", "3_[1-9]": "CANCELLED", "9": "PENDING"}
    assert rehearse._find_lost_jobs(expected, restored, {"2": "NODE_FAIL"}) == {
        "2": "job 2, pending now, would be gone (node_fail)",
        "3_[1-9]": "job 3_[1-9] would be cancelled, and is pending",
    }


def test_a_directory_without_a_slurm_conf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cgroup.conf").write_text("")
    with pytest.raises(CopyError, match=r"it has no slurm\.conf"):
        rehearse.read_conf(tmp_path, {})


def test_only_plain_files_of_slurm_are_read(tmp_path: Path) -> None:
    (tmp_path / "slurm.conf").write_text("ClusterName=x\n")
    (tmp_path / "pools.json").write_text("{}")  # minivm's own
    (tmp_path / "link.conf").symlink_to("/etc/shadow")
    (tmp_path / "directory").mkdir()
    assert list(rehearse.read_conf(tmp_path, {})) == ["slurm.conf"]
    with pytest.raises(CopyError, match="found no plain file"):
        rehearse.read_conf(tmp_path / "link.conf", {})


def test_a_single_file_replaces_the_copys_slurm_conf_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("ClusterName=x\n")
    copied = {"slurm.conf": b"ClusterName=y\n", "gres.conf": b"Name=gpu\n"}
    assert rehearse.read_conf(tmp_path / "mine", copied) == {**copied, "slurm.conf": b"ClusterName=x\n"}


def test_a_config_map_from_standard_input_replaces_the_files_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    text = b"kind: ConfigMap\ndata:\n  slurm.conf: |\n    ClusterName=x\n"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text)))
    copied = {"slurm.conf": b"ClusterName=y\n", "gres.conf": b"Name=gpu\n"}
    assert rehearse.read_conf(Path("-"), copied) == {**copied, "slurm.conf": b"ClusterName=x\n"}
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"")))
    with pytest.raises(CopyError, match=r"it has no slurm\.conf"):
        rehearse.read_conf(Path("-"), copied)


def test_the_directory_of_a_term_is_no_other_state() -> None:
    """A copy of one of two controllers has its term's; the chart renders none."""
    files = {"slurm.conf": b"ClusterName=x\nStateSaveLocation=/var/spool/slurmctld/term-12\nSlurmUser=slurm\n"}
    configured = {"slurm.conf": b"ClusterName=x\nStateSaveLocation=/var/spool/slurmctld\nSlurmUser=slurm\n"}
    assert change.effect(files, configured, [RUNNING]).losses, "an alarm"
    assert not change.effect(rehearse._without_term(files), configured, [RUNNING]).losses


NONE: frozenset[str] = frozenset()
RUNNING = KnownJob("7", holds=True, partitions=NONE, nodes=NONE, wanted=NONE, account="", qos="", gres=NONE)
WAITS = ShadowJob("PENDING", "long", "", 5, "1:00:00", "Priority")
RUNS = ShadowJob("RUNNING", "long", "n1", 5, "1:00:00", "None")
LONG = ShadowPartition("up", "2-00:00:00", 2)


def shadow(job: ShadowJob | None, **other: object) -> Shadow:
    jobs = {} if job is None else {"7_[1-3]": job}
    seen = Shadow(jobs, {"long": LONG}, frozenset({("long", "n1")}), frozenset(), frozenset(), (), 1)
    return replace(seen, **other)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (RUNS, None, "job 7_[1-3], running now, would be gone"),
        (RUNS, replace(RUNS, state="NODE_FAIL"), "would be node_fail, and is running"),
        (WAITS, replace(WAITS, partition="main"), "would move from partition long to main"),
        (RUNS, replace(RUNS, nodes="n2"), "would move from n1 to n2"),
        (WAITS, replace(WAITS, priority=0, reason="JobHeldAdmin"), "would be held: JobHeldAdmin"),
        (replace(WAITS, priority=0), WAITS, "would be released"),
        (WAITS, replace(WAITS, reason="InvalidQOS"), "would wait: InvalidQOS"),
        (WAITS, replace(WAITS, reason="Resources", priority=900), ""),
        (RUNS, RUNS, ""),
    ],
)
def test_a_job_that_a_configuration_changes_is_told(before: ShadowJob, after: ShadowJob | None, expected: str) -> None:
    told = [sentence for _, sentence in rehearse.compare_jobs(shadow(before), shadow(after))]
    assert expected in "".join(told) and bool(told) is bool(expected)


def test_a_lowered_limit_keeps_only_jobs_above_it() -> None:
    short = {"long": replace(LONG, limit="30:00")}
    assert [job for job, _ in rehearse.compare_jobs(shadow(WAITS), shadow(WAITS, partitions=short))] == ["7_[1-3]"]
    for fits in (replace(WAITS, limit="30:00"), replace(RUNS)):
        assert not list(rehearse.compare_jobs(shadow(fits), shadow(fits, partitions=short)))
    never = replace(WAITS, limit="3-00:00:00")
    assert not list(rehearse.compare_jobs(shadow(never), shadow(never, partitions=short))), "it waited before"


@pytest.mark.parametrize(
    ("text", "expected"),
    [("2-00:00:00", 172800), ("1:00:00", 3600), ("30:00", 1800), ("UNLIMITED", float("inf")), ("", float("inf"))],
)
def test_time_limits_are_read_as_slurm_prints_them(text: str, expected: float) -> None:
    assert rehearse.seconds(text) == expected


def test_a_users_text_adds_no_job_and_no_field() -> None:
    listed = "7|PENDING|long||5|1:00|None|8|RUNNING\n8|RUNNING|x\nnothing\n"
    assert dict(rehearse._parse_jobs(listed)) == {"7": ShadowJob("PENDING", "long", "", 5, "1:00", "None|8|RUNNING")}
