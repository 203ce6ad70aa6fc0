"""What a base image brings to the lock: its installed packages, and its repositories with their keys."""

from __future__ import annotations

import tarfile
from dataclasses import replace
from pathlib import Path

from images.apt import Origin
from images.engine import Engine
from images.errors import ImagesError
from images.origins import BaseFiles

DEFAULT_KEYS = ("/usr/share/keyrings/ubuntu-archive-keyring.gpg", "/usr/share/keyrings/debian-archive-keyring.gpg")


def read_base(engine: Engine, base: str, directory: Path) -> BaseFiles:
    """Look into the image without starting it; keys are unpacked under `directory`."""
    if not engine.has(base):
        engine.pull(base)
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
    found = {}
    for member in tar:
        data = tar.extractfile(member) if member.isfile() else None
        if data is not None:
            found[f"{parent}/{member.name}"] = data.read()
    return found


def origins(files: dict[str, bytes], directory: Path) -> list[Origin]:
    """The base's repositories, in both forms that apt knows."""
    found: list[Origin] = []
    for path, data in sorted(files.items()):
        if path == "/etc/apt/sources.list" or (path.startswith("/etc/apt/sources.list.d/") and path.endswith(".list")):
            found += one_line(data.decode())
        elif path.startswith("/etc/apt/sources.list.d/") and path.endswith(".sources"):
            found += deb822(data.decode())
    return [replace(origin, keyring=unpacked(origin.keyring, files, directory)) for origin in found]


def one_line(text: str) -> list[Origin]:
    found = []
    for line in text.splitlines():
        words = line.split("#")[0].split()
        if not words or words[0] != "deb":
            continue
        key = ""
        if words[1].startswith("["):
            end = next(index for index, word in enumerate(words) if word.endswith("]"))
            for option in " ".join(words[1 : end + 1]).strip("[]").split():
                key = option.removeprefix("signed-by=") if option.startswith("signed-by=") else key
            words = [words[0], *words[end + 1 :]]
        found.append(Origin("base", words[1], (words[2],), tuple(words[3:]), Path(key)))
    return found


def deb822(text: str) -> list[Origin]:
    found = []
    for stanza in text.split("\n\n"):
        lines = [line for line in stanza.splitlines() if line and not line.startswith("#")]
        fields = {key.strip().lower(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
        if "deb" not in fields.get("types", "").split() or fields.get("enabled", "yes") == "no":
            continue
        for uri in fields["uris"].split():
            suites, components = fields["suites"].split(), fields.get("components", "").split()
            found.append(Origin("base", uri, tuple(suites), tuple(components), Path(fields.get("signed-by", ""))))
    return found


def unpacked(keyring: Path, files: dict[str, bytes], directory: Path) -> Path:
    """The repository's key as a file here; without a signed-by, the distribution's own."""
    named = [str(keyring)] if keyring != Path() else list(DEFAULT_KEYS)
    for name in named:
        if name in files:
            target = directory / Path(name).name
            directory.mkdir(parents=True, exist_ok=True)
            target.write_bytes(files[name])
            return target
    raise ImagesError("use the base", f"no key {' or '.join(named)} in the image for its repositories")
