"""Share one cluster of real pods among all tests here; each test leaves it healthy."""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from cluster.local import LocalCluster
from cluster.names import free_port
from cluster.values import Options
from images.engine.docker import DockerEngine
from tests import collected
from tests.cluster.researcher import Researcher, World
from tests.cluster.shared_home import SharedHome
from tests.support.docker_answers import read_whole

read_whole()
HERE = Path(__file__).resolve().parent
# Images of another repository than this machine's own: MINIVM_TEST_IMAGES=registry.example.org/minivm
IMAGES = os.environ.get("MINIVM_TEST_IMAGES", "minivm")
# Two runs side by side on one machine must not take each other's cluster.
NAME = os.environ.get("MINIVM_TEST_CLUSTER", "test")
# The files here, in the order in which they run: a first login wants a home that nobody has made yet, what takes parts
# of the shared cluster away comes after what wants it whole, and those with clusters of their own come late.
ORDER = (
    "test_session", "test_life", "test_floods", "test_home_that_hangs", "test_containment", "test_accounting",
    "test_accounting_pod", "test_accounting_move",
    "test_drop_ins", "test_profiles", "test_own_scripts", "test_job_pages", "test_jobs", "test_jupyter",
    "test_pages_as_written",
    "test_containers", "test_pyxis", "test_mpi", "test_forty_ways",
    "test_auth_slurm", "test_auth_munge", "test_clocks", "test_notifications",
    "test_preflight", "test_active_checks", "test_people",
    "test_job_table", "test_two_controllers", "test_releases",
)  # fmt: skip
# A drain that a check caused ends as soon as the check is content, and nodes need not wait for each other.
HASTY = {"broker": {"clear_wait_s": {"node": 0}, "guard": {"spread_s": 0}}}


# Of a test with its fixtures: some start a cluster of their own, and each wait in a test has its own end.
LONGEST_S = 1500


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    collected.sort(items, HERE, ORDER)
    for item in items:
        if item.path.parent == HERE and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(LONGEST_S))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show in a failure what the shared cluster's pods say: the cluster is gone when a person reads it."""
    report = yield
    world = getattr(item, "funcargs", {}).get("world")
    if report.failed and isinstance(world, World):
        report.sections += [(f"end of the log of {pod}", log) for pod, log in world.last_words().items()]
    return report


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedHome]:
    shared = SharedHome(tmp_path_factory.mktemp("home"))
    yield shared
    shared.close()


@pytest.fixture(scope="session")
def world(home: SharedHome) -> Iterator[World]:
    overrides = {
        "scripts": {"policy": {"policy.json": json.dumps(HASTY)}},
        # On a busy machine a task of one second takes many, and no drain here waits for a long job.
        "workers": {"defaults": {"graceSeconds": 75, "drainSeconds": 60}},
        "controller": {"env": {"MINIVM_SLURMRESTD": "0.0.0.0:6820"}},
    }
    options = Options(name=NAME, workers=2, repository=IMAGES, port=free_port(22300), overrides=overrides)
    # Its state lies where the command line looks, so that a test can be an operator: build.py ... --name test
    cluster = LocalCluster(DockerEngine().client, options, log=print)
    # What an earlier run that was killed has left.
    cluster.down()
    try:
        home.become_home(cluster)
        cluster.up(timeout=240)
        made = World(cluster)
        yield made
    finally:
        cluster.down()
    made.forget_images()


@pytest.fixture
def healthy(world: World) -> Iterator[World]:
    """Ready before the test, and ready again after it: a test that breaks something mends it."""
    world.wait_ready()
    before = world.jobs()
    yield world
    world.wait_ready()
    world.end_jobs_except(before)
    world.refuse_drains()


@pytest.fixture
def alice(healthy: World) -> Researcher:
    return Researcher(healthy, "alice")
