"""A changed slurm.conf: what is installed, taken back, tried once more, and told, whatever slurmctld answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from init import configwatch
from init.configwatch import SlurmWatch, fingerprint
from init.prepare.pod import Pod
from init.slurm_files import SlurmFiles, read
from init.slurm_words import complaint, new_lines, objection, unanswered
from init.slurmctld import Answer, Outcome, Slurmctld

LIVE = Answer(Outcome.LIVE, "slurmctld runs with it")
REFUSED = Answer(Outcome.REFUSED, "Invalid node names in partition broken")
SILENT = Answer(Outcome.SILENT, "slurmctld gave no answer")
FROZEN = "slurm_reconfigure error: Socket timed out on send/recv operation\n"


class Scripted(Slurmctld):
    """Answers as it is told to, and remembers with which files it was asked."""

    def __init__(self, installed: Path, *answers: Answer, against: str = "", hung: int = 0) -> None:
        super().__init__(Path("/nowhere"))
        self.installed, self.answers_left, self.against, self.hung = installed, list(answers), against, hung
        self.asked_with: list[dict[str, bytes]] = []

    def objects_to(self, configuration: Path) -> str:
        assert configuration.read_bytes().startswith(b"new")
        return self.against

    def read_anew(self) -> Answer:
        self.asked_with.append(read(self.installed))
        return self.answers_left.pop(0)

    def revive(self) -> bool:
        self.hung -= 1
        return self.hung >= 0


class Site:
    """A controller's files: an old slurm.conf installed, a new one and a further file mounted."""

    def __init__(self, root: Path) -> None:
        self.files = SlurmFiles(Pod({}, root))
        for directory, content in ((self.files.mounted, b"new"), (self.files.target, b"old")):
            directory.mkdir(parents=True)
            (directory / "slurm.conf").write_bytes(content)
        (self.files.mounted / "gres.conf").write_bytes(b"new gres")
        self.told: list[str] = []

    def look(self, *answers: Answer, against: str = "", hung: int = 0) -> tuple[SlurmWatch, Scripted]:
        daemon = Scripted(self.files.target, *answers, against=against, hung=hung)
        watch = SlurmWatch(Path("/nowhere"), self.files, daemon)
        watch.look()
        return watch, daemon


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    made = Site(tmp_path)
    monkeypatch.setattr(configwatch, "condition", lambda control, name, text: made.told.append(text))
    monkeypatch.setattr(SlurmFiles.candidate, "__defaults__", (tmp_path / "candidate",))
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


def test_a_swap_that_is_not_over_is_left_alone(site: Site) -> None:
    (site.files.mounted / "slurm.conf").unlink()
    _, daemon = site.look()
    assert not daemon.asked_with and not site.told


def test_the_fingerprint_of_drop_ins_sees_content_and_no_hidden_files(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("1")
    before = fingerprint([tmp_path, tmp_path / "missing"])
    (tmp_path / ".hidden").write_text("x")
    assert fingerprint([tmp_path, tmp_path / "missing"]) == before
    (tmp_path / "a.yaml").write_text("2")
    assert fingerprint([tmp_path]) != before


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
    assert unanswered(FROZEN)
    assert not unanswered("slurm_reconfigure error: Unspecified error")


@pytest.mark.parametrize(
    ("before", "after", "new"),
    [
        ("abc", "abcde", "de"),
        ("abc", "abc", ""),
        ("", "ab", "ab"),
        ("abcd", "cdef", "cdef"),  # a ring that has turned further than what is compared
        ("aaab", "aaabaab", "aab"),
    ],
)
def test_what_a_log_has_gained(before: str, after: str, new: str) -> None:
    assert new_lines(before, after) == list(new)


def test_a_ring_that_has_lost_old_lines_is_joined_by_the_newer_ones() -> None:
    lines = [f"line {n}" for n in range(500)]
    assert new_lines(lines[:400], lines[90:490]) == lines[400:490]
