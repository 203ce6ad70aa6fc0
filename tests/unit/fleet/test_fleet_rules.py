"""CEL rules of the custom resources, evaluated as API servers from 1.25 on do, with defaults filled in.

The fleet itself refuses whatever the rules refuse, for servers that do not know CEL rules.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import jsonschema  # type: ignore[import-untyped]  # none are there
import pytest
from cel_expr_python import cel  # type: ignore[import-untyped]  # none are there

from fleet import FleetError, crd
from fleet.world.machine import parse_machine
from fleet.world.worker_pool import parse_pool
from tests.fleet_pools_world import template

Object = dict[str, Any]
SELF = cel.NewEnv(variables={"self": cel.Type.DYN})
BASE: Object = {"mode": "fixed", "replicas": 2, "template": template("1")}
PER_NODE: Object = {"mode": "perNode", "nodeSelector": {"gpu": "yes"}, "template": template("1")}
ELASTIC: Object = {"mode": "elastic", "elastic": {"min": 0, "max": 4}, "template": template("1")}


def without(spec: Object, key: str) -> Object:
    return {name: value for name, value in spec.items() if name != key}


def update(**said: object) -> Object:
    return {**BASE, "update": said}


# Each has a word of the rule that refuses it; "" when the pool is valid.
POOLS: list[tuple[str, Object, str]] = [
    ("gpu", BASE, ""),
    ("gpu", {**BASE, "replicas": 0}, ""),
    ("gpu", PER_NODE, ""),
    ("gpu", ELASTIC, ""),
    ("gpu", {**BASE, "nodeSelector": {"gpu": "yes"}, "elastic": {"min": 0, "max": 1}}, ""),
    ("gpu", {**ELASTIC, "elastic": {"min": 3, "max": 3}}, ""),
    ("gpu", update(when="deadline", deadlineSeconds=60), ""),
    ("gpu", update(when="idle"), ""),
    ("gpu", update(when="now", maxUnavailable=0), ""),
    ("gpu", update(), ""),
    ("g" * 40, BASE, ""),
    ("gpu", without(BASE, "replicas"), ""),
    ("gpu", without(PER_NODE, "nodeSelector"), "needs nodeSelector"),
    ("gpu", {**without(PER_NODE, "nodeSelector"), "replicas": 2}, "needs nodeSelector"),
    ("gpu", without(ELASTIC, "elastic"), "needs elastic"),
    ("gpu", {**ELASTIC, "elastic": {"min": 5, "max": 4}}, "must not exceed"),
    ("gpu", update(when="deadline"), "deadlineSeconds"),
    ("gpu", update(when="idle", deadlineSeconds=60), "deadlineSeconds"),
    ("gpu", update(when="now", deadlineSeconds=60), "deadlineSeconds"),
    ("gpu", update(deadlineSeconds=60), "deadlineSeconds"),
    ("g" * 41, BASE, "DNS label"),
    ("a.b", BASE, "DNS label"),
    ("9gpu", BASE, "DNS label"),
    ("gpu-", BASE, "DNS label"),
]
MACHINES: list[tuple[Object, str]] = [
    ({}, ""),
    ({"goal": "up"}, ""),
    ({"goal": "drain", "reason": "fan 3"}, ""),
    *(({"goal": goal}, "needs a reason") for goal in crd.GOALS if goal != "up"),
    ({"goal": "reboot", "reason": ""}, "needs a reason"),
]


def schema_of(definition: Any) -> Object:
    found: Object = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return found


def filled(schema: Object, value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    known: Object = schema.get("properties", {})
    usual = {key: one["default"] for key, one in known.items() if "default" in one}
    return {key: filled(known.get(key, {}), one) for key, one in {**usual, **copy.deepcopy(value)}.items()}


def broken(schema: Object, value: Any) -> Iterator[str]:
    """Yield the messages of the rules that refuse the value, here and in nested fields."""
    for rule in schema.get("x-kubernetes-validations", ()):
        said = SELF.compile(rule["rule"]).eval(data={"self": value}).plain_value()
        assert isinstance(said, bool), f"{rule['rule']}: {said}"
        yield from [] if said else [rule["message"]]
    for key, one in schema.get("properties", {}).items():
        if isinstance(value, dict) and key in value:
            yield from broken(one, value[key])


def refused(schema: Object, item: Object) -> list[str]:
    whole = filled(schema, item)
    assert not list(jsonschema.Draft202012Validator(schema).iter_errors(whole)), "it is the schema that refuses it"
    return list(broken(schema, whole))


@pytest.mark.parametrize(("name", "spec", "word"), POOLS)
def test_what_the_rules_refuse_of_a_pool_the_fleet_refuses_too(name: str, spec: Object, word: str) -> None:
    item = {"metadata": {"name": name, "uid": "u"}, "spec": spec}
    said = refused(schema_of(crd.pool_definition()), item)
    assert len(said) == bool(word) and all(word in one for one in said), "by that rule, and by no other"
    # The item as a server before 1.25 stores it, and with the defaults that a newer server fills in.
    for one in (item, filled(schema_of(crd.pool_definition()), item)):
        if word:
            with pytest.raises(FleetError, match="read "):
                parse_pool(one)
        else:
            parse_pool(one)


@pytest.mark.parametrize(("spec", "word"), MACHINES)
def test_a_goal_without_words_is_refused_by_its_rule_and_heeded_where_there_are_none(spec: Object, word: str) -> None:
    item: Object = {"metadata": {"name": "m", "uid": "u"}, "spec": spec}
    said = refused(schema_of(crd.definition()), item)
    assert len(said) == bool(word) and all(word in one for one in said)
    assert parse_machine(item).goal == spec.get("goal", ""), (
        "a machine that is to be kept from jobs is, also without words"
    )


def test_every_rule_refuses_something_here() -> None:
    def rules(schema: Object) -> Iterator[str]:
        yield from (one["message"] for one in schema.get("x-kubernetes-validations", ()))
        for one in schema.get("properties", {}).values():
            yield from rules(one)

    words = {word for _, _, word in POOLS if word} | {word for _, word in MACHINES if word}
    for definition in (crd.definition(), crd.pool_definition()):
        for message in rules(schema_of(definition)):
            assert any(word in message for word in words), message
