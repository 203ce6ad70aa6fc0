"""Active checks whose account is wrong are told and mended; checks that are killed at any step leave nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from images.engine.docker import DockerEngine
from tests.cluster.conftest import NAME
from tests.cluster.researcher import Researcher, World
from tests.cluster.small import small_cluster
from tests.waiting import until

pytestmark = [pytest.mark.docker, pytest.mark.cluster]

CONTROLLER = "slurm-controller-0"
WORKERS = ("slurm-worker-0", "slurm-worker-1")
AS_SLURM = ("setpriv", "--reuid=slurm", "--regid=slurm", "--init-groups")
PYTHON = ("/opt/minivm/bin/python3", "-I", "-c")


@contextmanager
def cluster_with(root: Path, values: dict[str, Any], workers: int = 1) -> Iterator[World]:
    with small_cluster(DockerEngine().client, f"{NAME}-active", root, values, workers=workers) as cluster:
        cluster.up(timeout=240)
        yield World(cluster)


def test_a_wrong_account_is_told_and_then_mended(tmp_path: Path) -> None:
    values = {
        "slurm": {"config": {"AccountingStorageEnforce": "associations"}},
        "activeChecks": {"enabled": True, "idleSeconds": 30, "account": "tests"},
    }
    with cluster_with(tmp_path, values) as world:

        def why() -> str:
            return world.cluster.exec(CONTROLLER, ["minivm", "why"])[1]

        told = "found 'tests', expected an account that has the user slurm, which is in none"
        until(lambda: f"activeChecks.account: cannot submit active checks: {told}" in why(), "it is told", seen=why)
        world.slurm("sacctmgr", "-i", "add", "account", "tests")
        world.slurm("sacctmgr", "-i", "add", "user", "slurm", "account=tests")
        until(lambda: "active-check" not in why(), "the checks are submitted", seen=why)

        def jobs() -> str:
            return world.slurm("sacct", "-anXP", "--starttime=now-1days", "-o", "jobname,user,account")

        until(lambda: "|slurm|tests" in jobs(), "a check runs", seen=jobs)

        def results() -> str:
            return world.cluster.exec(CONTROLLER, ["minivm", "active"])[1]

        until(lambda: "slowest: slurm-worker-0" in results(), "the controller knows a rate of the node", seen=results)
        for weight in (50, 0):
            assert world.run(CONTROLLER, *AS_SLURM, *PYTHON, WEIGH, f"{weight}") == f"'' {weight}\n", (
                "nothing is refused"
            )


# The planner's own functions set a node's weight, and read it.
WEIGH = """
import os, sys, time
from health.active.__main__ import observe, set_weights
from init.slurm import client
controller = client.address(os.environ)
refused = set_weights({"slurm-worker-0": int(sys.argv[1])}, controller)
print(repr(refused), *(node.weight for node in observe(os.environ, controller, time.time()).nodes))
"""

# The planner's own function submits CHECK:NODES.
SUBMIT = """
import os, sys
from health.active.__main__ import submit
from health.active.culprit import GroupTest
from health.active.turn import Submission
from health.checks.active_checks import Needs
from init.slurm import client
check, _, nodes = sys.argv[1].partition(":")
test = GroupTest(tuple(nodes.split(",")))
submit(Submission(check, Needs(nodes=len(test.machines)), test), "", client.address(os.environ))
"""
PAIR = f"tcp:{','.join(WORKERS)}"
# A step of a check: what is submitted, where it is seen, and the process of that step.
STEPS = {
    "it starts": ("cpu:slurm-worker-0", WORKERS[0], "[h]ealth.active.run cpu"),
    "it measures": ("cpu:slurm-worker-0", WORKERS[0], "[h]ealth.active.measure cpu"),
    "it starts on two nodes": (PAIR, WORKERS[0], "[s]run.*health.active.run tcp"),
    "its peer measures": (PAIR, WORKERS[1], "[h]ealth.active.measure tcp-peer"),
    "its peer records the pass": (PAIR, WORKERS[1], "[h]ealth.active.run tcp --passed"),
}


def test_a_check_that_is_killed_at_any_step_leaves_nothing(tmp_path: Path) -> None:
    # The planner itself starts none.
    values = {"activeChecks": {"enabled": True, "idleSeconds": 86400}}
    with cluster_with(tmp_path, values, workers=2) as world:
        for step, (what, worker, process) in STEPS.items():

            def killed(what: str = what, worker: str = worker, process: str = process) -> bool:
                """Some of the processes live for a moment, which a busy machine lets pass unseen."""
                world.wait_idle()
                world.run(CONTROLLER, *AS_SLURM, *PYTHON, SUBMIT, what)
                kill = 'until pgrep -f "$0" >/dev/null; do :; done; scancel --user=slurm'
                code = world.cluster.exec(worker, ["timeout", "90", "sh", "-c", kill, process])[0]
                world.slurm("scancel", "--user=slurm")
                return code == 0

            until(killed, f"{step}: {process} is on {worker} when it is killed", within=300)
            assert_nothing_is_left(world, step)
        assert_a_late_check_ends(world)
        waiting = "squeue --all --noheader --states=PD"
        Researcher(world, "alice").submit("--exclusive", "-N2", "--output=/dev/null", script="sleep 300")
        until(lambda: set(world.node_states().values()) == {"allocated"}, "a user's job runs", seen=world.node_states)
        world.run(CONTROLLER, *AS_SLURM, *PYTHON, SUBMIT, PAIR)
        until(lambda: world.slurm(*waiting.split()), "the check waits")
        world.slurm("scancel", "--user=slurm")
        assert not world.slurm(*waiting.split())
        world.slurm("scancel", "--user=alice")
        assert_nothing_is_left(world, "it waits")


def assert_a_late_check_ends(world: World) -> None:
    """Assert that a check does not measure whose job was ended before it began: such a SIGTERM is lost."""
    late = "trap 'exec /opt/minivm/bin/python3 -I -m health.active.run cpu' TERM; sleep 300 & wait"
    where = ("--partition=minivm-active", f"--nodelist={WORKERS[0]}", "--output=/dev/null", "--chdir=/")
    job = world.run(CONTROLLER, *AS_SLURM, "sbatch", "--parsable", *where, f"--wrap={late}").strip()
    begun = ("timeout", "120", "sh", "-c", "until pgrep -f 'sleep [3]00'; do :; done")
    code, output = world.cluster.exec(WORKERS[0], list(begun))
    assert code == 0, output
    world.slurm("scancel", job)
    assert_nothing_is_left(world, "it is late")

    def accounted() -> str:
        return world.slurm("sacct", "-nP", "-j", f"{job}.batch", "-o", "state,exitcode").strip()

    until(lambda: accounted() and not accounted().startswith("RUNNING"), "it is accounted", seen=accounted)
    assert accounted().endswith("|15:0"), accounted()


def assert_nothing_is_left(world: World, step: str) -> None:
    """Assert that no job, process, hold, file or verdict of a killed check is left."""
    until(lambda: not world.slurm("squeue", "--all", "--noheader"), f"{step}: its job ends")
    world.wait_idle()
    assert "No reservations" in world.slurm("scontrol", "show", "reservation")
    for worker in WORKERS:
        left = world.cluster.exec(worker, ["pgrep", "-fa", "[h]ealth.active"])[1]
        assert not left, f"{step}: {worker} runs {left}"
        rest = world.run(worker, "find", "/var/lib/minivm/active", "-name", ".*")
        assert not rest, f"{step}: {worker} has {rest}"
        for line in world.run(worker, "sh", "-c", "cat /var/lib/minivm/active/*.json 2>/dev/null || true").splitlines():
            assert json.loads(line)["failures"] == 0, f"{step}: {worker} has recorded {line}"

    def plan() -> list[dict[str, Any]]:
        code, output = world.cluster.exec(CONTROLLER, ["minivm", "active", "--json"])
        return json.loads(output) if code == 0 else []

    assert not [check for check in plan() if check["failed"] or check["culprits"] or check["at_fault"]], step
