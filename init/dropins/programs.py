"""Services from unchanged `[program:x]` files, read by supervisor's own parser.

docs/reference/services.md lists the differences from supervisord: log files are not written (lines go to the pod's
log), and the stop signal reaches the program alone. Sections that start nothing ([supervisord], ...) are ignored.
"""

from __future__ import annotations

import re
import shutil
import signal
from collections.abc import Iterable, Sequence
from configparser import Error as ParserError
from pathlib import Path
from typing import Any

from init.errors import ConfigError, nearest
from init.plan.service import Service
from init.plan.spec import parse_service

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
        before = [other.name for number, other in programs if number < priority]
        ordered.append(_after(service, before))
    return ordered


def _after(service: Service, names: Sequence[str]) -> Service:
    from init.lean import replace

    return replace(service, after=(*service.after, *sorted(set(names))))


def _read_file(path: Path) -> list[tuple[int, Service]]:
    import os

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
