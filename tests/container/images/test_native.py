"""Steps that have programs of the engine's own machine beside the image's: the same layers, and nothing left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ground.files import locked
from images.engine.builder import StepFailed, Tools
from images.engine.docker import DockerEngine, Marks, identify_engine
from images.make import build, content
from tests.container.world import root_image
from tests.support.engine_images import if_there
from tests.waiting import PATIENCE, until

pytestmark = [pytest.mark.docker, pytest.mark.root]

# Of this run: another one on this machine has tools of its own.
PROGRAM = f"of-the-tools-{os.getpid()}"
TOOLS = """FROM {root}
RUN mkdir -p {here}/bin && printf '#!/bin/sh\\necho by the tools\\n' > {here}/bin/{program} \\
    && chmod 755 {here}/bin/{program}
"""
STEP = """# a layer
FROM {root}
ADD layer.tar /
ENV NAME="name"
ARG GREETING="hello"
RUN set -eu; {script}; \\
    if command -v {program} > /dev/null; then {program}; fi; \\
    touch -d @0 /etc/made /etc
STOPSIGNAL SIGINT
"""
MAKES = 'echo "$GREETING $NAME" > /etc/made'


@pytest.fixture(scope="module")
def engine() -> DockerEngine:
    return DockerEngine("classic")


@pytest.fixture(scope="module")
def tools(engine: DockerEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tools]:
    context = tmp_path_factory.mktemp("tools")
    (context / "Dockerfile").write_text(
        TOOLS.format(root=root_image(engine), here=build.NATIVE_DIRECTORY, program=PROGRAM)
    )
    name = f"minivm-test-{os.getpid()}/tools:1"
    engine.tag(engine.builder.build(context, {}, "", print), name)
    yield build.native_tools(name)
    engine.remove(name)


def step(engine: DockerEngine, directory: Path, tools: Tools | None, script: str = MAKES, **arguments: str) -> str:
    """Build it; what it wrote is in `said`."""
    directory.mkdir()
    (directory / "Dockerfile").write_text(STEP.format(root=root_image(engine), script=script, program=PROGRAM))
    with (directory / "layer.tar").open("wb") as target:
        content.write_tar(target, [content.file("added", b"1\n")], 0)
    with (directory / "said").open("w") as said:
        return engine.builder.build(directory, arguments, "", lambda text: print(text, file=said, flush=True), tools)


def left(engine: DockerEngine, tools: Tools) -> list[str]:
    """Containers of the tools' image, and volumes with what is in it."""
    containers = engine.api.containers(all=True, filters={"ancestor": tools.image})
    volumes = [Path(one["Mountpoint"], f"minivm/bin/{PROGRAM}") for one in engine.api.volumes()["Volumes"] or ()]
    return [*(one["Id"] for one in containers), *(str(path) for path in volumes if path.exists())]


def test_the_tools_are_in_the_step_and_not_in_the_layer(engine: DockerEngine, tools: Tools, tmp_path: Path) -> None:
    made = {name: step(engine, tmp_path / name, aid) for name, aid in (("without", None), ("with", tools))}
    try:
        said = {name: (tmp_path / name / "said").read_text().splitlines() for name in made}
        assert "by the tools" in said["with"]
        assert "by the tools" not in said["without"]
        layers = {name: engine.inspect(one)["RootFS"]["Layers"] for name, one in made.items()}
        assert layers["with"] == layers["without"]
        with engine.container(made["with"]) as container, engine.read_path(container, build.NATIVE_MOUNT) as tar:
            assert tar.getnames() == [build.NATIVE_MOUNT.strip("/")]
        assert not left(engine, tools)
    finally:
        for one in made.values():
            engine.discard(one)


def test_an_argument_takes_the_place_of_its_default(engine: DockerEngine, tools: Tools, tmp_path: Path) -> None:
    made = step(engine, tmp_path / "step", tools, GREETING="good day")
    try:
        with engine.container(made) as container, engine.read_path(container, "/etc/made") as tar:
            data = tar.extractfile("made")
            assert data is not None
            assert data.read() == b"good day name\n"
    finally:
        engine.discard(made)


def test_a_step_that_fails_leaves_nothing(engine: DockerEngine, tools: Tools, tmp_path: Path) -> None:
    before = {image.id for image in engine.images()}
    with pytest.raises(StepFailed, match="returned a non-zero code: 3"):
        step(engine, tmp_path / "step", tools, "(exit 3)")
    assert not left(engine, tools)
    mine = {image.id for image in engine.images() if not image.references} - before
    assert not [one for one in mine if "hello" in str(if_there(engine.api.inspect_image, one))]


@pytest.mark.parametrize("begun", [True, False], ids=["it has just begun", "it is about to begin"])
def test_a_build_is_ended_while_its_step_begins(
    engine: DockerEngine, tools: Tools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    one, api = DockerEngine("classic"), type(engine.api)
    start, failed, begins = api.start, list[BaseException](), list[str]()

    def ended(client: object, container: str) -> None:
        begins.append(container)
        acts = [lambda: start(client, container), one.builder.cancel]
        for act in acts if begun else reversed(acts):
            act()

    monkeypatch.setattr(api, "start", ended)

    def builds() -> None:
        try:
            step(one, tmp_path / "step", tools, "sleep 600")
        except StepFailed as error:
            failed.append(error)

    thread = threading.Thread(target=builds)
    thread.start()
    thread.join(PATIENCE)
    try:
        assert failed
        assert not left(engine, tools)
    finally:
        for container in begins:
            engine.kill(container)
        thread.join()


BUILD = """
import pathlib, sys
from images.engine.docker import DockerEngine
from images.engine.docker import Marks
from images.make import build
directory, marks, tools = sys.argv[1:]
engine = DockerEngine("classic", pathlib.Path(marks))
engine.builder.build(pathlib.Path(directory), {}, "", lambda text: print(text, flush=True), build.native_tools(tools))
"""


@contextmanager
def building(engine: DockerEngine, directory: Path, marks: Path, tools: Tools) -> Iterator[subprocess.Popen[str]]:
    """Run a build in its own process, in the middle of a long step."""
    directory.mkdir()
    (directory / "Dockerfile").write_text(
        STEP.format(root=root_image(engine), script="echo begun; sleep 600", program=PROGRAM)
    )
    with (directory / "layer.tar").open("wb") as target:
        content.write_tar(target, [content.file("added", b"1\n")], 0)
    command = [sys.executable, "-c", BUILD, str(directory), str(marks), tools.image]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert "begun\n" in iter(process.stdout.readline, "")
            yield process
        finally:
            process.kill()


def test_what_a_killed_build_left_goes_with_the_next_one_and_nothing_of_one_that_lives(
    engine: DockerEngine, tools: Tools, tmp_path: Path
) -> None:
    marks, before = tmp_path / "marks", {image.id for image in engine.images()}
    next_one = DockerEngine("classic", marks)
    with building(engine, tmp_path / "lives", marks, tools) as lives:
        its = set(left(engine, tools))
        with building(engine, tmp_path / "dies", marks, tools) as dies:
            dies.send_signal(signal.SIGKILL)
        assert len(left(engine, tools)) == 2 * len(its), "who cannot clean up leaves it all"
        assert next_one.clear() == 2
        assert set(left(engine, tools)) == its
        assert lives.poll() is None
        assert next_one.clear() == 0
    assert next_one.clear() == 2
    assert not left(engine, tools)
    mine = {image.id for image in engine.images() if not image.references} - before
    assert not [one for one in mine if "added" in str(if_there(engine.api.history, one))]
    assert not list(marks.iterdir())


def test_a_mark_of_another_engine_waits_for_that_one(tmp_path: Path) -> None:
    script = (
        "import pathlib, sys; from images.engine.docker import Marks; Marks(pathlib.Path(sys.argv[1]), 'one').own()"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True)
    assert not list(Marks(tmp_path, "another").lock_dead())
    alive = Marks(tmp_path, "one")
    alive.own()
    assert len(list(alive.lock_dead())) == 1


def test_the_engine_is_known_by_its_own_word_and_else_by_the_machine(engine: DockerEngine, tmp_path: Path) -> None:
    """Two machines that share a home have an engine each, at one address."""
    mine = DockerEngine("classic", tmp_path)
    assert mine.marks and (tmp_path / mine.marks.own()).read_text() == engine.api.info()["ID"]
    socket, host = "unix:///var/run/docker.sock", os.uname().nodename
    assert (identify_engine({"ID": ""}, socket), identify_engine({}, "tcp://e:1")) == (f"{host} {socket}", "tcp://e:1")


def test_two_builds_that_find_one_mark_do_not_stumble(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one has opened it when the other has dealt with it."""
    script = (
        "import pathlib, sys; from images.engine.docker import *; DockerEngine(marks=pathlib.Path(sys.argv[1])).labels"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True)
    one, other = (DockerEngine("classic", tmp_path) for _ in range(2))

    def late(fd: int) -> bool:
        monkeypatch.undo()
        assert other.clear() == 0 and not list(tmp_path.iterdir())
        return locked(fd)

    monkeypatch.setattr("images.engine.docker.locked", late)
    assert one.clear() == 0


def test_a_step_is_ended_from_another_thread(engine: DockerEngine, tools: Tools, tmp_path: Path) -> None:
    one = DockerEngine("classic")  # a builder that was told to stop builds nothing more
    failed: list[BaseException] = []

    def builds() -> None:
        try:
            step(one, tmp_path / "step", tools, "echo begun; sleep 600")
        except StepFailed as error:
            failed.append(error)

    thread = threading.Thread(target=builds)
    thread.start()
    said = tmp_path / "step/said"
    until(lambda: said.exists() and "begun" in said.read_text().splitlines(), "the step has begun", within=PATIENCE)
    one.builder.cancel()
    thread.join(PATIENCE)
    assert failed
    assert not left(engine, tools)
