"""Labels of Nodes in a real API server, and where a real slurmctld believes its nodes to be."""

from __future__ import annotations

import urllib.error
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from fleet.decide.topology import MOST, part
from tests.container.init_pods import World, slurm_conf
from tests.kubernetes.apiserver import ApiServer
from tests.support.both_sides import JWT, both_sides
from tests.support.kube_topology import POLICY, RACK, ROW, Fabric, Labelled, answers, images
from tests.waiting import until


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fabric]:
    with both_sides(tmp_path_factory.mktemp("fleet"), "topology", Fabric) as found:
        yield found


@pytest.fixture
def fabric(made: Fabric) -> Iterator[Fabric]:
    yield made
    for name in made.names:
        made.label(name, None, None)


pytestmark = [pytest.mark.docker, pytest.mark.cluster]

NOWHERE = "unknown/unknown"


def test_a_worker_takes_jobs_before_any_fleet_has_looked(fabric: Fabric) -> None:
    """Without a switch the worker would get no job."""
    assert fabric.switches() == {"/": "w[1-4]", "unknown/": "w[1-4]", NOWHERE: "w[1-4]"}
    assert fabric.srun("-N4") == set(fabric.names)


def test_a_label_is_a_switch_and_a_job_that_wants_one_gets_one(fabric: Fabric) -> None:
    with fabric.running() as fleet:
        fabric.racks(fleet)
        for name in fabric.names:
            others = {"w1": "w3", "w2": "w4", "w3": "w1", "w4": "w2"}
            assert fabric.srun("-N2", "--switches=1", "-w", name) == {name, others[name]}, "and not w1 with w2"
        fabric.label("w3", "5", "r1")
        wanted = {"/": "w[1-4]", "4/": "w[1-2,4]", "4/r1": "w1", "4/r2": "w[2,4]", "5/": "w3", "5/r1": "w3"}
        until(lambda: fabric.switches() == wanted, "a machine in another row is elsewhere", seen=fabric.log)
        fabric.label("w3", None, None)
        until(lambda: fabric.switches().get(NOWHERE) == "w3", "without labels it is unknown", seen=fabric.log)
        assert fabric.srun("-N4") == set(fabric.names), "and takes jobs"


def test_places_outlive_slurmctld_and_the_pod_and_a_pod_elsewhere_is_elsewhere(fabric: Fabric) -> None:
    with fabric.running() as fleet:
        fabric.racks(fleet)
        wanted = fabric.switches()
        job = fabric.controller.run(
            "sbatch", "--parsable", "-w", "w2", "--chdir=/tmp", "--wrap", "sleep 7777", user="demo"
        ).strip()
        until(lambda: "R" in fabric.controller.run("squeue", "-h", "-j", job, "-o", "%t"), "a job runs")
        fabric.scontrol("reconfigure")
        until(lambda: fabric.switches() == wanted, "a reconfigure keeps them")
        fabric.controller.run("minivm", "restart", "slurmctld")
        until(partial(answers, fabric), "slurmctld answers")
        assert fabric.switches() == wanted
        # What a Node is given by the next pod of its name.
        fabric.label("w2", "6", "r1")
        until(lambda: fabric.switches().get("6/r1") == "w2", "placed under a job", seen=fabric.log)
        assert fabric.controller.run("squeue", "-h", "-j", job, "-o", "%t").strip() == "R"
        fabric.controller.run("scancel", job)
        fabric.workers["w1"].container.restart(timeout=60)
        fabric.workers["w1"].wait_ready()
        assert fabric.switches()["4/r1"] == "w[1,3]", "a record stays as it is"
        gone(fabric, "w1")
        fabric.new_pod("w1", "n-w4")
        until(lambda: fabric.switches().get("4/r2") == "w[1,4]", "its pod is on another machine", seen=fabric.log)
        gone(fabric, "w1")
        fabric.new_pod("w1")


def gone(fabric: Fabric, name: str) -> None:
    try:
        fabric.api.ask("DELETE", f"/api/v1/namespaces/default/pods/{name}?gracePeriodSeconds=0")
    except urllib.error.HTTPError as error:
        assert error.code == 404, error


def test_killed_before_each_place_it_ends_the_same(fabric: Fabric) -> None:
    with fabric.running(cut=1, again=2) as fleet:
        fabric.racks(fleet, "7")
        assert fleet.killed >= 2


def test_whatever_labels_say_slurmctld_takes_it_and_starts_with_it(fabric: Fabric) -> None:
    """As long, and as like other names, as the API server takes them."""
    longest, dots = "x" * 63, f"a{'.' * 61}b"
    said = {"w1": (longest, longest), "w2": (dots, "1"), "w3": ("unknown", "unknown"), "w4": ("default", "w4")}
    with fabric.running():
        for name, (row, rack) in said.items():
            fabric.label(name, row, rack)
        until(lambda: fabric.switches().get("default/w4") == "w4", "placed", seen=fabric.log)
        until(lambda: fabric.ask("plan") == "nothing to do\n", "all are", seen=fabric.log)
    before = fabric.switches()
    assert before[NOWHERE] == "w3"
    assert len(before) == 9, "each its own row and rack, and the root"
    assert max(map(len, before)) == MOST, "longer is none, and one is as long"
    fabric.controller.run("minivm", "restart", "slurmctld")
    until(partial(answers, fabric), "slurmctld answers")
    assert fabric.switches() == before
    assert fabric.srun("-N4") == set(fabric.names)


def test_another_policy_contradicts_no_place_of_the_one_before(fabric: Fabric) -> None:
    """A label that was a leaf's is a row's now: of a file Slurm would say that the switch has nodes."""
    fabric.policy.write_text(f'{{"topology": {{"tiers": ["{ROW}"]}}}}')
    try:
        with fabric.running():
            for name in fabric.names:
                fabric.label(name, "4", "r1")
            until(lambda: fabric.switches().get("4") == "w[1-4]", "a row is a leaf", seen=fabric.log)
            fabric.policy.write_text(POLICY)
            until(lambda: fabric.switches().get("4/r1") == "w[1-4]", "a row has racks", seen=fabric.log)
    finally:
        fabric.policy.write_text(POLICY)
    fabric.scontrol("reconfigure")
    until(lambda: fabric.switches() == {"/": "w[1-4]", "4/": "w[1-4]", "4/r1": "w[1-4]"}, "and nothing else is left")


class Older(Labelled):
    """A release that reads a file."""

    names = ("w1", "w2", "w3")

    def __init__(self, api: ApiServer, slurm: World, directory: Path) -> None:
        self.images = images("24.11")
        super().__init__(api, slurm, directory)

    def blocks(self) -> str:
        """A client of another plug-in than slurmctld's, in between, ends on its answer."""
        return self.controller.code("scontrol", "show", "topology")[1]

    def write(self, *words: str, plugin: str = "tree") -> str:
        """What the fleet says, as a person puts it into slurm.topologyConfig."""
        text = self.ask("topology", *(words or ("--tier", ROW, "--tier", RACK)))
        main = slurm_conf(*JWT, f"TopologyPlugin=topology/{plugin}", accounting=False)
        self.slurm.configure({"slurm.conf": main, "topology.conf": text})
        return text


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Older]:
    with both_sides(tmp_path_factory.mktemp("older"), "older", Older) as found:
        yield found


def test_before_places_are_told_a_file_says_the_same(older: Older) -> None:
    longest, dots = "x" * 63, f"a{'.' * 61}b"
    for name, rack in (("w1", "r1"), ("w2", "r2"), ("w3", "r1")):
        older.label(name, "4", rack)
    text = older.write()
    assert text == older.ask("topology", "--tier", ROW, "--tier", RACK)
    wanted = {"/": "w[1-3]", "4/": "w[1-3]", "4/r1": "w1,w3", "4/r2": "w2"}
    until(lambda: older.switches() == wanted, "racks are switches", seen=older.controller.account)
    assert older.srun("-N2", "--switches=1", "-w", "w1") == {"w1", "w3"}
    older.label("w3", None, None)
    older.label("w2", longest, longest)
    older.label("w1", dots, dots)
    older.write()
    until(lambda: older.switches().get(NOWHERE) == "w3", "other labels, other switches", seen=older.controller.account)
    assert older.srun("-N3") == set(older.names), "whatever they say, nobody is left out"


def test_domains_are_blocks_by_a_file_also_where_one_is_small_or_unknown(older: Older) -> None:
    for name, domain in (("w1", "d.1"), ("w2", None), ("w3", "d.1")):
        older.label(name, None, domain)
    text = older.write("--block", RACK, plugin="block")
    block = part("d.1")
    assert text == f"BlockName={block} Nodes=w1,w3\nBlockName=unknown Nodes=w2\nBlockSizes=1\n"
    shown = f"BlockName={block} BlockIndex=0 Nodes=w1,w3 BlockSize=1"
    until(lambda: shown in older.blocks(), "blocks", seen=older.controller.account)
    assert older.srun("-w", "w2") == {"w2"}, "who has none takes jobs"
    older.label("w2", None, "d.2")
    older.label("w1", None, "d.2")
    older.label("w3", None, "d.2")
    older.write("--block", RACK, "--size", "3", plugin="block")
    until(lambda: "BlockSize=3" in older.blocks(), "of its size", seen=older.controller.account)
    assert older.srun("-N3", "--segment=3") == set(older.names)
