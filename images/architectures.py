"""CPU architectures that images are built for, and their names elsewhere. Pure, except for asking the kernel."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from images.errors import ImagesError, nearest

BOTH = "both"


@dataclass(frozen=True, slots=True)
class Architecture:
    """An architecture. `name` is Debian's, Kubernetes' and OCI's name for it."""

    name: str
    machine: str  # the kernel's name, and that of wheels
    multiarch: str  # where Debian puts its libraries: /usr/lib/MULTIARCH


AMD64 = "amd64"
KNOWN: Mapping[str, Architecture] = {
    one.name: one
    for one in (
        Architecture(AMD64, "x86_64", "x86_64-linux-gnu"),
        Architecture("arm64", "aarch64", "aarch64-linux-gnu"),
    )
}


def own() -> str:
    """Return this machine's architecture, or the kernel's name for one that no images are built for."""
    machine = os.uname().machine
    return next((architecture.name for architecture in KNOWN.values() if architecture.machine == machine), machine)


def listed(text: str) -> tuple[str, ...]:
    """Parse the setting `arch` into distinct architectures, this machine's own first because it fails soonest."""
    names = tuple(KNOWN) if text == BOTH else tuple(dict.fromkeys(text.split(","))) if text else (own(),)
    for name in names:
        if name not in KNOWN:
            raise ImagesError("build for the architecture", f"no images are made for {name!r}", field="arch",
                              hint=f"{nearest(name, KNOWN)}; or {BOTH}")  # fmt: skip
    return tuple(sorted(names, key=lambda name: name != own()))


def suffixed(name: str, arch: str) -> str:
    """Append the architecture to a name. amd64 has no suffix: its names are older than the other architectures."""
    return name if arch == AMD64 else f"{name}-{arch}"
