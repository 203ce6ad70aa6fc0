"""Strict parsing of answers of the API server and slurmrestd.

An object that does not match the schema is rejected as a whole and reported; all others are read.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet import FleetError
from fleet.policy import Policy, parse_policy, parse_policy_text
from fleet.world import kubernetes, slurm
from fleet.world.fields import iterate_items
from init.errors import ConfigError
from tests import fleet_world

NODE = {"metadata": {"name": "n0", "uid": "u"}, "spec": {}, "status": {}}
# Recorded from slurmrestd of Slurm 24.11, without the fields that the fleet does not read.
ANSWER = {
    "name": "w1",
    "state": ["IDLE", "DRAIN", "NOT_RESPONDING", "DYNAMIC_NORM"],
    "reason": "minivm: fleet: cordon: fan 3",
    "reason_set_by_user": "slurm",
    "comment": "minivm: fleet: held 1 cordon",
    "address": "172.19.0.3",
    "alloc_cpus": 0,
    "slurmd_start_time": {"set": True, "infinite": False, "number": 1795337384},
}


def test_a_node_of_slurm_is_what_its_clients_know_too() -> None:
    node = slurm.slurm_node(ANSWER)
    assert (node.drained, node.down, node.by_fleet) == (True, False, True)
    assert not node.record.responds
    assert node.record.dynamic
    assert node.record.held_by_others, "the init leaves it to the fleet"
    assert node.mark is not None
    assert node.mark.times == 1


@pytest.mark.parametrize(
    "broken",
    [
        {"state": []},
        {"state": "IDLE"},
        {"state": [None]},
        {"name": ""},
        {"name": 7},
        {"reason": ["x"]},
        {"comment": {}},
        {"alloc_cpus": "2"},
        {"alloc_cpus": True},
        {"slurmd_start_time": {"set": True, "number": "x"}},
        {"reason_changed_at": {"set": True, "number": 10**400}},
    ],
)
def test_a_broken_node_of_slurm_is_told_and_the_others_are_read(broken: dict[str, object]) -> None:
    found = slurm.parse_slurm([{**ANSWER, "name": "bad", **broken}, ANSWER])
    assert list(found.nodes) == ["w1"]
    assert len(found.unread) == 1


def test_jobs_hold_the_nodes_of_their_list() -> None:
    jobs: list[dict[str, object]] = [
        {"job_id": 1, "job_state": ["RUNNING"], "nodes": "w[1-2],x"},
        {"job_id": 2, "job_state": ["PENDING"], "nodes": ""},
        {"job_id": 3, "job_state": ["COMPLETED"], "nodes": "w1"},
        {"job_id": 4, "job_state": ["COMPLETED", "COMPLETING"], "nodes": "w1"},
        {"job_id": 5, "job_state": ["SUSPENDED"], "nodes": "w2"},
    ]
    found = slurm.parse_slurm([], jobs)
    assert (found.holding("w1"), found.holding("w2"), found.holding("x")) == (("1", "4"), ("1", "5"), ("1",))
    assert (
        slurm.parse_slurm([], [*jobs, {"job_id": "?", "job_state": ["RUNNING"], "nodes": "w9"}]).holding("w1") is None
    )
    assert slurm.parse_slurm([], None).holding("w1") is None, "not asked is not none"


@pytest.mark.parametrize(
    "broken",
    [
        {"metadata": {"name": "n1"}},
        {"metadata": {"uid": "u"}},
        {"metadata": []},
        {"spec": {"unschedulable": "true"}},
        {"spec": {"taints": {}}},
        {"spec": {"taints": [{}]}},
        {"status": {"conditions": [{"type": "Ready"}]}},
        {"status": {"conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": "yesterday"}]}},
        {"metadata": {"name": "n1", "uid": "u", "annotations": {"a": 1}}},
    ],
)
def test_a_broken_object_is_told_and_the_others_are_read(broken: dict[str, object]) -> None:
    other = {**NODE, "metadata": {"name": "n2", "uid": "u"}}
    found = fleet_world.kubernetes([{**NODE, **broken}, other], [])
    assert list(found.nodes) == ["n2"]
    assert len(found.unread) == 1


JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
SHAPES = st.fixed_dictionaries({}, optional=dict.fromkeys(("metadata", "spec", "status", "state", "name"), JSON))


@given(st.lists(SHAPES, max_size=4))
def test_whatever_is_answered_it_is_read_or_told(answers: list[dict[str, Any]]) -> None:
    fleet_world.kubernetes(answers, answers, answers)
    slurm.parse_slurm(answers, answers)


def test_a_policy_says_only_what_it_knows() -> None:
    assert parse_policy({}) == Policy()
    found = parse_policy_text('{"conditions": ["Sick"], "notReady": "2m", "share": 0.5, "going": [], "cordon": true}')
    assert found == Policy(conditions=("Sick",), not_ready_s=120.0, share=0.5, going=(), cordon=True)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"condition": []}', "did you mean conditions?"),
        ('{"fencing": "acts"}', "'acts' is not one of off, propose, act"),
        ('{"share": 2}', "wanted between 0 and 1"),
        ('{"changes": 0}', "wanted at least 1"),
        ("[]", "wanted a mapping"),
        ("{", "it is not JSON"),
        ("[" * 100_000, "it is not JSON"),
    ],
)
def test_a_wrong_policy_is_refused_with_its_field(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match="fleet's policy") as told:
        parse_policy_text(text, "policy.json")
    assert words in str(told.value)
    assert "policy.json" in str(told.value)


def test_what_is_refused_says_where() -> None:
    with pytest.raises(FleetError, match=r"cannot read spec\.unschedulable: wanted true or false, not str"):
        kubernetes.parse_node({**NODE, "spec": {"unschedulable": "true"}}, "lab.slurm")


def test_a_mark_says_whose_it_is_and_fits_a_label() -> None:
    assert kubernetes.make_fleet_mark("lab", "slurm") == "lab.slurm"
    long = {kubernetes.make_fleet_mark("n" * 40, release * 30) for release in "ab"}
    assert len(long) == 2 and {len(mark) for mark in long} == {63}


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["nodes", "jobs", "errors", ""]), VALUES), st.sampled_from([None, 2]))
def test_a_list_that_is_read_item_by_item_is_the_same_list(said: dict[str, Any], indent: int | None) -> None:
    rest: dict[str, object] = {}
    found = list(iterate_items(f" {json.dumps(said, indent=indent)}\n", "nodes", rest))
    if isinstance(said.get("nodes"), list):
        assert found == said["nodes"]
        said = {**said, "nodes": None}
    else:
        assert not found
    assert rest == said


@given(st.dictionaries(st.sampled_from(["nodes", "jobs"]), VALUES, min_size=1), st.data())
def test_an_answer_that_is_cut_or_changed_is_none(said: dict[str, Any], data: st.DataObject) -> None:
    text = json.dumps(said)
    cut = data.draw(st.integers(0, len(text) - 1))
    for broken in (text[:cut], text[:cut] + "\x00" + text[cut:], text + "]"):
        with pytest.raises(ValueError):
            list(iterate_items(broken, "nodes", {}))
