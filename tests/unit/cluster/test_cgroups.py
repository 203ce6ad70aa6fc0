"""Cgroups of a pod: which pods get their own, what is created for them, and that nothing is left behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cluster import ClusterError, cgroups, values
from cluster.cgroups import RUNTIME_CLASS
from cluster.roles import HIERARCHIES
from cluster.values import Options
from tests.support.rendered_chart import KEYS, local

V1 = {"CgroupVersion": "1", "CgroupDriver": "cgroupfs"}


def machine(root: Path, *, without: str = "") -> Path:
    for name in {name for names in HIERARCHIES.values() for name in names} - {without}:
        (root / name).mkdir()
    return root


def test_a_machine_with_writable_hierarchies_grants_them(tmp_path: Path) -> None:
    assert cgroups.explain_refusal(V1, root=machine(tmp_path)) == ""


@pytest.mark.parametrize(
    ("info", "without", "why"),
    [
        ({"CgroupVersion": "2", "CgroupDriver": "cgroupfs"}, "", "v2 read-only"),
        ({"CgroupVersion": "1", "CgroupDriver": "systemd"}, "", "leaves cgroups to systemd"),
        (V1, "freezer", "no cgroup v1 hierarchy freezer"),
    ],
)
def test_a_refusal_says_why(tmp_path: Path, info: dict[str, Any], without: str, why: str) -> None:
    assert why in cgroups.explain_refusal(info, root=machine(tmp_path, without=without))


def test_a_pod_sees_its_own_directories_and_nothing_above_them(tmp_path: Path) -> None:
    mounts = cgroups.make("c", "login-0", "login", memory=1 << 30, root=machine(tmp_path))
    assert {mount["Target"] for mount in mounts} == {f"/sys/fs/cgroup/{name}" for name in HIERARCHIES["login"]}
    for mount in mounts:
        assert mount["Source"].endswith("/minivm-c/login-0/own") and Path(mount["Source"]).is_dir()
    # The pod reads its limit in the directory that it may write, and cannot lift the limit of the parent directory.
    for directory in ("minivm-c/login-0", "minivm-c/login-0/own"):
        assert (tmp_path / "memory" / directory / "memory.limit_in_bytes").read_text() == str(1 << 30)


def test_a_pod_that_has_no_use_for_them_gets_none() -> None:
    with pytest.raises(ClusterError, match="a controller has no use"):
        cgroups.make("c", "controller-0", "controller", memory=0)


def test_what_is_removed_is_this_pods_and_then_this_clusters(tmp_path: Path) -> None:
    for path in ("memory/minivm-c/a/own/slurm/job_1", "cpu/minivm-c/a/own", "cpu/minivm-c/b/own", "cpu/minivm-cc/a"):
        (tmp_path / path).mkdir(parents=True)
    cgroups.remove("c", "a", root=tmp_path)
    assert sorted(path.name for path in (tmp_path / "cpu").iterdir()) == ["minivm-c", "minivm-cc"]
    assert [path.name for path in (tmp_path / "cpu/minivm-c").iterdir()] == ["b"]
    assert not list((tmp_path / "memory/minivm-c").iterdir())
    cgroups.remove("c", root=tmp_path)
    assert [path.name for path in (tmp_path / "cpu").iterdir()] == ["minivm-cc"]
    assert not list((tmp_path / "memory").iterdir())


@pytest.mark.parametrize(
    ("options", "proctrack"),
    [
        (Options(own_cgroups=True), "cgroup"),
        (Options(own_cgroups=False), "linuxproc"),
        (Options(own_cgroups=True, proctrack="linuxproc"), "linuxproc"),
        (Options(own_cgroups=False, overrides={"slurm": {"proctrack": "cgroup"}}), "cgroup"),
    ],
)
def test_jobs_are_held_in_cgroups_where_that_can_be(options: Options, proctrack: str) -> None:
    assert values.proctrack(options) == proctrack
    assert values.local_values(options, KEYS)["slurm"]["proctrack"] == proctrack


def test_the_chart_asks_for_cgroups_by_a_runtime_class_for_workers_and_logins_alone() -> None:
    granted = {pod.name for pod in local(Options(own_cgroups=True)).pods if cgroups.wants_cgroups(pod)}
    assert granted == {"slurm-login-0", "slurm-worker-0", "slurm-worker-1"}
    assert not any(cgroups.wants_cgroups(pod) for pod in local(Options()).pods)
    # The pod needs only named capabilities for this, not privileged mode.
    assert all(not pod.privileged and pod.capabilities for pod in local(Options(own_cgroups=True)).pods)


@pytest.mark.parametrize(
    ("defaults", "why"),
    [
        ({"cgroup": True}, f"no pod is privileged.*\n.*{RUNTIME_CLASS}"),
        ({"runtimeClassName": "kata"}, "RuntimeClass kata"),
    ],
)
def test_what_one_machine_cannot_be_asked_for_is_refused(defaults: dict[str, Any], why: str) -> None:
    pod = local(Options(overrides={"workers": {"defaults": defaults}})).pod("slurm-worker-0")
    with pytest.raises(ClusterError, match=why):
        cgroups.wants_cgroups(pod)
