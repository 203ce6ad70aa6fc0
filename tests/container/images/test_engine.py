"""The engine's promises, kept by real builds of a small definition: skip, name what changed, leave nothing behind."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from images import ImagesError, pins
from images.archive.lock import LockContext, open_archive
from images.archive.locked import LockRequest, Slice, to_json
from images.cli.check import build_twice, list_pinned, list_prunable
from images.cli.session import Session
from images.definition.spec import BuildChoice, SlurmSource
from images.engine import store
from images.engine.docker import LABEL, DockerEngine
from images.engine.store import Chunks
from images.make import content
from images.make.build import Maker
from images.make.plan import BuildResult, Planned
from images.make.progress import Plain
from images.settings import BuildSettings
from images.ship.diff import compare
from images.ship.diff import read as contents
from tests.container import definition
from tests.container.world import root_image
from tests.support.engine_images import if_there
from tests.waiting import PATIENCE, until

pytestmark = [pytest.mark.docker, pytest.mark.root]

ROLES = ["small"]


class Small:
    """A repository with three layers and a role, on the root that `make images` made, and nothing to install."""

    def __init__(self, root: Path, prefix: str, base: str) -> None:
        self.root, self.prefix, self.base = root, prefix, base
        images = root / "images"
        for name in ("layers", "roles", "rootfs/one/etc"):
            (images / name).mkdir(parents=True)
        shutil.copytree(definition.ROOT / "images/templates", images / "templates")
        for name in ("versions.yaml", "slurm.yaml", "make/sbom.py"):
            (images / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(definition.ROOT / "images" / name, images / name)
        (images / "rootfs/one/etc/one.conf").write_text("1\n")
        self.layer("root", bootstrap={})
        self.layer("one", **{"from": "root"}, run=["echo made > /etc/made"], verify=["grep -q made /etc/made"])
        self.layer("two", **{"from": "one"}, run=["test -e /etc/one.conf"])
        self.layer("aside", **{"from": "root"}, run=["echo aside > /etc/aside"])
        self.role("small", layer="two")

    def layer(self, name: str, **keys: object) -> None:
        text = yaml.safe_dump({"describe": f"the layer {name}", **keys})
        (self.root / f"images/layers/{name}.yaml").write_text(text)

    def role(self, name: str, **keys: object) -> None:
        text = yaml.safe_dump({"describe": f"the role {name}", "code": False, **keys})
        (self.root / f"images/roles/{name}.yaml").write_text(text)

    def open(self, **values: str) -> Session:
        """Slices of nothing: these layers install nothing, so nothing is asked of a mirror."""
        settings = BuildSettings(
            prefix=self.prefix, base_image=self.base, builder=values.pop("builder", "classic"), **values
        )
        session = Session.open(self.root, settings)
        for name in session.definition.layers:
            session.slices[name] = Slice(name, LockRequest((), "", ()), ())
        return session

    def plan(self, session: Session) -> dict[str, Planned]:
        return {item.image.key: item for item in session.plan(ROLES)[1]}

    def build(self, session: Session) -> dict[str, BuildResult]:
        composed, planned = session.plan(ROLES)
        return {result.image.key: result for result in session.build(composed, planned, Plain())}


@pytest.fixture(scope="session")
def engine() -> DockerEngine:
    return DockerEngine("classic")


@pytest.fixture
def small(tmp_path: Path, engine: DockerEngine) -> Iterator[Small]:
    made = Small(tmp_path / "repository", f"minivm-test-engine-{os.getpid()}", root_image(engine))
    yield made
    for reference in named(engine, made.prefix):
        engine.remove(reference)


def named(engine: DockerEngine, prefix: str) -> set[str]:
    return {name for image in engine.images() for name in image.references if name.startswith(f"{prefix}/")}


def read(session: Session, reference: str, path: str) -> bytes:
    with session.engine.container(reference) as container, session.engine.read_path(container, path) as tar:
        data = tar.extractfile(tar.next() or "")
        assert data is not None
        return data.read()


def test_what_the_engine_has_is_not_built_again_and_the_newest_is_called_latest(small: Small) -> None:
    first = small.build(small.open())
    assert {key for key, result in first.items() if result.built} == {
        "layer:root", "layer:one", "layer:two", "role:small"}  # fmt: skip
    session = small.open()
    assert all(item.present and item.why == () for item in small.plan(session).values())
    assert not any(result.built for result in small.build(session).values())
    role = first["role:small"].image
    assert session.engine.image_id(f"{role.repo}:latest") == session.engine.image_id(role.reference)
    assert read(session, role.reference, "/etc/one.conf") == b"1\n"


@pytest.mark.parametrize(
    ("path", "edit"),
    [
        ("images/rootfs/two/etc/two.conf", lambda path: path.write_text("new\n")),
        ("images/rootfs/two/etc/two.conf", lambda path: path.chmod(0o755)),
    ],
    ids=["bytes", "mode"],
)
def test_a_touched_file_is_named_and_only_what_depends_on_it_is_built(
    small: Small, path: str, edit: Callable[[Path], None]
) -> None:
    file = small.root / path
    file.parent.mkdir(parents=True)
    file.write_text("old\n")
    small.build(small.open())
    edit(file)
    session = small.open()
    planned = small.plan(session)
    assert [key for key, item in planned.items() if not item.present] == ["layer:two", "role:small"]
    assert planned["layer:two"].why == (path,)
    assert planned["role:small"].why == ("parent layer:two",)
    built = {key for key, result in small.build(session).items() if result.built}
    assert built == {"layer:two", "role:small"}


def test_what_a_later_build_superseded_can_go_and_nothing_else(small: Small, engine: DockerEngine) -> None:
    first = small.build(small.open())
    (small.root / "images/rootfs/one/etc/one.conf").write_text("2\n")
    session = small.open()
    second = small.build(session)
    keys = ["role:small", "layer:one", "layer:two"]
    old = list_prunable(session, ROLES)
    assert set(old) == {first[key].image.reference for key in keys}
    assert old[0] == first["role:small"].image.reference
    for name in old:
        assert engine.release(name) == ""
    kept = {result.image.reference for result in second.values()} | {f"{second['role:small'].image.repo}:latest"}
    assert named(engine, small.prefix) == kept
    assert list_prunable(session, ROLES) == []


def test_an_image_that_a_cluster_is_pinned_to_stays(small: Small, engine: DockerEngine) -> None:
    first = small.build(small.open())["role:small"].image.reference
    (small.root / "images/rootfs/one/etc/one.conf").write_text("3\n")
    session = small.open()
    small.build(session)
    assert first in list_prunable(session, ROLES)
    cluster = small.root / "build/cluster/mine"
    pins.write(cluster, pins.Pins({"small:latest": pins.EngineImage(engine.inspect(first)["Id"])}))
    assert first not in list_prunable(session, ROLES)
    assert list_pinned(session, ROLES) == [(first, "mine")]
    shutil.rmtree(cluster)
    assert first in list_prunable(session, ROLES)


def test_an_image_in_use_stays_and_says_so(small: Small, engine: DockerEngine) -> None:
    image = small.build(small.open())["layer:two"].image
    with engine.container(image.reference):
        assert "container" in engine.release(image.reference)
    assert engine.has(image.reference)


def test_a_layer_that_adds_nothing_leaves_the_base_its_name(small: Small, engine: DockerEngine) -> None:
    before = engine.image_id(small.base)
    small.build(small.open())
    assert engine.image_id(small.base) == before


def test_a_failed_step_is_shown_and_leaves_no_image_and_moves_no_name(small: Small, engine: DockerEngine) -> None:
    before = small.build(small.open())["role:small"].image
    latest, names = engine.image_id(f"{before.repo}:latest"), named(engine, small.prefix)
    everything = {image.id for image in engine.images()}
    small.layer("two", **{"from": "one"}, run=["echo so far so good", "echo no such thing >&2; exit 3"])
    with pytest.raises(ImagesError) as caught:
        small.build(small.open())
    text = str(caught.value)
    assert "cannot build layer:two" in text
    assert "status 3" in text
    assert "so far so good" in text
    assert "no such thing" in text
    log = Path(text.rpartition("the whole log: ")[2])
    assert "so far so good" in log.read_text()
    assert engine.image_id(f"{before.repo}:latest") == latest
    assert named(engine, small.prefix) == names
    left = {image.id: image for image in engine.images() if image.id not in everything}
    assert not [image for image in left.values() if labelled(engine, image.id, small.prefix)]


def labelled(engine: DockerEngine, image: str, prefix: str) -> bool:
    labels = if_there(engine.api.inspect_image, image).get("Config", {}).get("Labels") or {}
    return any(prefix in value for value in labels.values())


def test_a_verification_that_fails_is_the_step_that_failed(small: Small) -> None:
    small.layer("two", **{"from": "one"}, verify=["test -e /nowhere && true"])
    with pytest.raises(ImagesError, match="step `verify test -e /nowhere && true` failed"):
        small.build(small.open())


def test_a_failure_inside_a_compound_command_counts(small: Small) -> None:
    small.layer("two", **{"from": "one"}, run=["false && true"])
    with pytest.raises(ImagesError, match="cannot build layer:two"):
        small.build(small.open())


def command_line(small: Small) -> tuple[list[str], dict[str, str]]:
    """build.py of this repository, and its environment."""
    for name in ("root", "one", "two"):
        request = LockRequest((), {"root": "", "one": "root", "two": "one"}[name], (small.base,))
        lock = small.root / "images/lock/debian-base"
        lock.mkdir(parents=True, exist_ok=True)
        (lock / f"{name}.json").write_text(to_json(Slice(name, request, ())))
    shutil.copyfile(definition.ROOT / "build.py", small.root / "build.py")
    command = [sys.executable, str(small.root / "build.py")]
    for setting in (f"prefix={small.prefix}", f"base_image={small.base}", "builder=classic"):
        command += ["--set", setting]
    return command, {**os.environ, "PYTHONPATH": str(definition.ROOT)}


KILLED = """
import os, signal, sys
from pathlib import Path
from images.cli.session import Session
from images.settings import BuildSettings
session = Session.open(Path(sys.argv[1]), BuildSettings(base_image=sys.argv[2]))
with session.engine.container(sys.argv[2]):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_build_begins_with_what_a_killed_one_left(small: Small, engine: DockerEngine) -> None:
    command, environment = command_line(small)
    everything = {container["Id"] for container in engine.api.containers(all=True)}
    killed = [sys.executable, "-c", KILLED, str(small.root), small.base]
    assert subprocess.run(killed, env=environment, check=False).returncode == -signal.SIGKILL

    def left() -> list[str]:
        marks = [f"{LABEL}={mark.name}" for mark in (small.root / "build/marks").iterdir()]
        found = [container for mark in marks for container in engine.api.containers(all=True, filters={"label": mark})]
        return [container["Id"] for container in found if container["Id"] not in everything]

    assert len(left()) == 1
    built = subprocess.run([*command, "build"], env=environment, check=True, capture_output=True, text=True)
    assert built.stdout.startswith("removed 1 containers of interrupted builds\n")
    assert not left()


def test_a_build_with_nothing_to_do_asks_without_the_library_and_sees_all_that_changed(
    small: Small, engine: DockerEngine
) -> None:
    (python, *command), environment = command_line(small)

    def built() -> tuple[set[str], str]:
        """Return the built images and the imported modules."""
        whole = [python, "-X", "importtime", *command, "build", "--json"]
        done = subprocess.run(whole, env=environment, check=True, capture_output=True, text=True)
        names = [one["image"].partition(":")[0] for one in json.loads(done.stdout) if one["built"]]
        return {name.rpartition("/")[2] for name in names}, done.stderr

    assert built()[0] == {"layer-root", "layer-one", "layer-two", "small"}
    nothing, imported = built()
    assert nothing == set()
    assert "images.cli.session" in imported
    for library in ("docker", "requests", "urllib3", "jinja2"):
        assert f" {library}\n" not in imported
    (small.root / "images/rootfs/one/etc/one.conf").write_text("2\n")
    changed, imported = built()
    assert changed == {"layer-one", "layer-two", "small"}
    assert " docker\n" in imported
    role = small.open().compose(ROLES).role("small").reference
    engine.tag(small.base, f"{small.prefix}/small:latest")
    assert built()[0] == set()
    assert engine.image_id(f"{small.prefix}/small:latest") == engine.image_id(role)
    engine.remove(role)
    assert built()[0] == {"small"}


def test_ctrl_c_stops_the_step_and_leaves_no_name(small: Small, engine: DockerEngine) -> None:
    small.layer("two", **{"from": "one"}, run=["echo minivm: waiting", f"sleep 300.{os.getpid()}"])
    command, environment = command_line(small)
    # A session of its own: pytest's own Ctrl-C is not this one. A shell's background job, which this whole run may be,
    # is born deaf to Ctrl-C, and its children with it.
    process = subprocess.Popen(["env", "--default-signal=INT", *command, "build"], env=environment, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)  # fmt: skip
    log = small.root / "build/logs/debian/layer-two.log"

    def running() -> bool:
        return any(f"sleep 300.{os.getpid()}" in container["Command"] for container in engine.api.containers())

    def waiting() -> bool:
        assert process.poll() is None, process.communicate()
        return log.exists() and "\nminivm: waiting" in log.read_text()

    until(waiting, "the step begins")
    process.send_signal(signal.SIGINT)
    try:
        _, said = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "interrupted: every image name still points to its last build" in said
    assert not any("layer-two:" in name or "/small:" in name for name in named(engine, small.prefix))
    until(lambda: not running(), "the step's container is gone")


def test_two_cold_builds_are_equal_and_a_clock_in_a_layer_is_found(small: Small) -> None:
    session = small.open()
    assert all(compared.equal for compared in build_twice(session, ROLES, Plain(), print))
    small.layer("two", **{"from": "one"}, run=["date +%s%N > /etc/now"])
    by_key = {compared.image.key: compared for compared in build_twice(small.open(), ROLES, Plain(), print)}
    assert by_key["layer:one"].equal
    assert not by_key["layer:two"].equal
    base = len(by_key["layer:one"].first.layers)
    assert by_key["layer:two"].differing == [base]
    assert not any("reproduce" in name for name in session.list_present())


def test_an_artifact_arrives_without_its_builder(small: Small) -> None:
    made = ["mkdir -p /out/bin", "echo tool > /out/bin/tool", "chmod 750 /out/bin/tool", "ln -s tool /out/bin/alias"]
    small.layer("aside", **{"from": "root"}, run=made)
    whole = {"layer": "aside", "from": "/out/", "to": "/usr"}
    one = {"layer": "aside", "from": "/out/bin/tool", "to": "/opt/one"}
    small.layer("two", **{"from": "one"}, artifacts=[whole, one])
    session = small.open()
    results = small.build(session)
    assert results["layer:aside"].built
    reference = results["role:small"].image.reference
    assert read(session, reference, "/usr/bin/tool") == read(session, reference, "/opt/one") == b"tool\n"
    with session.engine.container(reference) as container, session.engine.read_path(container, "/usr/bin/tool") as tar:
        member = tar.next()
        assert member is not None
        assert (member.mode & 0o777, member.mtime) == (0o750, session.definition.versions.epoch)
    with pytest.raises(ImagesError, match="does not exist"):
        read(session, reference, "/out")


def test_a_builder_is_not_built_for_an_image_that_is_there(small: Small, engine: DockerEngine) -> None:
    small.layer("two", **{"from": "one"}, artifacts=[{"layer": "aside", "from": "/etc/aside", "to": "/etc/from-aside"}])
    aside = small.build(small.open())["layer:aside"].image.reference
    engine.remove(aside)
    assert "layer:aside" not in small.plan(small.open())


def test_labels_say_what_it_is(small: Small) -> None:
    session = small.open()
    image = small.build(session)["role:small"].image
    labels = session.engine.inspect(image.reference)["Config"]["Labels"]
    assert labels["io.minivm.inputs"] == image.hash
    assert labels["org.opencontainers.image.version"] == image.tag
    assert labels["org.opencontainers.image.base.name"].endswith(image.step.base.rpartition("/")[2])
    assert labels["org.opencontainers.image.base.digest"] == session.engine.image_id(image.step.base)


def test_another_configuration_over_the_same_layers_is_another_image(small: Small, engine: DockerEngine) -> None:
    image = small.build(small.open())["layer:one"].image
    inspected = engine.inspect(image.reference)
    diff_ids = inspected["RootFS"]["Layers"]
    made = store.make_config(
        inspected["Config"], 0, diff_ids, store.Additions(env={"OTHER": "one"}), arch="amd64", epoch=1
    )
    assert made.id != engine.image_id(image.reference)
    adopted = engine.store.take_over(image.reference, made)
    try:
        assert engine.image_id(adopted) == made.id
        found = engine.inspect(adopted)
        assert found["RootFS"]["Layers"] == diff_ids
        assert "OTHER=one" in found["Config"]["Env"]
        assert engine.has(image.reference), "an image that has a name is not used up"
    finally:
        engine.remove(adopted)


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian's docker command line with its BuildKit plugin, unpacked where only this test finds it."""
    whole = Session.open(definition.ROOT, BuildSettings())
    place = LockContext(
        tmp_path, whole.definition, BuildChoice("debian", SlurmSource.PACKAGE, release="24.11"), BuildSettings()
    )
    with open_archive(place, None, ()) as archive:
        for package in archive.resolve(["docker-buildx", "docker-cli"], "this test"):
            if package.name in ("docker-buildx", "docker-cli"):
                subprocess.run(["apt-get", "download", "-qq", package.wanted], check=True, cwd=tmp_path,
                               env={**os.environ, "APT_CONFIG": str(archive.directory / "apt.conf")})  # fmt: skip
                (file,) = tmp_path.glob(f"{package.name}_*.deb")
                subprocess.run(["dpkg", "-x", file, tmp_path / "unpacked"], check=True)
    plugins = tmp_path / "config/cli-plugins"
    plugins.mkdir(parents=True)
    shutil.copy2(next((tmp_path / "unpacked").rglob("cli-plugins/docker-buildx")), plugins)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "config"))
    monkeypatch.setenv("PATH", f"{tmp_path}/unpacked/usr/bin:{os.environ['PATH']}")


@pytest.mark.usefixtures("plugin")
def test_buildkit_and_the_classic_builder_give_the_same_tag_and_content(small: Small) -> None:
    """Not the same digests: whether a directory that was only passed through is listed is the engine's choice."""
    found = []
    for builder in ("classic", "buildx"):
        session = small.open(builder=builder)
        assert session.engine.builder.buildx == (builder == "buildx")
        results = small.build(session)
        assert all(result.built for result in results.values())
        reference = results["role:small"].image.reference
        found.append((reference, contents(Chunks(session.engine.save(reference)), reference)))
        for name in named(session.engine, small.prefix):
            session.engine.remove(name)
    (tag, classic), (other_tag, buildx) = found
    assert tag == other_tag
    difference = compare(classic, buildx)
    assert not difference.files
    assert not difference.packages
    assert "etc/made" in classic.entries


def test_an_engine_that_is_away_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/nobody.sock")
    with pytest.raises(ImagesError) as caught:
        DockerEngine()
    assert f"unix://{tmp_path}/nobody.sock" in caught.value.why
    assert "make images" in str(caught.value.hint)


def test_a_layer_that_does_not_stand_on_its_parent_is_never_named(small: Small, engine: DockerEngine) -> None:
    session = small.open()
    composed, _ = session.plan(ROLES)
    small.build(session)
    maker = Maker(session.place, composed, session.engine, Plain(), "")
    other = engine.import_root(empty())
    try:
        with pytest.raises(ImagesError, match="is not built on"):
            maker.normalise(composed.images["layer:two"], other)
    finally:
        engine.remove(other)


def empty() -> io.BytesIO:
    stream = io.BytesIO()
    content.write_tar(stream, [content.file("nothing", b"")], 0)
    stream.seek(0)
    return stream
