"""A rebooted machine takes jobs again only after a deep check that began after the reboot has passed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.decide.actions import FleetMemory
from fleet.decide.remediation import find_disproof
from fleet.policy import Machines, Policy, Treatment, parse_policy
from fleet.world.kubernetes import KubernetesView
from fleet.world.machine import HistoryEntry, MachineStatus
from init.errors import ConfigError
from tests.fleet_world import OURS, Worlds

ASK = Treatment(annotate={"reboot.example/please": "now"})
ACT = Policy(machines=Machines(mode="act", remedies={"reboot": ASK, "replace": ASK}))
SICK = "gpu_lost[reboot]@9f2c001 fell off the bus"
BAD = ("False", 4, "dcgm_diag[manual]@9f2c001 memory: fail")
SILENT = ("", 0, "")
GPU = "GPU-041a6be2-04b9-910d-91ab-94883a0ad281"


def fleet(rules: Policy = ACT, size: int = 3) -> Worlds:
    worlds = Worlds(size, rules, "w-")
    worlds.machines = {}
    worlds.settle_in()
    return worlds


def asked(rules: Policy = ACT, *, by: str = "person", says: tuple[str, int, str] = SILENT, size: int = 3) -> Worlds:
    """Return a fleet with one requested reboot, by a person or by a verdict."""
    worlds = fleet(rules, size)
    worlds.deep_says = says
    if by == "person":
        worlds.wants("n0", "reboot", "new kernel")
    else:
        worlds.verdict("w-0", SICK)
    worlds.settle_in()
    assert len(worlds.treated) == 1
    return worlds


def reboots(worlds: Worlds, node: str = "n0") -> None:
    worlds.boots(node)
    broker(worlds, f"w-{node[1:]}")
    worlds.settle_in()


def broker(worlds: Worlds, name: str) -> None:
    """Act as the broker: its boot checks pass and it lifts its own drain, while no other drain exists."""
    if worlds.slurm[name].reason == f"minivm: {SICK}":
        worlds.person_resumes(name)


def what(worlds: Worlds) -> list[str]:
    return [one.what for one in worlds.status("n0").history]


def kept_free(worlds: Worlds) -> bool:
    return bool(worlds.slurm["w-0"].drained_by) and worlds.nodes["n0"].cordoned


def is_back(worlds: Worlds) -> bool:
    return not worlds.slurm["w-0"].drained_by and not worlds.nodes["n0"].cordoned


# status, message after the boot: "BOOT HOW-MANY WORDS"
NOW, BEFORE = "n0-2", "n0-1"
WORDS = [
    ("passed", ("True", f"{NOW} 4 dcgm_diag"), False, "back", ""),
    ("passed, of as many GPUs as it had", ("True", f"{NOW} 4 dcgm_diag"), True, "back", ""),
    ("there was nothing to check", ("True", f"{NOW} 0"), False, "back", ""),
    ("nothing of the GPUs that it had", ("True", f"{NOW} 0"), True, "waits", "has checked nothing deeply"),
    ("passed in the boot before", ("True", f"{BEFORE} 4 dcgm_diag"), False, "waits", "has reported no deep check"),
    ("failed in the boot before", ("False", f"{BEFORE} 4 x"), False, "waits", "has reported no deep check"),
    ("never told", None, False, "waits", "minivm health --run --when deep"),
    ("runs", ("Unknown", f"{NOW} 0"), False, "waits", "has no result"),
    ("could not say", ("Unknown", f"{NOW} 3 dcgm_diag: no dcgmi"), False, "waits", "dcgm_diag: no dcgmi"),
    ("another form", ("True", NOW), False, "waits", "has reported no deep check"),
    ("no boot", ("True", " 4 x"), False, "waits", "has reported no deep check"),
    ("another status", ("Yes", f"{NOW} 4 x"), False, "waits", "has no result"),
    ("failed", ("False", f"{NOW} 4 {BAD[2]}"), False, "failed", "memory: fail"),
    ("failed, whatever it is called", ("False", f"{NOW} 1 \x1b[2J\nbad"), False, "failed", "bad"),
]


@pytest.mark.parametrize(("name", "said", "gpus", "ends", "words"), WORDS, ids=[one[0] for one in WORDS])
def test_what_a_deep_check_says_of_a_machine_that_has_booted(
    name: str, said: tuple[str, str] | None, gpus: bool, ends: str, words: str
) -> None:
    worlds = fleet()
    worlds.pods["w-0"].gpus = (GPU,) if gpus else ()
    worlds.settle_in()
    worlds.deep_says = SILENT
    worlds.wants("n0", "reboot", "new kernel")
    worlds.settle_in()
    worlds.boots("n0")
    worlds.pods["w-0"].deep = said
    worlds.settle_in()
    assert (is_back(worlds), kept_free(worlds)) == (ends == "back", ends != "back")
    told = [one.text for one in worlds.status("n0").history]
    assert words in f"{worlds.status('n0').why} {told}"
    assert ("failed" in what(worlds)) == (ends == "failed")
    assert ("rebooted" in what(worlds)) == (ends == "back")
    assert worlds.status("n0").why.isprintable()


@pytest.mark.parametrize(
    ("other", "ends"),
    [
        (None, "waits"),
        (("Unknown", f"{NOW} 1 x"), "waits"),
        (("False", f"{NOW} 1 x"), "failed"),
        (("True", f"{NOW} 1"), "back"),
    ],
)
def test_of_several_workers_on_a_machine_each_is_to_say_so(other: tuple[str, str] | None, ends: str) -> None:
    worlds = fleet()
    worlds.pods["w-1"].node = "n0"
    worlds.settle_in()
    worlds.deep_says = SILENT
    worlds.wants("n0", "reboot", "new kernel")
    worlds.settle_in()
    worlds.boots("n0")
    worlds.pods["w-0"].deep, worlds.pods["w-1"].deep = ("True", f"{NOW} 4 dcgm_diag"), other
    worlds.settle_in()
    assert (is_back(worlds), "failed" in what(worlds)) == (ends == "back", ends == "failed")


@pytest.mark.parametrize(
    ("happened", "stands"),
    [
        ([], False),
        ([("failed", "reboot")], False),
        ([("failed", "deep check: x")], True),
        ([("failed", "deep check: x"), ("reboot", ""), ("withdrawn", "reboot"), ("well", ""), ("node", "n0")], True),
        ([("failed", "deep check: x"), ("rebooted", "")], False),
        ([("failed", "deep check: x"), ("replaced", "")], False),
        ([("failed", "deep check: x"), ("forgiven", "")], False),
        ([("failed", "deep check: x"), ("reboot", "deep check: y"), ("failed", "reboot")], True),
        ([("rebooted", ""), ("failed", "deep check: x")], True),
    ],
)
def test_what_was_found_stands_until_something_has_ended_it(happened: list[tuple[str, str]], stands: bool) -> None:
    status = MachineStatus(history=tuple(HistoryEntry(number, *one) for number, one in enumerate(happened)))
    assert find_disproof(status, None) == ("deep check: x" if stands else "")


@pytest.mark.parametrize("by", ["person", "policy"])
def test_where_nobody_says_so_it_stays_and_is_not_rebooted_for_that_and_a_check_by_hand_or_up_ends_it(by: str) -> None:
    for ends in ("check", "up"):
        worlds = asked(by=by)
        reboots(worlds)
        for _ in range(5):
            worlds.now += worlds.policy.machines.verify_s
            worlds.settle_in()
            assert kept_free(worlds)
        assert len(worlds.treated) == 1, "that nobody knows is no reason to reboot it again"
        if ends == "check":
            worlds.deep_says = ("True", 1, "dcgm_diag")
            worlds.checks("w-0")
        else:
            worlds.wants("n0", "up")
        worlds.settle_in()
        assert is_back(worlds), ends


def test_a_persons_reboot_that_a_deep_check_disproves_is_tried_again_and_then_left_to_him() -> None:
    worlds = asked(says=BAD)
    before = worlds.status("n0").repeats
    for number in (1, 2):
        assert len(worlds.treated) == number
        reboots(worlds)
        assert kept_free(worlds)
        assert worlds.status("n0").verdict == BAD[2], "the evidence"
        assert worlds.status("n0").ill
        assert worlds.status("n0").repeats == before + number
    assert len(worlds.treated) == worlds.policy.machines.attempts
    assert "an operator must look at it" in worlds.status("n0").why
    worlds.wants("n0", "up")
    worlds.settle_in()
    assert is_back(worlds)
    assert worlds.status("n0").repeats == 0, "what was counted is forgiven"


@pytest.mark.parametrize(("says", "times"), [(BAD, 2), (("False", 4, "dcgm_diag[rma]@9f2c001 memory: fail"), 1)])
def test_a_verdicts_reboot_that_a_deep_check_disproves_becomes_a_replacement(
    says: tuple[str, int, str], times: int
) -> None:
    worlds = asked(by="policy", says=says)
    for _ in range(times):
        reboots(worlds)
        assert kept_free(worlds), "never taken back in between"
    status = worlds.status("n0")
    assert (status.goal, len(worlds.treated)) == ("replace", times + 1)
    assert f"rebooted {times} times" in status.why
    assert says[2] in status.why
    assert worlds.nodes["n0"].annotations["minivm.io/remedy-reason"].endswith(says[2]), "the evidence is attached"
    worlds.later()
    worlds.settle_in()
    assert kept_free(worlds)


def test_disproved_and_proven_by_hand_it_comes_back() -> None:
    worlds = asked(replace(ACT, machines=replace(ACT.machines, attempts=1)), by="policy", says=BAD)
    reboots(worlds)
    assert (worlds.status("n0").goal, kept_free(worlds)) == ("replace", True)
    worlds.deep_says = ("True", 4, "dcgm_diag")
    worlds.checks("w-0")
    worlds.settle_in()
    assert is_back(worlds)
    assert not worlds.status("n0").ill


def test_a_deep_check_that_fails_on_many_machines_at_one_commit_has_none_of_them_replaced() -> None:
    rules = Policy(machines=Machines(mode="act", at_once=2, remedies={"reboot": ASK, "replace": ASK}))
    worlds = fleet(rules, 6)
    worlds.deep_says = BAD
    for node in ("n0", "n1"):
        worlds.verdict(f"w-{node[1:]}", SICK)
        worlds.settle_in()
        reboots(worlds, node)
    for _ in range(4):
        for node in ("n0", "n1"):
            reboots(worlds, node)
    assert {worlds.status(node).goal for node in ("n0", "n1")} == {"drain"}
    assert all(worlds.slurm[name].drained_by for name in ("w-0", "w-1"))
    told = [one.text for one in worlds.decide(worlds.world()).notices if one.kind == "common"]
    assert told == [
        "many machines report dcgm_diag@9f2c001, so the check is probably wrong: the fleet treats none for it"
    ]


def test_the_drain_asks_for_it_before_anything_is_done() -> None:
    worlds = fleet()
    worlds.wants("n0", "reboot", "new kernel")
    while not worlds.treated:
        assert worlds.look()
        if worlds.status("n0").remedy:
            assert worlds.slurm["w-0"].reason.startswith("minivm: fleet: goal+proof: reboot new kernel")


@pytest.mark.parametrize("by", ["person", "policy"])
def test_a_pod_that_comes_after_the_boot_checks_too_and_what_the_last_one_said_goes_with_it(by: str) -> None:
    worlds = asked(by=by, says=("True", 4, "dcgm_diag"))
    worlds.deep_says = SILENT
    worlds.boots("n0")
    broker(worlds, "w-0")
    worlds.settle_in()
    assert kept_free(worlds)
    worlds.deep_says = ("True", 4, "dcgm_diag")
    worlds.replace("w-0")
    worlds.pods["w-0"].ready = True
    worlds.settle_in()
    assert is_back(worlds)


def test_one_without_a_worker_gets_one_and_that_is_drained_until_it_has_checked() -> None:
    worlds = asked()
    worlds.pod_goes("w-0")
    worlds.boots("n0")
    worlds.settle_in()
    assert not worlds.nodes["n0"].cordoned, "else none could come"
    assert "waits for a worker" in worlds.status("n0").why
    assert "rebooted" not in what(worlds)
    worlds.replace("w-0", "n0")
    worlds.pods["w-0"].ready = True
    worlds.settle_in()
    assert kept_free(worlds)
    worlds.deep_says = ("True", 4, "dcgm_diag")
    worlds.checks("w-0")
    worlds.settle_in()
    assert is_back(worlds)


def exchanged(worlds: Worlds) -> None:
    """Put other hardware behind the same Node name, with another pod on it."""
    worlds.pod_goes("w-0")
    worlds.nodes["n0"].uid, worlds.nodes["n0"].annotations, worlds.nodes["n0"].cordoned = "other", {}, False
    worlds.nodes["n0"].labels.clear()
    worlds.nodes["n0"].boot += 1
    worlds.nodes["n0"].version += 1
    worlds.now += 50
    worlds.replace("w-0", "n0")
    worlds.pods["w-0"].ready = True
    worlds.settle_in()


def test_what_replaces_a_machine_gets_no_jobs_while_its_pod_checks_it() -> None:
    for ends in ("check", "up"):
        worlds = fleet()
        worlds.deep_says = SILENT
        worlds.wants("n0", "replace", "ecc")
        worlds.settle_in()
        exchanged(worlds)
        assert worlds.slurm["w-0"].drained_by == "fleet"
        assert "has reported no deep check" in worlds.status("n0").why
        worlds.pods["w-0"].gpus, worlds.deep_says = (GPU,), ("True", 0, "")
        worlds.settle_in()
        worlds.checks("w-0")
        worlds.settle_in()
        assert "has checked nothing deeply, although the machine has GPUs" in worlds.status("n0").why
        worlds.deep_says = BAD
        worlds.checks("w-0")
        worlds.settle_in()
        assert worlds.slurm["w-0"].drained_by == "fleet"
        if ends == "check":
            worlds.deep_says = ("True", 4, "dcgm_diag")
            worlds.checks("w-0")
        else:
            worlds.wants("n0", "up")
        worlds.settle_in()
        assert is_back(worlds)
        assert worlds.status("n0").why == ""


@pytest.mark.parametrize("says", [SILENT, BAD, ("True", 4, "dcgm_diag")])
def test_other_hardware_below_a_node_and_a_pod_that_stay_is_proven_too(says: tuple[str, int, str]) -> None:
    """Replaced hardware needs a deep check too when its Node and pod objects stay.

    The Node is never deleted and the pod restarts in place, so the pod is older than the drain.
    """
    worlds = fleet()
    worlds.pods["w-0"].gpus, worlds.deep_says = (GPU,), says
    worlds.settle_in()
    worlds.wants("n0", "replace", "ecc")
    worlds.settle_in()
    assert worlds.slurm["w-0"].since > worlds.pods["w-0"].created
    worlds.boots("n0")
    worlds.pods["w-0"].gpus = (f"{GPU[:-1]}2",)
    worlds.settle_in()
    passed = says[0] == "True"
    assert (is_back(worlds), worlds.slurm["w-0"].drained_by == "fleet") == (passed, not passed)
    worlds.deep_says = ("True", 4, "dcgm_diag")
    worlds.checks("w-0")
    worlds.settle_in()
    assert is_back(worlds)


def test_what_else_came_and_went_while_it_was_replaced_does_not_take_the_proof_from_it() -> None:
    """Other causes that come and go during a replacement do not discard the passed deep check.

    They rewrite the drain's reason, so that the drain is younger than the pod.
    """
    worlds = fleet(replace(ACT, taints=("node.example/setup",)))
    worlds.pods["w-0"].gpus, worlds.deep_says = (GPU,), SILENT
    worlds.settle_in()
    worlds.wants("n0", "replace", "ecc")
    worlds.settle_in()
    worlds.now += 50
    worlds.replace("w-0", "n0")
    for taint in ("node.example/setup", None):
        worlds.now += 50
        worlds.taint("n0", taint)
        worlds.settle_in()
    assert worlds.slurm["w-0"].since > worlds.pods["w-0"].created
    worlds.now += 50
    worlds.boots("n0")
    worlds.pods["w-0"].ready, worlds.pods["w-0"].gpus = True, (f"{GPU[:-1]}2",)
    worlds.settle_in()
    assert worlds.slurm["w-0"].drained_by == "fleet"


@pytest.mark.parametrize("goal", ["reboot", "replace"])
def test_a_goal_that_is_withdrawn_before_anything_was_done_asks_for_no_proof(goal: str) -> None:
    worlds = fleet()
    worlds.deep_says = SILENT
    worlds.slurm["w-0"].jobs.add(7)
    worlds.wants("n0", goal, "new kernel")
    worlds.settle_in()
    assert "proof" in worlds.slurm["w-0"].reason
    worlds.wants("n0", "")
    worlds.settle_in()
    assert is_back(worlds)


def test_one_whose_pod_cannot_be_read_is_not_uncordoned_for_another() -> None:
    worlds = asked()
    worlds.pod_goes("w-0")
    worlds.boots("n0")
    for _ in range(3):
        world = worlds.world()
        assert isinstance(world.kubernetes, KubernetesView)
        hides = replace(world.kubernetes, unread={"Pod/w-0": "x"}, unread_pods_nodes={"Pod/w-0": "n0"})
        worlds.look(world=replace(world, kubernetes=hides))
    assert worlds.nodes["n0"].cordoned


def test_a_pod_that_cannot_be_read_has_not_said_that_it_has_passed() -> None:
    worlds = asked(says=("True", 4, "dcgm_diag"))
    worlds.boots("n0")
    for _ in range(3):
        world = worlds.world()
        assert isinstance(world.kubernetes, KubernetesView)
        hides = replace(world.kubernetes, unread={"Pod/x": "x"}, unread_pods_nodes={"Pod/x": "n0"})
        worlds.look(world=replace(world, kubernetes=hides))
    assert kept_free(worlds)
    assert "cannot be read" in worlds.status("n0").why
    worlds.settle_in()
    assert is_back(worlds)


def test_a_persons_cordon_of_one_without_a_worker_stays() -> None:
    worlds = asked()
    worlds.pod_goes("w-0")
    worlds.nodes["n0"].labels.pop(OURS)
    worlds.boots("n0")
    worlds.settle_in()
    assert worlds.nodes["n0"].cordoned


def test_where_the_policy_says_so_that_no_verdict_stands_is_enough() -> None:
    worlds = asked(replace(ACT, machines=replace(ACT.machines, proof="verdict")))
    assert worlds.slurm["w-0"].reason == "minivm: fleet: goal: reboot new kernel", "nobody is asked for a check"
    worlds.boots("n0")
    worlds.pods["w-0"].deep = ("False", f"{NOW} 4 {BAD[2]}")
    worlds.settle_in()
    assert is_back(worlds)


def test_what_is_asked_for_as_proof_is_read_strictly() -> None:
    assert parse_policy({}).machines.proof == "deep"
    assert parse_policy({"machines": {"proof": "verdict"}}).machines.proof == "verdict"
    for wrong in ("Deep", 1, ["deep"]):
        with pytest.raises(ConfigError, match="proof"):
            parse_policy({"machines": {"proof": wrong}})


def test_it_ends_the_same_killed_after_any_change_also_where_a_check_fails_once() -> None:
    def story(cut: int) -> tuple[object, int, int]:
        worlds = fleet()
        worlds.done.clear()
        left = cut

        def on() -> None:
            nonlocal left
            for _ in range(40):
                decision = worlds.decide(worlds.world())
                worlds.memory = decision.memory
                for change in decision.changes:
                    if left == 0:
                        left, worlds.memory = -1, FleetMemory()
                        break
                    left -= 1
                    worlds.perform(change)
                else:
                    if not decision.changes:
                        return
            raise AssertionError("it never ends")

        worlds.deep_says = BAD
        worlds.verdict("w-0", SICK)
        on()
        worlds.boots("n0")
        broker(worlds, "w-0")
        on()
        assert kept_free(worlds)
        worlds.deep_says = ("True", 4, "dcgm_diag")
        worlds.boots("n0")
        on()
        assert is_back(worlds)
        return worlds.end(), len(worlds.treated), len(worlds.done)

    wanted, times, changes = story(-1)
    assert times == 2
    for cut in range(changes + 1):
        assert story(cut)[:2] == (wanted, 2), f"cut after {cut} of {changes}"


STEPS = st.lists(
    st.sampled_from(
        ["boots", "passes", "fails", "silent", "asks", "up", "sick", "lifted", "pod", "time", "cut", "look"]
    ),
    max_size=25,
)


@settings(max_examples=200, deadline=None)
@given(STEPS, st.sampled_from(["act", "propose"]))
def test_whatever_happens_none_is_taken_back_unproven_and_it_settles(steps: list[str], mode: str) -> None:
    """A machine is noted as rebooted, and returned to service, only with a passed deep check of its current boot."""
    worlds = fleet(replace(ACT, machines=replace(ACT.machines, mode=mode)), 2)
    noted = 0

    def holds() -> None:
        nonlocal noted
        status = worlds.status("n0")
        number = sum(one.what == "rebooted" for one in status.history)
        if number > noted:
            deep = worlds.pods["w-0"].deep
            assert deep is not None and deep[0] == "True" and deep[1].startswith(f"n0-{worlds.nodes['n0'].boot} ")
        noted = number

    for step in steps:
        match step:
            case "boots":
                worlds.jobs_end("w-0")
                worlds.boots("n0")
            case "passes" | "fails" | "silent":
                worlds.deep_says = {"passes": ("True", 4, "dcgm_diag"), "fails": BAD, "silent": SILENT}[step]
            case "asks" | "up":
                worlds.wants("n0", "reboot" if step == "asks" else "up", "new kernel")
            case "sick":
                if not worlds.slurm["w-0"].drained_by:
                    worlds.verdict("w-0", SICK)
            case "lifted":
                broker(worlds, "w-0")
            case "pod":
                worlds.replace("w-0")
                worlds.pods["w-0"].ready = True
            case "time":
                worlds.now += 2000
            case "cut":
                worlds.look(cut=1)
            case "look":
                worlds.look()
        holds()
    worlds.deep_says = ("True", 4, "dcgm_diag")
    broker(worlds, "w-0")
    worlds.settle_in(20)
    holds()
    worlds.wants("n0", "up")
    worlds.settle_in(20)
    assert is_back(worlds)
