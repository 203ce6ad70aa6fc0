"""A site's settings of a build: mirrors, proxies, networks, registries.

Only the first nine affect the content of an image: the lock's checksums hold for every mirror. Each setting is an
environment variable `MINIVM_BUILD_<NAME>` or `--set name=value`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from urllib.parse import urlsplit

from ground.errors import nearest
from images import ImagesError

PREFIX = "MINIVM_BUILD_"

CHOICES = {"builder": ("classic", "buildx")}
PROXY = (r"\w+://\S+", "an address such as http://proxy.site:3128")
# The pattern of each value, and its description in errors.
FORMS = {
    "slurm": (r"package|source|[0-9]{2}\.[0-9]{2}", "package, source, or a release such as 26.05"),
    "slurm_version": (r"[\w.-]+", "a version such as 24.11.5"),
    "slurm_sha256": (r"[0-9a-f]{64}", "64 hexadecimal digits, as `sha256sum` prints them"),
    "http_proxy": PROXY,
    "https_proxy": PROXY,
    "prefix": (r"[a-z0-9]+([._:/-]+[a-z0-9]+)*", "small letters and digits, with . _ - : / between them"),
    "jobs": (r"[1-9][0-9]*", "a number from 1"),
}


@dataclass(frozen=True, slots=True)
class BuildSettings:
    variant: str = "debian"
    slurm: str = ""  # package, source, or a release that the variant has packages of; empty: what the variant says
    arch: str = ""  # amd64, arm64, both, or several with commas; empty: this machine's
    cuda: str = ""  # package, or one of versions.yaml's `cuda`; empty: what the variant says
    slurm_tarball: str = ""  # path or address of a source tarball, in place of the pin
    slurm_sha256: str = ""
    slurm_version: str = ""
    base_image: str = ""  # NAME@sha256:..., in place of the bootstrapped root
    layers: str = ""  # directory of a site's own layers and roles
    sources: str = ""  # pyxis=PATH,enroot=PATH: a repository, directory or archive of a pinned source
    mirrors: str = ""  # debian=URI,security=URI, or a vendor repository's name=URI
    http_proxy: str = ""
    https_proxy: str = ""
    no_proxy: str = ""
    apt_cache: str = ""  # directory that keeps downloaded packages between builds
    ca_certificates: str = ""  # PEM file trusted while building
    network: str = ""  # the build steps' network; empty: the engine's default
    builder: str = "classic"  # or buildx
    prefix: str = "minivm"  # of every image name
    jobs: str = ""  # images built side by side; empty: by the number of processors

    @property
    def site(self) -> Path | None:
        """The directory of a site's own layers and roles."""
        return Path(self.layers).resolve() if self.layers else None

    @property
    def mirror_map(self) -> dict[str, str]:
        return self._pairs("mirrors", "NAME=URI", lambda uri: bool(urlsplit(uri).scheme))

    @property
    def source_map(self) -> dict[str, str]:
        return self._pairs("sources", "NAME=PATH", bool)

    def _pairs(self, setting: str, form: str, is_valid: Callable[[str], bool]) -> dict[str, str]:
        pairs = {}
        for item in filter(None, map(str.strip, getattr(self, setting).split(","))):
            name, _, value = item.partition("=")
            if not name or not is_valid(value):
                raise ImagesError("use the setting", f"{item!r} is not {form}", field=setting)
            pairs[name] = value
        return pairs

    @property
    def proxies(self) -> dict[str, str]:
        named = {"http_proxy": self.http_proxy, "https_proxy": self.https_proxy, "no_proxy": self.no_proxy}
        return {name: value for name, value in named.items() if value}


def read(environment: Mapping[str, str] = os.environ, assignments: Iterable[str] = ()) -> BuildSettings:
    """Read settings: defaults, then the environment, then `--set`. An unknown name is an error."""
    names = {field.name for field in fields(BuildSettings)}
    values: dict[str, str] = {}
    for variable, value in environment.items():
        if variable.startswith(PREFIX):
            values[check_name(variable.removeprefix(PREFIX).lower(), names, variable)] = value
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals:
            raise ImagesError("use the setting", f"{assignment!r} is not NAME=VALUE", field="--set")
        values[check_name(name, names, "--set")] = value
    set_values = {name: value for name, value in values.items() if value}  # an empty one asks for the default
    for name, value in set_values.items():
        if hint := wrong(name, value):
            raise ImagesError("use the setting", f"{name} cannot be {value!r}", field=name, hint=hint)
    settings = BuildSettings(**set_values)
    _ = settings.mirror_map, settings.source_map  # report a mistake in them before any other work
    return settings


def wrong(name: str, value: str) -> str | None:
    """Describe the expected value if this one is invalid."""
    if name in CHOICES and value not in CHOICES[name]:
        return nearest(value, CHOICES[name])
    if name in FORMS and not re.fullmatch(FORMS[name][0], value):
        return FORMS[name][1]
    return None


def check_name(name: str, known: set[str], where: str) -> str:
    if name not in known:
        raise ImagesError("use the setting", f"no setting {name!r}", field=where, hint=nearest(name, known))
    return name


def check_certificates(file: str) -> None:
    """Check the CA file before the build starts, not at its first download."""
    if not file:
        return
    try:
        text = Path(file).read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a PEM file"
        raise ImagesError("use the certificates", str(reason), file=file, field="ca_certificates") from error
    if "-----BEGIN CERTIFICATE-----" not in text:
        raise ImagesError("use the certificates", "no certificate in it", file=file, field="ca_certificates",
                          hint="a PEM file, with a line -----BEGIN CERTIFICATE-----")  # fmt: skip


# Parser of Debian's package files: stanzas of fields. Pure.


def stanzas(text: str) -> Iterator[dict[str, str]]:
    """Yield the fields of each stanza, names in lower case; continuation lines are dropped."""
    for stanza in text.split("\n\n"):
        lines = [line for line in stanza.splitlines() if ":" in line and not line.startswith(("#", " ", "\t"))]
        yield {key.strip().lower(): value.strip() for key, _, value in (line.partition(":") for line in lines)}


def read_installed(status: str) -> dict[str, str]:
    """Read `name:arch` -> version from dpkg's status file, without packages that left only configuration."""
    return {
        f"{fields['package']}:{fields.get('architecture', '')}": fields["version"]
        for fields in stanzas(status)
        if fields.get("status", "").endswith(" installed")
    }
