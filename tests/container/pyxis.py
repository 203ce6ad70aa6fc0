"""Images with enroot and pyxis, where their sources are at hand, and a small image for jobs to run in."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

import pytest

from images.settings import read
from tests.container.conftest import IMAGES, docker
from tests.container.oci_layout import entry, packed
from tests.container.registryd import Registryd
from tests.slurm import built

SOURCES = ("pyxis", "enroot")
# By which a task starts, and looks around.
PROGRAMS = ("cat", "env", "id", "ls", "sh", "sleep", "stat", "touch")


def build(*roles: str) -> None:
    """Build from given sources, since a machine may reach no forge to get them."""
    missing = [name for name in SOURCES if name not in read(os.environ).source_map]
    if missing:
        pytest.skip(f"give the sources of {' and '.join(missing)}: MINIVM_BUILD_SOURCES=pyxis=PATH,enroot=PATH")
    for role in roles:
        built(IMAGES, role)


def small_root() -> bytes:
    """Archive this machine's shell and a few programs, with the libraries that they name."""
    found: dict[str, Path] = {}
    for name in PROGRAMS:
        program = Path("/usr/bin", name).resolve()
        found[f"usr/bin/{name}"] = program
        said = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
        for word in said.split():
            if word.startswith("/"):
                path = Path(word)
                found[str(path).lstrip("/").removeprefix("usr/").join(("usr/", ""))] = path.resolve()
    links = [entry(name, type=b"2", linkname=f"usr/{name}") for name in ("bin", "lib", "lib64")]
    folders = [entry(name, type=b"5") for name in ("etc", "tmp", "proc", "sys", "dev", "var", "run")]
    files = [entry(name, path.read_bytes()) for name, path in sorted(found.items())]
    return packed([*links, *folders, entry("etc/debian_version", b"small\n"), *files])


def push(registry: Registryd, name: str) -> str:
    """Its address there, as enroot's users write it."""
    there = f"127.0.0.1:{registry.port}/{name}"
    with tempfile.NamedTemporaryFile() as file:
        file.write(small_root())
        file.flush()
        docker("import", file.name, there)
    docker("push", "--quiet", there)
    docker("rmi", there)
    return f"127.0.0.1:{registry.port}#{name}"
