"""Remediation of machines: when idle, in turn, once, and verified; only proposed unless the policy says `act`.

The simulated worlds assert that no remedy runs on a machine with jobs, twice, or on too many machines at once.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest

from fleet.decide.actions import Annotate, CallHook, Change, Drain, FleetMemory, Record, StartJob, Withdraw, change_key
from fleet.decide.decide import LAST
from fleet.policy import Machines, Policy, Treatment, Webhook, parse_policy
from fleet.report.events import describe_action
from fleet.world.kubernetes import KubernetesView
from fleet.world.slurm import SlurmView
from init.errors import ConfigError
from tests.fleet_world import CutInAJob, Worlds

ASK = Treatment(annotate={"reboot.example/please": "now"})
JOB = Treatment(job={"template": {"spec": {"containers": [{"name": "x", "image": "x"}]}}}, on_node=True)
HOOK = Treatment(webhook=Webhook("https://repair.example/machines"))
SICK = "gpu_lost[reboot]@9f2c001 fell off the bus"


def treats(**remedies: Treatment) -> Policy:
    return Policy(machines=Machines(mode="act", remedies=remedies))


def fleet(rules: Policy, size: int = 3) -> Worlds:
    worlds = Worlds(size, rules, "w-")
    worlds.machines = {}
    worlds.settle_in()
    return worlds


def told(worlds: Worlds, kind: str) -> list[str]:
    return [one.text for one in worlds.decide(worlds.world()).notices if one.kind == kind]


def what(worlds: Worlds, node: str = "n0") -> list[str]:
    return [one.what for one in worlds.status(node).history]


@pytest.mark.parametrize("treatment", [ASK, JOB, HOOK])
def test_a_reboot_waits_for_jobs_is_asked_for_once_and_ends_when_it_is_well(treatment: Treatment) -> None:
    worlds = fleet(treats(reboot=treatment))
    worlds.slurm["w-0"].jobs.add(7)
    worlds.wants("n0", "reboot", "new kernel")
    worlds.settle_in()
    assert (worlds.slurm["w-0"].drained_by, worlds.treated) == ("fleet", [])
    assert "waits until it is drained, cordoned and idle" in worlds.status("n0").why
    worlds.slurm["w-0"].suspended.add(7)
    worlds.settle_in()
    assert not worlds.treated, "a job that is suspended is there"
    worlds.jobs_end("w-0")
    worlds.settle_in()
    assert len(worlds.treated) == 1
    assert worlds.slurm["w-0"].drained_by == "fleet", "and kept until it is well"
    worlds.ready("n0", False)
    worlds.boots("n0")
    worlds.settle_in()
    assert worlds.slurm["w-0"].drained_by == "fleet", "booted, and not well yet"
    worlds.ready("n0")
    worlds.settle_in()
    assert (worlds.slurm["w-0"].drained_by, worlds.nodes["n0"].cordoned) == ("", False)
    assert what(worlds)[-2:] == ["reboot", "rebooted"]
    assert "reboot.example/please" not in worlds.nodes["n0"].annotations
    worlds.later()
    worlds.settle_in()
    assert len(worlds.treated) == 1, "the same goal is not reached twice"
    worlds.wants("n0", "reboot", "and again")
    worlds.settle_in()
    assert len(worlds.treated) == 2, "another one is"


def test_the_nodes_mark_says_which_and_why_and_its_other_annotations_stay() -> None:
    worlds = fleet(treats(reboot=ASK))
    worlds.nodes["n0"].annotations["others"] = "stay"
    worlds.wants("n0", "reboot", "new kernel")
    worlds.settle_in()
    said = worlds.nodes["n0"].annotations
    assert said["reboot.example/please"] == "now"
    assert said["minivm.io/remedy"].endswith("/1")
    assert said["minivm.io/remedy-reason"] == "new kernel"
    worlds.wants("n0", "up")
    worlds.settle_in()
    assert worlds.nodes["n0"].annotations == {"others": "stay"}
    assert what(worlds)[-2:] == ["forgiven", "withdrawn"]


@pytest.mark.parametrize("rules", [Policy(), Policy(machines=Machines(remedies={"reboot": ASK})), treats()])
def test_unless_it_is_to_act_and_knows_how_a_person_does_it_and_is_seen(rules: Policy) -> None:
    worlds = fleet(rules)
    worlds.wants("n0", "reboot", "new kernel")
    worlds.settle_in()
    assert (worlds.treated, worlds.slurm["w-0"].drained_by) == ([], "fleet")
    worlds.later()
    worlds.settle_in()
    worlds.boots("n0")
    worlds.settle_in()
    assert (worlds.slurm["w-0"].drained_by, what(worlds)[-1]) == ("", "rebooted")


def test_by_default_what_a_verdict_asks_for_is_proposed_and_nothing_is_done() -> None:
    worlds = fleet(Policy(machines=Machines(remedies={"reboot": ASK})))
    worlds.verdict("w-0", SICK)
    worlds.settle_in()
    assert (worlds.treated, worlds.nodes["n0"].cordoned) == ([], False)
    (said,) = told(worlds, "propose")
    assert f"would be reboot {SICK}" in said
    assert worlds.status("n0").goal == "up"
    worlds.policy = replace(worlds.policy, machines=replace(worlds.policy.machines, mode="off"))
    worlds.settle_in()
    assert not told(worlds, "propose")


@pytest.mark.parametrize(("said", "goal"), [(SICK, "reboot"), ("ecc[rma]@9f2c001 x", "replace")])
def test_a_verdict_leads_to_its_goal(said: str, goal: str) -> None:
    worlds = fleet(treats(reboot=ASK, replace=ASK))
    worlds.verdict("w-0", said)
    worlds.settle_in()
    assert (worlds.status("n0").goal, len(worlds.treated)) == (goal, 1)
    assert worlds.nodes["n0"].annotations["minivm.io/remedy-reason"] == said, "the evidence is attached"


@pytest.mark.parametrize("said", ["fan[manual]@1 x", "full[node]@1 x", "x[user]@1 x"])
def test_what_a_machine_mends_itself_or_a_person_must_leads_to_none(said: str) -> None:
    worlds = fleet(treats(reboot=ASK, replace=ASK))
    worlds.verdict("w-0", said)
    worlds.settle_in()
    assert worlds.status("n0").goal == "up"


def test_one_at_a_time_and_who_is_switched_off_for_good_holds_up_nobody() -> None:
    worlds = fleet(treats(reboot=ASK, down=ASK), 4)
    for node in ("n0", "n1", "n2"):
        worlds.wants(node, "reboot", "new kernel")
    worlds.settle_in()
    assert [node for node, _ in worlds.treated] == ["n0"]
    assert "waits for its turn" in worlds.status("n1").why
    worlds.boots("n0")
    worlds.settle_in()
    assert [node for node, _ in worlds.treated] == ["n0", "n1"]
    worlds.wants("n1", "down", "dust")
    worlds.settle_in()
    worlds.boots("n2")
    worlds.settle_in()
    assert {node for node, _ in worlds.treated} == {"n0", "n1", "n2"}


def test_a_share_of_the_machines_may_be_more() -> None:
    worlds = fleet(Policy(machines=Machines(mode="act", share=0.5, remedies={"reboot": ASK})), 4)
    for node in worlds.nodes:
        worlds.wants(node, "reboot", "new kernel")
    worlds.settle_in()
    assert len(worlds.treated) == 2


def test_a_machine_that_does_not_come_back_is_tried_again_and_then_left_to_a_person() -> None:
    worlds = fleet(treats(reboot=ASK))
    worlds.wants("n0", "reboot", "new kernel")
    for _ in range(8):
        worlds.settle_in()
        worlds.now += worlds.policy.machines.verify_s
    assert len(worlds.treated) == worlds.policy.machines.attempts
    assert worlds.slurm["w-0"].drained_by == "fleet"
    assert "an operator must look at it" in worlds.status("n0").why


def test_a_reboot_that_does_not_help_becomes_a_replacement() -> None:
    worlds = fleet(treats(reboot=ASK, replace=ASK))
    for _ in range(2):
        worlds.verdict("w-0", SICK)
        worlds.settle_in()
        assert worlds.status("n0").goal == "reboot"
        worlds.boots("n0")
        worlds.person_resumes("w-0")  # the broker lifts its drain: its checks pass after the boot
        worlds.settle_in()
        assert worlds.status("n0").goal == "up"
    worlds.verdict("w-0", SICK)
    worlds.settle_in()
    assert (worlds.status("n0").goal, worlds.status("n0").why[:16]) == ("replace", "rebooted 2 times")


def test_flapping_is_held_until_a_person_says_up() -> None:
    worlds = fleet(treats())
    for _ in range(worlds.policy.machines.flaps):
        worlds.verdict("w-0", "link[node]@1 down")
        worlds.settle_in()
        worlds.person_resumes("w-0")
        worlds.settle_in()
    assert worlds.slurm["w-0"].reason.startswith("minivm: fleet: machine: drain 4 verdicts or more")
    worlds.wants("n0", "up", "new cable")
    worlds.settle_in()
    assert not worlds.slurm["w-0"].drained_by


def test_what_a_commit_says_of_many_machines_is_the_commits_fault() -> None:
    worlds = fleet(treats(reboot=ASK), 5)
    for name in ("w-0", "w-1"):
        worlds.verdict(name, SICK)
    assert told(worlds, "common") == [
        "many machines report gpu_lost@9f2c001, so the check is probably wrong: the fleet treats none for it"
    ]
    worlds.settle_in()
    assert not worlds.treated


def test_hardware_that_has_gone_is_replaced_and_its_turn_is_anothers() -> None:
    worlds = fleet(treats(replace=ASK))
    for node in ("n0", "n1"):
        worlds.wants(node, "replace", "ecc")
    worlds.settle_in()
    worlds.nodes["n0"].uid, worlds.nodes["n0"].annotations = "other-hardware", {}
    worlds.settle_in()
    assert [node for node, _ in worlds.treated] == ["n0", "n1"]
    gone = [worlds.machine(name).status for name in worlds.machines or {}]
    (one,) = [status for status in gone if status.state == "Absent"]
    assert one.history[-2].what == "replaced"
    assert worlds.status("n0").goal == "up", "what stands in its place is another"


def test_somebody_who_resumes_it_in_time_is_asked_for_another_turn() -> None:
    worlds = fleet(treats(reboot=ASK))
    worlds.wants("n0", "reboot", "new kernel")
    while worlds.status("n0").remedy is None:
        worlds.look()
    worlds.person_resumes("w-0")
    worlds.slurm["w-0"].jobs.add(7)
    worlds.settle_in()
    assert not worlds.treated
    worlds.jobs_end("w-0")
    worlds.settle_in()
    assert len(worlds.treated) == 1


@pytest.mark.parametrize("what", ["jobs", "pods"])
def test_where_it_is_not_known_whether_it_is_idle_its_turn_is_not_lost(what: str) -> None:
    """While it is unknown whether the machine is idle, it keeps its turn.

    A fleet that has just started may know Slurm's nodes before it knows the jobs.
    """
    worlds = fleet(treats(reboot=ASK))
    worlds.wants("n0", "reboot", "new kernel")
    while worlds.status("n0").remedy is None:
        assert worlds.look()
    seen = worlds.world()
    here, there = seen.kubernetes, seen.slurm
    assert isinstance(here, KubernetesView) and isinstance(there, SlurmView)
    if what == "jobs":
        there = replace(there, jobs=None)
    else:
        here = replace(here, unread={"Pod/x": "y"})
    worlds.memory = FleetMemory()
    worlds.look(world=replace(seen, kubernetes=here, slurm=there))
    assert (worlds.status("n0").remedy is not None, worlds.treated) == (True, [])
    assert "waits until it is known" in worlds.status("n0").why
    worlds.settle_in()
    assert (len(worlds.treated), worlds.status("n0").remedies) == (1, 1)
    assert "withdrawn" not in [one.what for one in worlds.status("n0").history]


def test_where_a_pod_cannot_be_read_no_machine_is_idle() -> None:
    worlds = fleet(treats(reboot=ASK))
    worlds.wants("n0", "reboot", "new kernel")
    for _ in range(5):
        world = worlds.world()
        assert isinstance(world.kubernetes, KubernetesView)
        worlds.look(world=replace(world, kubernetes=replace(world.kubernetes, unread={"Pod/x": "x"})))
    assert not worlds.treated


def test_a_pod_that_cannot_be_read_keeps_only_its_own_machine_from_its_remedy() -> None:
    """An unreadable pod blocks the remedy of its own machine only.

    Root in a pod that may write its own status can make the pod unreadable.
    """
    for where, treated in (("n1", 1), ("", 1), ("n0", 0)):
        worlds = fleet(treats(reboot=ASK))
        worlds.wants("n0", "reboot", "new kernel")
        for _ in range(8):
            world = worlds.world()
            assert isinstance(world.kubernetes, KubernetesView)
            here = replace(world.kubernetes, unread={"Pod/x": "x"}, unread_pods_nodes={"Pod/x": where})
            worlds.look(world=replace(world, kubernetes=here))
        assert len(worlds.treated) == treated, where


class Killed(Exception):
    pass


@pytest.mark.parametrize("treatment", [ASK, JOB, HOOK])
@pytest.mark.parametrize("goal", ["reboot", "replace", "down"])
def test_killed_between_any_two_changes_it_is_done_once_and_ends_the_same(treatment: Treatment, goal: str) -> None:
    def story(cut: int, *, in_job: bool = False) -> tuple[object, int, int]:
        worlds = fleet(treats(**{goal: treatment}))
        worlds.done.clear()
        worlds.left_in_job = in_job
        left = cut

        def on() -> None:
            nonlocal left
            for _ in range(25):
                decision = worlds.decide(worlds.world())
                worlds.memory = decision.memory
                try:
                    for change in decision.changes:
                        if left == 0:
                            left = -1
                            raise Killed
                        left -= 1
                        worlds.perform(change)
                except (Killed, CutInAJob):
                    worlds.memory = FleetMemory()
                    continue
                if not decision.changes:
                    return
            raise AssertionError("it never ends")

        worlds.wants("n0", goal, "fan 3")
        on()
        if goal == "reboot":
            worlds.boots("n0")
            on()
        changes: list[Change] = worlds.done
        return worlds.end(), len(worlds.treated), len(changes)

    wanted, times, changes = story(-1)
    assert times == 1
    for cut in range(changes + 1):
        assert story(cut)[:2] == (wanted, 1), f"cut after {cut} of {changes}"
    with contextlib.suppress(CutInAJob):
        assert story(-1, in_job=treatment is not ASK)[:2] == (wanted, 1), "cut between what was asked for and its note"


def test_what_is_asked_of_whom_is_read_strictly() -> None:
    said = {"mode": "act", "atOnce": 2, "remedies": {"reboot": {"annotate": {"a/b": "c"}}}}
    found = parse_policy({"machines": said}).machines
    assert (found.mode, found.at_once, found.remedies) == ("act", 2, {"reboot": Treatment({"a/b": "c"})})
    refused: list[dict[str, object]] = [
        {"mode": "acts"},
        {"remedies": {"up": {}}},
        {"remedies": {"reboot": {}}},
        {"remedies": {"reboot": {"annotate": {"a": "b"}, "job": {}}}},
        {"remedies": {"reboot": {"annotate": {"a": ["b"]}}}},
        {"remedies": {"reboot": {"annotate": {"a": "b"}, "webhook": {"url": "https://a"}}}},
        {"remedies": {"reboot": {"webhook": {"url": "https://a"}, "onNode": True}}},
        {"remedies": {"reboot": {"annotate": {"minivm.io/remedy": "x"}}}},
        {"attempts": 0},
        {"share": 2},
    ]
    for wrong in refused:
        with pytest.raises(ConfigError):
            parse_policy({"machines": wrong})


def test_the_kinds_of_changes_are_in_words() -> None:
    worlds = fleet(treats(reboot=ASK))
    worlds.wants("n0", "reboot", "x")
    worlds.settle_in()
    kinds = [one for one in worlds.done if isinstance(one, Annotate | Withdraw | StartJob)]
    assert next(describe_action(one) for one in kinds).startswith("request a remedy of n0: reboot.example/please=now")


def test_a_machine_that_writes_the_mark_itself_gets_nothing_done() -> None:
    worlds = fleet(treats(reboot=ASK))
    (name,) = [one for one in worlds.machines or {} if one.startswith("n0-")]
    worlds.wants("n0", "reboot", "new kernel")
    while worlds.status("n0").remedy is None:
        worlds.look()
    for number in range(1, 4):
        worlds.nodes["n0"].annotations = {"minivm.io/remedy": f"machine-{name}/{number}"}
        worlds.look()
    assert not worlds.treated
    assert worlds.slurm["w-0"].drained_by == "fleet", "and it gets no jobs by that"
    worlds.now += worlds.policy.machines.verify_s
    worlds.settle_in()
    assert "failed" in what(worlds)


@pytest.mark.parametrize("person", [True, False])
def test_what_is_intended_and_not_done_yet_is_given_up_with_its_cause(person: bool) -> None:
    worlds = fleet(treats(reboot=ASK))
    if person:
        worlds.wants("n0", "reboot", "new kernel")
    else:
        worlds.verdict("w-0", SICK)
    while worlds.status("n0").remedy is None:
        worlds.look()
    if person:
        worlds.wants("n0", "")
    else:
        worlds.person_resumes("w-0")
    worlds.settle_in()
    assert not worlds.treated
    assert (worlds.slurm["w-0"].drained_by, worlds.nodes["n0"].cordoned) == ("", False)


def test_who_is_called_is_told_what_it_is_for_by_the_same_key_until_that_is_noted() -> None:
    worlds = fleet(treats(reboot=HOOK, replace=HOOK))
    worlds.verdict("w-0", SICK)
    while worlds.status("n0").remedy is None:
        worlds.look()

    def call() -> CallHook:
        changes = worlds.decide(worlds.world()).changes
        (one,) = [one for one in changes if isinstance(one, CallHook)]
        notes = [note for note in changes if isinstance(note, Record) and note.name == one.machine.name]
        assert not notes, "what is noted is noted once, with what was asked for"
        return one

    asked = call()
    (name,) = [one for one in worlds.machines or {} if one.startswith("n0-")]
    assert (asked.machine.name, asked.node, asked.pool, asked.goal, asked.reason) == (name, "n0", "p", "reboot", SICK)
    assert asked.machine.status.verdict == SICK, "the evidence"
    worlds.now += 10 * 60
    worlds.memory = FleetMemory()
    assert call().key == asked.key, "as long as it is not noted, whoever goes on"
    assert describe_action(asked).startswith(f"call repair.example:443 for {asked.name} to reboot n0: gpu_lost")
    worlds.settle_in()
    worlds.now += worlds.policy.machines.verify_s
    worlds.settle_in()
    first, second = worlds.jobs
    assert first == asked.key != second, "another turn is another one"


@pytest.mark.parametrize("treatment", [ASK, JOB, HOOK])
@pytest.mark.parametrize("reason", ["x", "long " * 50])
def test_why_nobody_takes_what_is_asked_for_is_told_with_the_machine(treatment: Treatment, reason: str) -> None:
    worlds = fleet(treats(reboot=treatment))
    worlds.wants("n0", "reboot", reason)

    def call() -> list[Change]:
        return [one for one in worlds.decide(worlds.world()).changes if isinstance(one, Annotate | StartJob | CallHook)]

    while not (asked := call()):
        worlds.look()
    assert "HTTP 403" not in told(worlds, "goal")[0]
    text = f"{describe_action(asked[0])}: cannot call repair.example:443: it refuses: HTTP 403"
    worlds.memory = worlds.memory.after_pass(asked, {change_key(asked[0]): text}, worlds.now)
    for later in (0, 60):
        worlds.now += later
        (said,) = told(worlds, "goal")
        assert said.startswith("n0-")
        assert said.endswith("it refuses: HTTP 403")
    worlds.settle_in()
    assert "HTTP 403" not in told(worlds, "goal")[0], "it is taken"


def test_a_call_stands_behind_drains_and_nobody_is_called_while_a_job_runs() -> None:
    worlds = fleet(treats(reboot=HOOK))
    worlds.slurm["w-0"].jobs.add(7)
    worlds.wants("n0", "reboot", "new kernel")
    worlds.settle_in()
    assert not worlds.jobs
    worlds.jobs_end("w-0")
    while worlds.status("n0").remedy is None:
        worlds.look()
    worlds.nodes["n1"].cordoned, worlds.nodes["n1"].version = True, worlds.nodes["n1"].version + 1
    found = [type(one) for one in worlds.decide(worlds.world()).changes]
    assert found.index(Drain) < found.index(CallHook)
    assert CallHook in LAST, "nor does it stand before what is found later"


@pytest.mark.parametrize(
    "url",
    [
        "https://a.example",
        "https://a.example:8443/x?y=z",
        "http://127.0.0.1:80/x",
        "http://[::1]/x",
        "http://localhost/",
    ],
)
def test_whom_to_call_stands_in_the_policy(url: str) -> None:
    said: dict[str, object] = {"url": url, "tokenFile": "token", "caFile": "ca.crt"}
    found = parse_policy({"machines": {"remedies": {"down": {"webhook": said}}}}).machines.remedies["down"]
    assert found.webhook == Webhook(url, "token", "ca.crt")
    assert found.webhook.port in (80, 443, 8443)


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"url": ""},
        {"url": "a.example/x"},
        {"url": "ftp://a.example"},
        {"url": "https://"},
        {"url": "https://a.example:0"},
        {"url": "https://a.example:70000"},
        {"url": "https://[::1"},
        {"url": "https://a.example/x y"},
        {"url": "https://a.example/\r\nHost: b"},
        {"url": "https://a.example\\@b.example/"},
        {"url": "https://b\u00fccher.example"},
        {"url": "https://a.example/" + "x" * 2048},
        {"url": "https://name:word@a.example"},
        {"url": "https://a.example/#x"},
        {"url": "http://a.example"},
        {"url": "http://10.0.0.1"},
        {"url": "http://127.0.0.1.example"},
        {"url": "https://a.example", "tokenFile": "/mnt/minivm/secrets/slurm/jwt_hs256.key"},
        {"url": "https://a.example", "tokenFile": "../slurm/jwt_hs256.key"},
        {"url": "https://a.example", "tokenFile": ".."},
        {"url": "https://a.example", "caFile": "a/b"},
        {"url": "https://a.example", "insecure": "yes"},
        {"url": "https://a.example", "token": "x"},
    ],
)
def test_whom_it_would_be_unsafe_to_call_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"machines\.remedies\.reboot\.webhook"):
        parse_policy({"machines": {"remedies": {"reboot": {"webhook": wrong}}}})


def test_in_the_clear_only_where_that_is_asked_for() -> None:
    said = {"url": "http://a.example/x", "insecure": True}
    found = parse_policy({"machines": {"remedies": {"reboot": {"webhook": said}}}}).machines.remedies["reboot"].webhook
    assert found is not None
    assert found.where == "a.example:80"
