"""One Kubernetes for all tests here: KUBECONFIG's, or three lab machines; and the chart installed on it once."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import collected
from tests.kubernetes import machine, programs
from tests.kubernetes.kubectl import Kubernetes
from tests.kubernetes.lab import UP, Lab
from tests.kubernetes.world import IMAGES, Release

HERE = Path(__file__).resolve().parent
NODES = 3
# The files here, in the order in which they run: there is one lab at a time, so that those with labs of their own come
# before the one that all others share; what breaks its machines comes last.
ORDER = (
    "test_nothing_is_left", "test_fleet", "test_fleet_scale", "test_fleet_rows", "test_fleet_goals",
    "test_fleet_rolls", "test_fleet_rights", "test_auth_kept", "test_fleet_neighbours", "test_fleet_machines",
    "test_fleet_topology", "test_fleet_blocks", "test_fleet_pools", "test_fleet_template", "test_fleet_elastic",
    "test_fleet_lend", "test_two_controllers", "test_core", "test_how_to", "test_operations", "test_configuration",
    "test_logins", "test_policies", "test_releases", "test_containment", "test_fleet_workers", "test_fleet_per_node",
    "test_faults", "test_machines", "test_fleet_installed", "test_conformance",
)  # fmt: skip
GIVEN = os.environ.get("KUBECONFIG", "")


def refusal() -> str:
    """Why there is no lab here; empty where there can be one."""
    return machine.refusal() or ("" if programs.built() else programs.refusal())


def pytest_configure(config: pytest.Config) -> None:
    """The programs are built beside the tests that come first, by what these leave of the processors."""
    if GIVEN or config.option.collectonly or programs.built() or refusal():
        return
    builder = programs.beside()
    config.add_cleanup(lambda: programs.end(builder))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    collected.sort(items, HERE, ORDER)


@pytest.fixture(scope="session")
def kubernetes() -> Iterator[Kubernetes]:
    if GIVEN:
        kubectl = shutil.which("kubectl")
        assert kubectl, "KUBECONFIG names a Kubernetes, and there is no kubectl here"
        yield Kubernetes(Path(kubectl), Path(GIVEN), made_by_hand())
        return
    if why := refusal():
        pytest.skip(f"no Kubernetes: {why}")
    with keeper() as lab:
        yield Kubernetes(lab.programs.bin / "kubectl", lab.kubeconfig, lab)


def made_by_hand() -> Lab | None:
    """Find the lab that `make kube-up` has made, if KUBECONFIG is its own."""
    lab = Lab.found() if UP.is_symlink() else None
    return lab if lab and lab.kubeconfig == Path(GIVEN) else None


@contextlib.contextmanager
def keeper() -> Iterator[Lab]:
    """Another process has the lab and takes it down when this one ends, however it does."""
    command = [sys.executable, "-m", "tests.kubernetes", "hold", "--nodes", str(NODES), "--images", IMAGES]
    held = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert held.stdin and held.stdout
    try:
        said = []
        for line in held.stdout:
            said.append(line)
            print(line, end="", flush=True)
            if line.startswith("ready "):
                break
        else:
            pytest.fail(f"the lab did not come up:\n{''.join(said)}")
        yield Lab.found()
    finally:
        held.stdin.close()
        rest = held.stdout.read()
        assert held.wait() == 0, f"the lab was not taken down:\n{rest}"


@pytest.fixture(scope="session")
def installed(kubernetes: Kubernetes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Release]:
    release = Release(kubernetes, tmp_path_factory.mktemp("keys"))
    release.install()
    yield release
    release.shut()
    # A lab of this run's own goes with all that is on it.
    if GIVEN:
        release.uninstall()
        kubernetes("delete", "namespace", release.namespace, "--wait=false")


@pytest.fixture
def release(installed: Release) -> Iterator[Release]:
    """Ready before the test, and ready again after it: a test that breaks something mends it."""
    installed.wait_ready()
    yield installed
    installed.wait_ready()
    installed.wait_idle()


@pytest.fixture
def lab(release: Release) -> Lab:
    if not release.kubernetes.lab:
        pytest.skip("these machines are not ours to break")
    return release.kubernetes.lab
