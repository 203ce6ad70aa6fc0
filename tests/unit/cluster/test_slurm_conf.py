"""Wait of `up` for the controller's report on the slurm.conf that `up` delivered."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from cluster import ClusterError
from cluster.slurm_conf import ConfJudgement, confirm, confirm_values, pack, read_judgement
from cluster.values import CONTROLLER, Options, dump, load


class Controller:
    """Controller that reports the given states one after the other."""

    def __init__(self, *words: str, why: str = "") -> None:
        self.words, self.why, self.asked = list(words), why, 0

    def __call__(self, command: Iterable[str]) -> tuple[int, str]:
        assert list(command)[:3] == ["minivm", "config", "status"]
        self.asked += 1
        state = self.words.pop(0)
        return int(state != "live"), json.dumps({"hash": "0", "state": state, "why": self.why})


def test_up_waits_until_the_file_is_judged() -> None:
    controller = Controller("pending", "pending", "live")
    confirm(controller, {CONTROLLER})
    assert controller.asked == 3


def test_up_fails_with_the_reason_of_a_refusal() -> None:
    with pytest.raises(ClusterError, match="refused, the last one stays: unrecognized key: NoSuchSetting"):
        confirm(Controller("pending", "refused", why="refused, the last one stays: unrecognized key: NoSuchSetting"),
                {CONTROLLER})  # fmt: skip


@pytest.mark.parametrize(
    ("why", "later"),
    [
        ("refused, the last one stays: failed to initialize burst_buffer plugin", False),
        ("refused, the last one stays: it would end jobs: partition long goes: job 41", True),
    ],
)
def test_refused_values_are_stored_only_if_the_controller_can_take_them_later(
    why: str, later: bool, tmp_path: Path
) -> None:
    before = Options(overrides={"motd": "before"}, values_file="before.yaml")
    now = Options(workers=3, overrides={"motd": "now"}, values_file="now.yaml")
    stored = tmp_path / "options.json"
    stored.write_bytes(dump(now))
    with pytest.raises(ClusterError, match="runs on with its last good one"):
        confirm_values(Controller("refused", why=why), {CONTROLLER}, now, before, stored)
    kept = now if later else replace(before, workers=3)
    assert load(stored.read_bytes(), "") == kept


def test_a_controller_that_is_new_is_not_asked_and_one_of_an_older_image_is_believed() -> None:
    confirm(Controller(), set())
    confirm(lambda command: (2, "Error: No such command 'config'."), {CONTROLLER})


def test_a_candidate_travels_as_a_directory_that_is_its_owners_alone() -> None:
    name, data = pack({"slurm.conf": b"a", "gres.conf": b"bc"})
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        found = {member.name: (member.mode, member.size) for member in tar.getmembers()}
    assert found == {name: (0o700, 0), f"{name}/slurm.conf": (0o600, 1), f"{name}/gres.conf": (0o600, 2)}


CHANGE = "Foo: - -> 1\npartition long: goes"


@pytest.mark.parametrize(
    ("code", "text", "answer"),
    [
        (0, f"{CHANGE}\nno job ends", ConfJudgement(("Foo: - -> 1", "partition long: goes"))),
        (0, "nothing changes", ConfJudgement()),
        (
            1,
            f"{CHANGE}\nends jobs: partition long goes: job 3\n"
            "minivm: cannot take this slurm.conf: it would end jobs (`minivm config accept x` takes it)",
            ConfJudgement(("Foo: - -> 1", "partition long: goes"), ("partition long goes: job 3",)),
        ),
        (
            1,
            "minivm: cannot take this slurm.conf: Parsing error at unrecognized key: Foo; a=b: a bracket is not closed",
            ConfJudgement(objection="Parsing error at unrecognized key: Foo; a=b: a bracket is not closed"),
        ),
        (1, "minivm: cannot look at slurm.conf: this pod runs no slurmctld", ConfJudgement()),
        (137, "", ConfJudgement()),
    ],
)
def test_the_controllers_answer_about_a_changed_file_is_read(code: int, text: str, answer: ConfJudgement) -> None:
    assert read_judgement(code, text) == answer
