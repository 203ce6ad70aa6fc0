"""The fleet between a real API server and a real Slurm with its slurmrestd and workers.

A cordon reaches Slurm, a person's drain stays, and killed between any two changes it ends the same.
"""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.error
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import pytest
import yaml

from tests.container.conftest import docker, image_of
from tests.helm import rendered_for
from tests.support.both_sides import PODS, ROOT, Both, Running, both_sides
from tests.support.kube_paths import PLURAL, path
from tests.support.ports import free_port
from tests.waiting import PATIENCE, until


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    with both_sides(tmp_path_factory.mktemp("fleet"), "fleet", Both) as found:
        yield found


pytestmark = [pytest.mark.docker, pytest.mark.cluster]


@pytest.fixture(autouse=True)
def as_it_was(both: Both) -> Iterator[None]:
    yield
    both.policy.unlink(missing_ok=True)
    for name in both.workers:
        both.cordon(name, None, on=False)
        both.scontrol("update", f"nodename={name}", "state=undrain", "comment=")
        both.api.merge(f"{PODS}/{name}", {"metadata": {"annotations": None, "labels": {"minivm.io/free": None}}})
        # An undrain makes slurmctld ask the node anew.
        until(partial(idle, both, name), f"{name} is as it was", seen=partial(both.node, name))


def idle(both: Both, name: str) -> bool:
    return both.node(name)["state"] == "IDLE"


def test_a_cordon_is_a_drain_with_its_reason_and_its_end_takes_it_back(both: Both) -> None:
    assert "would show on w1" in both.ask("plan"), "a plan touches nothing"
    assert both.shown("w1") == ""
    with both.running():
        until(lambda: both.shown("w1") == "TakesJobs", "Slurm's state is shown on the pod", seen=both.log)
        both.cordon("w1", "fan 3; gpu_count[rma]@9f2c001")
        wanted = "minivm: fleet: cordon: fan 3 gpu_count rma 9f2c001"
        until(lambda: both.reason("w1") == wanted, "the cordon is a drain", seen=both.log)
        assert both.node("w1")["Comment"] == "minivm: fleet: held 1 cordon"
        until(lambda: both.shown("w1") == f"Drained {wanted}", "and shown on the pod", seen=both.log)
        assert both.reason("w2") == ""
        until(lambda: ("w1", "Drained") in both.events(), "and an Event of it", seen=both.log)
        said = both.ask("why", "w1")
        assert "n-w1 cordoned" in said
        assert wanted in said
        both.cordon("w1", None, on=False)
        until(lambda: both.reason("w1") == "", "the uncordon undrains", seen=both.log)
        until(lambda: both.shown("w1") == "TakesJobs", "and shows it", seen=both.log)
        assert "Comment" not in both.node("w1")
    assert both.controller.run("srun", "-w", "w1", "--chdir=/tmp", "hostname", user="demo").strip() == "w1"


def versions(both: Both) -> dict[str, str]:
    """Of every object that the fleet may change, and of its Events; what Slurm says of its nodes beside them."""
    kinds = (
        *(f"/api/v1/{kind}" for kind in ("nodes", "pods", "events", "configmaps", "secrets", "serviceaccounts")),
        "/apis/apps/v1/statefulsets", "/apis/batch/v1/jobs", "/apis/coordination.k8s.io/v1/leases",
        f"/apis/{both.api.newest('policy')}/poddisruptionbudgets",
    )  # fmt: skip
    found = {
        f"{kind} {one['metadata']['name']}": str(one["metadata"]["resourceVersion"])
        for kind in kinds
        for one in both.api.ask("GET", kind)["items"]
        # The API server renews those by itself.
        if one["metadata"].get("namespace", "default") == "default"
    }
    return found | {f"slurm {name}": str(both.node(name)) for name in both.workers}


def changed(before: Mapping[str, str], now: Mapping[str, str]) -> set[str]:
    return {name for name in before if now.get(name) != before[name]}


def test_whoever_only_asks_touches_nothing_on_either_side(both: Both) -> None:
    both.cordon("w1", "fan 3")
    both.scontrol("update", "nodename=w2", "state=drain", "reason=by hand")
    before = versions(both)
    said = both.ask("plan")
    assert "would drain w1 in Slurm" in said and "would show on w2" in said, "it has something to do"
    both.ask("status", "--output", "json")
    both.ask("why", "w1")
    assert versions(both) == before
    with both.running():
        # Each of its writes has its own time.
        awaited = {"/api/v1/pods w1", "/api/v1/pods w2", "slurm w1"}
        until(lambda: awaited <= changed(before, versions(both)), "who runs it does, and it is seen", seen=both.log)


def test_a_persons_drain_is_told_shown_and_never_touched(both: Both) -> None:
    both.scontrol("update", "nodename=w1", "state=drain", "reason=look at fan 3")
    before = both.node("w1")
    with both.running():
        both.cordon("w1", "rack 4")
        until(lambda: "w1: drained by another actor (look at fan 3)" in both.log(), "it is told", seen=both.log)
        until(lambda: both.shown("w1") == "Drained look at fan 3", "and shown", seen=both.log)
        shown = "Drained default.slurm: w1: Drained look at fan 3"
        until(lambda: both.shown_on_node("w1") == shown, "on its Node, too", seen=both.log)
        both.cordon("w2", "rack 4")
        until(lambda: both.reason("w2"), "the other one is drained", seen=both.log)
        both.cordon("w1", None, on=False)
        both.cordon("w2", None, on=False)
        until(lambda: both.reason("w2") == "", "and undrained", seen=both.log)
    assert both.node("w1") == before, "reason, author and time"


def test_a_drain_that_a_person_lifts_comes_back_once(both: Both) -> None:
    with both.running():
        both.cordon("w1", "rack 4")
        until(lambda: both.reason("w1") == "minivm: fleet: cordon: rack 4", "drained", seen=both.log)
        both.scontrol("update", "nodename=w1", "state=resume")
        until(lambda: both.reason("w1") == "minivm: fleet: cordon: rack 4 (again)", "and again", seen=both.log)
        both.scontrol("update", "nodename=w1", "state=resume")
        until(lambda: "w1: resumed by a person 2 times" in both.log(), "then it is told", seen=both.log)
        assert both.reason("w1") == ""


def test_a_pod_that_is_to_go_is_evicted_when_its_job_is_over_and_no_sooner(both: Both) -> None:
    job = both.controller.run(
        "sbatch", "--parsable", "-w", "w2", "--chdir=/tmp", "--wrap", "sleep 7777", user="demo"
    ).strip()
    until(lambda: both.controller.run("squeue", "-h", "-o", "%t").split() == ["R"], "the job runs")
    first = both.api.ask("GET", f"{PODS}/w2")["metadata"]["uid"]
    with both.running():
        both.api.merge(f"{PODS}/w2", {"metadata": {"annotations": {"minivm.io/leave": "new template"}}})
        until(lambda: f"w2: must leave, and waits for jobs {job}" in both.log(), "it waits", seen=both.log)
        assert both.reason("w2") == "minivm: fleet: leave: new template"
        both.scontrol("suspend", job)
        until(lambda: "ALLOC" not in both.node("w2")["state"], "the node looks idle", seen=lambda: both.node("w2"))
        both.scontrol("resume", job)
        assert both.api.ask("GET", f"{PODS}/w2")["metadata"]["uid"] == first
        assert "deletionTimestamp" not in both.api.ask("GET", f"{PODS}/w2")["metadata"]
        both.controller.run("scancel", job)
        until(lambda: gone(both, first), "its pod is evicted", seen=both.log)
        both.api.ask("DELETE", f"{PODS}/w2?gracePeriodSeconds=0") if there(both) else None
        both.new_pod("w2")
        until(lambda: both.reason("w2") == "", "the next pod takes jobs", seen=both.log)


def test_a_busy_pod_is_protected_from_everybody_and_freed_after(both: Both) -> None:
    selector = {"matchExpressions": [{"key": "minivm.io/free", "operator": "DoesNotExist"}]}
    budget = {"metadata": {"name": "b"}, "spec": {"maxUnavailable": 0, "selector": selector}}
    budgets = f"/apis/{both.api.newest('policy')}/namespaces/default/poddisruptionbudgets"
    both.api.ask("POST", budgets, budget)
    first = both.api.ask("GET", f"{PODS}/w2")["metadata"]["uid"]
    assert both.eviction("w2") == 429, "from its first moment"
    job = both.controller.run(
        "sbatch", "--parsable", "-w", "w2", "--chdir=/tmp", "--wrap", "sleep 7777", user="demo"
    ).strip()
    until(lambda: both.controller.run("squeue", "-h", "-o", "%t").split() == ["R"], "the job runs")
    with both.running():
        both.cordon("w2", "rack 4")
        until(lambda: both.reason("w2"), "drained", seen=both.log)
        until(lambda: both.shown("w2").startswith("Draining"), "and shown", seen=both.log)
        assert (both.eviction("w2"), both.free("w2")) == (429, False)
        both.controller.run("scancel", job)
        until(lambda: both.free("w2"), "freed when its job is over", seen=both.log)
        both.cordon("w2", None, on=False)
        until(lambda: both.reason("w2") == "", "undrained", seen=both.log)
        assert (both.eviction("w2"), both.free("w2")) == (429, False), "and protected again"
        both.cordon("w2", "rack 4")
        until(lambda: both.free("w2"), "freed again", seen=both.log)
        until(lambda: both.eviction("w2") == 200, "anybody may evict it now")
        both.api.ask("DELETE", f"{PODS}/w2?gracePeriodSeconds=0") if there(both) else None
        both.new_pod("w2")
        both.cordon("w2", None, on=False)
        until(lambda: both.reason("w2") == "", "the next pod takes jobs", seen=both.log)
    assert both.api.ask("GET", f"{PODS}/w2")["metadata"]["uid"] != first
    both.api.ask("DELETE", f"{budgets}/b")


def there(both: Both) -> bool:
    return any(pod["metadata"]["name"] == "w2" for pod in both.api.ask("GET", PODS)["items"])


def gone(both: Both, uid: str) -> bool:
    pods = [pod["metadata"] for pod in both.api.ask("GET", PODS)["items"]]
    return not [pod for pod in pods if pod["uid"] == uid and "deletionTimestamp" not in pod]


def all_show(both: Both, fleet: Running, state: str, free: bool) -> bool:
    names = list(both.workers)
    shown = {both.shown(name) for name in names} == {state} and {both.free(name) for name in names} == {free}
    return fleet.there() and shown


@pytest.mark.parametrize("cut", range(1, 17))
def test_killed_before_any_change_of_a_cordon_and_its_end_it_ends_the_same(both: Both, cut: int) -> None:
    """Two workers, each drained, shown on two objects, freed, protected, undrained, shown again: sixteen changes, each
    of which is the one that is not made."""
    with both.running():
        until(lambda: {both.shown(name) for name in both.workers} == {"TakesJobs"}, "all is shown", seen=both.log)
    names = list(both.workers)
    with both.running(cut=cut) as fleet:
        for on, state in ((True, "Drained minivm: fleet: cordon: rack 4"), (False, "TakesJobs")):
            for name in names:
                both.cordon(name, "rack 4" if on else None, on=on)
            until(partial(all_show, both, fleet, state, on), f"both are {state}", seen=both.log)
        assert fleet.killed == 1
        both.quiet()
    assert [both.reason(name) for name in names] == ["", ""]
    assert [both.node(name).get("Comment") for name in names] == [None, None]


def test_a_users_bytes_that_are_no_text_keep_the_fleet_from_nothing(both: Both) -> None:
    """slurmrestd tells of a job's comment as it was given, and which jobs hold a node is asked before a pod goes."""
    script = r"cd /tmp && sbatch --parsable --nodelist=w1 --comment=$'a\xff' --job-name=$'\xc3' --wrap='sleep 1000'"
    job = both.controller.run("bash", "-c", script, user="demo").strip()
    with both.running():
        both.cordon("w1", "rack 4")
        until(lambda: both.reason("w1") == "minivm: fleet: cordon: rack 4", "it is drained", seen=both.log)
        both.controller.run("scancel", job)
        until(lambda: both.free("w1"), "others may evict it", seen=both.log)
        both.cordon("w1", None, on=False)
        until(lambda: both.reason("w1") == "", "and it is undrained", seen=both.log)
        assert "no JSON object" not in both.log()


def test_a_slurm_that_does_not_answer_is_not_a_slurm_without_nodes(both: Both) -> None:
    both.cordon("w1", "rack 4")
    with both.running():
        until(lambda: both.reason("w1"), "drained", seen=both.log)
    both.cordon("w1", None, on=False)
    said = both.ask("plan", MINIVM_FLEET_SLURM="127.0.0.1:9")
    assert "Slurm: cannot ask slurmrestd: 127.0.0.1:9" in said
    assert "would" not in said
    wrong = both.directory / "wrong.key"
    wrong.write_bytes(b"k" * 32)
    assert "would" not in both.ask("plan", MINIVM_FLEET_KEY=str(wrong))
    assert both.reason("w1"), "nothing is done"


SLINKY = "nodeset.slinky.slurm.net"


def states_for_slinky(both: Both, name: str) -> dict[str, str]:
    """Return the true conditions by which programs made for Slinky's operator read a pod, with their messages."""
    conditions = both.api.ask("GET", f"{PODS}/{name}")["status"]["conditions"]
    states = (each for each in conditions if each["type"].startswith("SlurmNodeState") and each["status"] == "True")
    return {each["type"].removeprefix("SlurmNodeState"): each.get("message", "") for each in states}


def may_delete(both: Both, name: str) -> bool:
    """Decide as NVSentinel's drainer does."""
    states = states_for_slinky(both, name).keys()
    return "Drain" in states and not states & {"Undrain", "Allocated", "Mixed", "Completing"}


def test_programs_made_for_slinky_see_a_drain_and_wait_for_its_jobs(both: Both) -> None:
    """The reads and writes of NVSentinel's drainer and drain monitor, and of a person with Slinky's annotation."""
    both.policy.write_text('{"slinky": true}')
    words = ("sbatch", "--parsable", "-w", "w1", "--chdir=/tmp", "--wrap", "sleep 7777")
    job = both.controller.run(*words, user="demo").strip()
    reason = {f"{SLINKY}/node-cordon-reason": "[T] [NVSentinel] 79 GPU:0 - Xid 79"}
    with both.running():
        until(lambda: states_for_slinky(both, "w1").keys() & {"Allocated", "Mixed"}, "the job is shown", seen=both.log)
        until(lambda: states_for_slinky(both, "w2") == {"Idle": ""}, "the other is idle", seen=both.log)
        both.api.merge("/api/v1/nodes/n-w1", {"metadata": {"annotations": reason}, "spec": {"unschedulable": True}})
        until(lambda: "Drain" in states_for_slinky(both, "w1"), "its cordon is a drain", seen=both.log)
        assert not may_delete(both, "w1"), "while its job runs"
        message = states_for_slinky(both, "w1")["Drain"]
        assert message.startswith("slurm-operator: ") and "Xid 79" in message, "no fault for the drain monitor"
        both.controller.run("scancel", job)
        until(lambda: may_delete(both, "w1"), "its job is over", seen=both.log)
        gone = dict.fromkeys(reason)
        both.api.merge("/api/v1/nodes/n-w1", {"metadata": {"annotations": gone}, "spec": {"unschedulable": None}})
        until(lambda: states_for_slinky(both, "w1") == {"Idle": ""}, "the machine is well again", seen=both.log)
        both.api.merge(f"{PODS}/w2", {"metadata": {"annotations": {f"{SLINKY}/pod-cordon": "true"}}})
        until(lambda: may_delete(both, "w2"), "a cordon of the pod is a drain", seen=both.log)
        both.api.merge(f"{PODS}/w2", {"metadata": {"annotations": {f"{SLINKY}/pod-cordon": None}}})
        until(lambda: states_for_slinky(both, "w2") == {"Idle": ""}, "and its end undrains", seen=both.log)
        both.scontrol("update", "nodename=w2", "state=drain", "reason=[HC] fan 3")
        until(
            lambda: states_for_slinky(both, "w2").get("Drain") == "[HC] fan 3", "a fault for the monitor", seen=both.log
        )
        both.policy.write_text("{}")
        until(lambda: not states_for_slinky(both, "w2"), "switched off, nothing is left", seen=both.log)
        types = {each["type"] for each in both.api.ask("GET", f"{PODS}/w2")["status"]["conditions"]}
        assert not any(type_.startswith("SlurmNodeState") for type_ in types)


def test_a_policy_with_a_mistake_is_told_and_the_last_good_one_stays(both: Both) -> None:
    both.policy.write_text('{"cordon": true}')
    with both.running():
        both.scontrol("update", "nodename=w1", "state=drain", "reason=look at fan 3")
        until(lambda: unschedulable(both), "a person's drain cordons", seen=both.log)
        both.policy.write_text('{"cordons": false}')
        until(lambda: "did you mean" in both.log(), "it is told", seen=both.log)
        assert unschedulable(both)
        both.policy.write_text("{}")
        until(lambda: not unschedulable(both), "and taken back", seen=both.log)


def unschedulable(both: Both) -> bool:
    return bool(both.api.ask("GET", "/api/v1/nodes/n-w1")["spec"].get("unschedulable"))


LEASES = "/apis/coordination.k8s.io/v1/namespaces/default/leases"


def test_of_two_fleets_one_acts_and_when_it_is_killed_the_other_goes_on(both: Both) -> None:
    both.api.ask("POST", LEASES, {"metadata": {"name": "slurm-fleet"}})
    one, other = Second(both, "fleet-a"), Second(both, "fleet-b")
    try:
        one.start()
        until(lambda: one.holds(), "it takes the Lease", seen=one.log)
        other.start()
        until(lambda: "200" in other.ready(), "the other one waits for it", seen=other.log)
        assert "waits for the Lease" in other.ready()
        both.cordon("w1", "rack 4")
        until(lambda: both.reason("w1") == "minivm: fleet: cordon: rack 4", "one of them drains", seen=one.log)
        assert "drain" not in other.log()
        one.process.kill()
        one.process.wait()
        both.cordon("w1", None, on=False)
        until(lambda: both.reason("w1") == "", "the other one goes on where it was", seen=other.log)
        until(lambda: "undrain w1 in Slurm" in other.log(), "and says so", seen=other.log)
        assert other.holds()
        # Told to end it gives the Lease back: nobody waits for it to run out.
        other.process.terminate()
        assert other.process.wait(timeout=PATIENCE) == 0, other.log()
        assert both.api.ask("GET", f"{LEASES}/slurm-fleet")["spec"].get("holderIdentity", "") == ""
    finally:
        for fleet in (one, other):
            fleet.process.kill()
            fleet.process.wait()
        both.api.ask("DELETE", f"{LEASES}/slurm-fleet")


class Second:
    """A fleet of several, as its pod starts it."""

    def __init__(self, both: Both, name: str) -> None:
        self.both, self.name, self.port = both, name, free_port()
        self.process: subprocess.Popen[bytes]

    def start(self) -> None:
        env = self.both.env(
            MINIVM_POD_NAME=self.name, MINIVM_FLEET_LEASE="slurm-fleet", MINIVM_FLEET_HTTP=f"127.0.0.1:{self.port}"
        )
        with (self.both.directory / f"{self.name}.log").open("ab") as log:
            command = [sys.executable, "-u", "-m", "fleet", "run"]
            self.process = subprocess.Popen(command, env=env, cwd=ROOT, stdout=log, stderr=log)

    def log(self) -> str:
        return (self.both.directory / f"{self.name}.log").read_text()

    def holds(self) -> bool:
        spec = self.both.api.ask("GET", f"{LEASES}/slurm-fleet").get("spec", {})
        return str(spec.get("holderIdentity", "")).startswith(f"{self.name}-")

    def ready(self) -> str:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/readyz", timeout=10) as reply:
                return f"{reply.status} {reply.read().decode()}"
        except OSError as error:
            return str(error)


def test_its_image_with_the_charts_account_keeps_them_so(both: Both, tmp_path: Path) -> None:
    """As its pod runs it: the image, without rights, with the account, the rights and the settings of the chart."""
    values = {"fleet": {"enabled": True}, "workers": {"pools": {"worker": {"replicas": 2}}}}
    texts = rendered_for("v1.20.2", values, release="slurm", namespace="default")
    (text,) = [text for name, text in texts.items() if name.endswith("templates/fleet.yaml")]
    # The workers here have names of their own.
    text = text.replace("slurm-worker-0", "w1").replace("slurm-worker-1", "w2")
    made = [item for item in yaml.safe_load_all(text) if item]
    objects = [item for item in made if item["kind"] in PLURAL]
    for item in objects:
        both.api.ask("POST", path(item, namespace="default"), item)
    asked = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    said = both.api.ask("POST", "/api/v1/namespaces/default/serviceaccounts/slurm-fleet/token", asked)
    given = {
        "account/token": said["status"]["token"].encode(),
        "account/ca.crt": (both.directory / "certs" / "apiserver.crt").read_bytes(),
        "key/jwt_hs256.key": both.key.read_bytes(),
        "policy/policy.json": next(one for one in made if one["kind"] == "ConfigMap")["data"]["policy.json"].encode(),
    }
    for name, data in given.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
        (tmp_path / name).chmod(0o444)
    for folder in (tmp_path, *(one.parent for one in tmp_path.glob("*/*"))):
        folder.chmod(0o755)
    (container,) = next(one for one in made if one["kind"] == "Deployment")["spec"]["template"]["spec"]["containers"]
    env = {one["name"]: one["value"] for one in container["env"] if "value" in one} | {
        "MINIVM_POD_NAME": "slurm-fleet-1", "MINIVM_POD_NAMESPACE": "default", "MINIVM_FLEET_SLURM": both.rest,
        "MINIVM_FLEET_HTTP": f"127.0.0.1:{free_port()}", "MINIVM_FLEET_PAGE": f"127.0.0.1:{free_port()}",
        "KUBERNETES_SERVICE_HOST": "kubernetes.default.svc", "KUBERNETES_SERVICE_PORT": both.api.url.rpartition(":")[2],
    }  # fmt: skip
    at = {"account": "/var/run/secrets/kubernetes.io/serviceaccount", "key": "/mnt/minivm/secrets/slurm",
          "policy": "/mnt/minivm/config/fleet"}  # fmt: skip
    name = f"fleet-{os.getpid()}"
    docker(
        "run", "--detach", "--name", name, "--network", "host", "--add-host", "kubernetes.default.svc:127.0.0.1",
        "--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges",
        *(word for key, value in env.items() for word in ("--env", f"{key}={value}")),
        *(word for key, to in at.items() for word in ("--volume", f"{tmp_path / key}:{to}:ro")),
        image_of("fleet"), *container["args"],
    )  # fmt: skip

    def log() -> str:
        return docker("logs", name)

    try:
        until(lambda: both.shown("w1") == "TakesJobs", "it shows Slurm's word", seen=log)
        both.cordon("w1", "fan 3")
        until(lambda: both.reason("w1") == "minivm: fleet: cordon: fan 3", "the cordon is a drain", seen=log)
        until(lambda: ("w1", "Drained") in both.events(), "and told", seen=log)
        assert "w1" in docker("exec", name, "fleet", "why", "w1")
        both.cordon("w1", None, on=False)
        until(lambda: both.reason("w1") == "", "and its end takes it back", seen=log)
        docker("stop", "--time", "90", name)
        assert docker("inspect", "--format", "{{.State.ExitCode}}", name) == "0", log()
        assert both.api.ask("GET", f"{LEASES}/slurm-fleet")["spec"].get("holderIdentity", "") == ""
        assert "403" not in log() and "forbidden" not in log(), log()
    finally:
        docker("rm", "--force", name)
        for item in objects:
            both.api.ask("DELETE", path(item, item["metadata"]["name"], namespace="default"))
