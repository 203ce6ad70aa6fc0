"""Jobs that slurmctld forgot: what is kept of them, whom it belongs to, and how they are submitted again."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from init.pod.pod import Pod
from init.slurm import client, lost_jobs
from init.slurm.files import LastGoodConfig
from init.slurm.lost_jobs import (
    ENVIRONMENT,
    LEDGER,
    SCRIPT,
    entries,
    find,
    keep,
    parse_submission,
    tells_owners,
    variables,
)
from init.state import bring_back
from tests.support.rendered_chart import render

SCRIPT_TEXT = b"#!/bin/sh\ntrue\n\0"
ME = pwd.getpwuid(os.getuid() or 1)
OWN = f"{ME.pw_uid}:{ME.pw_gid}"
OWNED = {"MINIVM_JOB_OWNER": "1001:100", "MINIVM_JOB_DIR": "/home/ann", "MINIVM_JOB_NAME": "n"}


def saved(**values: str) -> bytes:
    """Return an environment as slurmctld saves it."""
    pairs = [f"{name}={value}\0".encode() for name, value in values.items()]
    return len(pairs).to_bytes(4, sys.byteorder) + b"".join(pairs)


def put(state: Path, *jobs: int, script: bytes = SCRIPT_TEXT, environment: bytes | None = None) -> None:
    for job in jobs:
        place = state / f"hash.{job % 10}/job.{job}"
        place.mkdir(parents=True)
        (place / "script").write_bytes(script)
        (place / "environment").write_bytes(saved(**OWNED) if environment is None else environment)


@pytest.fixture
def state(tmp_path: Path) -> Path:
    (tmp_path / "state").mkdir()
    return tmp_path / "state"


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    return tmp_path / "lost-jobs"


def test_the_jobs_from_the_next_number_on_are_lost(state: Path, kept: Path) -> None:
    put(state, 5, 7, 8, 12, 67000000)
    (state / "hash.8/job.x").mkdir()
    assert list(find(state, 8)) == [8, 12]
    assert list(keep(state, 8, kept)) == ["kept the scripts of 2 jobs, from 8 to 12, that slurmctld had not saved"]
    assert [(lost.job, lost.state) for lost in entries(kept)] == [(8, "kept"), (12, "kept")]
    place = entries(kept)[0].place
    assert (place / SCRIPT).read_bytes() == SCRIPT_TEXT and (place / ENVIRONMENT).read_bytes() == saved(**OWNED)
    assert {path.stat().st_mode & 0o777 for path in (kept, place)} == {0o700}
    assert {path.stat().st_mode & 0o777 for path in place.iterdir()} == {0o600}


def test_keeping_twice_changes_nothing(state: Path, kept: Path) -> None:
    put(state, 8)
    list(keep(state, 8, kept))
    (lost,) = entries(kept)
    lost.put("back", 9)
    list(keep(state, 8, kept))
    assert [(lost.job, lost.state, lost.back_as) for lost in entries(kept)] == [(8, "back", 9)]


def test_what_a_cut_left_is_removed_and_a_damaged_ledger_submits_nothing_unseen(state: Path, kept: Path) -> None:
    put(state, 8)
    (kept / ".job-8-1.abcd").mkdir(parents=True)
    list(keep(state, 8, kept))
    assert [path.name.startswith("job-8-") for path in kept.iterdir()] == [True]
    (entries(kept)[0].place / LEDGER).write_bytes(b"")
    assert entries(kept)[0].state == "submitting", "Slurm is asked for it first"


def test_old_entries_go(state: Path, kept: Path) -> None:
    put(state, 8)
    list(keep(state, 8, kept))
    os.utime(entries(kept)[0].place, (1, 1))
    put(state, 9)
    shutil.rmtree(state / "hash.8")
    list(keep(state, 8, kept))
    assert [lost.job for lost in entries(kept)] == [9]


@pytest.mark.parametrize("what", ["job is a link", "hash is a link", "script is a link", "script is a pipe", "half",
                                  "half an environment", "no environment", "large"])  # fmt: skip
def test_what_is_no_whole_job_is_told_and_keeps_nothing_up(
    state: Path, kept: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    put(state, 8, 9)
    job = state / "hash.8/job.8"
    elsewhere = state.parent / "elsewhere"
    if what in ("job is a link", "hash is a link"):
        linked = job if what == "job is a link" else job.parent
        linked.rename(elsewhere)
        linked.symlink_to(elsewhere)
    elif what == "half":
        (job / "script").write_bytes(b"#!/bin/sh\nrm -rf /scratch")
    elif what == "half an environment":
        (job / "environment").write_bytes(saved(**OWNED)[:-5])
    elif what == "no environment":
        (job / "environment").unlink()
    elif what == "large":
        monkeypatch.setattr(lost_jobs, "LARGEST_FILE", 100)
        (job / "script").write_bytes(b"x" * 200 + b"\0")
    else:
        (job / "script").rename(elsewhere)
        (job / "script").symlink_to(elsewhere) if what == "script is a link" else os.mkfifo(job / "script")
    first, second = keep(state, 8, kept)
    assert first.startswith("kept the scripts of 1 job, from 9 to 9")
    assert second.startswith("1 lost jobs are not kept: job 8: ")
    assert [lost.job for lost in entries(kept)] == [9]


@pytest.mark.parametrize("bound", ["MOST_JOBS", "MOST_BYTES", "FREE_BYTES"])
def test_what_is_kept_is_bounded(state: Path, kept: Path, monkeypatch: pytest.MonkeyPatch, bound: str) -> None:
    monkeypatch.setattr(lost_jobs, "SHARE", 1)
    monkeypatch.setattr(lost_jobs, bound, {"MOST_JOBS": 2, "MOST_BYTES": 250, "FREE_BYTES": 1 << 60}[bound])
    put(state, *range(8, 13))
    said = list(keep(state, 8, kept))
    assert len(entries(kept)) == {"MOST_JOBS": 2, "MOST_BYTES": 2, "FREE_BYTES": 0}[bound]
    assert f"{5 - len(entries(kept))} lost jobs are not kept" in said[-1]


@pytest.mark.parametrize("bound", ["MOST_JOBS", "MOST_BYTES"])
def test_one_owner_gets_a_part_of_the_room(
    state: Path, kept: Path, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    monkeypatch.setattr(lost_jobs, bound, {"MOST_JOBS": 8, "MOST_BYTES": 1000}[bound])
    put(state, *range(8, 13))
    assert "2 jobs of 0 MiB of user 1001 already" in list(keep(state, 8, kept))[-1]
    put(state, 13, environment=saved(**OWNED | {"MINIVM_JOB_OWNER": "1002:100"}))
    list(keep(state, 8, kept))
    assert sorted(lost.owner for lost in entries(kept)) == [1001, 1001, 1002]


def test_a_job_that_is_back_takes_no_room(slurm: Slurm, state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm.run()
    shelf = slurm.pod.path(lost_jobs.LOST)
    assert sorted({path.parent.name.split("-")[1] for path in shelf.glob(f"*/{SCRIPT}")}) == ["10", "11", "12"]
    monkeypatch.setattr(lost_jobs, "MOST_JOBS", 4 * lost_jobs.SHARE)
    put(state, 13, environment=saved(**OWNED | {"MINIVM_JOB_OWNER": OWN}))
    assert list(keep(state, 8, shelf)) and [lost.job for lost in entries(shelf)] == [8, 9, 10, 11, 12, 13]
    first = entries(shelf)[0].place
    (first / SCRIPT).write_bytes(b"")  # cut between the ledger and the removal
    slurm.run()
    assert not (first / SCRIPT).exists()


def test_the_owner_is_what_slurmctld_wrote_first() -> None:
    data = saved(**OWNED) + b"MINIVM_JOB_OWNER=0:0\0MINIVM_JOB_NAME=x\0"
    found = parse_submission(variables(data))
    assert found is not None and (found.uid, found.gid, found.name, found.directory) == (1001, 100, "n", "/home/ann")
    for owner in ("", "root", "1001", "-1:0", "1001:100\n", "²:1"):
        assert parse_submission(variables(saved(MINIVM_JOB_OWNER=owner))) is None, owner
    assert parse_submission([]) is None and variables(b"") == []


def configured(root: Path, **slurm: object) -> Pod:
    (root / "etc/slurm").mkdir(parents=True, exist_ok=True)
    documents = render({"slurm": slurm, "accounting": {"mode": "none"}}, release="slurm", namespace="hpc")
    (data,) = [item["data"] for item in documents if item["metadata"]["name"] == "slurm-config"]
    for name in ("slurm.conf", "job_submit.lua"):
        (root / "etc/slurm" / name).write_text(data.get(name, "-- the site's own\n"))
    return Pod({}, root)


def ran_with(pod: Pod) -> Pod:
    names = ("slurm.conf", "job_submit.lua")
    LastGoodConfig(pod).keep({name: pod.path(f"/etc/slurm/{name}").read_bytes() for name in names})
    return pod


def test_owners_are_believed_with_the_charts_own_filter_alone(tmp_path: Path) -> None:
    assert tells_owners(ran_with(configured(tmp_path / "a")))
    assert not tells_owners(ran_with(configured(tmp_path / "b", bringBackJobs=False)))
    assert not tells_owners(ran_with(configured(tmp_path / "c", bringBackJobs=False, version="26.05"))), (
        "that one has the file"
    )
    assert not tells_owners(ran_with(configured(tmp_path / "d", files={"job_submit.lua": "-- ours\n"})))
    assert not tells_owners(ran_with(configured(tmp_path / "e", config={"JobSubmitPlugins": "all_partitions"})))
    pod = configured(tmp_path / "f")
    assert not tells_owners(pod), "nothing tells what slurmctld ran with"
    LastGoodConfig(pod).keep({"slurm.conf": b"JobSubmitPlugins=lua\n", "job_submit.lua": b"-- ours\n"})
    assert not tells_owners(pod), "slurmctld ran with another one"


def test_owners_that_slurmctld_did_not_tell_are_never_believed(slurm: Slurm, state: Path) -> None:
    """The filter may come later: whatever a job's environment named until then is the user's own word."""
    shelf = slurm.pod.path(lost_jobs.LOST)
    shutil.rmtree(shelf)
    said = list(keep(state, 8, shelf, lambda: False))
    assert "none of them is brought back" in said[1]
    list(keep(state, 8, shelf, lambda: True))
    assert {state for _, state, _ in slurm.run()} == {"refused"} and not slurm.submitted


def test_options_become_words_of_sbatch_and_no_others() -> None:
    options: dict[str, object] = {
        "comment": "set", "hold": "set", "requeue": "requeue", "exclusive": "exclusive", "array": "1-3",
        "nice": "--uid=0",
        "dependency": "afterok:8:70,afterany:18+5", "wait": "set", "export": "NONE", "argv": ["/x/my.sh"], "uid": "0",
        "clusters": "other", "mem": 5, "time": "a\0b",
    }  # fmt: skip
    known, unknown = bring_back.arguments(options, {8: 80, 5: 50})
    assert known == [
        "--array=1-3", "--comment=set", "--dependency=afterok:80:70,afterany:18+5", "--exclusive", "--hold",
        "--nice=--uid=0", "--requeue",
    ]  # fmt: skip
    assert unknown == ["clusters", "mem", "time", "uid"]


def test_the_script_keeps_its_name_and_arguments() -> None:
    assert bring_back.words_of({"argv": ["/x/my.sh", "a b", 5, "c"]}) == ("/x/my.sh", ["a b", "c"])
    assert bring_back.words_of({"argv": [], "wrap": "true"}) == ("", [])
    assert bring_back.words_of({}) == bring_back.words_of({"argv": "x"}) == ("", [])


def test_the_environment_is_the_first_one_with_what_restores_it() -> None:
    pairs = variables(saved(A="1\n2", SLURM_SUBMIT_DIR="/x", MINIVM_JOB_OWNER="0:0", MINIVM_WAS_B="2", HOSTNAME="l"))
    text = bring_back.environment_for(pairs, 8, complete=False)
    assert text == (
        b"A=1\n2\0SLURM_SUBMIT_DIR=/x\0HOSTNAME=l\0MINIVM_WAS_SLURM_SUBMIT_DIR=/x\0MINIVM_WAS_HOSTNAME=l\0"
        b"MINIVM_BROUGHT_BACK=8 unknown\0"
    )
    assert bring_back.environment_for([], 8, 5, complete=True) == b"MINIVM_BROUGHT_BACK=8 5\0"
    found = parse_submission(variables(saved(**OWNED, MINIVM_JOB_AGAIN="8 5", MINIVM_BROUGHT_BACK="7")))
    assert found is not None and (found.again, found.first) == (8, 5)


def test_a_submission_without_answer_is_found_by_its_owner_and_comment() -> None:
    text = "11_[1-3%2]|1001|minivm: job 8 again, held: x|\n12|1002|minivm: job 8 again, y|\n13|1001|(null)|\nrubbish\n"
    assert bring_back.already_back(text) == {(8, 1001): 11, (8, 1002): 12}
    filters = (Path(__file__).resolve().parents[3] / "cluster/chart/files/job_submit.lua").read_text()
    assert "minivm: job %s again,%s held" in filters


class Slurm:
    """Answers of squeue and sbatch, written down."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, pod: Pod) -> None:
        self.listed = ""
        self.answers: list[Exception | tuple[int, str]] = []
        self.submitted: list[int] = []
        monkeypatch.setattr(client, "run", lambda *_, **__: self.listed)
        monkeypatch.setattr(bring_back.Bringer, "_submit", self.submit)
        monkeypatch.setattr(lost_jobs, "tells_owners", lambda _: True)
        self.pod = pod

    def submit(self, lost: lost_jobs.LostJob, *_: object) -> tuple[int, str]:
        assert json.loads((lost.place / LEDGER).read_text())["state"] == "submitting", "the ledger comes first"
        self.submitted.append(lost.job)
        answer = self.answers.pop(0) if self.answers else (lost.job + 100, "")
        if isinstance(answer, Exception):
            raise answer
        return answer

    def run(self) -> list[tuple[int, str, int]]:
        bring_back.Bringer(self.pod).run()
        return [(lost.job, lost.state, lost.back_as) for lost in entries(self.pod.path(lost_jobs.LOST))]


def age(pod: Pod, at: float = 1.0) -> None:
    """Let the jobs be kept so long ago that a refusal is final."""
    for script in pod.path(lost_jobs.LOST).glob(f"*/{SCRIPT}"):
        os.utime(script, (at, at))


@pytest.fixture
def slurm(tmp_path: Path, state: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    pod = Pod({}, tmp_path)
    owner = {"MINIVM_JOB_OWNER": OWN}
    put(state, 8, environment=saved(**OWNED | owner))
    put(state, 9, environment=saved(**OWNED | owner, MINIVM_JOB_AGAIN="7"))
    put(state, 10, environment=saved(**OWNED | {"MINIVM_JOB_OWNER": "3999999999:5"}))
    put(state, 11, environment=saved(**OWNED | {"MINIVM_JOB_OWNER": "0:0"}))
    put(state, 12, environment=saved(A="1"))
    list(keep(state, 8, pod.path(lost_jobs.LOST)))
    age(pod)
    return Slurm(monkeypatch, pod)


def test_each_job_is_submitted_once(slurm: Slurm) -> None:
    ends = [(8, "back", 108), (9, "back", 109), (10, "refused", 0), (11, "refused", 0), (12, "refused", 0)]
    assert slurm.run() == ends and slurm.run() == ends
    assert slurm.submitted == [8, 9]


def test_a_group_that_is_not_the_owners_is_refused(slurm: Slurm, state: Path) -> None:
    shutil.rmtree(slurm.pod.path(lost_jobs.LOST))
    shutil.rmtree(state)
    other = next(gid for gid in range(70000, 80000) if gid not in os.getgrouplist(ME.pw_name, ME.pw_gid))
    put(state, 8, environment=saved(**OWNED | {"MINIVM_JOB_OWNER": f"{ME.pw_uid}:{other}"}))
    list(keep(state, 8, slurm.pod.path(lost_jobs.LOST)))
    age(slurm.pod)
    assert slurm.run() == [(8, "refused", 0)] and not slurm.submitted


def test_a_submission_whose_answer_was_cut_is_not_repeated(slurm: Slurm) -> None:
    slurm.answers = [bring_back.UnclearError("bring lost jobs back", "no answer")]
    with pytest.raises(bring_back.UnclearError):
        slurm.run()
    slurm.listed = f"31|{os.getuid() or 1}|minivm: job 8 again, held|\n33|5|minivm: job 9 again, held|\n"
    assert slurm.run()[:2] == [(8, "back", 31), (9, "back", 109)]
    assert slurm.submitted == [8, 9]


def test_a_controller_that_wakes_up_leaves_what_the_next_one_brought_back(
    slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    def submit(_: bring_back.Bringer, lost: lost_jobs.LostJob, *__: object) -> tuple[int, str]:
        """Refuse after a sleep in which the next controller brought two jobs back."""
        slurm.submitted.append(lost.job)
        for other in entries(slurm.pod.path(lost_jobs.LOST))[:2]:
            other.put("back", other.job + 40)
        return 0, "this controller's term is over"

    monkeypatch.setattr(bring_back.Bringer, "_submit", submit)
    assert slurm.run()[:2] == [(8, "back", 48), (9, "back", 49)]
    assert slurm.submitted == [8]


def test_a_submission_that_hangs_keeps_no_other_up_and_is_given_up(slurm: Slurm) -> None:
    slow = subprocess.TimeoutExpired("sbatch", 40)
    slurm.answers = [slow, (109, ""), slow]
    with pytest.raises(bring_back.UnclearError, match="1 are not back yet, first 8"):
        slurm.run()
    assert slurm.run()[:2] == [(8, "refused", 0), (9, "back", 109)]
    assert slurm.submitted == [8, 9, 8]


def test_what_a_user_can_make_sbatch_say_stops_no_return(slurm: Slurm) -> None:
    """`sbatch --nodes="timed out"` is refused with these words, whatever slurmctld does."""
    unclear = bring_back.UnclearError("bring lost jobs back", "slurm-controller cannot be reached")
    slurm.answers = [unclear, (109, ""), unclear]
    with pytest.raises(bring_back.UnclearError):
        slurm.run()
    assert slurm.run()[:2] == [(8, "refused", 0), (9, "back", 109)]


def test_where_slurmctld_is_away_no_job_is_given_up(slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(3):
        slurm.answers = [subprocess.TimeoutExpired("sbatch", 40)]
        answers = [lambda: "", lambda: (_ for _ in ()).throw(client.SlurmError("ask slurmctld", "it is away"))]
        monkeypatch.setattr(client, "run", lambda *_, answers=answers, **__: answers.pop(0)())
        with pytest.raises(client.SlurmError, match="away"):
            slurm.run()
    monkeypatch.setattr(client, "run", lambda *_, **__: "")
    assert slurm.run()[:2] == [(8, "back", 108), (9, "back", 109)]


def test_the_other_jobs_of_a_user_of_whom_one_hangs_come_last(slurm: Slurm, state: Path) -> None:
    other = next(each for each in pwd.getpwall() if each.pw_uid not in (0, ME.pw_uid))
    put(state, 13, environment=saved(**OWNED | {"MINIVM_JOB_OWNER": f"{other.pw_uid}:{other.pw_gid}"}))
    list(keep(state, 8, slurm.pod.path(lost_jobs.LOST)))
    slow = subprocess.TimeoutExpired("sbatch", 40)
    slurm.answers = [slow, slow, slow]
    with pytest.raises(bring_back.UnclearError):
        slurm.run()
    assert slurm.submitted == [8, 13, 9]


@pytest.mark.parametrize("answer", [(0, "Slurm refuses it: Invalid account"), OSError(28, "No space left on device")])
def test_a_refusal_is_final_after_hours_alone(slurm: Slurm, answer: Exception | tuple[int, str]) -> None:
    age(slurm.pod, time.time())
    for _ in range(3):
        slurm.answers = [answer]
        with pytest.raises(bring_back.UnclearError, match="2 are not back yet, first 8"):
            slurm.run()
    age(slurm.pod)
    slurm.answers = [answer]
    assert [state for _, state, _ in slurm.run()][:3] == ["refused", "back", "refused"]


def test_a_second_submission_that_was_lost_too_comes_back_instead_of_the_first(slurm: Slurm, state: Path) -> None:
    shutil.rmtree(state)
    put(state, 7, environment=saved(**OWNED | {"MINIVM_JOB_OWNER": OWN}))
    list(keep(state, 7, slurm.pod.path(lost_jobs.LOST)))
    assert slurm.run()[:3] == [(7, "back", 9), (8, "back", 108), (9, "back", 109)]
    assert slurm.submitted == [8, 9]


def test_without_the_charts_filter_nothing_is_submitted(slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lost_jobs, "tells_owners", lambda _: False)
    assert {state for _, state, _ in slurm.run()} == {"kept"} and not slurm.submitted
