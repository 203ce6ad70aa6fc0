"""Templates that the API server refuses: the pool's condition shows the error exactly while it lasts."""

from __future__ import annotations

import pytest

from fleet import crd
from fleet.act.changes import explain_template_error
from fleet.decide.actions import CreatePod, Notice, change_key
from tests.fleet_pools_world import POOL, PoolWorlds, template

BEGIN = "mend the template of WorkerPool w, which the API server refuses: "


@pytest.fixture
def worlds() -> PoolWorlds:
    made = PoolWorlds()
    made.turns()
    return made


def why(worlds: PoolWorlds) -> str:
    return next(one.message for one in worlds.read().status.conditions if one.type == "Ready")


def test_why_a_pod_could_not_be_made_stands_in_its_pool_and_is_told_of_it(worlds: PoolWorlds) -> None:
    worlds.refuses = lambda change: isinstance(change, CreatePod)
    worlds.wants_of_it(replicas=6)
    for _ in range(3):
        worlds.look()
    assert why(worlds) == f"not ready: {POOL}-4 {POOL}-5; it is refused"
    assert Notice(POOL, "pool", "it is refused") in worlds.decide(worlds.world()).notices
    worlds.refuses = lambda change: False
    worlds.turns()
    assert why(worlds) == ""


def test_of_another_template_nothing_was_refused_and_it_is_tried_at_once(worlds: PoolWorlds) -> None:
    worlds.refuses = lambda change: isinstance(change, CreatePod)
    worlds.wants_of_it(replicas=5)
    for _ in range(5):
        worlds.look()
    worlds.refuses = lambda change: False
    assert not any(isinstance(one, CreatePod) for one in worlds.decide(worlds.world()).changes), "it waits"
    worlds.wants_of_it(template=template("2"))
    decision = worlds.decide(worlds.world())
    assert change_key(CreatePod(f"{POOL}-4", "", worlds.read())) in [change_key(one) for one in decision.changes]
    assert not any("refused" in one.text for one in decision.notices)


def test_a_mistake_of_ours_is_no_page_in_a_pools_condition(worlds: PoolWorlds) -> None:
    worlds.wants_of_it(replicas=5)
    decision = worlds.decide(worlds.world())
    (create,) = [one for one in decision.changes if isinstance(one, CreatePod)]
    text = "create: a bug of the fleet: Traceback:\n" + "  line\n" * 1000
    worlds.memory = decision.memory.after_pass([create], {change_key(create): text}, worlds.now)
    worlds.look()
    assert why(worlds) == f"not ready: {POOL}-4; create: a bug of the fleet: Traceback:"


@pytest.mark.parametrize(
    ("said", "causes", "words"),
    [
        ("", [("spec.x[0].image", "Required value")], "spec.template.spec.x[0].image: Required value"),
        ("", [("metadata.annotations", "No")], "spec.template.metadata.annotations: No"),
        ("", [("metadata.name", "No")], "metadata.name: No"),
        ("", [("spec.hostname", "No")], "spec.hostname: No"),
        ("", [("", "policy 'x' says no")], "policy 'x' says no"),
        ("", [("spec.a", "1"), ("b", "2"), ("spec.c", "3")], "spec.template.spec.a: 1; b: 2; and 1 more"),
        (
            'Pod in version "v1" cannot be handled as a Pod: json: cannot unmarshal string into Go struct field '
            "ContainerPort.spec.containers.ports.containerPort of type int32",
            [],
            'spec.template.spec.containers.ports.containerPort: Pod in version "v1" cannot be handled as a Pod: json: '
            "cannot unmarshal string into Go struct field ContainerPort.spec.containers.ports.containerPort of type "
            "int32",
        ),
        ("the body is no JSON", [], "the body is no JSON"),
        ("", [], ""),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_by_the_pools_own_field(said: str, causes: list[tuple[str, str]], words: str) -> None:
    assert explain_template_error("w", said, causes) == BEGIN + words


def test_however_much_is_wrong_it_has_its_place_in_a_condition_what_was_found_and_what_is_expected() -> None:
    causes = [
        (f"spec.{'a' * 5000}[{number}].port", f"Invalid value: 7{'0' * 90000}: must be less") for number in range(9999)
    ]
    said = explain_template_error("w" * 40, "x" * 10**6, causes)
    first = said.partition(";")[0]
    assert len(said) < crd.MOST_MESSAGE and len(first) < 600
    assert "[0].port" in first and "Invalid value: 70" in first and first.endswith("must be less")
    assert len(explain_template_error("w", "v1.A.B:" * 10**5, [])) < crd.MOST_MESSAGE
