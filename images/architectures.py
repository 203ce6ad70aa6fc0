"""The architectures that images are made for, and what each is called elsewhere. Pure but for asking the kernel."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from images.errors import ImagesError, nearest

BOTH = "both"


@dataclass(frozen=True, slots=True)
class Architecture:
    """Debian's, Kubernetes' and OCI's name for it is the same."""

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
    """This machine's; the kernel's own word where no images are made for it."""
    machine = os.uname().machine
    return next((one.name for one in KNOWN.values() if one.machine == machine), machine)


def listed(text: str) -> tuple[str, ...]:
    """What was asked for, each once and this machine's own first: it is the quicker one to fail."""
    asked = tuple(KNOWN) if text == BOTH else tuple(dict.fromkeys(text.split(","))) if text else (own(),)
    for name in asked:
        if name not in KNOWN:
            raise ImagesError("build for the architecture", f"no images are made for {name!r}", field="arch",
                              hint=f"{nearest(name, KNOWN)}; or {BOTH}")  # fmt: skip
    return tuple(sorted(asked, key=lambda name: name != own()))


def suffixed(name: str, arch: str) -> str:
    """The names of amd64's tags, locks and logs say no architecture: they are older than there was another one."""
    return name if arch == AMD64 else f"{name}-{arch}"
