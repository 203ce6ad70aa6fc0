"""Limits per user on a login pod: the files for logins and prompts, with cgroup v1, v2, and neither."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from init.errors import ConfigError
from init.pod.pod import Pod
from init.prepare import cgroups

GIB = 1 << 30


@pytest.fixture(autouse=True)
def owner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroups, "OWNER", (os.getuid(), os.getgid()))


def pod(root: Path, files: dict[str, str], **env: str) -> Pod:
    for name, text in ({"proc/meminfo": "MemTotal: 16777216 kB\n", "run/minivm/env/x": ""} | files).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Pod(env, root)


def v1(*hierarchies: str) -> dict[str, str]:
    return {f"sys/fs/cgroup/{name}/cgroup.procs": "" for name in hierarchies}


def v2(controllers: str) -> dict[str, str]:
    """Return a cgroup v2 tree with all files present, which the kernel would create in each new directory."""
    found: dict[str, str] = {}
    for place in ("", "minivm/", "users/"):
        found |= {f"sys/fs/cgroup/{place}{name}": "" for name in ("cgroup.procs", "cgroup.subtree_control")}
        found[f"sys/fs/cgroup/{place}cgroup.controllers"] = f"{controllers}\n"
    return found


def table(found: Pod, path: str = cgroups.AT_LOGIN) -> list[str]:
    return (found.text(path) or "").replace(f"{found.root}/sys/fs/cgroup", "").splitlines()


def test_cgroup_v1_holds_a_person_in_each_hierarchy(tmp_path: Path) -> None:
    found = pod(tmp_path, v1("cpu", "memory", "pids"))
    said = cgroups.limit_users(found)
    assert table(found) == [
        "/pids/users pids.max 2000",
        f"/memory/users memory.limit_in_bytes {4 * GIB}",
        "/cpu/users cpu.shares 1024",
    ]
    assert said == "a person has 2000 processes and 4 GiB of memory, by cgroups (cpu, memory, pids)"
    # All users together leave some memory to sshd.
    together = int((tmp_path / "sys/fs/cgroup/memory/users/memory.limit_in_bytes").read_text())
    assert together == int(16 * GIB * 0.9)
    assert (tmp_path / "sys/fs/cgroup/pids/users/rescue/pids.max").read_text() == "64"
    assert "nproc" not in (found.text(cgroups.ULIMITS) or "")


def test_cgroup_v2_holds_a_person_in_one_place_and_slows_before_it_ends(tmp_path: Path) -> None:
    found = pod(tmp_path, v2("cpu memory pids"), MINIVM_PER_USER_MEMORY="10Gi", MINIVM_PER_USER_PROCESSES="500")
    cgroups.limit_users(found)
    assert table(found) == [
        "/users pids.max 500",
        f"/users memory.high {9 * GIB}",
        f"/users memory.max {10 * GIB}",
        "/users cpu.weight 100",
    ]
    assert [line.split()[:3] for line in table(found, cgroups.AT_PROMPT)] == [
        ["/users", "pids.events", "max"],
        ["/users", "memory.events", "oom_kill"],
    ]
    assert (tmp_path / "sys/fs/cgroup/users/cgroup.subtree_control").read_text() == "+pids"


def test_without_cgroups_ulimits_are_the_floor_and_it_says_why(tmp_path: Path) -> None:
    found = pod(tmp_path, {}, MINIVM_PER_USER_MEMORY="1Gi")
    said = cgroups.limit_users(found)
    assert not table(found) and not table(found, cgroups.AT_PROMPT)
    limits = (found.text(cgroups.ULIMITS) or "").splitlines()
    assert "* - nproc 2000" in limits and f"* - data {GIB >> 10}" in limits
    assert "ulimits, which know no sum (memory, pids; cgroup v1, read-only" in said


def test_what_one_controller_lacks_the_ulimit_of_it_holds(tmp_path: Path) -> None:
    found = pod(tmp_path, v2("memory"))
    assert "cgroups (memory) and ulimits, which know no sum (pids;" in cgroups.limit_users(found)
    limits = found.text(cgroups.ULIMITS) or ""
    assert "nproc 2000" in limits and "data" not in limits


def test_zero_is_no_limit(tmp_path: Path) -> None:
    found = pod(tmp_path, v1("cpu", "pids"), MINIVM_PER_USER_MEMORY="0", MINIVM_PER_USER_PROCESSES="0")
    assert cgroups.limit_users(found) == "a person has no limit, by cgroups (cpu)"
    assert table(found) == ["/cpu/users cpu.shares 1024"]


@pytest.mark.parametrize(("name", "value"), [("MEMORY", "lots"), ("MEMORY", "4GB"), ("PROCESSES", "many")])
def test_a_wrong_value_is_told_and_no_default_is_taken(tmp_path: Path, name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"MINIVM_PER_USER_{name} is '{value}'"):
        cgroups.limit_users(pod(tmp_path, {}, **{f"MINIVM_PER_USER_{name}": value}))


@pytest.mark.parametrize(("text", "expected"), [("50%", 8 * GIB), ("1.5Gi", 3 * GIB // 2), ("1048576", 1 << 20)])
def test_amounts_are_quantities_or_parts(text: str, expected: int) -> None:
    assert cgroups.amount(text, 16 * GIB) == expected


def test_v2_without_leave_to_write_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = pod(tmp_path, v2("cpu memory"))
    monkeypatch.setattr(cgroups, "writable", lambda directory: False)
    assert cgroups.run(found) == "cgroup v2, read-only: no containment by cgroups"
    assert found.text("/run/minivm/env/cgroup") == "MINIVM_CGROUP=none\n"
