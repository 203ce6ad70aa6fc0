"""The lists of roles agree: the images', those of a cluster on one machine, the chart's and the fleet's components."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster import ClusterError
from cluster.roles import MORE_IMAGES, ROLES, TABLE
from fleet.world.kubernetes import COMPONENTS, RETURNING, WITH_PAGE
from tests.support.rendered_chart import render

ROOT = Path(__file__).resolve().parents[2]
IMAGES: dict[str, Any] = {
    path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / "images/roles").glob("*.yaml")
}
# Images that no pod on one machine starts from: the operator needs Kubernetes; a developer names the others by hand.
ELSEWHERE = {"fleet", "login-devel", "worker-devel", "slinky-controller", "slinky-login", "slinky-worker"}
LIST = (ROOT / "cluster/chart/templates/_helpers.tpl").read_text().split('define "minivm.roles"')[1].split("toJson")[0]
CHART = {name: set(re.findall(r'"(\w+)"', traits)) for name, traits in re.findall(r'^  "(\w+)" (.*)$', LIST, re.M)}
SLURM = {name for name, traits in CHART.items() if "slurm" in traits}


def test_the_images_are_the_roles_of_one_machine_and_those_that_run_elsewhere() -> None:
    assert set(IMAGES) - ELSEWHERE == {*ROLES, *MORE_IMAGES}
    assert {name for name, image in IMAGES.items() if image.get("default", True)} == {*ROLES, "fleet"}
    for role in TABLE:
        assert all(image.startswith(f"{role.name}-") for image in role.more_images)


def test_chart_and_fleet_know_the_images_roles() -> None:
    assert set(CHART) == set(COMPONENTS) == {*ROLES, "fleet"}
    assert SLURM == WITH_PAGE
    assert set(ROLES) == RETURNING, "each pod of one machine has a StatefulSet in Kubernetes"


@pytest.mark.parametrize("component", COMPONENTS.values(), ids=lambda component: component.name)
def test_the_fleet_asks_a_port_of_the_role(component: Any) -> None:
    assert component.port in IMAGES[component.name]["ports"]


def test_only_slurms_roles_report_conditions() -> None:
    documents = render({"accounting": {"mode": "pod"}}, release="slurm", namespace="hpc")
    named = {item["metadata"]["name"] for item in documents if item["kind"] == "ServiceAccount"}
    assert {f"slurm-{name}" for name in SLURM} <= named


@pytest.mark.parametrize("name", ["demo", "fleet"])
def test_a_pool_takes_no_name_of_a_role(name: str) -> None:
    pools: dict[str, Any] = {"workers": {"pools": {name: {}}}}
    with pytest.raises(ClusterError, match="belongs to another part"):
        render({"fleet": {"enabled": True}, **pools}, release="slurm", namespace="hpc")
    if name == "fleet":
        render(pools, release="slurm", namespace="hpc")
