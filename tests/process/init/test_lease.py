"""Two controllers' lease services under two real PID 1 on one volume: one writer at a time, whatever is stopped."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from init.state.lease import Terms
from tests.process.init_two import STAND_IN, Two, answer, connect, now, of_host, processes
from tests.process.living import alive
from tests.waiting import until

pytestmark = pytest.mark.root


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Two]:
    with ExitStack() as stack:
        yield Two(tmp_path, stack).started()


def test_the_standby_is_ready_and_says_for_whom_it_waits(two: Two) -> None:
    view = two.pods[1].until_ready()
    assert view.turn == "standby: slurm-controller-0 has term 1"
    assert two.pods[1].get("/readyz")[0] == 200
    assert two.pods[0].until_ready().turn == "active, term 1"
    assert two.pods[1].service("slurmctld").starts == 0


def test_a_pod_that_stops_hands_over_at_once(two: Two) -> None:
    two.pods[0].stop()
    two.until_written(2)
    assert two.overlaps() == []
    # Of a term that was not released it would say "took over from": its end was waited for.
    two.pods[1].until(lambda: "handed over by slurm-controller-0 in " in two.pods[1].snapshot().turn, "it says how")
    assert (two.base / "term-2/job_state").read_text() == "jobs"


def ask_for_a_hand_over(two: Two, heir: str) -> None:
    request = two.pods[0].directory / "own/hand-over.json"
    request.write_text(json.dumps({"heir": heir, "term": 1, "until": now() + 30}))
    until(lambda: getattr(Terms(two.base).newest(), "heir", "") == heir, "it is announced", seen=two.seen)
    two.pods[0].ask("restart", service="lease", bound=True, wait=False)


def test_a_hand_over_stops_slurmctld_gently_and_the_heir_acts(two: Two) -> None:
    ask_for_a_hand_over(two, "slurm-controller-1")
    two.until_written(2)
    assert two.overlaps() == []
    assert two.pods[0].service("slurmctld").last_exit == "killed by TERM"
    two.pods[1].until(lambda: "handed over by slurm-controller-0 in " in two.pods[1].snapshot().turn, "it says how")
    two.pods[0].until(lambda: two.pods[0].snapshot().turn == "standby: slurm-controller-1 has term 2", "it stands by")


def test_a_watcher_hears_that_the_former_controller_is_ready_again(two: Two) -> None:
    ready: list[bool] = []
    replies = two.pods[0].client().stream("watch")  # until its PID 1 ends
    threading.Thread(target=lambda: ready.extend(reply["ready"] for reply in replies), daemon=True).start()
    ask_for_a_hand_over(two, "slurm-controller-1")
    two.pods[0].until(lambda: two.pods[0].snapshot().turn.startswith("standby"), "it stands by")
    two.pods[0].until(lambda: False in ready and ready[-1], "the watcher hears it")


def test_an_heir_that_never_comes_loses_its_right(two: Two) -> None:
    ask_for_a_hand_over(two, "slurm-controller-7")
    two.until_written(2)
    assert two.overlaps() == []


@pytest.mark.parametrize("victim", ["lease", "slurmctld", "pid 1"])
def test_a_process_that_is_killed_during_a_hand_over_changes_nothing(two: Two, victim: str) -> None:
    pid = two.pods[0].pid if victim == "pid 1" else of_host(two.pods[0], victim)
    ask_for_a_hand_over(two, "slurm-controller-1")
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    two.until_written(2)
    assert two.overlaps() == []


def test_a_pod_that_dies_is_replaced(two: Two) -> None:
    two.pods[0].close()
    two.until_written(2)
    assert two.overlaps() == []
    assert two.pods[1].until_ready().turn.partition(":")[0] == "active, term 2"


def test_a_lease_that_is_killed_ends_slurmctld_and_the_same_pod_goes_on_in_a_new_term(two: Two) -> None:
    os.kill(of_host(two.pods[0], "lease"), signal.SIGKILL)
    two.until_written(2)
    assert two.overlaps() == []
    assert two.pods[0].until_ready().turn.partition(":")[0] == "active, term 2"


def test_a_lease_that_is_stopped_is_given_up_before_another_pod_has_it(two: Two) -> None:
    os.kill(of_host(two.pods[0], "lease"), signal.SIGSTOP)
    two.until_written(2)
    assert two.overlaps() == []
    # PID 1 has begun the service anew: the same pod may be first again, in a term of its own.
    two.pods[0].until(
        lambda: sorted(two.turns()) == ["active, term 2", "standby"], "one is active in term 2, one stands by"
    )


def test_a_stopped_pid_1_does_not_keep_the_lease_from_killing_slurmctld(two: Two) -> None:
    slurmctld = of_host(two.pods[0], "slurmctld")
    os.kill(two.pods[0].pid, signal.SIGSTOP)
    assert Terms(two.base).claim(2, "slurm-controller-9", "another")
    until(lambda: not alive(slurmctld), "slurmctld of pod 0 is dead", seen=two.seen)
    os.kill(two.pods[0].pid, signal.SIGCONT)
    two.until_written(3)
    assert two.overlaps() == []


def test_a_machine_that_was_suspended_stops_writing_as_soon_as_it_wakes(two: Two) -> None:
    stopped = processes(two.pods[0])
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    two.until_written(2)
    assert two.overlaps() == []
    for pid in reversed(stopped):  # PID 1 wakes last
        os.kill(pid, signal.SIGCONT)
    two.pods[0].until(lambda: two.pods[0].snapshot().turn.startswith("standby"), "it stands by")
    late = [at for _, at in two.overlaps()]
    # It wrote into its own term alone, and not for longer than a look at the clock takes.
    assert all(term == 1 for term, _ in two.overlaps())
    assert two.pods[1].until_ready().turn.partition(":")[0] == "active, term 2"
    print(f"{len(late)} writes after waking, within {max(late, default=0) - min(late, default=0):.2f} s")


def test_a_cluster_that_starts_anew_begins_with_its_newest_term(two: Two) -> None:
    for pod in two.pods:
        pod.close()
    two.start(1)
    two.until_written(2)
    assert two.overlaps() == []


def test_a_controller_that_is_stopped_is_dead_before_it_wakes(tmp_path: Path) -> None:
    with ExitStack() as stack:
        two = Two(tmp_path, stack, STAND_IN)
        two.start(0).until_ready()
        first = two.submit(0, "first")
        two.until_saved("first")
        former = of_host(two.pods[0], "slurmctld")
        os.kill(former, signal.SIGKILL)
        two.pods[0].until(lambda: two.pods[0].service("slurmctld").starts == 2, "it is started again, in the same term")
        two.pods[0].until_ready()
        until_looked(of_host(two.pods[0], "lease"))
        two.start(1)
        two.pods[1].until(lambda: two.pods[1].snapshot().turn.startswith("standby"), "pod 1 stands by")
        slurmctld = of_host(two.pods[0], "slurmctld")
        for pid in processes(two.pods[0]):
            os.kill(pid, signal.SIGSTOP)
        waiting = connect(two.address(0), "waits in the socket of a stopped controller")
        two.pods[1].until(lambda: two.pods[1].snapshot().turn.startswith("active"), "pod 1 acts")
        assert Path(f"/proc/{slurmctld}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        with pytest.raises(ConnectionError):
            answer(waiting)
        second = two.submit(1, "second")
        two.until_saved("second")
        assert two.jobs() == {first: ("first", 0), second: ("second", 0)}


def until_looked(lease: int) -> None:
    """Wait until the main thread of `lease` has looked at its clock, and so at slurmctld's process."""

    def pauses() -> int:
        text = Path(f"/proc/{lease}/status").read_text()
        return int(re.findall(r"^voluntary_ctxt_switches:\s+(\d+)", text, re.MULTILINE)[0])

    begun = pauses()
    until(lambda: pauses() > begun + 3, "lease looks at its clock")
