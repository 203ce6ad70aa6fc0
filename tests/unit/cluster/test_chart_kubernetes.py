"""The chart adapts to the Kubernetes version: its objects exist in that version, and no field is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster import ClusterError
from cluster.render import CHART, Document
from images.definition.load import UniqueLoader
from tests.helm import rendered_for

EXAMPLES = sorted(path.stem for path in (CHART / "examples").glob("*.yaml"))
OLDEST = "v1.20.2"


def objects(version: str, values: dict[str, Any] | None = None, example: str = "h100-infiniband") -> list[Document]:
    chosen = yaml.safe_load((CHART / "examples" / f"{example}.yaml").read_text()) if values is None else values
    texts = rendered_for(version, chosen, release="slurm", namespace="hpc")
    return [
        found
        for name, text in sorted(texts.items())
        if name.endswith(".yaml")
        for found in yaml.load_all(text, Loader=UniqueLoader)
        if found
    ]


def budgets(version: str) -> set[str]:
    return {item["apiVersion"] for item in objects(version) if item["kind"] == "PodDisruptionBudget"}


def inside(version: str, **policy: Any) -> dict[str, Any]:
    """Return the network policy rule by which the cluster's pods reach each other."""
    (found,) = [
        item for item in objects(version, {"networkPolicy": policy}) if item["metadata"]["name"] == "slurm-inside"
    ]
    rule: dict[str, Any] = found["spec"]["ingress"][0]
    return rule


@pytest.mark.parametrize(
    ("version", "wanted"),
    [
        (OLDEST, "policy/v1beta1"),
        ("v1.20.15-gke.1000", "policy/v1beta1"),
        ("v1.21.0", "policy/v1"),
        ("v1.21.5-eks-bc4871b", "policy/v1"),
        ("v1.36.2", "policy/v1"),
    ],
)
def test_a_budget_is_of_the_version_that_there_is(version: str, wanted: str) -> None:
    assert budgets(version) == {wanted}


def test_where_ranges_of_ports_are_not_known_the_pods_still_reach_each_other() -> None:
    """Without `endPort`, a range would be a single port and srun would hang."""
    assert "ports" not in inside(OLDEST, portRanges=True)
    assert "ports" not in inside("v1.21.14", portRanges=True)
    assert {port["endPort"] for port in inside("v1.22.0", portRanges=True)["ports"]} == {8649, 65535}
    assert "ports" not in inside("v1.36.2", portRanges=False)


@pytest.mark.parametrize("example", EXAMPLES)
def test_a_service_names_the_protocol_of_each_port(example: str) -> None:
    """An older API server that merges objects does not fill in a port's protocol, and refuses the Service."""
    for item in objects(OLDEST, example=example):
        if item["kind"] == "Service":
            assert {port.get("protocol") for port in item["spec"]["ports"]} == {"TCP"}, item["metadata"]["name"]


def test_the_versions_differ_in_what_came_and_in_nothing_else() -> None:
    def plain(document: Document) -> Document:
        spec = document.get("spec")
        if document["kind"] == "PodDisruptionBudget":
            document["apiVersion"] = "policy"
        if document["kind"] == "CustomResourceDefinition" and isinstance(spec, dict):
            for version in spec["versions"]:  # validation rules in CEL
                version["schema"]["openAPIV3Schema"]["properties"]["spec"].pop("x-kubernetes-validations", None)
        if document["kind"] == "NetworkPolicy" and isinstance(spec, dict):
            for rule in spec["ingress"]:
                if any("endPort" in port for port in rule.get("ports", ())):
                    del rule["ports"]
        return document

    for example in EXAMPLES:
        old, new = (list(map(plain, objects(version, example=example))) for version in (OLDEST, "v1.36.2"))
        # ValidatingAdmissionPolicy exists from 1.30 on; test_status_policy.py covers it.
        assert old == [item for item in new if not item["kind"].startswith("ValidatingAdmissionPolicy")]


def test_the_page_and_the_chart_name_the_same_oldest_version() -> None:
    oldest = yaml.safe_load((CHART / "Chart.yaml").read_text())["kubeVersion"].removeprefix(">=").removesuffix(".0-0")
    page = Path(__file__).resolve().parents[3] / "docs" / "how-to" / "install-on-kubernetes.md"
    assert f"Kubernetes {oldest} or newer" in page.read_text()


def test_devices_come_by_a_claim_where_kubernetes_has_them() -> None:
    claims = [{"name": "gpus", "resourceClaimTemplateName": "eight"}]
    pool = {"gpu": {"model": "h100", "count": 8, "resource": ""}, "resourceClaims": claims}
    values = {"slurm": {"auth": "slurm"}, "workers": {"pools": {"gpu": pool}}}
    (spec,) = [item["spec"]["template"]["spec"] for item in objects("v1.36.2", values)
               if item["metadata"]["name"] == "slurm-gpu" and item["kind"] == "StatefulSet"]  # fmt: skip
    assert spec["resourceClaims"] == claims
    (worker,) = spec["containers"]
    assert worker["resources"]["claims"] == [{"name": "gpus"}] and "limits" not in worker["resources"]
    with pytest.raises(
        ClusterError, match=r"workers\.pools\.gpu\.resourceClaims: Kubernetes v1\.31\.0 gives no devices"
    ):
        objects("v1.31.0", values)
