"""Package repositories of an image, and apt-get in private directories: list an archive, resolve packages.

The host's apt state is neither read nor changed, and no root is needed.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from urllib.parse import unquote

from ground.commands import ran
from ground.errors import nearest
from images import ImagesError
from images.archive.fetch import fetch
from images.archive.locked import LockedPackage
from images.definition.spec import AptSource, Definition, Pin, Variant
from images.settings import BuildSettings, stanzas

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
            raise resolution_error(done.stderr, asked_by, self.names)
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


def resolution_error(text: str, asked_by: str, names: Callable[[], list[str]]) -> ImagesError:
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


# Package repositories: the base's own, the variant's, and a site's replacements. First the parsers of apt's formats.


def parse_one_line(text: str) -> list[Origin]:
    """Parse `deb [options] URI suite components`, one repository a line."""
    origins = []
    for line in text.splitlines():
        words = line.split("#")[0].split()
        if len(words) < 3 or words[0] != "deb":
            continue
        key = ""
        if words[1].startswith("["):
            end = next(index for index, word in enumerate(words) if word.endswith("]"))
            for option in " ".join(words[1 : end + 1]).strip("[]").split():
                key = option.removeprefix("signed-by=") if option.startswith("signed-by=") else key
            words = [words[0], *words[end + 1 :]]
        origins.append(Origin("base", words[1], (words[2],), tuple(words[3:]), Path(key)))
    return origins


def parse_deb822(text: str) -> list[Origin]:
    """Parse stanzas of `Types:`, `URIs:`, `Suites:`, `Components:`, `Signed-By:`."""
    origins = []
    for fields in stanzas(text):
        if "deb" not in fields.get("types", "").split() or fields.get("enabled", "yes") == "no":
            continue
        for uri in fields["uris"].split():
            suites, components = fields["suites"].split(), fields.get("components", "").split()
            origins.append(Origin("base", uri, tuple(suites), tuple(components), Path(fields.get("signed-by", ""))))
    return origins


IN_ARCHIVE = "archive:"
DEBIAN_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")


@dataclass(frozen=True, slots=True)
class BaseFiles:
    """A base image's dpkg status, and its repositories with their keys unpacked here."""

    status: str
    origins: tuple[Origin, ...]


@cache
def read_default_sources(suite: str, components: tuple[str, ...]) -> tuple[Origin, ...]:
    """Ask mmdebstrap for its default sources, so that the project names no host."""
    hook = 'cat "$1"/etc/apt/sources.list "$1"/etc/apt/sources.list.d/* >&2 2>/dev/null; exit 1'
    command = ["mmdebstrap", "--variant=custom", f"--components={','.join(components)}", f"--setup-hook={hook}",
               suite, "/dev/null"]  # fmt: skip
    try:
        done = ran(command)
    except FileNotFoundError as error:
        raise ImagesError("find a mirror", "mmdebstrap is not installed", hint="`make images` installs it") from error
    listed = "\n".join(line for line in done.stderr.splitlines() if not re.match(r"[IWE]: ", line))
    origins = tuple(parse_one_line(listed) or parse_deb822(listed))
    if not origins:
        raise ImagesError("find a mirror", f"mmdebstrap names none for {suite}:\n{done.stderr.strip()}",
                          hint="name one: --set mirrors=debian=URI,security=URI")  # fmt: skip
    return origins


@cache
def read_host_uris() -> dict[str, str]:
    """Return the addresses that this machine's apt uses for Debian, if it is a Debian machine."""
    try:
        done = ran(["apt-get", "indextargets", "--format", "$(ORIGIN) $(RELEASE) $(REPO_URI)"])
    except FileNotFoundError:
        return {}
    uris: dict[str, str] = {}
    for line in done.stdout.splitlines():
        origin, release, uri = (*line.split(" "), "", "")[:3]
        if origin == "Debian" and uri.startswith(("http:", "https:")):
            uris.setdefault("security" if release.endswith("-security") else "debian", uri.rstrip("/"))
    return uris


def bootstrap_origins(variant: Variant, settings: BuildSettings) -> tuple[Origin, ...]:
    """Return the suite with updates and security, from the site's mirrors, the host's, or mmdebstrap's own."""
    chosen = read_host_uris() | settings.mirror_map
    return tuple(replace(o, uri=chosen.get(o.name, o.uri)) for o in default_origins(variant))


def default_origins(variant: Variant) -> tuple[Origin, ...]:
    return group_by_name(read_default_sources(variant.suite, variant.components), DEBIAN_KEYRING)


def group_by_name(listed: Sequence[Origin], keyring: Path) -> tuple[Origin, ...]:
    """Group repositories under the names that the setting `mirrors` uses: `debian` (with updates) and `security`."""
    origins: dict[tuple[str, str], Origin] = {}
    for origin in listed:
        for suite in origin.suites:
            name = "security" if "-security" in suite else "debian"
            before = origins.get((name, origin.uri))
            suites = (*before.suites, suite) if before else (suite,)
            origins[name, origin.uri] = Origin(name, origin.uri, suites, origin.components, keyring)
    return tuple(origins.values())


def resolve_archive_pin(pin: Pin, definition: Definition, settings: BuildSettings) -> Pin:
    """Resolve a pin in Debian's own archive, `archive:pool/...`, to the address that packages come from."""
    if not pin.url.startswith(IN_ARCHIVE):
        return pin
    variant = next(item for item in definition.versions.variants.values() if item.suite)
    base = next(origin for origin in bootstrap_origins(variant, settings) if origin.name == "debian")
    return replace(pin, url=f"{base.uri.rstrip('/')}/{pin.url.removeprefix(IN_ARCHIVE)}")


def suite_of(source: AptSource, own: Sequence[Origin]) -> Origin:
    """Return another suite of the base's own archive, at its first address that is not for security."""
    base = next(origin for origin in own if origin.name == "debian")
    return replace(base, suites=source.suites, components=source.components, dated=source.dated)


def fetch_vendor_origin(source: AptSource, definition: Definition, settings: BuildSettings, downloads: Path) -> Origin:
    """Return a variant's repository, with its verified key on this machine."""
    key = fetch_keyring(source, definition, settings, downloads)
    uri = settings.mirror_map.get(source.name, source.uri)
    return Origin(source.name, uri, source.suites, source.components, key, source.dated)


def fetch_keyring(source: AptSource, definition: Definition, settings: BuildSettings, downloads: Path) -> Path:
    """Fetch and verify a repository's key, under a name that shows its format."""
    pin = definition.versions.pins[source.key]
    fetched = fetch(pin, downloads, settings)
    named = fetched.with_name(Path(name_image_keyring(source, definition)).name)
    if not named.exists():
        shutil.copyfile(fetched, named)
    return named


def name_image_keyring(source: AptSource, definition: Definition) -> str:
    """Return the key's path in an image. apt tells the format by the name: binary if the pin's address ends in .gpg."""
    binary = definition.versions.pins[source.key].url.endswith(".gpg")
    return f"/usr/share/keyrings/minivm-{source.name}.{'gpg' if binary else 'asc'}"


def image_sources(source: AptSource, definition: Definition) -> str:
    """Return the .sources file for the image: the vendor's address, not the mirror that the build used."""
    return format_deb822(source, source.uri, name_image_keyring(source, definition))


def image_suite(source: AptSource, variant: Variant) -> str:
    """Return the .sources file for another suite of the base's archive, at the image's own address."""
    base = suite_of(source, default_origins(variant))
    return format_deb822(source, base.uri, f"/usr/share/keyrings/{base.keyring.name}")


def format_deb822(source: AptSource, uri: str, key: str) -> str:
    fields = {
        "Types": "deb",
        "URIs": uri,
        "Suites": " ".join(source.suites),
        **({"Components": " ".join(source.components)} if source.components else {}),
        "Signed-By": key,
        **({} if source.dated else {"Check-Valid-Until": "no"}),
    }
    return "".join(f"{name}: {value}\n" for name, value in fields.items())


def make_preferences(source: AptSource) -> str:
    """Return apt's priority for a repository: by its host, or by its suite in the base's archive.

    With `packages` apt takes nothing else from it, not even what no other repository has.
    """
    host = source.uri.split("//", 1)[-1].split("/", 1)[0].split(":")[0]
    where = [f'origin "{host}"'] if source.uri else [f"release n={suite}" for suite in source.suites]
    if not source.packages:
        return "\n".join(f"Package: *\nPin: {pin}\nPin-Priority: {source.pin}\n" for pin in where)
    named = " ".join(source.packages)
    return "\n".join(
        f"Package: *\nPin: {pin}\nPin-Priority: -1\n\nPackage: {named}\nPin: {pin}\nPin-Priority: {source.pin}\n"
        for pin in where
    )


def vendor_sources(variant: Variant) -> Mapping[str, AptSource]:
    return {source.name: source for source in variant.sources}


def require_mirror(name: str, variant: Variant) -> None:
    names = {"debian", "security", *(source.name for source in variant.sources if source.uri)}
    if name not in names:
        raise ImagesError("use the setting", f"no repository {name!r}", field="mirrors", hint=nearest(name, names))
