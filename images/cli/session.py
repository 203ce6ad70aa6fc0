"""One invocation of `build.py` for one architecture: what to build, its lock, and the container engine that builds it.

Each command of `build.py` opens a session (`Session.open`, or `open_each` for several architectures), then:

1. `select_targets` turns the command line's names into targets: a role, or `layer:NAME`.
2. `require_lock` makes sure that the lock resolves the packages of every layer that the targets need.
3. `plan` composes the images and compares their tags with the engine's images: what is missing has to be built.
4. `require_packages` makes sure that the package archive still has what the missing images install.
5. `build` builds the missing images, parents first, then moves the names `ROLE:latest`.

The engine is opened, and docker's library imported, only by an operation that needs it: most builds have nothing to do.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ground.errors import nearest
from images import ImagesError, architectures
from images.archive import lock, locked, wheels
from images.archive.lock import LockContext
from images.archive.locked import Slice
from images.definition import load
from images.definition.load import choose_build, require_cuda
from images.definition.spec import PACKAGED, Definition
from images.engine import store
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
    list_changed,
    render_dockerfile,
)
from images.settings import BuildSettings, check_certificates

if TYPE_CHECKING:
    from images.archive.apt import BaseFiles
    from images.engine.builder import Tools
    from images.engine.docker import DockerEngine
    from images.engine.store import ListedImage
    from images.make.progress import Reporter

# The value of `build --when-vanished` that resolves the lock anew instead of failing.
RELOCK = "relock"
RELOCK_HINT = "`build.py lock` resolves anew; so does `build --when-vanished relock`"
MOST_LOGGED_CHANGES = 40


@dataclass(slots=True)
class Session:
    """The definition, the settings and the lock of one build, with the operations of `build.py` on them."""

    repository: Path
    settings: BuildSettings
    definition: Definition
    place: LockContext
    slices: dict[str, Slice] = field(default_factory=dict)  # layer -> its locked packages
    # Helper programs for building another architecture's images (`build_tools`); None if the build needs none.
    tools: Tools | None = None
    _engine: DockerEngine | None = None
    _present: dict[str, ListedImage] | None = None
    _rendered: Rendered | None = None
    _engine_arch: str = ""

    # Open a session.

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
        definition = load.load(repository, settings.site)
        return [
            cls.for_architecture(repository, settings, definition, arch)
            for arch in architectures.parse_architectures(settings.arch)
        ]

    @classmethod
    def for_architecture(cls, repository: Path, settings: BuildSettings, definition: Definition, arch: str) -> Session:
        """Check the settings against the definition, choose the build, and read its lock."""
        variants = definition.versions.variants
        if settings.variant not in variants:
            raise ImagesError("use the variant", f"no variant {settings.variant!r}",
                              hint=nearest(settings.variant, variants))  # fmt: skip
        variant = variants[settings.variant]
        if arch not in variant.arches:
            raise ImagesError("use the variant", f"{settings.variant} is not made for {arch}",
                              file="images/versions.yaml", field=f"variants.{settings.variant}.arches",
                              hint=f"it is for {', '.join(variant.arches)}")  # fmt: skip
        check_certificates(settings.ca_certificates)
        cuda = settings.cuda or variant.cuda
        require_cuda(definition, cuda, "cuda")
        choice = choose_build(definition, settings.variant, settings.slurm, settings.slurm_version)
        place = LockContext(repository, definition, replace(choice, cuda=cuda, arch=arch), settings)
        return cls(repository, settings, definition, place, lock.read(place))

    def open_siblings(self) -> list[Session]:
        """Open a session for every other release of Slurm and CUDA that the variant allows."""
        own, known_cudas = self.place.choice, self.definition.versions.cuda
        releases = [choose_build(self.definition, own.variant, release) for release in self.place.variant.releases]
        # A variant whose CUDA comes from its package repositories has no wheels of another CUDA.
        has_wheels = self.place.variant.cuda in known_cudas
        cudas = [*known_cudas, PACKAGED] if has_wheels else [self.place.variant.cuda]
        choices = [replace(release, cuda=cuda, arch=own.arch) for release in releases for cuda in cudas]
        places = [replace(self.place, choice=choice) for choice in choices if choice != own]
        return [replace(self, place=place, slices=lock.read(place)) for place in places]

    # The engine.

    @property
    def engine(self) -> DockerEngine:
        if self._engine is None:
            from images.engine.docker import DockerEngine

            self._engine = DockerEngine(self.settings.builder, self._marks)
        return self._engine

    @property
    def _marks(self) -> Path:
        """Directory of the marks of containers that this checkout's builds started."""
        return self.repository / "build/marks"

    def remove_leftovers(self) -> int:
        """Remove the containers of interrupted builds; return their number."""
        return self.engine.clear() if self._marks.is_dir() and any(self._marks.iterdir()) else 0

    def list_present(self) -> dict[str, ListedImage]:
        """Return the engine's images by reference. The list is read once, and again after this session changed it."""
        if self._present is None:
            listed = store.list_images() if self._engine is None else None
            images = self.engine.images() if listed is None else listed
            self._present = {reference: image for image in images for reference in image.references}
        return self._present

    def check_architecture(self, todo: Iterable[PlannedImage]) -> None:
        """Check before the build that this machine can run the steps of the architecture."""
        arch, own_arch = self.place.choice.arch, architectures.read_own()
        address, _ = self.engine.choose()
        if self.engine.arch != arch and not self.settings.arch:
            raise ImagesError(f"build for {arch}", f"the engine at {address} is of {self.engine.arch}",
                              hint=f"--arch {self.engine.arch} builds for it; --arch {arch} says that it can run both"
                              )  # fmt: skip
        # This machine runs the steps of its own engine, and bootstraps a root. For an engine elsewhere nothing can be
        # checked here: a step that the engine cannot run fails with its own message.
        runs_here = address == OWN_ENGINE or any(image.is_bootstrapped for image in todo)
        if arch != own_arch and runs_here and (refusal := architectures.explain_refusal(arch)):
            raise ImagesError(f"build for {arch}", refusal, hint=f"as root: `python3 images/host.py emulation {arch}`;"
                              f" `make images ARCH={arch}` does it, too")  # fmt: skip

    # Targets: roles, or layer:NAME.

    def select_targets(self, names: Sequence[str]) -> tuple[str, ...]:
        """Check the names of targets; without names return all roles that are built by default."""
        for name in names:
            if name.startswith(LAYER):
                if name.removeprefix(LAYER) not in self.definition.layers:
                    hint = nearest(name, [f"{LAYER}{layer}" for layer in self.definition.layers])
                    raise ImagesError("find the layer", f"no {name!r}", hint=hint)
            elif name not in self.definition.roles:
                hint = f"`{LAYER}{name}` is a layer" if name in self.definition.layers else None
                raise ImagesError("find the role", f"no role {name!r}",
                                  hint=hint or nearest(name, self.definition.roles))  # fmt: skip
        return tuple(names) or tuple(role.name for role in self.definition.roles.values() if role.default)

    def select_lock_targets(self, names: Sequence[str]) -> tuple[str, ...]:
        """Check the names of targets; without names return all that a lock holds, also roles built only by name."""
        if names:
            return self.select_targets(names)
        helpers = [NATIVE] if NATIVE.removeprefix(LAYER) in self.definition.layers else []
        return (*self.definition.roles, *helpers)

    def list_layers(self, targets: Iterable[str]) -> list[str]:
        """Return the layer of each target."""
        return [
            target.removeprefix(LAYER) if target.startswith(LAYER) else self.definition.roles[target].layer
            for target in targets
        ]

    # The lock.

    def list_stale_layers(self, targets: Iterable[str]) -> list[str]:
        """List the layers whose locked packages or wheels do not fit the definition."""
        layers = self.list_layers(targets)
        return lock.find_stale(lock.list_wanted(self.place, layers), self.slices) + wheels.list_stale(
            self.place, layers
        )

    def require_lock(self, targets: Sequence[str], when_vanished: str, reporter: Reporter) -> None:
        """Make sure that the lock fits every layer: resolve anew if `when_vanished` is RELOCK, else fail."""
        stale = self.list_stale_layers(targets)
        if not stale:
            return
        if when_vanished != RELOCK:
            problem = f"the lock does not fit {', '.join(stale)}"
            raise ImagesError("build as locked", problem, file=self.place.directory, hint=RELOCK_HINT)
        reporter.log(f"lock: {', '.join(stale)} changed; resolving every package anew")
        self._relock_and_log(targets, reporter)

    def require_packages(
        self, todo: Sequence[PlannedImage], targets: Sequence[str], when_vanished: str, reporter: Reporter
    ) -> bool:
        """Make sure that the archive has all that `todo` installs: resolve anew if told by `when_vanished`, else fail.

        Return True after a new lock, which needs a new plan.
        """
        vanished = self.list_vanished_packages(todo)
        if not vanished:
            return False
        shown = "\n".join(f"  {package}" for package in vanished)
        if when_vanished != RELOCK:
            problem = f"the archive moved on:\n{shown}"
            raise ImagesError("build as locked", problem, file=self.place.directory, hint=RELOCK_HINT)
        reporter.log(f"lock: the archive moved on; RESOLVING ANEW, so this build differs from the last one:\n{shown}")
        self._relock_and_log(targets, reporter)
        return True

    def _relock_and_log(self, targets: Sequence[str], reporter: Reporter) -> None:
        changes = self.relock(targets)
        for text in changes[:MOST_LOGGED_CHANGES]:
            reporter.log(f"lock: {text}")
        if len(changes) > MOST_LOGGED_CHANGES:
            reporter.log(f"lock: and {len(changes) - MOST_LOGGED_CHANGES} more")

    def relock(self, targets: Iterable[str]) -> list[str]:
        """Resolve and write the lock; return the changes, one line a package. Other targets' slices stay."""
        layers = self.list_layers(targets)
        resolved = lock.resolve(self.place, self.read_base(), layers)
        lock.write(self.place, resolved)
        replaced = [self.slices[slice_.layer] for slice_ in resolved if slice_.layer in self.slices]
        self.slices = self.slices | {slice_.layer: slice_ for slice_ in resolved}
        return locked.list_changes(replaced, resolved) + wheels.relock(self.place, layers)

    def compare_wheels(self, targets: Iterable[str]) -> wheels.IndexDifferences:
        """Compare pip's index with the locked wheels of the targets."""
        return wheels.compare_with_index(self.place, self.list_layers(targets))

    def list_vanished_packages(self, images: Iterable[PlannedImage]) -> list[locked.Gone]:
        """List the packages of these images that the archive no longer has."""
        slices = [image.slices[-1] for image in images if not image.is_role and image.slices[-1].packages]
        return lock.find_vanished(self.place, self.read_base(), slices) if slices else []

    def read_base(self) -> BaseFiles | None:
        """Read the base image's packages and repositories, if there is a base image."""
        if not self.place.base:
            return None
        from images.make.build import read_base

        return read_base(self.engine, self.place.base, self.repository / "build/base", self.place.choice.arch)

    # The plan.

    def compose(self, targets: Iterable[str]) -> Composed:
        """Compose every image that the targets need: its Dockerfile, its files, and its tag, the hash of both."""
        return Composer(self.place, self.slices, load.read_yaml, self.rendered).compose(targets)

    def plan(self, targets: Sequence[str]) -> tuple[Composed, list[Planned]]:
        """Compose the images, and plan for each: it is present, or which of its inputs changed since its last build."""
        present, composed, state = self.list_present(), self.compose(targets), self._state
        planned = []
        for image in composed.list_needed(targets, present):
            is_present = image.reference in present
            changes = () if is_present else tuple(list_changed(state.inputs(image.key), image.inputs))
            planned.append(Planned(image, is_present, changes))
        return composed, planned

    def render_dockerfiles(self, targets: Sequence[str]) -> list[str]:
        """Return every Dockerfile under these targets, in build order."""
        templates = self.repository / "images/templates"
        texts = []
        for image in self.compose(targets).list_needed(targets):
            if image.is_bootstrapped:
                texts.append(f"# {image.step.describe}\n# made by mmdebstrap, not from a Dockerfile\n")
            else:
                texts.append(render_dockerfile(image.step, templates))
        return texts

    @property
    def rendered(self) -> Rendered:
        """Digests of the Dockerfiles that earlier builds rendered: a build with nothing to do renders none."""
        if self._rendered is None:
            path = self.repository / f"build/state/{self.place.directory.name}.rendered.json"
            self._rendered = Rendered(self.repository / "images/templates", path)
        return self._rendered

    @property
    def _state(self) -> BuildState:
        """The inputs of each image's last build."""
        return BuildState(self.repository / "build/state" / f"{self.place.directory.name}.json")

    # The build.

    @contextmanager
    def use_package_cache(self) -> Iterator[None]:
        """Download through the package cache while inside, if `apt_cache` is set."""
        if not self.settings.apt_cache:
            yield
            return
        from images.archive.fetch import run_cache

        direct = self.place
        with run_cache(Path(self.settings.apt_cache), self.settings.http_proxy) as address:
            self.place = replace(direct, settings=replace(self.settings, http_proxy=address, network="host"))
            try:
                yield
            finally:
                self.place = direct

    def build(self, composed: Composed, planned: Sequence[Planned], reporter: Reporter) -> list[BuildResult]:
        """Build what is missing, parents first; move the roles' names only when everything is there."""
        results = {plan.image.key: BuildResult(plan.image, plan.why) for plan in planned}
        if missing := {plan.image.key: plan.image for plan in planned if not plan.present}:
            self._present = None
            self._build_missing(composed, missing, results, reporter)
        self._move_latest_names(composed)
        self.rendered.keep()
        return list(results.values())

    def _build_missing(
        self,
        composed: Composed,
        missing: Mapping[str, PlannedImage],
        results: Mapping[str, BuildResult],
        reporter: Reporter,
    ) -> None:
        """Build these images concurrently, and write seconds and success into their results."""
        from images.make.build import Maker, build_concurrently, git_revision

        maker = Maker(self.place, composed, self.engine, reporter, git_revision(self.repository), tools=self.tools)
        state = self._state

        def build_image(image: PlannedImage) -> float:
            reporter.start(image.key, ", ".join(results[image.key].why[:3]))
            seconds = maker.make(image)
            reporter.done(image.key, seconds)
            return seconds

        def record(image: PlannedImage, seconds: float) -> None:
            results[image.key].seconds, results[image.key].built = seconds, True
            state.record(image.key, image.inputs)

        build_concurrently(missing, self._jobs, build_image, record, self.engine.builder.cancel)
        if self.engine.marks:
            self.engine.marks.release()

    @property
    def _jobs(self) -> int:
        """Number of images to build at once: half of the processors, because a build uses one and the disk."""
        return max(1, int(self.settings.jobs) if self.settings.jobs else (os.cpu_count() or 1) // 2)

    def _move_latest_names(self, composed: Composed) -> None:
        """Let each role's `latest` name point to its newest build."""
        present = self.list_present()
        for image in composed.images.values():
            if not image.is_role or image.reference not in present:
                continue
            name = self.latest_name(image.repo)
            if name not in present or present[name].id != present[image.reference].id:
                self._present = None
                self.engine.tag(image.reference, name)

    def latest_name(self, repo: str) -> str:
        """Return ROLE:latest for the engine's own architecture, and ROLE:latest-ARCH for another one."""
        if not self._engine_arch:
            self._engine_arch = (store.read_architecture() if self._engine is None else "") or self.engine.arch
        arch = self.place.choice.arch
        return f"{repo}:latest" if arch == self._engine_arch else f"{repo}:latest-{arch}"


def build_tools(session: Session, reporter: Reporter, when_vanished: str = "fail") -> Tools | None:
    """Return the helper programs for building another architecture's images; build them if they are missing.

    None for a build that does not use them: for the engine's own architecture, on a base image, with BuildKit, or with
    another machine's engine.
    """
    place, engine = session.place, session.engine
    if (
        place.choice.arch == engine.arch
        or place.base
        or engine.builder.buildx
        or engine.arch != architectures.read_own()
    ):
        return None
    if NATIVE.removeprefix(LAYER) not in place.definition.layers:
        return None
    # The settings of `place`: during a build they name the package cache, and the session's own do not.
    native = Session.for_architecture(session.repository, place.settings, place.definition, engine.arch)
    native.require_lock([NATIVE], when_vanished, reporter)
    composed, planned = native.plan([NATIVE])
    todo = [plan.image for plan in planned if not plan.present]
    if todo and native.require_packages(todo, [NATIVE], when_vanished, reporter):
        composed, planned = native.plan([NATIVE])
    if todo:
        native.build(composed, planned, reporter)
    # Imported late: it loads docker's library, which a build with nothing to do spares.
    from images.make.build import native_tools

    return native_tools(composed.images[NATIVE].reference)
