"""The work of `minivm check` and `minivm plan`: read, compile, and report all errors. No side effects."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from init.errors import ConfigError, raise_all
from init.plan.compile import Plan, compile_plan, overlay, plan_from_json, select, unset_variables
from init.plan.spec import parse_drain

OUTSIDE = "outside a pod name a file, or in a checkout a role"


def load(path: Path, role: str | None, *, boot: bool = False) -> Plan:
    """Load the plan of this image with its drop-ins; `boot` drops services that this pod would not start."""
    from init.dropins.merge import merge

    plan = merge(from_checkout(role) if role and not path.exists() and role_file(role).exists() else read(path))
    if role and plan.role != role:
        raise ConfigError("show the plan", f"{path} is the plan of {plan.role}, not of {role}")
    return select(plan, os.environ, os.path.exists) if boot else plan


def role_file(role: str) -> Path:
    """Return the file that describes a role in a checkout of the project; an image has none."""
    return Path(__file__).parents[2] / "images" / "roles" / f"{role}.yaml"


def from_checkout(role: str) -> Plan:
    """Compile the plan that a build would produce."""
    from init.dropins import merge

    file = role_file(role)
    data = merge.load_mapping(file)
    names, drain, known = data.get("services"), data.get("drain"), merge.load_directory()
    missing = [str(name) for name in names if name not in known] if isinstance(names, list) else ["a plain list"]
    if missing or not isinstance(names, list):
        problem = f"services: no {', '.join(missing)}"
        raise ConfigError("compile the plan", problem, file=str(file), hint="`build.py plan` reads every form")
    drain_spec = parse_drain(drain, str(file)) if isinstance(drain, dict) else None
    return compile_plan(role, [known[name] for name in names], drain_spec)


def read(path: Path) -> Plan:
    try:
        return plan_from_json(path.read_text(), str(path))
    except FileNotFoundError:
        raise ConfigError("read the plan", "no such file", file=str(path), hint=OUTSIDE) from None
    except OSError as error:
        raise ConfigError("read the plan", error.strerror or str(error), file=str(path)) from error


def check_files(files: Sequence[Path], plan_file: Path) -> Iterator[str]:
    """Check the files; yield lines about valid ones, raise ConfigError with all errors."""
    from init.dropins import merge

    plan = read(plan_file) if plan_file.exists() or not files else None
    if files:
        errors: list[ConfigError] = []
        services = []
        for path in _expand(files):
            try:
                if path.suffix == ".conf":
                    from init.dropins.programs import read_programs

                    services += read_programs([path])
                elif path.suffix == ".json":
                    plan = read(path)
                else:
                    mapping = merge.load_mapping(path)
                    if mapping != {"disabled": True}:
                        services.append(merge.load_service(path))
            except ConfigError as error:
                errors.append(error)
        raise_all("check the services", errors)
        if plan is not None:
            plan = overlay(plan, services)
        yield f"{len(services)} services are good"
    elif plan is not None:
        plan = merge.merge(plan)
    if plan is None:
        return
    # Only services that this pod would start need their variables.
    raise_all("check the plan", unset_variables(select(plan, os.environ, os.path.exists), os.environ))
    yield f"the plan of {plan.role or 'this image'} is good: {len(plan.services)} services"


def _expand(files: Sequence[Path]) -> Iterator[Path]:
    for path in files:
        if path.is_dir():
            yield from sorted(item for item in path.iterdir() if item.suffix in (".yaml", ".conf"))
        else:
            yield path
