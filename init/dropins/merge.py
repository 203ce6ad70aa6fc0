"""Services in YAML: the image's files, and an operator's drop-ins merged into a compiled plan.

The only importer of yaml. PID 1 runs it as a child (`python3 -I -m init.dropins.merge merge PLAN`) and reads JSON.

Unchanged `[program:x]` files become services too; supervisor's own parser reads them. docs/reference/services.md lists
the differences from supervisord: log files are not written (lines go to the pod's log), and the stop signal reaches the
program alone. Sections that start nothing ([supervisord], ...) are ignored.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from configparser import Error as ParserError
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ground.errors import counted
from init.errors import ConfigError, InitError, nearest, raise_all
from init.lean import replace
from init.places import PLAN, REFUSED
from init.plan.compile import (
    Plan,
    compile_plan,
    overlay,
    plan_from_json,
    plan_to_json,
    select,
    unset_variables,
    without,
)
from init.plan.service import Service
from init.plan.spec import parse_drain, parse_service

SERVICES = Path(__file__).parents[1] / "services"
ROOTS = (Path("/etc/minivm"), Path("/mnt/minivm/config"))  # the later one wins
EX_CONFIG = 78
READING = "read the services"

# Programs of supervisor.

# fmt: off
PROGRAM_KEYS = (
    "command", "process_name", "numprocs", "numprocs_start", "priority", "autostart", "startsecs", "startretries",
    "autorestart", "exitcodes", "stopsignal", "stopwaitsecs", "stopasgroup", "killasgroup", "user", "redirect_stderr",
    "stdout_logfile", "stdout_logfile_maxbytes", "stdout_logfile_backups", "stdout_capture_maxbytes",
    "stdout_events_enabled", "stdout_syslog", "stderr_logfile", "stderr_logfile_maxbytes", "stderr_logfile_backups",
    "stderr_capture_maxbytes", "stderr_events_enabled", "stderr_syslog", "environment", "directory", "umask",
    "serverurl",
)
# fmt: on
IGNORED_SECTIONS = ("supervisord", "supervisorctl", "unix_http_server", "inet_http_server")


def read_programs(files: Iterable[Path]) -> list[Service]:
    """Read the services of all programs; each waits for the start of those with a lower priority number."""
    programs: list[tuple[int, Service]] = []
    for path in files:
        programs += _read_file(path)
    ordered: list[Service] = []
    for priority, service in sorted(programs, key=lambda item: (item[0], item[1].name)):
        earlier = {program.name for number, program in programs if number < priority}
        ordered.append(replace(service, after=(*service.after, *sorted(earlier))))
    return ordered


def _read_file(path: Path) -> list[tuple[int, Service]]:
    """Read the programs of one file, each with its priority."""
    from supervisor.options import ServerOptions, UnhosedConfigParser  # type: ignore[import-untyped]  # supervisor has no types

    parser = UnhosedConfigParser()
    options = ServerOptions()
    options.here = str(path.parent)
    options.configfile = str(path)
    options.identifier = "minivm"
    options.serverurl = None
    options.environ_expansions = {f"ENV_{name}": value for name, value in os.environ.items()}
    parser.expansions = options.environ_expansions
    try:
        if not parser.read([str(path)]):
            raise ConfigError("read programs", "the file cannot be read", file=str(path))
        parser.expand_here(options.here)
    except (ParserError, UnicodeDecodeError) as error:
        raise ConfigError("read programs", " ".join(str(error).split()), file=str(path)) from None
    services: list[tuple[int, Service]] = []
    for section in parser.sections():
        kind, _, name = section.partition(":")
        if section in IGNORED_SECTIONS or kind in ("rpcinterface", "group", "ctlplugin"):
            continue
        if kind != "program" or not name:
            hint = "only [program:NAME] is read" if kind != "include" else "put the files into the directory"
            raise ConfigError("read programs", f"[{section}] is not supported", file=str(path), hint=hint)
        for key in parser.options(section):
            if key not in PROGRAM_KEYS:
                raise ConfigError(
                    f"read program {name}", "unknown key", file=str(path), field=key, hint=nearest(key, [*PROGRAM_KEYS])
                )
        try:
            configs = options.processes_from_section(parser, section, name.strip())
        except ValueError as error:
            problem = str(error)
            if "key/value pairs" in problem or "'environment'" in problem:  # they may hold a password
                problem = 'its environment is not NAME="value",...'
            raise ConfigError(f"read program {name}", problem, file=str(path), field=section) from None
        autostart = parser.get(section, "autostart") if parser.has_option(section, "autostart") else "true"
        if autostart.strip().lower() in ("false", "no", "off", "0"):
            raise ConfigError(
                f"read program {name}",
                "autostart=false is not supported",
                file=str(path),
                field="autostart",
                hint="take the file out of the directory, or stop the service with minivm stop",
            )
        services += [(int(config.priority), _service(config, path)) for config in configs]
    return services


def _service(config: Any, path: Path) -> Service:
    """Convert one process of a program to a service's mapping, so that the same checks apply."""
    from supervisor.datatypes import (  # type: ignore[import-untyped]  # as above
        RestartUnconditionally,
        RestartWhenExitUnexpected,
    )

    when = "never"
    if config.autorestart is RestartUnconditionally:
        when = "always"
    elif config.autorestart is RestartWhenExitUnexpected:
        when = "failure"
    mapping: dict[str, object] = {
        "about": f"a program of {path.name}",
        "command": _command(config.command, path, config.name),
        "after": ["pod"],
        "ready": "none",
        # supervisord counts tries that end within startsecs, each a second later than the last.
        "restart": {
            "when": when,
            "limit": int(config.startretries),
            "window": float(config.startsecs * (config.startretries + 1) + 10),
        },
        "stop": {"signal": signal.Signals(config.stopsignal).name, "grace": float(config.stopwaitsecs)},
        "environment": {name: value.replace("$", "$$") for name, value in (config.environment or {}).items()},
        "required": False,
    }
    if config.uid is not None:
        mapping["user"] = str(config.uid)
    if config.directory:
        mapping["cwd"] = str(config.directory)
    if config.umask is not None:
        mapping["umask"] = f"{config.umask:04o}"
    return parse_service(service_name(config.name), mapping, str(path))


def service_name(name: str) -> str:
    """Convert supervisor's name, nearly any text, to a service's name: lower-case letters, digits, - _ ."""
    cleaned = re.sub(r"[^a-z0-9]+", lambda match: match[0][0] if match[0][0] in "-_." else "-", name.lower()).strip(
        "-_."
    )
    return cleaned if cleaned[:1].isalpha() else f"p-{cleaned}"


def _command(text: str, path: Path, name: str) -> list[str]:
    import shlex

    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"read program {name}", str(error), file=str(path), field="command") from None
    if not words:
        raise ConfigError(f"read program {name}", "an empty command", file=str(path), field="command")
    program = words[0] if words[0].startswith("/") else shutil.which(words[0])
    if program is None:
        raise ConfigError(f"read program {name}", f"{words[0]} is not on PATH", file=str(path), field="command")
    # supervisor has already expanded the text, so a dollar sign stays as it is.
    return [word.replace("$", "$$") for word in (program, *words[1:])]


# YAML: services of the image, and an operator's drop-ins.

# yaml's errors quote such text, which may be a password that starts with * or an exclamation mark; every user of the
# pod may read the errors.
_NAMED = re.compile(r"(alias|anchor|tag|handle) (['\"]).*\2")


class _Loader(yaml.SafeLoader):
    """YAML that refuses a repeated key, whose first value would be lost silently."""


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    keys: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, Hashable):
            raise yaml.constructor.ConstructorError(None, None, "a key is one word", key_node.start_mark)
        if key in keys:
            raise yaml.constructor.ConstructorError(None, None, f"{key!r} appears twice", key_node.start_mark)
        keys.add(key)
    return dict(loader.construct_mapping(node, deep=True))


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def load_mapping(path: Path, what: str = "read a service") -> dict[str, object]:
    try:
        data = yaml.load(path.read_text(), _Loader)
    except OSError as error:
        raise ConfigError(what, error.strerror or str(error), file=str(path)) from error
    except UnicodeDecodeError:
        raise ConfigError(what, "not UTF-8 text", file=str(path)) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}" if mark else ""
        problem = _NAMED.sub(r"\1", getattr(error, "problem", None) or str(error))
        raise ConfigError(what, f"not YAML: {problem}", file=str(path), field=where) from None
    except RecursionError:
        raise ConfigError(what, "nested too deeply", file=str(path)) from None
    except (ValueError, LookupError, AttributeError, OverflowError):  # a 30th of February, `!!bool maybe`
        problem_ = "a value does not fit the type that YAML gives it, such as an impossible date"
        raise ConfigError(what, problem_, file=str(path), hint="quote it if it is text") from None
    if not isinstance(data, dict):
        raise ConfigError(what, "wanted a mapping", file=str(path))
    return data


def config_map(text: str, holding: str) -> dict[str, bytes]:
    """Return the files of the ConfigMap that contains the file `holding`; skip other documents."""
    try:
        documents = list(yaml.safe_load_all(text))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" (line {mark.line + 1})" if mark else ""
        raise ConfigError("read the ConfigMap", f"no YAML{where}") from error
    for document in documents:
        data = document.get("data") if isinstance(document, dict) and document.get("kind") == "ConfigMap" else None
        if isinstance(data, dict) and holding in data:
            return {str(name): str(content).encode() for name, content in data.items()}
    return {}


def load_service(path: Path) -> Service:
    return parse_service(path.stem, load_mapping(path), str(path))


def load_directory() -> dict[str, Service]:
    """Load every service of the image; report all errors at once."""
    services: dict[str, Service] = {}
    errors: list[ConfigError] = []
    for path in _files(SERVICES, ".yaml"):
        try:
            services[path.stem] = load_service(path)
        except ConfigError as error:
            errors.append(error)
    raise_all(READING, errors)
    return services


@dataclass(slots=True)
class DropIns:
    """Contents of the drop-in directories, by the service that each file is about."""

    services: dict[str, Service] = field(default_factory=dict)
    disabled: set[str] = field(default_factory=set)  # `disabled: true` and nothing else
    errors: list[tuple[str, ConfigError]] = field(default_factory=list)  # "" as name: a file of several programs


def read_dropins(roots: Iterable[Path]) -> DropIns:
    """Read the drop-ins of all directories. An invalid file becomes an error of its service, and the rest is read."""
    dropped = DropIns()
    for root in roots:
        for path in _files(root / "services.d", ".yaml"):
            name = path.stem
            # This file alone counts for the service and replaces one of an earlier directory.
            dropped.services.pop(name, None)
            dropped.disabled.discard(name)
            dropped.errors = [(service, error) for service, error in dropped.errors if service != name]
            try:
                mapping = load_mapping(path)
                if mapping == {"disabled": True}:
                    dropped.disabled.add(name)
                else:
                    dropped.services[name] = parse_service(name, mapping, str(path))
            except ConfigError as error:
                dropped.errors.append((name, error))
        programs = _files(root / "supervisor.d", ".conf")
        if programs:
            try:
                dropped.services.update({service.name: service for service in read_programs(programs)})
            except ConfigError as error:
                dropped.errors.append(("", error))
    return dropped


def load_dropins(roots: Iterable[Path]) -> tuple[list[Service], list[str]]:
    """Return the operator's services, and the names of those that a drop-in removes."""
    dropped = read_dropins(roots)
    raise_all(READING, [error for _, error in dropped.errors])
    return list(dropped.services.values()), sorted(dropped.disabled)


def merge(plan: Plan, roots: Iterable[Path] = ROOTS) -> Plan:
    """Merge the operator's drop-ins into the image's plan: all of them, or an error with everything that is wrong."""
    return _apply(plan, *load_dropins(roots))


def merge_for_boot(
    plan: Plan, roots: Iterable[Path] = ROOTS, env: Mapping[str, str] = os.environ
) -> tuple[Plan, list[ConfigError]]:
    """Merge for a boot: return the plan and the ignored drop-ins; a typo must not take down a whole role's pods.

    A service of the image that an invalid file would change or remove is held back, not run unchanged: the file may be
    there for safety (docs/decisions/wrong-drop-ins-disable-themselves.md).
    """
    dropped = read_dropins(roots)
    undecided: dict[str, Service | None] = dict(dropped.services) | dict.fromkeys(sorted(dropped.disabled))
    accepted: dict[str, Service | None] = {}
    errors, merged, is_progressing = dict[str, ConfigError](), plan, True
    while undecided and is_progressing:  # a service may need one that comes later
        is_progressing = False
        for name in list(undecided):
            tried = accepted | {name: undecided[name]}
            try:
                merged = _check_plan(plan, tried, env)
            except ConfigError as error:
                errors[name] = error
                continue
            accepted, is_progressing = tried, True
            del undecided[name]
    refused = [*dropped.errors, *((name, errors[name]) for name in undecided)]
    placeholders = [
        _hold_back(service, error) for name, error in refused if (service := plan.service(name)) is not None
    ]
    return (overlay(merged, placeholders) if placeholders else merged), [error for _, error in refused]


def _check_plan(plan: Plan, items: Mapping[str, Service | None], env: Mapping[str, str]) -> Plan:
    services = [item for item in items.values() if item is not None]
    merged = _apply(plan, services, [name for name, item in items.items() if item is None])
    chosen = [service for service in select(merged, env, os.path.exists).services if service.name in items]
    raise_all(READING, unset_variables(Plan(plan.role, tuple(chosen), None), env))
    return merged


def _hold_back(service: Service, error: ConfigError) -> Service:
    """Return a placeholder for the service: its dependants wait, with this error as the reason."""
    mapping: dict[str, object] = {"kind": "oneshot", "required": service.required, "restart": {"when": "never"}}
    mapping["command"] = ["builtin:refused", str(error).replace("$", "$$")]
    return parse_service(service.name, mapping, error.file)


def _apply(plan: Plan, services: Sequence[Service], disabled: Sequence[str]) -> Plan:
    """Add or replace services of the plan, and remove the disabled ones."""
    names = [service.name for service in plan.services]
    errors = [
        ConfigError("take a service away", f"the role has no {name!r}", file=f"{name}.yaml", hint=nearest(name, names))
        for name in disabled
        if name not in names
    ]
    raise_all(READING, errors)
    merged = overlay(plan, services) if services else plan
    return without(merged, disabled) if disabled else merged


def _files(directory: Path, suffix: str) -> list[Path]:
    """List files in name order, without dot files (Kubernetes' `..data` links, editors' leftovers)."""
    try:
        paths = sorted(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [path for path in paths if path.suffix == suffix and not path.name.startswith(".") and path.is_file()]


# `minivm check` and `minivm plan`: read, compile, and report all errors. No side effects.

OUTSIDE = "outside a pod name a file, or in a checkout a role"


def load_plan(path: Path, role: str | None, *, boot: bool = False) -> Plan:
    """Load the plan of this image with its drop-ins; `boot` drops services that this pod would not start."""
    plan = merge(compile_checkout(role) if role and not path.exists() and role_file(role).exists() else read_plan(path))
    if role and plan.role != role:
        raise ConfigError("show the plan", f"{path} is the plan of {plan.role}, not of {role}")
    return select(plan, os.environ, os.path.exists) if boot else plan


def role_file(role: str) -> Path:
    """Return the file that describes a role in a checkout of the project; an image has none."""
    return Path(__file__).parents[2] / "images" / "roles" / f"{role}.yaml"


def compile_checkout(role: str) -> Plan:
    """Compile the plan that a build would produce."""
    file = role_file(role)
    data = load_mapping(file)
    if isinstance(base := data.pop("extends", None), str):
        inherited = load_mapping(role_file(base))
        services_of = [item for part in (inherited, data) if isinstance(item := part.get("services", []), list)]
        data = {**inherited, **data, "services": [name for names in services_of for name in names]}
    names, drain, services = data.get("services"), data.get("drain"), load_directory()
    # NAME=FILE: the service NAME with a definition of this role's own.
    entries = [str(name).partition("=") for name in names] if isinstance(names, list) else []
    files = {name: own or name for name, _, own in entries}
    missing = [file for file in files.values() if file not in services] if files else ["a plain list"]
    if missing:
        problem = f"services: no {', '.join(missing)}"
        raise ConfigError("compile the plan", problem, file=str(file), hint="`build.py plan` reads every form")
    drain_spec = parse_drain(drain, str(file)) if isinstance(drain, dict) else None
    return compile_plan(role, [replace(services[file], name=name) for name, file in files.items()], drain_spec)


def read_plan(path: Path) -> Plan:
    try:
        return plan_from_json(path.read_text(), str(path))
    except FileNotFoundError:
        raise ConfigError("read the plan", "no such file", file=str(path), hint=OUTSIDE) from None
    except OSError as error:
        raise ConfigError("read the plan", error.strerror or str(error), file=str(path)) from error


def check_files(files: Sequence[Path], plan_file: Path) -> Iterator[str]:
    """Check the files; yield lines about valid ones, raise ConfigError with all errors."""
    plan = read_plan(plan_file) if plan_file.exists() or not files else None
    if files:
        errors: list[ConfigError] = []
        services = []
        for path in _expand(files):
            try:
                if path.suffix == ".conf":
                    services += read_programs([path])
                elif path.suffix == ".json":
                    plan = read_plan(path)
                else:
                    mapping = load_mapping(path)
                    if mapping != {"disabled": True}:
                        services.append(load_service(path))
            except ConfigError as error:
                errors.append(error)
        raise_all("check the services", errors)
        if plan is not None:
            plan = overlay(plan, services)
        yield f"{counted(len(services), 'service is', 'services are')} good"
    elif plan is not None:
        plan = merge(plan)
    if plan is None:
        return
    # Only services that this pod would start need their variables.
    raise_all("check the plan", unset_variables(select(plan, os.environ, os.path.exists), os.environ))
    yield f"the plan of {plan.role or 'this image'} is good: {counted(len(plan.services), 'service')}"


def _expand(files: Sequence[Path]) -> Iterator[Path]:
    for path in files:
        if path.is_dir():
            yield from sorted(item for item in path.iterdir() if item.suffix in (".yaml", ".conf"))
        else:
            yield path


def main(arguments: Sequence[str]) -> int:
    """Print the merged plan as JSON on stdout, and one error a line on stderr.

    `merge`: all or nothing; `boot`: without invalid drop-ins.
    """
    if not arguments or arguments[0] not in ("merge", "boot"):
        print("usage: python3 -I -m init.dropins.merge merge|boot [PLAN.json [ROOT...]]", file=sys.stderr)
        return 2
    path = Path(arguments[1] if len(arguments) > 1 else PLAN)
    roots = [Path(root) for root in arguments[2:]] or ROOTS
    try:
        plan = plan_from_json(path.read_text(), str(path))
        merged, refused = merge_for_boot(plan, roots) if arguments[0] == "boot" else (merge(plan, roots), [])
    except (InitError, OSError) as error:
        print(error, file=sys.stderr)
        return EX_CONFIG
    for error_ in refused:
        print(f"{REFUSED}{'; '.join(str(error_).splitlines())}", file=sys.stderr)
    sys.stdout.write(plan_to_json(merged))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
