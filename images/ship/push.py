"""Push an image: tag it, let the engine upload, then read everything back and compare.

The engine uploads only what the registry lacks, so running an interrupted push again resumes it. The registry's tag
moves last: no client sees a partial push under a name.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from images import ImagesError
from images.engine.store import descriptor
from images.ship import provenance
from images.ship.provenance import INDEX, Descriptor
from images.ship.registry import Blob, Login, Registry, RegistryError, RegistryPath

# The engine tries a failed upload five times, with longer and longer pauses, 50 seconds in all.
ENGINES_OWN_RETRIES = 4
# One with containerd's image store does not: then it is done here, as long.
PAUSES = (5, 10, 15, 20)

# The line that ends a push, and the only form of the digest that every engine gives.
DONE = re.compile(r"\S+: digest: (?P<digest>sha256:[0-9a-f]{64}) size: \d+")

Event = Mapping[str, Any]


class PushEngine(Protocol):
    """The engine's interface that a push needs."""

    def image_id(self, reference: str) -> str: ...
    def tag(self, reference: str, target: str) -> None: ...
    def untag(self, target: str) -> None: ...
    def push(self, target: str, login: Mapping[str, str] | None) -> Generator[Event, None, None]: ...


class LayerState(Enum):
    WAITING = "waiting"
    RETRYING = "retrying"
    SENT = "sent"
    PRESENT = "present"


@dataclass(slots=True)
class Progress:
    """The engine's reports about one push so far."""

    layers: dict[str, LayerState] = field(default_factory=dict)
    retries: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, int] = field(default_factory=dict)
    digest: str = ""
    error: str = ""

    def take(self, event: Event) -> None:
        if "error" in event:
            self.error = str(event["error"])
        elif done := DONE.fullmatch(str(event.get("status", ""))):
            self.digest = done["digest"]
        elif event.get("id") and event.get("status"):
            self._layer(event["id"], event["status"])

    def _layer(self, layer: str, status: str) -> None:
        if status.startswith("Retrying in "):
            # The engine counts the seconds down: the first of a count is a new attempt.
            remaining = int(status.split()[2])
            if self.layers.get(layer) is not LayerState.RETRYING or remaining > self.seconds.get(layer, 0):
                self.retries[layer] = self.retries.get(layer, 0) + 1
            self.seconds[layer] = remaining
        self.layers[layer] = state_of(status)

    def count(self, state: LayerState) -> int:
        return sum(item is state for item in self.layers.values())


def state_of(status: str) -> LayerState:
    if status == "Pushed":
        return LayerState.SENT
    if status == "Layer already exists" or status.startswith("Mounted from"):
        return LayerState.PRESENT
    return LayerState.RETRYING if status.startswith("Retrying") else LayerState.WAITING


@dataclass(frozen=True, slots=True)
class Pushed:
    """One image in the registry, verified by reading it back."""

    reference: str  # host/path/name@sha256:...
    tag: str
    digest: str
    sent: int
    present: int
    size: int


def push(
    engine: PushEngine,
    source: str,
    place: RegistryPath,
    name: str,
    tag: str,
    login: Login | None,
    *,
    seen: set[Blob] | None = None,
    retries: int = ENGINES_OWN_RETRIES,
    tell: Callable[[Event], None] = lambda event: None,
) -> Pushed:
    """Push the engine's image `source` as `place/name:tag`.

    `seen` holds what this run has already read back, so that layers shared by several images are read once.
    """
    registry = Registry(place, name, login)
    target = f"{place.host}/{registry.repository}:{tag}"
    progress = upload(engine, source, target, registry, retries, tell)
    size = verify(registry, progress.digest, engine.image_id(source), seen if seen is not None else set())
    reference = f"{place.host}/{registry.repository}@{progress.digest}"
    return Pushed(
        reference, target, progress.digest, progress.count(LayerState.SENT), progress.count(LayerState.PRESENT), size
    )


def upload(
    engine: PushEngine, source: str, target: str, registry: Registry, retries: int, tell: Callable[[Event], None]
) -> Progress:
    engine.tag(source, target)
    try:
        progress = attempt(engine, target, registry, retries, tell)
        for pause in PAUSES[:retries]:
            if progress.digest or progress.retries or is_refused(registry):
                break
            for layer in progress.layers:
                tell({"id": layer, "status": f"Retrying in {pause} seconds"})
            time.sleep(pause)
            progress = attempt(engine, target, registry, retries, tell)
    finally:
        engine.untag(target)  # the name was lent for the push; the image keeps its own
    if not progress.digest:
        raise explain_failure(registry, target, progress)
    return progress


def attempt(
    engine: PushEngine, target: str, registry: Registry, retries: int, tell: Callable[[Event], None]
) -> Progress:
    progress = Progress()
    with contextlib.closing(engine.push(target, registry.login.for_engine() if registry.login else None)) as events:
        for event in events:
            progress.take(event)
            tell(event)
            if progress.error or max(progress.retries.values(), default=0) > retries:
                break
    return progress


def is_refused(registry: Registry) -> bool:
    """Tell whether the registry refuses for a reason that another attempt does not change."""
    try:
        registry.check_upload()
    except RegistryError as error:
        return 400 <= error.status < 500
    return False


def explain_failure(registry: Registry, target: str, progress: Progress) -> ImagesError:
    """Explain a failed push by asking the registry: the engine says "500" or retries silently."""
    reason = progress.error or "the engine's uploads fail again and again"
    try:
        registry.check_upload()
    except RegistryError as error:
        reason = error.why
    arrived = progress.count(LayerState.SENT) + progress.count(LayerState.PRESENT)
    hint = None
    if arrived:
        hint = f"{arrived} of {len(progress.layers)} layers are there: the same command sends only the rest"
    return ImagesError(f"push {target}", reason, hint=hint)


def verify(registry: Registry, digest: str, image_id: str, seen: set[Blob]) -> int:
    """Read every byte of the image back by its digest; return its size in the registry."""
    manifest = registry.read_manifest(digest)
    registry.require_same(digest, manifest.digest)
    registry.require_same(image_id, manifest.config.digest)
    diff_ids = registry.read_config(manifest.config)["rootfs"]["diff_ids"]
    for blob, diff_id in zip(manifest.layers, diff_ids, strict=True):
        if blob not in seen:
            registry.check_layer(blob, diff_id)
            seen.add(blob)
        elif not registry.has(blob):
            raise RegistryError(f"trust {registry.place.host}/{registry.repository}", f"{blob.digest} is not in it")
    return manifest.config.size + sum(blob.size for blob in manifest.layers)


# One name for an image of several architectures: an OCI index that names each image by digest.
#
# A client pulls the image for its machine. The tag is a hash of the content, like every tag.


def make_tag(images: Mapping[str, tuple[str, str]]) -> str:
    """Build the tag from each architecture's tag and hash: their common part, and a hash of the hashes."""
    stems = {text.rpartition("-")[0].removesuffix(f"-{arch}") for arch, (text, _) in images.items()}
    if len(stems) != 1:
        raise ImagesError("put the architectures under one tag", f"they differ: {', '.join(sorted(stems))}",
                          hint="`build.py --arch both lock` resolves both from the archive of today")  # fmt: skip
    hashes = json.dumps({arch: whole for arch, (_, whole) in images.items()}, sort_keys=True)
    return f"{stems.pop()}-{hashlib.sha256(hashes.encode()).hexdigest()[:12]}"


def serialise_index(images: Mapping[str, Descriptor]) -> bytes:
    """Serialise the index; the same bytes for the same images, in any order of pushes."""
    listed = [{**image, "platform": {"architecture": arch, "os": "linux"}} for arch, image in sorted(images.items())]
    return json.dumps({"schemaVersion": 2, "mediaType": INDEX, "manifests": listed}, sort_keys=True).encode()


def put_index(registry: Registry, tag: str, images: Mapping[str, Descriptor]) -> str:
    """Push the index and return its digest. The images are there already, so no client sees a partial name."""
    data = serialise_index(images)
    digest = str(descriptor(INDEX, data)["digest"])
    provenance.put_manifest(registry, tag, INDEX, data)
    registry.require_same(digest, str(provenance.read_subject(registry, tag)["digest"]))
    return digest


def list_images(registry: Registry, whole: Descriptor) -> dict[str, dict[str, Any]]:
    """Return the images that an index names, by architecture; a single image under an empty name."""
    if whole["mediaType"] != INDEX:
        return {"": dict(whole)}
    digest = str(whole["digest"])
    data = registry.read_by_digest(f"/manifests/{digest}", digest, {"Accept": INDEX})
    images_found: dict[str, dict[str, Any]] = {}
    listed = provenance.parse_manifests(registry, data)
    # Every account that may push may make an index: do not let one hide an image among very many.
    if len(listed) > provenance.MOST:
        raise RegistryError(registry.describe("read"), f"{digest} names {len(listed)} images")
    for item in listed:
        platform = item.get("platform")
        arch = str(platform.get("architecture", "")) if isinstance(platform, dict) else ""
        if not arch or arch in images_found:
            raise RegistryError(registry.describe("read"), f"{digest} does not say once of each image what it is for")
        images_found[arch] = item
    if not images_found:
        raise RegistryError(registry.describe("read"), f"{digest} names no image")
    return images_found
