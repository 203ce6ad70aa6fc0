"""Detection that Slurm does not respond: one failure, several, a long silence; and the clients of a crowded port."""

from __future__ import annotations

import json
import socket
import subprocess
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from init.helpers import serving
from init.helpers.serving import (
    HEARD_S,
    REST_S,
    SILENT_S,
    UNHEARD_S,
    AnswerCheck,
    CheckHistory,
    Fault,
    judge,
    measure_silence,
)
from init.pod.addresses import FEW, count_sources, describe_crowd, find_crowd
from init.slurm import client
from init.slurm.node import Node
from init.slurm.registration import WORKER
from tests.support.plans import ROOT
from tests.waiting import until

SILENT = AnswerCheck(Fault.SILENT, "slurmctld does not answer authenticated requests within 5 s")
REFUSED = AnswerCheck(Fault.REFUSED, "munge key rejected by ctl:6817")
WELL = AnswerCheck()


def run(
    *found: tuple[float, AnswerCheck], memory: CheckHistory | None = None
) -> tuple[CheckHistory, list[str], list[float]]:
    """Return the final memory, the reason after each finding, and the times at which a restart is due."""
    memory, reasons, restarts = memory or CheckHistory(), [], []
    for now, finding in found:
        memory, reason, restart = judge(memory, finding, now)
        reasons.append(reason)
        if restart:
            restarts.append(now)
    return memory, reasons, restarts


def test_one_failure_changes_nothing_and_the_first_success_ends_it() -> None:
    _, reasons, _ = run((10, SILENT), (25, WELL), (40, SILENT), (55, SILENT), (70, WELL), (85, SILENT))
    assert reasons == ["", "", "", SILENT.reason, "", ""]


def test_a_daemon_that_stays_silent_is_restarted_and_not_again_for_long() -> None:
    silence = [(10.0 + step, SILENT) for step in range(0, int(SILENT_S) + 30, 15)]
    memory, _, restarts = run(*silence)
    assert restarts[0] == 10 + SILENT_S
    memory = CheckHistory(failures=9, silent_since=200.0, restarted=150.0)
    _, _, restarts = run((200 + SILENT_S, SILENT), (150 + REST_S, SILENT), memory=memory)
    assert restarts == [150 + REST_S]


@pytest.mark.parametrize(("is_controller", "code"), [(False, 0), (True, 1)])
def test_a_login_pod_is_ready_while_nothing_listens_at_slurmctlds_address(
    is_controller: bool, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A port that hangs is another fault: the pod's own daemons may be the cause."""
    shown: list[str] = []

    def condition(_control: Path, name: str, text: str, *, expires: float) -> None:
        shown.append(text)

    answer = type("Done", (), {"returncode": 1, "stdout": "", "stderr": "Unable to contact slurm controller"})
    monkeypatch.setattr(serving, "FILE", tmp_path / "serving.json")
    monkeypatch.setattr(serving.load, "__defaults__", (tmp_path / "serving.json",))
    monkeypatch.setattr(serving.save, "__defaults__", (tmp_path / "serving.json",))
    monkeypatch.setattr(serving, "end_hanging", lambda _: None)
    monkeypatch.setattr(serving, "ran", lambda *_, **__: answer)
    monkeypatch.setattr(serving, "condition", condition)
    monkeypatch.setattr(serving, "restart_daemon", lambda *_: "")
    monkeypatch.setattr(client, "is_slurmctld_installed", lambda: is_controller)
    monkeypatch.delenv(WORKER, raising=False)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        port = taken.getsockname()[1]
        monkeypatch.setattr(client, "address", lambda _: f"127.0.0.1:{port}")
        assert [serving.main(), serving.main()] == [0, code]
        said = capsys.readouterr().out or shown[-1]
        assert f"nothing listens at 127.0.0.1:{port}" in said
        taken.listen()
        assert serving.main() == 1, "it accepts and does not answer"
    if not is_controller:
        assert shown[-1] == "", "its own reason takes the place of the condition"


def test_a_slurmd_is_restarted_after_two_silent_minutes_and_says_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = subprocess.CompletedProcess([], 1, "", "scontrol: error: failed to connect to any sack sockets\n")
    restarted: list[tuple[object, ...]] = []

    def restart(*arguments: object) -> str:
        restarted.append(arguments)
        return "restarted"

    silent = serving.CheckHistory(failures=9, silent_since=time.monotonic() - serving.SILENT_S - 1)
    serving.save(silent, tmp_path / "serving.json")
    monkeypatch.setattr(serving.load, "__defaults__", (tmp_path / "serving.json",))
    monkeypatch.setattr(serving.save, "__defaults__", (tmp_path / "serving.json",))
    monkeypatch.setattr(serving, "end_hanging", lambda _: None)
    monkeypatch.setattr(serving, "ran", lambda *_, **__: answer)
    monkeypatch.setattr(serving, "restart_daemon", restart)
    monkeypatch.setenv(WORKER, "")
    assert serving.main() == 1
    assert "does not answer: no daemon of Slurm in this pod signs requests" in capsys.readouterr().out
    assert [arguments[0] for arguments in restarted] == [("slurmd", "slurmd-static")]
    assert restarted[0][2] == serving.SILENT_S, "also one that has just started"


def test_a_refusal_restarts_nothing() -> None:
    memory, reasons, restarts = run(*((10.0 + step, REFUSED) for step in range(0, 600, 15)))
    assert reasons[-1] == REFUSED.reason and restarts == []
    assert run((700, SILENT), memory=memory)[2] == [], "the silence begins now"


@pytest.mark.parametrize(
    ("last", "boot", "expected"),
    [("NONE", "2026-11-24T14:00:00", 600.0), ("2026-11-24T14:09:00", "2026-11-24T10:00:00", 60.0)],
)
def test_a_worker_hears_of_slurmctld_by_its_own_slurmd(last: str, boot: str, expected: float) -> None:
    now = datetime.fromisoformat("2026-11-24T14:10:00").timestamp()
    assert (
        measure_silence(
            f"Boot time                = {boot}\nLast slurmctld msg time  = {last}\nVersion = 24.11.5\n", now
        )
        == expected
    )
    assert measure_silence("", now) == float("inf")


def test_a_worker_knows_the_age_of_its_slurmd() -> None:
    now = datetime.fromisoformat("2026-11-24T14:10:00").timestamp()
    text = "Boot time = 2026-11-24T14:09:40\nLast slurmctld msg time  = 2026-11-24T14:09:59\n"
    assert (serving.parse_start(text, now), serving.parse_start("Boot time = NONE", now)) == (20.0, 0.0)


def worker(
    monkeypatch: pytest.MonkeyPatch,
    *,
    ago: float,
    answers: list[str],
    age: float = 0.0,
    state: str = "IDLE+DYNAMIC_NORM",
    address: str = "10.0.0.1",
    last: str = "2026-11-24T14:00:00",
) -> list[str]:
    """Fake a worker whose slurmd heard from slurmctld `ago` seconds ago; return the queries made to slurmctld."""
    asked: list[str] = []

    class Done:
        returncode, stdout = 0, f"Last slurmctld msg time  = {last}\n"

    def node(name: str, controller: str, *, within: float) -> object:
        asked.append(name)
        if answers and answers[0] == "away":
            raise client.SlurmError("ask", answers.pop(0))
        return None if answers and answers[0] == "forgotten" else Node("w1", state, address, "", "2026-11-24T14:00", 0)

    monkeypatch.setattr(serving, "ran", lambda *_, **__: Done)
    monkeypatch.setattr(serving, "measure_silence", lambda *_: ago)
    monkeypatch.setattr(serving, "parse_start", lambda *_: age)
    monkeypatch.setattr(client, "node", node)
    monkeypatch.setattr(serving, "unproven", lambda *_: answers.pop(0))
    monkeypatch.setenv("MINIVM_POD_NAME", "w1")
    monkeypatch.setenv("MINIVM_POD_IP", "10.0.0.1")
    return asked


def test_a_worker_asks_slurmctld_only_where_it_was_silent_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = worker(monkeypatch, ago=HEARD_S - 1, answers=[])
    assert serving.ask_as_worker("ctl:6817", CheckHistory(), 1000.0) == (CheckHistory(), WELL) and not asked
    asked = worker(monkeypatch, ago=HEARD_S + 1, answers=["", "it is down"])
    memory, finding = serving.ask_as_worker("ctl:6817", CheckHistory(), 1000.0)
    assert finding == WELL and memory.proven == 1000.0 and asked == ["w1"]
    assert serving.ask_as_worker("ctl:6817", memory, 1000.0 + HEARD_S - 1)[1] == WELL and asked == ["w1"]
    memory, finding = serving.ask_as_worker("ctl:6817", memory, 2000.0)
    assert finding.fault is Fault.REFUSED and finding.reason.endswith("it is down")
    memory, _, _ = judge(memory, finding, 2000.0)
    memory, finding = serving.ask_as_worker("ctl:6817", memory, 2030.0)
    assert finding.reason.endswith("it is down") and asked == ["w1", "w1"], "not asked again so soon"


def test_a_worker_that_slurmctld_never_contacted_asks_before_a_check_drains_it(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = json.loads((ROOT / "scripts/lib/thresholds/host.json").read_text())["default"]
    assert limits["slurmd_patience_s"] >= UNHEARD_S + 30, "a worker looks every 30 s"
    asked = worker(monkeypatch, ago=UNHEARD_S - 1, answers=[], last="NONE")
    assert serving.ask_as_worker("ctl:6817", CheckHistory(saved=True), 1000.0)[1] == WELL and not asked
    state, address = "DOWN+DYNAMIC_NORM*", "10.0.0.9"
    worker(monkeypatch, ago=UNHEARD_S + 1, answers=["no answer"], last="NONE", state=state, address=address)
    assert serving.ask_as_worker("ctl:6817", CheckHistory(saved=True), 1000.0)[1].fault is Fault.FORGOTTEN


def test_a_worker_that_slurmctld_has_forgotten_registers_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """slurmctld may die before it has saved the record of a new node."""
    worker(monkeypatch, ago=HEARD_S + 1, answers=["forgotten"])
    memory, finding = serving.ask_as_worker("ctl:6817", CheckHistory(), 1000.0)
    assert finding.fault is Fault.FORGOTTEN
    _, reasons, restarts = run((1000.0, finding), memory=memory)
    assert (reasons, restarts) == ([""], [1000.0]), "at once, and the pod need not be unready for it"
    again = CheckHistory(restarted=1000.0)
    assert run((1000.0 + HEARD_S - 1, finding), memory=again)[2] == [], "it may not have registered yet"
    assert run((1000.0 + HEARD_S, finding), memory=again)[2] == [1000.0 + HEARD_S]


@pytest.mark.parametrize(
    ("state", "address", "fault"),
    [
        ("IDLE+DYNAMIC_NORM+NOT_RESPONDING", "10.0.0.9", Fault.FORGOTTEN),
        ("DOWN+DYNAMIC_NORM*", "10.0.0.9", Fault.FORGOTTEN),
        ("IDLE+DYNAMIC_NORM", "10.0.0.9", Fault.REFUSED),  # a second pod of this name answers there
        ("DOWN+DYNAMIC_NORM*", "10.0.0.1", Fault.REFUSED),  # the network between them
        ("DOWN*", "10.0.0.9", Fault.REFUSED),  # a static node's address comes from slurm.conf
        ("DOWN+DYNAMIC_NORM*", "w1.site", Fault.REFUSED),
    ],
)
def test_a_worker_whose_record_is_from_before_its_pod_registers_again(
    monkeypatch: pytest.MonkeyPatch, state: str, address: str, fault: Fault
) -> None:
    """A restore of slurmctld's state brings back the addresses of that time, and no node answers there."""
    worker(monkeypatch, ago=HEARD_S + 1, answers=["no answer"], state=state, address=address)
    _, finding = serving.ask_as_worker("ctl:6817", CheckHistory(), 1000.0)
    assert finding.fault is fault


def test_a_new_worker_asks_once_whether_slurmctld_has_saved_its_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slurmctld that died before that never contacts the node: it would stay away for four minutes."""
    asked = worker(monkeypatch, ago=20.0, age=serving.SAVED_S - 1, answers=[])
    assert serving.ask_as_worker("ctl:6817", CheckHistory(), 1000.0) == (CheckHistory(), WELL) and not asked
    asked = worker(monkeypatch, ago=20.0, age=serving.SAVED_S, answers=["forgotten"])
    memory, finding = serving.ask_as_worker("ctl:6817", CheckHistory(), 1000.0)
    assert finding.fault is Fault.FORGOTTEN and asked == ["w1"] and not memory.saved
    assert judge(memory, finding, 1000.0)[1:] == ("", True), "its slurmd registers again, and the pod stays ready"
    asked = worker(monkeypatch, ago=20.0, age=serving.SAVED_S, answers=["away"])
    assert serving.ask_as_worker("ctl:6817", memory, 1030.0) == (memory, WELL), "slurmctld is starting"
    memory, finding = serving.ask_as_worker("ctl:6817", memory, 1060.0)
    assert finding == WELL and memory.saved and asked == ["w1", "w1"]
    assert serving.ask_as_worker("ctl:6817", memory, 1090.0) == (memory, WELL) and len(asked) == 2, "no load after that"


def test_what_a_run_remembers_outlives_it(tmp_path: Path) -> None:
    file = tmp_path / "run/serving.json"
    assert serving.load(file) == CheckHistory()
    serving.save(CheckHistory(failures=2, reason="x"), file)
    assert serving.load(file) == CheckHistory(failures=2, reason="x")
    for damaged in ("[]", "{", '{"fails": 2}'):
        file.write_text(damaged)
        assert serving.load(file) == CheckHistory()


TABLE = """  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 00000000:1AA1 00000000:0000 0A 00000000:00000000 00:00000000 00000000 64030 0 1 1 0 100 0 0 10 0
   1: 0200F40A:1AA1 0701F40A:9C40 01 00000000:00000000 00:00000000 00000000 64030 0 2 1 0 20 4 30 10 -1
   2: 0200F40A:1AA1 0701F40A:9C41 01 00000000:00000000 00:00000000 00000000 64030 0 3 1 0 20 4 30 10 -1
   3: 0200F40A:1AA3 0701F40A:9C42 01 00000000:00000000 00:00000000 00000000 64030 0 4 1 0 20 4 30 10 -1
   4: 0200F40A:1AA1 0301F40A:9C43 06 00000000:00000000 00:00000000 00000000 64030 0 5 1 0 20 4 30 10 -1
   5: 0000000000000000FFFF00000200F40A:1AA1 0000000000000000FFFF00000301F40A:9C44 01 00000000:00000000
"""


def test_connections_are_counted_by_their_source() -> None:
    found = count_sources(TABLE.splitlines(), 6817)
    assert found == {"10.244.1.7": 2, "10.244.1.3": 1}
    assert describe_crowd(found, 6817) == "", "a few explain nothing"
    found["10.244.1.7"] = 3998
    found["10.244.1.3"] = 14
    assert describe_crowd(found, 6817) == "4,012 connections are open to port 6817, 3,998 of them from 10.244.1.7"


def test_the_kernel_s_own_table_is_read() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=FEW) as server:
        port = server.getsockname()[1]
        held = [socket.create_connection(("127.0.0.1", port)) for _ in range(FEW)]
        whole = f"{FEW} connections are open to port {port}, {FEW} of them from 127.0.0.1"
        # On a busy machine the kernel's table changes while it is read.
        until(lambda: find_crowd(port) == whole, "all are counted", seen=lambda: find_crowd(port))
        for stream in held:
            stream.close()


SDIAG = """Data since      Sat Nov 28 08:34:51 2026 (1795854891)
Jobs started:   {}
Backfilling stats
\tTotal backfilled jobs (since last slurm start): {}
\tTotal backfilled jobs (since last stats cycle start): {}
\tTotal backfilled heterogeneous job components: 0
"""


def test_slurmctld_saves_once_for_the_jobs_that_backfill_started(monkeypatch: pytest.MonkeyPatch) -> None:
    texts: Iterator[str] = iter(())
    saved: list[str] = []
    monkeypatch.setattr(client, "run", lambda *_, **__: next(texts))
    monkeypatch.setattr(client, "save_jobs", saved.append)
    texts = iter(SDIAG.format(*counts) for counts in [(3, 0, 0), (9, 2, 2), (9, 2, 2), (12, 3, 1), (0, 0, 0)])
    memory = CheckHistory()
    for expected in (0, 1, 1, 2, 2):
        memory = serving.save_backfilled("ctl:6817", memory)
        assert len(saved) == expected
    texts = iter([SDIAG.format(1, 3, 1).replace("1795854891", "1795859999")])
    assert serving.save_backfilled("ctl:6817", memory).backfilled.startswith("1795859999 3"), "another slurmctld counts"
    assert len(saved) == 3


def test_a_slurmctld_that_does_not_save_now_is_asked_in_the_next_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise client.SlurmError("ask slurmctld", "no answer")

    monkeypatch.setattr(client, "run", lambda *_, **__: SDIAG.format(9, 2, 2))
    monkeypatch.setattr(client, "save_jobs", refuse)
    assert serving.save_backfilled("ctl:6817", CheckHistory()) == CheckHistory()
