"""Machines before a real API server: their kind as the chart has it, what people may write, and how the fleet does."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from fleet import crd
from fleet.act import machines
from fleet.decide.actions import Annotate, Make, Record, StartJob, Withdraw
from fleet.world.machine import Event, Machine, Remedy, Status, machine
from tests.helm import rendered_for
from tests.kubernetes import programs
from tests.kubernetes.apiserver import ApiServer, Object, api_server, install
from tests.kubernetes.fleet_api import do, refused

pytestmark = pytest.mark.timeout(3600)

MACHINES = f"/apis/{crd.GROUP}/{crd.VERSION}/namespaces/default/{crd.PLURAL}"
FULL = Status(
    goal="drain",
    state="Drained",
    why="a person",
    node="n0",
    node_uid="u0",
    boot="b",
    provider="cloud:///a",
    gpus=("GPU-1",),
    worker="w0",
    verdict="ecc[rma]@1 x",
    ill=True,
    repeats=1,
    history=(Event(1_795_000_000, "verdict", "ecc[rma]@1 x"), Event(1_795_000_001, "well")),
    remedy=Remedy("reboot", 1, 1_795_000_000, "b", True),
    remedies=1,
    fulfilled=2,
)


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    if not programs.built() and (why := programs.refusal()):
        pytest.skip(f"no Kubernetes: {why}")
    with api_server(programs.build(), tmp_path_factory.mktemp("machines")) as api:
        install(api)
        yield api


@pytest.fixture
def name(api: ApiServer, request: pytest.FixtureRequest) -> Iterator[str]:
    made = f"n0-{abs(hash(request.node.name)) % 10**8}"
    assert do(api, lambda fleet: machines.change(fleet, Make(made, "n0")))
    yield made
    api.ask("DELETE", f"{MACHINES}/{made}")


def read(api: ApiServer, name: str) -> Machine:
    return machine(api.ask("GET", f"{MACHINES}/{name}"))


def note(api: ApiServer, seen: Machine, status: Status) -> bool:
    return do(api, lambda fleet: machines.change(fleet, Record(seen.name, seen.version, status)))


def test_what_is_noted_is_read_back_and_what_is_over_goes(api: ApiServer, name: str) -> None:
    """Every field passes the schema: one that the API server does not know it would drop without a word."""
    assert note(api, read(api, name), FULL)
    assert read(api, name).status == FULL
    less = replace(FULL, remedy=None, worker="", gpus=())
    assert note(api, read(api, name), less)
    assert read(api, name).status == less


def test_a_note_on_what_has_changed_meanwhile_does_nothing(api: ApiServer, name: str) -> None:
    seen = read(api, name)
    api.merge(f"{MACHINES}/{name}", {"spec": {"goal": "drain", "reason": "fan 3"}})
    assert not note(api, seen, FULL)
    before = read(api, name)
    api.ask("DELETE", f"{MACHINES}/{name}")
    assert not note(api, before, FULL), "it is no more"
    assert do(api, lambda fleet: machines.change(fleet, Make(name, "n0")))
    assert not note(api, before, FULL), "it is another one"
    seen = read(api, name)
    api.merge(f"{MACHINES}/{name}", {"spec": {"goal": "drain", "reason": "fan 3"}})
    found = read(api, name)
    assert (found.goal, found.status) == ("drain", Status())
    assert found.generation == seen.generation + 1, "what people want is counted"
    assert note(api, found, FULL)
    assert read(api, name).generation == found.generation, "and what the fleet notes is not"
    assert read(api, name).goal == "drain"


def test_made_twice_it_is_made_once(api: ApiServer, name: str) -> None:
    uid = read(api, name).uid
    assert not do(api, lambda fleet: machines.change(fleet, Make(name, "n0")))
    assert read(api, name).uid == uid
    labels = api.ask("GET", f"{MACHINES}/{name}")["metadata"]["labels"]
    assert labels == {"app.kubernetes.io/name": "minivm", "app.kubernetes.io/instance": "slurm"}


def test_a_remedys_job_is_started_once_and_noted(api: ApiServer, name: str) -> None:
    api.merge(f"{MACHINES}/{name}", {"spec": {"goal": "reboot", "reason": "$(rm -rf /) `x`"}})
    template = {"template": {"spec": {"containers": [{"name": "x", "image": "x", "command": ["true"]}]}}}
    after = replace(FULL, remedies=1)
    for _ in range(2):
        seen = read(api, name)
        job = StartJob(f"{name}-1", "n7", seen, "reboot", seen.reason, template, True, after)
        assert do(api, partial(machines.change, act=job))
    assert read(api, name).status == after
    jobs = api.ask("GET", "/apis/batch/v1/namespaces/default/jobs")["items"]
    (found,) = [one for one in jobs if one["metadata"]["name"] == f"{name}-1"]
    (owner,) = found["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"], owner["uid"]) == ("Machine", name, seen.uid)
    pod = found["spec"]["template"]["spec"]
    told = {one["name"]: one["value"] for one in pod["containers"][0]["env"]}
    assert told == {
        "MINIVM_MACHINE": name, "MINIVM_NODE": "n7", "MINIVM_GOAL": "reboot", "MINIVM_REASON": "$$(rm -rf /) `x`",
    }  # fmt: skip
    assert (pod["nodeName"], pod["containers"][0]["command"], pod["restartPolicy"]) == ("n7", ["true"], "Never")


def test_a_nodes_annotations_are_asked_for_and_taken_away_on_what_was_seen(api: ApiServer) -> None:
    made = api.ask("POST", "/api/v1/nodes", {"metadata": {"name": "n7", "annotations": {"others": "stay"}}})
    uid, version = made["metadata"]["uid"], made["metadata"]["resourceVersion"]
    asked = Annotate("n7", uid, version, (("reboot.example/please", "now"), ("minivm.io/remedy", "m/1")))
    assert do(api, lambda fleet: machines.change(fleet, asked))
    assert not do(api, lambda fleet: machines.change(fleet, asked)), "it has changed since"
    found = api.ask("GET", "/api/v1/nodes/n7")["metadata"]
    assert {"others": "stay", "reboot.example/please": "now"}.items() <= found["annotations"].items()
    names = ("reboot.example/please", "minivm.io/remedy", "minivm.io/remedy-reason")
    away = Withdraw("n7", uid, found["resourceVersion"], names)
    assert do(api, lambda fleet: machines.change(fleet, away))
    assert api.ask("GET", "/api/v1/nodes/n7")["metadata"]["annotations"] == {"others": "stay"}


@pytest.mark.parametrize("spec", [{"goal": "sleep"}, {"goal": 1}, {"goal": "drain", "reason": "a\nb"}])
def test_a_goal_that_is_none_is_refused_at_once(api: ApiServer, name: str, spec: Object) -> None:
    assert "spec." in refused(api, f"{MACHINES}/{name}", {"spec": spec})


def test_people_see_them_in_columns(api: ApiServer, name: str) -> None:
    note(api, read(api, name), FULL)
    headers = {
        "Authorization": f"Bearer {api.token}",
        "Accept": "application/json;as=Table;v=v1;g=meta.k8s.io",
    }
    request = urllib.request.Request(f"{api.url}{MACHINES}", headers=headers)
    with urllib.request.urlopen(request, context=api.context, timeout=10) as reply:
        table: dict[str, Any] = json.load(reply)
    names = [one["name"] for one in table["columnDefinitions"]]
    (row,) = [one["cells"] for one in table["rows"] if one["cells"][0] == name]
    said = dict(zip(names, row, strict=True))
    wanted = {"Goal": "drain", "State": "Drained", "Node": "n0", "Worker": "w0", "Repeats": 1, "Why": "a person"}
    assert wanted.items() <= said.items()


def test_rules_that_the_api_server_does_not_know_are_not_told_to_it() -> None:
    def rules(version: str) -> bool:
        values = {"fleet": {"enabled": True, "machines": {"enabled": True}}}
        texts = rendered_for(version, values, release="slurm", namespace="default")
        return any("x-kubernetes-validations" in text for text in texts.values())

    assert (rules("v1.24.9"), rules("v1.25.0"), rules("v1.31.1")) == (False, True, True)
