"""A machine that is not what the image was made for: told at boot, and a reason against readiness where a site says so.

The image's own expectations are exchanged for some that no machine meets: the rest is a pod as it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from init.helpers.conditions import condition
from init.helpers.drift import EXPECTS
from tests.container.init_pods import World, slurm_conf, world
from tests.waiting import until

pytestmark = [pytest.mark.docker, pytest.mark.cluster]

SENTENCE = "is older than this image needs (99.1): upgrade the machine's kernel"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with world(tmp_path_factory.mktemp("drift"), "drift") as made:
        made.configure({"slurm.conf": slurm_conf(accounting=False)})
        made.pod("controller", "slurm-controller", env={"MINIVM_ACCOUNTING": "none"}).wait_ready()
        yield made


@pytest.fixture
def strange(tmp_path: Path) -> dict[Path, str]:
    """Write expectations of a kernel that does not exist yet."""
    file = tmp_path / "expects.json"
    file.write_text(json.dumps({"format": 1, "kernel": "99.1"}))
    return {file: EXPECTS}


def test_a_machine_that_differs_is_told_and_the_pod_is_ready(site: World, strange: dict[Path, str]) -> None:
    pod = site.pod("worker", "told", volumes=strange).wait_ready()
    # It looks when the rest is up.
    until(lambda: SENTENCE in pod.code("minivm", "why")[1], "`why` says what differs", seen=pod.account)
    until(lambda: pod.service("drift")["state"] == "failed", "it has looked", seen=pod.account)
    code, said = pod.code("minivm", "drift")
    assert code == 1 and SENTENCE in said.splitlines()[-1]
    # What the pod's condition says in Kubernetes is made of this.
    shown = condition(pod.status(), None, "now")
    assert (shown["status"], shown["reason"]) == ("True", "Degraded") and SENTENCE in shown["message"]
    scraped = pod.run("curl", "--silent", "http://127.0.0.1:8650/metrics")
    assert 'minivm_drift_differs{check="kernel"} 1' in scraped


def test_a_site_may_refuse_such_a_machine(site: World, strange: dict[Path, str]) -> None:
    pod = site.pod("worker", "refused", volumes=strange, env={"MINIVM_DRIFT": "refuse"})
    pod.wait_reason(SENTENCE)
    assert not pod.ready()
    shown = condition(pod.status(), None, "now")
    assert shown["status"] == "False" and SENTENCE in shown["message"]


def test_a_machine_that_fits_is_not_spoken_of(site: World) -> None:
    pod = site.pod("worker", "fits").wait_ready()
    until(lambda: pod.service("drift")["state"] == "done", "it has looked", seen=pod.account)
    code, said = pod.code("minivm", "drift")
    assert code == 0 and "no NVIDIA driver; CUDA 13.5 needs 580" in said
    assert "drift" not in pod.code("minivm", "why")[1]
