"""Admission policy of docs/how-to/push-images.md, which accepts verified images only.

The policy is evaluated as an API server does it, for the pods that the chart makes and for other pods.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from cel_expr_python import cel  # type: ignore[import-untyped]  # none are there
from cel_expr_python.ext.ext_optional import ExtOptional  # type: ignore[import-untyped]  # none are there

from tests.support.rendered_chart import render

PAGE = Path(__file__).resolve().parents[3] / "docs/how-to/push-images.md"
BYTES = f"sha256:{'ab' * 32}"
OURS = f"registry.site/hpc/worker@{BYTES}"
Object = dict[str, Any]


@pytest.fixture(scope="module")
def policy() -> Object:
    found = re.search(r"<<'EOF'\n(.*?)\nEOF\n", PAGE.read_text(), re.DOTALL)
    assert found
    policy: Object = yaml.safe_load(found[1])
    assert policy["kind"] == "ValidatingAdmissionPolicy"
    return policy


def admitted(policy: Object, pod: object) -> bool:
    (rule,) = policy["spec"]["validations"]
    environment = cel.NewEnv(variables={"object": cel.Type.DYN}, extensions=[ExtOptional()])
    said = environment.compile(rule["expression"]).eval(data={"object": pod}).plain_value()
    assert isinstance(said, bool), said  # an error refuses the pod, but nothing in these tests should be an error
    return said


def pod(*images: str, **more: object) -> Object:
    return {"kind": "Pod", "spec": {"containers": [{"name": "one", "image": image} for image in images], **more}}


@pytest.mark.parametrize(
    "image",
    [
        "registry.site/hpc/worker:24.11.5-debian-0123456789ab",
        "registry.site/hpc/worker",
        f"registry.site/other/worker@{BYTES}",
        f"other.site/hpc/worker@{BYTES}",
        f"registryxsite/hpc/worker@{BYTES}",
        f"other.site/registry.site/hpc/worker@{BYTES}",
        f"registry.site/hpc/../worker@{BYTES}",
        f"registry.site/hpc/worker@{BYTES[:-1]}",
        f"registry.site/hpc/worker@{BYTES}0",
        f"registry.site/hpc/worker@{BYTES}\nregistry.site/hpc/worker",
        f"registry.site/hpc/worker@{BYTES.upper()}",
        f"registry.site/hpc/worker:latest@sha512:{'ab' * 32}",
        "",
    ],
)
@pytest.mark.parametrize("kind", ["containers", "initContainers", "ephemeralContainers"])
def test_another_image_is_refused_wherever_it_stands(policy: Object, image: str, kind: str) -> None:
    found = pod(OURS)
    assert admitted(policy, found)
    found["spec"][kind] = [{"name": "one", "image": OURS}, {"name": "two", "image": image}]
    assert not admitted(policy, found)


def test_it_is_asked_whenever_an_image_can_change(policy: Object) -> None:
    """The policy covers image updates of running pods and ephemeral containers, and fails closed."""
    (rule,) = policy["spec"]["matchConstraints"]["resourceRules"]
    assert set(rule["operations"]) == {"CREATE", "UPDATE"}
    assert set(rule["resources"]) == {"pods", "pods/ephemeralcontainers"}
    assert policy["spec"]["failurePolicy"] == "Fail"


@pytest.mark.parametrize("values", [{}, {"containers": {"enabled": True}}, {"fleet": {"enabled": True}}])
def test_it_lets_the_charts_pods_in_where_their_digests_are_written(policy: Object, values: Object) -> None:
    roles = ("controller", "login", "worker", "worker-containers", "fleet")
    image = {"registry": "registry.site", "repository": "hpc", "digests": dict.fromkeys(roles, BYTES)}
    documents = render({**values, "image": image}, release="slurm", namespace="hpc")
    pods = [item["spec"]["template"] for item in documents if "template" in item.get("spec", {})]
    assert len(pods) >= 3
    assert all(admitted(policy, one) for one in pods)
    documents = render({**values, "image": {**image, "digests": {}}}, release="slurm", namespace="hpc")
    pods = [item["spec"]["template"] for item in documents if "template" in item.get("spec", {})]
    assert not any(admitted(policy, one) for one in pods)
