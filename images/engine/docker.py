"""Client of the docker engine that `images.host` selects. The only importer of docker."""

from __future__ import annotations

import json
import os
import tarfile
import tempfile
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import IO, Any
from uuid import uuid4

import docker  # type: ignore[import-untyped]  # it has no types
import docker.errors  # type: ignore[import-untyped]  # it has no types
import requests.exceptions

from ground.files import locked
from images import ImagesError
from images.engine.builder import Builder
from images.engine.store import ListedImage, Store, parse_images, select_store
from images.host import HostError, choose_engine

# Ownership of build containers, also after an interrupted build: each has its build's mark as a label.
# A mark is a file that its build keeps locked while it lives. A mark that is not locked belongs to a dead build, and
# the next build of the repository removes its containers (`Engine.clear`). A mark of an engine that is no longer used,
# or that names no engine, is removed after a month.
LABEL = "io.minivm.build"
LONGEST = 4096
KEPT_S = 30 * 86400.0  # of what is never judged; no build takes so long


def identify_engine(info: Mapping[str, Any], address: str) -> str:
    """Identify the engine by its own id: machines that share a tree have one each at the same address.

    An engine without an id is identified by its address, with the machine's name for a socket.
    """
    if own := info.get("ID"):
        return str(own)
    return f"{os.uname().nodename} {address}" if address.startswith("unix://") else address


class Marks:
    def __init__(self, directory: Path, engine: str) -> None:
        """Use `directory` for the marks of the engine `engine`; marks of other engines are left alone."""
        self.directory, self.engine = directory, engine
        self._one = Lock()
        self._own, self._fd = "", -1

    def own(self) -> str:
        """Return this build's mark, made at its first container; the kernel unlocks it when the process ends."""
        with self._one:
            if not self._own:
                self.directory.mkdir(parents=True, exist_ok=True)
                name = uuid4().hex
                fd = os.open(self.directory / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                try:
                    acquired = locked(fd, within=1.0)
                except OSError:  # a file system without locks
                    acquired = False
                # What says no engine is never judged: what cannot be locked, and what is not locked yet.
                if acquired:
                    os.write(fd, self.engine.encode())
                self._own, self._fd = name, fd
            return self._own

    def release(self) -> None:
        """Remove this build's mark: it has no container left."""
        with self._one:
            if self._own:
                (self.directory / self._own).unlink(missing_ok=True)
                os.close(self._fd)
                self._own = ""

    def lock_dead(self) -> Iterator[Path]:
        """Yield the marks of dead builds, each locked until the next one is requested."""
        for path in sorted(self.directory.iterdir()) if self.directory.is_dir() else ():
            try:
                fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            except OSError:  # another build has dealt with it
                continue
            try:
                if self._is_dead(fd):
                    yield path
                elif self._is_old(fd):
                    path.unlink(missing_ok=True)
            finally:
                os.close(fd)

    @staticmethod
    def _is_old(fd: int) -> bool:
        """Tell whether the mark's build is dead and its engine has not been used for a month."""
        if time.time() - os.fstat(fd).st_mtime < KEPT_S:
            return False
        try:
            return locked(fd)
        except OSError:
            return True

    def _is_dead(self, fd: int) -> bool:
        try:
            return locked(fd) and os.read(fd, LONGEST) == self.engine.encode()
        except OSError:
            return False


class DockerEngine:
    """Every call that a build makes to an engine. Each raises ImagesError when the engine does not answer."""

    def __init__(self, builder: str = "classic", marks: Path | None = None) -> None:
        """Connect to the engine. `marks` is the directory by which the next build cleans up after this one."""
        self.builder = Builder(builder, self)
        where, chosen_by = self.choose()
        try:
            self.client = docker.from_env(timeout=600)  # it asks for the engine's version, and so whether it answers
        except docker.errors.DockerException as error:
            start = "`make images` installs and starts one; DOCKER_HOST names another"
            raise ImagesError(
                "reach the docker engine",
                f"no answer at {where}: {find_innermost(error)}",
                hint=f"{chosen_by} says so; without it `make images` starts this machine's own" if chosen_by else start,
            ) from error
        self.api = self.client.api
        self.marks = Marks(marks, identify_engine(self.info, where)) if marks else None

    @staticmethod
    def choose() -> tuple[str, str]:
        try:
            return choose_engine(os.environ)
        except HostError as error:
            raise ImagesError("reach the docker engine", str(error)) from error

    @cached_property
    def arch(self) -> str:
        return str(self.api.version().get("Arch", "amd64"))

    def images(self) -> list[ListedImage]:
        with translate_errors("list the images"):
            listed = self.api.images(all=False)
        present = parse_images(listed)
        if present is None:
            raise ImagesError("list the images", "what the docker engine answered is no list of images")
        return present

    def inspect(self, reference: str) -> Mapping[str, Any]:
        with translate_errors(f"inspect {reference}"):
            image: Mapping[str, Any] = self.api.inspect_image(reference)
            return image

    @cached_property
    def info(self) -> Mapping[str, Any]:
        with translate_errors("ask what it is"):
            info = self.api.info()
        return info if isinstance(info, dict) else {}

    @cached_property
    def store(self) -> Store:
        with translate_errors("ask what it is"):
            return select_store(self.info, self)

    def image_id(self, reference: str) -> str:
        """Return the configuration's digest, which may differ from the engine's own id."""
        return self.store.identity(reference)

    def has(self, reference: str) -> bool:
        try:
            self.api.inspect_image(reference)
        except docker.errors.ImageNotFound:
            return False
        return True

    def tag(self, reference: str, target: str) -> None:
        repository, _, tag = target.rpartition(":")
        with translate_errors(f"tag {target}"):
            self.api.tag(reference, repository, tag, force=True)

    def untag(self, target: str) -> None:
        with translate_errors(f"remove {target}"), suppress(docker.errors.ImageNotFound):
            self.api.remove_image(target, noprune=True)

    def discard(self, image_id: str) -> None:
        """Remove an unnamed image that a build left.

        A named image belongs to another build: a step that changes nothing returns the image that it started from.
        """
        with suppress(docker.errors.APIError):
            image = self.api.inspect_image(image_id)
            if not image.get("RepoTags") and not image.get("RepoDigests"):
                self.api.remove_image(image_id)

    def remove(self, reference: str) -> None:
        """Remove an image and the unnamed ones under it; layers of other named images stay."""
        with suppress(docker.errors.APIError):
            self.api.remove_image(reference, force=True)

    def release(self, reference: str) -> str:
        """Remove a name, and the image with its last name; return the reason if a container still uses it."""
        try:
            self.api.remove_image(reference)
        except docker.errors.ImageNotFound:
            return ""
        except docker.errors.APIError as error:
            return str(error.explanation)
        return ""

    def pull(self, reference: str, arch: str = "") -> None:
        with translate_errors(f"pull {reference}"):
            self.api.pull(reference, platform=f"linux/{arch}" if arch and arch != self.arch else None)

    def push(self, target: str, login: Mapping[str, str] | None) -> Generator[Mapping[str, Any], None, None]:
        repository, _, tag = target.rpartition(":")
        with translate_errors(f"push {target}"):
            yield from self.api.push(repository, tag, stream=True, decode=True, auth_config=login)

    def save(self, reference: str) -> Iterator[bytes]:
        with translate_errors(f"save {reference}"):
            yield from self.api.get_image(reference)

    def load(self, data: bytes | IO[bytes]) -> None:
        with translate_errors("load an image"):
            for event in self.api.load_image(data):
                if "error" in event:
                    raise ImagesError("load an image", str(event["error"]).strip())

    def import_root(self, data: IO[bytes]) -> str:
        """Import a root file system as an image of one layer."""
        with translate_errors("import the root"):
            answer = self.api.import_image_from_data(data)
        for line in filter(None, answer.splitlines()):
            event = json.loads(line)
            if "error" in event:
                raise ImagesError("import the root", str(event["error"]).strip())
            if str(event.get("status", "")).startswith("sha256:"):
                return str(event["status"])
        raise ImagesError("import the root", f"the engine said: {answer.strip()}")

    def build(self, context: IO[bytes], arguments: Mapping[str, str], network: str) -> Iterator[Mapping[str, Any]]:
        """Run the engine's own builder on a packed context; yield its events."""
        with translate_errors("build"):
            yield from self.api.build(
                fileobj=context, custom_context=True, decode=True, nocache=True, rm=True, forcerm=True,
                buildargs=dict(arguments), network_mode=network or None,
            )  # fmt: skip

    @property
    def labels(self) -> dict[str, str]:
        """The labels of every container that this build creates."""
        return {LABEL: self.marks.own()} if self.marks else {}

    def clear(self) -> int:
        """Remove the containers of interrupted builds and the unnamed images under them; return how many.

        The next build tries again for what cannot be removed now.
        """
        removed = 0
        for mark in self.marks.lock_dead() if self.marks else ():
            with suppress(ImagesError), translate_errors("remove what a build left"):
                # The newest first, as the engine lists them: a step before what lends it the tools.
                for leftover in self.api.containers(all=True, filters={"label": f"{LABEL}={mark.name}"}):
                    with suppress(docker.errors.NotFound):
                        self.api.remove_container(leftover["Id"], force=True, v=True)
                    self.discard(leftover["ImageID"])
                    removed += 1
                mark.unlink(missing_ok=True)  # two builds may have opened it, one after the other
        return removed

    def kill(self, container: str) -> None:
        with suppress(docker.errors.APIError):
            self.api.kill(container)

    @contextmanager
    def container(self, image: str, volumes: Sequence[str] = ()) -> Iterator[str]:
        """Create a container without starting it, to read an image; `volumes` are directories to share."""
        with translate_errors(f"look into {image}"):
            created = self.api.create_container(image, ["/nothing"], entrypoint=["/nothing"], volumes=list(volumes),
                                             labels=self.labels)["Id"]  # fmt: skip
        try:
            yield created
        finally:
            self.api.remove_container(created, force=True, v=True)

    @contextmanager
    def prepare_step(
        self, image: str, script: str, environment: Mapping[str, str], network: str, tools: str, at: str
    ) -> Iterator[DockerStep]:
        """Prepare a shell in an image, with the directory `at` of the image `tools`; the caller starts it."""
        with self.container(tools, [at]) as lender, translate_errors("run the step"):
            # Not the engine's own choice: docker cannot read the logs of every driver.
            logs = docker.types.LogConfig(type=docker.types.LogConfig.types.JSON)
            host = self.api.create_host_config(volumes_from=[lender], network_mode=network or None, log_config=logs)
            created = self.api.create_container(image, ["-c", script], entrypoint=["/bin/sh"], user="0",
                                             environment=dict(environment), host_config=host,
                                             labels=self.labels)["Id"]  # fmt: skip
            try:
                # A step may be silent for longer than any answer should take.
                with closing(docker.from_env(timeout=None).api) as patient:
                    yield DockerStep(patient, created)
            finally:
                self.api.remove_container(created, force=True, v=True)

    def read_path(self, container: str, path: str) -> tarfile.TarFile:
        """Read a path of a container as a tar."""
        spooled = tempfile.SpooledTemporaryFile(max_size=64 << 20)  # noqa: SIM115  # the tar reads on from it
        try:
            with translate_errors(f"read {path}"):
                for piece in self.api.get_archive(container, path)[0]:
                    spooled.write(piece)
        except docker.errors.NotFound as error:
            raise ImagesError("read a path of an image", f"{path} does not exist") from error
        spooled.seek(0)
        return tarfile.open(fileobj=spooled)  # the caller reads it


@dataclass(frozen=True, slots=True)
class DockerStep:
    """The container of a running step."""

    api: Any
    container: str

    def begin(self) -> None:
        self.api.start(self.container)

    def lines(self) -> Iterator[str]:
        rest = b""
        for piece in self.api.logs(self.container, stream=True, follow=True):
            *whole, rest = (rest + piece).split(b"\n")
            yield from (text.decode(errors="replace") for text in whole)
        yield rest.decode(errors="replace")

    def finish(self) -> tuple[int, str]:
        status = int(self.api.wait(self.container)["StatusCode"])
        return status, "" if status else str(self.api.commit(self.container)["Id"])


@contextmanager
def translate_errors(what: str) -> Iterator[None]:
    """Translate the errors of the engine and of the connection to ImagesError."""
    try:
        yield
    except docker.errors.NotFound:
        raise
    except docker.errors.APIError as error:
        raise ImagesError(what, str(error.explanation or error).strip()) from error
    except (docker.errors.DockerException, requests.exceptions.RequestException) as error:
        raise ImagesError(what, f"the engine went away: {find_innermost(error)}") from error


def find_innermost(error: BaseException) -> str:
    while error.__context__ is not None and not isinstance(error, OSError):
        error = error.__context__
    return str(getattr(error, "strerror", None) or error)
