"""Run apt-get against private directories: list what an archive has, and resolve a set of packages.

The host's apt state is neither read nor changed, and no root is needed.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from ground.commands import ran
from images.archive.locked import LockedPackage
from images.errors import ImagesError, nearest

URI = re.compile(r"^'(?P<uri>[^']+)' (?P<file>\S+) (?P<size>\d+) SHA256:(?P<sha256>[0-9a-f]{64})$")


@dataclass(frozen=True, slots=True)
class Origin:
    """One package repository, as apt is configured for it."""

    name: str
    uri: str
    suites: tuple[str, ...]
    components: tuple[str, ...]
    keyring: Path
    dated: bool = True  # False: an index past its date is taken, too

    def lines(self, signed_by: str = "") -> str:
        date = "" if self.dated else " check-valid-until=no"
        option = f"[signed-by={signed_by or self.keyring}{date}] "
        return "".join(f"deb {option}{self.uri} {' '.join((suite, *self.components))}\n" for suite in self.suites)


class Archive:
    """A private apt: its sources, lists and installed state."""

    def __init__(self, directory: Path, arch: str, options: Mapping[str, str]) -> None:
        self.directory = directory
        for name in (
            "state/lists/partial",
            "cache/archives/partial",
            "etc/sources.list.d",
            "etc/preferences.d",
            "etc/apt.conf.d",
        ):
            (directory / name).mkdir(parents=True, exist_ok=True)
        self.status(())
        settings = {
            "Dir::State": directory / "state",
            "Dir::State::status": directory / "status",
            "Dir::Cache": directory / "cache",
            "Dir::Etc": directory / "etc",
            "Dir::Etc::trusted": "/dev/null",
            "Dir::Etc::trustedparts": "/dev/null",
            "APT::Architecture": arch,
            "APT::Architectures": arch,
            "APT::Sandbox::User": "root",
            "APT::Install-Recommends": "false",
            "APT::Get::List-Cleanup": "false",
            "Acquire::Languages": "none",
            "Acquire::GzipIndexes": "false",
            "Acquire::ForceHash": "SHA256",
            "Acquire::Retries": "2",
            "Debug::NoLocking": "true",
            **options,
        }
        text = "".join(f'{key} "{value}";\n' for key, value in settings.items())
        (directory / "apt.conf").write_text(text)
        self.origins: list[Origin] = []

    def status(self, stanzas: Iterable[str]) -> None:
        """Set the packages that count as installed."""
        (self.directory / "status").write_text("\n".join(stanza.strip() + "\n" for stanza in stanzas))

    def use(self, origins: Sequence[Origin], pins: Mapping[str, str]) -> None:
        self.origins = list(origins)
        (self.directory / "etc/sources.list").write_text("".join(origin.lines() for origin in origins))
        for name, text in pins.items():
            (self.directory / f"etc/preferences.d/{name}.pref").write_text(text)

    def update(self) -> None:
        done = self.run(["apt-get", "update", "-qq", "-o", "APT::Update::Error-Mode=any"])
        if done.returncode != 0:
            uris = ", ".join(dict.fromkeys(origin.uri for origin in self.origins))
            raise ImagesError("reach the mirror", f"apt-get update failed for {uris}:\n{errors_of(done.stderr)}",
                              hint="set a reachable one: --set mirrors=NAME=URI, or a proxy: --set http_proxy=URI"
                              )  # fmt: skip

    def resolve(self, wanted: Iterable[str], asked_by: str) -> tuple[LockedPackage, ...]:
        """Resolve what installing `wanted` adds to the present state, by version and checksum."""
        names = list(wanted)
        done = self.run(["apt-get", "install", "--print-uris", "-qq", "-y", *names])
        if done.returncode != 0:
            raise unresolved(done.stderr, asked_by, self.names)
        return tuple(sorted(self.locked(match) for line in done.stdout.splitlines() if (match := URI.match(line))))

    def locked(self, match: re.Match[str]) -> LockedPackage:
        name, version, arch = unquote(match["file"]).removesuffix(".deb").rsplit("_", 2)
        origin, path = self.place(match["uri"])
        return LockedPackage(name, version, arch, int(match["size"]), match["sha256"], origin, path)

    def place(self, uri: str) -> tuple[str, str]:
        """Find the repository of a file, and the path inside it; the longest matching address wins."""
        fitting = [o for o in self.origins if uri.startswith(o.uri.rstrip("/") + "/")]
        if not fitting:
            return "", unquote(uri)
        best = max(fitting, key=lambda origin: len(origin.uri))
        return best.name, unquote(uri.removeprefix(best.uri.rstrip("/") + "/"))

    def stanzas(self, packages: Sequence[LockedPackage]) -> list[str]:
        """Return the packages' records as dpkg would hold them once installed."""
        if not packages:
            return []
        done = self.run(["apt-cache", "show", "--no-all-versions", *(package.wanted for package in packages)])
        if done.returncode != 0:
            raise ImagesError("read the archive", errors_of(done.stderr))
        return [f"Status: install ok installed\n{stanza.strip()}\n" for stanza in done.stdout.strip().split("\n\n")]

    def versions(self) -> dict[str, dict[str, str]]:
        """Return everything the archive has: name -> version -> sha256."""
        versions_by_arch: dict[str, dict[str, str]] = {}
        for path in (self.directory / "state/lists").glob("*_Packages"):
            name = version = ""
            with path.open(encoding="utf-8", errors="replace") as lines:
                for line in lines:
                    if line.startswith("Package: "):
                        name = line[9:].strip()
                    elif line.startswith("Version: "):
                        version = line[9:].strip()
                    elif line.startswith("SHA256: "):
                        versions_by_arch.setdefault(name, {})[version] = line[8:].strip()
        return versions_by_arch

    def names(self) -> list[str]:
        return self.run(["apt-cache", "pkgnames"]).stdout.split()

    def run(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        environment = {
            "APT_CONFIG": str(self.directory / "apt.conf"),
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            "LC_ALL": "C.UTF-8",
        }
        try:
            return ran(command, env=environment)
        except FileNotFoundError as error:
            raise ImagesError("ask apt", f"{command[0]} is not installed", hint="`make images` installs it") from error


def errors_of(text: str) -> str:
    lines = [line for line in text.splitlines() if line.startswith(("E:", "W:", " "))]
    return "\n".join(lines[:12]) or text.strip()


def unresolved(text: str, asked_by: str, names: Callable[[], list[str]]) -> ImagesError:
    missing = re.findall(r"Unable to locate package (\S+)", text)
    missing += re.findall(r"Package '?([^' ]+)'? has no installation candidate", text)
    if missing:
        hint = nearest(missing[0], names())
        close = (
            hint if hint and hint.startswith("did you mean") else "is its component (contrib, non-free) switched on?"
        )
        return ImagesError("resolve the packages", f"package not found: {', '.join(missing)}", file=asked_by,
                           field="packages", hint=close)  # fmt: skip
    return ImagesError("resolve the packages", errors_of(text), file=asked_by, field="packages")
