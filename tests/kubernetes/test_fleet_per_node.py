"""A pool with a worker on each Node of a label, on real kubelets; and, of a Slurm that can be told, where they are."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping

import pytest

from tests.helm import KINDS
from tests.kubernetes.kubectl import Kubernetes, Object
from tests.kubernetes.world import IMAGES, SMALL, Release
from tests.slurm import version_of
from tests.waiting import until

pytestmark = pytest.mark.timeout(1200)
NODES = ("n1", "n2", "n3")
LABEL, ROW, RACK = "example.com/slurm", "example.com/row", "example.com/rack"


class PerNode(Release):
    def label(self, node: str, **said: str | None) -> None:
        """By the names of LABELS; None takes it away."""
        words = [f"{LABELS[key]}={text}" if text is not None else f"{LABELS[key]}-" for key, text in said.items()]
        self.kubernetes("label", "node", node, "--overwrite", *words)

    def workers(self) -> dict[str, str]:
        """Node -> who is there, of those that are ready."""
        pods, ready = self.pods(), self.ready()
        found = {
            name.removeprefix("worker-"): pods[name] for name in pods if name.startswith("worker-") and ready[name]
        }
        assert all(pod["spec"]["nodeName"] == node for node, pod in found.items()), (
            "each on the Node that it is named by"
        )
        return {node: pod["metadata"]["uid"] for node, pod in found.items()}

    def there(self, *nodes: str) -> bool:
        """These and no other, in Kubernetes and in Slurm."""
        pods = {name.removeprefix("worker-") for name in self.pods() if name.startswith("worker-")}
        return pods == set(nodes) == set(self.workers()) and set(self.slurm_states()) == set(nodes)

    def slurm_states(self) -> Mapping[str, str]:
        return {name.removeprefix(f"{self.name}-worker-"): state for name, state in self.states().items()}

    def wait_there(self, *nodes: str) -> float:
        begun = time.monotonic()
        until(lambda: self.there(*nodes), f"a worker on each of {nodes}", within=300, seen=self.account)
        return time.monotonic() - begun

    def account(self) -> str:
        said = self.kubernetes.attempt(
            "-n", self.namespace, "logs", "-l", "app.kubernetes.io/component=fleet", "--prefix", "--tail=30"
        )
        pools = self.kubernetes.attempt("-n", self.namespace, "get", "workerpools", "-o", "yaml")
        return f"{self.why()}{said.stdout}{said.stderr}{pools.stdout}{self.states()}"

    def job_on(self, node: str) -> str:
        options = ("-D", "/tmp", "-o", "/dev/null", "-w", f"{self.name}-worker-{node}")
        job = self.slurm_as_user("sbatch", "--parsable", *options, "--wrap", "sleep 3600")
        self.wait_for(job, "RUNNING")
        return job

    def status(self) -> Object:
        found: Object = self.get("workerpool", f"{self.name}-worker").get("status", {})
        return found


KIND = KINDS / "workerpool.json"
LABELS = {"slurm": LABEL, "row": ROW, "rack": RACK}


def told() -> bool:
    """Tell whether this Slurm accepts node places while it runs."""
    return version_of(f"{IMAGES}/worker:latest") >= "25.05"


@pytest.fixture(scope="module")
def kind(kubernetes: Kubernetes) -> Iterator[None]:
    """As a second release on the same Kubernetes finds it. 1.20 does not know rules in it."""
    if kubernetes.attempt("get", "crd", "workerpools.minivm.io").returncode == 0:
        yield
        return
    kubernetes("create", "--validate=false", "-f", str(KIND))
    yield
    kubernetes("delete", "-f", str(KIND))


@pytest.fixture(scope="module")
def pool(kubernetes: Kubernetes, kind: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PerNode]:
    """Two of the Nodes have the label, of which it gets its workers."""
    if set(kubernetes.nodes()) < set(NODES):
        pytest.skip(f"its Nodes are not {NODES}")
    own = {"kind": "WorkerPool", "perNode": True, "nodeSelector": {LABEL: "yes"}, "replicas": 1}
    fleet: Object = {"enabled": True, "workerPools": {"enabled": True}, **SMALL}
    over: Object = {"podConditions": {"enabled": False}, "workers": {"pools": {"worker": own}}, "fleet": fleet}
    if told():
        over["slurm"] = {"version": version_of(f"{IMAGES}/worker:latest")[:5]}
        fleet["policy"] = {"topology": {"tiers": [ROW, RACK]}}
    made = PerNode(kubernetes, tmp_path_factory.mktemp("keys"), name="pn", namespace="per-node", over=over)
    for node in ("n1", "n2"):
        made.label(node, slurm="yes")
    try:
        begun = time.monotonic()
        made.install()
        until(lambda: made.pods() and all(made.ready().values()), "all are ready", within=300, seen=made.why)
        made.wait_there("n1", "n2")
        print(f"install to a worker on each of two Nodes: {time.monotonic() - begun:.1f} s")
        yield made
    finally:
        made.shut()
        for node in NODES:
            made.label(node, slurm=None, row=None, rack=None)
        made.kubernetes("-n", made.namespace, "delete", "workerpool", "--all", "--ignore-not-found")
        made.uninstall()
        kubernetes("delete", "namespace", made.namespace, "--wait=false")


@pytest.fixture
def two(pool: PerNode) -> PerNode:
    for node in NODES:
        pool.label(node, slurm=None if node == "n3" else "yes")
    pool.wait_there("n1", "n2")
    pool.wait_idle()
    return pool


def test_a_node_that_gets_the_label_gets_a_worker_and_no_other_is_touched(two: PerNode) -> None:
    before = two.workers()
    two.label("n3", slurm="yes")
    print(f"Node labelled to its worker ready: {two.wait_there('n1', 'n2', 'n3'):.1f} s")
    assert two.workers().items() > before.items()
    two.wait_idle()
    names = {f"{two.name}-worker-{node}" for node in NODES}
    assert set(two.as_user("alice", "srun -N3 hostname").split()) == names


def test_a_label_taken_away_takes_the_worker_when_it_is_idle_and_never_its_job(two: PerNode) -> None:
    job, before = two.job_on("n2"), two.workers()
    for node in ("n1", "n2"):
        two.label(node, slurm=None)
    begun = time.monotonic()
    until(
        lambda: set(two.slurm_states()) == {"n2"}, "the idle one is gone, its record too", within=240, seen=two.account
    )
    print(f"label taken away to the idle worker gone: {time.monotonic() - begun:.1f} s")
    until(lambda: two.slurm_states()["n2"] == "draining", "the busy one takes no more", seen=two.account)
    assert two.workers() == {"n2": before["n2"]}
    assert (two.state(job), two.restarts(job)) == ("RUNNING", 0)
    two.slurm("scancel", job)
    begun = time.monotonic()
    until(
        lambda: not two.states() and not any(name.startswith("worker-") for name in two.pods()),
        "and goes after its job", within=240, seen=two.account,
    )  # fmt: skip
    print(f"job's end to its worker gone: {time.monotonic() - begun:.1f} s")


def test_a_label_given_back_under_a_job_leaves_the_worker_as_it_is(two: PerNode) -> None:
    job, before = two.job_on("n1"), two.workers()
    two.label("n1", slurm=None)
    until(lambda: two.slurm_states()["n1"] == "draining", "it takes no more", seen=two.account)
    two.label("n1", slurm="yes")
    until(lambda: two.slurm_states()["n1"] in ("mixed", "allocated"), "it does", seen=two.account)
    assert two.workers() == before
    assert (two.state(job), two.restarts(job)) == ("RUNNING", 0)
    two.slurm("scancel", job)


def test_its_budget_is_counted_and_lets_nobody_evict_a_worker(two: PerNode) -> None:
    def counted() -> bool:
        status = two.get("poddisruptionbudgets", f"{two.name}-worker")["status"]
        assert status["disruptionsAllowed"] == 0
        return bool(status["expectedPods"] == status["currentHealthy"] == 2)

    until(counted, "both are counted", seen=two.account)
    one, before = f"{two.name}-worker-n1", two.workers()
    version = two.get("poddisruptionbudgets", f"{two.name}-worker")["apiVersion"]
    eviction = {"apiVersion": version, "kind": "Eviction", "metadata": {"name": one, "namespace": two.namespace}}
    raw = f"/api/v1/namespaces/{two.namespace}/pods/{one}/eviction"
    done = two.kubernetes.attempt("create", "--raw", raw, "-f", "-", stdin=json.dumps(eviction))
    assert done.returncode and "disruption budget" in done.stderr, done
    assert two.workers() == before


@contextlib.contextmanager
def cordoned(release: Release, node: str) -> Iterator[None]:
    release.kubernetes("cordon", node)
    try:
        yield
    finally:
        release.kubernetes("uncordon", node)


def test_a_node_that_is_cordoned_gets_its_worker_when_that_is_over(two: PerNode) -> None:
    with cordoned(two, "n3"):
        two.label("n3", slurm="yes")
        until(lambda: two.status().get("wanted") == 3, "one more is wanted", seen=two.account)
        assert two.there("n1", "n2"), two.account()
    two.wait_there(*NODES)


def switches(release: Release) -> Mapping[str, str]:
    """Each that has workers, with these."""
    lines = release.slurm("scontrol", "show", "topology").splitlines()
    found = [dict(word.partition("=")[::2] for word in line.split()) for line in lines if line]
    return {one["SwitchName"]: one["Nodes"] for one in found if one.get("Nodes")}


def test_labels_of_nodes_are_switches_and_a_job_gets_one_of_them(two: PerNode) -> None:
    if not told():
        pytest.skip("this Slurm reads its switches from a file: its tests are test_fleet_topology's")
    for node, rack in zip(NODES, ("r1", "r2", "r1"), strict=True):
        two.label(node, slurm="yes", row="4", rack=rack)
    begun = time.monotonic()
    two.wait_there(*NODES)
    racks = {"4/r1": "pn-worker-n[1,3]", "4/r2": "pn-worker-n2"}
    until(lambda: switches(two).items() >= racks.items(), "racks are switches", seen=two.account)
    print(f"Nodes labelled to switches of three workers, one of them new: {time.monotonic() - begun:.1f} s")
    two.wait_idle()
    for first in ("n1", "n3"):
        said = two.as_user("alice", f"srun -N2 --switches=1 -w pn-worker-{first} hostname")
        assert set(said.split()) == {"pn-worker-n1", "pn-worker-n3"}
    before = two.workers()
    two.label("n3", rack="r2")
    moved = {"4/r1": "pn-worker-n1", "4/r2": "pn-worker-n[2-3]"}
    until(lambda: switches(two).items() >= moved.items(), "another rack", seen=two.account)
    assert two.workers() == before
    two.label("n3", rack=None, row=None)
    until(lambda: switches(two).get("unknown/unknown") == "pn-worker-n3", "nobody knows", seen=two.account)
    assert len(two.as_user("alice", "srun -N3 hostname").split()) == 3, "and it takes jobs"
