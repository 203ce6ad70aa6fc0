"""Build one image: its base, its context, the build step, its configuration, and last its name.

The flow of `Maker.make`, which a session calls for each image that the engine does not have:

1. `build_raw`: a bootstrapped image is imported as a tar. For any other the base is pulled, `write_context` writes the
   Dockerfile with one tar of all files, and the engine's builder runs the step.
2. `normalise`: put the layers under a new configuration, without the builder's dates and history.
3. Tag the result. A build that is interrupted before leaves an unnamed image, which is removed.

`explain_failures` turns a failed step into an error with advice. `read_base` reads a base image from a registry, and
`build_concurrently` builds several images at a time.
"""

from __future__ import annotations

import errno
import json
import posixpath
import re
import shutil
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, TextIO, cast

from ground.commands import ran
from images import ImagesError
from images.archive import apt, bootstrap
from images.archive.apt import BaseFiles, Origin, parse_deb822, parse_one_line
from images.archive.lock import LockContext
from images.definition.spec import UNFILLED, AptSource, EntryKind, Pin
from images.engine import store
from images.engine.builder import StepFailed, Tools
from images.engine.docker import DockerEngine
from images.make import content, sbom, toolkit
from images.make.compose import fetch_files, list_enabled_sources, map_pins
from images.make.content import Entry
from images.make.plan import Composed, PlannedImage, render_dockerfile
from images.make.progress import STEP, Reporter
from images.settings import read_installed

# While packages of another architecture are installed, steps run the engine's own programs to unpack, copy and search:
# they do the same, and under qemu they would take ten times as long. The layer `native` has them in a directory that
# works in any root, and a step has it first in its PATH. Every Debian has /mnt, and no package puts anything there.
NATIVE_MOUNT = "/mnt"
NATIVE_DIRECTORY = f"{NATIVE_MOUNT}/minivm"
NATIVE_PATH = f"{NATIVE_DIRECTORY}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def native_tools(image: str) -> Tools:
    """Return the helper programs of the image for the builder's steps."""
    return Tools(image, NATIVE_MOUNT, {"PATH": NATIVE_PATH, "APT_CONFIG": f"{NATIVE_DIRECTORY}/apt.conf"})


def pack_native(engine: DockerEngine, image: str, target: Path) -> Path:
    """Pack the directory as a tar, for a root that no engine builds."""
    with (
        engine.container(image) as container,
        engine.read_path(container, NATIVE_DIRECTORY) as tar,
        target.open("wb") as copy,
    ):
        source = cast("IO[bytes]", tar.fileobj)  # the engine opens the tar from a file
        source.seek(0)
        shutil.copyfileobj(source, copy)
    return target


# Explain why an image could not be built: the step, its last lines, the log, and what to do.

TAIL, LONG = 15, 300
NOISE = re.compile(r"^( ---> |Removing intermediate|Step \d|Sending build|\s*$)")
STATUS = re.compile(r"(?:returned a non-zero code|exit code): (\d+)")


@contextmanager
def explain_failures(image: PlannedImage, log: Path) -> Iterator[None]:
    """Turn a failure into an error with the image, the step, the last lines and the log's path."""
    try:
        yield
    except StepFailed as error:
        lines = [text for text in log.read_text().splitlines() if text.strip()]
        step = next((match["step"] for text in reversed(lines) if (match := STEP.match(text))), "start")
        # The builders echo the whole RUN line, which the log keeps and an error need not repeat.
        shown = [f"  {text}" for text in lines if len(text) < LONG and not NOISE.match(text)]
        status = STATUS.search(str(error))
        reason = f"status {status[1]}" if status else str(error)[:LONG]
        raise ImagesError(f"build {image.key}", f"step `{step}` failed: {reason}\n" + "\n".join(shown[-TAIL:]),
                          hint=f"{advise(shown)}the whole log: {log}") from error  # fmt: skip
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise ImagesError(f"build {image.key}", f"no space left on device for {error.filename or log.parent}",
                          hint="free some, or let build/ be a link to a larger disk") from error  # fmt: skip
    except ImagesError as error:
        if "no space left" in error.why.lower():
            raise ImagesError(error.what, error.why, hint="the engine's disk is full: `docker system df`") from error
        raise


def advise(lines: Sequence[str]) -> str:
    """Return what to do about a failure that these lines of the log show; empty for an unknown one."""
    text = "\n".join(lines[-60:]).lower()
    if "no space left on device" in text:
        return "the engine's disk is full, see `docker system df`; "
    if "exec format error" in text:
        return "the engine's machine cannot run programs of this architecture (docs/how-to/build-for-arm64.md); "
    if "checksum mismatch" in text:
        return "the archive has other files than the lock: `build.py lock` resolves anew; "
    if "temporary failure resolving" in text or "could not connect" in text or "unable to connect" in text:
        return "the mirror is not reachable from the build's network: settings mirrors, http_proxy, network; "
    return ""


# Copy paths from one image into another.


def move_entries(tar: Any, to: str, contents: bool, directory: Path) -> Iterator[Entry]:
    """Yield an artifact's tar members at their new path, with files copied to `directory`.

    The first member is the artifact's path itself; `contents`: leave it out, and move what it holds.
    """
    for index, member in enumerate(tar):
        inner = member.name.partition("/")[2]
        if index == 0 and member.isdir() and contents:
            continue
        path = f"{to}/{inner}".strip("/") if inner or not contents else to
        mode = member.mode & 0o7777
        if member.isdir():
            yield Entry(path, EntryKind.DIRECTORY, mode)
        elif member.issym():
            yield Entry(path, EntryKind.LINK, 0o777, link=member.linkname)
        elif member.isfile() or member.islnk():
            data = tar.extractfile(member)
            target = directory / str(index)
            with target.open("wb") as copy:
                shutil.copyfileobj(data, copy)
            yield Entry(path, EntryKind.FILE, mode, data=target)


LABEL = "io.minivm."
# The engine colours what a step writes to its standard error, line by line, which leaves lines of colour alone.
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, slots=True)
class Maker:
    """Build images of one lock with one engine."""

    lock_context: LockContext
    composed: Composed
    engine: DockerEngine
    reporter: Reporter
    revision: str
    shown_prefix: str = ""  # the images' prefix in labels, while a trial names the images otherwise
    tools: Tools | None = None  # the engine's own programs, if the images are for another architecture

    @property
    def work(self) -> Path:
        return self.lock_context.repository / "build"

    def make(self, image: PlannedImage) -> float:
        """Build, normalise and name an image; return the seconds that it took."""
        began = time.monotonic()
        log_path = self.work / "logs" / self.lock_context.choice.flavour / f"{image.key.replace(':', '-')}.log"
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("w") as log, explain_failures(image, log_path):
            raw = self.build_raw(image, log)
            named = False
            try:
                built = self.normalise(image, raw)
                self.engine.tag(built, image.reference)
                named = True
            finally:
                if not named or raw != built:
                    self.engine.discard(raw)
        return time.monotonic() - began

    def build_raw(self, image: PlannedImage, log: TextIO) -> str:
        """Run the builder; return an unnamed image that still has the builder's dates and history."""

        def report(coloured: str) -> None:
            if not (text := COLOUR.sub("", coloured).rstrip()):
                return
            log.write(text + "\n")
            log.flush()
            self.reporter.line(image.key, text)

        (self.work / "context").mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self.work / "context", prefix=f"{image.name}-") as directory:
            context = Path(directory)
            if image.is_bootstrapped:
                return self._bootstrap(image, context, report)
            if image.base:
                if not self.engine.has(image.base):
                    report(f"minivm: pull {image.base}")
                ensure_base(self.engine, image.base, self.lock_context.choice.arch)
            self.write_context(image, context)
            network = self.lock_context.settings.network
            return self.engine.builder.build(context, self.build_arguments(image), network, report, self.tools)

    def _bootstrap(self, image: PlannedImage, context: Path, report: Callable[[str], None]) -> str:
        """Install the distribution into an empty root, and import it."""
        root, helpers = context / "root.tar", self.pack_helpers(context)
        bootstrap.bootstrap(self.lock_context, image.slices[-1], image.dpkg_options, root, report, helpers)
        with root.open("rb") as data:
            return self.engine.import_root(data)

    def pack_helpers(self, directory: Path) -> bootstrap.Native | None:
        """Return the helper programs for a root, which no engine builds."""
        if self.tools is None:
            return None
        tar = pack_native(self.engine, self.tools.image, directory / "tar")
        return bootstrap.Native(tar, NATIVE_MOUNT, NATIVE_PATH)

    def write_context(self, image: PlannedImage, directory: Path) -> None:
        """Write the Dockerfile and its one tar."""
        (directory / "Dockerfile").write_text(
            render_dockerfile(image.step, self.lock_context.repository / "images/templates")
        )
        if not image.step.files:
            return
        artifacts = directory / ".artifacts"
        artifacts.mkdir()
        entries = [
            *image.entries,
            *fetch_files(image, self.lock_context),
            *toolkit.entries(image.toolkit, self.lock_context, artifacts),
            *toolkit.library_entries(image.libraries, self.lock_context, artifacts),
            *self.artifact_entries(image, artifacts),
        ]
        if image.is_role:
            entries.append(content.file("usr/share/minivm/sbom.spdx.json", self.sbom(image)))
        with (directory / "layer.tar").open("wb") as target:
            content.write_tar(
                target, content.complete(entries, image.directories), self.lock_context.definition.versions.epoch
            )
        shutil.rmtree(artifacts)

    def artifact_entries(self, image: PlannedImage, directory: Path) -> Iterator[Entry]:
        """Yield the paths taken from other images, unpacked beside the context."""
        for number, (artifact, key) in enumerate(image.artifacts):
            target = directory / str(number)
            target.mkdir()
            source = artifact.source.rstrip("/")
            with self.engine.container(self.composed.images[key].reference) as container:
                tar = self.engine.read_path(container, source)
            with tar:
                yield from move_entries(tar, artifact.to.strip("/"), artifact.source.endswith("/"), target)

    def build_arguments(self, image: PlannedImage) -> dict[str, str]:
        """Return the site's settings for the build step; none of them stays in the image."""
        settings, values = self.lock_context.settings, dict(self.lock_context.settings.proxies)
        if settings.mirrors:
            values["MINIVM_SOURCES"] = self.site_sources(image).replace("\n", "\\n")
        if settings.ca_certificates:
            values["MINIVM_CA"] = Path(settings.ca_certificates).read_text().replace("\n", "\\n")
        return values

    def site_sources(self, image: PlannedImage) -> str:
        """Return Debian's repositories at the site's mirrors, with the image's paths of their keys."""
        if self.lock_context.base:
            raise ImagesError("use the mirrors", "a base image names its own repositories", field="mirrors",
                              hint="use --set http_proxy, or a base whose sources are the site's")  # fmt: skip
        mirrors, keyrings = self.lock_context.settings.mirror_map, Path("/usr/share/keyrings")
        origins = [
            replace(origin, uri=mirrors.get(origin.name, origin.uri), keyring=keyrings / origin.keyring.name)
            for origin in apt.default_origins(self.lock_context.variant)
        ]
        origins += [apt.suite_of(source, origins) for source in self.enabled_suites(image)]
        return "".join(origin.lines() for origin in origins)

    def enabled_suites(self, image: PlannedImage) -> list[AptSource]:
        """List the further suites of the base's archive that this image's layers enable."""
        layers = (self.lock_context.definition.layers[slice_.layer] for slice_ in image.slices)
        return [
            source for layer in layers for source in list_enabled_sources(layer, self.lock_context) if not source.uri
        ]

    def sbom(self, image: PlannedImage) -> bytes:
        """Return the image's list of packages and files; keep a copy beside the build's logs."""
        packages = sbom.list_packages(
            image.slices,
            self.pinned_downloads(image),
            self.base_packages(),
            {source.name for source in self.lock_context.variant.sources},
            image.wheels,
        )
        files = [sbom.File.of(entry.path, entry.read()) for entry in image.entries if entry.kind is EntryKind.FILE]
        document = sbom.document(
            name=self.shown_name(image.repo),
            version=image.tag,
            namespace=f"https://minivm.invalid/spdx/{image.name}/{image.hash}",
            packages=packages,
            files=files,
            epoch=self.lock_context.definition.versions.epoch,
            distribution="ubuntu" if self.lock_context.base else "debian",
            suite=self.lock_context.variant.suite,
        )
        data = sbom.to_json(document)
        copy = self.work / "sbom" / f"{image.name}-{image.tag}.spdx.json"
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(data)
        return data

    def pinned_downloads(self, image: PlannedImage) -> list[Pin]:
        """List the pinned files that went into the layers below, and into the builders of their artifacts."""
        pending, visited = [image.key], set[str]()
        while pending:
            key = pending.pop()
            if key not in visited:
                visited.add(key)
                pending += self.composed.images[key].needs
        layers = [
            self.lock_context.definition.layers[key.removeprefix("layer:")] for key in sorted(visited - {image.key})
        ]
        available = map_pins(self.lock_context)
        names = {name for layer in layers for name in layer.downloads.of(self.lock_context.choice)}
        return [available[name] for name in sorted(names)]

    def base_packages(self) -> Mapping[str, str]:
        """Return a base image's own packages, which no lock lists."""
        if not self.lock_context.base:
            return {}
        return read_installed(
            read_base(self.engine, self.lock_context.base, self.work / "base", self.lock_context.choice.arch).status
        )

    def normalise(self, image: PlannedImage, raw: str) -> str:
        """Put the builder's layers under a new configuration; return the engine's id of the result."""
        diff_ids = list(self.engine.inspect(raw)["RootFS"]["Layers"])
        base: Mapping[str, Any] = {} if image.is_bootstrapped else self.engine.inspect(image.step.base)
        base_ids = list(base["RootFS"]["Layers"]) if base else []
        if diff_ids[: len(base_ids)] != base_ids:
            raise ImagesError("name the image", f"{image.key} is not built on {image.step.base}")
        config = store.make_config(
            base.get("Config"),
            len(base_ids),
            diff_ids,
            store.Additions(
                env=dict(image.step.env),
                ports=image.step.ports,
                entrypoint=image.step.entrypoint,
                stop_signal=image.step.stop_signal,
                user=image.step.user,
                labels=self.labels(image, base),
                created_by=f"minivm {image.key} {image.hash[:12]}",
            ),
            arch=self.lock_context.choice.arch,
            epoch=self.lock_context.definition.versions.epoch,
        )
        return self.engine.store.take_over(raw, config)

    def shown_name(self, name: str) -> str:
        """Return an image's name for labels."""
        prefix = self.lock_context.settings.prefix
        return name.replace(prefix, self.shown_prefix, 1) if self.shown_prefix and name.startswith(prefix) else name

    def labels(self, image: PlannedImage, base: Mapping[str, Any]) -> dict[str, str]:
        labels = {
            "org.opencontainers.image.title": self.shown_name(image.repo),
            "org.opencontainers.image.description": image.describe,
            "org.opencontainers.image.version": image.tag,
            "org.opencontainers.image.source": self.lock_context.definition.versions.source,
            f"{LABEL}inputs": image.hash,
            f"{LABEL}capabilities": " ".join(image.provides),
            f"{LABEL}absent": json.dumps(dict(image.absent), sort_keys=True) if image.absent else "",
            f"{LABEL}base": self.lock_context.base or self.lock_context.variant.suite,
            f"{LABEL}wheels": " ".join(wheel.wanted for wheel in image.wheels),
        }
        if base:
            labels["org.opencontainers.image.base.name"] = self.shown_name(image.step.base)
            labels["org.opencontainers.image.base.digest"] = self.engine.image_id(image.step.base)
        if image.is_role:
            # On roles only: a commit that changes no layer must not give every layer another id.
            labels["org.opencontainers.image.revision"] = self.revision
        return {name: value for name, value in labels.items() if value}


def git_revision(repository: Path) -> str:
    try:
        done = ran(["git", "-C", str(repository), "rev-parse", "HEAD"])
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


DEFAULT_KEYS = ("/usr/share/keyrings/ubuntu-archive-keyring.gpg", "/usr/share/keyrings/debian-archive-keyring.gpg")


def ensure_base(engine: DockerEngine, base: str, arch: str) -> None:
    """Make sure that the base image is present and has the build's architecture."""
    if not engine.has(base):
        engine.pull(base, arch)
    architecture = str(engine.inspect(base).get("Architecture") or arch)
    if architecture != arch:
        raise ImagesError("use the base", f"{base} is for {architecture}, and this build for {arch}",
                          hint=f"--arch {architecture} builds on it")  # fmt: skip


def read_base(engine: DockerEngine, base: str, directory: Path, arch: str) -> BaseFiles:
    """Read a base image without starting it; unpack its keys under `directory`."""
    if base.endswith(UNFILLED):
        raise ImagesError("use the base", f"{base} has no digest yet", file="images/versions.yaml",
                          field="variants", hint="`docker buildx imagetools inspect` shows the digest; compare it with"
                          " its publisher's, then write it there")  # fmt: skip
    ensure_base(engine, base, arch)
    with engine.container(base) as container:
        files: dict[str, bytes] = {}
        for path in ("/var/lib/dpkg/status", "/etc/apt", "/usr/share/keyrings"):
            try:
                with engine.read_path(container, path) as tar:
                    files |= read_members(tar, path.rpartition("/")[0])
            except ImagesError:
                if path == "/var/lib/dpkg/status":
                    raise ImagesError("use the base", f"{base} is not a Debian or Ubuntu image") from None
    return BaseFiles(files.pop("/var/lib/dpkg/status").decode(), tuple(read_origins(files, directory)))


def read_members(tar: tarfile.TarFile, parent: str) -> dict[str, bytes]:
    """Return files by their path in the image; resolve links among them, such as trixie's keyrings."""
    contents: dict[str, bytes] = {}
    links: dict[str, str] = {}
    for member in tar:
        name = f"{parent}/{member.name}"
        if member.issym():
            links[name] = posixpath.normpath(posixpath.join(posixpath.dirname(name), member.linkname))
        elif member.isfile() and (data := tar.extractfile(member)) is not None:
            contents[name] = data.read()
    for name, target in links.items():
        if target in contents:
            contents[name] = contents[target]
    return contents


def read_origins(files: dict[str, bytes], directory: Path) -> list[Origin]:
    """Return the base's repositories, from both of apt's formats."""
    origins: list[Origin] = []
    for path, data in sorted(files.items()):
        if path == "/etc/apt/sources.list" or (path.startswith("/etc/apt/sources.list.d/") and path.endswith(".list")):
            origins += parse_one_line(data.decode())
        elif path.startswith("/etc/apt/sources.list.d/") and path.endswith(".sources"):
            origins += parse_deb822(data.decode())
    return [replace(origin, keyring=unpack_key(origin.keyring, files, directory)) for origin in origins]


def unpack_key(keyring: Path, files: dict[str, bytes], directory: Path) -> Path:
    """Unpack a repository's key; without a signed-by, the distribution's own."""
    candidates = [str(keyring)] if keyring != Path() else list(DEFAULT_KEYS)
    for name in candidates:
        if name in files:
            target = directory / Path(name).name
            directory.mkdir(parents=True, exist_ok=True)
            target.write_bytes(files[name])
            return target
    raise ImagesError("use the base", f"no key {' or '.join(candidates)} in the image for its repositories")


def build_concurrently(
    images: Mapping[str, PlannedImage],
    workers: int,
    build: Callable[[PlannedImage], float],
    record: Callable[[PlannedImage, float], None],
    cancel: Callable[[], None],
) -> None:
    """Build the images on `workers` threads, each as soon as all that it needs are built.

    `build` returns its seconds, which `record` gets in the calling thread. If an image fails, `cancel` ends the steps
    that run, and the error is raised.
    """
    waiting, running = dict(images), dict[Future[float], PlannedImage]()
    with ThreadPoolExecutor(workers) as pool:
        try:
            while waiting or running:
                unbuilt = {*waiting, *(image.key for image in running.values())}
                buildable = [image for image in waiting.values() if unbuilt.isdisjoint(image.needs)]
                for image in buildable[: workers - len(running)]:
                    running[pool.submit(build, waiting.pop(image.key))] = image
                finished, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in finished:
                    record(running.pop(future), future.result())
        except BaseException:
            # Leaving the pool waits for its threads, so end their steps first.
            pool.shutdown(wait=False, cancel_futures=True)
            cancel()
            raise
