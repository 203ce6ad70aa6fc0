"""Ownership of a local cluster: one per name and engine, one command at a time, and why a pod's PID 1 ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from build import main
from cluster import ClusterError, cli, names
from cluster.local import LocalCluster
from cluster.manifests import PodSpec
from cluster.pods import LABEL, STATE_LABEL, Kubelet, RunningPod
from cluster.report import read_readiness, refuse_hopeless
from cluster.values import Options


class Engine:
    """Fake docker engine with one container."""

    def __init__(self, labels: dict[str, str], **state: object) -> None:
        self.labels, self.state = labels, state

    def containers(self, **_: object) -> list[dict[str, Any]]:
        return [{"Id": "abc", "Labels": self.labels, "Image": "i"}]

    def inspect_container(self, _: str) -> dict[str, Any]:
        settings: dict[str, object] = {"Networks": {}}
        return {
            "State": self.state,
            "NetworkSettings": settings,
            "RestartCount": 4,
            "Image": "i",
            "Config": {"Image": "i"},
        }


def test_a_cluster_of_another_directory_is_left_alone(tmp_path: Path) -> None:
    """Two users of one machine who both use the default name do not stop each other's cluster."""
    hers, mine = tmp_path / "hers" / "local", tmp_path / "mine" / "local"
    hers.mkdir(parents=True)
    (hers / "options.json").write_text("{}")
    engine = Engine({LABEL: "local", STATE_LABEL: str(hers)})
    with pytest.raises(ClusterError, match=f"cannot stop the cluster: a cluster local .* {hers}\nhint: --name"):
        names.check_owner(engine, "local", mine, "stop the cluster")
    names.check_owner(engine, "local", hers, "stop the cluster")
    (hers / "options.json").unlink()  # the other user has removed her directory: any user may stop the orphaned pods
    names.check_owner(engine, "local", mine, "stop the cluster")


def test_a_cluster_of_another_directory_is_not_said_to_be_down(tmp_path: Path) -> None:
    hers = tmp_path / "hers" / "local"
    hers.mkdir(parents=True)
    (hers / "options.json").write_text("{}")

    class Client:
        api = Engine({LABEL: "local", STATE_LABEL: str(hers)})

    with pytest.raises(ClusterError, match=r"cannot find the cluster local: .* from another directory"):
        LocalCluster.load(Client(), "local", root=tmp_path / "mine")


def test_one_command_at_a_time_changes_a_cluster(tmp_path: Path) -> None:
    state = tmp_path / "local"
    state.mkdir()
    with names.hold_lock(state, "bring it up"):
        said = "another command changes the cluster local right now"
        with pytest.raises(ClusterError, match=said), names.hold_lock(state, "stop it"):
            pass
        state.rename(tmp_path / "removed")  # `down` does the same
        state.mkdir()
        with names.hold_lock(state, "bring it up"):
            pass
    with names.hold_lock(state, "bring it up"), names.hold_lock(tmp_path / "none", "stop it"):
        pass


def test_of_two_that_bring_up_one_name_the_second_is_told(tmp_path: Path) -> None:
    class Client:
        api = Engine({})

    one, two = (LocalCluster(Client(), Options(name="new"), root=tmp_path) for _ in range(2))
    first, second = (cluster.changing("bring the cluster up", make=True) for cluster in (one, two))
    with first, pytest.raises(ClusterError, match="right now"), second:
        pass


def pod(name: str) -> PodSpec:
    made = PodSpec.__new__(PodSpec)
    object.__setattr__(made, "name", name)
    object.__setattr__(made, "role", "login")
    return made


def test_a_pod_that_ends_at_once_says_why(tmp_path: Path) -> None:
    """Show what Kubernetes shows as the container's termination message, from the file that PID 1 writes."""
    labels = {LABEL: "c", "minivm.pod": "login-0", "minivm.spec": "s", "minivm.grace": "1", "minivm.pre-stop": "[]"}

    class Client:
        api = Engine(labels, Running=True, Restarting=True, ExitCode=78)

    kubelet = Kubelet(Client(), "c", tmp_path)
    kubelet.termination_log("login-0").parent.mkdir(parents=True)
    kubelet.termination_log("login-0").write_text("cannot read MINIVM_GRACE_SECONDS: 'abc' is no number\n")
    running: RunningPod = kubelet.list_pods()["login-0"]
    assert read_readiness(pod("login-0"), running).reason == (
        "exited 78, docker starts it again: cannot read MINIVM_GRACE_SECONDS: 'abc' is no number"
    )
    with pytest.raises(ClusterError, match="cannot bring login-0 up: cannot read MINIVM_GRACE_SECONDS"):
        refuse_hopeless(pod("login-0"), running)


def test_up_starts_the_images_that_this_prefix_has_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`make images` and `make up` use the same images."""
    seen: list[str] = []

    class Cluster(LocalCluster):
        def up(self, **_: object) -> None:
            seen.append(self.options.repository)
            raise ClusterError("go on", "this was enough")

    class Client:
        api = Engine({})

    monkeypatch.setattr(cli, "LocalCluster", lambda *a, **k: Cluster(*a, **{**k, "root": tmp_path}))
    monkeypatch.setattr(cli, "connect", Client)
    monkeypatch.delenv("MINIVM_BUILD_PREFIX", raising=False)
    CliRunner().invoke(main, ["--set", "prefix=registry.site/ours", "up", "--name", "x"])
    CliRunner().invoke(main, ["up", "--name", "x"], env={"MINIVM_BUILD_PREFIX": "mine"})
    CliRunner().invoke(main, ["up", "--name", "x"])
    assert seen == ["registry.site/ours", "mine", "minivm"]
