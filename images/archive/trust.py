"""Trust on first use: fetch pinned files without a checksum once, and record the checksum."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urlsplit

from ground.files import write_whole
from images.archive import origins
from images.archive.fetch import VERSIONS, download
from images.archive.lock import LockContext, layers_in_order
from images.definition.spec import UNFILLED, Pin
from images.errors import ImagesError


def unfilled(place: LockContext, layers: Iterable[str]) -> list[Pin]:
    """List the pins without a checksum that these layers use."""
    pins, names = place.definition.versions.pins, list[str]()
    vendor = origins.vendor_sources(place.variant)
    for layer, _ in layers_in_order(place, layers):
        names += layer.downloads.of(place.choice)
        names += [vendor[name].key for name in layer.sources.of(place.choice) if name in vendor and vendor[name].key]
    return [pins[name] for name in dict.fromkeys(names) if pins[name].sha256 == UNFILLED]


def first(place: LockContext, pin: Pin) -> str:
    """Record the checksum of the file that the server serves today in versions.yaml; return a warning."""
    digest = seen(pin, place)
    record(place.repository / VERSIONS, pin, digest)
    return (f"TRUSTED ON FIRST SIGHT: pins.{pin.name}.sha256 is {digest} from now on, as {pin.url} served it. Nobody"
            f" has compared it with its publisher's word: do, then commit {VERSIONS}")  # fmt: skip


def seen(pin: Pin, place: LockContext) -> str:
    """Download a pin's file to where a build looks for it; return its checksum."""
    if urlsplit(pin.url).scheme not in ("https", ""):
        raise ImagesError("trust a file on first sight", f"{pin.url} is not https: the network may have changed"
                          " it", file=VERSIONS, field=f"pins.{pin.name}.url")  # fmt: skip
    return download("trust a file on first sight", pin, place.downloads, place.settings).parent.name


def record(path: Path, pin: Pin, digest: str) -> None:
    """Write the checksum into the text of versions.yaml, keeping its comments and any other checksum."""
    text = path.read_text()
    block = re.compile(rf"(^  {re.escape(pin.name)}:\n(?:    .*\n)*?    sha256: ){re.escape(UNFILLED)}$", re.MULTILINE)
    written, count = block.subn(rf"\g<1>{digest}", text)
    if count != 1:
        raise ImagesError("write the checksum down", f"no line of its own says {UNFILLED}", file=VERSIONS,
                          field=f"pins.{pin.name}.sha256", hint=f"write it there: {digest}")  # fmt: skip
    write_whole(path, written)
