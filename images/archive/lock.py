"""Resolve every package of every layer to a version and a checksum, on this host, with apt alone.

`build.py lock` calls `resolve`: it lists what each layer requests (`list_wanted`), opens the archive with all their
repositories (`open_archive`), and resolves the layers parents first (`resolve_in`); `write` stores one slice a layer. A
build reads the slices, and refuses layers whose request has changed (`find_stale`) or whose packages the archive no
longer has (`find_vanished`). `images.archive.locked` has the slices' form.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from ground.files import locked, write_whole
from images import ImagesError, architectures
from images.archive import apt
from images.archive.apt import Archive, BaseFiles, Origin
from images.archive.fetch import VERSIONS, download
from images.archive.locked import Gone, LockRequest, Slice, from_json, list_vanished, to_json
from images.definition.load import active_chain
from images.definition.spec import (
    UNFILLED,
    BuildChoice,
    Definition,
    Layer,
    Pin,
    Variant,
    cuda_selector,
    own_directory,
)
from images.settings import BuildSettings

# How long another build of this tree may take to read the lists of its repositories and resolve every layer.
OTHERS_S = 900.0


@dataclass(frozen=True, slots=True)
class WantedPackages:
    """The packages that one layer requests, and the layers below it."""

    layer: Layer
    below: tuple[str, ...]
    request: LockRequest


@dataclass(frozen=True, slots=True)
class LockContext:
    """The location of a lock, and what it may fetch."""

    repository: Path
    definition: Definition
    choice: BuildChoice
    settings: BuildSettings

    @property
    def variant(self) -> Variant:
        return self.definition.versions.variants[self.choice.variant]

    @property
    def base(self) -> str:
        return self.settings.base_image or self.variant.base

    @property
    def directory(self) -> Path:
        """Directory of this choice's lock: one for each variant and architecture.

        Another Slurm or CUDA than the variant's own has a directory for the layers that differ.
        """
        name = self.choice.variant
        if self.choice.slurm is not self.variant.slurm:
            name += f"-slurm-{self.choice.slurm.value}"
        elif self.choice.release not in self.variant.releases[:1]:
            name += f"-slurm-{self.choice.release}" if self.choice.release else ""
        if cuda_selector(self.choice.cuda) != cuda_selector(self.variant.cuda):
            name += f"-{cuda_selector(self.choice.cuda)}"
        if self.settings.base_image:
            name += "-base"
        home = own_directory(self.repository, self.settings.site)
        return home / "lock" / architectures.add_suffix(name, self.choice.arch)

    @property
    def shared(self) -> LockContext | None:
        """The lock of the variant's own Slurm and CUDA on the same base: layers below them are identical.

        A site's own layers lie on layers of this repository, whose lock it shares.
        """
        if self.settings.site:
            return replace(self, settings=replace(self.settings, layers=""))
        variant, releases = self.variant, self.variant.releases
        first = releases[0] if releases else ""
        own = replace(self, choice=BuildChoice(variant.name, variant.slurm, variant.cuda, first, self.choice.arch))
        return None if own.directory == self.directory else own

    def shown(self, path: Path) -> str:
        """Return a path as messages name it."""
        return str(path.relative_to(self.repository) if path.is_relative_to(self.repository) else path)

    @property
    def downloads(self) -> Path:
        return self.repository / "build/downloads"


def layers_in_order(context: LockContext, names: Iterable[str]) -> list[tuple[Layer, tuple[str, ...]]]:
    """List every layer that the named ones need, as parent or for artifacts, parents first, with what lies below."""
    ordered: dict[str, tuple[Layer, tuple[str, ...]]] = {}

    def visit(name: str) -> None:
        stacked = active_chain(context.definition, name, context.choice)
        for index, layer in enumerate(stacked):
            if layer.name in ordered:
                continue
            for artifact in layer.artifacts.of(context.choice):
                visit(artifact.layer)
            ordered[layer.name] = (layer, tuple(below.name for below in stacked[:index]))

    for name in names:
        visit(name)
    return list(ordered.values())


def list_wanted(context: LockContext, names: Iterable[str]) -> list[WantedPackages]:
    """List per layer its packages, the layer below, and the repositories enabled up to it."""
    result = []
    for layer, below in layers_in_order(context, names):
        switched = [
            source
            for name in (*below, layer.name)
            for source in context.definition.layers[name].sources.of(context.choice)
        ]
        base = context.base or f"{context.variant.suite} {' '.join(context.variant.components)}"
        packages = tuple(sorted(set(layer.packages.of(context.choice))))
        parent = below[-1] if below else ""
        result.append(WantedPackages(layer, below, LockRequest(packages, parent, (base, *sorted(set(switched))))))
    return result


def read(context: LockContext) -> dict[str, Slice]:
    """Read the slices of this lock, over those of the lock that it shares layers with."""
    shared = read(context.shared) if context.shared else {}
    for path in sorted(context.directory.glob("*.json")):
        slice_ = from_json(path.read_text(), context.shown(path))
        shared[slice_.layer] = slice_
    return shared


def write(context: LockContext, slices: Iterable[Slice]) -> None:
    below = read(context.shared) if context.shared else {}
    for slice_ in slices:
        target = context.directory / f"{slice_.layer}.json"
        if below.get(slice_.layer) == slice_:
            target.unlink(missing_ok=True)  # one place for what two locks share: they cannot come apart
            continue
        write_changed(target, to_json(slice_))


def write_changed(target: Path, text: str) -> None:
    """Write a file only if its content changes, so that an unchanged file keeps its time."""
    if not target.exists() or target.read_text() != text:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_whole(target, text)


def find_stale(wants: Sequence[WantedPackages], slices: Mapping[str, Slice]) -> list[str]:
    """List layers whose packages were never resolved, or for another request."""
    return [w.layer.name for w in wants if w.layer.name not in slices or slices[w.layer.name].request != w.request]


def archive_origins(context: LockContext, base: BaseFiles | None, names: Iterable[str]) -> list[Origin]:
    own = base.origins if base else apt.bootstrap_origins(context.variant, context.settings)
    vendor = apt.vendor_sources(context.variant)
    listed = [vendor[name] for name in dict.fromkeys(names)]
    return [*own, *(
        apt.fetch_vendor_origin(s, context.definition, context.settings, context.downloads) if s.uri
        else apt.suite_of(s, own)
        for s in listed
    )]  # fmt: skip


@contextmanager
def open_archive(context: LockContext, base: BaseFiles | None, names: Iterable[str]) -> Iterator[Archive]:
    """Open an archive with every repository that these layers use, and fresh lists.

    It is exclusive to this build: another build with other repositories would make most packages look vanished.
    """
    for name in context.settings.mirror_map:
        apt.require_mirror(name, context.variant)
    options = {f"Acquire::{name.removesuffix('_proxy')}::Proxy": uri for name, uri in context.settings.proxies.items()
               if name != "no_proxy"}  # fmt: skip
    if context.settings.ca_certificates:
        options["Acquire::https::CaInfo"] = context.settings.ca_certificates
    directory = context.repository / "build/apt" / context.directory.name
    names = list(names)
    vendor = apt.vendor_sources(context.variant)
    pins = {name: apt.make_preferences(vendor[name]) for name in names if vendor[name].pin is not None}
    with lock_directory(directory):
        archive = Archive(directory, context.choice.arch, options)
        archive.use(archive_origins(context, base, names), pins)
        archive.update()
        yield archive


@contextmanager
def lock_directory(directory: Path) -> Iterator[None]:
    """Keep other builds out of the directory, after waiting for one that has it."""
    directory.mkdir(parents=True, exist_ok=True)
    fd = os.open(directory, os.O_RDONLY)
    try:
        if not locked(fd):
            print(f"build: waiting for {describe_holder(fd)}, which has {directory}", file=sys.stderr, flush=True)
        if not locked(fd, OTHERS_S):
            raise ImagesError("ask the archive", "another build of this tree has it, and does not end", file=directory)
        yield
    finally:
        os.close(fd)


def describe_holder(fd: int) -> str:
    """Name the process that holds the archive's lock, from /proc/locks.

    That list identifies a file by its inode number only: on an overlay or btrfs its device differs from the one that a
    process sees. So the process's own open files are compared. A process that forked and ended is not found.
    """
    own = os.fstat(fd)
    with suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            words = line.split()
            if (
                words[1] != "FLOCK"
                or words[5].rpartition(":")[2] != str(own.st_ino)
                or not has_open_file(words[4], own)
            ):
                continue
            return f"process {words[4]}, another build of this tree"
    return "another build of this tree"


def has_open_file(pid: str, file: os.stat_result) -> bool:
    with suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                if os.path.samestat(os.stat(entry.path), file):  # noqa: PTH116  # the pair of calls belongs together
                    return True
    return False


def resolve(context: LockContext, base: BaseFiles | None, names: Iterable[str]) -> list[Slice]:
    """Resolve every slice again, from one view of the archive."""
    wants = list_wanted(context, names)
    switched = [name for w in wants for name in w.layer.sources.of(context.choice)]
    with open_archive(context, base, switched) as archive:
        return resolve_in(context, base, wants, archive)


def resolve_in(
    context: LockContext, base: BaseFiles | None, wants: Iterable[WantedPackages], archive: Archive
) -> list[Slice]:
    shared = read(context.shared) if context.shared else {}
    stanzas: dict[str, list[str]] = {}
    slices: list[Slice] = []
    for want in wants:
        same = shared.get(want.layer.name)
        if (
            same
            and same.request == want.request
            and all(shared.get(s.layer) == s for s in slices if s.layer in want.below)
        ):
            stanzas[want.layer.name] = list_shared_stanzas(archive, same, context)
            slices.append(same)
            continue
        installed = [base.status] if base else []
        for below in want.below:
            installed += stanzas[below]
        archive.status(installed)
        requested = list(want.request.packages)
        if want.layer.bootstrap and not base:
            requested = ["?essential", "apt", *requested]
        file = want.layer.file
        packages = archive.resolve(requested, file) if requested else ()
        stanzas[want.layer.name] = archive.stanzas(packages)
        slices.append(Slice(want.layer.name, want.request, packages))
    return slices


def list_shared_stanzas(archive: Archive, slice_: Slice, context: LockContext) -> list[str]:
    try:
        return archive.stanzas(slice_.packages)
    except ImagesError as error:
        lock = context.shared.directory if context.shared else context.directory
        option = "--layers" if context.settings.site else "--slurm"
        raise ImagesError(f"share the layer {slice_.layer}", error.why, file=context.shown(lock),
                          hint=f"`build.py lock` without {option} first: the archive moved on") from error  # fmt: skip


def find_vanished(context: LockContext, base: BaseFiles | None, slices: Sequence[Slice]) -> list[Gone]:
    """List the packages of these slices that the archive no longer has."""
    with open_archive(context, base, list_repositories(context, [s.layer for s in slices])) as archive:
        return list_vanished(slices, archive.versions())


def list_repositories(context: LockContext, names: Iterable[str]) -> list[str]:
    """List the repositories of these layers and of all layers below, which stay enabled above."""
    layers = (layer for layer, _ in layers_in_order(context, names))
    return sorted({source for layer in layers for source in layer.sources.of(context.choice)})


# Trust on first use: fetch pinned files without a checksum once, and record the checksum.


def find_unfilled_pins(context: LockContext, layers: Iterable[str]) -> list[Pin]:
    """List the pins without a checksum that these layers use."""
    pins, names = context.definition.versions.pins, list[str]()
    vendor = apt.vendor_sources(context.variant)
    for layer, _ in layers_in_order(context, layers):
        names += layer.downloads.of(context.choice)
        names += [vendor[name].key for name in layer.sources.of(context.choice) if name in vendor and vendor[name].key]
    return [pins[name] for name in dict.fromkeys(names) if pins[name].sha256 == UNFILLED]


def trust_on_first_use(context: LockContext, pin: Pin) -> str:
    """Record the checksum of the file that the server serves today in versions.yaml; return a warning."""
    digest = download_pin(pin, context)
    record_checksum(context.repository / VERSIONS, pin, digest)
    return (f"TRUSTED ON FIRST SIGHT: pins.{pin.name}.sha256 is {digest} from now on, as {pin.url} served it. Nobody"
            f" has compared it with its publisher's word: do, then commit {VERSIONS}")  # fmt: skip


def download_pin(pin: Pin, context: LockContext) -> str:
    """Download a pin's file to where a build looks for it; return its checksum."""
    if urlsplit(pin.url).scheme not in ("https", ""):
        raise ImagesError("trust a file on first sight", f"{pin.url} is not https: the network may have changed"
                          " it", file=VERSIONS, field=f"pins.{pin.name}.url")  # fmt: skip
    return download("trust a file on first sight", pin, context.downloads, context.settings).parent.name


def record_checksum(path: Path, pin: Pin, digest: str) -> None:
    """Write the checksum into the text of versions.yaml, keeping its comments and any other checksum."""
    text = path.read_text()
    block = re.compile(rf"(^  {re.escape(pin.name)}:\n(?:    .*\n)*?    sha256: ){re.escape(UNFILLED)}$", re.MULTILINE)
    written, count = block.subn(rf"\g<1>{digest}", text)
    if count != 1:
        raise ImagesError("write the checksum down", f"no line of its own says {UNFILLED}", file=VERSIONS,
                          field=f"pins.{pin.name}.sha256", hint=f"write it there: {digest}")  # fmt: skip
    write_whole(path, written)
