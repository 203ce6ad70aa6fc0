"""Labelled Nodes beside a Slurm that has a topology."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import yaml

from cluster.change.pinning import find_newest_here
from images.engine.docker import DockerEngine
from tests.container.conftest import IMAGES
from tests.container.init_pods import World
from tests.kubernetes.apiserver import ApiServer
from tests.support.both_sides import Both, Running
from tests.support.rendered_chart import render
from tests.waiting import until

SLURM = "26.05"
ROW, RACK = "example.com/row", "example.com/rack"
POLICY = '{"topology": {"tiers": ["example.com/row", "example.com/rack"]}}'


def images(slurm: str) -> Mapping[str, str]:
    tags = find_newest_here(DockerEngine().client, IMAGES, slurm=slurm, variant="debian")
    return {role: f"{IMAGES}/{role}:{tag}" for role, tag in tags.items()}


class Labelled(Both):
    def label(self, name: str, row: str | None, rack: str | None) -> None:
        self.api.merge(f"/api/v1/nodes/n-{name}", {"metadata": {"labels": {ROW: row, RACK: rack}}})

    def switches(self) -> Mapping[str, str]:
        """Each switch that has nodes, with these; none while slurmctld takes another configuration."""
        code, text = self.controller.code("scontrol", "show", "topology")
        lines = [line.split() for line in text.splitlines() if line] if code == 0 else []
        found = [dict(word.partition("=")[::2] for word in words) for words in lines]
        return {one["SwitchName"]: one["Nodes"] for one in found if one.get("Nodes")}

    def srun(self, *words: str) -> set[str]:
        return set(self.controller.run("srun", "--chdir=/tmp", *words, "hostname", user="demo").split())


class Fabric(Labelled):
    """Four workers of a release that is told places; files and environment are the chart's."""

    names = ("w1", "w2", "w3", "w4")

    def __init__(self, api: ApiServer, slurm: World, directory: Path) -> None:
        values = {
            "slurm": {"version": SLURM},
            "fleet": {"enabled": True, "policy": {"topology": {"tiers": [ROW, RACK]}}},
        }
        text = yaml.safe_dump_all(render(values, release="slurm", namespace="hpc"))
        made = {(one["kind"], one["metadata"]["name"]): one for one in yaml.safe_load_all(text)}
        self.files = {"topology.yaml": made["ConfigMap", "slurm-config"]["data"]["topology.yaml"]}
        (container,) = made["StatefulSet", "slurm-worker"]["spec"]["template"]["spec"]["containers"]
        env = {one["name"]: one.get("value", "") for one in container["env"]}
        self.worker_env = {"MINIVM_NODE_PLACE": env["MINIVM_NODE_PLACE"]}
        self.images = images(SLURM)
        super().__init__(api, slurm, directory)
        self.policy.write_text(POLICY)

    def racks(self, fleet: Running, row: str = "4") -> None:
        for name, rack in (("w1", "r1"), ("w2", "r2"), ("w3", "r1"), ("w4", "r2")):
            self.label(name, row, rack)
        wanted = {"/": "w[1-4]", f"{row}/": "w[1-4]", f"{row}/r1": "w[1,3]", f"{row}/r2": "w[2,4]"}
        until(lambda: fleet.there() and self.switches() == wanted, "racks are switches", seen=self.log)


def answers(fabric: Labelled) -> bool:
    return fabric.controller.code("scontrol", "ping")[0] == 0
