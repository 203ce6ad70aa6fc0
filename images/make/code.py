"""Add the project's own code as the last, thin layer of a role: changing Python rebuilds seconds of work."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from images.definition.spec import BuildChoice, Definition, EntryKind, Role
from images.errors import ImagesError, nearest
from images.make import content
from images.make.content import Entry
from init.errors import InitError
from init.plan.compile import compile_plan, plan_to_json
from init.plan.service import Service
from init.plan.spec import parse_drain, parse_service

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


def plan_json(
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
    for name in role.required:
        if name not in role.services.of(choice):
            raise ImagesError("compile the plan", f"{name!r} is not among the services",
                              file=f"images/roles/{role.name}.yaml", field="required",
                              hint=nearest(name, role.services.of(choice)))  # fmt: skip
    for entry in role.services.of(choice):
        # NAME=FILE: a service by the name that the other services know, with this role's own definition.
        name, equals, own = entry.partition("=")
        stem = own if equals else name
        path = directory / f"{stem}.yaml"
        shown = str(path.relative_to(repository))
        if stem not in names:
            raise ImagesError("compile the plan", f"no service {stem!r}", file=f"images/roles/{role.name}.yaml",
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
        drain = parse_drain(dict(role.drain), f"images/roles/{role.name}.yaml") if role.drain else None
        return plan_to_json(compile_plan(role.name, services, drain))
    except InitError as error:
        raise ImagesError("compile the plan", str(error), file=f"images/roles/{role.name}.yaml") from error


def slurm_json(definition: Definition, choice: BuildChoice, version: str) -> str:
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


def entrypoint(python: str, program: str = "") -> tuple[str, ...]:
    """Return the command of PID 1: by path and without the site module, 10 ms faster than `python3 -I -m init`.

    UTF-8 mode is set explicitly, so that Python need not examine the pod's environment.
    """
    if program:
        return (f"/{VENV}/bin/python3", "-I", "-m", program)
    return (f"/{VENV}/bin/python3", "-I", "-S", "-Xutf8", f"/{site_packages(python)}/init/__main__.py")


def site_packages(python: str) -> str:
    return f"{VENV}/lib/python{python}/site-packages"


def entries(plan: str, slurm: str, python: str, repository: Path, tree: Tree) -> list[Entry]:
    """Return everything in the last layer except the SBOM, which describes the rest."""
    site = site_packages(python)
    entries_found = [
        *venv(python),
        content.file("etc/minivm/plan.json", plan.encode()),
        content.file("usr/share/minivm/slurm.json", slurm.encode()),
        content.file("usr/bin/minivm", LAUNCHER.format(venv=VENV, package="init").encode(), 0o755),
        content.file("usr/bin/gitsync", LAUNCHER.format(venv=VENV, package="gitsync").encode(), 0o755),
        Entry("usr/share/minivm/scripts", EntryKind.DIRECTORY, 0o755),
        *tree(repository / "scripts", "usr/share/minivm/scripts"),
    ]
    for package in PACKAGES:
        entries_found += tree(repository / package, f"{site}/{package}")
    return entries_found


def program(package: str, python: str, repository: Path, tree: Tree) -> list[Entry]:
    """Return a pod's only program with the packages that it needs: no services, no scripts."""
    files = [
        *venv(python),
        content.file(f"usr/bin/{package}", LAUNCHER.format(venv=VENV, package=package).encode(), 0o755),
    ]
    for name in (*BELOW, package):
        files += tree(repository / name, f"{site_packages(python)}/{name}")
    return files


def venv(python: str) -> list[Entry]:
    return [
        content.file(f"{VENV}/pyvenv.cfg", PYVENV.format(python=python).encode()),
        content.link(f"{VENV}/bin/python3", f"/usr/bin/python{python}"),
        content.link(f"{VENV}/bin/python", "python3"),
    ]


def commands() -> tuple[str, ...]:
    """Compile byte code that holds no time, with the image's own interpreter."""
    return (f"/{VENV}/bin/python3 -I -m compileall -q --invalidation-mode unchecked-hash /{VENV}/lib",)


def verify(repository: Path, program: str = "") -> tuple[str, ...]:
    """Return the commands that check the code under the image's interpreter, and the existing launchers."""
    if program:
        return (f"/{VENV}/bin/python3 -I -c 'import {program}.__main__'", f"{program} --help")
    launchers = {"init": "minivm", "gitsync": "gitsync"}
    return (
        f"/{VENV}/bin/python3 -I -c 'import {', '.join(PACKAGES)}, json; json.load(open(\"/etc/minivm/plan.json\"))'",
        *(f"{launchers[name]} --help" for name in launchers if (repository / name / "cli.py").exists()),
    )
