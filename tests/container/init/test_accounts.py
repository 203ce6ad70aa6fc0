"""Accounts as code against a real slurmdbd, its MariaDB and a slurmctld that enforces associations from its start.

One cluster for the module; each test begins without accounts of a file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.container.init_pods import Pod, slurm_conf, world
from tests.pages import blocks
from tests.reader import ROOT
from tests.waiting import until

pytestmark = [pytest.mark.docker, pytest.mark.cluster]

FILE, SACCTMGR = "/root/accounts.yaml", "/usr/bin/sacctmgr"
ENFORCED = "AccountingStorageEnforce=associations,limits,qos"
CHANGES = 3
MOST_CALLS = 200
# Ends minivm when its first call that changes something has done its work.
CUTTER = """#!/bin/sh
/usr/bin/sacctmgr.real "$@"
code=$?
[ "$1" != -i ] || kill -KILL $PPID
exit $code
"""
LAB: dict[str, Any] = {
    "qos": [
        {"name": "urgent", "priority": 100, "preempt": ["normal"], "flags": ["DenyOnLimit"], "graceTime": "1m"},
        {"name": "slow", "usageFactor": 0.5, "limits": {"MaxWall": "1-12:00:00", "MaxTRESPerUser": "cpu=8,mem=64G"}},
    ],
    "accounts": [
        {"name": "science", "description": "All of Science", "organization": "The Site"},
        {
            "name": "physics",
            "parent": "science",
            "fairshare": 5,
            "limits": {
                "GrpTRES": {"cpu": 64, "mem": "500G"},
                "GrpTRESMins": "cpu=100000",
                "MaxWall": "12h",
                "MaxJobs": 10,
                "MaxSubmitJobs": 20,
                "MaxTRESPerNode": {"cpu": 4},
            },
            "qos": ["normal", "slow", "urgent"],
            "defaultQos": "normal",
            "coordinators": ["demo"],
        },
        {"name": "chem"},
    ],
    "users": [
        {"name": "demo", "defaultAccount": "physics", "accounts": ["physics", {"name": "chem", "fairshare": "parent"}]},
        {"name": "zoe", "defaultAccount": "chem", "adminLevel": "Operator"},
        {"name": "ann", "defaultAccount": "physics", "accounts": [{"name": "physics", "limits": {"MaxJobs": 2}}]},
    ],
}  # fmt: skip
OTHER: dict[str, Any] = {
    "qos": [{"name": "slow", "priority": 3}],
    "accounts": [
        {"name": "chem", "coordinators": ["zoe"], "description": "chemistry"},
        {"name": "physics", "parent": "chem", "limits": {"GrpTRES": {"mem": "1T"}}},
    ],
    "users": [
        {"name": "demo", "defaultAccount": "chem", "accounts": ["chem"], "adminLevel": "Administrator"},
        {"name": "zoe", "defaultAccount": "physics", "accounts": ["chem", "physics"]},
    ],
}


@pytest.fixture(scope="module")
def pods(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Pod, Pod]]:
    with world(tmp_path_factory.mktemp("accounts"), "accounts") as made:
        made.configure({"slurm.conf": slurm_conf(ENFORCED)})
        controller, worker = made.pod("controller", "slurm-controller"), made.pod("worker", "w1")
        for pod in (controller, worker):
            pod.add_user()
        for pod in (controller, worker):
            pod.wait_ready()
        # The pod is ready before what it can do without.
        until(lambda: controller.service("slurmdbd")["ready"], "accounting too", seen=controller.account)
        yield controller, worker


@pytest.fixture
def controller(pods: tuple[Pod, Pod]) -> Pod:
    apply(pods[0], {}, "--overwrite-changes")
    return pods[0]


def accounts(pod: Pod, word: str, data: dict[str, Any], *options: str) -> tuple[int, str]:
    pod.run("sh", "-c", f'printf %s "$0" > {FILE}', json.dumps(data))
    return pod.code("minivm", "accounts", word, FILE, *options)


def apply(pod: Pod, data: dict[str, Any], *options: str) -> str:
    code, text = accounts(pod, "apply", data, "--yes", *options)
    assert code == 0, text
    return text


def show(pod: Pod, *what: str) -> str:
    return pod.run("sacctmgr", "-nP", "show", *what)


def everything(pod: Pod) -> str:
    tables = [
        show(pod, "assoc", "WOPLimits", "format=account,user,parentname,fairshare,grptres,maxwall,maxjobs,qos,comment"),
        show(pod, "account", "withcoord", "format=account,coordinators,description,organization"),
        show(pod, "user", "format=user,defaultaccount,adminlevel"),
        show(pod, "qos", "format=name,priority,preempt,flags,gracetime,usagefactor,maxwall,maxtresperuser,description"),
    ]
    return "\n".join("\n".join(sorted(table.splitlines())) for table in tables)


def submit(pod: Pod, *options: str) -> tuple[int, str]:
    command = ("sbatch", "--parsable", "--chdir=/tmp", "--output=/dev/null", *options, "--wrap", "sleep 7777")
    code, output = pod.container.exec_run(list(command), user="demo")
    return int(code), output.decode().strip()


def test_from_nothing_and_the_second_run_changes_nothing(controller: Pod) -> None:
    assert accounts(controller, "plan", LAB)[0] == CHANGES
    assert "applied" in apply(controller, LAB)
    code, text = accounts(controller, "plan", LAB)
    assert (code, text) == (0, "nothing to change\n")
    assert apply(controller, LAB) == "nothing to change\n"
    assert accounts(controller, "drift", LAB) == (0, "nothing was changed by hand\n")
    assert "demo|physics|None" in show(controller, "user", "format=user,defaultaccount,adminlevel")
    limits = show(controller, "assoc", "account=physics", "user=", "WOPLimits", "format=grptres,maxwall,maxjobs")
    assert "cpu=64,mem=500G|12:00:00|10" in limits
    apply(controller, OTHER)
    assert accounts(controller, "plan", OTHER) == (0, "nothing to change\n")


def test_a_new_user_submits_at_once_and_leaves_with_history(controller: Pod) -> None:
    code, text = submit(controller)
    assert code != 0 and "Invalid account" in text, "slurmctld enforces from its start"
    apply(controller, LAB)
    code, job = submit(controller)
    assert code == 0, job
    accounted = ("sacct", "-n", "-X", "-P", f"--jobs={job}", "-S", "2000-01-01", "--format=user,account")
    until(lambda: controller.run(*accounted) == "demo|physics\n", "the job is accounted")

    gone = {**LAB, "users": [user for user in LAB["users"] if user["name"] != "demo"]}
    gone["accounts"] = [{**account, "coordinators": []} for account in LAB["accounts"]]
    text = apply(controller, gone)
    assert "keep user demo in physics: it has pending or running jobs" in text
    assert "physics|demo" in show(controller, "assoc", "format=account,user")
    controller.run("scancel", job)

    def goes() -> bool:
        return "keep" not in apply(controller, gone)

    until(goes, "the user goes after the job")
    assert "demo" not in show(controller, "assoc", "format=user")
    assert controller.run(*accounted) == "demo|physics\n", "its history stays"
    code, text = submit(controller)
    assert code != 0 and "Invalid account" in text


def test_a_change_by_hand_is_told_and_not_undone(controller: Pod) -> None:
    apply(controller, LAB)
    controller.run("sacctmgr", "-i", "modify", "account", "physics", "set", "GrpTRES=cpu=128")
    controller.run("sacctmgr", "-i", "delete", "user", "name=ann", "account=physics")
    changed = "changed by hand: account physics: GrpTRES cpu=64,mem=512000 → cpu=128,mem=512000"
    removed = "removed by hand: user ann in physics"
    code, text = accounts(controller, "drift", LAB)
    assert code == CHANGES and changed in text and removed in text
    code, text = accounts(controller, "plan", LAB)
    assert code == 1 and changed in text and "2 values were changed by hand" in text
    before = everything(controller)
    code, text = accounts(controller, "apply", LAB, "--yes")
    assert code == 1 and "--overwrite-changes" in text and everything(controller) == before
    apply(controller, LAB, "--overwrite-changes")
    assert accounts(controller, "plan", LAB)[0] == 0


def test_what_was_made_by_hand_is_left_alone_unless_adopted(controller: Pod) -> None:
    controller.run("sacctmgr", "-i", "add", "account", "chem", "fairshare=9")
    controller.run("sacctmgr", "-i", "add", "user", "old", "account=chem")
    try:
        code, text = accounts(controller, "apply", LAB, "--yes")
        assert code == 1 and "account chem" in text and "--adopt" in text
        assert "fairshare 9 → 1" in apply(controller, LAB, "--adopt")
        text = apply(controller, {})
        assert "keep account chem: it has users or accounts that stay" in text
        assert show(controller, "assoc", "user=old", "format=account,user") == "chem|old\n"
    finally:
        controller.run("sacctmgr", "-i", "delete", "user", "old")


def test_killed_after_each_call_the_next_run_goes_on_from_there(controller: Pod) -> None:
    """Each run is killed after its first call, so that the calls of one whole run are each the last of a killed one."""
    apply(controller, LAB)
    apply(controller, OTHER)
    goal = everything(controller)
    apply(controller, LAB)
    controller.run("mv", SACCTMGR, f"{SACCTMGR}.real")
    controller.run("sh", "-c", f'printf %s "$0" > {SACCTMGR}; chmod 755 {SACCTMGR}', CUTTER)
    cuts = 0
    try:
        while (answer := accounts(controller, "apply", OTHER, "--yes"))[0] != 0:
            cuts += 1
            assert answer[0] in (137, -9) and cuts < MOST_CALLS, answer[1]
            assert accounts(controller, "drift", OTHER)[0] == 0, f"cut {cuts} looks like a change by hand"
    finally:
        controller.run("mv", f"{SACCTMGR}.real", SACCTMGR)
    assert everything(controller) == goal
    assert accounts(controller, "plan", OTHER) == (0, "nothing to change\n")
    assert cuts > 10, "each call was cut once"


def test_the_page_can_be_followed(controller: Pod) -> None:
    example, commands = blocks(ROOT / "docs/how-to/accounts-as-code.md")
    assert (example.file, commands.pod) == ("accounts.yaml", "slurm-controller-0")
    controller.run("sh", "-c", 'printf %s "$0" > /root/accounts.yaml', example.text)
    text = controller.run("sh", "-c", f"cd /root; {commands.script}")
    assert "add account physics" in text and "applied\nnothing was changed by hand" in text


def test_a_wrong_file_is_refused_before_anything_is_asked(controller: Pod) -> None:
    code, text = accounts(controller, "apply", {"accounts": [{"name": "a; scancel -u root"}]}, "--yes")
    assert code == 78 and f"{FILE}: accounts[0].name: cannot read the accounts" in text
    code, text = accounts(
        controller, "apply", {"accounts": [{"name": "a", "limits": {"GrpTRES": "gres/gpu=1"}}]}, "--yes"
    )
    assert code == 1 and "AccountingStorageTRES" in text
    code, text = accounts(controller, "apply", LAB)
    assert code == 1 and "not confirmed" in text
