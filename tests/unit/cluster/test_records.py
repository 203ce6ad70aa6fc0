"""Records of accounting on their way between two pods of one machine, whatever of it fails."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster import ClusterError
from cluster.change import records
from cluster.change.records import RecordsCarrier
from cluster.pods import RunningPod

OLD, NEW = "records-from-embedded.tar", "records-from-pod.tar"
IS_GIVEN_UP = "accounting: no record has arrived in the pod database: the embedded one opens again"


class Pods:
    """An engine with two pods, which answer `minivm accounting` as they are told, and remember what was done."""

    def __init__(self) -> None:
        self.api = self
        self.answers: dict[str, tuple[int, str]] = {}
        self.history = {"slurm-controller-0": ["t1"], "slurm-accounting-0": ["t1", "t2"]}
        self.running = {"slurm-controller-0", "slurm-accounting-0"}
        self.stopped: set[str] = set()
        self.done: list[tuple[str, str]] = []
        self.placed: list[str] = []

    def find(self, mode: str) -> RunningPod | None:
        name = records.POD[mode]
        if name not in self.running | self.stopped:
            return None
        return RunningPod(name, name, name in self.running, "", 0, 0, "", "", 1, ())

    def exec(self, container: str, command: Iterable[str], *, user: str = "") -> tuple[int, str]:
        text = " ".join(command)
        self.done.append((container, text))
        for word, answer in self.answers.items():
            if word in text:
                if answer[0] < 0:
                    raise KeyboardInterrupt
                return answer
        return 0, ""

    def get_archive(self, container: str, path: str) -> tuple[Iterator[bytes], dict[str, Any]]:
        history = self.history[container]
        text = b"-- minivm records: " + json.dumps({"token": history[-1], "history": history}).encode() + b"\nrows\n"
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode="w") as archive:
            info = tarfile.TarInfo(Path(path).name)
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text))
        return iter([file.getvalue()]), {}

    def put_archive(self, container: str, path: str, data: Any) -> bool:
        self.placed.append(path)
        return True


@pytest.fixture
def pods() -> Pods:
    return Pods()


@pytest.fixture
def log() -> list[str]:
    return []


@pytest.fixture
def carrier(pods: Pods, log: list[str], tmp_path: Path) -> RecordsCarrier:
    return RecordsCarrier(pods, tmp_path, pods.find, log.append)  # type: ignore[arg-type]  # no engine


def is_loading(carrier: RecordsCarrier, pods: Pods, code: int = 1) -> None:
    """Bring records out of the controller, and let their load fail."""
    carrier.move_out("embedded", "pod")
    pods.answers["move-in"] = (code, "no room")
    with pytest.raises(ClusterError if code > 0 else KeyboardInterrupt):
        carrier.move_in("pod", timeout=1)
    pods.answers.clear()
    pods.done.clear()


def test_records_go_from_pod_to_pod_and_are_left_in_none(carrier: RecordsCarrier, pods: Pods, tmp_path: Path) -> None:
    carrier.move_out("embedded", "pod")
    assert (tmp_path / OLD).stat().st_mode & 0o777 == 0o600
    carrier.move_in("pod", timeout=1)
    assert not [*tmp_path.iterdir()]
    assert pods.placed == ["/root"]
    for container in pods.running:
        own = [text for at, text in pods.done if at == container and "minivm-records" in text]
        assert "rm -f /root/minivm-records.sql" in own[0] and own[-1] == "rm -f /root/minivm-records.sql"


@pytest.mark.parametrize("word", ["move-out", "move-in"])
def test_a_cut_command_leaves_no_records_in_the_pod(word: str, carrier: RecordsCarrier, pods: Pods) -> None:
    pods.answers[word] = (-1, "")
    with pytest.raises(KeyboardInterrupt):
        carrier.move_out("embedded", "pod")
        carrier.move_in("pod", timeout=1)
    assert pods.done[-1][1] == "rm -f /root/minivm-records.sql"


def test_a_move_is_given_up_without_a_pod_that_never_began_to_load(
    carrier: RecordsCarrier, pods: Pods, log: list[str], tmp_path: Path
) -> None:
    carrier.move_out("embedded", "pod")
    pods.running.remove("slurm-accounting-0")
    pods.done.clear()
    carrier.move_out("pod", "embedded")
    assert log[-1] == IS_GIVEN_UP and not pods.done
    carrier.move_in("embedded", timeout=1)
    asked = [text for _, text in pods.done if "accounting" in text]
    assert asked == ["sh -c exec minivm accounting reopen --yes"] and not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("exists", "hint"),
    [
        (True, "(docker start slurm-accoun), then make up, with these values"),
        (False, "(make up, with mode: pod, from: embedded), then make up, with these values"),
    ],
)
def test_a_pod_that_may_have_the_records_must_run(
    exists: bool, hint: str, carrier: RecordsCarrier, pods: Pods, tmp_path: Path
) -> None:
    is_loading(carrier, pods, code=-1)
    pods.running.remove("slurm-accounting-0")
    pods.stopped = {"slurm-accounting-0"} if exists else set()
    with pytest.raises(ClusterError) as caught:
        carrier.move_out("pod", "embedded")
    assert "only it can tell whether it got the records" in str(caught.value) and hint in str(caught.value)
    assert (tmp_path / OLD).exists() and not pods.done


@pytest.mark.parametrize(
    ("answer", "history"),
    [
        ((records.NEVER_ARRIVED, ""), ["t1", "t2"]),  # its load was cut
        ((0, ""), ["t0"]),  # its load was refused: it has what an earlier move wrote
    ],
)
def test_a_pod_says_that_no_record_has_arrived(
    answer: tuple[int, str], history: list[str], carrier: RecordsCarrier, pods: Pods, log: list[str], tmp_path: Path
) -> None:
    is_loading(carrier, pods)
    pods.answers["move-out"], pods.history["slurm-accounting-0"] = answer, history
    carrier.move_out("pod", "embedded")
    assert log[-1] == IS_GIVEN_UP
    assert [path.name for path in tmp_path.glob("*.tar")] == [OLD] and not (tmp_path / ".records.partial").exists()


def test_records_that_were_loaded_without_the_cut_up_go_back(
    carrier: RecordsCarrier, pods: Pods, tmp_path: Path
) -> None:
    is_loading(carrier, pods, code=-1)
    carrier.move_out("pod", "embedded")
    assert [path.name for path in tmp_path.iterdir()] == [NEW]
    # That way back is given up in turn: the controller has not begun to load.
    pods.running.remove("slurm-controller-0")
    carrier.move_out("embedded", "pod")
    assert [path.name for path in tmp_path.iterdir()] == [NEW]


def test_the_rename_outlives_a_power_failure(
    carrier: RecordsCarrier, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    synced = []
    monkeypatch.setattr(records, "sync_directory", lambda path: synced.append(sorted(x.name for x in path.iterdir())))
    carrier.move_out("embedded", "pod")
    assert synced == [[OLD]] and (tmp_path / OLD).exists()


def test_a_pod_that_does_not_run_has_its_records_still(carrier: RecordsCarrier, pods: Pods, tmp_path: Path) -> None:
    pods.running.remove("slurm-controller-0")
    with pytest.raises(ClusterError, match="make up, with the old values"):
        carrier.move_out("embedded", "pod")
    assert not [*tmp_path.iterdir()]
