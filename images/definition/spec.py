"""Frozen dataclasses of the definition: layers, roles and versions. Pure; `load.py` reads them.

Any list of a layer or role may depend on the build: written as a map, its keys are selectors (`all`, a variant's
name, an architecture, `slurm-package`, `slurm-source`, a release as `slurm-26.05`, `cuda-package`, `cuda-wheels`, or
several joined by `+`), and every list whose selectors hold is taken, in order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Generic, TypeVar

from images import architectures

T = TypeVar("T")
# Stands for a checksum that no person has verified yet: the definition loads, and a build that needs it fails.
UNFILLED = "to-be-filled"


# CUDA as the distribution or the variant's repository packages it; any other name is one of versions.yaml's `cuda`.
PACKAGED = "package"


class SlurmSource(Enum):
    """The source of Slurm: the distribution's package, or a tarball built in a layer of its own."""

    PACKAGE = "package"
    SOURCE = "source"


@dataclass(frozen=True, slots=True)
class BuildChoice:
    """The choices of one build; they decide which selectors hold."""

    variant: str
    slurm: SlurmSource
    cuda: str = PACKAGED
    release: str = ""  # of Slurm, as "24.11"; empty where the definition has no facts of any
    arch: str = field(default_factory=architectures.read_own)

    @property
    def selectors(self) -> frozenset[str]:
        selectors = {"all", self.variant, f"slurm-{self.slurm.value}", cuda_selector(self.cuda), self.arch}
        return frozenset(selectors | {f"slurm-{self.release}"} if self.release else selectors)

    @property
    def flavour(self) -> str:
        """The variant, with the architecture's suffix, for tags and logs."""
        return architectures.add_suffix(self.variant, self.arch)


def cuda_selector(cuda: str) -> str:
    return "cuda-package" if cuda == PACKAGED else "cuda-wheels"


@dataclass(frozen=True, slots=True)
class Selected(Generic[T]):
    """A list whose parts apply only where their selectors hold."""

    parts: tuple[tuple[frozenset[str], tuple[T, ...]], ...] = ()

    def of(self, choice: BuildChoice) -> tuple[T, ...]:
        return tuple(item for when, items in self.parts if when <= choice.selectors for item in items)

    def everything(self) -> tuple[T, ...]:
        return tuple(item for _, items in self.parts for item in items)


class EntryKind(Enum):
    """The kind of path that a file entry adds to the image."""

    FILE = "file"
    DIRECTORY = "dir"
    LINK = "link"


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One path of the image beyond rootfs/: a copied file or tree, a directory, or a symbolic link."""

    kind: EntryKind
    to: str
    source: str = ""  # FILE: path in the repository; LINK: what the link says
    mode: int | None = None
    owner: str = "root"


@dataclass(frozen=True, slots=True)
class Artifact:
    """A path taken from another layer's image: brings a compiled program without its compiler."""

    layer: str
    source: str
    to: str


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """Options of the first layer: mmdebstrap's variant, and dpkg's while it unpacks."""

    dpkg_options: tuple[str, ...] = ()


def definition_file(kind: str, name: str, site: Path | None) -> str:
    """Return the file of a layer or role, as messages name it: below images/, or a site's directory."""
    return f"{site or 'images'}/{kind}/{name}.yaml"


def own_directory(repository: Path, site: Path | None) -> Path:
    """Return the directory that holds layers/, roles/, rootfs/ and lock/."""
    return site or repository / "images"


@dataclass(frozen=True, slots=True)
class Layer:
    """One image on top of another."""

    name: str
    describe: str
    parent: str | None
    bootstrap: Bootstrap | None = None
    only: Selected[str] | None = None  # None: in every build
    provides: Selected[str] = Selected()
    users: Selected[str] = Selected()
    sources: Selected[str] = Selected()
    packages: Selected[str] = Selected()
    wheels: Selected[str] = Selected()  # groups of the chosen CUDA: what programs need when they run
    wheels_devel: Selected[str] = Selected()  # and what compiling needs beside that
    python: Selected[str] = Selected()  # Python's libraries that come by wheels, by group
    downloads: Selected[str] = Selected()
    artifacts: Selected[Artifact] = Selected()
    files: Selected[FileEntry] = Selected()
    component: Selected[str] = Selected()
    run: Selected[str] = Selected()
    verify: Selected[str] = Selected()
    remove: Selected[str] = Selected()
    env: Mapping[str, str] = field(default_factory=dict)
    site: Path | None = None  # the directory of a site's own layers (`--layers`); None: images/

    @property
    def file(self) -> str:
        return definition_file("layers", self.name, self.site)


@dataclass(frozen=True, slots=True)
class Role:
    """A role of a pod: its layer, and the services that PID 1 runs in it."""

    name: str
    describe: str
    layer: str
    services: Selected[str] = Selected()
    required: tuple[str, ...] = ()  # of the services: the pod is not ready without them, despite their files
    needs: tuple[str, ...] = ()
    ports: tuple[int, ...] = ()
    capabilities: tuple[str, ...] = ()
    drain: Mapping[str, object] | None = None  # init.plan.spec.parse_drain reads it
    files: Selected[FileEntry] = Selected()
    verify: Selected[str] = Selected()
    env: Mapping[str, str] = field(default_factory=dict)
    stop_signal: str = "SIGTERM"
    default: bool = True  # False: built only when it is named
    code: bool = True  # False: no project code in it, for an image that only carries tools
    program: str = ""  # the package that is the pod's only program, where no init brings up services
    user: str = ""  # the user that the image runs as; "": root, and PID 1 gives each service its own user
    site: Path | None = None  # the directory of a site's own roles (`--layers`); None: images/

    @property
    def file(self) -> str:
        return definition_file("roles", self.name, self.site)


@dataclass(frozen=True, slots=True)
class User:
    """A system user with the same numbers in every role."""

    name: str
    uid: int
    gid: int
    home: str = "/nonexistent"
    shell: str = "/usr/sbin/nologin"


@dataclass(frozen=True, slots=True)
class Pin:
    """A file from outside, by checksum; with `commit`, a source in a git repository."""

    name: str
    version: str
    url: str
    sha256: str
    setting: str = ""  # that names it, in place of versions.yaml
    commit: str = ""


@dataclass(frozen=True, slots=True)
class Cuda:
    """One CUDA from its vendor's wheels, named by the toolkit's version."""

    name: str
    driver: str  # the oldest that runs it
    wheels: Mapping[str, tuple[str, ...]]  # group -> requirements for pip

    @property
    def lock(self) -> str:
        return f"cuda-{self.name}"

    @property
    def about(self) -> str:
        return f"CUDA {self.name}"


@dataclass(frozen=True, slots=True)
class Libraries:
    """Python libraries that no suite has, from their publishers' wheels."""

    wheels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    name = lock = "python"
    about = "Python"


@dataclass(frozen=True, slots=True)
class AptSource:
    """A package repository beside the base's own."""

    name: str
    uri: str  # empty: another suite of the base's own archive, at its address and with its key
    suites: tuple[str, ...]
    components: tuple[str, ...]
    key: str  # a Pin's name
    pin: int | None = None  # apt's priority for everything of this repository, or for `packages`
    packages: tuple[str, ...] = ()  # names or patterns; with them nothing else is taken from it
    dated: bool = True  # False: an index past its date is taken, too


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to provide the capabilities that roles need."""

    name: str
    describe: str
    python: str
    slurm: SlurmSource
    suite: str = ""
    components: tuple[str, ...] = ("main",)
    cuda: str = PACKAGED
    base: str = ""  # an image pinned by digest, instead of a bootstrapped root
    releases: tuple[str, ...] = ()  # of Slurm that it has packages of; the first is the default
    sources: tuple[AptSource, ...] = ()
    absent: Mapping[str, str] = field(default_factory=dict)
    expects: Mapping[str, str] = field(default_factory=dict)  # of the machine: kernel, ofed
    arches: tuple[str, ...] = tuple(architectures.KNOWN)


@dataclass(frozen=True, slots=True)
class Versions:
    """images/versions.yaml: every pinned version in one place."""

    epoch: int
    source: str  # where the project lives, for the label
    variants: Mapping[str, Variant]
    users: Mapping[str, User]
    pins: Mapping[str, Pin]
    values: Mapping[str, str]
    cuda: Mapping[str, Cuda] = field(default_factory=dict)
    python: Libraries = Libraries()


@dataclass(frozen=True, slots=True)
class SlurmRelease:
    """Facts about one release of Slurm, from images/slurm.yaml, which explains each."""

    name: str
    protocol: int
    reads: int
    mpi: tuple[str, ...]
    gpu: str
    configure: tuple[str, ...]
    user_env: str
    topology: str
    needs_state: tuple[str, ...] = ()
    metrics: str = ""
    ready: Mapping[str, object] = field(default_factory=dict)
    fast_scripts: bool = False
    absent: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Definition:
    """The whole definition under images/, checked."""

    layers: Mapping[str, Layer]
    roles: Mapping[str, Role]
    versions: Versions
    slurm: Mapping[str, SlurmRelease] = field(default_factory=dict)
