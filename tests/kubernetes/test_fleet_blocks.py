"""Domains of a label, as of NVLink, and the blocks that a real slurmctld believes its nodes to be in."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from fleet.decide.topology import part
from tests.container.init_pods import World, slurm_conf
from tests.kubernetes.apiserver import ApiServer
from tests.support.both_sides import JWT, both_sides
from tests.support.kube_topology import ROW, SLURM, Labelled, answers, images
from tests.support.rendered_chart import render
from tests.waiting import until

pytestmark = [pytest.mark.docker, pytest.mark.cluster]

CLIQUE = "nvidia.com/gpu.clique"
DOMAINS = ("4f2a.0", "07")
PARTITION = "PartitionName=nvl Nodes=ALL Topology=blocks"
NOT_THERE = "Requested topology configuration is not available"


def topology(*domains: str) -> dict[str, Any]:
    return {"tiers": [ROW], "blocks": {"label": CLIQUE, "domains": list(domains), "sizes": [2]}}


class Domains(Labelled):
    """Four workers and a partition that is scheduled by blocks; files and environment are the chart's."""

    names = ("w1", "w2", "w3", "w4")
    conf = (PARTITION,)

    def __init__(self, api: ApiServer, slurm: World, directory: Path) -> None:
        self.files, self.worker_env = self.of_chart(topology(*DOMAINS))
        self.images = images(SLURM)
        super().__init__(api, slurm, directory)
        self.wants(topology(*DOMAINS))

    @staticmethod
    def of_chart(wanted: Mapping[str, Any]) -> tuple[Mapping[str, str], Mapping[str, str]]:
        values = {"slurm": {"version": SLURM}, "fleet": {"enabled": True, "policy": {"topology": wanted}}}
        text = yaml.safe_dump_all(render(values, release="slurm", namespace="hpc"))
        made = {(one["kind"], one["metadata"]["name"]): one for one in yaml.safe_load_all(text)}
        (container,) = made["StatefulSet", "slurm-worker"]["spec"]["template"]["spec"]["containers"]
        (born,) = [one["value"] for one in container["env"] if one["name"] == "MINIVM_NODE_PLACE"]
        files = {"topology.yaml": made["ConfigMap", "slurm-config"]["data"]["topology.yaml"]}
        return files, {"MINIVM_NODE_PLACE": born}

    def wants(self, wanted: Mapping[str, Any]) -> None:
        """Write the fleet's policy."""
        self.policy.write_text(json.dumps({"topology": wanted}))

    def reads(self, wanted: Mapping[str, Any], *lines: str) -> None:
        """Write slurmctld's configuration."""
        conf = slurm_conf(*JWT, *lines, accounting=False)
        self.slurm.configure({"slurm.conf": conf, **self.of_chart(wanted)[0]})

    def clique(self, **domains: str | None) -> None:
        for name, domain in domains.items():
            self.api.merge(f"/api/v1/nodes/n-{name}", {"metadata": {"labels": {CLIQUE: domain}}})

    def blocks(self) -> Mapping[str, str]:
        """Each with its nodes; none while slurmctld takes another configuration."""
        code, text = self.controller.code("scontrol", "show", "topology", "blocks")
        lines = text.splitlines() if code == 0 else []
        found = [dict(word.partition("=")[::2] for word in line.split()) for line in lines if line]
        return {one["BlockName"]: one.get("Nodes", "") for one in found}

    def by_blocks(self, *words: str) -> set[str]:
        return self.srun("-p", "nvl", *words)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Domains]:
    with both_sides(tmp_path_factory.mktemp("fleet"), "blocks", Domains) as found:
        yield found


@pytest.fixture
def domains(made: Domains) -> Iterator[Domains]:
    yield made
    made.clique(**dict.fromkeys(made.names))


ONE, OTHER = part(DOMAINS[0]), DOMAINS[1]
EMPTY = {ONE: "", OTHER: "", "unknown": "w[1-4]"}


def test_who_is_in_no_domain_takes_jobs_before_any_fleet_has_looked(domains: Domains) -> None:
    """Without a block the worker would get none of this partition's jobs."""
    assert domains.blocks() == EMPTY
    for name in domains.names:
        assert domains.by_blocks("-w", name) == {name}


def test_a_domain_is_a_block_and_a_job_is_within_one_while_slurmctld_runs_on(domains: Domains) -> None:
    with domains.running():
        domains.clique(w1=DOMAINS[0], w2=OTHER, w3=DOMAINS[0], w4=OTHER)
        wanted = {ONE: "w[1,3]", OTHER: "w[2,4]", "unknown": ""}
        until(lambda: domains.blocks() == wanted, "domains are blocks", seen=domains.log)
        for name, other in {"w1": "w3", "w2": "w4", "w3": "w1", "w4": "w2"}.items():
            assert domains.by_blocks("-N2", "-w", name) == {name, other}, "and not w1 with w2"
        assert domains.srun("-N4") == set(domains.names), "the default partition knows no blocks"
        domains.controller.run("minivm", "restart", "slurmctld")
        until(partial(answers, domains), "slurmctld answers")
        assert domains.blocks() == wanted, "it keeps them"
        domains.clique(w3=None, w4="strange.9")
        wanted = {ONE: "w1", OTHER: "w2", "unknown": "w[3-4]"}
        until(lambda: domains.blocks() == wanted, "out of it", seen=domains.log)
        said = "workers are in no block; add their domains to topology.blocks.domains: strange.9"
        until(lambda: said in domains.log(), "told", seen=domains.log)
        assert domains.switches()["unknown"] == "w[1-4]", "of the tree nothing has changed"


def test_killed_before_each_place_it_ends_the_same(domains: Domains) -> None:
    with domains.running(cut=1, again=2) as fleet:
        domains.clique(w1=DOMAINS[0], w2=DOMAINS[0], w3=OTHER)
        wanted = {ONE: "w[1-2]", OTHER: "w3", "unknown": "w4"}
        until(lambda: fleet.there() and domains.blocks() == wanted, "domains are blocks", seen=domains.log)
        assert fleet.killed >= 2


def test_a_domain_comes_and_goes_in_values_whoever_reads_them_first(domains: Domains) -> None:
    """slurmctld refuses a place in a block that it has not, and a file without a block in which a node is kept."""
    more = topology(*DOMAINS, "new.1")
    with domains.running():
        until(lambda: domains.blocks() == EMPTY, "nobody is in one", seen=domains.log)
        domains.clique(w1="new.1")
        domains.wants(more)
        until(lambda: NOT_THERE in domains.log(), "refused and told", seen=domains.log)
        assert domains.blocks() == EMPTY
        domains.reads(more, PARTITION)
        until(lambda: domains.blocks().get(part("new.1")) == "w1", "its block has come", seen=domains.log)
        domains.reads(topology(*DOMAINS), PARTITION)
        until(lambda: "refused, the last one stays" in domains.controller.run("minivm", "status"), "not yet")
        domains.wants(topology(*DOMAINS))
        until(lambda: domains.blocks().get("unknown") == "w[1-4]", "nobody is in it any more", seen=domains.log)
        # As the next change of the files does, or the next pod.
        domains.controller.run("minivm", "restart", "configwatch")
        until(lambda: domains.blocks() == EMPTY, "and it is gone", seen=domains.controller.account)


def test_blocks_taken_away_leave_a_slurmctld_that_starts(domains: Domains) -> None:
    alone: dict[str, Any] = {"tiers": [ROW]}
    domains.clique(w1=OTHER)
    with domains.running():
        until(lambda: domains.blocks().get(OTHER) == "w1", "in a block", seen=domains.log)
        domains.wants(alone)
        until(lambda: (made := domains.blocks()) and made["unknown"] == made[OTHER] == "", "in none", seen=domains.log)
        domains.reads(alone)
        until(lambda: NOT_THERE in domains.controller.code("scontrol", "show", "topology", "blocks")[1], "no blocks")
        domains.controller.run("minivm", "restart", "slurmctld")
        until(partial(answers, domains), "slurmctld answers")
        assert domains.srun("-N4") == set(domains.names)
        domains.wants(topology(*DOMAINS))
        domains.reads(topology(*DOMAINS), PARTITION)
        until(lambda: domains.blocks().get(OTHER) == "w1", "and back", seen=domains.log)
