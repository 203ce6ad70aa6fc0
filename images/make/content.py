"""The files of one layer as entries, and the reproducible tar that carries them.

Each layer is one `ADD x.tar /`: COPY would give parent directories the time of the build, a tar keeps its own times.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from ground.errors import nearest
from images import ImagesError
from images.definition.spec import BuildChoice, Definition, EntryKind, FileEntry, Role, User
from init.errors import InitError
from init.plan.compile import compile_plan, plan_to_json
from init.plan.service import Service
from init.plan.spec import parse_drain, parse_service

# Directories of the base that are not 0755 root; listing them otherwise would change them.
BASE_MODES = {"root": 0o700, "tmp": 0o1777, "var/tmp": 0o1777, "var/mail": 0o2775, "var/local": 0o2775}
BASE_GIDS = {"var/mail": 8, "var/local": 50}
IGNORED = {"__pycache__", ".gitkeep", ".gitignore"}


@dataclass(frozen=True, slots=True)
class Entry:
    """One path of the image; `path` has no leading slash."""

    path: str
    kind: EntryKind
    mode: int
    uid: int = 0
    gid: int = 0
    data: bytes | Path = b""
    link: str = ""

    def digest(self) -> str:
        about = f"{self.kind.value} {self.mode:o} {self.uid} {self.gid} {self.link}\0".encode()
        return hashlib.sha256(about + self.read()).hexdigest()

    def read(self) -> bytes:
        return self.data.read_bytes() if isinstance(self.data, Path) else self.data


def file(path: str, data: bytes | Path, mode: int = 0o644) -> Entry:
    return Entry(path.lstrip("/"), EntryKind.FILE, mode, data=data)


def link(path: str, to: str) -> Entry:
    return Entry(path.lstrip("/"), EntryKind.LINK, 0o777, link=to)


def list_tree(root: Path, to: str = "") -> list[Entry]:
    """List a directory's content, owned by root, with 0755 for directories and executables, 0644 for the rest."""
    if not root.is_dir():
        return []
    entries: list[Entry] = []
    with os.scandir(root) as listed:
        items = sorted((item for item in listed if item.name not in IGNORED), key=lambda item: item.name)
    for item in items:
        name = f"{to.strip('/')}/{item.name}".lstrip("/")
        if item.is_symlink():
            entries.append(link(name, str(Path(item).readlink())))
        elif item.is_dir():
            inside = list_tree(Path(item), name)
            # git has no empty directories: one without even a .gitkeep is what a checkout left of a removed package.
            if inside or (Path(item) / ".gitkeep").exists():
                entries += [Entry(name, EntryKind.DIRECTORY, 0o755), *inside]
        else:
            entries.append(file(name, Path(item), 0o755 if item.stat().st_mode & 0o111 else 0o644))
    return entries


def resolve(entry: FileEntry, homes: Sequence[Path], users: Mapping[str, User], shown: str) -> list[Entry]:
    """Expand an entry of a layer file to the paths that it means; a source is in the first of these that has it."""
    if entry.owner == "root":
        uid = gid = 0
    elif entry.owner in users:
        uid, gid = users[entry.owner].uid, users[entry.owner].gid
    else:
        raise ImagesError("place a file", f"no user {entry.owner!r}", file=shown, field=entry.to,
                          hint=nearest(entry.owner, users))  # fmt: skip
    to = entry.to.strip("/")
    if entry.kind is EntryKind.DIRECTORY:
        return [Entry(to, entry.kind, 0o755 if entry.mode is None else entry.mode, uid, gid)]
    if entry.kind is EntryKind.LINK:
        return [Entry(to, entry.kind, 0o777, uid, gid, link=entry.source)]
    source = next((home / entry.source for home in homes if (home / entry.source).exists()), Path(entry.source))
    if source.is_dir():
        return [
            replace(inside, uid=uid, gid=gid)
            for inside in [Entry(to, EntryKind.DIRECTORY, 0o755), *list_tree(source, to)]
        ]
    if not source.is_file():
        raise ImagesError("place a file", f"{entry.source} does not exist", file=shown, field=entry.to)
    mode = entry.mode if entry.mode is not None else 0o755 if source.stat().st_mode & 0o111 else 0o644
    return [Entry(to, entry.kind, mode, uid, gid, data=source)]


def complete(entries: Iterable[Entry], below: Mapping[str, Entry]) -> list[Entry]:
    """Sort entries, let later ones replace earlier ones of the same path, and add every parent directory.

    A parent keeps the mode that this layer or one below gave it; otherwise the engine would stamp it with the time.
    """
    by_path = {entry.path: entry for entry in entries}
    for path in list(by_path):
        parent = path.rpartition("/")[0]
        while parent and parent not in by_path:
            parent_entry = below.get(parent)
            by_path[parent] = parent_entry or Entry(
                parent, EntryKind.DIRECTORY, BASE_MODES.get(parent, 0o755), 0, BASE_GIDS.get(parent, 0)
            )
            parent = parent.rpartition("/")[0]
    return [by_path[path] for path in sorted(by_path)]


def write_tar(target: IO[bytes], entries: Iterable[Entry], epoch: int) -> None:
    with tarfile.open(fileobj=target, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for entry in entries:
            info = tarfile.TarInfo(entry.path + ("/" if entry.kind is EntryKind.DIRECTORY else ""))
            info.mtime, info.mode, info.uid, info.gid = epoch, entry.mode, entry.uid, entry.gid
            if entry.kind is EntryKind.DIRECTORY:
                info.type = tarfile.DIRTYPE
                tar.addfile(info)
            elif entry.kind is EntryKind.LINK:
                info.type, info.linkname = tarfile.SYMTYPE, entry.link
                tar.addfile(info)
            elif isinstance(entry.data, Path):
                info.size = entry.data.stat().st_size
                with entry.data.open("rb") as data:
                    tar.addfile(info, data)
            else:
                info.size = len(entry.data)
                tar.addfile(info, io.BytesIO(entry.data))


# Add the project's own code as the last, thin layer of a role: changing Python rebuilds seconds of work.

VENV = "opt/minivm"
Tree = Callable[[Path, str], list[Entry]]
PACKAGES = ("ground", "init", "health", "gitsync")
# What every package may use of the others.
BELOW = ("ground", "init")
LAUNCHER = """#!/{venv}/bin/python3 -I
import sys

from {package}.cli import main

sys.exit(main())
"""
# Debian's own modules are seen through system site packages, so that there is one copy, patched by Debian.
PYVENV = "home = /usr/bin\ninclude-system-site-packages = true\nversion = {python}\n"


def compile_role(
    role: Role, definition: Definition, choice: BuildChoice, repository: Path, read: Callable[[Path, str], object]
) -> str:
    """Compile the role's services into a plan; a bad service fails the build, not the boot."""
    directory = repository / "init/services"
    names = sorted(path.stem for path in directory.glob("*.yaml"))
    services: list[Service] = []
    ready = definition.slurm[choice.release].ready if choice.release in definition.slurm else {}
    if unknown := [name for name in ready if name not in names]:
        raise ImagesError("compile the plan", f"no service {unknown[0]!r}", file="images/slurm.yaml",
                          field=f"releases.{choice.release}.ready", hint=nearest(unknown[0], names))  # fmt: skip
    # NAME=FILE: a service by the name that the other services know, with this role's own definition.
    listed = [(name, own or name) for name, _, own in (entry.partition("=") for entry in role.services.of(choice))]
    for name in role.required:
        if name not in dict(listed):
            raise ImagesError("compile the plan", f"{name!r} is not among the services",
                              file=role.file, field="required",
                              hint=nearest(name, [*dict(listed)]))  # fmt: skip
    for name, stem in listed:
        path = directory / f"{stem}.yaml"
        shown = str(path.relative_to(repository))
        if stem not in names:
            raise ImagesError("compile the plan", f"no service {stem!r}", file=role.file,
                              field="services", hint=nearest(stem, names))  # fmt: skip
        data = read(path, shown)
        if not isinstance(data, dict):
            raise ImagesError("compile the plan", "not a mapping", file=shown)
        if name in ready:
            data = {**data, "ready": ready[name]}
        if name in role.required:
            data = {**data, "required": True}
        try:
            services.append(parse_service(name, data, shown))
        except InitError as error:
            raise ImagesError("compile the plan", str(error)) from error
    try:
        drain = parse_drain(dict(role.drain), role.file) if role.drain else None
        return plan_to_json(compile_plan(role.name, services, drain))
    except InitError as error:
        raise ImagesError("compile the plan", str(error), file=role.file) from error


def serialise_slurm(definition: Definition, choice: BuildChoice, version: str) -> str:
    """Return what init needs to know about the image's Slurm; only its name for an unknown release."""
    release = ".".join(version.split(".")[:2])
    data: dict[str, object] = {"release": release}
    if release in definition.slurm and release == choice.release:
        facts = definition.slurm[release]
        names = {str(item.protocol): item.name for item in definition.slurm.values()}
        data |= {"protocol": facts.protocol, "reads": facts.reads, "names": names}
        data |= {"needs-state": facts.needs_state} if facts.needs_state else {}
        data |= {"fast-scripts": True} if facts.fast_scripts else {}
    return json.dumps(data, sort_keys=True) + "\n"


def make_entrypoint(python: str, program: str = "") -> tuple[str, ...]:
    """Return the command of PID 1: by path and without the site module, 10 ms faster than `python3 -I -m init`.

    UTF-8 mode is set explicitly, so that Python need not examine the pod's environment.
    """
    if program:
        return (f"/{VENV}/bin/python3", "-I", "-m", program)
    return (f"/{VENV}/bin/python3", "-I", "-S", "-Xutf8", f"/{site_packages(python)}/init/__main__.py")


def site_packages(python: str) -> str:
    return f"{VENV}/lib/python{python}/site-packages"


def list_entries(plan: str, slurm: str, python: str, repository: Path, tree: Tree) -> list[Entry]:
    """Return everything in the last layer except the SBOM, which describes the rest."""
    site = site_packages(python)
    entries_found = [
        *list_venv_entries(python),
        file("etc/minivm/plan.json", plan.encode()),
        file("usr/share/minivm/slurm.json", slurm.encode()),
        file("usr/bin/minivm", LAUNCHER.format(venv=VENV, package="init").encode(), 0o755),
        file("usr/bin/gitsync", LAUNCHER.format(venv=VENV, package="gitsync").encode(), 0o755),
        Entry("usr/share/minivm/scripts", EntryKind.DIRECTORY, 0o755),
        *tree(repository / "scripts", "usr/share/minivm/scripts"),
    ]
    for package in PACKAGES:
        entries_found += tree(repository / package, f"{site}/{package}")
    return entries_found


def list_program_entries(package: str, python: str, repository: Path, tree: Tree) -> list[Entry]:
    """Return a pod's only program with the packages that it needs: no services, no scripts."""
    files = [
        *list_venv_entries(python),
        file(f"usr/bin/{package}", LAUNCHER.format(venv=VENV, package=package).encode(), 0o755),
    ]
    for name in (*BELOW, package):
        files += tree(repository / name, f"{site_packages(python)}/{name}")
    return files


def list_venv_entries(python: str) -> list[Entry]:
    return [
        file(f"{VENV}/pyvenv.cfg", PYVENV.format(python=python).encode()),
        link(f"{VENV}/bin/python3", f"/usr/bin/python{python}"),
        link(f"{VENV}/bin/python", "python3"),
    ]


def list_commands() -> tuple[str, ...]:
    """Compile byte code that holds no time, with the image's own interpreter."""
    return (f"/{VENV}/bin/python3 -I -m compileall -q --invalidation-mode unchecked-hash /{VENV}/lib",)


def list_checks(repository: Path, program: str = "") -> tuple[str, ...]:
    """Return the commands that check the code under the image's interpreter, and the existing launchers."""
    if program:
        return (f"/{VENV}/bin/python3 -I -c 'import {program}.__main__'", f"{program} --help")
    launchers = {"init": "minivm", "gitsync": "gitsync"}
    return (
        f"/{VENV}/bin/python3 -I -c 'import {', '.join(PACKAGES)}, json; json.load(open(\"/etc/minivm/plan.json\"))'",
        *(f"{launchers[name]} --help" for name in launchers if (repository / name / "cli.py").exists()),
    )
