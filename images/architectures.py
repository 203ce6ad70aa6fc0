"""CPU architectures that images are built for, their names elsewhere, and the emulation that the kernel offers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ground.errors import nearest
from images import ImagesError

BOTH = "both"


@dataclass(frozen=True, slots=True)
class Architecture:
    """An architecture. `name` is Debian's, Kubernetes' and OCI's name for it."""

    name: str
    machine: str  # the kernel's name, and that of wheels
    multiarch: str  # where Debian puts its libraries: /usr/lib/MULTIARCH


AMD64 = "amd64"
KNOWN: Mapping[str, Architecture] = {
    architecture.name: architecture
    for architecture in (
        Architecture(AMD64, "x86_64", "x86_64-linux-gnu"),
        Architecture("arm64", "aarch64", "aarch64-linux-gnu"),
    )
}


def read_own() -> str:
    """Return this machine's architecture, or the kernel's name for one that no images are built for."""
    machine = os.uname().machine
    return next((architecture.name for architecture in KNOWN.values() if architecture.machine == machine), machine)


def parse_architectures(text: str) -> tuple[str, ...]:
    """Parse the setting `arch` into distinct architectures, this machine's own first because it fails soonest."""
    names = tuple(KNOWN) if text == BOTH else tuple(dict.fromkeys(text.split(","))) if text else (read_own(),)
    for name in names:
        if name not in KNOWN:
            raise ImagesError("build for the architecture", f"no images are made for {name!r}", field="arch",
                              hint=f"{nearest(name, KNOWN)}; or {BOTH}")  # fmt: skip
    return tuple(sorted(names, key=lambda name: name != read_own()))


def add_suffix(name: str, arch: str) -> str:
    """Append the architecture to a name. amd64 has no suffix: its names are older than the other architectures."""
    return name if arch == AMD64 else f"{name}-{arch}"


# Run programs of another architecture: detect and register an interpreter (qemu) in the kernel's binfmt_misc.

REGISTRY = Path("/proc/sys/fs/binfmt_misc")
# The kernel compares the first 20 bytes of an ELF file with MAGIC, under MASK: 64 bits, little-endian, an executable or
# a shared object, and the machine in the last two bytes.
MAGIC = "7f454c460201010000000000000000000200{machine}"
MASK = "ffffffffffffff00fffffffffffffffffeffffff"
MACHINES: Mapping[str, tuple[str, str]] = {"amd64": ("3e00", "x86_64"), "arm64": ("b700", "aarch64")}
AT = slice(36, 40)
# What qemu takes from the environment, and nothing else reads. Left to itself it plays an arm64 processor that signs
# the address of every return, and computes each signature by a cipher: python and perl take eight times as long.
SETTINGS: Mapping[str, Mapping[str, str]] = {"amd64": {}, "arm64": {"QEMU_CPU": "cortex-a72"}}


@dataclass(frozen=True, slots=True)
class Interpreter:
    """An interpreter registered in binfmt_misc."""

    name: str
    interpreter: str
    flags: str


def find_interpreter(arch: str, registry: Path = REGISTRY) -> Interpreter | None:
    """Find the interpreter that the kernel uses for this architecture's programs."""
    machine = MACHINES[arch][0]
    try:
        entries = sorted(registry.iterdir())
    except OSError:
        return None
    for path in entries:
        try:
            lines = path.read_text().splitlines()
        except OSError:  # `register` cannot be read, and an entry may go while it is looked for
            continue
        fields = {key: value for key, _, value in (line.partition(" ") for line in lines)}
        magic = fields.get("magic", "")
        if lines[:1] == ["enabled"] and magic.startswith("7f454c46") and magic[AT] == machine:
            return Interpreter(path.name, fields.get("interpreter", ""), fields.get("flags:", ""))
    return None


def explain_refusal(arch: str, registry: Path = REGISTRY) -> str | None:
    """Explain why this machine cannot build for an architecture; None if it can."""
    registered = find_interpreter(arch, registry)
    if registered is None:
        return f"this machine cannot run programs of {arch}: nothing is registered for them (binfmt_misc)"
    if "F" not in registered.flags:
        return (
            f"a container cannot reach {registered.interpreter}, the interpreter registered for programs of {arch}:"
            f" {registry / registered.name} lacks the flag F"
        )
    return None


def name_interpreter(arch: str) -> str:
    """Return the path of Debian's statically linked qemu."""
    return f"/usr/bin/qemu-{MACHINES[arch][1]}-static"


def make_registration(arch: str) -> bytes:
    """Build the line that registers qemu with the kernel.

    The flags: F opens the interpreter now, P passes the program's own name, O and C give a set-uid program its rights.
    """
    machine, name = MACHINES[arch]
    magic, mask = (escape_bytes(text) for text in (MAGIC.format(machine=machine), MASK))
    return f":qemu-{name}:M::{magic}:{mask}:{name_interpreter(arch)}:POCF".encode()


def escape_bytes(text: str) -> str:
    return "".join(f"\\x{text[at : at + 2]}" for at in range(0, len(text), 2))
