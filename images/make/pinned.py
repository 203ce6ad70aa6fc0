"""A layer's inputs from outside, by checksum: pinned files, and the keys of the repositories that it enables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from images.archive import origins
from images.archive.fetch import fetch, file_name
from images.archive.lock import LockContext
from images.definition.spec import AptSource, Layer, Pin
from images.errors import ImagesError, nearest
from images.make import content
from images.make.content import Entry
from images.make.plan import PlannedImage


def pins(place: LockContext) -> Mapping[str, Pin]:
    """Return the pins, each at the site's address if it gives one."""
    found, settings = dict(place.definition.versions.pins), place.settings
    if settings.slurm_tarball:
        if not (settings.slurm_sha256 and settings.slurm_version):
            raise ImagesError("use the tarball", "slurm_sha256 and slurm_version must say what it is",
                              field="slurm_tarball")  # fmt: skip
        given = settings.slurm_version, settings.slurm_tarball, settings.slurm_sha256
        found["slurm"] = Pin("slurm", *given, setting="slurm_tarball")
    for name, address in settings.source_map.items():
        sources = [pin.name for pin in found.values() if pin.commit]
        if name not in sources:
            raise ImagesError("use the setting", f"no source {name!r}", field="sources", hint=nearest(name, sources))
        found[name] = replace(found[name], url=address, setting="sources")
    return found


def switched(layer: Layer, place: LockContext) -> list[AptSource]:
    vendor = origins.vendor_sources(place.variant)
    return [vendor[name] for name in layer.sources.of(place.choice) if name in vendor]


def fetched(image: PlannedImage, place: LockContext) -> list[Entry]:
    """Fetch and verify a layer's pinned files and keys; a skipped build fetches nothing."""
    if image.is_role:
        return []
    layer, found = place.definition.layers[image.name], []
    available = pins(place)
    for name in layer.downloads.of(place.choice):
        pin = available[name]
        path = fetch(origins.in_archive(pin, place.definition, place.settings), place.downloads, place.settings)
        found.append(content.file(f"usr/src/minivm/{file_name(pin)}", path))
    for source in switched(layer, place):
        if not source.uri:
            text = origins.image_suite(source, place.variant)
            found.append(content.file(f"etc/apt/sources.list.d/{source.name}.sources", text.encode()))
            continue
        key = origins.keyring(source, place.definition, place.settings, place.downloads)
        found.append(content.file(origins.image_keyring(source, place.definition), key))
    return found
