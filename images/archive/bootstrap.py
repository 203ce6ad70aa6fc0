"""Build the first layer with mmdebstrap, reproducibly."""

from __future__ import annotations

import base64
import csv
import hashlib
import lzma
import os
import shlex
import stat
import subprocess
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from images import ImagesError, architectures
from images.archive import apt
from images.archive.lock import LockContext
from images.archive.locked import Slice
from images.settings import read_installed

# mmdebstrap cleans after itself; this is what it leaves. /etc/resolv.conf and the like must exist, empty: an engine
# that finds none creates one in whichever layer runs first.
CLEAN = """set -eu; cd "$1"
rm -rf var/lib/apt/lists/* var/cache/apt/* var/cache/debconf/*-old var/lib/dpkg/*-old var/cache/ldconfig/aux-cache
rm -f etc/apt/apt.conf.d/99mmdebstrap etc/passwd- etc/group- etc/shadow- etc/gshadow- etc/.pwd.lock
find var/log -type f -delete
: > etc/machine-id; : > etc/resolv.conf; : > etc/hosts; : > etc/hostname
"""


@dataclass(frozen=True, slots=True)
class Native:
    """Programs of this machine for a root of another architecture, used while its packages are installed."""

    tar: Path
    at: str  # the directory of the root that has them
    path: str  # PATH with them

    def words(self) -> list[str]:
        """Return mmdebstrap's options; the programs are copied once the essential packages made the directory."""
        return [
            f'--essential-hook=tar -x -f {shlex.quote(str(self.tar))} -C "$1"{self.at}',
            f'--customize-hook=find "$1"{self.at} -mindepth 1 -delete',
            f'--aptopt=DPkg::Path "{self.path}"',  # apt looks for programs inside the root
        ]


# The locked versions, also where the archive has newer ones by now. In the image apt is free again.
PREFERENCES = "etc/apt/preferences.d/minivm-lock.pref"


def preferences(slice_: Slice) -> str:
    return "\n".join(f"Package: {p.name}\nPin: version {p.version}\nPin-Priority: 1001\n" for p in slice_.packages)


def command(
    place: LockContext,
    slice_: Slice,
    dpkg_options: Sequence[str],
    target: Path,
    sources: Path,
    native: Native | None = None,
) -> list[str]:
    """Return the complete mmdebstrap call, except for SOURCE_DATE_EPOCH; `sources` lies beside the preferences."""
    settings = place.settings
    chosen = apt.bootstrap_origins(place.variant, settings)
    # As root: apt's own user can read neither a site's CA under /root nor a work directory of root alone. Its
    # settings are removed from the image again.
    words = ["mmdebstrap", "--variant=apt", "--format=tar", '--aptopt=APT::Sandbox::User "root"']
    if place.choice.arch != architectures.read_own():
        words.append(f"--architectures={place.choice.arch}")
    if slice_.request.packages:
        words.append(f"--include={','.join(slice_.request.packages)}")
    words += [f"--dpkgopt={option}" for option in dpkg_options]
    for name, uri in settings.proxies.items():
        if name != "no_proxy":
            words.append(f'--aptopt=Acquire::{name.removesuffix("_proxy")}::Proxy "{uri}"')
    if settings.ca_certificates:
        words.append(f'--aptopt=Acquire::https::CaInfo "{Path(settings.ca_certificates).resolve()}"')
    locked = shlex.quote(str(sources.with_name("lock.pref")))
    words.append(f'--setup-hook=mkdir -p "$1/etc/apt/preferences.d" && cp {locked} "$1/{PREFERENCES}"')
    words.append(f'--customize-hook=rm "$1/{PREFERENCES}"')
    words += native.words() if native else []
    words.append(f"--customize-hook={CLEAN}")
    # The image names the distribution's own mirror, whichever one this build used.
    words.append(f"--customize-hook=copy-in {sources} /etc/apt")
    words += [place.variant.suite, str(target)]
    words += [line for origin in chosen for line in origin.lines().splitlines()]
    return words


def bootstrap(
    place: LockContext,
    slice_: Slice,
    dpkg_options: Sequence[str],
    target: Path,
    line: Callable[[str], None],
    native: Native | None = None,
) -> None:
    """Make the root file system as a tar at `target`, and check it against the lock."""
    sources = target.parent / "sources.list"
    keyring = f"/usr/share/keyrings/{apt.DEBIAN_KEYRING.name}"
    sources.write_text("".join(origin.lines(keyring) for origin in apt.default_origins(place.variant)))
    sources.chmod(0o644)
    sources.with_name("lock.pref").write_text(preferences(slice_))
    words = command(place, slice_, dpkg_options, target, sources, native)
    line("minivm: bootstrap")
    environment = os.environ | {"SOURCE_DATE_EPOCH": str(place.definition.versions.epoch), "LC_ALL": "C.UTF-8"}
    environment |= architectures.SETTINGS[place.choice.arch]
    try:
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                   errors="replace", env=environment)  # fmt: skip
    except FileNotFoundError as error:
        raise ImagesError(
            "bootstrap the root", "mmdebstrap is not installed", hint="`make images` installs it"
        ) from error
    output: list[str] = []
    try:
        assert process.stdout is not None
        for text in process.stdout:
            output.append(text.rstrip())
            line(text.rstrip())
        status = process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    if status != 0:
        raise ImagesError("bootstrap the root", "\n".join(reasons(output)) or f"mmdebstrap ended with status {status}",
                          hint="--set mirrors=debian=URI,security=URI names another mirror")  # fmt: skip
    check(target, slice_)


def reasons(output: Sequence[str]) -> list[str]:
    """Extract apt's errors and warnings from its progress output; without any, the last lines."""
    errors = [text for text in output if text.startswith(("E:", "W:", "Err:", "  "))]
    return (errors or list(output))[-12:]


def check(root: Path, slice_: Slice) -> None:
    """Check that the installed packages are those of the lock."""
    with tarfile.open(root) as tar:
        member = tar.extractfile("./var/lib/dpkg/status")
        assert member is not None
        versions = {name.partition(":")[0]: version for name, version in read_installed(member.read().decode()).items()}
    locked = {package.name: package.version for package in slice_.packages}
    wrong = [
        f"{name}: locked {locked.get(name, 'not')}, installed {versions.get(name, 'not')}"
        for name in sorted(locked.keys() | versions.keys())
        if locked.get(name) != versions.get(name)
    ]
    if wrong:
        raise ImagesError("bootstrap the root as locked", "; ".join(wrong), hint="`build.py lock` resolves it anew")


# Unpack a wheel without running any of it: check its own list of checksums, within bounds.
#
# The lock's checksum covers the whole file; a publisher's bad wheel must still not write outside its directory.

# The vendor's largest wheels, a compiler of 100 MB and cuBLAS of 600 MB, are far below these limits.
MOST_FILES, MOST_BYTES = 50_000, 4 << 30
CHUNK = 1 << 20
# What the formats' readers raise besides what anything may.
BROKEN = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, csv.Error)


@dataclass(frozen=True, slots=True)
class Member:
    """One file of a wheel; `data` is where it was unpacked, None if it was not wanted."""

    name: str
    executable: bool
    data: Path | None


def unpack(wheel: Path, into: Path, wanted: Callable[[str], bool]) -> Iterator[Member]:
    """Check every file; write those that `wanted` selects under `into`, by number and not by name."""
    what = f"unpack {wheel.name}"
    try:
        with zipfile.ZipFile(wheel) as archive:
            infos = [info for info in archive.infolist() if not info.is_dir()]
            if len(infos) > MOST_FILES or sum(info.file_size for info in infos) > MOST_BYTES:
                raise ImagesError(what, f"it holds more than {MOST_FILES} files or {MOST_BYTES >> 30} GiB")
            listed = record(archive, infos, what)
            for number, info in enumerate(infos):
                check_name(info, what)
                data = into / str(number) if wanted(info.filename) else None
                member = copy_member(archive, info, data)
                if info.filename in listed and listed[info.filename] != member:
                    raise ImagesError(what, f"{info.filename} is not what its RECORD says")
                if info.filename not in listed and not info.filename.endswith(".dist-info/RECORD"):
                    raise ImagesError(what, f"{info.filename} is not listed in its RECORD")
                yield Member(info.filename, bool(info.external_attr >> 16 & 0o111), data)
    except (*BROKEN, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
        raise ImagesError(what, f"damaged: {error}") from error


def check_name(info: zipfile.ZipInfo, what: str) -> None:
    parts = info.filename.split("/")
    if info.filename.startswith("/") or not all(parts) or {".", ".."} & set(parts) or not info.filename.isprintable():
        raise ImagesError(what, f"{info.filename!r} is not a path inside it")
    kind = stat.S_IFMT(info.external_attr >> 16)
    if kind not in (0, stat.S_IFREG):
        raise ImagesError(what, f"{info.filename} is not a plain file")


def record(archive: zipfile.ZipFile, infos: list[zipfile.ZipInfo], what: str) -> dict[str, tuple[str, int]]:
    """Read the wheel's list of files: name -> checksum and size. Refuses duplicate names."""
    names = [info.filename for info in infos]
    if len(set(names)) != len(names):
        raise ImagesError(what, "it holds a file twice")
    records = [info for info in infos if info.filename.count("/") == 1 and info.filename.endswith(".dist-info/RECORD")]
    if len(records) != 1:
        raise ImagesError(what, "it has no RECORD of its files")
    if records[0].file_size > 32 * CHUNK:
        raise ImagesError(what, "its RECORD is larger than any list of files")
    listed = {}
    for row in csv.reader(archive.read(records[0]).decode().splitlines()):
        name, checksum, size = row
        if checksum.startswith("sha256="):
            digest = base64.urlsafe_b64decode(checksum.removeprefix("sha256=") + "==").hex()
            listed[name] = (digest, int(size))
    return listed


def copy_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, target: Path | None) -> tuple[str, int]:
    """Read one member once; zipfile returns no more bytes than the member's header states."""
    digest, size = hashlib.sha256(), 0
    with archive.open(info) as source, target.open("xb") if target else nullcontext() as copy:
        while piece := source.read(CHUNK):
            digest.update(piece)
            size += len(piece)
            if copy:
                copy.write(piece)
    return digest.hexdigest(), size
