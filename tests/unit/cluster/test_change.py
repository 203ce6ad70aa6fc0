"""Second `make up`: which settings it keeps, which images it takes, what its plan prints, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import yaml
from click.testing import CliRunner

from build import main
from cluster import ClusterError, cli, values
from cluster.change import pinning, plan
from cluster.change.pinning import Checkout, ReleaseFit, Wish, check_releases, choose
from cluster.change.plan import JobAtStake, PlanStep, Stake, StepKind, UpPlan, in_roll_order
from cluster.local import LocalCluster
from cluster.manifests import Manifests, PodSpec
from cluster.pods import Kubelet, RunningPod
from cluster.roles import OPTIONAL, ROLES
from cluster.values import Options, UpRequest, settle
from images import ImagesError, pins
from images.pins import EngineImage, Pins
from tests.support.rendered_chart import KEYS

WORKER = "minivm/worker:latest"
OLD, REBUILT, NEW = (
    EngineImage("sha256:01d", "24.11.5"),
    EngineImage("sha256:2eb", "24.11.6"),
    EngineImage("sha256:3e3", "26.05.5"),
)


def pod(name: str, role: str, image: str = WORKER) -> PodSpec:
    made = PodSpec.__new__(PodSpec)
    for field, value in (("name", name), ("role", role), ("image", image)):
        object.__setattr__(made, field, value)
    return made


PODS = [
    pod("slurm-login-0", "login"), pod("slurm-worker-0", "worker"), pod("slurm-worker-1", "worker"),
    pod("slurm-demo-0", "demo"), pod("slurm-controller-0", "controller"),
]  # fmt: skip


def on_this_machine(latest: EngineImage | None, *others: EngineImage) -> Mapping[str, EngineImage]:
    return {image.id: image for image in others} | ({WORKER: latest, latest.id: latest} if latest else {})


STAYS, TAKEN = Wish(keep=True), Wish(anew=True)


@pytest.mark.parametrize(
    ("pinned", "latest", "also", "wish", "chosen", "said"),
    [
        (None, OLD, (), Wish(), OLD, ""),
        (OLD, OLD, (), Wish(), OLD, ""),
        (OLD, REBUILT, (OLD,), Wish(), REBUILT, "was built anew; `--keep-images` keeps"),
        (OLD, REBUILT, (OLD,), STAYS, OLD, "was built anew, the cluster keeps"),
        # Another Slurm release is taken only on request.
        (
            OLD,
            NEW,
            (OLD,),
            Wish(),
            OLD,
            "has Slurm 26.05.5 now, the cluster keeps its 24.11.5; `--slurm-version 26.05`",
        ),
        (NEW, OLD, (NEW,), Wish(), NEW, "has Slurm 24.11.5 now, the cluster keeps its 26.05.5"),
        (OLD, NEW, (OLD,), TAKEN, NEW, ""),
        (OLD, NEW, (OLD,), Wish(roles=frozenset({"worker"})), NEW, ""),
        (OLD, NEW, (OLD,), Wish(roles=frozenset({"login"})), OLD, "keeps its 24.11.5"),
        # The image's name is gone, but the image still exists.
        (OLD, None, (OLD,), Wish(), OLD, ""),
        # The image itself is gone.
        (OLD, REBUILT, (), Wish(), REBUILT, "was removed, its new build takes its place"),
        # The Slurm version of the image is unknown.
        (OLD, EngineImage("sha256:5"), (OLD,), Wish(), OLD, "of an unknown version"),
        (
            EngineImage("sha256:5"),
            NEW,
            (EngineImage("sha256:5"),),
            Wish(),
            EngineImage("sha256:5"),
            "has Slurm 26.05.5 now",
        ),
    ],
)
def test_a_cluster_starts_the_images_that_it_is_pinned_to(
    pinned: EngineImage | None,
    latest: EngineImage | None,
    also: tuple[EngineImage, ...],
    wish: Wish,
    chosen: EngineImage,
    said: str,
) -> None:
    here = on_this_machine(latest, *also)
    found = choose([WORKER], {WORKER: pinned} if pinned else {}, here.get, wish)
    assert found.images == {WORKER: chosen}
    assert said in " ".join(found.notes) and bool(said) == bool(found.notes)


@pytest.mark.parametrize(
    ("latest", "wish", "hint"),
    [(NEW, Wish(), "make images SLURM=24.11"), (None, Wish(), "make images SLURM=24.11"), (None, TAKEN, "make images")],
)
def test_an_image_that_was_removed_is_told_with_the_way_to_a_new_one(
    latest: EngineImage | None, wish: Wish, hint: str
) -> None:
    with pytest.raises(ClusterError, match=f"cannot start from {WORKER}: .*\nhint: `{hint}`"):
        choose([WORKER], {WORKER: OLD}, on_this_machine(latest).get, wish)


class Machine:
    """An engine that lists images: reference -> version, as in 24.11.5-debian-0123456789ab."""

    def __init__(self, images: Mapping[str, str]) -> None:
        self.api, self.listed = self, images

    def images(self, name: str) -> list[dict[str, object]]:
        return [{"RepoTags": [reference]} for reference in self.listed if reference.startswith(name.removesuffix("*"))]

    def version(self) -> dict[str, str]:
        return {"Arch": "amd64"}

    def info(self) -> dict[str, object]:
        return {}

    def inspect_image(self, image: str) -> dict[str, object]:
        reference = image.removeprefix("sha256:")
        if reference not in self.listed:
            raise NotThere
        version = self.listed[reference]
        labels = {"org.opencontainers.image.version": version}
        return {"Id": f"sha256:{reference}", "Config": {"Labels": labels}, "Metadata": {"LastTagTime": version}}


class NotThere(OSError):
    response = SimpleNamespace(status_code=404)


CONTAINERS = "minivm/worker-containers:latest"
OF_NEW, OF_OLD = "26.05.5-debian-00000000000", "24.11.5-debian-00000000000"
HAS = {f"minivm/{role}:{OF_NEW}1": f"{OF_NEW}1" for role in ROLES}
BUILT = {f"minivm/worker-containers:{OF_NEW}{number}": f"{OF_NEW}{number}" for number in (1, 2)}
OLDER = {f"minivm/worker-containers:{OF_OLD}9": f"{OF_OLD}9", CONTAINERS: f"{OF_OLD}9"}
OTHER = {"minivm/worker-containers:26.05.5-nvidia-000000000008": "26.05.5-nvidia-000000000008"}
MISSING = "the cluster has Slurm 26.05, and there is no image of that; no pod was touched"


@pytest.mark.parametrize(
    ("there", "wish", "chosen", "said"),
    [
        (OLDER | OTHER | BUILT, Wish(), f"minivm/worker-containers:{OF_NEW}2", "takes its newest build of 26.05"),
        (BUILT, Wish(), f"minivm/worker-containers:{OF_NEW}2", "this machine does not have it"),
        # An upgrade of all pods names no tag of a role without an image of that release.
        (OLDER | BUILT, TAKEN, f"minivm/worker-containers:{OF_NEW}2", "it has Slurm 24.11.5, the cluster"),
        # Its user named this very image.
        (OLDER | BUILT, Wish(roles=frozenset({"worker-containers"})), CONTAINERS, ""),
        (OLDER | OTHER, Wish(), "", f"it has Slurm 24.11.5, {MISSING}"),
        (OLDER | OTHER, TAKEN, "", MISSING),
        ({}, Wish(), "", f"this machine does not have it, {MISSING}"),
    ],
)
def test_a_role_that_the_cluster_did_not_have_gets_the_cluster_s_slurm(
    tmp_path: Path, there: dict[str, str], wish: Wish, chosen: str, said: str
) -> None:
    options = Options(
        "mine", overrides={"containers": {"enabled": True}}, tags=dict.fromkeys(ROLES, f"{OF_NEW}1"), own_cgroups=False
    )
    cluster = LocalCluster(Machine(HAS | there), options, root=tmp_path)
    pins.write(tmp_path / "mine", Pins({name: EngineImage(f"sha256:{name}", "26.05.5") for name in HAS}, "26.05.5"))
    if chosen:
        _, choice, _ = cluster.decide({}, wish)
        assert choice.images[CONTAINERS].id == f"sha256:{chosen}"
        assert said in " ".join(choice.notes) and bool(said) == bool(choice.notes)
        return
    with pytest.raises(ClusterError, match=f"cannot start from {CONTAINERS}: .*{said}") as caught:
        cluster.decide({}, wish)
    assert str(caught.value).endswith("\nhint: `build.py --slurm 26.05 build worker-containers` builds it")


LATEST = {f"other/{role}:latest": f"{OF_NEW}3" for role in ROLES}
BESIDE = {f"other/{role}:{OF_OLD}2": f"{OF_OLD}2" for role in ROLES}
PINNED = {f"minivm/{role}:latest": f"{OF_OLD}1" for role in ROLES}


@pytest.mark.parametrize(
    ("there", "wish", "tag", "chosen"),
    [
        (LATEST | BESIDE, Wish(), "latest", f"{OF_OLD}2"),
        (LATEST | BESIDE, TAKEN, "latest", "latest"),  # its user named this tag
        (LATEST | BESIDE, Wish(), f"{OF_OLD}2", f"{OF_OLD}2"),
        (LATEST, Wish(), "latest", ""),
    ],
)
@pytest.mark.parametrize("mode", ["embedded", "pod"])
def test_another_repository_is_no_request_for_another_slurm(
    tmp_path: Path, there: dict[str, str], wish: Wish, tag: str, chosen: str, mode: str
) -> None:
    """Its `latest` may be of another release, and Slurm has no way back."""
    options = Options("mine", overrides={"accounting": {"mode": mode}}, repository="other", tag=tag, own_cgroups=False)
    cluster = LocalCluster(Machine(PINNED | there), options, root=tmp_path)
    pins.write(tmp_path / "mine", Pins({name: EngineImage(f"sha256:{name}", "24.11.5") for name in PINNED}, "24.11.5"))
    if chosen:
        _, choice, _ = cluster.decide({}, wish)
        by_role = {pinning.read_role(name): image.id for name, image in choice.images.items()}
        assert by_role == {role: f"sha256:other/{role}:{chosen}" for role in by_role}
        assert ("accounting" in by_role) is (mode == "pod")
        return
    with pytest.raises(ClusterError, match=r"cluster has Slurm 24\.11, and there is no image of that; no pod was"):
        cluster.decide({}, wish)


def test_the_directory_keeps_its_address_and_a_new_worker_gets_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sssd uses the address of a replaced directory for ten minutes, and knows no user meanwhile."""
    options = Options("mine", tags=dict.fromkeys(ROLES, f"{OF_NEW}1"), own_cgroups=False)
    cluster = LocalCluster(Machine(HAS), options, root=tmp_path)
    desired, _, _ = cluster.decide({}, Wish())
    network = {"IPAM": {"Config": [{"Subnet": "172.19.0.0/16", "Gateway": "172.19.0.1"}]}, "Containers": {}}
    monkeypatch.setattr(cluster.kubelet, "ensure_network", lambda: network)
    before, after = (cluster.addresses.assign(desired.pods, desired) for _ in range(2))
    kept = {name for name, address in before.items() if after[name] == address}
    assert kept == {"slurm-controller-0", "slurm-demo-0"} and len({*after.values()}) == len(desired.pods)
    assert "slurm-demo" not in cluster.addresses.hosts(desired.pod("slurm-login-0"), desired, after), "DNS knows it"


def test_while_up_waits_it_says_for_which_pod_and_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    options = Options("mine", tags=dict.fromkeys(ROLES, f"{OF_NEW}1"), own_cgroups=False)
    cluster = LocalCluster(Machine(HAS), options, root=tmp_path, log=lines.append)
    desired, _, _ = cluster.decide({}, Wish())
    monkeypatch.setattr(cluster.kubelet, "list_pods", dict)
    with pytest.raises(ClusterError, match="not ready"):
        cluster.wait_ready(desired, timeout=0.0)
    assert lines == [], "not before it is long"
    monkeypatch.setattr("cluster.report.QUIET_S", 0.0)
    with pytest.raises(ClusterError, match="not ready"):
        cluster.wait_ready(desired, timeout=0.0)
    why = "no such pod: deleted, or never started"
    assert lines == [f"waits for slurm-controller-0 (and 4 more pods): {why}"]
    with pytest.raises(ClusterError, match="not ready"):
        cluster.wait_ready(desired, timeout=0.0, only="slurm-login-0")
    assert lines[1:] == [f"waits for slurm-login-0: {why}"]


class OneBuildCheckout:
    """A checkout that would build one tag of each role."""

    def __init__(self, tag: str) -> None:
        self.tag = tag

    def tags(self, release: str, variant: str, arch: str) -> dict[str, str]:
        return dict.fromkeys(ROLES, self.tag)

    def age(self, revision: str) -> str:
        return "older"


@pytest.mark.parametrize(("own", "kept", "told"), [("1", False, False), ("2", False, True), ("2", True, False)])
def test_the_plan_tells_an_older_build_once(tmp_path: Path, own: str, kept: bool, told: bool) -> None:
    """A pinned cluster keeps its images without a word at each `up`."""
    options = Options("mine", tags=dict.fromkeys(ROLES, f"{OF_NEW}1"), own_cgroups=False)
    checkout = cast("Checkout", OneBuildCheckout(OF_NEW + own))
    cluster = LocalCluster(Machine(HAS), options, root=tmp_path, checkout=checkout)
    if kept:
        pins.write(tmp_path / "mine", Pins({name: EngineImage(f"sha256:{name}", "26.05.5") for name in HAS}))
    _, choice, _ = cluster.decide({}, Wish())
    roles = sorted({*ROLES} - OPTIONAL)
    line = f"{', '.join(roles)}: an older build of minivm than this checkout's"
    assert [note.partition(";")[0] for note in choice.notes] == [line] * told


def test_images_without_a_release_and_named_tags_are_taken_as_they_are() -> None:
    def none(_: str) -> EngineImage | None:
        raise AssertionError("it looked for another")

    exact = "minivm/worker:24.11.5-debian-0123456789ab"
    here = {WORKER: EngineImage("sha256:5"), exact: OLD, "x/worker:mine": OLD}
    fit = ReleaseFit("26.05", frozenset(here), none)
    assert choose(here, {}, here.get, Wish(), fit).images == here
    # The controller's own release is unknown.
    here[WORKER] = OLD
    assert choose(here, {}, here.get, Wish(), replace(fit, release="")).images == here


def test_a_role_that_make_images_leaves_out_is_built_by_its_own_command() -> None:
    for reference, pin, hint in (
        (CONTAINERS, None, "build.py build worker-containers"),
        (CONTAINERS, OLD, "build.py --slurm 24.11 build worker-containers"),
        (WORKER, None, "make images"),
    ):
        with pytest.raises(ClusterError, match=f"\nhint: `{hint}`"):
            choose([reference], {reference: pin} if pin else {}, lambda _: None, Wish())


@pytest.mark.parametrize(
    ("reference", "hint"),
    [
        ("minivm/worker:latest", "`make images`"),
        (
            "minivm/worker-containers:26.05.5-debian-0123456789ab",
            "`docker images minivm/worker-containers` lists the tags that are here;"
            " `build.py --slurm 26.05 build worker-containers` makes this checkout's",
        ),
        (
            "host:5000/m/login:24.11.5-nvidia-arm64-0123456789ab",
            "`docker images host:5000/m/login` lists the tags that are here;"
            " `build.py --slurm 24.11 --variant nvidia --arch arm64 build login` makes this checkout's",
        ),
        ("host:5000/m/login:v1", "`docker images host:5000/m/login` lists the tags that are here"),
        ("m/login:v1@sha256:0123", "`docker images m/login` lists the tags that are here"),
    ],
)
def test_a_tag_that_is_not_here_is_told_with_what_would_bring_it(reference: str, hint: str) -> None:
    """`make images` makes this checkout's tags: another one does not come by it."""
    with pytest.raises(ClusterError) as refused:
        choose([reference], {}, lambda _: None, Wish(anew=True))
    assert str(refused.value) == f"cannot start from {reference}: this machine does not have it\nhint: {hint}"


@pytest.mark.parametrize(
    ("controller", "clients", "state", "refused"),
    [
        (OLD, OLD, "", ""),
        (NEW, OLD, "24.11.5", ""),
        (OLD, OLD, "24.11.6", ""),  # a downgrade within one release is possible
        (OLD, OLD, "26.05.5", "cannot start Slurm 24.11 in this cluster: its state is of Slurm 26.05"),
        (OLD, NEW, "24.11.5", "cannot start slurm-login-0 with Slurm 26.05: the controller has Slurm 24.11"),
        (EngineImage("x"), NEW, "26.05.5", ""),
    ],
)
def test_a_way_back_and_clients_before_their_controller_are_refused(
    controller: EngineImage, clients: EngineImage, state: str, refused: str
) -> None:
    pods = [replace_image(item, "controller" if item.role == "controller" else "clients") for item in PODS]
    images = {"controller": controller, "clients": clients}
    if not refused:
        check_releases(pods, images, Pins(state=state))
        return
    with pytest.raises(ClusterError) as caught:
        check_releases(pods, images, Pins(state=state))
    assert str(caught.value).startswith(refused) and "no pod was touched\nhint: `--slurm-version" in str(caught.value)


def test_a_slurmdbd_older_than_the_controller_is_refused() -> None:
    pods = [replace_image(item, "newer") for item in PODS if item.role == "controller"]
    pods.append(replace_image(pod("slurm-accounting-0", "accounting"), "older"))
    check_releases(pods, {"newer": OLD, "older": OLD}, Pins())
    with pytest.raises(
        ClusterError, match=r"cannot start slurm-accounting-0 with Slurm 24\.11: its slurmdbd .* 26\.05; no pod"
    ):
        check_releases(pods, {"newer": NEW, "older": OLD}, Pins())


def test_an_older_slurmdbd_than_the_one_that_converted_the_database_is_refused() -> None:
    """Its start may have failed before the controller's, whose state is still of the older Slurm."""
    pods = [replace_image(item, "older") for item in PODS if item.role == "controller"]
    pods.append(replace_image(pod("slurm-accounting-0", "accounting"), "older"))
    check_releases(pods, {"older": OLD}, Pins(state="24.11.5", records="24.11.5"))
    with pytest.raises(ClusterError, match=r"slurmdbd 26\.05 has converted its database, and Slurm has no way back"):
        check_releases(pods, {"older": OLD}, Pins(state="24.11.5", records="26.05.5"))


def replace_image(item: PodSpec, image: str) -> PodSpec:
    return pod(item.name, item.role, image)


def test_slurms_order_is_the_order_in_which_pods_are_replaced() -> None:
    assert [item.name for item in in_roll_order(PODS)] == [
        "slurm-controller-0", "slurm-demo-0", "slurm-worker-1", "slurm-worker-0", "slurm-login-0",
    ]  # fmt: skip


STORED = Options("mine", workers=3, repository="w", proctrack="linuxproc", overrides={"a": 1}, values_file="/v",
                 tags={"worker": "t"}, port=2300, auth="munge")  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "changed"),
    [
        (UpRequest(), {}),
        (UpRequest(workers=5), {"workers": 5}),
        (UpRequest(overrides={"b": 2}, values_file="/w"), {"overrides": {"b": 2}, "values_file": "/w"}),
        (UpRequest(proctrack="cgroup"), {"proctrack": "cgroup"}),
        (UpRequest(repository="other"), {"repository": "other"}),
        # Images and port are kept.
        (UpRequest(reset=True), {"workers": 2, "proctrack": "", "overrides": {}, "values_file": ""}),
        (UpRequest(reset=True, workers=4), {"workers": 4, "proctrack": "", "overrides": {}, "values_file": ""}),
    ],
)
def test_a_second_up_changes_what_it_names_and_nothing_else(asked: UpRequest, changed: dict[str, object]) -> None:
    wanted = replace(STORED, auth="munge", **changed)  # type: ignore[arg-type]  # one of each
    assert settle("mine", STORED, asked) == wanted


def test_a_second_up_without_options_changes_no_setting() -> None:
    first = settle("new", None, UpRequest())
    assert plan.list_changed_settings(first, settle("new", first, UpRequest())) == []
    assert plan.list_changed_settings(first, settle("new", first, UpRequest(auth="munge"))) == ["auth: slurm -> munge"]


ADA = {"name": "ada", "uid": 5001, "group": "lab"}
LAB = {"groups": [{"name": "lab", "gid": 5000}], "users": [ADA]}


def test_people_are_stored_and_a_second_file_replaces_the_first() -> None:
    first = settle("new", None, UpRequest(people=LAB))
    kept = settle("new", values.load(values.dump(first), "options.json"), UpRequest())
    assert kept == first and values.local_values(kept, KEYS)["people"] == LAB
    second = settle("new", kept, UpRequest(people=LAB | {"users": [ADA | {"uid": 5001, "shell": "/bin/zsh"}]}))
    assert plan.list_changed_settings(kept, second) == ["people: changed ada"]
    eve = settle("new", kept, UpRequest(people={"groups": [], "users": [ADA | {"name": "eve", "uid": 5002}]}))
    assert plan.list_changed_settings(kept, eve) == ["people: new eve, no ada, groups"]
    assert settle("new", kept, UpRequest(reset=True)).people == {}
    assert "people" not in values.local_values(settle("new", None, UpRequest()), KEYS)


def test_a_file_that_changes_a_uid_is_refused_and_so_are_two_sources() -> None:
    kept = settle("new", None, UpRequest(people=LAB))
    with pytest.raises(ClusterError, match="5001 is the uid of ada"):
        settle("new", kept, UpRequest(people=LAB | {"users": [ADA | {"name": "ada2"}]}))
    gone = settle("new", kept, UpRequest(people=LAB | {"users": []}))
    assert plan.list_lost_people(kept, gone) == ["people: keys, login sessions of ada"]
    ended = settle("new", gone, UpRequest(overrides={"people": {"removedJobs": "cancel-pending"}}))
    assert plan.list_lost_people(kept, ended) == ["people: keys, login sessions, pending jobs of ada"]
    assert plan.list_lost_people(gone, kept) == plan.list_lost_people(None, kept) == []
    with pytest.raises(ClusterError, match="ada had the uid 5001, and has 5002"):
        settle("new", kept, UpRequest(people=LAB | {"users": [ADA | {"uid": 5002}]}))
    with pytest.raises(ClusterError, match="the values have people too"):
        settle("new", kept, UpRequest(overrides={"people": {"existingSecret": "x"}}))
    policy = settle("new", kept, UpRequest(overrides={"people": {"removedJobs": "cancel"}}))
    assert values.local_values(policy, KEYS)["people"] == LAB | {"removedJobs": "cancel"}


def test_a_wrong_people_yaml_stops_up_before_anything(tmp_path: Path) -> None:
    file = tmp_path / "people.yaml"
    file.write_text("groups: []\nusers: [{name: root, uid: 0, group: root}]\n")
    done = CliRunner().invoke(main, ["up", "--name", "never-made", "--people", str(file)])
    assert done.exit_code == 1 and "root is a name of the system" in done.output and str(file) in done.output


def test_a_first_up_has_the_defaults() -> None:
    assert settle("new", None, UpRequest()) == Options("new", auth="slurm")
    assert settle("new", None, UpRequest(auth="munge")).auth == "munge"


def test_workers_that_the_values_count_are_not_changed_silently() -> None:
    counted = UpRequest(
        workers=4, overrides={"workers": {"pools": {"worker": {"replicas": 2}}}}, values_file="/my.yaml"
    )
    with pytest.raises(ClusterError, match=r"cannot start 4 workers: the values say 2 \(/my.yaml, workers.pools"):
        settle("mine", None, counted)
    assert settle("mine", None, replace(counted, workers=2)).workers == 2


def test_only_a_word_of_the_operator_s_changes_the_authentication() -> None:
    signed = Options("mine", overrides={"slurm": {"auth": "slurm"}})
    kept = settle("mine", signed, UpRequest(overrides={}))
    assert values.auth(kept) == "slurm", "values that no longer name it leave it"
    assert values.auth(settle("mine", kept, UpRequest(reset=True))) == "slurm"
    assert values.auth(settle("mine", kept, UpRequest(auth="munge"))) == "munge"
    with pytest.raises(ClusterError, match="the values say slurm"):
        settle("mine", signed, UpRequest(auth="munge"))


@pytest.mark.parametrize(
    ("text", "auth"),
    [
        ('{"name": "old"}', "munge"),  # before there was a choice
        ('{"name": "old", "auth": ""}', "munge"),  # when munge was the default
        ('{"name": "old", "auth": "munge"}', "munge"),
        ('{"name": "old", "auth": "slurm"}', "slurm"),
        ('{"name": "old", "auth": "", "overrides": {"slurm": {"auth": "slurm"}}}', "slurm"),
        ('{"name": "old", "auth": "", "overrides": {"slurm": {"auth": ""}}}', "munge"),
    ],
)
@pytest.mark.parametrize("asked", [UpRequest(), UpRequest(reset=True), UpRequest(overrides={}), UpRequest(workers=3)])
def test_a_cluster_of_an_older_version_keeps_its_authentication(text: str, auth: str, asked: UpRequest) -> None:
    settled = settle("old", values.load(text, "f"), asked)
    assert values.auth(settled) == auth
    assert values.local_values(settled, KEYS)["slurm"]["auth"] == auth
    assert values.auth(values.load(values.dump(settled), "f")) == auth


@pytest.mark.parametrize("over", [{}, {"slurm": {"auth": ""}}, {"slurm": {"auth": None}}, {"slurm": {}}])
def test_a_new_cluster_has_slurms_own_authentication(over: dict[str, object]) -> None:
    settled = settle("new", None, UpRequest(overrides=over))
    assert values.local_values(settled, KEYS)["slurm"]["auth"] == "slurm"


def test_a_cluster_that_keeps_munge_is_told_how_to_move() -> None:
    (note,) = plan.note_auth("munge")
    assert "--auth slurm" in note and "docs/how-to/change-authentication.md" in note
    assert UpPlan(notes=(note,)).lines() == [f"note: {note}", "nothing to change"]
    assert plan.note_auth("slurm") == []


def test_stored_options_come_back_and_those_of_another_version_are_told() -> None:
    assert values.load(values.dump(STORED), "f") == STORED
    # Options stored before image pins existed.
    assert values.load('{"name": "old", "workers": 1}', "f") == Options("old", workers=1, auth="munge")
    for text in ('{"name": "x", "fleet": true}', "{", "[]", "null"):
        with pytest.raises(ClusterError, match=r"cannot read the stored options of a cluster: .*\(f\)\nhint: "):
            values.load(text, "f")


@pytest.mark.parametrize(
    ("after", "said"),
    [
        (STORED, []),
        (replace(STORED, workers=1, port=2400), ["workers: 3 -> 1", "port: 2300 -> 2400"]),
        (replace(STORED, proctrack=""), ["proctrack: linuxproc -> default"]),
        (replace(STORED, tags={}), ["tags: worker=default"]),
        # The plan never shows an override's value: it may be a password.
        (replace(STORED, overrides={"a": 1, "b": {"c": {"d": "secret"}}}), ["values: b.c.d"]),
        (replace(STORED, overrides={}), ["values: a"]),
    ],
)
def test_the_plan_names_changed_settings(after: Options, said: list[str]) -> None:
    assert sorted(plan.list_changed_settings(STORED, after)) == sorted(said)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ({}, {"image": "new"}, "its description changed"),
        ({"image": "old"}, {"image": "new"}, "Slurm 24.11.5 -> 26.05.5"),
        ({"image": "old"}, {"image": "rebuilt"}, "new image"),
        ({"env": {"A": "secret"}}, {"env": {"A": "b", "C": "d"}}, "env (A, C)"),
        ({"limits": 1, "runtime_class": "x"}, {"limits": 2, "runtime_class": "y"}, "limits, runtime class"),
        ({"mounts": [1], "searches": ["a"]}, {"mounts": [2], "searches": []}, "volumes, DNS search domains"),
    ],
)
def test_the_plan_says_why_a_pod_is_replaced(before: dict[str, object], after: dict[str, object], said: str) -> None:
    slurm = {"old": "24.11.5", "rebuilt": "24.11.5", "new": "26.05.5"}
    assert plan.reasons(before, after, lambda image: slurm[image]) == said


def test_partitions_are_found_as_slurm_finds_them() -> None:
    conf = (
        b"PartitionName=all Nodes=ALL\n partitionname = long # x\n#PartitionName=no\nPartitionName=DEFAULT MaxTime=1\n"
    )
    assert plan.list_partitions({"slurm.conf": conf, "more.conf": b"PartitionName=gpu"}) == {"all", "long", "gpu"}


W0, W1, LOGIN = "slurm-worker-0", "slurm-worker-1", "slurm-login-0"
JOB, LAST = JobAtStake("7_[1-3]", "alice"), JobAtStake("8", "bob", requeues=False)


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (PlanStep(StepKind.CREATE, W0), []),
        (PlanStep(StepKind.REPLACE, W0), []),
        (PlanStep(StepKind.REPLACE, W1), [f"{W1}: jobs that outlast its drain are requeued: 7_[1-3] of alice",
                                  f"{W1}: jobs that outlast its drain end: 8 of bob"]),
        (PlanStep(StepKind.REMOVE, W0), [f"pod {W0} goes", f"{W0}: jobs that name it wait for ever: 8 of bob"]),
        (PlanStep(StepKind.REPLACE, LOGIN), [f"{LOGIN}: 2 ssh sessions end"]),
        (PlanStep(StepKind.REPLACE, "silent"), ["silent: whatever runs there, slurmctld did not answer: no"]),
    ],
)  # fmt: skip
def test_the_plan_names_what_is_lost(step: PlanStep, said: list[str]) -> None:
    stakes = {
        W1: Stake([JOB, LAST]),
        W0: Stake(waiting=[LAST]),
        LOGIN: Stake(sessions=2),
        "silent": Stake(unknown="no"),
    }
    assert plan.losses([step], partitions=(), stakes=stakes) == said


def test_a_partition_is_lost_whether_it_has_jobs_or_not() -> None:
    assert plan.losses([], partitions={"long"}, stakes={}) == ["partition long goes"]


def test_squeues_rows_are_jobs() -> None:
    text = "1|alice|1|\n2_[1-9]|bob|0|x|\n\nslurm_load_jobs error: x\n"
    assert plan.parse_jobs(text) == [JobAtStake("1", "alice"), JobAtStake("2_[1-9]", "bob", requeues=False)]


def test_waiting_clients_end_before_workers_get_another_slurm() -> None:
    """Their steps would hang there, hold CPUs, and not even scancel would end them."""
    asked: list[list[str]] = []

    def run(command: Iterable[str]) -> tuple[int, str]:
        asked.append([*command])
        return 0, "7|alice|1|0|\n8_[1-9]|bob|1|1|\n9|bob|1|0|\n" if "squeue" in asked[-1] else ""

    clients = plan.list_waiting_clients(run)
    assert clients == [JobAtStake("7", "alice"), JobAtStake("9", "bob")] and "--states=PENDING" in asked[0]
    (loss,) = plan.losses([], partitions=(), stakes={}, clients=clients)
    assert loss == "waiting srun and salloc, which could hang on the new workers, end: 7 of alice, 9 of bob"
    log: list[str] = []
    plan.end_clients(run, log.append)
    assert asked[-1] == ["scancel", "--quiet", "--state=PENDING", "7", "9"] and log == [
        "waiting srun and salloc end: 7 of alice, 9 of bob"
    ]
    assert [command[2] for command in asked if command[0] == "scontrol"] == ["JobId=7", "JobId=9"]


class CutUpgrade(LocalCluster):
    """A cluster whose last `up` was cut: the controller has Slurm 26.05, the others do not yet."""

    def __init__(self, tmp_path: Path) -> None:
        super().__init__(Machine({}), Options("mine"), root=tmp_path)
        self.did: list[str] = []

    def specs(self, desired: Manifests) -> dict[str, str]:
        return {pod.name: pod.image for pod in desired.pods}

    def slurm_in(self, image: str) -> str:
        return image

    def roll(self, pods: Iterable[PodSpec], desired: Manifests, *, timeout: float) -> None:
        self.did += [f"roll {pod.name}" for pod in pods]

    def start(self, pods: Iterable[PodSpec], desired: Manifests, pool: object) -> None:
        assert not list(pods)

    def exec(self, pod: str, command: Iterable[str], *, user: str = "") -> tuple[int, str]:
        self.did.append(f"{pod}: {' '.join(command)}")
        return 0, ""

    def run_slurm(self, command: Iterable[str]) -> tuple[int, str]:
        words = [*command]
        self.did += [" ".join(words)] if words[0] == "scancel" else []
        return 0, "7|alice|1|0|\n" if "squeue" in words else ""


def test_an_upgrade_that_was_cut_after_the_controller_still_prepares_the_logins(tmp_path: Path) -> None:
    """With the sackd of before, every srun of the old logins would hang on the new workers."""
    cluster, wanted, running = CutUpgrade(tmp_path), [], {}
    for role, image in (("controller", "26.05.5"), ("worker", "24.11.5"), ("login", "24.11.5")):
        name = f"slurm-{role}-0"
        wanted.append(SimpleNamespace(name=name, role=role, image="26.05.5"))
        running[name] = SimpleNamespace(pod=name, role=role, image=image, spec=image, running=True)
    cluster.kubelet = cast("Kubelet", SimpleNamespace(publish_files=lambda *_: False))
    desired = cast("Manifests", SimpleNamespace(pods=wanted))
    cluster.reconcile(desired, cast("dict[str, RunningPod]", running), timeout=1.0)
    assert cluster.did == [
        "slurm-login-0: timeout 30 minivm restart sackd",
        "scancel --quiet --state=PENDING 7",
        "roll slurm-worker-0",
        "roll slurm-login-0",
    ]


def test_waiting_clients_that_are_unknown_stop_no_upgrade() -> None:
    log: list[str] = []
    plan.end_clients(lambda _: (1, "slurm_load_jobs error: no answer"), log.append)
    (line,) = log
    assert line.startswith("waiting srun and salloc are unknown (slurm_load_jobs error: no answer): a step that hangs")


def test_the_cause_is_named_before_its_victims() -> None:
    told = plan.not_ready([("slurm-controller-0", "mariadb: no space"), (LOGIN, "sackd waits for slurmctld")])
    assert told.splitlines()[1:] == [
        "  slurm-controller-0: mariadb: no space",
        "and, perhaps for that reason:",
        f"  {LOGIN}: sackd waits for slurmctld",
    ]
    assert plan.not_ready([(LOGIN, "no")]) == f"\n  {LOGIN}: no"


def asked(planned: UpPlan, answer: str, *, yes: bool, terminal: bool, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return what `up` prints for the plan, including its refusal."""
    import click

    @click.command()
    def command() -> None:
        monkeypatch.setattr("sys.stdin.isatty", lambda: terminal, raising=False)
        try:
            cli.agree(planned, "mine", yes=yes)
            click.echo("GOES ON")
        except ClusterError as error:
            click.echo(str(error))

    return CliRunner().invoke(command, input=answer).output


REMOVED = UpPlan(steps=(PlanStep(StepKind.REMOVE, W1),), losses=(f"pod {W1} goes",))


@pytest.mark.parametrize(
    ("planned", "answer", "yes", "terminal", "goes_on", "said"),
    [
        (UpPlan(), "", False, False, True, "nothing to change"),
        (
            UpPlan(steps=(PlanStep(StepKind.REPLACE, W1, "new image"),)),
            "",
            False,
            False,
            True,
            f"replace  {W1}  new image",
        ),
        (REMOVED, "", True, False, True, f"lost     pod {W1} goes"),
        (REMOVED, "", False, False, False, "nothing was changed\nhint: `--yes` agrees to it"),
        (REMOVED, "n\n", False, True, False, "you did not agree; nothing was changed"),
        (REMOVED, "y\n", False, True, True, "Go on, and lose that?"),
    ],
)
def test_a_loss_is_asked_about_and_nothing_else(
    planned: UpPlan, answer: str, yes: bool, terminal: bool, goes_on: bool, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = asked(planned, answer, yes=yes, terminal=terminal, monkeypatch=monkeypatch)
    assert said in output and ("GOES ON" in output) is goes_on
    assert ("Go on" in output) is (bool(planned.losses) and terminal and not yes)


def test_a_name_in_a_plan_cannot_write_to_the_terminal() -> None:
    assert "\x1b" not in "\n".join(UpPlan(steps=(PlanStep(StepKind.CREATE, "x\x1b[2J"),)).lines())


def test_pins_are_read_as_they_were_written_and_damage_is_told(tmp_path: Path) -> None:
    assert pins.read(tmp_path) == Pins()
    kept = Pins({WORKER: OLD}, "24.11.5")
    pins.write(tmp_path, kept)
    assert pins.read(tmp_path) == kept
    for text in ("", "[]", '{"images": {"a": {"who": 1}}, "state": ""}'):
        (tmp_path / pins.FILE).write_text(text)
        with pytest.raises(ImagesError, match=r"cannot read a cluster's images: .*images.json\)\nhint: `make down`"):
            pins.read(tmp_path)


def test_a_cluster_of_before_pins_is_pinned_to_what_its_pods_run(tmp_path: Path) -> None:
    """Pin an unpinned cluster to its running images.

    Otherwise the next pod to be replaced would start whatever `latest` means by then.
    """

    class Client:
        class api:
            @staticmethod
            def inspect_image(image: str) -> dict[str, object]:
                slurm = {"sha256:01d": "24.11.5", WORKER: "26.05.5", "sha256:c0": "24.11.5"}[image]
                return {"Id": image, "Config": {"Labels": {"org.opencontainers.image.version": f"{slurm}-debian-0"}}}

    def runs(pod: str, reference: str, image: str) -> RunningPod:
        return RunningPod(pod, "c", True, "", 0, 0, "s", image, 1, (), reference=reference)

    there = {
        "slurm-worker-0": runs("slurm-worker-0", WORKER, OLD.id),
        "slurm-controller-0": runs("slurm-controller-0", "minivm/controller:latest", "sha256:c0"),
    }
    found = LocalCluster(Client(), Options("mine"), root=tmp_path).pins(there)
    assert found.images[WORKER] == OLD
    assert found.state == "24.11.5"
    # Stored pins take precedence over running images.
    (tmp_path / "mine").mkdir()
    pins.write(tmp_path / "mine", Pins({WORKER: REBUILT}, "26.05.5"))
    found = LocalCluster(Client(), Options("mine"), root=tmp_path).pins(there)
    assert (found.images[WORKER], found.state) == (REBUILT, "26.05.5")


def test_values_are_stored_and_not_their_path(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text(yaml.safe_dump({"slurm": {"config": {"SlurmdTimeout": 9}}}))
    options = settle("x", None, UpRequest(overrides=yaml.safe_load(file.read_text()), values_file=str(file)))
    file.unlink()
    again = settle("x", values.load(values.dump(options), "f"), UpRequest())
    assert again.overrides == {"slurm": {"config": {"SlurmdTimeout": 9}}}
    assert json.loads(values.dump(again))["values_file"] == str(file)


def test_up_offers_what_the_pages_name() -> None:
    said = CliRunner().invoke(main, ["up", "--help"]).output
    assert all(option in said for option in ("--reset", "--keep-images", "--yes", "--slurm-version"))


def test_up_tells_every_mistake_of_a_people_file(tmp_path: Path) -> None:
    file = tmp_path / "people.yaml"
    file.write_text(
        "groups: [{name: lab, gid: 5000}]\nusers: [{name: ada, uid: 1, group: lab}, {name: bob, uid: 5002}]\n"
    )
    with pytest.raises(ClusterError) as caught:
        cli.read_people(file)
    first, *mistakes = str(caught.value).splitlines()
    assert first == f"cannot read the people: mistakes in {file}:"
    assert [line.split(": ")[0] for line in mistakes] == ["  users[0] (ada).uid", "  users[1] (bob).group"]
