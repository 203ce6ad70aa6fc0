"""Install Python libraries from wheels where the image's own Python finds them beside Debian's modules."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from images.archive import wheels as archive
from images.archive.bootstrap import unpack
from images.archive.lock import LockContext
from images.archive.locked import RELOCK
from images.archive.wheels import Wheel
from images.definition.spec import EntryKind, Layer
from images.errors import ImagesError
from images.make import content
from images.make.content import Entry


def asked(place: LockContext, layer: Layer) -> tuple[Wheel, ...]:
    groups, python = layer.python.of(place.choice), place.definition.versions.python
    if not groups:
        return ()
    locked, file = archive.resolved(place, python)
    locked_wheels = tuple(wheel for group in groups for wheel in locked.of(group, place.choice.arch))
    for group in groups:
        if not locked.of(group, place.choice.arch):
            reason = f"no wheel of {group} is locked for {place.choice.arch}"
            raise ImagesError(f"build layer:{layer.name}", reason, file=file, hint=RELOCK)
    return locked_wheels


def directory(python: str) -> str:
    """Return a directory that is not Debian's own: files unknown to dpkg stay apart from its files."""
    return f"usr/local/lib/python{python}/dist-packages"


def inputs(wanted: tuple[Wheel, ...]) -> dict[str, str]:
    """Return what decides the bytes, for the hash."""
    if not wanted:
        return {}
    digests = {f"wheel {wheel.name}": wheel.sha256 for wheel in wanted}
    return digests | {"layout of libraries": content.file("", Path(__file__)).digest()}


def commands(wanted: tuple[Wheel, ...], python: str) -> list[str]:
    """Compile byte code that holds no time; an image that runs read-only could not write it."""
    compiled = f"python3 -I -m compileall -q --invalidation-mode unchecked-hash /{directory(python)}"
    return [compiled] if wanted else []


def entries(wanted: tuple[Wheel, ...], place: LockContext, kept: Path) -> Iterator[Entry]:
    """Yield the wheels' files with metadata and licences; fetched and checked now, unpacked under `kept`."""
    for wheel in wanted:
        path = archive.fetch(wheel, place.downloads, place.settings)
        into = kept / wheel.name
        into.mkdir()
        for member in unpack(path, into, lambda name: True):
            if member.name.partition("/")[0].endswith(".data"):
                raise ImagesError(f"lay out {wheel.wanted}", f"{member.name} is not a module of its own")
            if member.data is not None:
                to = f"{directory(place.variant.python)}/{member.name}"
                yield Entry(to, EntryKind.FILE, 0o755 if member.executable else 0o644, data=member.data)
