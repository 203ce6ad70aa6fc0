"""Unpack a wheel without running any of it: check its own list of checksums, within bounds.

The lock's checksum covers the whole file; a publisher's bad wheel must still not write outside its directory.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import lzma
import stat
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from images.errors import ImagesError

# The largest that the vendor has, a compiler of 100 MB or cuBLAS of 600, are far below.
MOST_FILES, MOST_BYTES = 50_000, 4 << 30
CHUNK = 1 << 20
# What the formats' readers raise besides what anything may.
BROKEN = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, csv.Error)


@dataclass(frozen=True, slots=True)
class Member:
    """One file of a wheel; `data` is where it was unpacked, None if it was not wanted."""

    name: str
    executable: bool
    data: Path | None


def unpack(wheel: Path, into: Path, wanted: Callable[[str], bool]) -> Iterator[Member]:
    """Check every file; write those that `wanted` selects under `into`, by number and not by name."""
    what = f"unpack {wheel.name}"
    try:
        with zipfile.ZipFile(wheel) as archive:
            infos = [info for info in archive.infolist() if not info.is_dir()]
            if len(infos) > MOST_FILES or sum(info.file_size for info in infos) > MOST_BYTES:
                raise ImagesError(what, f"it holds more than {MOST_FILES} files or {MOST_BYTES >> 30} GiB")
            listed = record(archive, infos, what)
            for number, info in enumerate(infos):
                check_name(info, what)
                data = into / str(number) if wanted(info.filename) else None
                found = copied(archive, info, data)
                if info.filename in listed and listed[info.filename] != found:
                    raise ImagesError(what, f"{info.filename} is not what its RECORD says")
                if info.filename not in listed and not info.filename.endswith(".dist-info/RECORD"):
                    raise ImagesError(what, f"{info.filename} does not stand in its RECORD")
                yield Member(info.filename, bool(info.external_attr >> 16 & 0o111), data)
    except (*BROKEN, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
        raise ImagesError(what, f"damaged: {error}") from error


def check_name(info: zipfile.ZipInfo, what: str) -> None:
    parts = info.filename.split("/")
    if info.filename.startswith("/") or not all(parts) or {".", ".."} & set(parts) or not info.filename.isprintable():
        raise ImagesError(what, f"{info.filename!r} is not a path inside it")
    kind = stat.S_IFMT(info.external_attr >> 16)
    if kind not in (0, stat.S_IFREG):
        raise ImagesError(what, f"{info.filename} is not a plain file")


def record(archive: zipfile.ZipFile, infos: list[zipfile.ZipInfo], what: str) -> dict[str, tuple[str, int]]:
    """Read the wheel's list of files: name -> checksum and size. Refuses duplicate names."""
    names = [info.filename for info in infos]
    if len(set(names)) != len(names):
        raise ImagesError(what, "it holds a file twice")
    records = [info for info in infos if info.filename.count("/") == 1 and info.filename.endswith(".dist-info/RECORD")]
    if len(records) != 1:
        raise ImagesError(what, "it has no RECORD of its files")
    if records[0].file_size > 32 * CHUNK:
        raise ImagesError(what, "its RECORD is larger than any list of files")
    listed = {}
    for row in csv.reader(archive.read(records[0]).decode().splitlines()):
        name, checksum, size = row
        if checksum.startswith("sha256="):
            digest = base64.urlsafe_b64decode(checksum.removeprefix("sha256=") + "==").hex()
            listed[name] = (digest, int(size))
    return listed


def copied(archive: zipfile.ZipFile, info: zipfile.ZipInfo, target: Path | None) -> tuple[str, int]:
    """Read one member once; zipfile returns no more bytes than the member's header states."""
    digest, size = hashlib.sha256(), 0
    with archive.open(info) as source, target.open("xb") if target else nullcontext() as copy:
        while piece := source.read(CHUNK):
            digest.update(piece)
            size += len(piece)
            if copy:
                copy.write(piece)
    return digest.hexdigest(), size
