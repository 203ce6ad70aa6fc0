"""One invocation of build.py: the definition, its lock and the engine, with the operations on them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from images import architectures
from images.archive import lock, locked, wheels
from images.archive.lock import LockContext
from images.archive.locked import Slice
from images.definition import load
from images.definition.load import known_cuda
from images.definition.spec import PACKAGED, BuildChoice, Definition, SlurmSource
from images.engine import look
from images.errors import ImagesError, nearest
from images.host import OWN_ENGINE
from images.make.compose import Composer
from images.make.plan import (
    LAYER,
    NATIVE,
    BuildResult,
    BuildState,
    Composed,
    Planned,
    PlannedImage,
    Rendered,
    changed,
    dockerfile,
)
from images.settings import BuildSettings, check_certificates

if TYPE_CHECKING:
    from images.archive.apt import BaseFiles
    from images.engine.builder import Tools
    from images.engine.docker import DockerEngine
    from images.engine.look import Present
    from images.make.progress import Reporter


# Build images concurrently, each as soon as all that it needs exist.
def together(
    images: Mapping[str, PlannedImage],
    hands: int,
    make: Callable[[PlannedImage], float],
    done: Callable[[PlannedImage, float], None],
    cancel: Callable[[], None],
) -> None:
    """Run `make`, which returns its seconds, on `hands` images at once. If one fails, `cancel` ends the others."""
    waiting, running = dict(images), dict[Future[float], PlannedImage]()
    with ThreadPoolExecutor(hands) as pool:
        try:
            while waiting or running:
                missing = {*waiting, *(image.key for image in running.values())}
                free = [image for image in waiting.values() if missing.isdisjoint(image.needs)]
                for image in free[: hands - len(running)]:
                    running[pool.submit(make, waiting.pop(image.key))] = image
                finished, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in finished:
                    done(running.pop(future), future.result())
        except BaseException:
            # The pool waits for its threads on the way out: their steps are ended, not sat through.
            pool.shutdown(wait=False, cancel_futures=True)
            cancel()
            raise


# Which variant with which Slurm a build is of: what was wished, against what the definition has. Pure.
def choice(definition: Definition, name: str, wish: str = "", tarball: str = "") -> BuildChoice:
    """Choose a variant's Slurm: `package`, `source`, a release, or the variant's default.

    `tarball` is the version of a site's own tarball.
    """
    variant = definition.versions.variants[name]
    if wish == SlurmSource.SOURCE.value or (not wish and variant.slurm is SlurmSource.SOURCE):
        pin = definition.versions.pins.get("slurm")
        version = tarball or (pin.version if pin else "")
        return BuildChoice(variant.name, SlurmSource.SOURCE, variant.cuda, nearest_release(definition, version))
    packaged = [*variant.releases]
    if wish in ("", SlurmSource.PACKAGE.value):
        return BuildChoice(variant.name, SlurmSource.PACKAGE, variant.cuda, packaged[0] if packaged else "")
    if wish not in packaged:
        raise ImagesError("use the setting", f"variant {variant.name!r} has no packages of Slurm {wish}", field="slurm",
                          hint=f"{', '.join(packaged) or 'none'}; or source, with a tarball")  # fmt: skip
    return BuildChoice(variant.name, SlurmSource.PACKAGE, variant.cuda, wish)


def nearest_release(definition: Definition, version: str) -> str:
    """Return the release whose facts apply to a tarball: its own, or the newest known one before it."""
    release = ".".join(version.split(".")[:2])
    older = [name for name in definition.slurm if name <= release]
    if definition.slurm and not older:
        raise ImagesError("use the tarball", f"Slurm {version or 'of no version'} is older than all that is known",
                          file="images/slurm.yaml", hint=f"from {min(definition.slurm)} on")  # fmt: skip
    return max(older, default="")


@dataclass(slots=True)
class Session:
    repository: Path
    settings: BuildSettings
    definition: Definition
    place: LockContext
    slices: dict[str, Slice] = field(default_factory=dict)
    tools: Tools | None = None  # of the engine's own machine: `images.cli.aid` has them built
    _engine: DockerEngine | None = None
    _present: dict[str, Present] | None = None
    _known: Rendered | None = None
    _arch: str = ""  # the engine's

    @classmethod
    def open(cls, repository: Path, settings: BuildSettings) -> Session:
        """Open a session for one architecture."""
        sessions = cls.open_each(repository, settings)
        if len(sessions) > 1:
            raise ImagesError("use the setting", f"{settings.arch!r} is more than one, and this takes one",
                              field="arch", hint="--arch arm64")  # fmt: skip
        return sessions[0]

    @classmethod
    def open_each(cls, repository: Path, settings: BuildSettings) -> list[Session]:
        """Open one session for each requested architecture."""
        definition = load.load(repository)
        return [cls.of(repository, settings, definition, arch) for arch in architectures.listed(settings.arch)]

    @classmethod
    def of(cls, repository: Path, settings: BuildSettings, definition: Definition, arch: str) -> Session:
        variants = definition.versions.variants
        if settings.variant not in variants:
            raise ImagesError("use the variant", f"no variant {settings.variant!r}",
                              hint=nearest(settings.variant, variants))  # fmt: skip
        if arch not in variants[settings.variant].arches:
            raise ImagesError("use the variant", f"{settings.variant} is not made for {arch}",
                              file="images/versions.yaml", field=f"variants.{settings.variant}.arches",
                              hint=f"it is for {', '.join(variants[settings.variant].arches)}")  # fmt: skip
        check_certificates(settings.ca_certificates)
        cuda = settings.cuda or variants[settings.variant].cuda
        known_cuda(definition, cuda, "cuda")
        chosen = choice(definition, settings.variant, settings.slurm, settings.slurm_version)
        place = LockContext(repository, definition, replace(chosen, cuda=cuda, arch=arch), settings)
        return cls(repository, settings, definition, place, lock.read(place))

    @property
    def engine(self) -> DockerEngine:
        if self._engine is None:
            from images.engine.docker import DockerEngine

            self._engine = DockerEngine(self.settings.builder, self.marks)
        return self._engine

    @property
    def marks(self) -> Path:
        return self.repository / "build/marks"

    def clear(self) -> int:
        """Remove what interrupted builds left on the engine."""
        return self.engine.clear() if self.marks.is_dir() and any(self.marks.iterdir()) else 0

    @property
    def state(self) -> BuildState:
        return BuildState(self.repository / "build/state" / f"{self.place.directory.name}.json")

    @property
    def known(self) -> Rendered:
        if self._known is None:
            path = self.repository / f"build/state/{self.place.directory.name}.rendered.json"
            self._known = Rendered(self.repository / "images/templates", path)
        return self._known

    def roles(self, named: Sequence[str]) -> tuple[str, ...]:
        """Return the named targets (roles, or layer:NAME), or all roles that are built by default."""
        for name in named:
            if name.startswith(LAYER) and name.removeprefix(LAYER) in self.definition.layers:
                continue
            if name.startswith(LAYER):
                hint = nearest(name, [f"{LAYER}{layer}" for layer in self.definition.layers])
                raise ImagesError("find the layer", f"no {name!r}", hint=hint)
            if name not in self.definition.roles:
                hint = f"`{LAYER}{name}` is a layer" if name in self.definition.layers else None
                hint = hint or nearest(name, self.definition.roles)
                raise ImagesError("find the role", f"no role {name!r}", hint=hint)
        return tuple(named) or tuple(role.name for role in self.definition.roles.values() if role.default)

    def every_role(self, named: Sequence[str]) -> tuple[str, ...]:
        """Return the targets for the lock, including roles that are built only by name."""
        builders = [NATIVE] if NATIVE.removeprefix(LAYER) in self.definition.layers else []
        return self.roles(named) if named else (*self.definition.roles, *builders)

    def layers(self, targets: Iterable[str]) -> list[str]:
        return [t.removeprefix(LAYER) if t.startswith(LAYER) else self.definition.roles[t].layer for t in targets]

    def rendered(self, targets: Sequence[str]) -> list[str]:
        """Return every Dockerfile under these targets, in build order."""
        templates = self.repository / "images/templates"
        texts = []
        for image in self.compose(targets).needed(targets):
            if image.bootstrapped:
                texts.append(f"# {image.step.describe}\n# made by mmdebstrap, not from a Dockerfile\n")
            else:
                texts.append(dockerfile(image.step, templates))
        return texts

    def base(self) -> BaseFiles | None:
        """Read the base image's packages and repositories, if there is a base image."""
        if not self.place.base:
            return None
        from images.make.build import read_base

        return read_base(self.engine, self.place.base, self.repository / "build/base", self.place.choice.arch)

    def beside(self) -> list[Session]:
        """Return this session, and one for each other release of Slurm and CUDA that the variant allows."""
        own, known = self.place.choice, self.definition.versions.cuda
        releases = [choice(self.definition, own.variant, release) for release in self.place.variant.releases]
        # A variant whose CUDA is its repositories' own has no wheels.
        cudas = [*known, PACKAGED] if self.place.variant.cuda in known else [self.place.variant.cuda]
        choices = [replace(release, cuda=cuda, arch=own.arch) for release in releases for cuda in cudas]
        places = [replace(self.place, choice=release) for release in choices if release != own]
        return [self, *(replace(self, place=place, slices=lock.read(place)) for place in places)]

    # The lock.

    def stale(self, roles: Iterable[str]) -> list[str]:
        names = self.layers(roles)
        return lock.stale(lock.wanted(self.place, names), self.slices) + wheels.stale(self.place, names)

    def relock(self, roles: Iterable[str]) -> list[str]:
        """Resolve and write the lock; return what changed, one line a package. Other roles' slices stay."""
        before = dict(self.slices)
        resolved = lock.resolve(self.place, self.base(), self.layers(roles))
        lock.write(self.place, resolved)
        self.slices = before | {slice_.layer: slice_ for slice_ in resolved}
        names = {slice_.layer for slice_ in resolved}
        moved = locked.changes((s for s in before.values() if s.layer in names), resolved)
        return moved + wheels.relock(self.place, self.layers(roles))

    def wheels_seen(self, roles: Iterable[str]) -> wheels.IndexDifferences:
        """Compare the index with the lock of the roles' wheels."""
        return wheels.compare_with_index(self.place, self.layers(roles))

    def gone(self, images: Iterable[PlannedImage]) -> list[locked.Gone]:
        """List the packages of these images that the archive no longer has."""
        slices = [image.slices[-1] for image in images if not image.is_role and image.slices[-1].packages]
        return lock.gone(self.place, self.base(), slices) if slices else []

    # The plan.

    def compose(self, roles: Iterable[str]) -> Composed:
        return Composer(self.place, self.slices, load.read_yaml, self.known).compose(roles)

    def plan(self, roles: Sequence[str], present: Mapping[str, Present]) -> tuple[Composed, list[Planned]]:
        composed, state = self.compose(roles), self.state
        planned = []
        for image in composed.needed(roles, present):
            is_present = image.reference in present
            planned.append(
                Planned(image, is_present, () if is_present else tuple(changed(state.inputs(image.key), image.inputs)))
            )
        return composed, planned

    @contextmanager
    def caching(self) -> Iterator[None]:
        """Run the build through the package cache if `apt_cache` is set."""
        if not self.settings.apt_cache:
            yield
            return
        from images.archive.fetch import cache

        before = self.place
        with cache(Path(self.settings.apt_cache), self.settings.http_proxy) as address:
            through = replace(self.settings, http_proxy=address, network="host")
            self.place = replace(before, settings=through)
            try:
                yield
            finally:
                self.place = before

    def present(self) -> dict[str, Present]:
        """Return the engine's images by name, read once and again after this session changed them."""
        if self._present is None:
            listed = look.images() if self._engine is None else None
            present = self.engine.images() if listed is None else listed
            self._present = {reference: image for image in present for reference in image.references}
        return self._present

    # The build.

    def check_architecture(self, todo: Iterable[PlannedImage]) -> None:
        """Check before the build that this machine can run the steps of the architecture."""
        arch, own = self.place.choice.arch, architectures.own()
        where, _ = self.engine.chosen()
        if self.engine.arch != arch and not self.settings.arch:
            raise ImagesError(f"build for {arch}", f"the engine at {where} is of {self.engine.arch}",
                              hint=f"--arch {self.engine.arch} builds for it; --arch {arch} says that it can run both"
                              )  # fmt: skip
        # What another machine's engine can run, its own step will say.
        needs_emulation = arch != own and (where == OWN_ENGINE or any(image.bootstrapped for image in todo))
        if needs_emulation and (reason := architectures.refusal(arch)):
            raise ImagesError(f"build for {arch}", reason, hint=f"as root: `python3 images/host.py emulation {arch}`;"
                              f" `make images ARCH={arch}` does it, too")  # fmt: skip

    def build(self, composed: Composed, todo: Sequence[Planned], reporter: Reporter) -> list[BuildResult]:
        """Build what is missing, parents first; move the roles' names only when everything is there."""
        results = {planned.image.key: BuildResult(planned.image, planned.why) for planned in todo}
        if waiting := {planned.image.key: planned.image for planned in todo if not planned.present}:
            self._present = None
            self.make(composed, waiting, results, reporter)
        self.alias(composed)
        self.known.keep()
        return list(results.values())

    def make(
        self,
        composed: Composed,
        waiting: Mapping[str, PlannedImage],
        results: Mapping[str, BuildResult],
        reporter: Reporter,
    ) -> None:
        from images.make.build import Maker, git_revision

        maker = Maker(self.place, composed, self.engine, reporter, git_revision(self.repository), tools=self.tools)
        state = self.state

        def build_image(image: PlannedImage) -> float:
            reporter.start(image.key, ", ".join(results[image.key].why[:3]))
            seconds = maker.make(image)
            reporter.done(image.key, seconds)
            return seconds

        def done(image: PlannedImage, seconds: float) -> None:
            results[image.key].seconds, results[image.key].built = seconds, True
            state.record(image.key, image.inputs)

        together(waiting, self.jobs, build_image, done, self.engine.builder.cancel)
        if self.engine.marks:
            self.engine.marks.release()

    @property
    def jobs(self) -> int:
        """Number of images to build at once: half of the processors, because a build uses one and the disk."""
        return max(1, int(self.settings.jobs) if self.settings.jobs else (os.cpu_count() or 1) // 2)

    def alias(self, composed: Composed) -> None:
        """Move ROLE:latest to the newest build for the engine's architecture, and ROLE:latest-ARCH for another."""
        present = self.present()
        for image in composed.images.values():
            if not image.is_role or image.reference not in present:
                continue
            latest = self.newest(image.repo)
            if latest not in present or present[latest].id != present[image.reference].id:
                self._present = None
                self.engine.tag(image.reference, latest)

    def newest(self, repo: str) -> str:
        self._arch = self._arch or (look.arch() if self._engine is None else "") or self.engine.arch
        arch = self.place.choice.arch
        return f"{repo}:latest" if arch == self._arch else f"{repo}:latest-{arch}"
