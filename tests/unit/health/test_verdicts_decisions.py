"""Tables for the broker's pure functions: when a verdict counts, what is posted for it, and who owns a drain."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from health.broker import broker
from health.broker.decide import (
    BrokerNode,
    OtherNode,
    Seen,
    decide,
    find_unreleased,
    names,
    observe,
    reason,
    select_raised,
)
from health.broker.step import find_widespread, is_within_rate
from health.policy import BrokerPolicy, broker_policy
from health.verdict import Class, Result, Verdict
from init.errors import ConfigError

BOOT = "boot-1"
NOW = 1000.0
POLICY = BrokerPolicy()
IDLE = BrokerNode(False, "")
COMMIT = "9f2c1ab0000000000000000000000000deadbeef"


def verdict(result: str = "problem", **changes: object) -> Verdict:
    made = Verdict(
        "gpu_ecc", Result(result), Class.REBOOT, "2 errors", subject="GPU-1", commit=COMMIT, boot_id=BOOT,
        at=NOW, expires=NOW + 600,
    )  # fmt: skip
    if "result" in changes:
        changes["result"] = Result(str(changes["result"]))
    return replace(made, **changes)  # type: ignore[arg-type]  # a test's own table


def seen(**changes: object) -> Seen:
    base = Seen(1, 0, 0.0, NOW, NOW, "reboot", "2 errors", "GPU-1", COMMIT)
    return replace(base, **changes)  # type: ignore[arg-type]  # a test's own table


@pytest.mark.parametrize(
    ("class_", "rounds", "counts"),
    [
        ("reboot", 1, True),
        ("rma", 1, True),
        ("manual", 1, True),
        ("node", 1, False),
        ("node", 2, True),
        ("user", 9, False),
    ],
)
def test_a_problem_counts_after_as_many_rounds_as_its_class_asks(class_: str, rounds: int, counts: bool) -> None:
    memory: dict[str, Seen] = {}
    for number in range(rounds):
        memory = observe(memory, [verdict(class_=class_, at=NOW + number)], POLICY, NOW + number, BOOT)
    assert bool(select_raised(memory)) is counts


def test_the_same_verdict_read_again_is_not_another_round() -> None:
    memory: dict[str, Seen] = {}
    for _ in range(5):
        memory = observe(memory, [verdict(class_="node")], POLICY, NOW, BOOT)
    assert not select_raised(memory)


def test_an_ok_between_two_problems_starts_the_count_again() -> None:
    memory: dict[str, Seen] = {}
    for number, result in enumerate(("problem", "ok", "problem")):
        memory = observe(memory, [verdict(result, class_="node", at=NOW + number)], POLICY, NOW + number, BOOT)
    assert not select_raised(memory)


@pytest.mark.parametrize(
    "changes",
    [{"boot_id": "boot-0"}, {"expires": NOW - 1}, {"applies": False}, {"result": "unknown"}],
    ids=["another boot's", "expired", "not for this node", "unknown"],
)
def test_a_verdict_that_proves_nothing_raises_nothing_and_clears_nothing(changes: dict[str, Any]) -> None:
    assert not select_raised(observe({}, [verdict(**changes)], POLICY, NOW, BOOT))
    good = verdict(**{"result": "ok", "at": NOW + 1, **changes})
    after = observe({"gpu_ecc": seen()}, [good], POLICY, NOW + 9999, BOOT)
    assert select_raised(after)


def test_a_problem_of_a_gpu_that_was_replaced_is_over() -> None:
    memory = {"gpu_ecc": seen()}
    later = NOW + 3600
    for number in range(3):
        stale = verdict(at=later, expires=later + 600)
        memory = observe(memory, [stale], POLICY, later + 61 * number, BOOT, frozenset({"GPU-2"}))
    assert not select_raised(memory)


def test_the_gpu_is_believed_to_be_there_while_not_all_answer() -> None:
    memory = observe({}, [verdict()], POLICY, NOW, BOOT, None)
    assert select_raised(memory)


def test_a_script_s_word_lapses_since_it_runs_no_more_on_a_drained_node() -> None:
    said = verdict(check="prolog.10-x", class_="node", subject="host")
    memory = observe({}, [said], replace(POLICY, raise_after={"node": 1}), NOW, BOOT)
    assert select_raised(memory)
    for number in range(3):
        memory = observe(memory, [said], POLICY, NOW + 601 + 61 * number, BOOT)
    assert not select_raised(memory)


def test_a_problem_is_over_after_good_rounds_and_the_wait_of_its_class() -> None:
    memory = {"gpu_ecc": seen()}
    times = [NOW + 10, NOW + 20, NOW + 69, NOW + 71]
    states = []
    for at in times:
        memory = observe(memory, [verdict("ok", at=at, expires=at + 600)], POLICY, at, BOOT)
        states.append(bool(select_raised(memory)))
    assert states == [True, True, True, False], "two good rounds, and 60 s since the first"


def test_a_part_to_be_replaced_is_never_over_by_itself() -> None:
    memory = {"gpu_ecc": seen(class_="rma")}
    for number in range(20):
        at = NOW + 3600 * number
        memory = observe(memory, [verdict("ok", at=at + 1, expires=at + 600)], POLICY, at + 1, BOOT)
    assert select_raised(memory)


def test_policy_can_keep_a_check_from_draining() -> None:
    policy = replace(POLICY, checks={"gpu_ecc": "never"})
    assert not select_raised(observe({}, [verdict()], policy, NOW, BOOT))


@pytest.mark.parametrize("check", ["active_checks", "failing_jobs"])
def test_a_proposing_check_drains_only_where_a_policy_says_so(check: str) -> None:
    def drains(data: dict[str, Any] | None) -> bool:
        policy = BrokerPolicy() if data is None else broker_policy(data, "policy.json")
        return bool(select_raised(observe({}, [verdict(check=check, class_=Class.MANUAL)], policy, NOW, BOOT)))

    tree = json.loads((Path(__file__).resolve().parents[3] / "scripts/lib/policy.json").read_text())
    silent: tuple[dict[str, Any], ...] = (
        {},
        {"broker": {"checks": {"gpu_ecc": "never"}}},
        {"broker": {"checks": {check: "never"}}},
    )
    assert not any(map(drains, (None, tree, *silent))), "an own policy that does not name it lets it drain nothing"
    assert drains({"broker": {"checks": {check: "drain"}}})
    with pytest.raises(ConfigError, match="wanted 'never' or 'drain', not 'always'"):
        drains({"broker": {"checks": {check: "always"}}})


def test_a_reason_names_check_class_commit_and_what_a_person_needs() -> None:
    assert reason({"gpu_ecc": seen()}) == "minivm: gpu_ecc[reboot]@9f2c1ab 2 errors"


def test_a_long_reason_keeps_every_name() -> None:
    standing = {f"check_{number}": seen(reason="x" * 300) for number in range(5)}
    text = reason(standing)
    assert len(text) < 330
    assert names(text) == {f"check_{number}@9f2c1ab" for number in range(5)}


def test_words_of_a_tool_cannot_break_out_of_a_reason() -> None:
    text = reason({"xid": seen(reason="a; gpu_x[rma]@abc\n\"quoted\" 'q' `id` | b")})
    assert names(text) == {"xid@9f2c1ab"}
    assert not set("\n\"'`|") & set(text)
    assert reason({"xid": seen(reason="\x1b]0;owned\x07 fell\u202e off")}).isprintable()


OURS = BrokerNode(True, "minivm: gpu_ecc[reboot]@9f2c1ab 2 errors")


@pytest.mark.parametrize(
    ("what", "standing", "node", "kept", "kind"),
    [
        ("a healthy node", {}, IDLE, {}, "nothing"),
        ("a new problem", {"gpu_ecc": seen()}, IDLE, {}, "drain"),
        ("drained by us for it", {"gpu_ecc": seen()}, OURS, {}, "nothing"),
        ("another one beside it", {"gpu_ecc": seen(), "xid": seen()}, OURS, {}, "update"),
        ("over", {}, OURS, {}, "clear"),
        ("not proven to be over", {}, OURS, {"gpu_ecc": "gpu_ecc[reboot]@9f2c1ab 2 errors"}, "nothing"),
        ("a person's drain", {"gpu_ecc": seen()}, BrokerNode(True, "broken fan, ask Ann"), {}, "nothing"),
        ("a person's drain, all well", {}, BrokerNode(True, "broken fan, ask Ann"), {}, "nothing"),
        ("Slurm's own drain", {"gpu_ecc": seen()}, BrokerNode(True, "Prolog error"), {}, "nothing"),
        ("init's own drain", {}, BrokerNode(True, "minivm: pod stops"), {}, "nothing"),
        ("a person who quotes us", {}, BrokerNode(True, "Ann: was minivm: gpu_ecc[reboot]@9f2c1ab"), {}, "nothing"),
    ],
)
def test_only_our_own_drain_is_changed(
    what: str, standing: dict[str, Seen], node: BrokerNode, kept: dict[str, str], kind: str
) -> None:
    assert decide(standing, node, kept).kind == kind, what


def test_what_an_earlier_pod_posted_stays_until_this_pod_s_checks_have_passed() -> None:
    kept = find_unreleased(OURS.reason, {}, (), POLICY, NOW)
    assert set(kept) == {"gpu_ecc"}
    passing = {"gpu_ecc": Seen(oks=2, first_ok=NOW - 100, last_at=NOW)}
    assert find_unreleased(OURS.reason, passing, (), POLICY, NOW) == {}
    assert find_unreleased("minivm: gpu_ecc[rma]@9f2c1ab 2 errors", passing, (), POLICY, NOW), (
        "a person must release a part"
    )


def test_a_new_problem_on_a_node_that_an_earlier_pod_drained_keeps_both() -> None:
    kept = find_unreleased(OURS.reason, {}, (), POLICY, NOW)
    act = decide({"xid": seen(reason="XID 79")}, OURS, kept)
    assert act.kind == "update"
    assert names(act.text) == {"xid@9f2c1ab", "gpu_ecc@9f2c1ab"}


@pytest.mark.parametrize(
    ("others", "total", "held"),
    [(0, 10, False), (2, 10, False), (3, 10, True), (3, 1000, False), (99, 1000, False), (100, 1000, True)],
)
def test_a_check_that_many_nodes_fail_on_one_commit_drains_no_more(others: int, total: int, held: bool) -> None:
    assert bool(find_widespread({"gpu_ecc": seen()}, [OtherNode(OURS.reason)] * others, total, POLICY, NOW)) is held


@pytest.mark.parametrize(
    "text",
    [
        "minivm: gpu_ecc[reboot]@0000000 2 errors",
        "minivm: xid[reboot]@9f2c1ab x",
        "gpu_ecc[reboot]@9f2c1ab",
        "none",
        "",
    ],
)
def test_another_commit_or_another_check_does_not_count_for_the_guard(text: str) -> None:
    assert not find_widespread({"gpu_ecc": seen()}, [OtherNode(text)] * 50, 60, POLICY, NOW)


HOUR = 3600.0
ONE_CAUSE = "GPU 0000:3b:00.0 is at 63 C, 6 are allowed"
SAME_WORDS = "GPU 0000:9c:00.0 is at 71 C, 6 are allowed"
OTHER_WORDS = "XID 48 on 0000:9c:00: an uncorrectable error"


@pytest.mark.parametrize(
    ("what", "passed", "age", "words", "held"),
    [
        ("a bad commit, just published", False, 10.0, SAME_WORDS, True),
        ("a bad commit, and a node that comes back to it later", False, 9 * HOUR, SAME_WORDS, True),
        ("a bad commit whose words differ by node", False, 10.0, OTHER_WORDS, True),
        ("a file server dies for all at once", True, 10.0, SAME_WORDS, True),
        ("the reasons were cut to names", True, 10.0, "", True),
        ("hardware that broke here, as elsewhere last week", True, 100 * HOUR, SAME_WORDS, False),
        ("hardware of several kinds within an hour", True, 10.0, OTHER_WORDS, False),
        ("a pod that starts on hardware of another kind of sickness", False, 100 * HOUR, OTHER_WORDS, False),
    ],
)
def test_one_cause_is_told_from_hardware_that_breaks_node_by_node(
    what: str, passed: bool, age: float, words: str, held: bool
) -> None:
    here = seen(reason=ONE_CAUSE, passed=COMMIT if passed else "")
    others = [OtherNode(f"minivm: gpu_ecc[reboot]@9f2c1ab {words}".strip(), NOW - age)] * 9
    assert bool(find_widespread({"gpu_ecc": here}, others, 20, POLICY, NOW)) is held, what


def test_a_check_that_passed_on_an_earlier_commit_has_not_passed_on_this_one() -> None:
    memory = observe({}, [verdict("ok", commit="0" * 40, at=NOW - 60)], POLICY, NOW - 60, BOOT)
    memory = observe(memory, [verdict()], POLICY, NOW, BOOT)
    assert memory["gpu_ecc"].passed == "0" * 40 != memory["gpu_ecc"].commit
    again = observe(memory, [verdict("ok", at=NOW + 1)], POLICY, NOW + 1, BOOT)
    again = observe(again, [verdict(at=NOW + 2)], POLICY, NOW + 2, BOOT)
    assert again["gpu_ecc"].passed == again["gpu_ecc"].commit == COMMIT


def test_sinfo_tells_since_when_other_nodes_have_had_their_reasons() -> None:
    text = (
        "w1|2026-01-02T03:04:05|minivm: xid[rma]@9f2c1ab a | b\n"
        "w2|Unknown|none\nw3|Unknown|none\nw3|Unknown|none\nw9|Unknown|x\nodd\n"
    )
    told, total = broker.parse_other_nodes(text, "w9")
    at = time.mktime((2026, 1, 2, 3, 4, 5, 0, 0, -1))
    assert told == [OtherNode("minivm: xid[rma]@9f2c1ab a | b", at), OtherNode("none"), OtherNode("none")]
    assert total == 4, "each node once, and this one"


def test_what_drains_nothing_keeps_no_node_drained() -> None:
    """A verdict that cannot drain a node cannot keep it drained.

    Otherwise a user who causes one XID 13 after another could prolong a justified drain for ever.
    """
    memory = {"gpu_ecc": seen()}
    for number in range(3):
        at = NOW + 61 * (number + 1)
        memory = observe(memory, [verdict(class_="user", at=at, expires=at + 600)], POLICY, at, BOOT)
    assert not select_raised(memory)


@pytest.mark.parametrize("with_jobs", [True, False])
def test_a_check_that_runs_with_jobs_alone_lapses_since_none_comes(with_jobs: bool) -> None:
    memory = {"gpu_ecc": seen()}
    only = frozenset({"gpu_ecc"} if with_jobs else ())
    for number in range(3):
        memory = observe(memory, [verdict()], POLICY, NOW + 601 + 61 * number, BOOT, None, only)
    assert bool(select_raised(memory)) is not with_jobs


def test_a_dead_check_s_part_of_a_reason_ends_with_it() -> None:
    text = "minivm: gone[rma]@9f2c1ab x; gpu_ecc[reboot]@9f2c1ab 2 errors"
    assert set(find_unreleased(text, {}, (), POLICY, NOW, lambda check: check == "gone")) == {"gpu_ecc"}
    standing = {"gone": seen()}
    assert set(find_unreleased(text, standing, (), POLICY, NOW, lambda check: check == "gone")) == {"gone", "gpu_ecc"}


def test_changes_are_limited_in_number() -> None:
    policy = replace(POLICY, rate_actions=2, rate_per_s=100)
    assert is_within_rate([NOW - 200, NOW - 10], policy, NOW)
    assert not is_within_rate([NOW - 20, NOW - 10], policy, NOW)


def test_the_default_tree_s_policy_is_read_and_a_typo_is_refused() -> None:
    path = Path(__file__).resolve().parents[3] / "scripts/lib/policy.json"
    data = json.loads(path.read_text())
    assert broker_policy(data, str(path)).clear_wait_s["rma"] == -1
    data["broker"]["gaurd"] = {}
    with pytest.raises(ConfigError, match="guard"):
        broker_policy(data, str(path))
