"""Changes of slurm.conf: installation, rollback, retry and reporting for every answer of slurmctld."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from init.errors import InitError
from init.helpers import configwatch
from init.helpers.configwatch import DropInWatch, SlurmWatch, fingerprint
from init.pod.pod import Pod, PrepareError, write
from init.slurm import files as slurm_files
from init.slurm.change import LIVE as TAKEN
from init.slurm.change import REFUSED as NOT_TAKEN
from init.slurm.change import SavedJudgement, load_judgement
from init.slurm.daemon import (
    KnownJob,
    ReconfigureAnswer,
    ReconfigureOutcome,
    Slurmctld,
    complaint,
    is_unanswered,
    new_lines,
    objection,
)
from init.slurm.files import LastGoodConfig, SlurmFiles, digest, read

LIVE = ReconfigureAnswer(ReconfigureOutcome.LIVE, "slurmctld runs with it")
REFUSED = ReconfigureAnswer(ReconfigureOutcome.REFUSED, "Invalid node names in partition broken")
SILENT = ReconfigureAnswer(ReconfigureOutcome.SILENT, "slurmctld gave no answer")
FROZEN = "slurm_reconfigure error: Socket timed out on send/recv operation\n"


class Scripted(Slurmctld):
    """Fake slurmctld that gives the scripted answers, and records the installed files at each reload."""

    def __init__(self, installed: Path, *answers: ReconfigureAnswer, against: str = "", hung: int = 0) -> None:
        super().__init__(Path("/nowhere"))
        self.installed, self.answers_left, self.against, self.hung = installed, list(answers), against, hung
        self.asked_with: list[dict[str, bytes]] = []
        self.holds: list[KnownJob] | None = []
        self.serves, self.fails_with = True, ""

    def jobs(self) -> list[KnownJob] | None:
        return self.holds

    def answers(self) -> bool:
        return self.serves

    def does_not_start(self) -> str:
        return self.fails_with

    def objects_to(self, configuration: Path) -> str:
        assert configuration.read_bytes().startswith(b"new")
        return self.against

    def reload(self) -> ReconfigureAnswer:
        self.asked_with.append(read(self.installed))
        return self.answers_left.pop(0)

    def revive(self) -> bool:
        self.hung -= 1
        return self.hung >= 0


class Site:
    """Files of a controller: an old slurm.conf installed, a new one and a further file mounted."""

    def __init__(self, root: Path) -> None:
        self.files, self.kept, self.said = SlurmFiles(Pod({}, root)), LastGoodConfig(Pod({}, root)), root / "said.json"
        for directory, content in ((self.files.mounted, b"new"), (self.files.target, b"old")):
            directory.mkdir(parents=True)
            (directory / "slurm.conf").write_bytes(content)
        (self.files.mounted / "gres.conf").write_bytes(b"new gres")
        self.told: list[str] = []

    def look(self, *answers: ReconfigureAnswer, against: str = "", hung: int = 0) -> tuple[SlurmWatch, Scripted]:
        daemon = Scripted(self.files.target, *answers, against=against, hung=hung)
        watch = SlurmWatch(Path("/nowhere"), self.files, daemon, self.kept, self.said)
        watch.look()
        return watch, daemon

    def mount(self, text: bytes) -> None:
        (self.files.mounted / "slurm.conf").write_bytes(text)

    def word(self) -> SavedJudgement | None:
        return load_judgement(self.said)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    made = Site(tmp_path)
    monkeypatch.setattr(configwatch, "condition", lambda control, name, text: made.told.append(text))
    monkeypatch.setattr(SlurmFiles.write_candidate, "__defaults__", (tmp_path / "candidate",))
    yield made


OLD = {"slurm.conf": b"old"}
NEW = {"slurm.conf": b"new", "gres.conf": b"new gres"}


def test_what_slurmctld_takes_is_live_and_stays(site: Site) -> None:
    watch, daemon = site.look(LIVE)
    assert (daemon.asked_with, read(site.files.target), site.told) == ([NEW], NEW, [""])
    watch.look()
    assert len(daemon.asked_with) == 1, "nothing differs any more"


def test_what_a_client_cannot_read_never_reaches_slurmctld(site: Site) -> None:
    _, daemon = site.look(against="unrecognized key: SlurmdTimout")
    assert (daemon.asked_with, read(site.files.target)) == ([], OLD)
    assert site.told == ["refused, the last one stays: unrecognized key: SlurmdTimout"]


def test_a_cluster_of_another_name_never_reaches_slurmctld(site: Site, tmp_path: Path) -> None:
    """A changed ClusterName is refused before slurmctld, which would report CLUSTER NAME MISMATCH without the names."""
    (tmp_path / "clustername").write_text("hpc|2881\n")
    site.mount(f"new=1\nClusterName=hcp\nStateSaveLocation={tmp_path}\n".encode())
    _, daemon = site.look()
    assert daemon.asked_with == []
    said = "ClusterName is hcp, and the state in StateSaveLocation is that of hpc: a cluster keeps its name"
    assert site.told == [f"refused, the last one stays: {said}"]


def test_pipes_in_slurmctlds_state_hold_nobody_up(site: Site, tmp_path: Path) -> None:
    """Named pipes in the state directory do not block the watch.

    The Slurm user owns the directory, and may create them.
    """
    for name in ("clustername", "job_state"):
        os.mkfifo(tmp_path / name)
    state = f"new=1\nClusterName=hpc\nStateSaveLocation={tmp_path}\n".encode()
    (site.files.target / "slurm.conf").write_bytes(state + b"PartitionName=all Nodes=ALL\n")
    site.mount(state)
    _, daemon = site.look(LIVE)
    assert len(daemon.asked_with) == 1 and site.told == [""]


def test_what_slurmctld_refuses_is_taken_back_and_not_tried_again(site: Site) -> None:
    watch, daemon = site.look(REFUSED)
    assert (daemon.asked_with, read(site.files.target)) == ([NEW], OLD)
    assert site.told == [f"refused, the last one stays: {REFUSED.text}"]
    watch.look()
    assert len(daemon.asked_with) == 1, "the same files"
    (site.files.mounted / "slurm.conf").write_bytes(b"old")
    (site.files.mounted / "gres.conf").unlink()
    watch.look()
    assert site.told[-1] == "", "the mounted files are the running ones again"


def test_one_that_hangs_on_a_refusal_is_restarted_and_that_is_told(site: Site) -> None:
    site.look(REFUSED, hung=1)
    assert read(site.files.target) == OLD
    assert site.told == [f"refused, the last one stays: {REFUSED.text}; slurmctld hung and was restarted"]


def test_one_that_hung_before_it_judged_is_restarted_and_asked_once_more(site: Site) -> None:
    _, daemon = site.look(SILENT, LIVE, hung=1)
    assert (daemon.asked_with, read(site.files.target), site.told) == ([NEW, NEW], NEW, [""])


def test_one_that_never_answers_is_not_asked_for_ever(site: Site) -> None:
    _, daemon = site.look(SILENT, SILENT, hung=2)
    assert (daemon.asked_with, read(site.files.target)) == ([NEW, NEW], OLD)
    assert site.told == ["refused, the last one stays: slurmctld gave no answer; slurmctld hung and was restarted"]


class Cut(BaseException):
    """Raised in place of killing the helper."""


def test_what_a_cut_try_left_is_put_back_and_never_taken_for_what_runs(site: Site) -> None:
    """A new pass rolls back an interrupted change and never takes it for the running configuration.

    slurmctld answers, but with the old configuration: the new one was installed and not read.
    """

    class Killed(Scripted):
        def reload(self) -> ReconfigureAnswer:
            raise Cut

    watch = SlurmWatch(Path("/nowhere"), site.files, Killed(site.files.target), site.kept, site.said)
    with pytest.raises(Cut):
        watch.look()
    assert read(site.files.target) == NEW
    _, daemon = site.look(REFUSED)
    assert (daemon.asked_with, read(site.files.target), site.kept.read()) == ([NEW], OLD, None)
    assert site.word() == SavedJudgement(digest(NEW), NOT_TAKEN, f"refused, the last one stays: {REFUSED.text}")


def test_half_an_installation_is_put_back(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: bytes, *, mode: int, owner: tuple[int, int] | None = None) -> bool:
        if path == site.files.target / "slurm.conf" and data == NEW["slurm.conf"]:
            raise PrepareError(f"write {path}", "No space left on device")
        return write(path, data, mode=mode, owner=owner)

    monkeypatch.setattr(slurm_files, "write", full)
    _, daemon = site.look()
    assert (daemon.asked_with, read(site.files.target), site.kept.read()) == ([], OLD, None)
    assert site.told == ["refused, the last one stays: No space left on device"]


def test_a_slurmctld_that_cannot_be_asked_has_not_taken_it(site: Site) -> None:
    class Away(Scripted):
        def reload(self) -> ReconfigureAnswer:
            raise InitError("ask PID 1", "no answer")

    watch = SlurmWatch(Path("/nowhere"), site.files, Away(site.files.target), site.kept, site.said)
    for _ in range(2):
        watch.look()
    assert (read(site.files.target), site.kept.read()) == (OLD, None)
    assert site.word() == SavedJudgement(digest(NEW), NOT_TAKEN, "refused, the last one stays: no answer")


def test_a_swap_that_is_not_over_is_left_alone(site: Site) -> None:
    (site.files.mounted / "slurm.conf").unlink()
    _, daemon = site.look()
    assert not daemon.asked_with and not site.told


# Only a live configuration is kept for the next pod.


def test_what_is_live_is_kept_and_what_is_refused_is_not(site: Site) -> None:
    site.look(LIVE)
    assert site.kept.read() == NEW
    assert site.word() == SavedJudgement(digest(NEW), TAKEN)
    site.mount(b"newer and wrong")
    site.look(against="no such key")
    assert site.kept.read() == NEW
    wrong = NEW | {"slurm.conf": b"newer and wrong"}
    assert site.word() == SavedJudgement(digest(wrong), NOT_TAKEN, "refused, the last one stays: no such key")


def test_the_first_configuration_is_kept_once_slurmctld_answers_with_it(site: Site) -> None:
    """The first configuration is kept once slurmctld answers: a new cluster has no earlier one to compare it with."""
    for name, data in NEW.items():
        (site.files.target / name).write_bytes(data)
    watch, daemon = site.look()
    assert site.kept.read() == NEW and watch.look_again_in is None
    (site.kept.directory / "good.json").unlink()
    daemon.serves = False
    watch.look()
    assert site.kept.read() is None and watch.look_again_in is not None, "it is asked again"


def test_the_first_configuration_of_a_cluster_may_be_wrong_and_that_is_told(site: Site) -> None:
    for name, data in NEW.items():
        (site.files.target / name).write_bytes(data)
    watch = SlurmWatch(Path("/nowhere"), site.files, daemon := Scripted(site.files.target), site.kept, site.said)
    daemon.serves, daemon.fails_with = False, "Unable to process configuration file"
    watch.look()
    assert site.told == ["slurmctld does not start with it: Unable to process configuration file"]
    daemon.against = "Parsing error at unrecognized key: NoSuchSetting"
    site.told.clear()
    watch.look()
    why = "slurmctld does not start with it: Parsing error at unrecognized key: NoSuchSetting"
    assert (site.told, site.word()) == ([why], SavedJudgement(digest(NEW), NOT_TAKEN, why))
    assert site.kept.read() is None


def test_a_full_volume_keeps_nobody_from_the_new_configuration(site: Site) -> None:
    site.kept.directory.parent.mkdir(parents=True)
    site.kept.directory.write_text("a file in its place")
    site.look(LIVE)
    assert site.word() == SavedJudgement(digest(NEW), TAKEN)


def test_what_is_older_than_what_runs_is_not_what_the_next_pod_starts_from(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A kept configuration older than the running one is not used by the next pod.

    Otherwise slurmctld would end the jobs of a newer partition during the boot, in which no check weighs that cost.
    """
    site.kept.keep(OLD)

    def full(path: Path, data: bytes, *, mode: int, owner: tuple[int, int] | None = None) -> bool:
        if path.parent == site.kept.directory:
            raise PrepareError(f"write {path}", "No space left on device")
        return write(path, data, mode=mode, owner=owner)

    with monkeypatch.context() as patched:
        patched.setattr(slurm_files, "write", full)
        watch, daemon = site.look(LIVE)
        watch.look()
        assert site.kept.read() is None and watch.look_again_in is not None, "it is kept as soon as there is room"
    assert capsys.readouterr().out.count("the next pod starts from what is mounted then") == 1
    watch.look()
    assert site.kept.read() == NEW and len(daemon.asked_with) == 1, "and tried no second time"


# Jobs that the change would end.

TWO = b"new\nPartitionName=all Nodes=ALL\nPartitionName=long Nodes=ALL\n"
ONE = b"new\nPartitionName=long Nodes=ALL\n"
ONE_FILES = {"slurm.conf": ONE, "gres.conf": b"new gres"}
ON_ALL = KnownJob("7", True, frozenset({"all"}), frozenset(), frozenset(), "", "", frozenset())
COST = f"refused, the last one stays: it would end jobs: partition all goes: job 7; `minivm config accept \
{digest(ONE_FILES)}` applies it anyway"


def with_jobs(site: Site, holds: list[KnownJob] | None, *answers: ReconfigureAnswer) -> tuple[SlurmWatch, Scripted]:
    (site.files.target / "slurm.conf").write_bytes(TWO)
    site.mount(ONE)
    daemon = Scripted(site.files.target, *answers)
    daemon.holds = holds
    watch = SlurmWatch(Path("/nowhere"), site.files, daemon, site.kept, site.said)
    watch.look()
    return watch, daemon


def test_a_configuration_that_would_end_jobs_is_refused_with_their_numbers(site: Site) -> None:
    watch, daemon = with_jobs(site, [ON_ALL])
    assert (daemon.asked_with, read(site.files.target)["slurm.conf"]) == ([], TWO)
    assert site.told == [COST]
    watch.look()
    assert site.told == [COST], "the same files"


def test_without_jobs_a_partition_may_go(site: Site) -> None:
    with_jobs(site, [], LIVE)
    assert read(site.files.target)["slurm.conf"] == ONE


def test_that_very_file_is_taken_once_somebody_has_accepted_it(site: Site) -> None:
    watch, daemon = with_jobs(site, [ON_ALL], LIVE)
    site.kept.accept(digest(NEW), 1.0)
    watch.look()
    assert daemon.asked_with == [], "the word was for another file"
    site.kept.accept(digest(ONE_FILES), 2.0)
    watch.look()
    assert read(site.files.target)["slurm.conf"] == ONE and site.told[-1] == ""
    daemon.holds = [replace(ON_ALL, partitions=frozenset({"long"}))]
    site.mount(b"new\n")
    watch.look()
    assert read(site.files.target)["slurm.conf"] == ONE, "and not for the next one"


def test_a_word_is_spent_once_its_file_is_live(site: Site) -> None:
    """An acceptance is used up once its file is live.

    When the same file is mounted again after others, it may affect other jobs.
    """
    watch, _ = with_jobs(site, [ON_ALL], LIVE, LIVE)
    site.kept.accept(digest(ONE_FILES), 1.0)
    watch.look()
    assert read(site.files.target)["slurm.conf"] == ONE and site.kept.read_acceptance() == ""
    site.mount(TWO)
    watch.look()
    site.mount(ONE)
    watch.look()
    assert read(site.files.target)["slurm.conf"] == TWO and site.told[-1] == COST


def test_a_word_for_a_file_that_slurmctld_refused_is_spent_by_the_one_after_it(site: Site) -> None:
    watch, _ = with_jobs(site, [ON_ALL], REFUSED, LIVE)
    site.kept.accept(digest(ONE_FILES), 1.0)
    watch.look()
    assert site.kept.read_acceptance() == f"{digest(ONE_FILES)} 1.000", "it counts in the next pod too"
    site.mount(TWO + b"PartitionName=more\n")
    watch.look()
    site.mount(ONE)
    watch.look()
    assert "it would end jobs: partition all goes: job 7" in site.told[-1]


def test_a_word_that_is_said_meanwhile_is_not_spent(site: Site) -> None:
    site.kept.accept("0123456789ab", 2.0)
    site.kept.spend("0123456789ab 1.000")
    assert site.kept.read_acceptance() == "0123456789ab 2.000"


def test_a_word_that_is_said_while_its_file_is_tried_counts_for_it(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """`minivm config accept` waits for a result: "it would end jobs" would be the answer to what came before it."""

    def accept_meanwhile(daemon: Scripted) -> list[KnownJob]:
        if not site.kept.read_acceptance():
            site.kept.accept(digest(ONE_FILES), 1.0)
        return [ON_ALL]

    monkeypatch.setattr(Scripted, "jobs", accept_meanwhile)
    watch, daemon = with_jobs(site, None, LIVE)
    assert (site.told, site.word(), daemon.asked_with) == ([], None, []) and watch.look_again_in == 0.0
    watch.look()
    assert site.word() == SavedJudgement(digest(ONE_FILES), TAKEN) and site.told == [""]


def test_what_was_accepted_and_refused_by_slurmctld_is_tried_when_it_is_accepted_again(site: Site) -> None:
    watch, daemon = with_jobs(site, [ON_ALL], REFUSED, LIVE)
    site.kept.accept(digest(ONE_FILES), 1.0)
    watch.look()
    watch.look()
    assert len(daemon.asked_with) == 1 and site.told[-1] == f"refused, the last one stays: {REFUSED.text}"
    site.kept.accept(digest(ONE_FILES), 2.0)
    watch.look()
    assert site.told[-1] == ""


def test_where_slurmctld_cannot_be_asked_it_waits_and_asks_again(site: Site) -> None:
    watch, daemon = with_jobs(site, None, LIVE)
    assert daemon.asked_with == [] and watch.look_again_in is not None
    assert "did not answer which jobs that ends" in site.told[-1]
    daemon.holds = []
    watch.look()
    assert read(site.files.target)["slurm.conf"] == ONE and site.told[-1] == ""


def test_the_fingerprint_of_drop_ins_sees_content_and_no_hidden_files(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("1")
    before = fingerprint([tmp_path, tmp_path / "missing"])
    (tmp_path / ".hidden").write_text("x")
    assert fingerprint([tmp_path, tmp_path / "missing"]) == before
    (tmp_path / "a.yaml").write_text("2")
    assert fingerprint([tmp_path]) != before


def test_drop_ins_that_no_process_could_read_are_read_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drop-ins that fail to be read for lack of processes are read later.

    When a job fills the pod with processes, the change is not lost.
    """
    answers: list[object] = [BlockingIOError(11, "Resource temporarily unavailable"), {"added": ["a"]}]
    told: list[str] = []

    def apply(_: Path) -> object:
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setattr(configwatch, "apply_dropins", apply)
    monkeypatch.setattr(configwatch, "condition", lambda control, name, text: told.append(text))
    watch = DropInWatch(Path("/nowhere"), [tmp_path], tmp_path / ".seen")
    (tmp_path / "a.yaml").write_text("1")
    watch.look()
    assert watch.look_again_in is not None and not told
    watch.look()
    assert watch.look_again_in is None and told == [""] and not answers
    watch.look()


def test_drop_ins_that_changed_while_nobody_watched_are_applied_by_who_watches_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    applied: list[Path] = []

    def apply(control: Path) -> dict[str, object]:
        applied.append(control)
        return {}

    def anew() -> DropInWatch:
        return DropInWatch(Path("/nowhere"), [tmp_path], tmp_path / ".seen")

    monkeypatch.setattr(configwatch, "apply_dropins", apply)
    monkeypatch.setattr(configwatch, "condition", lambda control, name, text: None)
    anew().look()
    assert not applied, "PID 1 has read what was there when the pod began"
    (tmp_path / "a.yaml").write_text("1")
    anew().look()
    anew().look()
    assert len(applied) == 1
    (tmp_path / "a.yaml").unlink()
    anew().look()
    assert len(applied) == 2


@pytest.mark.parametrize(
    ("log", "stderr", "why"),
    [
        (
            ["x", "slurmctld: fatal: Invalid node names", "slurmctld: error: y"],
            "Unspecified error",
            "Invalid node names",
        ),
        (["slurmctld: error: only that"], "", "only that"),
        (["slurmctld: error: only that"], "slurm_reconfigure error: no", "slurm_reconfigure error: no"),
        ([], "", "refused without a reason"),
        (
            ['slurmctld: fatal: Parse error in file slurm.conf line 7: "=hunter2 and more"'],
            "",
            "Parse error in file slurm.conf line 7",
        ),
    ],
)
def test_slurms_complaint_in_a_sentence(log: list[str], stderr: str, why: str) -> None:
    assert complaint(log, stderr) == why


def test_a_clients_objection_quotes_no_line_of_the_file() -> None:
    stderr = (
        "scontrol: error: _parse_next_key: Parsing error at unrecognized key: StoragePas\n"
        'scontrol: error: Parse error in file /c/slurm.conf line 3: "=hunter2"\n'
        "scontrol: fatal: Unable to process configuration file\n"
    )
    text = objection(stderr, "/c")
    assert "unrecognized key: StoragePas" in text and "in file slurm.conf line 3" in text
    assert "hunter2" not in text
    assert objection("scontrol: error: something small", "/c") == ""


def test_a_client_that_waited_in_vain_is_no_refusal() -> None:
    assert is_unanswered(FROZEN)
    assert not is_unanswered("slurm_reconfigure error: Unspecified error")


@pytest.mark.parametrize(
    ("before", "after", "new"),
    [
        ("abc", "abcde", "de"),
        ("abc", "abc", ""),
        ("", "ab", "ab"),
        ("abcd", "cdef", "cdef"),  # a ring buffer that has dropped more lines than the comparison covers
        ("aaab", "aaabaab", "aab"),
    ],
)
def test_what_a_log_has_gained(before: str, after: str, new: str) -> None:
    assert new_lines(before, after) == list(new)


def test_a_ring_that_has_lost_old_lines_is_joined_by_the_newer_ones() -> None:
    lines = [f"line {n}" for n in range(500)]
    assert new_lines(lines[:400], lines[90:490]) == lines[400:490]
