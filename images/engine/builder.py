"""Build an image from a context directory, with the engine's builder or BuildKit; cancellable from a thread."""

from __future__ import annotations

import os
import re
import subprocess
import tarfile
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO, Any, Protocol

from images import ImagesError

Line = Callable[[str], None]
RUNNING = " ---> Running in "
STEP = re.compile(r"(.*\\\n)*.*")  # continued lines, and the last line
MADE = re.compile(r" ---> (?P<id>[0-9a-f]{12})")  # other words follow the arrow too, and change with the engine


class StepFailed(Exception):
    """A build step failed; the caller knows the image, the step and the log."""


class BuildEngine(Protocol):
    """The engine's interface that the builders need."""

    def build(self, context: IO[bytes], arguments: Mapping[str, str], network: str) -> Iterator[Mapping[str, Any]]: ...
    def kill(self, container: str) -> None: ...
    def discard(self, image_id: str) -> None: ...
    def prepare_step(
        self, image: str, script: str, environment: Mapping[str, str], network: str, tools: str, at: str
    ) -> AbstractContextManager[RunningStep]: ...


class RunningStep(Protocol):
    """The container of a running step."""

    @property
    def container(self) -> str: ...

    def begin(self) -> None: ...
    def lines(self) -> Iterator[str]:
        """Yield its output until it ends."""

    def finish(self) -> tuple[int, str]:
        """Wait for its end; return the exit status, and the image that it leaves if that is 0."""


@dataclass(frozen=True, slots=True)
class Tools:
    """Programs of the engine's own architecture, for the steps of images of another one."""

    image: str
    at: str  # a directory of that image, and of every image that is built with it
    environment: Mapping[str, str]


@dataclass
class Builder:
    kind: str
    daemon: BuildEngine
    # What builds at this moment, for `cancel`: other threads wait for it.
    cancelled: threading.Event = field(default_factory=threading.Event)
    steps: set[str] = field(default_factory=set)
    processes: set[subprocess.Popen[str]] = field(default_factory=set)

    @cached_property
    def buildx(self) -> bool:
        """Tell whether BuildKit is selected (docs/decisions/classic-builder-by-default.md); fail if it is missing."""
        if self.kind != "buildx":
            return False
        try:
            is_installed = (
                subprocess.run(["docker", "buildx", "version"], capture_output=True, check=False).returncode == 0
            )
        except FileNotFoundError:
            is_installed = False
        if not is_installed:
            raise ImagesError("use BuildKit", "`docker buildx` is not installed", field="builder",
                              hint="--set builder=classic does without")  # fmt: skip
        return True

    def build(
        self, context: Path, arguments: Mapping[str, str], network: str, line: Line, tools: Tools | None = None
    ) -> str:
        """Build a context directory without a cache; return the id of an unnamed image."""
        if self.buildx:
            return self.build_with_buildx(context, arguments, network, line)
        if tools:
            return self.build_with_tools(context, arguments, network, line, tools)
        return self.build_classic(context, arguments, network, line)

    def build_with_tools(
        self, context: Path, arguments: Mapping[str, str], network: str, line: Line, tools: Tools
    ) -> str:
        """Build with the tools mounted: run the step's container here, since the classic builder mounts nothing."""
        path = context / "Dockerfile"
        before, script, defaults = split_dockerfile(path.read_text())
        if not script:
            return self.build_classic(context, arguments, network, line)
        path.write_text(before)
        below = self.build_classic(context, {}, network, line)
        environment = {**defaults, **arguments, **tools.environment}
        remaining = below
        try:
            with self.daemon.prepare_step(below, script, environment, network, tools.image, tools.at) as step:
                # It is known before it begins, and a thread that must stop looks after that: `cancel` comes before the
                # look or finds it at work.
                self.steps.add(step.container)
                try:
                    step.begin()
                    self.check_cancelled()
                    for text in step.lines():
                        self.check_cancelled()
                        if text.strip():
                            line(text.rstrip())
                    status, image_id = step.finish()
                finally:
                    self.steps.discard(step.container)
            if status:
                raise StepFailed(f"the step returned a non-zero code: {status}")
            remaining = ""
            return image_id
        finally:
            if remaining:
                self.daemon.discard(remaining)

    def cancel(self) -> None:
        """End all running builds from another thread: kill their steps, so that the waiting threads fail."""
        self.cancelled.set()
        for process in list(self.processes):
            process.terminate()
        for container in list(self.steps):
            self.daemon.kill(container)

    def check_cancelled(self) -> None:
        if self.cancelled.is_set():
            raise StepFailed("interrupted")

    def build_classic(self, context: Path, arguments: Mapping[str, str], network: str, line: Line) -> str:
        images: list[str] = []
        finished = step = ""
        try:
            with pack_context(context) as stream:
                for event in self.daemon.build(stream, arguments, network):
                    if "error" in event:
                        raise StepFailed(str(event["error"]).strip())
                    if "aux" in event and "ID" in event["aux"]:
                        finished = event["aux"]["ID"]
                    for text in str(event.get("stream", "")).splitlines():
                        if text.startswith(RUNNING):
                            self.steps.discard(step)
                            step = text.removeprefix(RUNNING).strip()
                            self.steps.add(step)
                        if image := MADE.fullmatch(text):
                            images.append(image["id"])
                        if text.strip():
                            line(text.rstrip())
                    if not finished:
                        self.check_cancelled()  # after the step is known, as in `build_with_tools`
            return finished
        finally:
            self.steps.discard(step)
            # The first "--->" is the parent. What a failed or interrupted build leaves has no name, and goes.
            if not finished and len(images) > 1:
                self.daemon.discard(images[-1])

    def build_with_buildx(self, context: Path, arguments: Mapping[str, str], network: str, line: Line) -> str:
        with tempfile.TemporaryDirectory() as directory:
            id_file = Path(directory) / "id"
            command = ["docker", "buildx", "build", "--builder", "default", "--progress", "plain", "--no-cache",
                       "--provenance=false", "--iidfile", str(id_file)]  # fmt: skip
            if network:
                command += ["--network", network]
            # By name alone: the values come from the environment, where no process list shows them.
            for name in arguments:
                command += ["--build-arg", name]
            process = subprocess.Popen([*command, str(context)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                       text=True, errors="replace", env=os.environ | dict(arguments))  # fmt: skip
            last = ""
            self.processes.add(process)
            if self.cancelled.is_set():
                process.terminate()
            try:
                assert process.stdout is not None
                for text in process.stdout:
                    last = text.rstrip() or last
                    line(text.rstrip())
                status = process.wait()
            finally:
                self.processes.discard(process)
                if process.poll() is None:
                    process.terminate()
                    process.wait()
            if status != 0:
                raise StepFailed(last)
            return id_file.read_text().strip()


def split_dockerfile(dockerfile: str) -> tuple[str, str, dict[str, str]]:
    """Split a Dockerfile with one RUN into what precedes it, its script, and its arguments' defaults.

    The rest belongs to the configuration, which the builder does not make.
    """
    before, _, rest = dockerfile.partition("\nRUN ")
    instructions, defaults = [], dict[str, str]()
    for text in before.splitlines():
        if text.startswith("ARG "):
            name, _, value = text.removeprefix("ARG ").partition("=")
            defaults[name] = value.strip('"')
        else:
            instructions.append(text)
    script = STEP.match(rest)
    return "\n".join(instructions) + "\n", script[0].replace("\\\n", "") if script else "", defaults


@contextmanager
def pack_context(context: Path) -> Iterator[IO[bytes]]:
    """Pack a context directory into the stream that the engine takes."""
    with tempfile.TemporaryFile(dir=context.parent) as stream:
        with tarfile.open(fileobj=stream, mode="w") as tar:
            for path in sorted(context.iterdir()):
                tar.add(path, arcname=path.name)
        stream.seek(0)
        yield stream
