"""The cluster that the checks run against, the order of the checks, and what they put back."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conformance import report
from tests.conformance.adapter import load, pairs
from tests.conformance.cluster import Cluster, not_offered, not_tried

HERE = Path(__file__).resolve().parent
# What disturbs the cluster comes last; within a file the checks run as written.
QUIET = ("test_install", "test_jobs", "test_accounting", "test_logins", "test_security", "test_metrics")
DISTURBING = ("test_drain", "test_configuration", "test_scale", "test_upgrade", "test_failures")
ORDER = (*QUIET, *DISTURBING)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("conformance")
    group.addoption("--adapter", default=os.environ.get("MINIVM_CONFORMANCE_ADAPTER", ""), help="the product's file")
    group.addoption("--name", action="append", default=[], metavar="NAME=VALUE", help="a value of the file's `names`")
    group.addoption("--gentle", action="store_true", help="leave out the checks that disturb the cluster")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = [place for place, item in enumerate(items) if item.path.parent == HERE]
    ordered = sorted((items[place] for place in places), key=lambda item: ORDER.index(item.path.stem))
    for place, item in zip(places, ordered, strict=True):
        items[place] = item


@pytest.fixture(scope="session")
def whole(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    if not (path := request.config.getoption("--adapter", default="")):
        pytest.skip("no adapter: python -m tests.conformance --adapter FILE")
    names = pairs(request.config.getoption("--name", default=[]))
    found = Cluster(load(Path(path), names))
    yield found
    # What an interrupted check left: the name is this run's alone.
    found.attempt_as(found.adapter.administrator, "scancel", f"--name={found.job_name}")


@pytest.fixture(autouse=True)
def cluster(whole: Cluster, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Leave out what is not offered; cancel the check's jobs and wait for a disturbed cluster to settle."""
    check = report.check_name(request.node.name)
    if why := whole.adapter.not_offered.get(check):
        not_offered(why)
    if why := whole.adapter.not_tried.get(check):
        not_tried(why)
    disturbs = request.path.stem in DISTURBING
    if disturbs and request.config.getoption("--gentle", default=False):
        not_tried("it disturbs the cluster, and --gentle was given")
    if disturbs:
        whole.wait_quiet()
    yield whole
    try:
        if disturbs:
            whole.wait_quiet()
    finally:
        whole.cancel_jobs()
