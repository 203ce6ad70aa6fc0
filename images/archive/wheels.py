"""CUDA and Python libraries as their publishers' wheels, resolved and fetched by pip.

No wheel is installed, imported or run. The lock holds every architecture, whichever machine resolved it, and no host:
pip's own configuration says where from.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from ground.commands import ran
from images import ImagesError, architectures
from images.archive.lock import LockContext, layers_in_order, write_changed
from images.archive.locked import RELOCK, lock_text
from images.definition.spec import PACKAGED, Cuda, Layer, Libraries, Selected
from images.settings import BuildSettings

FORMAT = 1
# What pip calls the machines of which every wheel is locked.
MACHINES = {architecture.name: architecture.machine for architecture in architectures.KNOWN.values()}
# From the C library of the oldest base that a variant has down to the oldest that a wheel may be made for.
GLIBC = range(39, 16, -1)
OLDER = {"x86_64": ("manylinux2014", "manylinux_2_12", "manylinux2010"), "aarch64": ("manylinux2014",)}
TAMPERED = "DO NOT MATCH THE HASHES"


@dataclass(frozen=True, slots=True, order=True)
class Wheel:
    """One wheel of the lock."""

    group: str
    name: str
    version: str
    arch: str
    file: str
    sha256: str
    licence: str = ""

    @property
    def wanted(self) -> str:
        return f"{self.name}=={self.version}"


@dataclass(frozen=True, slots=True)
class LockedWheels:
    """All wheels that were resolved together, and the request."""

    name: str
    request: Mapping[str, tuple[str, ...]]
    wheels: tuple[Wheel, ...]

    def of(self, group: str, arch: str) -> tuple[Wheel, ...]:
        return tuple(wheel for wheel in self.wheels if (wheel.group, wheel.arch) == (group, arch))


def choose_cuda(place: LockContext) -> Cuda | None:
    """Return this build's CUDA if it comes as wheels."""
    return None if place.choice.cuda == PACKAGED else place.definition.versions.cuda[place.choice.cuda]


def lock_file(place: LockContext, of: Cuda | Libraries) -> Path:
    """Return the lock's path, the same for all variants: a wheel does not depend on the distribution."""
    return place.repository / "images/lock/wheels" / f"{of.lock}.json"


def read(place: LockContext, of: Cuda | Libraries) -> LockedWheels | None:
    path = lock_file(place, of)
    shown = str(path.relative_to(place.repository))
    try:
        data = json.loads(path.read_text())
        if data["format"] != FORMAT:
            raise ImagesError("read the lock", f"format {data['format']} is not {FORMAT}", file=shown, hint=RELOCK)
        request = {group: tuple(requirements) for group, requirements in data["request"].items()}
        return LockedWheels(data["name"], request, tuple(Wheel(**wheel) for wheel in data["wheels"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ImagesError("read the lock", f"damaged: {error}", file=shown, hint=RELOCK) from error


def read_resolved(place: LockContext, of: Cuda | Libraries) -> tuple[LockedWheels, str]:
    """Return the locked wheels and the lock's name for errors; raise if they were never resolved."""
    locked, file = read(place, of), str(lock_file(place, of).relative_to(place.repository))
    if locked is None:
        raise ImagesError("read the lock", f"the wheels of {of.about} were never resolved", file=file, hint=RELOCK)
    return locked, file


def write(place: LockContext, of: Cuda | Libraries, locked: LockedWheels) -> None:
    head = {"format": FORMAT, "name": locked.name, "request": locked.request}
    write_changed(lock_file(place, of), lock_text(head, "wheels", sorted(locked.wheels)))


def list_used_kinds(place: LockContext, layers: Iterable[str]) -> list[Cuda | Libraries]:
    """List the kinds of wheels that these layers, or layers below, use."""
    ordered = [layer for layer, _ in layers_in_order(place, layers)]
    cuda, python = choose_cuda(place), place.definition.versions.python

    def any_of(*kinds: Callable[[Layer], Selected[str]]) -> bool:
        return any(kind(layer).of(place.choice) for layer in ordered for kind in kinds)

    takes: list[Cuda | Libraries] = []
    if cuda is not None and any_of(lambda layer: layer.wheels, lambda layer: layer.wheels_devel):
        takes.append(cuda)
    return [*takes, python] if any_of(lambda layer: layer.python) else takes


def list_stale(place: LockContext, layers: Iterable[str]) -> list[str]:
    """Name the kinds of wheels that were never resolved, or for another request."""
    names = []
    for of in list_used_kinds(place, layers):
        locked = read(place, of)
        if locked is None or dict(locked.request) != dict(of.wheels):
            names.append(f"the wheels of {of.about}")
    return names


def relock(place: LockContext, layers: Iterable[str]) -> list[str]:
    """Resolve and write the locks; return what changed."""
    moved = []
    for of in list_used_kinds(place, layers):
        before, after = read(place, of), resolve(of, place.settings)
        write(place, of, after)
        moved += list_changes(before, after)
    return moved


def list_changes(before: LockedWheels | None, after: LockedWheels) -> list[str]:
    """List what a new lock changed, one line a wheel and architecture."""
    old = {(wheel.name, wheel.arch): wheel for wheel in (before.wheels if before else ())}
    new = {(wheel.name, wheel.arch): wheel for wheel in after.wheels}
    lines, title = [], f"cuda {after.name}" if after.name[:1].isdigit() else after.name
    for key in sorted(old.keys() | new.keys()):
        was, now = old.get(key), new.get(key)
        if was and now and was.version == now.version and was.sha256 != now.sha256:
            lines.append(f"{title}: {key[0]} {now.version} ({key[1]}) is another file than it was")
        elif (was.version if was else "") != (now.version if now else ""):
            text = f"{was.version if was else 'not there'} -> {now.version if now else 'not there'}"
            lines.append(f"{title}: {key[0]} {text} ({key[1]})")
    return lines


def resolve(of: Cuda | Libraries, settings: BuildSettings) -> LockedWheels:
    """Resolve every wheel again: the newest that the definition allows, one version on every architecture."""
    group_of = {requirement: group for group, requirements in of.wheels.items() for requirement in requirements}
    groups = {requirement.partition("==")[0]: group for requirement, group in group_of.items()}
    requested: Sequence[str] = list(group_of)
    wheels: list[Wheel] = []
    for arch in MACHINES:
        answers = resolve_by_pip(requested, arch, settings)
        wheels += [Wheel(groups[w.name], w.name, w.version, w.arch, w.file, w.sha256, w.licence) for w in answers]
        requested = [wheel.wanted for wheel in answers]
    return LockedWheels(of.name, dict(of.wheels), tuple(sorted(wheels)))


def resolve_by_pip(wanted: Sequence[str], arch: str, settings: BuildSettings) -> list[Wheel]:
    answers, _, reason = ask(wanted, arch, settings)
    if reason:
        raise resolution_error(reason, arch)
    return answers


def ask(wanted: Sequence[str], arch: str, settings: BuildSettings) -> tuple[list[Wheel], list[str], str]:
    """Ask pip for wheels. Returns those found; or the missing ones that pip names, and pip's whole output."""
    if not wanted:
        return [], [], ""
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.json"
        words = ["install", "--dry-run", "--ignore-installed", "--target", f"{directory}/nowhere", "--report",
                 str(report), *list_platform_options(arch), *wanted]  # fmt: skip
        done = run_pip(words, settings)
        if done.returncode != 0:
            return [], absent(done.stderr), done.stderr or "pip said nothing"
        items = json.loads(report.read_text())["install"]
    answers = []
    for item in items:
        about, file = item["metadata"], item["download_info"]
        licence = str(about.get("license_expression") or about.get("license") or "").partition("\n")[0]
        name, sha256 = about["name"].lower().replace("_", "-"), hash_of(file)
        answers.append(
            Wheel("", name, about["version"], arch, unquote(file["url"]).rpartition("/")[2], sha256, licence)
        )
    return answers, [], ""


def hash_of(file: Mapping[str, Any]) -> str:
    """Return a file's SHA-256 from the index, or from its bytes if pip had to fetch it. Refuses MD5 alone."""
    hashes = file["archive_info"].get("hashes") or {}
    if "sha256" not in hashes:
        name, kinds = unquote(file["url"]).rpartition("/")[2], ", ".join(sorted(hashes)) or "nothing"
        raise ImagesError("resolve the wheels", f"the index says {kinds} of {name}, and no SHA-256: nothing else is"
                          " believed", hint="take another index, or a directory of wheels")  # fmt: skip
    return str(hashes["sha256"])


def fetch(wheel: Wheel, directory: Path, settings: BuildSettings) -> Path:
    """Return the locked file under `directory`, fetched and verified by pip, kept by its checksum."""
    cached = directory / wheel.sha256 / wheel.file
    if cached.exists():
        return cached
    cached.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cached.parent) as temporary:
        listing = Path(temporary) / "requirements.txt"
        listing.write_text(f"{wheel.wanted} --hash=sha256:{wheel.sha256}\n")
        options = ["--require-hashes", "--dest", temporary, *list_platform_options(wheel.arch), "-r", str(listing)]
        done = run_pip(["download", *options], settings)
        if done.returncode != 0:
            raise fetch_error(done.stderr, wheel)
        got = Path(temporary) / wheel.file
        if not got.is_file():
            raise ImagesError(f"fetch {wheel.wanted}", f"there is another file for {wheel.arch} than {wheel.file}",
                              hint=RELOCK)  # fmt: skip
        with got.open("rb") as data:
            os.fsync(data.fileno())
        got.chmod(0o644)
        got.rename(cached)
    return cached


def list_platform_options(arch: str) -> list[str]:
    """Return pip's options for wheels that run on this architecture with the images' C library and any Python 3.

    pip does not run the code, so it cannot tell the oldest working Python: a layer's `verify` imports what it brings.
    """
    machine = MACHINES[arch]
    tags = [*(f"manylinux_2_{minor}_{machine}" for minor in GLIBC), *(f"{tag}_{machine}" for tag in OLDER[machine])]
    words = ["--no-deps", "--only-binary", ":all:", "--implementation", "py", "--python-version", "3", "--abi", "none"]
    words.append("--ignore-requires-python")
    return [*words, *(word for tag in tags for word in ("--platform", tag))]


def run_pip(words: Iterable[str], settings: BuildSettings) -> subprocess.CompletedProcess[str]:
    """Run pip with the site's configuration, without pip's own cache: fetched files are kept here."""
    command = [sys.executable, "-I", "-m", "pip", *words, "--quiet", "--no-cache-dir", "--no-input",
               "--disable-pip-version-check"]  # fmt: skip
    if settings.ca_certificates:
        command += ["--cert", settings.ca_certificates]
    # Proxies by the environment: an address may hold a password, which no process list is to show.
    environment = os.environ | settings.proxies | {"LC_ALL": "C.UTF-8"}
    done = ran(command, env=environment)
    if done.returncode != 0 and "No module named pip" in done.stderr:
        raise ImagesError("ask pip", f"{sys.executable} has no pip", hint="`make images` makes an environment with one")
    return done


def absent(text: str) -> list[str]:
    marker = "No matching distribution found for "
    return [line.partition(marker)[2].split(" ")[0] for line in text.splitlines() if marker in line]


def resolution_error(text: str, arch: str) -> ImagesError:
    """Build the error for unresolved wheels. pip uses one message for a missing wheel and a missing architecture."""
    if names := absent(text):
        return ImagesError("resolve the wheels", f"{names[0]} has no wheel for {arch}", file="images/versions.yaml",
                           field="cuda", hint="does the vendor publish this version for that machine?")  # fmt: skip
    return ImagesError("resolve the wheels", last_lines(text), file="images/versions.yaml", field="cuda")


def fetch_error(text: str, wheel: Wheel) -> ImagesError:
    what = f"fetch {wheel.wanted}"
    if TAMPERED in text:
        got = next((line.split()[-1] for line in text.splitlines() if line.split()[:1] == ["Got"]), "another")
        reason = f"its hash changed: {wheel.file} is locked as {wheel.sha256}, found {got}"
        hint = "ask its publisher why before `build.py lock` takes the new one"
        return ImagesError(what, reason, file="images/lock/wheels", hint=hint)
    if "No matching distribution found" in text:
        return ImagesError(what, f"there is no such wheel for {wheel.arch} any more", file="images/lock/wheels",
                           hint=RELOCK)  # fmt: skip
    return ImagesError(what, last_lines(text))


def last_lines(text: str) -> str:
    lines = [line for line in text.splitlines() if line.startswith(("ERROR:", " "))]
    return "\n".join(lines[-8:]) or text.strip() or "pip said nothing"


# Compare the locked wheels with the index for `lock --check`: missing or newer ones. Writes and fetches nothing.


@dataclass(frozen=True, slots=True)
class IndexDifferences:
    """Differences between the index and a lock."""

    wrong: tuple[str, ...] = ()  # what is locked is not there any more, or is another file: a build ends on it
    newer: tuple[str, ...] = ()  # what a new lock would move


def compare_with_index(place: LockContext, layers: Iterable[str]) -> IndexDifferences:
    wrong, newer = list[str](), list[str]()
    for of in list_used_kinds(place, layers):
        if (locked := read(place, of)) is None:
            continue
        for arch in MACHINES:
            own_wheels = [wheel for wheel in locked.wheels if wheel.arch == arch]
            now = {
                wheel.wanted: wheel
                for wheel in list_present([wheel.wanted for wheel in own_wheels], arch, place.settings)
            }
            wrong += [
                f"{of.about}: {reason}" for wheel in own_wheels if (reason := differs(wheel, now.get(wheel.wanted)))
            ]
        try:
            newest = resolve(of, place.settings)
        except ImagesError as error:
            newer.append(f"{of.about}: a new lock cannot be made: {error.why}")
            continue
        # The branch above reports another file of the same version.
        locked_wheels = {(wheel.name, wheel.version, wheel.arch): wheel for wheel in locked.wheels}
        same = [locked_wheels.get((wheel.name, wheel.version, wheel.arch), wheel) for wheel in newest.wheels]
        newer += list_changes(locked, replace(newest, wheels=tuple(same)))
    return IndexDifferences(tuple(wrong), tuple(newer))


def differs(locked: Wheel, now: Wheel | None) -> str:
    what = f"{locked.name} {locked.version} ({locked.arch})"
    if now is None:
        return f"{what} is gone"
    if now.sha256 != locked.sha256:
        return f"{what}: its hash changed: {locked.file} is locked as {locked.sha256}, the index has {now.sha256}"
    return ""


def list_present(wanted: Sequence[str], arch: str, settings: BuildSettings) -> list[Wheel]:
    """Return those of these versions that the index has; pip names only the first missing one at a time."""
    while True:
        answers, absent, reason = ask(wanted, arch, settings)
        if not reason:
            return answers
        if not set(absent) & set(wanted):
            raise resolution_error(reason, arch)
        wanted = [item for item in wanted if item not in absent]
