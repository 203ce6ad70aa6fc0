"""Documents attached to an image in the registry: OCI artifacts whose subject is the image.

A registry without the referrers interface keeps them too; their list is then a tag of the image's digest, as the
distribution specification defines.
"""

from __future__ import annotations

import json
import urllib.parse
from collections.abc import Iterator, Mapping
from typing import Any

from images.engine.store import MANIFEST, descriptor
from images.ship.registry import DIGEST, LARGEST, MANIFEST_TYPES, Registry, RegistryError

INDEX = "application/vnd.oci.image.index.v1+json"
EMPTY = "application/vnd.oci.empty.v1+json"
NOTHING = b"{}"
# Whoever may push may attach: of more than this, nobody looks at the rest.
MOST = 64

Descriptor = Mapping[str, Any]


def subject(registry: Registry, reference: str) -> dict[str, Any]:
    """Return the descriptor of the image under a tag or digest, computed from the received bytes."""
    with registry.answer("GET", f"/manifests/{reference}", {"Accept": ", ".join((*MANIFEST_TYPES, INDEX))}) as answer:
        media_type = answer.headers.get("Content-Type", MANIFEST).partition(";")[0]
        found = descriptor(media_type, registry.whole(answer))
    if reference.startswith("sha256:"):
        registry.same(reference, found["digest"])
    return found


def attach(registry: Registry, image: Descriptor, artifact_type: str, payload: bytes) -> str:
    """Attach a document to an image; return its digest. Attaching the same document again changes nothing."""
    layer = put_blob(registry, artifact_type, payload)
    data = json.dumps(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "artifactType": artifact_type,
            "config": put_blob(registry, EMPTY, NOTHING),
            "layers": [layer],
            "subject": dict(image),
        },
        sort_keys=True,
    ).encode()
    made = descriptor(MANIFEST, data)
    headers = put_manifest(registry, made["digest"], MANIFEST, data)
    if "OCI-Subject" not in headers:
        listed = index(registry, f"/manifests/{fallback(image)}") or []
        others = [item for item in listed if item.get("digest") != made["digest"]]
        whole = {
            "schemaVersion": 2,
            "mediaType": INDEX,
            "manifests": [*others, {**made, "artifactType": artifact_type}],
        }
        put_manifest(registry, fallback(image), INDEX, json.dumps(whole, sort_keys=True).encode())
    return str(made["digest"])


def attached(registry: Registry, image: Descriptor, artifact_type: str) -> Iterator[bytes]:
    """Yield the documents of a type attached to an image. Only their digests are checked here."""
    listed = index(registry, f"/referrers/{image['digest']}")
    if listed is None:
        listed = index(registry, f"/manifests/{fallback(image)}") or []
    for item in [item for item in listed if item.get("artifactType") == artifact_type][-MOST:]:
        digest = str(item.get("digest", ""))
        data = registry.named(f"/manifests/{digest}", digest, {"Accept": MANIFEST})
        try:
            (layer,) = json.loads(data)["layers"]
            wanted = str(layer["digest"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise RegistryError(registry.what("read"), f"{digest} is not one document") from error
        yield registry.named(f"/blobs/{wanted}", wanted)


def fallback(image: Descriptor) -> str:
    return str(image["digest"]).replace(":", "-")


def index(registry: Registry, path: str) -> list[dict[str, Any]] | None:
    """Return the descriptors of a list; None if there is no such list."""
    try:
        with registry.answer("GET", path, {"Accept": INDEX}) as answer:
            return manifests(registry, registry.whole(answer))
    except RegistryError as error:
        if error.status == 404:
            return None
        raise


def manifests(registry: Registry, data: bytes) -> list[dict[str, Any]]:
    try:
        found = json.loads(data)["manifests"]
        if not isinstance(found, list) or not all(DIGEST.fullmatch(item["digest"]) for item in found):
            raise ValueError("not a list of descriptors")
        return found
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise RegistryError(registry.what("read"), "its list of referrers is none") from error


def put_blob(registry: Registry, media_type: str, data: bytes) -> dict[str, Any]:
    made = descriptor(media_type, data)
    if len(data) > LARGEST:
        raise RegistryError(registry.what("attach to"), f"a document of more than {LARGEST >> 20} MiB")
    with registry.answer("POST", "/blobs/uploads/") as answer:
        location = urllib.parse.urljoin(f"{registry.base}/", answer.headers.get("Location", ""))
    if not location.startswith(f"{registry.base}/"):
        # The login is the registry's, and nobody else's.
        raise RegistryError(registry.what("attach to"), f"it takes uploads elsewhere: {location}")
    joined = f"{location}{'&' if '?' in location else '?'}digest={urllib.parse.quote(made['digest'])}"
    with registry.answer("PUT", joined, {"Content-Type": "application/octet-stream"}, data):
        return made


def put_manifest(registry: Registry, reference: str, media_type: str, data: bytes) -> Mapping[str, str]:
    with registry.answer("PUT", f"/manifests/{reference}", {"Content-Type": media_type}, data) as answer:
        return dict(answer.headers.items())
