"""Pinned files that nobody has compared with their publisher yet: fetched once, and held to what they were then."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from ground.files import write_whole
from images.archive import origins
from images.archive.fetch import connection_errors, file_name, opened
from images.archive.lock import Place, layers_in_order
from images.definition.spec import UNFILLED, Pin
from images.errors import ImagesError

VERSIONS = "images/versions.yaml"
# HPC-X, the largest, has one and a half.
LARGEST = 16 << 30


def unfilled(place: Place, layers: Iterable[str]) -> list[Pin]:
    """The pins without a checksum that these layers are made with."""
    pins, found = place.definition.versions.pins, list[str]()
    vendor = origins.vendor_sources(place.variant)
    for layer, _ in layers_in_order(place, layers):
        found += layer.downloads.of(place.choice)
        found += [vendor[name].key for name in layer.sources.of(place.choice) if name in vendor and vendor[name].key]
    return [pins[name] for name in dict.fromkeys(found) if pins[name].sha256 == UNFILLED]


def first(place: Place, pin: Pin) -> str:
    """The file as it is served today; what it is from now on stands in versions.yaml."""
    digest = seen(pin, place)
    record(place.repository / VERSIONS, pin, digest)
    return (f"TRUSTED ON FIRST SIGHT: pins.{pin.name}.sha256 is {digest} from now on, as {pin.url} served it. Nobody"
            f" has compared it with its publisher's word: do, then commit {VERSIONS}")  # fmt: skip


def seen(pin: Pin, place: Place) -> str:
    """Its checksum; the file stays where a build looks for it."""
    if urlsplit(pin.url).scheme not in ("https", ""):
        raise ImagesError("trust a file on first sight", f"{pin.url} is not https: whoever is on the way may have made"
                          " it", file=VERSIONS, field=f"pins.{pin.name}.url")  # fmt: skip
    digest, size = hashlib.sha256(), 0
    place.downloads.mkdir(parents=True, exist_ok=True)
    temporary = place.downloads / f".{pin.name}.{os.getpid()}"
    try:
        with temporary.open("xb") as target, opened(pin, place.settings) as source:
            while piece := source.read(1 << 20):
                size += len(piece)
                if size > LARGEST:
                    raise OSError("it does not end")
                digest.update(piece)
                target.write(piece)
            target.flush()
            os.fsync(target.fileno())
        if not size:
            raise OSError("it is empty")
        kept = place.downloads / digest.hexdigest() / file_name(replace(pin, sha256=digest.hexdigest()))
        kept.parent.mkdir(exist_ok=True)
        temporary.chmod(0o644)
        temporary.rename(kept)
    except connection_errors() as error:
        why = getattr(error, "reason", None) or error
        raise ImagesError("trust a file on first sight", f"{pin.url}: {why}", file=VERSIONS,
                          field=f"pins.{pin.name}") from error  # fmt: skip
    finally:
        temporary.unlink(missing_ok=True)
    return digest.hexdigest()


def record(path: Path, pin: Pin, digest: str) -> None:
    """In the text, whose comments stay; never over a checksum that stands there."""
    text = path.read_text()
    block = re.compile(rf"(^  {re.escape(pin.name)}:\n(?:    .*\n)*?    sha256: ){re.escape(UNFILLED)}$", re.MULTILINE)
    written, count = block.subn(rf"\g<1>{digest}", text)
    if count != 1:
        raise ImagesError("write the checksum down", f"no line of its own says {UNFILLED}", file=VERSIONS,
                          field=f"pins.{pin.name}.sha256", hint=f"write it there: {digest}")  # fmt: skip
    write_whole(path, written)
