"""Whose jobs may end: after the grace, never many people or everybody together."""

from __future__ import annotations

from pathlib import Path

import pytest

from init.errors import ConfigError
from init.people import keep, read, removed_jobs
from init.people.removed_jobs import AccessLoss, Losses
from init.pod.pod import Pod
from init.slurm import client

NOBODY = Losses()


def test_without_a_record_all_jobs_stay() -> None:
    first = removed_jobs.update_losses(None, {5001: "ada"}, (), 10, 100)
    assert first.people == {5001: AccessLoss("ada", 100, waits=True)} and not removed_jobs.find_due_losses(
        first, 60, 1e9
    )
    assert (
        removed_jobs.parse_losses({}) is None and removed_jobs.parse_losses({"people": {"x": 1}, "moved": []}) is None
    )
    assert removed_jobs.parse_losses(removed_jobs.losses_to_json(first)) == first


def test_a_loss_is_dated_once_and_forgotten_when_the_person_is_back() -> None:
    first = removed_jobs.update_losses(NOBODY, {5001: "ada"}, (), 10, 100)
    again = removed_jobs.update_losses(first, {5001: "ada"}, (), 10, 150)
    assert (
        again == first
        and not removed_jobs.find_due_losses(again, 60, 159)
        and removed_jobs.find_due_losses(again, 60, 160)
    )
    assert removed_jobs.update_losses(again, {}, (), 11, 160) == NOBODY
    other = removed_jobs.update_losses(again, {5001: "eve"}, (), 10, 500)
    assert other.people[5001] == AccessLoss("eve", 500), "the uid has another name now"
    assert removed_jobs.update_losses(again, {5001: "ada"}, (), 10, 50).people[5001].since == 50, (
        "a clock that was set back"
    )


@pytest.mark.parametrize(
    ("lost", "active", "waits"),
    [(1, 1, False), (2, 1, False), (3, 3, True), (20, 80, False), (21, 79, True), (1, 0, True)],
)
def test_more_than_a_share_waits(lost: int, active: int, waits: bool) -> None:
    people = {uid: f"p{uid}" for uid in range(5000, 5000 + lost)}
    assert {loss.waits for loss in removed_jobs.update_losses(NOBODY, people, (), active, 1).people.values()} == {waits}


def test_beside_a_directory_each_loss_waits() -> None:
    """An sssd that is offline answers as for a person whom the directory does not know."""
    assert removed_jobs.update_losses(NOBODY, {5001: "ada"}, (), 10, 100, sure=False).people[5001].waits


def test_people_who_go_one_by_one_count_together() -> None:
    losses, people = NOBODY, dict[int, str]()
    for step in range(10):
        people[5000 + step] = f"p{step}"
        losses = removed_jobs.update_losses(losses, people, (), 20 - step, step)
    assert sum(not loss.waits for loss in losses.people.values()) == 4
    later = removed_jobs.update_losses(losses, people | {6000: "late"}, (), 9, 9 + removed_jobs.WINDOW)
    assert later.people[5009].waits and not later.people[6000].waits


@pytest.fixture
def here(tmp_path: Path) -> Pod:
    """Return a pod that has taken over a file with bob, and has no other id."""
    pod = Pod({}, tmp_path)
    data = b"groups: [{name: lab, gid: 5000}]\nusers: [{name: bob, uid: 5002, group: lab}]\n"
    for path, text in ((keep.file_to_read(pod), data), (pod.path(removed_jobs.RECORD), b"")):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)
    pod.path(keep.STATE).mkdir(parents=True)
    keep.save(pod, keep.PeopleState(read.parse(data), {"bob": 5002}, keep.compute_digest(data)))
    return pod


def test_a_loss_stays_that_this_controller_has_not_seen(here: Pod) -> None:
    """Two controllers share the record, and each has the ids of its own time."""
    loss = AccessLoss("ada", 1, waits=True)
    removed_jobs.write_record(here, Losses({5001: loss}))
    assert removed_jobs.look(here, 100)[0].people == {5001: loss}


def test_a_file_that_is_not_taken_over_or_absent_ends_nothing(here: Pod) -> None:
    removed_jobs.write_record(here, Losses({5001: AccessLoss("ada", 1)}))
    assert removed_jobs.look(here, 100)[1] == 1
    keep.file_to_read(here).write_bytes(b"groups: []\nusers: []\n")
    with pytest.raises(removed_jobs.NotTakenOverError):
        removed_jobs.look(here, 100)
    keep.file_to_read(here).unlink()
    assert removed_jobs.run(here, {"MINIVM_REMOVED_JOBS": "cancel"}, 1e9) == ""


def test_rows_of_squeue() -> None:
    rows = [
        *(
            "5001|7|PD|(null)|",
            "5001|8_[1-300%4]|PD|minivm: x|",
            "5001|9+1|R||",
            "5001|3+0|PD||",
            "5001|3+1|PD||",
            "5001|4_3|CG||",
            "odd",
            "5001|x|PD||",
        ),
        *("5001|6_[1-9:4]|PD||", f"5001|5_[{'1,' * 2000}1]|PD||", "5001|2_[0-4000000:2]|PD||"),
    ]
    jobs = removed_jobs.parse_jobs("\n".join(rows))
    assert [job.id for job in jobs] == ["7", "8_[1-300]", "9+1", "3", "6_[1,5,9]", "5", "2"]
    assert [job.is_pending for job in jobs] == [True, True, False, True, True, True, True]
    assert jobs[1].comment == "minivm: x"


def test_the_line_for_the_public_page_has_no_names(here: Pod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PID 1 shows the last line of init's own programs to every user and to the network."""
    squeue = tmp_path / "squeue"
    squeue.write_text("#!/bin/sh\necho '5001|7|PD||'; echo '5003|8|PD||'\n")
    squeue.chmod(0o755)
    monkeypatch.setattr(removed_jobs, "LIST", (str(squeue),))
    monkeypatch.setattr(client, "SCANCEL", "/bin/false")
    monkeypatch.setattr(client, "SCONTROL", "/bin/true")
    losses = Losses({5001: AccessLoss("ada", 1), 5003: AccessLoss("eve", 1, waits=True)})
    removed_jobs.write_record(here, losses)
    text = removed_jobs.run(here, {"MINIVM_REMOVED_JOBS": "cancel"}, 1e9)
    assert text.startswith("cannot cancel the jobs of 1 person: ") and "; the jobs of 1 person stay: 1 lost" in text
    assert "ada" not in text and "eve" not in text


@pytest.mark.parametrize("env", [{}, {"MINIVM_REMOVED_JOBS": "keep"}, {"MINIVM_REMOVED_JOBS": "cancel",
                                 "MINIVM_REMOVED_JOBS_GRACE": "5"}])  # fmt: skip
def test_wrong_settings_are_refused(env: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        removed_jobs.settings(env)
