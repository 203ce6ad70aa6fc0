"""More than one release, and one release again: what is kept, what is kept apart, what is applied by other hands."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import yaml

from cluster.render import CHART
from tests.kubernetes.kubectl import Object
from tests.kubernetes.strangers import stranger, wait_running
from tests.kubernetes.world import Release
from tests.waiting import until

pytestmark = pytest.mark.timeout(1200)
CLASSES = ("training", "inference", "cluster")
EXAMPLES = sorted(path.stem for path in (CHART / "examples").glob("*.yaml"))


def example(name: str) -> Object:
    found: Object = yaml.safe_load((CHART / "examples" / f"{name}.yaml").read_text())
    return found


@pytest.fixture(scope="module")
def other(installed: Release) -> Iterator[Release]:
    """A second one in the same namespace, as an example has it, applied by kubectl alone."""
    # The directory is its own, and each worker fills half a machine of two processors.
    large = {"resources": {"requests": {"cpu": "1", "memory": "64Mi"}}}
    over = example("no-accounting") | {
        "secrets": {},
        "workers": {"defaults": large, "pools": {"worker": {"replicas": 3}}},
        "priorityClasses": {"enabled": True} | {kind: {"name": f"other-{kind}"} for kind in CLASSES},
    }
    made = Release(installed.kubernetes, installed.keys, name="other", namespace=installed.namespace, over=over)
    made.apply()
    made.wait_ready()
    yield made
    made.shut()
    made.delete()


def test_what_is_applied_twice_does_not_differ(other: Release) -> None:
    """As Argo CD does it; the Job has filled the keys meanwhile."""
    before = other.lives()
    assert other.differences() == []
    other.apply()
    assert other.differences() == []
    other.wait_ready()
    assert other.lives() == before


def test_two_releases_side_by_side_know_nothing_of_each_other(release: Release, other: Release) -> None:
    assert set(release.states()) == {"slurm-worker-0", "slurm-worker-1"}
    assert set(other.states()) == {"other-worker-0", "other-worker-1", "other-worker-2"}
    for one in (release, other):
        one.wait_idle()
        nodes = sorted(one.states())
        assert sorted(one.as_user("alice", f"srun -N{len(nodes)} hostname").split()) == nodes
    mine, theirs = (one.secrets() for one in (release, other))
    assert set(theirs) & {"slurm-key", "jwt", "ssh-host-keys", "worker-host-keys"}
    assert not {text for keys in mine.values() for text in keys} & {text for keys in theirs.values() for text in keys}


def test_pods_that_serve_push_a_worker_aside_and_never_the_controller(release: Release, other: Release) -> None:
    """The worker drains first. To let the controller go would make room enough, and leave workers that nobody uses."""
    node = other.node_of("controller-0")
    (victim,) = [name for name in other.pods() if name.startswith("worker") and other.node_of(name) == node]
    before = other.lives()
    job = other.submit("alice", "-w", f"{other.name}-{victim}", script="sleep 600")
    other.wait_for(job, "RUNNING")
    serving = {"resources": {"requests": {"cpu": "1"}}, "priorityClassName": "other-inference"}
    with stranger(other, "serving", nodeSelector={"kubernetes.io/hostname": node}, **serving):
        wait_running(other, "serving", within=240)
        other.wait_requeued(job)
        lives = other.lives()
        assert {name for name in before if lives.get(name) != before[name]} == {victim}
    other.wait_ready()


def test_uninstalled_and_installed_again_it_is_the_same_cluster(release: Release) -> None:
    job = release.submit("alice", script="echo before > kept")
    release.wait_for(job, "COMPLETED")
    short = release.submit("alice", "-w", f"{release.name}-worker-0", script="sleep 5; echo whole > short")
    long = release.submit("alice", "-w", f"{release.name}-worker-1", script="sleep 600")
    for running in (short, long):
        release.wait_for(running, "RUNNING", "COMPLETED")
    release.shut()
    before = release.secrets()
    begun = time.monotonic()
    release.uninstall()
    until(lambda: not release.pods(), "the pods are gone", within=180, seen=release.why)
    print(f"uninstalled with two jobs running, to no pod left: {time.monotonic() - begun:.1f} s")
    assert release.secrets() == before
    for kind in ("jobs", "roles", "rolebindings", "serviceaccounts"):
        left = [item["metadata"]["name"] for item in release.get(kind)["items"]]
        assert not [name for name in left if name.startswith(f"{release.name}-")], (
            f"the account of the drain went: {left}"
        )
    release.install()
    release.wait_ready()
    # Workers drained while slurmctld was there: it knows what ended and what has to run again.
    release.wait_for(short, "COMPLETED")
    assert (release.restarts(short), release.restarts(long)) == (0, 1)
    assert release.as_user("alice", "cat short") == "whole"
    release.slurm("scancel", long)
    assert release.secrets() == before
    assert release.as_user("alice", "cat kept") == "before"
    later = release.submit("alice", script="true")
    release.wait_for(later, "COMPLETED")
    assert int(later) > int(job)
    assert release.slurm("sacct", "-n", "-X", "-j", job, "-o", "state%20") == "COMPLETED"


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_api_server_takes_every_object_of_an_example(release: Release, name: str) -> None:
    """But those of the Prometheus operator, whose kind is not there."""
    one = Release(release.kubernetes, release.keys, name="example", namespace=release.namespace)
    objects = [item for item in one.rendered(example(name)) if item["kind"] not in ("PodMonitor", "PrometheusRule")]
    assert len(objects) > 20
    said = one.at_home("apply", "--dry-run=server", "-f", "-", stdin=yaml.safe_dump_all(objects)).splitlines()
    assert len(said) == len(objects), said
    assert all("dry run" in line for line in said), said
