"""The content of a lock: the packages that each layer adds, by version and checksum. Pure; `lock.py` resolves."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from images import ImagesError

FORMAT = 1


@dataclass(frozen=True, slots=True, order=True)
class LockedPackage:
    """One package file. `path` is its place in the archive, without a host."""

    name: str
    version: str
    arch: str
    size: int
    sha256: str
    origin: str  # the repository that has it
    path: str
    source: str = ""

    @property
    def wanted(self) -> str:
        return f"{self.name}={self.version}"


@dataclass(frozen=True, slots=True)
class LockRequest:
    """The request that a slice was resolved for; another request makes the slice stale."""

    packages: tuple[str, ...]
    parent: str
    origins: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Slice:
    """The packages that one layer adds to those below it."""

    layer: str
    request: LockRequest
    packages: tuple[LockedPackage, ...]

    def list_text(self) -> str:
        """Return the list that the build step reads: one package a line."""
        return "".join(f"{package.wanted} {package.sha256}\n" for package in self.packages)


def to_json(slice_: Slice) -> str:
    """Serialise a slice with one line a package, so that a new lock reads as a diff."""
    head = {"format": FORMAT, "layer": slice_.layer, "request": asdict(slice_.request)}
    return lock_text(head, "packages", slice_.packages)


def lock_text(head: Mapping[str, object], kind: str, items: Iterable[Any]) -> str:
    lines = ",\n".join(f"    {json.dumps(asdict(item))}" for item in items)
    body = f"[\n{lines}\n  ]" if lines else "[]"
    return json.dumps(head, indent=2)[:-2] + f',\n  "{kind}": {body}\n}}\n'


def from_json(text: str, file: str) -> Slice:
    try:
        data: Mapping[str, Any] = json.loads(text)
        if data["format"] != FORMAT:
            raise ImagesError("read the lock", f"format {data['format']} is not {FORMAT}", file=file, hint=RELOCK)
        request_data = data["request"]
        request = LockRequest(tuple(request_data["packages"]), request_data["parent"], tuple(request_data["origins"]))
        return Slice(data["layer"], request, tuple(LockedPackage(**package) for package in data["packages"]))
    except (ValueError, KeyError, TypeError) as error:
        raise ImagesError("read the lock", f"damaged: {error}", file=file, hint=RELOCK) from error


RELOCK = "`build.py lock` resolves it anew"


@dataclass(frozen=True, slots=True)
class Gone:
    """A locked package that the archive no longer has in that form."""

    package: LockedPackage
    layer: str
    now: tuple[str, ...]  # versions that the archive has
    sha256: str = ""  # set where the version is there with another checksum

    def __str__(self) -> str:
        name = f"{self.package.name} {self.package.version} (layer {self.layer})"
        if self.sha256:
            return f"{name}: checksum mismatch, locked {self.package.sha256[:16]}, the archive has {self.sha256[:16]}"
        return f"{name}: gone, the archive has {', '.join(self.now) or 'none'}"


def list_vanished(slices: Iterable[Slice], archive: Mapping[str, Mapping[str, str]]) -> list[Gone]:
    """List every locked package that is missing in the archive, given as name -> version -> sha256."""
    missing = []
    for slice_ in slices:
        for package in slice_.packages:
            versions = archive.get(package.name, {})
            checksum = versions.get(package.version)
            if checksum is None:
                missing.append(Gone(package, slice_.layer, tuple(versions)))
            elif checksum != package.sha256:
                missing.append(Gone(package, slice_.layer, tuple(versions), checksum))
    return missing


def list_changes(before: Iterable[Slice], after: Iterable[Slice]) -> list[str]:
    """List what a new lock changed, one line a package."""
    old = {(s.layer, package.name): package for s in before for package in s.packages}
    new = {(s.layer, package.name): package for s in after for package in s.packages}
    lines = []
    for key in sorted(old.keys() | new.keys()):
        old_package, new_package = old.get(key), new.get(key)
        if old_package == new_package:
            continue
        versions = (package.version if package else "not there" for package in (old_package, new_package))
        lines.append(f"{key[0]}: {key[1]} {' -> '.join(versions)}")
    return lines


def find(packages: Sequence[LockedPackage], name: str) -> LockedPackage | None:
    return next((package for package in packages if package.name == name), None)
