"""The fleet between a real API server and a real Slurm, continued: each row of what it does, each row's reverse, and
the same where it is killed between any two of its changes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from tests.kubernetes.fleet_rows import FENCED, NAME, OTHER, OUT, Rows
from tests.support.both_sides import Running, both_sides
from tests.waiting import until

pytestmark = [pytest.mark.docker, pytest.mark.cluster]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rows]:
    with both_sides(tmp_path_factory.mktemp("fleet"), "fleetrows", Rows) as found:
        yield found


@pytest.fixture
def rows(made: Rows) -> Iterator[Rows]:
    yield made
    made.mend()


# Signs of a Node


def condition(rows: Rows, status: str) -> None:
    rows.says(NAME, "True", further=({"type": "GpuUnhealthy", "status": status, "message": "xid 79"},))


HELD = "minivm.io/maintenance"
SIGNS: dict[str, tuple[str, Callable[[Rows], object], Callable[[Rows], object]]] = {
    "maintenance": (HELD, lambda rows: rows.taint(HELD), lambda rows: rows.taint()),
    "condition": ("GpuUnhealthy: xid 79", lambda rows: condition(rows, "True"), lambda rows: condition(rows, "False")),
    "notready": (f"node n-{NAME} is not ready", lambda rows: rows.says(NAME, "Unknown", renewed=True),
                 lambda rows: rows.says(NAME, "True")),
}  # fmt: skip


@pytest.mark.parametrize("kind", SIGNS)
def test_each_sign_of_a_node_is_a_drain_and_its_end_takes_it_back(rows: Rows, kind: str) -> None:
    words, begins, ends = SIGNS[kind]
    rows.policy_is(conditions=["GpuUnhealthy"])
    with rows.running():
        begins(rows)
        until(lambda: rows.reason(NAME) == f"minivm: fleet: {kind}: {words}", "drained", seen=rows.log)
        assert rows.reason("w1") == ""
        ends(rows)
        until(rows.takes_jobs, "and undrained", seen=rows.log)


def test_when_more_machines_are_unwell_than_may_be_none_is_drained_for_it(rows: Rows) -> None:
    rows.policy_is(fencing="off")
    with rows.running():
        until(rows.takes_jobs, "all is shown", seen=rows.log)
        rows.says("w1", "Unknown")
        until(lambda: rows.reason("w1"), "the first one is drained", seen=rows.log)
        rows.says(NAME, "Unknown")
        until(lambda: "fleet: more than 1 of 2 workers have unwell machines" in rows.log(), "it is told")
        assert rows.reason(NAME) == ""
        rows.says("w1", "True")
        until(lambda: rows.reason("w1") == "", "the first one is well", seen=rows.log)
        until(lambda: rows.reason(NAME), "then it is one again, and it is drained", seen=rows.log)
        rows.says(NAME, "True")
        until(rows.takes_jobs, "and undrained", seen=rows.log)


def test_what_a_person_has_set_down_is_told_and_never_touched(rows: Rows) -> None:
    # One that lives registers again at once.
    rows.workers[NAME].container.kill()
    until(lambda: "DOWN" in rows.flags(), "Slurm has lost it")
    rows.scontrol("update", f"nodename={NAME}", "state=down", "reason=cable")
    before = rows.node(NAME)
    with rows.running():
        rows.cordon(NAME, "rack 4")
        until(lambda: f"{NAME}: down by another actor (cable)" in rows.log(), "it is told", seen=rows.log)
        until(lambda: rows.shown(NAME) == "Down cable", "and shown", seen=rows.log)
        rows.cordon(NAME, None, on=False)
        rows.quiet()
    assert rows.node(NAME) == before


def test_a_drain_of_others_cordons_by_policy_and_its_end_uncordons_what_is_ours_alone(rows: Rows) -> None:
    rows.policy_is(cordon=True)
    with rows.running():
        for persons in (False, True):
            rows.cordon(NAME, "rack 4", on=persons)
            until(lambda: bool(rows.reason(NAME)) == rows.cordoned(), "a cordon is a drain", seen=rows.log)
            rows.scontrol("update", f"nodename={NAME}", "state=drain", "reason=fan 3")
            until(rows.cordoned, "cordoned", seen=rows.log)
            until(lambda: rows.shown_on_node(NAME).endswith("fan 3"), "and shown", seen=rows.log)
            rows.scontrol("update", f"nodename={NAME}", "state=undrain")
            if persons:
                until(lambda: rows.reason(NAME).startswith("minivm: fleet: cordon: rack 4"), "his holds", seen=rows.log)
            else:
                until(lambda: not rows.cordoned(), "uncordoned", seen=rows.log)
                until(rows.takes_jobs, "and nothing is left", seen=rows.log)
        assert rows.cordoned()


# A pod that is to go


def test_a_pod_that_may_stay_after_all_takes_jobs_again_and_its_job_runs_on(rows: Rows) -> None:
    job = rows.submit()
    with rows.running():
        rows.leave()
        until(lambda: rows.reason(NAME) == "minivm: fleet: leave: new template", "drained", seen=rows.log)
        rows.leave(None)
        until(lambda: rows.reason(NAME) == "", "and undrained", seen=rows.log)
    assert rows.job(job) == "R"


@pytest.mark.parametrize("words", [(), ("--array=3",)])
def test_jobs_of_a_pod_that_is_to_go_have_their_time_and_are_requeued(rows: Rows, words: tuple[str, ...]) -> None:
    rows.policy_is(leaveWithin=2)
    job = rows.submit(*words)
    with rows.running():
        rows.leave()
        wanted = "minivm: fleet: deadline+leave: its jobs had 2 s, new template"
        until(lambda: rows.reason(NAME) == wanted, "its time is over", seen=rows.log)
        until(lambda: rows.job(job) == "PD", "its job waits for the next", seen=rows.log)
        shown = rows.controller.run("scontrol", "show", "job", job)
        assert f"AdminComment=minivm: the fleet sets node {NAME} down (its jobs had 2 s" in shown, shown
        until(lambda: not rows.there(), "then the pod goes", seen=rows.log)
        rows.comes()
        until(rows.takes_jobs, "and the next takes jobs", seen=rows.log)


def test_a_pod_whose_jobs_had_their_time_and_that_may_stay_takes_jobs_again(rows: Rows) -> None:
    rows.policy_is(leaveWithin=2, away=0)
    job = rows.submit()
    with rows.running():
        rows.leave()
        until(lambda: rows.job(job) == "PD", "its job waits for the next", seen=rows.log)
        until(lambda: "waits until fewer pods of its pool are away" in rows.log(), "none may be away", seen=rows.log)
        rows.leave(None)
        until(rows.takes_jobs, "and undrained", seen=rows.log)
    assert rows.there()


def test_a_machine_that_is_about_to_go_loses_its_pod_and_one_that_stays_does_not(rows: Rows) -> None:
    going = "ToBeDeletedByClusterAutoscaler"
    job = rows.submit()
    with rows.running():
        rows.taint(going)
        until(lambda: rows.reason(NAME) == f"minivm: fleet: going: {going}", "drained", seen=rows.log)
        rows.taint()
        until(lambda: rows.reason(NAME) == "", "and undrained", seen=rows.log)
        assert rows.job(job) == "R"
        rows.taint(going)
        until(lambda: rows.reason(NAME), "drained again", seen=rows.log)
        rows.controller.run("scancel", job)
        until(lambda: not rows.there(), "it goes when its job is over", seen=rows.log)
        # Where else it is placed: nothing is about to go there.
        rows.comes(OTHER)
        until(rows.takes_jobs, "the next takes jobs on another machine", seen=rows.log)


# Pods and records that are gone


def test_a_pod_that_is_gone_is_set_down_and_its_record_goes_where_its_name_does_not_come_back(rows: Rows) -> None:
    job = rows.submit()
    with rows.running():
        rows.goes()
        until(lambda: rows.reason(NAME) == "minivm: fleet: gone: its pod is gone", "drained", seen=rows.log)
        assert rows.job(job) == "R", "its slurmd answers: its job may run"
        rows.workers[NAME].container.kill()
        until(lambda: {"DOWN", "DRAIN"} <= rows.flags(), "then set down", seen=rows.log)
        until(lambda: rows.job(job) == "PD", "its job runs elsewhere, if it may", seen=rows.log)
        rows.scale(0)
        assert rows.known(), "a job names it"
        rows.controller.run("scancel", job)
        until(lambda: not rows.known(), "nobody does: its record goes", seen=rows.log)
        rows.scale(1)
        rows.starts()
        rows.comes()
        until(rows.takes_jobs, "it is back", seen=rows.log)


def test_a_pod_that_was_gone_for_a_while_takes_jobs_when_it_is_back(rows: Rows) -> None:
    with rows.running():
        rows.goes()
        rows.workers[NAME].container.kill()
        until(lambda: {"DOWN", "DRAIN"} <= rows.flags(), "set down", seen=rows.log)
        rows.starts()
        rows.comes()
        until(rows.takes_jobs, "it is back", seen=rows.log)


def test_a_pod_that_moves_leaves_the_drain_for_its_old_machine_behind(rows: Rows) -> None:
    with rows.running():
        rows.cordon(NAME, "rack 4")
        until(lambda: rows.reason(NAME) == "minivm: fleet: cordon: rack 4", "drained", seen=rows.log)
        old = rows.address(NAME)
        rows.goes()
        new = rows.moves()
        rows.new_pod(NAME, OTHER)
        until(rows.takes_jobs, "undrained on the other machine", seen=rows.log)
    assert new != old
    assert f"NodeAddr={new} " in rows.scontrol("show", "node", NAME)
    assert rows.controller.run("srun", "-w", NAME, "--chdir=/tmp", "hostname", user="demo").strip() == NAME


def test_a_ready_pod_that_slurm_does_not_know_has_its_slurmd_restarted_and_stays(rows: Rows) -> None:
    rows.policy_is(lost=10)
    before, starts = rows.pod(), rows.workers[NAME].service("slurmd")["starts"]
    assert before is not None
    with rows.running(), rows.showing():
        until(rows.takes_jobs, "all is shown", seen=rows.log)
        rows.scontrol("delete", f"nodename={NAME}")
        until(rows.known, "its slurmd has registered", seen=rows.log)
        until(lambda: rows.takes_jobs() and not rows.asked(), "and nothing is asked any more", seen=rows.log)
        rows.quiet()
    assert rows.log().count(f"restart slurmd of {NAME}") == 1
    after = rows.pod()
    assert after is not None and after["metadata"]["uid"] == before["metadata"]["uid"]
    assert rows.workers[NAME].service("slurmd")["starts"] == starts + 1
    assert rows.controller.run("srun", "-w", NAME, "--chdir=/tmp", "hostname", user="demo").strip() == NAME


def test_a_ready_pod_that_shows_nobody_what_is_asked_is_replaced_and_the_next_is_known(rows: Rows) -> None:
    with rows.running():
        until(rows.takes_jobs, "all is shown", seen=rows.log)
        rows.scontrol("delete", f"nodename={NAME}")
        until(lambda: not rows.there(), "it is evicted", seen=rows.log)
        said = "it is ready, and Slurm does not know it; to restart its slurmd did not help"
        assert f"evict {NAME}: {said}" in rows.log()
        rows.workers[NAME].container.kill()
        rows.starts()
        rows.comes()
        until(rows.takes_jobs, "the next one registers", seen=rows.log)
        evicted = [line for line in rows.log().splitlines() if line.startswith(f"evict {NAME}")]
        assert len([line for line in evicted if "the state had changed" not in line]) == 1


# A machine that is dead


def test_a_dead_machine_is_given_up_and_taken_back(rows: Rows) -> None:
    job = rows.submit()
    with rows.running():
        rows.dies()
        until(rows.given_up, "its Node is out of service", seen=rows.log)
        until(lambda: not rows.there(), "its pod is deleted", seen=rows.log)
        assert {"DOWN", "DRAIN"} <= rows.flags()
        assert rows.reason(NAME).startswith("minivm: fleet: dead+notready: ")
        assert rows.job(job) == "PD", "its job was told to run elsewhere before that"
        rows.well()
        until(rows.takes_jobs, "it is taken back, and its worker takes jobs", seen=rows.log)
        assert not rows.given_up()


def test_a_dead_machines_pod_comes_back_on_another_one(rows: Rows) -> None:
    with rows.running():
        rows.dies()
        until(lambda: not rows.there(), "its pod is deleted", seen=rows.log)
        rows.starts()
        rows.new_pod(NAME, OTHER)
        until(lambda: rows.node(NAME)["state"] == "IDLE", "it takes jobs", seen=rows.log)
        assert rows.given_up(), "the machine is still away"


ALIVE: dict[str, tuple[str, Callable[[Rows], object]]] = {
    "a kubelet that answers": ("its address answers at the kubelet's port", lambda rows: rows.says(NAME, "Unknown")),
    "a lease that is renewed": ("its kubelet has renewed its lease", lambda rows: dead_but(rows, renewed=True)),
    "too many": ("more than 1 of 2 machines do not answer", lambda rows: all_die(rows)),
    "no provider's word": ("the provider has not reported it off", lambda rows: with_provider(rows)),
}  # fmt: skip


def dead_but(rows: Rows, *, renewed: bool) -> None:
    rows.workers[NAME].container.kill()
    rows.says(NAME, "Unknown", renewed=renewed)


def all_die(rows: Rows) -> None:
    for name in rows.names:
        rows.says(name, "Unknown")
    rows.dies()


def with_provider(rows: Rows) -> None:
    rows.policy_is(provider=["example.org/off"])
    rows.dies()


@pytest.mark.parametrize("sign", ALIVE)
def test_a_machine_is_not_given_up_on_one_sign_alone(rows: Rows, sign: str) -> None:
    said, happens = ALIVE[sign]
    with rows.renewing() if "renewed" in sign else contextlib.nullcontext(), rows.running():
        happens(rows)
        until(lambda: said in rows.log(), sign, seen=rows.log)
    assert (rows.given_up(), rows.there()) == (False, True)
    assert "give n-" not in rows.log()


def test_a_machine_that_answers_again_keeps_its_pods_and_jobs_though_it_was_given_up(rows: Rows) -> None:
    """The fleet that gave it up was killed just then; the machine's kubelet is not ready, and its slurmd lives."""
    job = rows.submit()
    metadata = {"labels": {FENCED: "true"}, "annotations": {"minivm.io/fenced": "not heard of"}}
    rows.api.merge(f"/api/v1/nodes/n-{NAME}", {"metadata": metadata})
    rows.taint(OUT)
    rows.says(NAME, "Unknown")
    with rows.running():
        until(lambda: "not proven: its address answers" in rows.log(), "it is told", seen=rows.log)
        until(lambda: "notready" in rows.reason(NAME), "it is drained", seen=rows.log)
        rows.cordon("w1", "rack 4")
        until(lambda: rows.reason("w1"), "it has looked again since", seen=rows.log)
        assert (rows.job(job), rows.there(), "DOWN" in rows.flags()) == ("R", True, False), rows.log()
        rows.says(NAME, "True")
        until(lambda: not rows.given_up() and rows.reason(NAME) == "", "it is taken back", seen=rows.log)
    assert rows.job(job) == "R"


def test_a_dead_machine_whose_worker_a_person_holds_in_slurm_is_given_up_and_he_holds_it(rows: Rows) -> None:
    rows.scontrol("update", f"nodename={NAME}", "state=drain", "reason=look at fan 3")
    with rows.running():
        rows.dies()
        until(lambda: not rows.there(), "its pod is deleted", seen=rows.log)
        assert rows.reason(NAME).startswith("look at fan 3"), "Slurm may add that it does not respond"
        rows.well()
        until(lambda: not rows.given_up(), "it is taken back", seen=rows.log)
    assert rows.reason(NAME).startswith("look at fan 3")


def test_a_machine_that_may_not_be_given_up_is_told(rows: Rows) -> None:
    rows.policy_is(fencing="propose")
    rows.dies()
    # Slurm has to lose its slurmd first.
    until(lambda: "`fencing: act` would give it up" in rows.ask("why", f"n-{NAME}"), "it is told", seen=rows.log)
    said = rows.ask("why", f"n-{NAME}")
    assert f"kubectl taint nodes n-{NAME} {OUT}=" in said
    assert (rows.given_up(), rows.there()) == (False, True)


# Killed again and again


def drained_and_gone(rows: Rows) -> bool:
    return {"DOWN", "DRAIN"} <= rows.flags() and "minivm: fleet: gone" in rows.reason(NAME)


def not_ours_any_more(rows: Rows) -> bool:
    return rows.takes_jobs() and not rows.cordoned()


def cordons(rows: Rows) -> None:
    rows.policy_is(cordon=True)


def killed(rows: Rows) -> None:
    rows.workers[NAME].container.kill()


def soon(rows: Rows) -> None:
    rows.policy_is(leaveWithin=1)


def no_room(rows: Rows) -> None:
    rows.policy_is(leaveWithin=1, away=0)


def signs(rows: Rows) -> None:
    rows.policy_is(conditions=["GpuUnhealthy"])


def cordon(rows: Rows, on: bool = True) -> None:
    rows.cordon(NAME, "rack 4" if on else None, on=on)


def resumes(rows: Rows) -> None:
    rows.scontrol("update", f"nodename={NAME}", "state=resume")


def ends_jobs(rows: Rows) -> None:
    rows.controller.run("scancel", "--user=demo")


def runs(rows: Rows) -> bool:
    return rows.controller.run("squeue", "-h", "-o", "%t").split() == ["R"]


def drained(rows: Rows, why: str) -> bool:
    """And all is shown that follows."""
    said = f"minivm: fleet: {why}"
    return rows.reason(NAME) == said and rows.shown(NAME) == f"Drained {said}" and rows.free(NAME)


def draining(rows: Rows, why: str) -> bool:
    said = f"minivm: fleet: {why}"
    return rows.reason(NAME) == said and rows.shown(NAME) == f"Draining {said}" and runs(rows) and not rows.free(NAME)


def is_left_to_him(rows: Rows) -> bool:
    return f"{NAME}: resumed by a person 2 times" in rows.log() and not rows.reason(NAME) and not rows.free(NAME)


SPOT, SCALED = "aws-node-termination-handler/spot-itn", "ToBeDeletedByClusterAutoscaler"
# What happens, and how it shows that all that follows was done.
Steps = tuple[Callable[[Rows], object], ...]
Part = tuple[Steps, Callable[[Rows], bool]]
# In which its kubelet shows the worker what is asked of it.
SHOWN = "not known, and asked"
STORIES: dict[str, tuple[Part, ...]] = {
    **{
        kind: (((signs, begins), partial(drained, why=f"{kind}: {said}")), ((ends,), Rows.takes_jobs))
        for kind, (said, begins, ends) in SIGNS.items()
    },
    "resumed by a person twice": (
        ((cordon,), partial(drained, why="cordon: rack 4")),
        ((resumes,), partial(drained, why="cordon: rack 4 (again)")),
        ((resumes,), is_left_to_him),
        ((partial(cordon, on=False),), Rows.takes_jobs),
    ),
    "about to go": (
        ((Rows.submit, lambda rows: rows.taint(SPOT)), partial(draining, why=f"going: {SPOT}")),
        ((Rows.taint,), lambda rows: not rows.reason(NAME) and rows.shown(NAME) == "TakesJobs" and runs(rows)),
        ((lambda rows: rows.taint(SCALED),), partial(draining, why=f"going: {SCALED}")),
        ((ends_jobs,), lambda rows: not rows.there()),
        ((lambda rows: rows.comes(OTHER),), Rows.takes_jobs),
    ),
    "to go": (((Rows.leave,), lambda rows: not rows.there()), ((Rows.comes,), Rows.takes_jobs)),
    "to go, with a job": (
        ((soon, Rows.submit, Rows.leave), lambda rows: not rows.there()),
        ((Rows.comes,), Rows.takes_jobs),
    ),
    "withdrawn": (
        ((no_room, Rows.leave), lambda rows: rows.free(NAME)),
        ((lambda rows: rows.leave(None),), Rows.takes_jobs),
    ),
    "gone": (((Rows.goes, killed), drained_and_gone), ((Rows.starts, Rows.comes), Rows.takes_jobs)),
    "removed": (
        ((lambda rows: rows.scale(0), Rows.goes, killed), lambda rows: not rows.known()),
        ((lambda rows: rows.scale(1), Rows.starts, Rows.comes), Rows.takes_jobs),
    ),
    "moved": (
        ((lambda rows: rows.cordon(NAME, "rack 4"),), lambda rows: rows.free(NAME)),
        ((lambda rows: rows.comes(OTHER),), Rows.takes_jobs),
    ),
    "not known": (
        ((lambda rows: rows.scontrol("delete", f"nodename={NAME}"),), lambda rows: not rows.there()),
        ((killed, Rows.starts, Rows.comes), Rows.takes_jobs),
    ),
    SHOWN: (
        ((lambda rows: rows.policy_is(lost=8), lambda rows: rows.scontrol("delete", f"nodename={NAME}")), Rows.known),
        ((), lambda rows: rows.takes_jobs() and not rows.asked()),
    ),
    "dead": (((Rows.dies,), lambda rows: rows.given_up() and not rows.there()), ((Rows.well,), Rows.takes_jobs)),
    "held by a person": (
        (
            (cordons, lambda rows: rows.scontrol("update", f"nodename={NAME}", "state=drain", "reason=fan 3")),
            lambda rows: rows.cordoned() and rows.free(NAME),
        ),
        ((lambda rows: rows.scontrol("update", f"nodename={NAME}", "state=undrain"),), not_ours_any_more),
    ),
}


def nothing_to_do(rows: Rows) -> bool:
    return rows.ask("plan") == "nothing to do\n"


def done(fleet: Running, all_is: Callable[[Rows], bool], rows: Rows) -> bool:
    return fleet.there() and all_is(rows)


@pytest.mark.parametrize("story", STORIES)
def test_killed_after_every_single_change_it_ends_the_same(rows: Rows, story: str) -> None:
    """No fleet makes more than one change, and none remembers those of the one before it."""
    shown = rows.showing() if story == SHOWN else contextlib.nullcontext()
    with rows.running(cut=2, again=2) as fleet, shown:
        for steps, all_is in STORIES[story]:
            for happens in steps:
                happens(rows)
            until(partial(done, fleet, all_is, rows), f"all is done: {story}", within=300, seen=rows.log)
        until(partial(done, fleet, nothing_to_do, rows), "and nothing is left to do", within=300, seen=rows.log)
        assert fleet.killed > 3, "a story in which little is done shows little"
