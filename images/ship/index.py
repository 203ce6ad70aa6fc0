"""One name for an image of several architectures: an OCI index that names each image by digest.

A client pulls the image for its machine. The tag is a hash of the content, like every tag.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from images.engine.store import descriptor
from images.errors import ImagesError
from images.ship import referrers
from images.ship.referrers import INDEX, Descriptor
from images.ship.registry import Registry, RegistryError


def tag(images: Mapping[str, tuple[str, str]]) -> str:
    """Build the tag from each architecture's tag and hash: their common part, and a hash of the hashes."""
    stems = {text.rpartition("-")[0].removesuffix(f"-{arch}") for arch, (text, _) in images.items()}
    if len(stems) != 1:
        raise ImagesError("put the architectures under one tag", f"they differ: {', '.join(sorted(stems))}",
                          hint="`build.py --arch both lock` resolves both from the archive of today")  # fmt: skip
    hashes = json.dumps({arch: whole for arch, (_, whole) in images.items()}, sort_keys=True)
    return f"{stems.pop()}-{hashlib.sha256(hashes.encode()).hexdigest()[:12]}"


def document(images: Mapping[str, Descriptor]) -> bytes:
    """Serialise the index; the same bytes for the same images, in whatever order they were pushed."""
    listed = [{**image, "platform": {"architecture": arch, "os": "linux"}} for arch, image in sorted(images.items())]
    return json.dumps({"schemaVersion": 2, "mediaType": INDEX, "manifests": listed}, sort_keys=True).encode()


def put(registry: Registry, tag: str, images: Mapping[str, Descriptor]) -> str:
    """Push the index and return its digest. The images are there already, so no client sees a partial name."""
    data = document(images)
    digest = str(descriptor(INDEX, data)["digest"])
    referrers.put_manifest(registry, tag, INDEX, data)
    registry.same(digest, str(referrers.subject(registry, tag)["digest"]))
    return digest


def images(registry: Registry, whole: Descriptor) -> dict[str, dict[str, Any]]:
    """Return the images that an index names, by architecture; a single image under an empty name."""
    if whole["mediaType"] != INDEX:
        return {"": dict(whole)}
    digest = str(whole["digest"])
    data = registry.named(f"/manifests/{digest}", digest, {"Accept": INDEX})
    found: dict[str, dict[str, Any]] = {}
    listed = referrers.manifests(registry, data)
    # Whoever may push may make an index: what is behind so many must not pass unseen.
    if len(listed) > referrers.MOST:
        raise RegistryError(registry.what("read"), f"{digest} names {len(listed)} images")
    for item in listed:
        platform = item.get("platform")
        arch = str(platform.get("architecture", "")) if isinstance(platform, dict) else ""
        if not arch or arch in found:
            raise RegistryError(registry.what("read"), f"{digest} does not say once of each image what it is for")
        found[arch] = item
    if not found:
        raise RegistryError(registry.what("read"), f"{digest} names no image")
    return found
