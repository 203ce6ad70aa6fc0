"""Slurm's own drains: which ones the broker lifts, and which ones it leaves to a person."""

from __future__ import annotations

import os
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from health.broker import broker
from health.broker.decide import Act, BrokerNode, OtherNodes
from health.broker.slurm_drains import MOST, Remains, Unkilled, find_cause, judge, plain
from health.broker.slurm_drains import SlurmDrainWatch as Watch
from health.broker.step import (
    ApplyAct,
    AskNode,
    AskRemains,
    BrokerInputs,
    Failed,
    Log,
    Memory,
    Now,
    expect_drain,
    step,
)
from health.policy import BrokerPolicy
from tests.support.broker import Desk
from tests.waiting import until

KILL = "Kill task failed"
WALL = 1000.0
IDLE = BrokerNode(False, "")
BEFORE = Unkilled(46, WALL, WALL, ((123, "9"),), IDLE)
HANGS = Remains(("pid 123 (train) state D in nfs4_wait",))
STILL = f"{KILL} - still: pid 123 (train) state D in nfs4_wait"
CLEAN = Watch(BEFORE, clean_since=10.0)


def drain(reason: str, author: str = "root", since: float | None = WALL + 1) -> BrokerNode:
    return BrokerNode(True, reason, author=author, since=since)


@pytest.mark.parametrize(
    ("node", "is_slurms"),
    [
        (drain(KILL), True),
        (drain(f"{KILL} (JobId=46 StepId=batch)"), True),  # 26.05
        (drain("Job step not running"), True),
        (drain("SlurmdSpoolDir is full"), True),
        (drain("batch job complete failure", "slurm"), True),
        (drain("Duplicate jobid", "slurm"), True),
        (drain("Duplicate jobid", "ann"), False),
        (drain("Prolog error", "slurm"), True),
        (drain("Epilog error", "slurm"), True),
        (drain(STILL), True),
        (drain("Epilog error - still: /var/spool/slurmd has 3 MiB left"), True),
        (replace(drain(KILL), drained=False), False),
        (drain(KILL, "ann"), False),
        (drain(KILL, ""), False),
        (drain("Prolog error", "root"), False),
        (drain("Prolog error", "ann"), False),
        (drain(f"{KILL}, ask Ann"), False),
        (drain(f"fan is loud : {KILL}"), False),
        (drain(f"{KILL} (JobId=46 x) (JobId=47 y)"), False),
        (drain("kill task failed"), False),
        (drain("fan is loud"), False),
        (drain("minivm: pod stops"), False),
        (drain("minivm: pod is back"), True),  # without accounting this reason stays, and Slurm's next drain keeps it
        (drain("minivm: gpu_ecc[reboot]@9f2c1ab 2 errors"), False),
    ],
)
def test_slurms_own_drains_are_known_by_words_and_author(node: BrokerNode, is_slurms: bool) -> None:
    assert (find_cause(node) is not None) is is_slurms


@pytest.mark.parametrize(
    ("what", "node", "left", "watch", "now", "kind", "text"),
    [
        ("a clean node comes back", drain(KILL), Remains(), CLEAN, 40.0, "clear", "nothing of it is left"),
        ("not at once", drain(KILL), Remains(), CLEAN, 39.0, "nothing", "the node is clean"),
        ("what hangs is told", drain(KILL), HANGS, CLEAN, 40.0, "update", STILL),
        ("and told once", drain(STILL), HANGS, replace(CLEAN, posted=STILL), 40.0, "nothing", STILL),
        ("and ends it when it ends", drain(STILL, since=9e9), Remains(), replace(CLEAN, posted=STILL), 40.0,
         "clear", ""),
        ("a full spool keeps it", drain(KILL), Remains(spool="/s has 3 MiB left"), CLEAN, 40.0, "update", "3 MiB"),
        ("without a record it stays", drain(KILL), Remains(), Watch(clean_since=1.0), 99.0, "nothing", "resume"),
        ("a silent slurmctld is no record", drain(KILL), Remains(), Watch(replace(BEFORE, before=None), 1.0), 99.0,
         "nothing", "did not record"),
        ("another hour's record is none", drain(KILL, since=WALL + 3600), Remains(), CLEAN, 99.0, "nothing", "resume"),
        ("nor one from after the drain", drain(KILL, since=WALL - 60), Remains(), CLEAN, 99.0, "nothing", "resume"),
        ("a time that nobody knows is none", drain(KILL, since=None), Remains(), CLEAN, 99.0, "nothing", "resume"),
        ("a person is put back", drain(KILL), Remains(), Watch(replace(BEFORE, before=drain("fan")), 1.0), 99.0,
         "update", "fan"),
        ("also while something hangs", drain(KILL), HANGS, Watch(replace(BEFORE, before=drain("fan")), 0.0), 99.0,
         "update", "fan"),
        ("a broken script's drain waits", drain("Prolog error", "slurm"), Remains(), Watch(clean_since=1.0), 600.0,
         "nothing", "clean"),
        ("and ends", drain("Prolog error", "slurm"), Remains(), Watch(clean_since=1.0), 601.0, "clear", ""),
        ("a full spool's drain ends with it", drain("SlurmdSpoolDir is full"), Remains(), Watch(clean_since=1.0), 61.0,
         "clear", ""),
        ("what returns stays", drain("Epilog error", "slurm"), Remains(), Watch(clean_since=1.0, lifts=(1.0,) * MOST),
         700.0, "nothing", "a person ends it"),
        ("but not for ever", drain("Epilog error", "slurm"), Remains(), Watch(clean_since=1.0, lifts=(1.0,) * MOST),
         21601.0, "clear", ""),
    ],
)  # fmt: skip
def test_what_is_done_about_a_drain_of_slurms(
    what: str, node: BrokerNode, left: Remains, watch: Watch, now: float, kind: str, text: str
) -> None:
    cause = find_cause(node)
    assert cause is not None
    act = judge(cause, node, left, watch, now, "w7")
    assert act.kind == kind and text in act.text, what


def test_the_names_of_processes_cannot_break_a_reason() -> None:
    assert plain('a "b"\n`c` |d\x1b[1m\\') == "a  b   c   d [1m"
    assert len(plain("x" * 9999)) <= 220


def lives(memory: Memory, now: Now, **given: Any) -> tuple[Memory, list[object]]:
    known = BrokerInputs("w7", BrokerPolicy(), "boot-1", **given)
    after, actions = step(memory, known, now)
    return after, [action for action in actions if not isinstance(action, Log)]


def at(seconds: float) -> Now:
    return Now(WALL + seconds, 50.0 + seconds)


def test_a_drain_that_is_expected_is_looked_for_until_it_is_there_and_then_until_it_ends() -> None:
    memory = expect_drain(Memory(acted_on=frozenset(), slurm=Watch(BEFORE)), at(0))
    assert lives(memory, at(4)) == (memory, [])
    assert lives(memory, at(5))[1] == [AskNode()]
    memory, asked = lives(memory, at(5), node=IDLE)
    assert asked == [] and memory.due > 0, "slurmctld has not heard of it yet"
    node = drain(KILL)
    assert lives(memory, at(25), node=node)[1] == [AskRemains()]
    memory, asked = lives(memory, at(25), node=node, remains=HANGS)
    assert asked == [ApplyAct(Act("update", STILL))]
    told = Act("update", STILL)
    memory = expect_drain(Memory(acted_on=frozenset(), slurm=Watch(BEFORE)), at(0))
    memory, _ = lives(memory, at(25), node=node, remains=HANGS, changed=told)
    assert memory.slurm.posted == STILL and STILL in memory.slurm_drain
    node = drain(STILL, since=WALL + 26)
    memory, asked = lives(memory, at(60), node=node, remains=Remains())
    assert asked == [] and memory.slurm.clean_since
    _, asked = lives(memory, at(95), node=node, remains=Remains())
    assert [type(action) for action in asked] == [ApplyAct]
    memory, _ = lives(memory, at(95), node=node, remains=Remains(), changed=Act("clear", ""))
    assert not memory.slurm_drain and memory.slurm.lifts == (145.0,) and memory.slurm.unkilled is None
    assert not memory.due, "a node that is back costs slurmctld nothing"


@pytest.mark.parametrize(
    ("words", "processes", "is_counted"),
    [(KILL, ((123, "9"),), True), (KILL, (), False), ("SlurmdSpoolDir is full", (), True)],
)
def test_a_drain_for_a_step_without_processes_does_not_count_as_a_relapse(
    words: str, processes: tuple[tuple[int, str], ...], is_counted: bool
) -> None:
    """Slurm 24.11 announces a step whose end met a SIGKILL: often, where jobs outlive SIGTERM."""
    watch = Watch(replace(BEFORE, processes=processes), clean_since=1.0, lifts=(9.0,))
    memory = Memory(acted_on=frozenset(), slurm=watch, due=1.0)
    memory, _ = lives(memory, at(99), node=drain(words), remains=Remains(), changed=Act("clear", ""))
    assert memory.slurm.lifts == ((9.0, 149.0) if is_counted else (9.0,))


def test_a_drain_that_never_comes_is_not_looked_for_for_ever() -> None:
    memory = expect_drain(Memory(acted_on=frozenset()), at(0))
    memory, _ = lives(memory, at(119), node=IDLE)
    assert memory.due
    memory, _ = lives(memory, at(135), node=IDLE)
    assert not memory.due


def test_a_refused_lift_is_tried_again_and_a_person_who_takes_over_is_left_alone() -> None:
    memory = Memory(acted_on=frozenset(), slurm=Watch(BEFORE, clean_since=1.0), due=1.0)
    memory, _ = lives(memory, at(60), node=drain(KILL), remains=Remains(), changed=Failed("no"))
    assert memory.due and memory.slurm.unkilled
    memory, asked = lives(memory, at(99), node=drain("Ann: fan", "ann"), other_nodes=OtherNodes((), 1))
    assert asked == [] and not memory.slurm_drain and not memory.due


def test_the_broker_records_a_step_that_cannot_be_killed_before_slurm_drains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = Desk(tmp_path)
    desk.say("ok")
    desk.calls()
    assert desk.broker.answer({"ask": "unkillable", "job": 46}) == {"processes": 0}
    assert desk.calls() == ["node"]
    unkilled = desk.broker.memory.slurm.unkilled
    assert unkilled is not None and unkilled.job == 46 and unkilled.before == IDLE
    # A second step, or the first once more, is announced after Slurm has drained the node: here 100 s after it.
    desk.slurm.state = drain(KILL, since=unkilled.first_at)
    monkeypatch.setattr(broker, "clock", lambda: Now(unkilled.first_at + 100, time.monotonic()))
    desk.broker.answer({"ask": "unkillable", "job": 46})
    second = desk.broker.memory.slurm.unkilled
    assert second is not None and second == replace(unkilled, last_at=unkilled.first_at + 100)
    cause = find_cause(desk.slurm.state)
    assert cause is not None
    act = judge(cause, desk.slurm.state, Remains(), replace(desk.broker.memory.slurm, clean_since=1.0), 99.0)
    assert act.kind == "clear"
    # A person's drain with the same words, hours later, is no announced one.
    desk.slurm.state = drain(KILL, since=unkilled.first_at + 9000)
    desk.broker.answer({"ask": "unkillable", "job": 46})
    later = desk.broker.memory.slurm.unkilled
    assert later is not None and later.before is None
    desk.slurm.down = True
    monkeypatch.setattr(broker, "KNOWN_WITHIN_S", 0.0)
    desk.broker.answer({"ask": "unkillable", "job": 47})
    third = desk.broker.memory.slurm.unkilled
    assert third is not None and third.before is None
    assert "error" in desk.broker.answer({"ask": "unkillable", "job": "46"})


def test_the_state_before_a_drain_is_known_though_slurmctld_answers_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drain without that record is never lifted; slurmctld may be restarting at that moment."""
    desk = Desk(tmp_path)
    desk.say("ok")
    desk.slurm.down = True
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        desk.slurm.down = len(pauses) < 3

    monkeypatch.setattr(time, "sleep", pause)
    desk.broker.answer({"ask": "unkillable", "job": 46})
    unkilled = desk.broker.memory.slurm.unkilled
    assert unkilled is not None and unkilled.before == IDLE and len(pauses) == 3


def test_after_jobs_slurmctld_is_asked_seldom_and_after_a_failed_script_soon(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.say("ok")
    desk.broker.answer({"ask": "ended"})
    assert not desk.broker.memory.due, "it was asked a moment ago"
    desk.broker.answer({"ask": "failed"})
    assert desk.broker.memory.due
    desk.broker.memory = replace(desk.broker.memory, due=0.0, node_read_at=desk.broker.memory.node_read_at - 301.0)
    desk.broker.answer({"ask": "ended"})
    assert desk.broker.memory.due


def test_the_last_jobs_end_before_slurms_drain_is_never_skipped(tmp_path: Path) -> None:
    """A drained node has no further job whose end could ask: the drain would stand for ever."""
    desk = Desk(tmp_path)
    desk.say("ok")
    desk.calls()
    desk.slurm.state = drain("Duplicate jobid", "slurm", since=time.time())
    desk.broker.answer({"ask": "ended"})
    desk.say("ok")
    desk.broker.detect_change()
    assert desk.calls() == [] and not desk.broker.detect_change(), "slurmctld was asked a moment ago"
    memory, began = desk.broker.memory, broker.clock().steady
    desk.broker.memory = replace(memory, jobs_look=began)
    assert desk.broker.detect_change(), "time alone is a cause to look"
    memory, _ = lives(memory, Now(WALL, began + broker.ENDED_S))
    assert not memory.jobs_look and memory.due, "once"
    memory, asked = lives(memory, Now(WALL, memory.due))
    assert asked == [AskNode()]
    memory, _ = lives(memory, Now(WALL, memory.due), node=desk.slurm.state, remains=Remains())
    _, asked = lives(memory, Now(WALL, memory.due + 1), node=desk.slurm.state, remains=Remains())
    assert [type(action) for action in asked] == [ApplyAct], "a clean node is lifted"


def test_a_look_after_jobs_delays_no_drain_for_a_problem(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.say("ok")
    desk.broker.answer({"ask": "ended"})
    desk.say("problem")
    assert desk.slurm.state.drained


def test_a_process_counts_until_it_has_ended_and_no_other_of_its_number_does(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "600"]) as process:
        stat = Path(f"/proc/{process.pid}/stat")
        until(lambda: ") S " in stat.read_text(), "it sleeps")
        start = stat.read_text().rpartition(")")[2].split()[19]
        (text,) = broker.look_for_remains(replace(BEFORE, processes=((process.pid, start),)), tmp_path).hanging
        assert text.startswith(f"pid {process.pid} (sleep) state S")
        assert not broker.look_for_remains(replace(BEFORE, processes=((process.pid, "1"),)), tmp_path).hanging
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not broker.look_for_remains(replace(BEFORE, processes=((process.pid, start),)), tmp_path).hanging, (
            "a zombie"
        )
    assert broker.look_for_remains(None, tmp_path / "absent").spool.endswith("No such file or directory")


def plant(
    proc: Path, pid: int, name: str, parent: int, cgroup: str = "/", title: str = "", uid: int = os.getuid()
) -> None:
    (proc / str(pid)).mkdir()
    (proc / str(pid) / "stat").write_text(f"{pid} ({name}) S {parent} {'0 ' * 17}7{pid} 0\n")
    (proc / str(pid) / "cgroup").write_text(f"0::{cgroup}\n")
    (proc / str(pid) / "cmdline").write_text(title)
    # Effective, saved and file system's: root, as of a setuid program.
    (proc / str(pid) / "status").write_text(f"Name:\t{name}\nUid:\t{uid}\t0\t0\t0\nGid:\t0\t0\t0\t0\n")


def test_a_jobs_processes_are_those_below_its_steps_and_in_its_cgroups(tmp_path: Path) -> None:
    plant(tmp_path, 1, "init", 0)
    plant(tmp_path, 10, "slurmstepd", 1, "/slurm/job_46/step_batch/slurm", "slurmstepd: [46.batch]")
    plant(tmp_path, 11, "bash", 10)
    plant(tmp_path, 12, "a) S 1 (b", 11)
    plant(tmp_path, 13, "left", 1, "/slurm/job_46/step_batch/user/task_0")
    plant(tmp_path, 20, "slurmstepd", 1, "/slurm/job_461/step_batch/slurm", "slurmstepd: [461.batch]")
    plant(tmp_path, 21, "bash", 20, "/slurm/job_461/step_batch/user/task_0")
    plant(tmp_path, 22, "slurmstepd", 1, title="slurmstepd: [146.0]")
    assert broker.remains_of_job(46, tmp_path) == ((11, "711"), (12, "712"), (13, "713"))
    # A user runs a link to `su` of this name, whose effective user is root: its children do not belong to the job.
    plant(tmp_path, 30, "slurmstepd", 1, title="slurmstepd: [46.0]", uid=os.getuid() + 1000)
    plant(tmp_path, 31, "sleep", 30)
    assert (31, "731") not in broker.remains_of_job(46, tmp_path)


def test_neither_the_program_that_announces_a_step_nor_a_zombie_is_a_process_that_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = Desk(tmp_path)
    with subprocess.Popen(["sleep", "600"]) as left, subprocess.Popen(["true"]) as zombie:
        os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
        starts = {
            pid: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
            for pid in (left.pid, zombie.pid, os.getpid())
        }
        monkeypatch.setattr(broker, "remains_of_job", lambda job: tuple(starts.items()))
        answer = desk.broker.answer({"ask": "unkillable", "job": 46, "pid": os.getpid()})
        left.kill()
    assert answer == {"processes": 1}
    unkilled = desk.broker.memory.slurm.unkilled
    assert unkilled is not None and unkilled.processes == ((left.pid, starts[left.pid]),)
