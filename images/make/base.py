"""Read from a base image what the lock needs: its installed packages, and its repositories with their keys."""

from __future__ import annotations

import posixpath
import tarfile
from dataclasses import replace
from pathlib import Path

from images.archive.apt import BaseFiles, Origin, deb822, one_line
from images.definition.spec import UNFILLED
from images.engine.docker import DockerEngine
from images.errors import ImagesError

DEFAULT_KEYS = ("/usr/share/keyrings/ubuntu-archive-keyring.gpg", "/usr/share/keyrings/debian-archive-keyring.gpg")


def pulled(engine: DockerEngine, base: str, arch: str) -> None:
    """Make sure that the base image is present and has the build's architecture."""
    if not engine.has(base):
        engine.pull(base, arch)
    architecture = str(engine.inspect(base).get("Architecture") or arch)
    if architecture != arch:
        raise ImagesError("use the base", f"{base} is for {architecture}, and this build for {arch}",
                          hint=f"--arch {architecture} builds on it")  # fmt: skip


def read_base(engine: DockerEngine, base: str, directory: Path, arch: str) -> BaseFiles:
    """Read a base image without starting it; unpack its keys under `directory`."""
    if base.endswith(UNFILLED):
        raise ImagesError("use the base", f"{base} has no digest yet", file="images/versions.yaml",
                          field="variants", hint="`docker buildx imagetools inspect` shows the digest; compare it with"
                          " its publisher's, then write it there")  # fmt: skip
    pulled(engine, base, arch)
    with engine.container(base) as container:
        files: dict[str, bytes] = {}
        for path in ("/var/lib/dpkg/status", "/etc/apt", "/usr/share/keyrings"):
            try:
                with engine.read_path(container, path) as tar:
                    files |= members(tar, path.rpartition("/")[0])
            except ImagesError:
                if path == "/var/lib/dpkg/status":
                    raise ImagesError("use the base", f"{base} is not a Debian or Ubuntu image") from None
    return BaseFiles(files.pop("/var/lib/dpkg/status").decode(), tuple(origins(files, directory)))


def members(tar: tarfile.TarFile, parent: str) -> dict[str, bytes]:
    """Return files by their path in the image; resolve links among them, such as trixie's keyrings."""
    contents: dict[str, bytes] = {}
    links: dict[str, str] = {}
    for member in tar:
        name = f"{parent}/{member.name}"
        if member.issym():
            links[name] = posixpath.normpath(posixpath.join(posixpath.dirname(name), member.linkname))
        elif member.isfile() and (data := tar.extractfile(member)) is not None:
            contents[name] = data.read()
    for name, target in links.items():
        if target in contents:
            contents[name] = contents[target]
    return contents


def origins(files: dict[str, bytes], directory: Path) -> list[Origin]:
    """Return the base's repositories, from both of apt's formats."""
    origins_found: list[Origin] = []
    for path, data in sorted(files.items()):
        if path == "/etc/apt/sources.list" or (path.startswith("/etc/apt/sources.list.d/") and path.endswith(".list")):
            origins_found += one_line(data.decode())
        elif path.startswith("/etc/apt/sources.list.d/") and path.endswith(".sources"):
            origins_found += deb822(data.decode())
    return [replace(origin, keyring=unpacked(origin.keyring, files, directory)) for origin in origins_found]


def unpacked(keyring: Path, files: dict[str, bytes], directory: Path) -> Path:
    """Unpack a repository's key; without a signed-by, the distribution's own."""
    named = [str(keyring)] if keyring != Path() else list(DEFAULT_KEYS)
    for name in named:
        if name in files:
            target = directory / Path(name).name
            directory.mkdir(parents=True, exist_ok=True)
            target.write_bytes(files[name])
            return target
    raise ImagesError("use the base", f"no key {' or '.join(named)} in the image for its repositories")
