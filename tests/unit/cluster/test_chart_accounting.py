"""slurmdbd and its database in a pod of their own: what the chart gives that pod, and what `up` refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster import ClusterError, values
from cluster.render import CHART, Document
from cluster.values import Options
from tests.support.rendered_chart import render

POD: dict[str, Any] = {"accounting": {"mode": "pod"}}
PORT = {"port": "slurmdbd", "protocol": "TCP"}
PEERS = [{"podSelector": {"matchLabels": {"app.kubernetes.io/name": "minivm", "app.kubernetes.io/instance": "slurm"}}}]


def objects(given: dict[str, Any] = POD) -> dict[tuple[str, str], Document]:
    return {(item["kind"], item["metadata"]["name"]): item for item in render(given, release="slurm", namespace="hpc")}


def container(found: dict[tuple[str, str], Document], role: str) -> dict[str, Any]:
    (only,) = found["StatefulSet", f"slurm-{role}"]["spec"]["template"]["spec"]["containers"]
    return dict(only)


def env(found: dict[tuple[str, str], Document], role: str) -> dict[str, str]:
    return {item["name"]: item.get("value", "") for item in container(found, role)["env"]}


def test_without_the_mode_nothing_of_the_pod_is_there() -> None:
    named = [name for _, name in objects({}) if "accounting" in name]
    assert named == []


def test_slurmdbd_and_the_records_are_in_the_accounting_pod_alone() -> None:
    found = objects()
    conf = found["ConfigMap", "slurm-config"]["data"]["slurm.conf"].splitlines()
    assert "AccountingStorageHost=slurm-accounting" in conf
    assert env(found, "controller")["MINIVM_ACCOUNTING"] == "pod"
    own = env(found, "accounting")
    assert (own["MINIVM_ACCOUNTING"], own["MINIVM_CONTROLLER"]) == ("embedded", "slurm-accounting")
    mounts = {
        role: {item["mountPath"] for item in container(found, role)["volumeMounts"]}
        for role in ("accounting", "controller")
    }
    assert "/var/lib/mysql" in mounts["accounting"] and "/var/lib/mysql" not in mounts["controller"]
    assert "/mnt/minivm/secrets/slurmdbd" not in mounts["controller"], "no password for a database of another pod"
    ports = {role: {item["name"] for item in container(found, role)["ports"]} for role in mounts}
    assert "slurmdbd" in ports["accounting"] and "slurmdbd" not in ports["controller"]
    services = {name: item["spec"] for (kind, name), item in found.items() if kind == "Service"}
    offering = [name for name, spec in services.items() if any(port["port"] == 6819 for port in spec["ports"])]
    assert offering == ["slurm-accounting"] and "clusterIP" not in services["slurm-accounting"]


def test_the_pod_has_the_least_rights() -> None:
    given = POD | {
        "scripts": {
            "existingSecret": "git",
            "env": {"MINIVM_GITSYNC_RING_URL": "http://board"},
            "policy": {"policy.json": "{}"},
        }
    }
    found = objects(given)
    mounts = {item["mountPath"] for item in container(found, "accounting")["volumeMounts"]}
    secrets = {path for path in mounts if path.startswith("/mnt/minivm/secrets/")}
    assert secrets == {"/mnt/minivm/secrets/slurm-key", "/mnt/minivm/secrets/slurm-jwks"}
    assert "/mnt/minivm/config/scripts" not in mounts
    volumes = found["StatefulSet", "slurm-accounting"]["spec"]["template"]["spec"]["volumes"]
    assert {item["name"] for item in volumes} < {
        item["name"] for item in container(found, "accounting")["volumeMounts"]
    }
    image = yaml.safe_load((CHART.parents[1] / "images/roles/accounting.yaml").read_text())
    assert set(container(found, "accounting")["securityContext"]["capabilities"]["add"]) == set(image["capabilities"])
    roles = [name for kind, name in found if kind in ("Role", "RoleBinding") and "accounting" in name]
    assert roles == []


def test_peers_reach_only_slurmdbds_port() -> None:
    found = objects(POD | {"networkPolicy": {"enabled": True}})
    label = "app.kubernetes.io/component"
    applying = []
    for (kind, name), item in found.items():
        if kind == "NetworkPolicy" and "Ingress" in item["spec"]["policyTypes"]:
            selector = item["spec"]["podSelector"]
            excluded = {"key": label, "operator": "NotIn", "values": ["accounting"]} in selector.get(
                "matchExpressions", []
            )
            if selector["matchLabels"].get(label, "accounting") == "accounting" and not excluded:
                applying.append(name)
    assert applying == ["slurm-accounting"]
    assert found["NetworkPolicy", "slurm-accounting"]["spec"]["ingress"] == [{"ports": [PORT], "from": PEERS}]
    plain = objects({"networkPolicy": {"enabled": True}})["NetworkPolicy", "slurm-inside"]
    assert "matchExpressions" not in plain["spec"]["podSelector"]


def test_two_controllers_may_have_it() -> None:
    several = {"controller": {"replicas": 2, "persistence": {"existingClaim": "state"}}}
    assert ("StatefulSet", "slurm-accounting") in objects(POD | several)
    with pytest.raises(
        ClusterError, match=r"accounting\.mode is embedded.*Set accounting\.mode to pod, external or none"
    ):
        objects(several)


def with_mode(mode: str, origin: str = "", file: str = "") -> Options:
    return Options(overrides={"accounting": {"mode": mode, "from": origin}}, values_file=file)


def template(given: dict[str, Any], role: str) -> dict[str, Any]:
    return dict(objects(given)["StatefulSet", f"slurm-{role}"]["spec"]["template"])


@pytest.mark.parametrize("role", ["worker", "login"])
@pytest.mark.parametrize("mode", ["embedded", "pod", "external"])
def test_workers_and_logins_keep_the_setting_that_clusters_have_had(mode: str, role: str) -> None:
    found = objects({"accounting": {"mode": mode, "database": {"host": "db", "existingSecret": "db"}}})
    names = [item["name"] for item in container(found, role)["env"]]
    assert names[names.index("MINIVM_CONTROLLER") + 1] == "MINIVM_ACCOUNTING", "another order replaces pods, too"
    assert env(found, role)["MINIVM_ACCOUNTING"] == mode


@pytest.mark.parametrize("role", ["worker", "login"])
@pytest.mark.parametrize("place", ["pod", "external"])
def test_a_move_from_the_controller_and_its_way_back_replace_no_worker_and_no_login(place: str, role: str) -> None:
    database = {"database": {"host": "db", "existingSecret": "db"}}
    before = template({"accounting": {"mode": "embedded"} | database}, role)
    assert template({"accounting": {"mode": place, "from": "embedded"} | database}, role) == before
    assert template({"accounting": {"mode": "embedded", "from": place} | database}, role) == before
    assert template({"accounting": {"mode": place} | database}, role) != before, "removing `from` replaces them"


def test_a_move_between_the_pod_and_an_external_database_replaces_no_worker() -> None:
    database = {"database": {"host": "db", "existingSecret": "db"}}
    moved = {"accounting": {"mode": "external", "from": "pod"} | database}
    assert template(moved, "worker") == template({"accounting": {"mode": "pod"} | database}, "worker")


@pytest.mark.parametrize(
    ("before", "after", "hint"),
    [
        ("embedded", "pod", "accounting.from: embedded moves them"),
        ("pod", "embedded", "accounting.from: pod moves them"),
        ("none", "pod", "keep none"),
        ("pod", "external", "accounting.from: pod moves them"),
    ],
)
def test_up_refuses_to_leave_the_records_behind(before: str, after: str, hint: str, tmp_path: Path) -> None:
    for origin in ("", "external" if before != "external" else "pod"):
        with pytest.raises(ClusterError) as caught:
            values.find_origin_of_records(with_mode(before), with_mode(after, origin, str(tmp_path / after)))
        text = str(caught.value)
        assert f"change accounting.mode from {before} to {after}" in text
        assert "accounting.mode" in text and hint in text and "nothing was changed" in text


def test_up_moves_the_records_where_the_values_name_their_place() -> None:
    modes = ("embedded", "pod", "external")
    moves = [(old, new) for old in modes for new in modes if old != new]
    assert [values.find_origin_of_records(with_mode(old), with_mode(new, old)) for old, new in moves] == [
        old for old, _ in moves
    ]


def test_up_goes_on_where_the_records_stay() -> None:
    pod = with_mode("pod", "embedded")
    assert values.find_origin_of_records(pod, replace(pod, workers=3)) == ""
    assert values.find_origin_of_records(Options(), with_mode("none")) == ""
    with pytest.raises(ClusterError):
        values.find_origin_of_records(pod, Options())


def test_only_the_pod_with_slurmdbd_waits_for_records() -> None:
    name = "MINIVM_ACCOUNTING_FROM"
    assert all(name not in env(objects(), role) for role in ("accounting", "controller"))
    into_pod = objects({"accounting": {"mode": "pod", "from": "embedded"}})
    assert env(into_pod, "accounting")[name] == "embedded" and name not in env(into_pod, "controller")
    back = objects({"accounting": {"mode": "embedded", "from": "pod"}})
    assert env(back, "controller")[name] == "pod" and ("StatefulSet", "slurm-accounting") not in back


@pytest.mark.parametrize(("mode", "origin"), [("pod", "pod"), ("embedded", "embedded"), ("none", "pod")])
def test_a_place_that_cannot_have_the_records_is_refused(mode: str, origin: str) -> None:
    with pytest.raises(ClusterError, match=rf"accounting\.from is {origin}, and accounting\.mode is {mode}"):
        objects({"accounting": {"mode": mode, "from": origin}})
