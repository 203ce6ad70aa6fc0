"""Lay out wheels in an image: a vendor's toolkit, and Python libraries.

A toolkit is laid out as it is installed elsewhere: /usr/local/cuda-13.5, linked as /usr/local/cuda. One part holds what
programs need at run time (shared libraries, licences). The other holds headers, static libraries, device code and
compilers; only layers for compiling have it. Libraries go where the image's own Python finds them beside Debian's
modules.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from images import ImagesError
from images.archive import wheels as archive
from images.archive.bootstrap import Member, unpack
from images.archive.lock import LockContext
from images.archive.locked import RELOCK
from images.archive.wheels import Wheel
from images.definition.spec import EntryKind, Layer
from images.make import content
from images.make.content import Entry

ROOT = "usr/local"
# lib/libcudart.so.13, and not lib/stubs/libcuda.so, which replaces the driver's library while a program is linked.
SHARED = re.compile(r"lib64/(?P<name>lib[^/]+?)\.so(\.[0-9]+)*")
PKG_CONFIG = """prefix=/{prefix}
libdir=${{prefix}}/lib64
includedir=${{prefix}}/include

Name: {name}
Description: {wheel}, of CUDA {cuda}
Version: {version}
Libs: -L${{libdir}} -l{name}
Cflags: -I${{includedir}}
"""


@dataclass(frozen=True, slots=True)
class ToolkitWheels:
    """The wheels of one layer: those whose libraries it brings, and those whose other files it brings."""

    cuda: str = ""
    libraries: tuple[Wheel, ...] = ()
    devel: tuple[Wheel, ...] = ()

    @property
    def wheels(self) -> tuple[Wheel, ...]:
        return tuple(sorted({*self.libraries, *self.devel}))

    @property
    def prefix(self) -> str:
        return f"{ROOT}/cuda-{self.cuda}"


def select_wheels(place: LockContext, layer: Layer, below: Sequence[Layer]) -> ToolkitWheels:
    """Return a layer's wheels; a layer for compiling also brings libraries that no layer below has."""
    cuda = archive.choose_cuda(place)
    shared, devel = layer.wheels.of(place.choice), layer.wheels_devel.of(place.choice)
    if cuda is None or not (shared or devel):
        return ToolkitWheels()
    below_groups = {group for lower in below for group in lower.wheels.of(place.choice)}
    locked, file = archive.read_resolved(place, cuda)

    def of(groups: Sequence[str]) -> tuple[Wheel, ...]:
        libraries: list[Wheel] = []
        for group in groups:
            if group not in cuda.wheels:
                raise ImagesError(f"build layer:{layer.name}", f"CUDA {cuda.name} has no wheels {group!r}",
                                  file="images/versions.yaml", field=f"cuda.{cuda.name}.wheels",
                                  hint="another one may: --set cuda=NAME")  # fmt: skip
            if not (wheels := locked.of(group, place.choice.arch)) and cuda.wheels[group]:
                raise ImagesError(f"build layer:{layer.name}", f"no wheel of {', '.join(cuda.wheels[group])} is locked"
                                  f" for {place.choice.arch}", file=file, hint=RELOCK)  # fmt: skip
            libraries += wheels
        return tuple(libraries)

    return ToolkitWheels(cuda.name, of([group for group in (*shared, *devel) if group not in below_groups]), of(devel))


def inputs(wanted: ToolkitWheels) -> Mapping[str, str]:
    """Return the hash's inputs: the wheels, the part of each that the layer takes, and the layout."""
    if not wanted.wheels:
        return {}
    digests = {f"wheel {wheel.name}": wheel.sha256 for wheel in wanted.libraries}
    digests |= {f"wheel {wheel.name} for compiling": wheel.sha256 for wheel in wanted.devel}
    return digests | {"layout of wheels": content.file("", Path(__file__)).digest()}


def entries(wanted: ToolkitWheels, place: LockContext, kept: Path) -> Iterator[Entry]:
    """Yield the wheels' files at their places; fetched and checked now, unpacked under `kept`."""
    prefix = wanted.prefix
    if wanted.libraries:
        yield content.link(f"{ROOT}/cuda", f"cuda-{wanted.cuda}")
        yield content.link(f"{prefix}/lib", "lib64")
        yield content.file(f"etc/ld.so.conf.d/cuda-{wanted.cuda}.conf", f"/{prefix}/lib64\n".encode())
    for wheel in wanted.wheels:
        path = archive.fetch(wheel, place.downloads, place.settings)
        into = kept / wheel.name
        into.mkdir()

        def wants(name: str, wheel: Wheel = wheel) -> bool:
            at = find_place(name, wheel)
            return at is not None and (wheel in wanted.libraries if is_shared(at) else wheel in wanted.devel)

        for member in unpack(path, into, wants):
            yield from lay_out(member, wheel, wanted)


def lay_out(member: Member, wheel: Wheel, wanted: ToolkitWheels) -> Iterator[Entry]:
    at = find_place(member.name, wheel)
    if at is None:
        return
    to = at if at.startswith("usr/") else f"{wanted.prefix}/{at}"
    if member.data is not None:
        yield Entry(to, EntryKind.FILE, 0o755 if member.executable else 0o644, data=member.data)
    if (library := SHARED.fullmatch(at)) and wheel in wanted.devel:
        # The name that a linker looks for, and the way to it.
        name = library["name"]
        if library[2]:
            yield content.link(f"{wanted.prefix}/lib64/{name}.so", at.rpartition("/")[2])
        text = PKG_CONFIG.format(prefix=wanted.prefix, name=name.removeprefix("lib"), wheel=wheel.name,
                                 cuda=wanted.cuda, version=wheel.version)  # fmt: skip
        yield content.file(f"{ROOT}/share/pkgconfig/{name.removeprefix('lib')}.pc", text.encode())


def find_place(name: str, wheel: Wheel) -> str | None:
    """Return a wheel file's place in the toolkit or image; None for what only Python needs."""
    top, _, rest = name.partition("/")
    if top.endswith(".dist-info"):
        licence = rest.removeprefix("licenses/")
        return f"usr/share/doc/{wheel.name}/{licence}" if licence.lower().startswith("license") else None
    # nvidia/cu13/lib/..., nvidia/nccl/include/...: the second name is the wheel's own.
    rest = rest.partition("/")[2]
    if top != "nvidia":
        raise ImagesError(f"lay out {wheel.wanted}", f"{name} is neither the vendor's nor about the wheel")
    if not rest or rest.startswith(".") or rest.endswith(".py"):
        return None
    return f"lib64/{rest.removeprefix('lib/')}" if rest.startswith("lib/") else rest


def is_shared(at: str) -> bool:
    """Tell whether a file belongs to the run-time part: a shared library or a licence."""
    return at.startswith("usr/") or SHARED.fullmatch(at) is not None


def select_libraries(place: LockContext, layer: Layer) -> tuple[Wheel, ...]:
    groups, python = layer.python.of(place.choice), place.definition.versions.python
    if not groups:
        return ()
    locked, file = archive.read_resolved(place, python)
    locked_wheels = tuple(wheel for group in groups for wheel in locked.of(group, place.choice.arch))
    for group in groups:
        if not locked.of(group, place.choice.arch):
            reason = f"no wheel of {group} is locked for {place.choice.arch}"
            raise ImagesError(f"build layer:{layer.name}", reason, file=file, hint=RELOCK)
    return locked_wheels


def library_directory(python: str) -> str:
    """Return a directory that is not Debian's own: files unknown to dpkg stay apart from its files."""
    return f"usr/local/lib/python{python}/dist-packages"


def library_inputs(wanted: tuple[Wheel, ...]) -> dict[str, str]:
    """Return the hash's inputs."""
    if not wanted:
        return {}
    digests = {f"wheel {wheel.name}": wheel.sha256 for wheel in wanted}
    return digests | {"layout of libraries": content.file("", Path(__file__)).digest()}


def compile_commands(wanted: tuple[Wheel, ...], python: str) -> list[str]:
    """Compile byte code that holds no time; an image that runs read-only could not write it."""
    compiled = f"python3 -I -m compileall -q --invalidation-mode unchecked-hash /{library_directory(python)}"
    return [compiled] if wanted else []


def library_entries(wanted: tuple[Wheel, ...], place: LockContext, kept: Path) -> Iterator[Entry]:
    """Yield the wheels' files with metadata and licences; fetched and checked now, unpacked under `kept`."""
    for wheel in wanted:
        path = archive.fetch(wheel, place.downloads, place.settings)
        into = kept / wheel.name
        into.mkdir()
        for member in unpack(path, into, lambda name: True):
            if member.name.partition("/")[0].endswith(".data"):
                raise ImagesError(f"lay out {wheel.wanted}", f"{member.name} is not a module of its own")
            if member.data is not None:
                to = f"{library_directory(place.variant.python)}/{member.name}"
                yield Entry(to, EntryKind.FILE, 0o755 if member.executable else 0o644, data=member.data)
