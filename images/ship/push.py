"""Push an image: tag it, let the engine upload, then read everything back and compare.

The engine uploads only what the registry lacks, so running an interrupted push again resumes it. The registry's tag
moves last: no client sees a partial push under a name.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from images.errors import ImagesError
from images.ship.credentials import Login
from images.ship.registry import Blob, Registry, RegistryError, RegistryPath

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
            left = int(status.split()[2])
            if self.layers.get(layer) is not LayerState.RETRYING or left > self.seconds.get(layer, 0):
                self.retries[layer] = self.retries.get(layer, 0) + 1
            self.seconds[layer] = left
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
            if progress.digest or progress.retries or refused(registry):
                break
            for layer in progress.layers:
                tell({"id": layer, "status": f"Retrying in {pause} seconds"})
            time.sleep(pause)
            progress = attempt(engine, target, registry, retries, tell)
    finally:
        engine.untag(target)  # the name was lent for the push; the image keeps its own
    if not progress.digest:
        raise failure(registry, target, progress)
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


def refused(registry: Registry) -> bool:
    """Tell whether the registry refuses for a reason that another attempt does not change."""
    try:
        registry.check_upload()
    except RegistryError as error:
        return 400 <= error.status < 500
    return False


def failure(registry: Registry, target: str, progress: Progress) -> ImagesError:
    """Explain a failed push by asking the registry: the engine says "500" or retries silently."""
    why = progress.error or "the engine's uploads fail again and again"
    try:
        registry.check_upload()
    except RegistryError as error:
        why = error.why
    arrived = progress.count(LayerState.SENT) + progress.count(LayerState.PRESENT)
    hint = None
    if arrived:
        hint = f"{arrived} of {len(progress.layers)} layers are there: the same command sends only the rest"
    return ImagesError(f"push {target}", why, hint=hint)


def verify(registry: Registry, digest: str, image_id: str, seen: set[Blob]) -> int:
    """Read every byte of the image back by its digest; return its size in the registry."""
    manifest = registry.manifest(digest)
    registry.same(digest, manifest.digest)
    registry.same(image_id, manifest.config.digest)
    diff_ids = registry.config(manifest.config)["rootfs"]["diff_ids"]
    for blob, diff_id in zip(manifest.layers, diff_ids, strict=True):
        if blob not in seen:
            registry.check_layer(blob, diff_id)
            seen.add(blob)
        elif not registry.has(blob):
            raise RegistryError(f"trust {registry.place.host}/{registry.repository}", f"{blob.digest} is not in it")
    return manifest.config.size + sum(blob.size for blob in manifest.layers)
