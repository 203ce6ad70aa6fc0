"""A mistake deep in a pool's template: the API server refuses its pods, and the pool says which field it is.

`fleet run` between a real API server and a real Slurm; no worker ever comes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.kubernetes.apiserver import install
from tests.support.both_sides import LABELS, PODS, Both, both_sides
from tests.support.kube_pools import KIND, POOLS
from tests.waiting import until

pytestmark = [pytest.mark.docker, pytest.mark.cluster]

OWN = {key: said for key, said in LABELS.items() if not key.endswith("component")}


class Empty(Both):
    """No worker to begin with."""

    names = ()

    def env(self, **more: str) -> dict[str, str]:
        return super().env(MINIVM_FLEET_POOLS="yes", **more)

    def message(self, pool: str) -> str:
        conditions = self.api.ask("GET", f"{POOLS}/{pool}").get("status", {}).get("conditions", [])
        return "".join(one.get("message", "") for one in conditions if one["type"] == "Ready")

    def warnings(self, pool: str) -> list[str]:
        found = self.api.ask("GET", "/api/v1/namespaces/default/events")["items"]
        return [
            one["message"]
            for one in found
            if (one["involvedObject"]["name"], one["type"]) == (pool, "Warning")
            and one["involvedObject"]["kind"] == KIND["kind"]
        ]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Empty]:
    with both_sides(tmp_path_factory.mktemp("template"), "template", Empty) as found:
        install(found.api)
        yield found


def worker(**more: object) -> dict[str, Any]:
    return {"containers": [{"name": "x", "image": "x", **more}]}


PROBE = {"httpGet": {"path": "/", "port": 70000}}
# The pool's spec.template.spec; which field is wrong, what was found there, and what is expected.
WRONG = {
    "number": (
        worker(ports=[{"containerPort": 70000}]),
        ("spec.template.spec.containers[0].ports[0].containerPort", "70000", "between 1 and 65535"),
    ),
    "deeper": (
        worker(livenessProbe=PROBE),
        ("spec.template.spec.containers[0].livenessProbe.httpGet.port", "70000", "between 1 and 65535"),
    ),
    "long": (
        worker(env=[{"name": "A=" + "b" * 3000, "value": ""}]),
        ("spec.template.spec.containers[0].env[0].name", "A=bbb", "must consist"),
    ),
    "many": (
        worker(ports=[{"containerPort": number} for number in range(70000, 70040)]),
        ("spec.template.spec.containers[0].ports[0].containerPort", "70000", "more"),
    ),
    "kind": (
        worker(ports=[{"containerPort": "http"}]),
        # A newer API server does not say what was found.
        ("spec.template.spec.containers.ports.containerPort", "", "int"),
    ),
    "label": (worker(), ("spec.template.metadata.labels", "no label", "must be")),
}


@pytest.mark.parametrize("which", WRONG)
def test_a_mistake_deep_in_a_template_is_told_by_its_field_wherever_people_look(both: Empty, which: str) -> None:
    spec, (field, found, expected) = WRONG[which]
    name, labels = f"slurm-{which}", {"minivm.io/pool": which}
    labels |= {"example.com/a": "no label"} if which == "label" else {}
    template = {"metadata": {"labels": labels}, "spec": spec}
    wants = {"mode": "fixed", "replicas": 2, "template": template}
    both.api.ask("POST", POOLS, {**KIND, "metadata": {"name": name, "labels": OWN}, "spec": wants})
    words = (field, found, expected, f"mend the template of WorkerPool {name}")

    def told(text: str) -> bool:
        return all(word in text for word in words)

    try:
        with both.running():
            until(
                lambda: told(both.message(name)), "its condition says so", seen=lambda: both.message(name) + both.log()
            )
            until(lambda: any(map(told, both.warnings(name))), "an Event says so", seen=both.log)
            assert told(both.ask("why", name))
            mended = {"metadata": {"labels": {"minivm.io/pool": which, "example.com/a": None}}, "spec": worker()}
            both.api.merge(f"{POOLS}/{name}", {"spec": {"template": mended}})
            until(
                lambda: f"{name}-1" in [one["metadata"]["name"] for one in both.api.ask("GET", PODS)["items"]], "made"
            )
            until(lambda: "mend" not in both.message(name), "and told no more", seen=both.log)
    finally:
        both.api.ask("DELETE", f"{POOLS}/{name}")
