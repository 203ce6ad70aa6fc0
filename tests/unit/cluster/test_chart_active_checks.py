"""Active checks in the chart: a partition that every job preempts, and refusals where they would do harm."""

from __future__ import annotations

import re
from typing import Any

import pytest

from cluster import ClusterError
from tests.support.rendered_chart import render

ON = {"enabled": True}


def slurm_conf(values: dict[str, Any]) -> str:
    objects = render(values, release="slurm", namespace="hpc")
    name = ("ConfigMap", "slurm-config")
    (config,) = [item for item in objects if (item["kind"], item["metadata"]["name"]) == name]
    text: str = config["data"]["slurm.conf"]
    return text


def test_by_default_slurm_preempts_nothing() -> None:
    text = slurm_conf({})
    assert "Preempt" not in text
    assert "minivm-active" not in text


def test_only_the_partition_of_active_checks_is_preempted() -> None:
    text = slurm_conf({"activeChecks": ON, "workers": {"pools": {"a": {}, "b": {}}}})
    assert "PreemptType=preempt/partition_prio" in text
    partitions = [line for line in text.splitlines() if line.startswith("PartitionName=")]
    active = [line for line in partitions if line.startswith("PartitionName=minivm-active ")]
    assert len(active) == 1
    for option in ("Nodes=pool_a,pool_b", "PriorityTier=0", "PreemptMode=CANCEL", "AllowGroups=root", "Hidden=YES"):
        assert option in active[0].split()
    assert partitions[0] == "PartitionName=DEFAULT PreemptMode=OFF", "for all that follow, also of slurm.extraConfig"
    assert not [line for line in partitions[1:] if line not in active and "PreemptMode" in line]


def test_the_controller_gets_the_settings() -> None:
    objects = render(
        {"activeChecks": {**ON, "account": "ops", "switchWeight": 999999999}}, release="slurm", namespace="hpc"
    )
    name = ("StatefulSet", "slurm-controller")
    (controller,) = [item for item in objects if (item["kind"], item["metadata"]["name"]) == name]
    env = {item["name"]: item.get("value") for item in controller["spec"]["template"]["spec"]["containers"][0]["env"]}
    assert env["MINIVM_ACTIVE_CHECKS"] == "1"
    assert env["MINIVM_ACTIVE_IDLE"] == "600s"
    assert env["MINIVM_ACTIVE_SHARE"] == "0.25"
    assert env["MINIVM_ACTIVE_ACCOUNT"] == "ops"
    assert env["MINIVM_ACTIVE_SWITCH_WEIGHT"] == "999999999"
    (made,) = [
        item for item in objects if item["metadata"]["name"] == "slurm-controller" and item["kind"] == "StatefulSet"
    ]
    mounts = made["spec"]["template"]["spec"]["containers"][0]["volumeMounts"]
    assert {"name": "state", "mountPath": "/var/lib/minivm/active", "subPath": "active"} in mounts, "for the next one"


@pytest.mark.parametrize(("mode", "made"), [(None, "propose"), ("act", "act"), ("off", None)])
def test_the_controller_gets_what_happens_to_jobs_of_a_broken_machine(mode: str | None, made: str | None) -> None:
    values = {"slurm": {"requeue": {"guiltyNode": mode}}} if mode else {}
    objects = render(values, release="slurm", namespace="hpc")
    name = ("StatefulSet", "slurm-controller")
    (controller,) = [item for item in objects if (item["kind"], item["metadata"]["name"]) == name]
    container = controller["spec"]["template"]["spec"]["containers"][0]
    env = {item["name"]: item.get("value") for item in container["env"]}
    assert (env.get("MINIVM_REQUEUE"), env.get("MINIVM_REQUEUE_MOST")) == (made, "2" if made else None)
    mount = {"name": "state", "mountPath": "/var/lib/minivm/requeue", "subPath": "requeue"}
    assert (mount in container["volumeMounts"]) == bool(made), "the count outlives the pod"


@pytest.mark.parametrize("slurm", [{"files": {"job_submit.lua": "x"}}, {"config": {"JobSubmitPlugins": "lua"}}])
def test_preflight_is_refused_beside_a_filter_of_the_site(slurm: dict[str, Any]) -> None:
    with pytest.raises(ClusterError, match=r"activeChecks\.preflight\.enabled"):
        render({"activeChecks": {"preflight": {"enabled": True}}, "slurm": slurm}, release="slurm", namespace="hpc")


def test_preflight_brings_the_filter_that_it_needs() -> None:
    values = {"activeChecks": {"preflight": {"enabled": True}}, "slurm": {"bringBackJobs": False}}
    assert "JobSubmitPlugins=lua" in slurm_conf(values)
    assert "minivm-active" not in slurm_conf(values)


FLEET = {"enabled": True, "workerPools": {"enabled": True}}
ELASTIC = {"kind": "WorkerPool", "elastic": {"min": 1, "max": 2}}


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"slurm": {"config": {"PreemptType": "preempt/qos"}}}, "sets PreemptType to preempt/qos"),
        ({"slurm": {"extraConfig": "preemptmode=requeue"}}, "sets PreemptMode to requeue"),
        ({"slurm": {"extraConfig": "A=1\n partitionname=x Nodes=ALL PreemptMode=CANCEL"}}, "a partition there has"),
        ({"slurm": {"extraConfig": "PartitionName=x Nodes=ALL PriorityTier=0"}}, "a partition there has"),
        ({"slurm": {"partitions": {"all": {"options": {"PreemptMode": "REQUEUE"}}}}}, "partitions.all.options.Preempt"),
        ({"slurm": {"partitions": {"all": {"options": {"PriorityTier": "0"}}}}}, "PriorityTier is 0"),
        ({"slurm": {"partitions": {"minivm-active": {"pools": ["a"]}}}}, "give yours another name"),
        ({"slurm": {"scripts": {"enabled": False}}}, "slurm.scripts.enabled is false"),
        ({"slurm": {"config": {"AccountingStorageEnforce": "associations"}}}, "activeChecks.account is empty"),
        ({"fleet": FLEET, "workers": {"pools": {"a": ELASTIC}}}, "the pool a shrinks"),
    ],
)
def test_what_conflicts_with_active_checks_is_refused(values: dict[str, Any], reason: str) -> None:
    values.setdefault("workers", {"pools": {"a": {}}})
    with pytest.raises(ClusterError, match=re.escape(reason)):
        render({"activeChecks": ON, **values}, release="slurm", namespace="hpc")
