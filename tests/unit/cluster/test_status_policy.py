"""The chart's policy for what a pod may write of its own status (`podConditions`), evaluated as an API server does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import yaml
from cel_expr_python import cel  # type: ignore[import-untyped]  # none are there

from tests.helm import rendered_for

Object = dict[str, Any]
WORKER = "system:serviceaccount:hpc:slurm-worker"
OWN = {"type": "minivm.io/Ready", "status": "False", "reason": "Starts"}
READY = {"type": "Ready", "status": "True"}
POD: Object = {
    "metadata": {"name": "slurm-worker-0", "uid": "u-1", "labels": {"app.kubernetes.io/component": "worker"}},
    "status": {"phase": "Running", "podIP": "10.1.2.3", "podIPs": [{"ip": "10.1.2.3"}], "conditions": [READY, OWN]},
}


def policies(version: str, *, fleet: bool = False, **conditions: object) -> list[Object]:
    values = {"podConditions": {"enabled": True} | conditions, "fleet": {"enabled": fleet}}
    texts = rendered_for(version, values, release="slurm", namespace="hpc")
    documents = [
        item
        for name, text in texts.items()
        if name.endswith(".yaml")
        for item in yaml.safe_load_all(text)
        if isinstance(item, dict)
    ]
    return [item for item in documents if item["kind"].startswith("ValidatingAdmissionPolicy")]


@pytest.fixture(scope="module")
def policy() -> Object:
    (found,) = (item for item in policies("v1.30.0") if item["kind"] == "ValidatingAdmissionPolicy")
    return found


@pytest.fixture(scope="module")
def of_fleet() -> Object:
    (found,) = (item for item in policies("v1.30.0", fleet=True) if item["kind"] == "ValidatingAdmissionPolicy")
    return found


def request(*, user: str = WORKER, name: str = "slurm-worker-0", uid: str = "u-1", bound: bool = True) -> Object:
    """Describe the caller as the API server does: a token that is bound to a pod names the pod."""
    claims = {"authentication.kubernetes.io/pod-name": [name], "authentication.kubernetes.io/pod-uid": [uid]}
    return {"name": "slurm-worker-0", "userInfo": {"username": user, **({"extra": claims} if bound else {})}}


def evaluate(expression: str, **given: object) -> bool:
    environment = cel.NewEnv(variables=dict.fromkeys(("object", "oldObject", "request"), cel.Type.DYN))
    found = environment.compile(expression).eval(data=given).plain_value()
    assert isinstance(found, bool), found  # an error refuses the request, but nothing in these tests should be an error
    return found


def admitted(policy: Object, after: Object, before: Object = POD, asks: Object | None = None) -> bool:
    given = {"object": after, "oldObject": before, "request": asks or request()}
    (match,) = policy["spec"]["matchConditions"]
    assert evaluate(match["expression"], **given), "the policy is for this caller"
    return all(evaluate(rule["expression"], **given) for rule in policy["spec"]["validations"])


def changed(path: str, value: object) -> Object:
    pod = copy.deepcopy(POD)
    part, _, key = path.partition(".")
    pod[part][key] = value
    return pod


@pytest.mark.parametrize(
    "conditions",
    [
        [READY, OWN | {"status": "True"}],
        [READY, OWN, {"type": "minivm.io/Gpus", "status": "True", "message": "8"}],
        [READY],
        [OWN, READY],
    ],
)
def test_a_pod_writes_its_own_conditions(policy: Object, conditions: list[Object]) -> None:
    assert admitted(policy, changed("status.conditions", conditions))


def test_the_first_condition_of_a_pod_is_taken(policy: Object) -> None:
    young = {"metadata": POD["metadata"], "status": {"phase": "Pending"}}
    assert admitted(policy, young | {"status": {"phase": "Pending", "conditions": [OWN]}}, before=young)


WRONG: tuple[tuple[str, object], ...] = (
    # The StatefulSet replaces a failed pod.
    ("status.phase", "Failed"),
    # Services route traffic to these addresses.
    ("status.podIP", "10.9.9.9"),
    ("status.podIPs", [{"ip": "10.9.9.9"}]),
    ("status.hostIP", "10.9.9.9"),
    ("status.reason", "Evicted"),
    ("status.containerStatuses", [{"name": "worker", "ready": True}]),
    ("status.startTime", "2026-01-01T00:00:00Z"),
    # Kubernetes 1.36 has it, and no release that came before.
    ("status.nodeAllocatableResourceClaimStatuses", [{"name": "x"}]),
    ("status.conditions", [READY | {"status": "False"}, OWN]),
    ("status.conditions", [OWN]),
    ("status.conditions", [READY, OWN, {"type": "DisruptionTarget", "status": "True"}]),
    # Services select pods by labels, and people read them.
    ("metadata.labels", {"app.kubernetes.io/component": "controller"}),
    ("metadata.annotations", {"a": "b"}),
    ("metadata.finalizers", ["never/goes"]),
)


@pytest.mark.parametrize(("path", "value"), WRONG)
def test_whatever_else_a_pod_writes_is_refused(policy: Object, path: str, value: object) -> None:
    assert not admitted(policy, changed(path, value))


def test_a_field_that_is_taken_away_is_a_change(policy: Object) -> None:
    for key in ("phase", "podIP", "podIPs"):
        pod = copy.deepcopy(POD)
        del pod["status"][key]
        assert not admitted(policy, pod)


@pytest.mark.parametrize(
    "asks",
    [request(name="slurm-worker-1"), request(uid="u-0"), request(bound=False), request(name="")],
    ids=["another pod", "the pod before it", "a token of no pod", "nobody"],
)
def test_another_pods_status_is_refused_whatever_is_written(policy: Object, asks: Object) -> None:
    assert not admitted(policy, changed("status.conditions", [READY]), asks=asks)


FLEET = "system:serviceaccount:hpc:slurm-fleet"
LABELS = {"app.kubernetes.io/component": "worker", "app.kubernetes.io/instance": "slurm"}


def test_the_fleet_writes_conditions_of_its_releases_pods(of_fleet: Object) -> None:
    before = changed("metadata.labels", LABELS)
    asks = request(user=FLEET, name="slurm-fleet-7d5f-x", uid="u-f")
    after = copy.deepcopy(before)
    after["status"]["conditions"] = [READY, OWN | {"status": "True"}, {"type": "minivm.io/SlurmNode", "status": "True"}]
    assert admitted(of_fleet, after, before, asks)
    for labels in ({}, {**LABELS, "app.kubernetes.io/instance": "web"}):
        of_another = changed("metadata.labels", labels)
        wanted = copy.deepcopy(of_another)
        wanted["status"]["conditions"] = [READY]
        assert not admitted(of_fleet, wanted, of_another, asks), "another pod of the namespace"


@pytest.mark.parametrize(("path", "value"), WRONG)
def test_whatever_else_the_fleet_writes_is_refused(of_fleet: Object, path: str, value: object) -> None:
    before = changed("metadata.labels", LABELS)
    after = copy.deepcopy(before)
    part, _, key = path.partition(".")
    after[part][key] = {**LABELS, **value} if isinstance(value, dict) and key == "labels" else value
    assert not admitted(of_fleet, after, before, request(user=FLEET))


def test_where_the_fleet_writes_the_policy_is_for_the_fleet_alone(of_fleet: Object) -> None:
    """No pod of Slurm has the right at all there."""
    (match,) = of_fleet["spec"]["matchConditions"]
    for user, matched in ((FLEET, True), (WORKER, False), ("system:node:n1", False)):
        assert evaluate(match["expression"], request=request(user=user)) is matched


def test_the_policy_is_for_the_releases_pods_alone(policy: Object) -> None:
    """The policy matches the release's pods only, because the kubelet and the fleet write pod statuses too."""
    (match,) = policy["spec"]["matchConditions"]
    for user in ("system:node:n1", "system:serviceaccount:hpc:slurm-fleet", "system:serviceaccount:other:slurm-worker"):
        assert not evaluate(match["expression"], request=request(user=user))
    spec = policy["spec"]
    assert spec["failurePolicy"] == "Fail"
    assert spec["matchConstraints"]["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "hpc"}
    (rule,) = spec["matchConstraints"]["resourceRules"]
    assert (rule["resources"], rule["operations"]) == (["pods/status"], ["UPDATE"]), "a patch is an update"


def test_it_denies_where_the_api_has_it_and_is_not_rendered_elsewhere() -> None:
    policy, binding = sorted(policies("v1.30.0"), key=lambda item: len(item["kind"]))
    assert binding["spec"] == {"policyName": policy["metadata"]["name"], "validationActions": ["Deny"]}
    assert policies("v1.29.9") == []
    assert policies("v1.30.0", enabled=False) == []
    assert policies("v1.30.0", admissionPolicy=False) == []
