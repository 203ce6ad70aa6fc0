"""The fleet's RBAC rights before a real API server: it needs each verb, and has no other."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import urllib.error
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes_asyncio import client

from fleet.act.api_client import GUESTS, ApiClient, KubernetesError
from fleet.act.changes import apply_change
from fleet.act.leader_election import renew_lease
from fleet.cli import explain, with_pod
from fleet.decide.actions import (
    Adopt,
    Cordon,
    CreatePod,
    Delete,
    Evict,
    FleetMemory,
    Free,
    Make,
    NotePool,
    Record,
    SeenVersions,
    ShowOnNode,
    ShowOnPod,
    StartJob,
)
from fleet.decide.decide import Decision
from fleet.policy import Policy
from fleet.world.kubernetes import CORDONED, FENCED, KubeCondition, KubernetesView
from fleet.world.machine import MachineObject, MachineStatus
from fleet.world.slurm import Precondition
from fleet.world.snapshot import FleetSnapshot, Unknown
from fleet.world.worker_pool import PoolStatus, parse_pool
from tests.helm import rendered_for
from tests.kubernetes import programs
from tests.kubernetes.apiserver import ApiServer, Object, api_server, install
from tests.support.kube_paths import PLURAL, path
from tests.waiting import until

pytestmark = pytest.mark.timeout(3600)

PAGE = Path(__file__).resolve().parents[2] / "docs/how-to/switch-on-the-fleet.md"
MACHINES = "/apis/minivm.io/v1alpha1/namespaces/hpc/machines"
TREATS = {"mode": "act", "remedies": {"reboot": {"job": {"template": {}}}}}
WORKERS = {"name": "minivm", "instance": "slurm", "component": "worker"}
WAS = Precondition(False, False, "", "")
STATE = KubeCondition("minivm.io/SlurmState", "True", "TakesJobs", "", 1.0)
Deed = Callable[[ApiClient], Awaitable[object]]


def chart(*, keeps: bool = True, pools: bool = False, **policy: Any) -> list[Object]:
    kinds = {"machines": {"enabled": keeps}, "workerPools": {"enabled": pools}}
    fleet = {"enabled": True, "policy": policy, **kinds}
    values = {"fleet": fleet, "workers": {"pools": {"worker": {"replicas": 1}}}}
    texts = rendered_for("v1.20.2", values, release="slurm", namespace="hpc")
    (text,) = [text for name, text in texts.items() if name.endswith("templates/fleet.yaml")]
    return [item for item in yaml.safe_load_all(text) if item and item["kind"] in PLURAL]


class Place:
    """The chart's account with the chart's rights; a worker, a controller and somebody else's pod; a Node."""

    def __init__(self, api: ApiServer) -> None:
        self.api = api
        self.made = {
            (item["kind"], item["metadata"].get("namespace", "")): item for item in chart(cordon=True, machines=TREATS)
        }
        install(api)
        for name in ("hpc", "other"):
            api.ask("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
        for item in self.made.values():
            api.ask("POST", path(item), item)
        api.ask("POST", "/api/v1/nodes", {"metadata": {"name": "n0"}})
        for name, labels in (
            ("slurm-worker-0", {f"app.kubernetes.io/{key}": said for key, said in WORKERS.items()}),
            ("slurm-controller-0", {}), ("notebook", {}),
        ):  # fmt: skip
            spec = {"nodeName": "n0", "containers": [{"name": "x", "image": "x"}]}
            api.ask("POST", "/api/v1/namespaces/hpc/pods", {"metadata": {"name": name, "labels": labels}, "spec": spec})
        ours = {f"app.kubernetes.io/{key}": said for key, said in WORKERS.items()}
        template: Object = {"metadata": {"labels": ours}, "spec": {"containers": [{"name": "x", "image": "x"}]}}
        pool: Object = {"serviceName": "x", "selector": {"matchLabels": ours}, "template": template}
        metadata = {"name": "slurm-worker", "labels": {**ours, "minivm.io/pool": "worker"}}
        api.ask("POST", "/apis/apps/v1/namespaces/hpc/statefulsets", {"metadata": metadata, "spec": pool})
        api.ask("POST", "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases", {"metadata": {"name": "n0"}})
        api.ask("POST", "/api/v1/namespaces/hpc/secrets", {"metadata": {"name": "slurm-slurm-key"}})
        asked = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
        said = api.ask("POST", "/api/v1/namespaces/hpc/serviceaccounts/slurm-fleet/token", asked)
        self.token = said["status"]["token"]

    def uid(self, where: str) -> tuple[str, str]:
        metadata = self.api.ask("GET", f"/api/v1/{where}")["metadata"]
        return metadata["uid"], metadata["resourceVersion"]

    def do(self, deed: Deed) -> int:
        """Return the API server's answer: 200, or its refusal."""

        async def whole() -> int:
            settings = client.Configuration(host=self.api.url)
            settings.verify_ssl = False
            settings.api_key = {"BearerToken": f"Bearer {self.token}"}
            api = ApiClient(client.ApiClient(settings), "hpc", "slurm")
            try:
                await deed(api)
            except KubernetesError as error:
                return error.status
            finally:
                await api.close()
            return 200

        return asyncio.run(whole())

    @contextlib.contextmanager
    def without(self, item: Object, rule: int, verb: str) -> Iterator[None]:
        less = [dict(one) for one in item["rules"]]
        less[rule]["verbs"] = [one for one in less[rule]["verbs"] if one != verb]
        where = path(item, item["metadata"]["name"])
        # A rule without a verb is none.
        self.api.merge(where, {"rules": [one for one in less if one["verbs"]]})
        try:
            yield
        finally:
            self.api.merge(where, {"rules": item["rules"]})

    def asked_as(self, token: str, method: str, where: str, body: Object | None = None) -> int:
        kept, self.api.token = self.api.token, token
        try:
            if method == "PATCH":
                self.api.merge(where, body or {})
            else:
                self.api.ask(method, where, body)
        except urllib.error.HTTPError as error:
            return error.code
        finally:
            self.api.token = kept
        return 200


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    if not programs.built() and (why := programs.refusal()):
        pytest.skip(f"no Kubernetes: {why}")
    with api_server(programs.build(), tmp_path_factory.mktemp("rights")) as api:
        yield Place(api)


def deeds(place: Place) -> dict[tuple[str, str, str, bool], Deed]:
    """By kind of role, resource, verb, and whether the rule is of named objects: what the fleet does with it."""
    worker, node = place.uid("namespaces/hpc/pods/slurm-worker-0"), place.uid("nodes/n0")

    async def listed(api: ApiClient, kind: str) -> None:
        async for _ in api.list(kind):
            pass

    async def watched(api: ApiClient, kind: str) -> None:
        # From "0" on it begins with what is there.
        async for _ in api.watch(kind, "0"):
            return

    async def told(api: ApiClient) -> None:
        """Tell of a pod in the release's namespace, and of a Node where the Events of Nodes are kept."""
        for namespace in ("hpc", "default"):
            of = {"kind": "Pod", "name": "slurm-worker-0", "namespace": namespace}
            metadata = {"generateName": "fleet-", "namespace": namespace}
            await api.create_event({"metadata": metadata, "involvedObject": of, "reason": "Drained"})

    async def heard(api: ApiClient) -> None:
        await api.lease("slurm-fleet")
        named = {"name": "n0", "namespace": "kube-node-lease"}
        await api.ask("read the lease of n0", (api.leases.read_namespaced_lease, named))

    async def kept(api: ApiClient) -> None:
        # There already, or not the one that was seen: a right is asked for before that.
        await apply_change(api, Make("n0", "n0"))

    async def noted(api: ApiClient) -> None:
        await apply_change(api, Record("n0", "1", MachineStatus()))

    async def started(api: ApiClient) -> None:
        spec = {"template": {"spec": {"containers": [{"name": "x", "image": "x"}]}}}
        await apply_change(
            api, StartJob("x-1", "n0", MachineObject("n0", "u", "1"), "reboot", "x", spec, False, MachineStatus())
        )

    async def held(api: ApiClient) -> None:
        await api.put_lease("slurm-fleet", renew_lease(place.api.ask("GET", LEASE), "me", 1_795_000_000.0))

    seen = SeenVersions("slurm-worker-0", "n0", worker[1], node[1])
    return {
        ("Role", "pods", "list", False): partial(listed, kind="Pod"),
        ("Role", "pods", "watch", False): partial(watched, kind="Pod"),
        ("Role", "pods", "get", False): lambda api: api.is_unchanged(seen),
        ("Role", "pods", "patch", True): lambda api: apply_change(api, Free("slurm-worker-0", *worker, WAS)),
        ("Role", "pods/status", "patch", True): lambda api: apply_change(
            api, ShowOnPod("slurm-worker-0", worker[0], STATE)
        ),
        # Of another pod of this name, so that this one stays: a right is asked for before that is seen.
        ("Role", "pods/eviction", "create", True): lambda api: apply_change(
            api, Evict("slurm-worker-0", "another", "1", "x", WAS)
        ),
        ("Role", "statefulsets", "list", False): partial(listed, kind="StatefulSet"),
        ("Role", "statefulsets", "watch", False): partial(watched, kind="StatefulSet"),
        ("Role", "machines", "list", False): partial(listed, kind="Machine"),
        ("Role", "machines", "watch", False): partial(watched, kind="Machine"),
        ("Role", "machines", "create", False): kept,
        ("Role", "machines/status", "patch", False): noted,
        ("Role", "jobs", "create", False): started,
        ("Role", "leases", "update", True): held,
        ("ClusterRole", "leases", "get", False): heard,
        ("ClusterRole", "events", "create", False): told,
        ("ClusterRole", "nodes", "list", False): partial(listed, kind="Node"),
        ("ClusterRole", "nodes", "watch", False): partial(watched, kind="Node"),
        ("ClusterRole", "nodes", "get", False): lambda api: api.is_unchanged(seen),
        ("ClusterRole", "nodes", "patch", False): lambda api: apply_change(api, Cordon("n0", *node, "fan 3")),
        ("ClusterRole", "nodes/status", "patch", False): lambda api: apply_change(
            api, ShowOnNode("n0", node[0], STATE)
        ),
    }


LEASE = "/apis/coordination.k8s.io/v1/namespaces/hpc/leases/slurm-fleet"


def given(place: Place) -> list[tuple[tuple[str, str, str, bool], Object, int]]:
    """Every verb that the chart gives, with the rule that gives it."""
    found = []
    for (kind, namespace), item in place.made.items():
        for number, rule in enumerate(item.get("rules", [])):
            of = f"{kind} in {namespace}" if namespace else kind
            for resource in rule["resources"]:
                for verb in rule["verbs"]:
                    found.append(((of, resource, verb, "resourceNames" in rule), item, number))
    return found


def test_each_verb_is_needed_and_all_of_them_are_enough(place: Place) -> None:
    verbs = given(place)
    assert {key for key, _, _ in verbs} == deeds(place).keys(), "a right without a deed, or a deed without its right"
    for key, item, rule in verbs:
        until(partial(answered, place, key, 200), f"this is done: {key}")
        with place.without(item, rule, key[2]):
            until(partial(answered, place, key, 403), f"without it this is refused: {key}")
        until(partial(answered, place, key, 200), f"and with it it is not: {key}")


def test_the_condition_of_a_node_has_a_heartbeat_and_goes_as_the_page_says(place: Place) -> None:
    """A condition without a heartbeat is printed as one of the year 1; nobody removes it when the fleet is gone."""
    uid, _ = place.uid("nodes/n0")
    shown = KubeCondition(Policy().node_condition, "True", "TakesJobs", "", 1.0)
    assert place.do(lambda api: apply_change(api, ShowOnNode("n0", uid, shown))) == 200

    def conditions() -> dict[str, Object]:
        found = place.api.ask("GET", "/api/v1/nodes/n0")["status"].get("conditions", [])
        return {one["type"]: one for one in found}

    assert conditions()[shown.type]["lastHeartbeatTime"] > "2020"
    (patch,) = re.findall(r"kubectl patch node NODE --subresource=status -p '(.+)'", PAGE.read_text())
    words = "application/strategic-merge-patch+json"
    place.api.ask("PATCH", "/api/v1/nodes/n0/status", json.loads(patch), kind=words)
    assert shown.type not in conditions()


def test_a_pod_of_somebody_else_in_the_namespace_is_explained_too(place: Place) -> None:
    """`kubectl get pods` prints it beside the release's own."""
    told: list[str] = []

    async def asked(api: ApiClient) -> None:
        empty = FleetSnapshot(KubernetesView(), Unknown("no answer"))
        for name in ("notebook", "nowhere"):
            world = await with_pod(name, empty, api)
            assert isinstance(world.kubernetes, KubernetesView)
            told.extend(
                explain(name, world, Decision((), (), (), FleetMemory()))
                if world.kubernetes.others
                else [f"{name} is not there"]
            )

    assert place.do(asked) == 200
    assert told == ["Slurm does not answer: no answer", "notebook on n0: not ready", "nowhere is not there"]


def answered(place: Place, key: tuple[str, str, str, bool], wanted: int) -> bool:
    return place.do(deeds(place)[key]) == wanted


def test_what_pools_need_is_needed_and_is_there_with_them_alone(place: Place) -> None:
    """Their pods' names are not known beforehand: nothing of it is for named pods alone."""
    item = place.made["Role", ""]
    (more,) = [one for one in chart(pools=True, cordon=True, machines=TREATS) if path(one) == path(item)]
    worker, where = place.uid("namespaces/hpc/pods/slurm-worker-0"), path(item, item["metadata"]["name"])
    spec = {"mode": "fixed", "replicas": 1, "template": {"spec": {"containers": [{"name": "x", "image": "x"}]}}}
    pools = MACHINES.replace("machines", "workerpools")
    ours = {f"app.kubernetes.io/{key}": said for key, said in WORKERS.items()}
    kind = {"apiVersion": "minivm.io/v1alpha1", "kind": "WorkerPool"}
    metadata = {"name": "slurm-worker", "labels": ours}
    pool = parse_pool(place.api.ask("POST", pools, {**kind, "metadata": metadata, "spec": spec}))

    async def created(api: ApiClient) -> None:
        # There already: a right is asked for before that.
        try:
            await apply_change(api, CreatePod("slurm-worker-0", "", pool))
        except KubernetesError as error:
            if error.status:
                raise

    async def noted(api: ApiClient) -> None:
        await apply_change(api, NotePool("slurm-worker", "1", PoolStatus()))

    of_others = {key: deed for key, deed in deeds(place).items() if key[0] == "Role"}
    needs: dict[tuple[str, str], Deed] = {
        ("pods", "create"): created,
        ("pods", "patch"): lambda api: apply_change(api, Adopt("slurm-worker-0", *worker, pool)),
        ("pods/status", "patch"): of_others["Role", "pods/status", "patch", True],
        ("pods/eviction", "create"): of_others["Role", "pods/eviction", "create", True],
        ("workerpools", "list"): partial(_listed, kind="WorkerPool"),
        ("workerpools", "watch"): partial(_listed, kind="WorkerPool", watch=True),
        ("workerpools/status", "patch"): noted,
    }
    rules = {
        (resource, verb): number
        for number, rule in enumerate(more["rules"])
        for resource in rule["resources"]
        for verb in rule["verbs"]
        if rule not in item["rules"]
    }
    assert rules.keys() == needs.keys()
    assert place.do(created) == 403, "without pools there is none of it"
    place.api.merge(where, {"rules": more["rules"]})
    try:
        for key, rule in rules.items():
            until(partial(_answers, place, needs[key], 200), f"with it this is done: {key}")
            with place.without(more, rule, key[1]):
                until(partial(_answers, place, needs[key], 403), f"without it this is refused: {key}")
        theirs = {**kind, "metadata": {"name": "x"}, "spec": spec}
        assert place.asked_as(place.token, "POST", pools, theirs) == 403, "what people want is people's to write"
    finally:
        place.api.merge(where, {"rules": item["rules"]})
        until(partial(_answers, place, created, 403), "it is taken back")


@pytest.mark.parametrize("pools", [False, True])
def test_what_giving_a_machine_up_needs_is_needed_and_is_there_for_it_alone(place: Place, pools: bool) -> None:
    item, worker = place.made["Role", ""], place.uid("namespaces/hpc/pods/slurm-worker-0")
    found = chart(pools=pools, cordon=True, machines=TREATS, fencing="act")
    (more,) = [one for one in found if path(one) == path(item)]
    (rule,) = [number for number, one in enumerate(more["rules"]) if "delete" in one["verbs"]]
    assert more["rules"][rule]["resources"] == ["pods"]

    async def deleted(api: ApiClient) -> None:
        # Of another pod of this name, so that this one stays: a right is asked for before that is seen.
        await apply_change(api, Delete("slurm-worker-0", "another", "n0", place.uid("nodes/n0")[1]))

    where = path(item, item["metadata"]["name"])
    assert place.do(deleted) == 403, "unless machines are given up there is none of it"
    place.api.merge(where, {"rules": more["rules"]})
    try:
        until(partial(_answers, place, deleted, 200), "with it this is done")
        with place.without(more, rule, "delete"):
            until(partial(_answers, place, deleted, 403), "without it this is refused")
        others = "/api/v1/namespaces/hpc/pods/notebook"
        if not pools:
            assert place.asked_as(place.token, "DELETE", others) == 403, "no pod that is not of the release"
    finally:
        place.api.merge(where, {"rules": item["rules"]})
        until(partial(_answers, place, deleted, 403), "it is taken back")
    assert place.uid("namespaces/hpc/pods/slurm-worker-0") == worker


def test_what_lending_needs_is_needed_and_is_there_for_the_named_namespace_alone(place: Place) -> None:
    lends = {"namespaces": ["llm"], "classes": ["inference"], "pools": {"worker": 0.5}}
    found = chart(pools=True, cordon=True, machines=TREATS, lend=lends)
    items = [one for one in found if one["metadata"].get("namespace") == "llm"]
    assert [one["kind"] for one in items] == ["Role", "RoleBinding"]
    kind = f"{GUESTS}llm"
    assert place.do(partial(_listed, kind=kind)) == 403, "unless it is named nothing there is read"
    place.api.ask("POST", "/api/v1/namespaces", {"metadata": {"name": "llm"}})
    pods = "/api/v1/namespaces/llm/pods"
    place.api.ask("POST", "/api/v1/namespaces/llm/serviceaccounts", {"metadata": {"name": "default"}})
    place.api.ask("POST", pods, {"metadata": {"name": "a"}, "spec": {"containers": [{"name": "x", "image": "x"}]}})
    for item in items:
        place.api.ask("POST", path(item), item)
    for verb in ("list", "watch"):
        deed = partial(_listed, kind=kind, watch=verb == "watch")
        until(partial(_answers, place, deed, 200), f"with it this is done: {verb}")
        with place.without(items[0], 0, verb):
            until(partial(_answers, place, deed, 403), f"without it this is refused: {verb}")
    assert place.asked_as(place.token, "GET", f"{pods}/a") == 403
    assert place.asked_as(place.token, "DELETE", f"{pods}/a") == 403
    assert place.asked_as(place.token, "PATCH", f"{pods}/a", {"metadata": {"labels": {"x": "y"}}}) == 403
    assert place.asked_as(place.token, "GET", "/api/v1/namespaces/other/pods") == 403


async def _listed(api: ApiClient, kind: str, *, watch: bool = False) -> None:
    async for _ in api.list(kind) if not watch else api.watch(kind, "0"):
        return


def _answers(place: Place, deed: Deed, wanted: int) -> bool:
    return place.do(deed) == wanted


@pytest.mark.parametrize(
    ("method", "where", "body"),
    [
        ("GET", "/api/v1/namespaces/hpc/secrets", None),
        ("GET", "/api/v1/namespaces/hpc/secrets/slurm-slurm-key", None),
        ("GET", "/api/v1/secrets", None),
        ("POST", "/api/v1/namespaces/hpc/pods", {"metadata": {"name": "x"}}),
        ("DELETE", "/api/v1/namespaces/hpc/pods/slurm-worker-0", None),
        ("POST", "/api/v1/namespaces/hpc/pods/slurm-worker-0/exec?command=true", {}),
        ("PATCH", "/api/v1/namespaces/hpc/pods/notebook", {"metadata": {"labels": {"x": "y"}}}),
        ("PATCH", "/api/v1/namespaces/hpc/pods/notebook/status", {"status": {}}),
        ("PATCH", "/api/v1/namespaces/hpc/pods/slurm-controller-0/status", {"status": {}}),
        ("POST", "/api/v1/namespaces/hpc/pods/notebook/eviction", {"metadata": {"name": "notebook"}}),
        ("POST", "/api/v1/namespaces/hpc/pods/slurm-controller-0/eviction", {"metadata": {"name": "x"}}),
        ("PATCH", f"{MACHINES}/n0", {"spec": {"goal": "up"}}),
        ("DELETE", f"{MACHINES}/n0", None),
        ("GET", MACHINES.replace("hpc", "other"), None),
        ("GET", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", None),
        ("GET", "/api/v1/namespaces/other/pods", None),
        ("GET", "/api/v1/pods", None),
        ("DELETE", "/api/v1/nodes/n0", None),
        ("POST", "/apis/coordination.k8s.io/v1/namespaces/hpc/leases", {"metadata": {"name": "x"}}),
        ("GET", "/apis/coordination.k8s.io/v1/namespaces/hpc/leases", None),
        ("POST", "/api/v1/namespaces/hpc/serviceaccounts/slurm-fleet/token", {"spec": {}}),
        ("GET", "/api/v1/namespaces/other/events", None),
        ("DELETE", "/api/v1/namespaces/other/events/x", None),
        ("GET", "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases", None),
        ("PUT", "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/n0", {"metadata": {"name": "n0"}}),
    ],
)
def test_nothing_else_is_there_for_it(place: Place, method: str, where: str, body: Object | None) -> None:
    """The fleet reads no Secret, no other pod than a worker's, and has no way to more rights."""
    assert place.asked_as(place.token, method, where, body) == 403


def test_without_cordons_in_its_policy_it_may_not_change_a_node(place: Place) -> None:
    (less,) = [item for item in chart(keeps=False) if item["kind"] == "ClusterRole"]
    (more,) = [item for item in place.made.values() if item["kind"] == "ClusterRole"]
    where = path(more, more["metadata"]["name"])
    place.api.merge(where, {"rules": less["rules"]})
    try:
        until(lambda: place.asked_as(place.token, "PATCH", "/api/v1/nodes/n0", {"spec": {}}) == 403, "it is refused")
    finally:
        place.api.merge(where, {"rules": more["rules"]})
        until(lambda: place.asked_as(place.token, "PATCH", "/api/v1/nodes/n0", {"spec": {}}) == 200, "it is given back")


def test_a_machine_may_not_call_a_cordon_the_fleets(place: Place) -> None:
    """Its kubelet writes on its own Node what it likes, but no label of this kind: the API server refuses it."""
    binding: Object = {
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "metadata": {"name": "kubelets"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "system:node"},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "Group", "name": "system:nodes"}],
    }  # fmt: skip
    place.api.ask("POST", path(binding), binding)
    kubelet, own = place.api.kubelet, "/api/v1/nodes/n0"

    def annotated() -> int:
        return place.asked_as(kubelet, "PATCH", own, {"metadata": {"annotations": {"minivm.io/cordoned": "a lie"}}})

    until(lambda: annotated() == 200, "a kubelet writes on its own Node")
    place.api.merge(own, {"metadata": {"labels": {CORDONED: None}}})
    for mark in (CORDONED, FENCED):
        label = {"metadata": {"labels": {mark: "true"}}}
        assert place.asked_as(kubelet, "PATCH", own, label) == 403, mark
        assert place.asked_as(place.token, "PATCH", own, label) == 200, "the fleet may"
