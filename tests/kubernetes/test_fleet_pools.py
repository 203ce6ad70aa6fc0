"""WorkerPools before a real API server: their kind as the chart has it; pods are made, replaced and taken over.

Of Slurm only what slurmrestd says: which pods may go is decided on that.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from fleet.act.api_client import ApiClient, KubernetesError
from fleet.act.changes import apply_change
from fleet.act.watch_cache import WatchCache
from fleet.decide.actions import Adopt, Change, CreatePod, Drain, Evict, FleetMemory, Forget, NotePool, Undrain
from fleet.decide.decide import decide
from fleet.policy import Policy
from fleet.world.kubernetes import KubernetesView
from fleet.world.slurm import parse_slurm
from fleet.world.snapshot import FleetSnapshot
from fleet.world.worker_pool import EndedPod, PoolCondition, PoolStatus, WorkerPool, parse_pool
from tests.kubernetes import programs
from tests.kubernetes.apiserver import ApiServer, Object, api_server, install
from tests.kubernetes.fleet_api import do, refused
from tests.support.kube_pools import KIND, POOLS
from tests.waiting import until

pytestmark = pytest.mark.timeout(3600)

PODS = "/api/v1/namespaces/default/pods"
LABELS = {"app.kubernetes.io/name": "minivm", "app.kubernetes.io/instance": "slurm"}
READY = {"type": "Ready", "status": "True"}
NOT_READY = {"type": "Ready", "status": "False"}


def template(image: str) -> Object:
    return {"metadata": {"labels": {"minivm.io/pool": "gpu"}}, "spec": {"containers": [{"name": "x", "image": image}]}}


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    if not programs.built() and (why := programs.refusal()):
        pytest.skip(f"no Kubernetes: {why}")
    with api_server(programs.build(), tmp_path_factory.mktemp("pools")) as api:
        install(api)
        api.ask("POST", "/api/v1/namespaces/default/serviceaccounts", {"metadata": {"name": "default"}})
        yield api


@pytest.fixture
def pool(api: ApiServer) -> Iterator[str]:
    spec = {"mode": "fixed", "replicas": 3, "template": template("worker:1")}
    api.ask("POST", POOLS, {**KIND, "metadata": {"name": "slurm-gpu", "labels": LABELS}, "spec": spec})
    yield f"{POOLS}/slurm-gpu"
    api.ask("DELETE", f"{POOLS}/slurm-gpu")
    for item in api.ask("GET", PODS)["items"]:
        now = {"gracePeriodSeconds": 0, "kind": "DeleteOptions", "apiVersion": "v1"}
        api.ask("DELETE", f"{PODS}/{item['metadata']['name']}", now)


def read(api: ApiServer, where: str) -> WorkerPool:
    return parse_pool(api.ask("GET", where))


def pods(api: ApiServer) -> dict[str, Object]:
    return {item["metadata"]["name"]: item for item in api.ask("GET", PODS)["items"]}


def images(api: ApiServer) -> dict[str, str]:
    return {name: pod["spec"]["containers"][0]["image"] for name, pod in pods(api).items()}


class Cluster:
    """A real API server; a Slurm of a few dictionaries; kubelets that say what is to be said."""

    def __init__(self, api: ApiServer) -> None:
        self.api = api
        self.slurm: dict[str, Object] = {}
        self.memory = FleetMemory()
        self.made: list[Change] = []
        self.now = 1_800_000_000.0
        self.policy = Policy(node_condition="")

    def kubelets(self) -> None:
        """Each pod has a Node, runs, and registers; what is to go goes."""
        for name, pod in pods(self.api).items():
            if "deletionTimestamp" in pod["metadata"]:
                self._gone(name)
            elif not pod["spec"].get("nodeName"):
                node = f"n-{name}"
                if not self._there(f"/api/v1/nodes/{node}"):
                    made = {"metadata": {"name": node}, "status": {"conditions": [READY]}}
                    self.api.ask("POST", "/api/v1/nodes", made)
                bound = {"metadata": {"name": name}, "target": {"kind": "Node", "name": node}}
                self.api.ask("POST", f"{PODS}/{name}/binding", bound)
            elif not pod["status"].get("conditions") or pod["status"].get("phase") == "Pending":
                self.api.merge(f"{PODS}/{name}/status", {"status": {"phase": "Running", "conditions": [READY]}})
                here = self.slurm.setdefault(name, {"name": name, "state": ["IDLE", "DYNAMIC_NORM"]})
                here["state"] = [state for state in here["state"] if state != "NOT_RESPONDING"]

    def _there(self, where: str) -> bool:
        try:
            self.api.ask("GET", where)
        except urllib.error.HTTPError:
            return False
        return True

    def _gone(self, name: str) -> None:
        now = {"gracePeriodSeconds": 0, "kind": "DeleteOptions", "apiVersion": "v1"}
        self.api.ask("DELETE", f"{PODS}/{name}", now)

    def job(self, name: str, *, on: bool = True) -> None:
        kept = [state for state in self.slurm[name]["state"] if state not in ("IDLE", "ALLOCATED")]
        self.slurm[name] |= {"state": ["ALLOCATED" if on else "IDLE", *kept], "alloc_cpus": int(on)}

    def ends(self, name: str) -> None:
        """As a kubelet does it that runs out of memory."""
        said = {"phase": "Failed", "reason": "Evicted", "message": "low on memory", "conditions": [NOT_READY]}
        self.api.merge(f"{PODS}/{name}/status", {"status": said})
        self.slurm[name]["state"].append("NOT_RESPONDING")

    def looks(self, most: int = 60) -> None:
        """Until nothing is to be done any more."""
        quiet = 0
        for _ in range(most):
            quiet = 0 if do(self.api, self.look) else quiet + 1
            if quiet == 2:
                return
            self.kubelets()
            self.now += 30
        raise AssertionError(f"it never settles: {self.made[-5:]}")

    async def look(self, api: ApiClient) -> int:
        cache = WatchCache(api, pools=True)
        for kind in filter(None, (cache.nodes, cache.pods, cache.sets, cache.pools)):
            await kind.list()
        here = cache.world()
        assert isinstance(here, KubernetesView) and not here.unread, here
        jobs = [
            {"job_id": 7, "job_state": ["RUNNING"], "nodes": name}
            for name, node in self.slurm.items()
            if node.get("alloc_cpus")
        ]
        decision = decide(
            FleetSnapshot(here, parse_slurm(self.slurm.values(), jobs, [])), self.memory, self.now, self.policy
        )
        self.memory = decision.memory
        return sum([await self.perform(api, change) for change in decision.changes])

    async def perform(self, api: ApiClient, change: Change) -> bool:
        match change:
            case Drain(name, reason):
                state = [*(one for one in self.slurm[name]["state"] if one != "DRAIN"), "DRAIN"]
                said = {"reason": reason, "comment": change.comment, "reason_changed_at": int(self.now)}
                self.slurm[name] |= {"state": state, **said}
            case Undrain(name) | Forget(name):
                state = [one for one in self.slurm[name]["state"] if one != "DRAIN"]
                self.slurm[name] |= {"state": state, "comment": ""}
            case CreatePod() | Adopt() | NotePool():
                if not await apply_change(api, change):
                    return False
            case Evict(name):
                assert not self.slurm.get(name, {}).get("alloc_cpus"), "a pod with a job"
                if not await apply_change(api, change):
                    return False
            case _:
                return await apply_change(api, change)
        self.made.append(change)
        return True

    def done(self, *kinds: type) -> list[str]:
        return [getattr(one, "pod", getattr(one, "name", "")) for one in self.made if isinstance(one, kinds)]


def test_pods_are_made_as_a_statefulset_makes_them_and_the_next_template_reaches_all_but_the_busy_one(
    api: ApiServer, pool: str
) -> None:
    cluster = Cluster(api)
    cluster.looks()
    assert images(api) == dict.fromkeys(("slurm-gpu-0", "slurm-gpu-1", "slurm-gpu-2"), "worker:1")
    found = pods(api)["slurm-gpu-1"]
    (owner,) = found["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"], owner["controller"]) == ("WorkerPool", read(api, pool).uid, True)
    assert (found["spec"]["hostname"], found["spec"]["subdomain"]) == ("slurm-gpu-1", "slurm-gpu")
    assert found["metadata"]["labels"]["minivm.io/pool"] == "gpu"
    busy = found["metadata"]["uid"]
    cluster.job("slurm-gpu-1")
    api.merge(pool, {"spec": {"template": template("worker:2")}})
    cluster.looks()
    assert images(api) == {"slurm-gpu-0": "worker:2", "slurm-gpu-1": "worker:1", "slurm-gpu-2": "worker:2"}
    assert pods(api)["slurm-gpu-1"]["metadata"]["uid"] == busy
    status = read(api, pool).status
    assert (status.wanted, status.ready, status.updated) == (3, 3, 2)
    cluster.job("slurm-gpu-1", on=False)
    cluster.looks()
    assert set(images(api).values()) == {"worker:2"}
    assert sorted(cluster.done(Evict)) == ["slurm-gpu-0", "slurm-gpu-1", "slurm-gpu-2"], "each of them once"
    assert {one.type: one.status for one in read(api, pool).status.conditions} == {"Ready": "True", "Updated": "True"}


def test_a_pod_that_has_ended_is_made_anew_whatever_its_budget_says(api: ApiServer, pool: str) -> None:
    cluster = Cluster(api)
    cluster.looks()
    budget = {"maxUnavailable": 0, "selector": {"matchLabels": {"minivm.io/pool": "gpu"}}}
    budgets = f"/apis/{api.newest('policy')}/namespaces/default/poddisruptionbudgets"
    api.ask("POST", budgets, {"metadata": {"name": "gpu"}, "spec": budget})
    try:
        before = {name: pod["metadata"]["uid"] for name, pod in pods(api).items()}
        cluster.ends("slurm-gpu-1")
        cluster.looks()
        after = {name: pod["metadata"]["uid"] for name, pod in pods(api).items()}
        assert after.keys() == before.keys()
        assert {name for name, uid in after.items() if uid != before[name]} == {"slurm-gpu-1"}
        (noted,) = read(api, pool).status.ended
        assert (noted.uid, noted.times, noted.why) == (before["slurm-gpu-1"], 1, "Failed: Evicted: low on memory")
        assert {one.type: one.status for one in read(api, pool).status.conditions}["Ready"] == "True"
    finally:
        api.ask("DELETE", f"{budgets}/gpu")


def test_a_wrong_edit_that_the_server_accepts_leaves_the_last_good_spec_in_force(api: ApiServer, pool: str) -> None:
    """Each look is that of a new fleet: what it holds by is in the object.

    The kind's rules, which Kubernetes checks from 1.25 on, do not look into a template.
    """
    cluster = Cluster(api)
    cluster.looks()
    api.merge(pool, {"spec": {"template": {"spec": {"containers": []}}, "replicas": 9}})
    api.ask("DELETE", f"{PODS}/slurm-gpu-1", {"gracePeriodSeconds": 0, "kind": "DeleteOptions", "apiVersion": "v1"})
    cluster.looks()
    assert sorted(pods(api)) == ["slurm-gpu-0", "slurm-gpu-1", "slurm-gpu-2"]
    updated = {one.type: one for one in read(api, pool).status.conditions}["Updated"]
    assert (updated.status, updated.reason) == ("False", "Mistake")
    assert updated.message.startswith("cannot read spec.template.spec.containers: it names no container")
    api.merge(pool, {"spec": {"template": template("worker:1"), "replicas": 2}})
    cluster.looks()
    assert sorted(pods(api)) == ["slurm-gpu-0", "slurm-gpu-1"]
    assert {one.type: one.status for one in read(api, pool).status.conditions} == {"Ready": "True", "Updated": "True"}


def test_a_definition_of_an_older_version_gets_the_status_that_it_knows(api: ApiServer, pool: str) -> None:
    where = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/workerpools.minivm.io"
    kind = api.ask("GET", where)
    status = kind["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"]
    last_good = status.pop("lastGood")
    api.ask("PUT", where, kind)
    try:
        cluster = Cluster(api)

        def is_older() -> bool:
            api.merge(f"{pool}/status", {"status": {"lastGood": "x"}})
            return not read(api, pool).status.last_good

        until(is_older, "the definition is the older one")
        cluster.looks()
        assert (read(api, pool).status.ready, read(api, pool).status.last_good) == (3, "")
    finally:
        kind = api.ask("GET", where)
        kind["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"] = {
            **status,
            "lastGood": last_good,
        }
        api.ask("PUT", where, kind)


def test_a_label_that_is_written_with_a_pods_status_is_not_believed(api: ApiServer, pool: str) -> None:
    cluster = Cluster(api)
    cluster.looks()
    for name in pods(api):
        spec = {"containers": [{"name": "x", "image": "worker:1", "env": [{"name": "MINIVM_TEMPLATE", "value": "a"}]}]}
        words = {"metadata": {"labels": {"minivm.io/template": "another"}}, "spec": spec}
        api.merge(f"{PODS}/{name}/status", words)
        assert pods(api)[name]["metadata"]["labels"]["minivm.io/template"] == "another", "so much is allowed"
    before = {name: pod["metadata"]["uid"] for name, pod in pods(api).items()}
    cluster.looks()
    assert {name: pod["metadata"]["uid"] for name, pod in pods(api).items()} == before
    assert not cluster.done(Drain, Evict) and read(api, pool).status.updated == 3


def test_of_two_pools_of_one_label_the_younger_one_is_told_and_has_no_pods(api: ApiServer, pool: str) -> None:
    older = read(api, pool).created
    until(lambda: time.time() >= older + 1, "the next one is younger")
    spec = {"mode": "fixed", "replicas": 2, "template": template("worker:9")}
    api.ask("POST", POOLS, {**KIND, "metadata": {"name": "slurm-other", "labels": LABELS}, "spec": spec})
    try:
        cluster = Cluster(api)
        cluster.looks()
        assert set(images(api)) == {"slurm-gpu-0", "slurm-gpu-1", "slurm-gpu-2"}
        (said,) = [one for one in read(api, f"{POOLS}/slurm-other").status.conditions if one.type == "Updated"]
        assert (said.status, said.reason) == ("False", "Refused") and "slurm-gpu, older" in said.message
    finally:
        api.ask("DELETE", f"{POOLS}/slurm-other")


def test_it_is_scaled_as_everything_is(api: ApiServer, pool: str) -> None:
    cluster = Cluster(api)
    cluster.looks()
    api.merge(f"{pool}/scale", {"spec": {"replicas": 1}})
    cluster.job("slurm-gpu-2")
    cluster.looks()
    assert sorted(pods(api)) == ["slurm-gpu-0", "slurm-gpu-2"], "a busy one stays"
    assert api.ask("GET", f"{pool}/scale")["status"]["replicas"] == 2
    cluster.job("slurm-gpu-2", on=False)
    cluster.looks()
    assert sorted(pods(api)) == ["slurm-gpu-0"]


def test_a_pod_is_made_once_and_never_over_anothers(api: ApiServer, pool: str) -> None:
    theirs: Object = {"metadata": {"name": "slurm-gpu-0"}, "spec": {"containers": [{"name": "x", "image": "theirs"}]}}
    api.ask("POST", PODS, theirs)
    make = CreatePod("slurm-gpu-0", "", read(api, pool))
    with pytest.raises(KubernetesError, match="a pod of that name is there"):
        do(api, lambda fleet: apply_change(fleet, make))
    found = pods(api)["slurm-gpu-0"]
    assert found["spec"]["containers"][0]["image"] == "theirs" and "ownerReferences" not in found["metadata"]


def test_pods_that_a_statefulset_has_left_are_taken_over_as_they_are(api: ApiServer, pool: str) -> None:
    labels = {**LABELS, "app.kubernetes.io/component": "worker", "minivm.io/pool": "gpu"}
    for number in range(3):
        spec = {"containers": [{"name": "x", "image": "worker:1"}]}
        api.ask("POST", PODS, {"metadata": {"name": f"slurm-gpu-{number}", "labels": labels}, "spec": spec})
    before = {name: pod["metadata"]["uid"] for name, pod in pods(api).items()}
    cluster = Cluster(api)
    cluster.looks()
    assert {name: pod["metadata"]["uid"] for name, pod in pods(api).items()} == before, "none is another one"
    owners = {pod["metadata"]["ownerReferences"][0]["uid"] for pod in pods(api).values()}
    assert owners == {read(api, pool).uid} and not cluster.done(Evict, Drain, CreatePod)
    api.merge(pool, {"spec": {"template": template("worker:2")}})
    cluster.looks()
    assert set(images(api).values()) == {"worker:2"}


def test_one_that_has_changed_since_is_not_taken_over(api: ApiServer, pool: str) -> None:
    theirs: Object = {"metadata": {"name": "slurm-gpu-0"}, "spec": {"containers": [{"name": "x", "image": "x"}]}}
    seen = api.ask("POST", PODS, theirs)["metadata"]
    api.merge(f"{PODS}/slurm-gpu-0", {"metadata": {"labels": {"a": "b"}}})
    late = Adopt("slurm-gpu-0", seen["uid"], seen["resourceVersion"], read(api, pool))
    assert not do(api, lambda fleet: apply_change(fleet, late))
    assert "ownerReferences" not in pods(api)["slurm-gpu-0"]["metadata"]


FULL = PoolStatus(
    3, 3, 2, 1, 1, "abc", 7, (PoolCondition("Ready", "False", "NotReady", "not ready: x", 1_795_000_000),
    PoolCondition("Updated", "False", "Waits", "w-2: job 7 runs", 1_795_000_000)),
    (EndedPod("x", "u", 2, 1_795_000_001, "Failed"),), "def",
)  # fmt: skip


def test_what_is_noted_is_read_back_and_only_on_what_was_seen(api: ApiServer, pool: str) -> None:
    """Every field passes the schema: one that the API server does not know it would drop without a word."""
    seen = read(api, pool)
    assert do(api, lambda fleet: apply_change(fleet, NotePool(seen.name, seen.version, FULL)))
    assert read(api, pool).status == FULL
    assert not do(api, lambda fleet: apply_change(fleet, NotePool(seen.name, seen.version, PoolStatus())))
    assert read(api, pool).status == FULL


@pytest.mark.parametrize(
    "spec",
    [
        {"mode": "stretchy"},
        {"elastic": {"min": 0}},
        {"elastic": {"min": -1, "max": 4}},
        {"elastic": {"min": 0, "max": 0}},
        {"elastic": {"min": 0, "max": 4, "step": 0}},
        {"replicas": -1},
        {"nodeSelector": {}},
        {"update": {"when": "soon"}},
        {"update": {"maxUnavailable": -1}},
        {"template": None},
        {"template": {"spec": None}},
    ],
)
def test_what_is_none_is_refused_at_once(api: ApiServer, pool: str, spec: Object) -> None:
    assert "spec." in refused(api, pool, {"spec": spec})


def test_what_people_say_of_an_update_has_its_defaults_and_its_columns(api: ApiServer, pool: str) -> None:
    api.merge(pool, {"spec": {"update": {}}})
    assert api.ask("GET", pool)["spec"]["update"] == {"maxUnavailable": 1, "when": "idle"}
    seen = read(api, pool)
    do(api, lambda fleet: apply_change(fleet, NotePool(seen.name, seen.version, FULL)))
    said = columns(api)["slurm-gpu"]
    wanted = {"Mode": "fixed", "Wanted": 3, "Ready": 2, "Updated": 1, "Away": 1, "When": "idle", "Max": None}
    wanted |= {"Why": "w-2: job 7 runs"}
    assert wanted.items() <= said.items()
    assert list(said)[-1] == "Age" and said["Age"] not in (None, "", "<unknown>", "<invalid>")


def test_of_an_elastic_one_its_columns_say_how_many_there_are_at_most(api: ApiServer) -> None:
    spec = {"mode": "elastic", "elastic": {"min": 2, "max": 17}, "template": template("worker:1")}
    api.ask("POST", POOLS, {**KIND, "metadata": {"name": "slurm-grows", "labels": LABELS}, "spec": spec})
    try:
        said = columns(api)["slurm-grows"]
        assert (said["Mode"], said["Max"], said["Wanted"]) == ("elastic", 17, None), "nobody has noted anything yet"
    finally:
        api.ask("DELETE", f"{POOLS}/slurm-grows")


def columns(api: ApiServer) -> dict[str, dict[str, Any]]:
    """As `kubectl get workerpools` shows them, by name."""
    headers = {"Authorization": f"Bearer {api.token}", "Accept": "application/json;as=Table;v=v1;g=meta.k8s.io"}
    request = urllib.request.Request(f"{api.url}{POOLS}", headers=headers)
    with urllib.request.urlopen(request, context=api.context, timeout=60) as reply:
        table: dict[str, Any] = json.load(reply)
    names = [one["name"] for one in table["columnDefinitions"]]
    return {one["cells"][0]: dict(zip(names, one["cells"], strict=True)) for one in table["rows"]}
