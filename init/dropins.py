"""Services as people write them: the image's YAML files, and an operator's drop-ins over a compiled plan.

The only importer of yaml. PID 1 runs it as a child (`python3 -I -m init.dropins merge PLAN`) and reads JSON.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from init.errors import ConfigError, InitError, ManyErrors, nearest
from init.places import PLAN
from init.plan import Plan, overlay, plan_from_json, plan_to_json, without
from init.spec import Service, parse_service

SERVICES = Path(__file__).parent / "services"
ROOTS = (Path("/etc/minivm"), Path("/mnt/minivm/config"))  # the later one wins
EX_CONFIG = 78


class _Loader(yaml.SafeLoader):
    """YAML without its surprise that a key written twice silently loses its first value."""


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, Hashable):
            raise yaml.constructor.ConstructorError(None, None, "a key is one word", key_node.start_mark)
        if key in seen:
            raise yaml.constructor.ConstructorError(None, None, f"{key!r} stands there twice", key_node.start_mark)
        seen.add(key)
    return dict(loader.construct_mapping(node, deep=True))


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def load_mapping(path: Path) -> dict[str, object]:
    try:
        data = yaml.load(path.read_text(), _Loader)
    except OSError as error:
        raise ConfigError("read a service", error.strerror or str(error), file=str(path)) from error
    except UnicodeDecodeError:
        raise ConfigError("read a service", "not UTF-8 text", file=str(path)) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error)
        raise ConfigError("read a service", f"not YAML: {problem}", file=str(path), field=where) from None
    except RecursionError:
        raise ConfigError("read a service", "nested too deeply", file=str(path)) from None
    if not isinstance(data, dict):
        raise ConfigError("read a service", "wanted a mapping", file=str(path))
    return data


def load_service(path: Path) -> Service:
    return parse_service(path.stem, load_mapping(path), str(path))


def load_directory(directory: Path = SERVICES) -> dict[str, Service]:
    """Every service of a directory; all that is wrong is told at once."""
    services: dict[str, Service] = {}
    errors: list[ConfigError] = []
    for path in _files(directory, ".yaml"):
        try:
            services[path.stem] = load_service(path)
        except ConfigError as error:
            errors.append(error)
    _raise(errors)
    return services


def dropins(roots: Iterable[Path] = ROOTS) -> tuple[list[Service], list[str]]:
    """The operator's services, and the names of those that a drop-in takes away (`disabled: true` and nothing else)."""
    services: dict[str, Service] = {}
    gone: set[str] = set()
    errors: list[ConfigError] = []
    for root in roots:
        for path in _files(root / "services.d", ".yaml"):
            try:
                mapping = load_mapping(path)
                if mapping == {"disabled": True}:
                    gone.add(path.stem)
                    services.pop(path.stem, None)
                    continue
                services[path.stem] = parse_service(path.stem, mapping, str(path))
                gone.discard(path.stem)
            except ConfigError as error:
                errors.append(error)
        programs = _files(root / "supervisor.d", ".conf")
        if programs:
            from init.supervisor_files import read_programs

            try:
                services.update({service.name: service for service in read_programs(programs)})
            except ConfigError as error:
                errors.append(error)
    _raise(errors)
    return list(services.values()), sorted(gone)


def merge(plan: Plan, roots: Iterable[Path] = ROOTS) -> Plan:
    """The image's plan with the operator's drop-ins over it."""
    services, gone = dropins(roots)
    known = [service.name for service in plan.services]
    _raise(
        [
            ConfigError(
                "take a service away", f"the role has no {name!r}", file=f"{name}.yaml", hint=nearest(name, known)
            )
            for name in gone
            if name not in known
        ]
    )
    merged = overlay(plan, services) if services else plan
    return without(merged, gone) if gone else merged


def _files(directory: Path, suffix: str) -> list[Path]:
    """Files in name order. Kubernetes' `..data` links and editors' leftovers start with a dot and are not services."""
    try:
        found = sorted(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [path for path in found if path.suffix == suffix and not path.name.startswith(".") and path.is_file()]


def _raise(errors: list[ConfigError]) -> None:
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise ManyErrors("read the services", errors)


def main(arguments: Sequence[str]) -> int:
    """`merge PLAN.json [ROOT...]`: the merged plan as JSON on stdout; what is wrong, one error a line on stderr."""
    if not arguments or arguments[0] != "merge":
        print("usage: python3 -I -m init.dropins merge [PLAN.json [ROOT...]]", file=sys.stderr)
        return 2
    path = Path(arguments[1] if len(arguments) > 1 else PLAN)
    roots = [Path(root) for root in arguments[2:]] or ROOTS
    try:
        text = plan_to_json(merge(plan_from_json(path.read_text(), str(path)), roots))
    except (InitError, OSError) as error:
        print(error, file=sys.stderr)
        return EX_CONFIG
    sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
