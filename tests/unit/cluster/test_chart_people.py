"""People of a file in the chart: one source, mounted in every role, and kept on the controller's volume."""

from __future__ import annotations

from typing import Any

import pytest

from cluster import ClusterError
from fleet import FleetError
from fleet.scim.roster import Rules
from fleet.scim.server import PORT, PROBES, read_settings
from init.people.read import parse
from tests.support.people_files import ED
from tests.support.rendered_chart import render

ADA = {"name": "ada", "uid": 5001, "group": "lab", "keys": [ED, {"key": ED + " x", "expires": "2027-01-31"}]}
LAB = {"groups": [{"name": "lab", "gid": 5_000_000}], "users": [ADA]}


def sources(people: dict[str, Any]) -> dict[str, Any]:
    """Return the volume `people` of each StatefulSet that mounts it."""
    found = {}
    for item in render({"people": people, "demo": {"enabled": True, "users": {"alice": ED}}},
                       release="slurm", namespace="hpc"):  # fmt: skip
        if item["kind"] == "StatefulSet":
            pod = item["spec"]["template"]["spec"]
            volumes = {volume["name"]: volume for volume in pod["volumes"]}
            mounts = {mount["mountPath"]: mount for mount in pod["containers"][0]["volumeMounts"]}
            assert ("people" in volumes) == ("/mnt/minivm/people" in mounts)
            kept = mounts.get("/var/lib/minivm/people", {}).get("name") == "state"
            assert kept == ("people" in volumes and item["metadata"]["name"] == "slurm-controller")
            if "people" in volumes:
                assert mounts["/mnt/minivm/people"]["readOnly"]
                found[item["metadata"]["name"]] = {k: v for k, v in volumes["people"].items() if k != "name"}
    return found


ROLES = ("slurm-controller", "slurm-login", "slurm-worker")


def test_an_existing_configmap_or_secret_is_mounted_in_every_role_and_no_pod_waits_for_it() -> None:
    config = {"configMap": {"name": "lab", "defaultMode": 0o400, "optional": True}}
    assert sources({"existingConfigMap": "lab"}) == dict.fromkeys(ROLES, config)
    secret = {"secret": {"secretName": "lab", "defaultMode": 0o400, "optional": True}}
    assert sources({"existingSecret": "lab"}) == dict.fromkeys(ROLES, secret)
    assert sources({}) == {}


def test_the_lists_become_a_file_that_a_pod_reads() -> None:
    people = {"groups": LAB["groups"], "users": [ADA | {"keys": [ED], "gecos": "Ada <&> Ä", "until": "2027-01-31"}]}
    assert set(sources(people)) == set(ROLES)
    documents = render({"people": people}, release="slurm", namespace="hpc")
    (file,) = [item["data"]["people.yaml"] for item in documents if item["metadata"]["name"] == "slurm-people"]
    found = parse(file.encode())
    assert (found.users[0].gecos, found.users[0].until, found.groups[0].gid) == ("Ada <&> Ä", 1801440000, 5_000_000)


@pytest.mark.parametrize(
    "people",
    [
        {"users": [ADA | {"uid": 0}]},
        {"users": [ADA | {"uid": 64501}]},
        {"users": [ADA | {"name": "Ada"}]},
        {"users": [ADA | {"sudo": True}]},
        {"users": [ADA | {"keys": ['command="x" ' + ED]}]},
        {"users": [ADA | {"keys": [ED + "\n" + ED]}]},
        {"users": [ADA | {"until": "tomorrow"}]},
        {"users": [{"name": "ada"}]},
        {"groups": [{"name": "lab", "gid": 999}]},
        {"user": []},
        {"existingConfigMap": "lab", "existingSecret": "lab"},
        {"existingConfigMap": "lab", **LAB},
    ],
    ids=str,
)
def test_a_mistake_is_refused_before_the_cluster_changes(people: dict[str, Any]) -> None:
    with pytest.raises(ClusterError, match="people"):
        render({"people": people}, release="slurm", namespace="hpc")


def settings(people: dict[str, Any]) -> dict[str, str]:
    objects = render({"people": people}, release="slurm", namespace="hpc")
    name = ("StatefulSet", "slurm-controller")
    (controller,) = [item for item in objects if (item["kind"], item["metadata"]["name"]) == name]
    env = controller["spec"]["template"]["spec"]["containers"][0]["env"]
    return {item["name"]: item["value"] for item in env if item["name"].startswith("MINIVM_REMOVED_JOBS")}


def test_the_controller_gets_the_policy_of_removed_people_s_jobs() -> None:
    file = {"existingConfigMap": "people"}
    assert settings(file) == settings(file | {"removedJobs": "keep"}) == {}
    wanted = {"MINIVM_REMOVED_JOBS": "cancel", "MINIVM_REMOVED_JOBS_GRACE": "2592000"}
    assert settings(file | {"removedJobs": "cancel", "removedJobsGraceSeconds": 2592000}) == wanted


@pytest.mark.parametrize(
    ("people", "words"),
    [
        ({"removedJobs": "cancel"}, "people.removedJobs: cancel counts for people of people.yaml"),
        ({"removedJobs": "kill", "existingSecret": "x"}, "removedJobs"),
        ({"removedJobsGraceSeconds": 5, "existingSecret": "x"}, "removedJobsGraceSeconds"),
    ],
)
def test_a_policy_that_cannot_count_is_refused(people: dict[str, Any], words: str) -> None:
    with pytest.raises(ClusterError, match=words):
        settings(people)


SCIM: dict[str, Any] = {"existingSecret": "people", "scim": {"enabled": True, "tokenSecret": "token"}}


def scim_objects(people: dict[str, Any], **values: Any) -> dict[str, dict[str, Any]]:
    objects = render({"people": people, **values}, release="slurm", namespace="hpc")
    return {item["kind"]: item for item in objects if item["metadata"]["name"] == "slurm-scim"}


def test_scim_is_off_by_default_and_writes_one_secret_alone() -> None:
    assert not scim_objects({"existingSecret": "people"})
    found = scim_objects(SCIM)
    assert found["Role"]["rules"] == [
        {"apiGroups": [""], "resources": ["secrets"], "verbs": ["get", "update"], "resourceNames": ["people"]}
    ]
    pod = found["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert (container["args"], pod["automountServiceAccountToken"]) == (["scim"], False)
    assert "/fleet:" in container["image"]
    assert container["securityContext"]["readOnlyRootFilesystem"] and pod["securityContext"]["runAsNonRoot"]
    env = {item["name"]: item.get("value") for item in container["env"]}
    settings = read_settings({**env, "MINIVM_POD_NAMESPACE": "hpc"})
    assert (settings.secret, settings.rules, settings.certificate) == ("people", Rules("people", 100_000), None)
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert str(settings.token.parent) in mounts
    (port,) = found["Service"]["spec"]["ports"]
    assert (port["port"], port["targetPort"]) == (80, "scim")
    assert {item["name"]: item["containerPort"] for item in container["ports"]} == {"http": PROBES, "scim": PORT}
    assert found["NetworkPolicy"]["spec"]["ingress"] == [{"ports": [{"port": "scim", "protocol": "TCP"}]}]


def test_scim_serves_https_with_a_certificate_and_the_peers_that_are_named() -> None:
    peers = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "ingress"}}}]
    scim = SCIM["scim"] | {"tlsSecret": "cert", "firstId": 5000, "group": "lab"}
    found = scim_objects(SCIM | {"scim": scim}, networkPolicy={"scimFrom": peers})
    (container,) = found["Deployment"]["spec"]["template"]["spec"]["containers"]
    env = {item["name"]: item.get("value") for item in container["env"]}
    settings = read_settings({**env, "MINIVM_POD_NAMESPACE": "hpc"})
    assert settings.rules == Rules("lab", 5000)
    assert str(settings.certificate) in {mount["mountPath"] for mount in container["volumeMounts"]}
    assert found["Service"]["spec"]["ports"][0]["port"] == 443
    assert found["NetworkPolicy"]["spec"]["ingress"][0]["from"] == peers


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"people": {"scim": SCIM["scim"]}}, "given is nothing: make an empty Secret"),
        ({"people": {"scim": SCIM["scim"], "existingConfigMap": "lab"}}, "given is existingConfigMap"),
        ({"people": {"scim": SCIM["scim"], **LAB}}, "given is users and groups"),
        ({"people": {"scim": {"enabled": True}, "existingSecret": "people"}}, "people.scim.tokenSecret: it is empty"),
        ({"people": {"scim": SCIM["scim"], "existingSecret": "token"}}, "keep the token in another one"),
        ({"people": SCIM | {"scim": SCIM["scim"] | {"firstId": 60_000}}}, "firstId"),
        ({"people": SCIM | {"scim": SCIM["scim"] | {"group": "Lab"}}}, "group"),
        ({"people": SCIM | {"scim": SCIM["scim"] | {"token": "x"}}}, "token"),
        ({"people": SCIM, "networkPolicy": {"scimFrom": [{}]}}, "networkPolicy.scimFrom"),
        ({"people": SCIM, "workers": {"pools": {"scim": {}}}}, "workers.pools.scim: the name belongs to another part"),
    ],
)
def test_scim_that_cannot_work_is_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ClusterError, match=words):
        render(values, release="slurm", namespace="hpc")


@pytest.mark.parametrize("first", ["", "0", "999", "60000", "-1", "1e9", str(2**31)])
def test_the_receiver_refuses_a_first_uid_of_the_system(first: str) -> None:
    env = {"MINIVM_POD_NAMESPACE": "hpc", "MINIVM_SCIM_SECRET": "people", "MINIVM_SCIM_GROUP": "people"}
    with pytest.raises(FleetError, match="MINIVM_SCIM_FIRST"):
        read_settings({**env, "MINIVM_SCIM_FIRST": first})
