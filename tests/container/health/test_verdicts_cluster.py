"""A running cluster drains a sick node with a reason, runs jobs elsewhere, and takes it back after the all-clear."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from tests.container.init_pods import Pod, slurm_conf, world
from tests.waiting import until

pytestmark = [pytest.mark.docker, pytest.mark.cluster]

ZERO = "/usr/share/minivm/scripts"
RECORDINGS = f"{ZERO}/health.d/recordings"
HOOKS = (
    "Prolog=/usr/libexec/minivm/prolog",
    "Epilog=/usr/libexec/minivm/epilog",
    "TaskProlog=/usr/libexec/minivm/task_prolog",
    "PrologFlags=Alloc",
    "PrologEpilogTimeout=60",
)
# A site's policy: here with waits that suit a test.
POLICY = """\
import json, pathlib
path = pathlib.Path("{zero}/lib/policy.json")
data = json.loads(path.read_text())
data["broker"]["clear_wait_s"] = {{"node": 1, "reboot": 1, "manual": 1, "rma": -1}}
data["broker"]["guard"]["spread_s"] = 1
path.write_text(json.dumps(data))
"""


class Cluster:
    def __init__(self, controller: Pod, workers: dict[str, Pod]) -> None:
        self.controller = controller
        self.workers = workers

    def node(self, name: str) -> tuple[str, str]:
        state, reason = self.controller.run("sinfo", "-h", "-n", name, "-o", "%T|%E").strip().split("|", 1)
        return state, reason

    def wait_state(self, name: str, state: str) -> str:
        until(lambda: self.node(name)[0] == state, f"{name} is {state}", seen=lambda: self.node(name))
        return self.node(name)[1]

    def plant(self, name: str, recording: str, *checks: str) -> int:
        """Run the node's checks on a recording in place of their tools' output, as a drill does."""
        return self.workers[name].code("minivm", "health", *checks, "--recording", f"{RECORDINGS}/{recording}")[0]

    def job_lands_on(self, *options: str) -> str:
        return self.controller.run("srun", "--immediate=100", "--chdir=/tmp", *options, "hostname", user="demo").strip()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with world(tmp_path_factory.mktemp("verdicts"), "verdicts") as made:
        made.configure({"slurm.conf": slurm_conf(*HOOKS, accounting=False)})
        environment = {"MINIVM_ACCOUNTING": "none"}
        controller = made.pod("controller", "slurm-controller", env=environment)
        workers = {name: made.pod("worker", name, env=environment) for name in ("w1", "w2")}
        for pod in (controller, *workers.values()):
            pod.add_user()
        for pod in (controller, *workers.values()):
            pod.wait_ready()
        for pod in workers.values():
            pod.run("/opt/minivm/bin/python3", "-c", POLICY.format(zero=ZERO))
            until(partial(_listens, pod), "the broker listens")
        found = Cluster(controller, workers)
        for name in workers:
            found.wait_state(name, "idle")
        yield found


def test_a_sick_recording_drains_exactly_its_node_and_the_all_clear_brings_it_back(cluster: Cluster) -> None:
    assert cluster.plant("w1", "sick-gpu", "gpu_ecc", "gpu_pcie") == 2
    cluster.wait_state("w1", "drained")
    # The second check's verdict may come after the drain for the first one's.
    until(lambda: "gpu_ecc[reboot]@zero" in cluster.node("w1")[1], "both are named", seen=lambda: cluster.node("w1"))
    assert cluster.node("w1")[1].startswith("minivm: gpu_pcie[manual]@zero GPU 0000:2a:00.0: PCIe gen5 x8")
    assert cluster.node("w2") == ("idle", "none")
    status = partial(cluster.workers["w1"].run, "minivm", "status")
    until(lambda: "health: gpu_pcie (manual)" in status(), "the pod says it too")
    assert cluster.job_lands_on() == "w2", "jobs go elsewhere"
    until(
        lambda: cluster.plant("w1", "healthy", "gpu_ecc", "gpu_pcie") == 0 and _idle(cluster, "w1"), "two good rounds"
    )
    assert cluster.job_lands_on("--nodelist=w1") == "w1"


def _listens(pod: Pod) -> bool:
    return pod.code("test", "-S", "/run/minivm/broker.sock")[0] == 0


def _idle(cluster: Cluster, name: str) -> bool:
    return cluster.node(name)[0] == "idle"


def test_a_persons_drain_is_untouched_by_problem_and_all_clear(cluster: Cluster) -> None:
    cluster.controller.run("scontrol", "update", "nodename=w2", "state=drain", "reason=fan is loud, ask Ann")
    assert cluster.plant("w2", "sick-gpu", "gpu_ecc") == 2
    broker = cluster.workers["w2"]
    until(
        lambda: "drained already: fan is loud" in broker.run("cat", "/run/minivm/broker.json"), "the broker has looked"
    )
    for _ in range(3):
        assert cluster.plant("w2", "healthy", "gpu_ecc") == 0
    until(lambda: '"standing": {}' in broker.run("cat", "/run/minivm/broker.json"), "the broker has seen it")
    assert cluster.node("w2") == ("drained", "fan is loud, ask Ann")
    cluster.controller.run("scontrol", "update", "nodename=w2", "state=resume")
    cluster.wait_state("w2", "idle")


def test_a_person_who_resumes_a_node_is_believed_by_the_prolog(cluster: Cluster) -> None:
    worker = cluster.workers["w1"]
    # Its next round would find the mounts to be well.
    worker.run("minivm", "stop", "health")
    for _ in range(2):
        assert cluster.plant("w1", "sick-host", "mounts") == 2
    assert "mounts[node]@zero /home (nfs4) does not answer" in cluster.wait_state("w1", "drained")
    cluster.controller.run("scontrol", "update", "nodename=w1", "state=resume")
    cluster.wait_state("w1", "idle")
    assert cluster.job_lands_on("--nodelist=w1") == "w1"
    cluster.wait_state("w1", "idle")
    runs = ("cat", "/var/log/minivm/runs.jsonl")
    until(lambda: "a person resumed the node" in worker.run(*runs), "the prolog's run is in the record")
    worker.run("minivm", "start", "health")


def test_a_prolog_took_fresh_verdicts_and_the_job_its_places(cluster: Cluster) -> None:
    output = cluster.controller.run("srun", "--chdir=/tmp", "--nodelist=w2", "printenv", "TMPDIR", user="demo").strip()
    assert output.startswith("/var/tmp/minivm/jobs/")
    records = partial(cluster.workers["w2"].run, "cat", "/var/log/minivm/runs.jsonl")
    until(lambda: '"kind":"prolog"' in records(), "the prolog's run is in the record", seen=records)
    assert '"result":"broken"' not in records()


def test_a_pod_that_begins_on_a_drain_that_asks_for_it_checks_its_machine_deeply(cluster: Cluster) -> None:
    """Last: its worker begins anew."""
    worker, place = cluster.workers["w2"], f"{ZERO}/health.d/stand_in"
    header = '# minivm-check: {"about": "a stand-in", "class": "manual", "when": ["deep"]}'
    worker.run("sh", "-c", f"printf '%s\\n' '#!/bin/sh' '{header}' 'echo ill; exit 80' > {place}; chmod 755 {place}")
    reason = "minivm: fleet: goal+proof: reboot new kernel, a deep check is to pass"
    cluster.controller.run("scontrol", "update", "nodename=w2", "state=drain", f"reason={reason}")
    worker.run("minivm", "stop", "health")  # it writes there
    worker.run("rm", "-rf", "/run/minivm/health", "/run/minivm/verdicts")  # as in a container that is made anew
    worker.container.kill()
    worker.container.start()
    worker.wait_ready()
    said = partial(worker.code, "cat", "/run/minivm/health/deep/said.json")
    until(lambda: '"state":"problem"' in said()[1], "it has checked", seen=worker.account)
    assert "stand_in[manual]@zero ill" in said()[1]
    assert cluster.node("w2") == ("drained", reason), "the drain is the fleet's to lift"
