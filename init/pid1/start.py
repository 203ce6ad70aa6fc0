"""The entrypoint's work: read and check the plan, run as PID 1, and report the reason of the end."""

from __future__ import annotations

import gc
import os
import sys

from init.errors import ConfigError, InitError, describe_error
from init.places import PLAN, REFUSED, pod_name
from init.plan.compile import plan_from_json, select, unset_variables

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import NoReturn

    from init.pid1.core import Core, Settings
    from init.plan.compile import Plan

DROP_INS = ("/etc/minivm", "/mnt/minivm/config")
TERMINATION_LOG = os.environ.get("MINIVM_TERMINATION_LOG", "/dev/termination-log")  # the pod may name another path
EX_SOFTWARE, EX_OSERR, EX_CONFIG = 70, 71, 78  # docs/reference/exit-codes.md


def main(arguments: list[str], began: float) -> int:
    gc.disable()  # until the first services run: freshly loaded modules have no garbage
    try:
        plan, settings = configure(arguments, dict(os.environ), began)
        from init.pid1.loop import Init

        init = Init(plan, settings)
    except InitError as error:
        return give_up(str(error), EX_CONFIG)
    except (OSError, MemoryError, ImportError) as error:
        return give_up(f"cannot begin: {describe_error(error)}", EX_OSERR)
    try:
        if settings.refused:
            refuse(init.core, settings.refused)
        code = init.run()
        init.core.attempt(lambda: report_why(init.core))
    except Exception as error:
        from init.pid1.loop import bug, stop_in_order

        text = bug(error)
        os.write(2, f"minivm: a bug of init itself; stopping everything in order\n{text}".encode())
        last_words(f"a bug of init itself\n{text}")
        stop_in_order(init.core)
        code = EX_SOFTWARE
    return code


def refuse(core: Core, text: str) -> None:
    """Report invalid drop-ins until `configwatch` has taken valid ones."""
    core.log(f"drop-ins: refused: {text}")
    core.condition("drop-ins", f"refused: {text}")


def report_why(core: Core) -> None:
    if core.engine.ending.why is not None:
        from init.view.reasons import cause_text

        last_words(f"{cause_text(core.engine.ending.why, quoting=False)}\n")  # more people read it than the log


def configure(arguments: list[str], env: dict[str, str], began: float) -> tuple[Plan, Settings]:
    """Return this pod's plan and settings, all checked. Nothing has been started when this fails."""
    from init.pid1.core import Settings
    from init.pid1.spawn import procs

    file = PLAN
    if arguments[:1] == ["--plan"] and len(arguments) > 1:
        file, arguments = arguments[1], arguments[2:]
    if arguments and "MINIVM_UNDER" not in env:
        raise ConfigError("start", f"unknown arguments {' '.join(arguments)}", hint="--plan FILE")
    text, refused = read_plan(file)
    for name in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID"):
        env.pop(name, None)  # they are for PID 1, if for any process; not for the services
    procs.close_on_exec()
    procs.reset_inherited()
    if not procs.is_pid_1():
        from ground.commands import become_subreaper

        become_subreaper()  # in a test, or on a laptop
    plan = plan_from_json(text, file)
    if "MINIVM_UNDER" in env:
        from init.pid1.guest import adopt

        adopt(plan.role, arguments, env)
    plan = select(plan, env, os.path.exists)
    errors = unset_variables(plan, env)
    if errors:
        raise ConfigError("start", "\n".join(str(error) for error in errors), file=file)
    settings = Settings(
        run=env.get("MINIVM_RUN") or "/run/minivm",
        http=env.get("MINIVM_HTTP", "0.0.0.0:8650"),
        probes=env.get("MINIVM_PROBES", ""),
        probes_from=one_of(env, "MINIVM_PROBES_FROM", ("outside", "anywhere")),
        grace=seconds(env, "MINIVM_GRACE_SECONDS", 30.0),
        as_json=one_of(env, "MINIVM_LOG_FORMAT", ("text", "json")) == "json",
        pod=pod_name(env),
        syslog=env.get("MINIVM_SYSLOG", "/dev/log" if procs.is_pid_1() else ""),
        env=env,
        began=began,
        refused=refused,
    )
    try:
        os.makedirs(settings.run, mode=0o755, exist_ok=True)  # noqa: PTH103 - no pathlib on PID 1's path
    except OSError as error:
        raise ConfigError("start", f"{settings.run}: {error.strerror}", hint="mount a tmpfs on /run") from None
    return plan, settings


def read_plan(file: str) -> tuple[bytes, str]:
    """Return the image's plan, or the plan that a short child merges from it and the drop-ins.

    The child keeps YAML out of PID 1. Also returns the drop-ins that it ignored.
    """
    if any(has_files(f"{root}/{part}") for root in DROP_INS for part in ("services.d", "supervisor.d")):
        return merge_plan(file)
    try:
        with open(file, "rb") as stream:  # noqa: PTH123 - no pathlib on PID 1's path
            return stream.read(), ""
    except OSError as error:
        raise ConfigError("read the plan", error.strerror or str(error), file=file) from None


def has_files(directory: str) -> bool:
    try:
        return any(not name.startswith(".") for name in os.listdir(directory))  # noqa: PTH208 - as above
    except OSError:
        return False


def merge_plan(file: str) -> tuple[bytes, str]:
    output, write_output = os.pipe()
    errors = os.memfd_create("errors", os.MFD_CLOEXEC)  # a full pipe would block the child before it prints the plan
    command = [sys.executable, "-I", "-m", "init.dropins.merge", "boot", file]
    actions = [(os.POSIX_SPAWN_DUP2, write_output, 1), (os.POSIX_SPAWN_DUP2, errors, 2)]
    pid = os.posix_spawn(sys.executable, command, os.environ, file_actions=actions)
    os.close(write_output)
    with open(output, "rb") as stream:  # noqa: PTH123 - a descriptor
        text = stream.read()
    _, status = os.waitpid(pid, 0)
    os.lseek(errors, 0, os.SEEK_SET)
    with open(errors, "rb") as stream:  # noqa: PTH123 - a descriptor
        message = stream.read().decode(errors="replace").strip()
    if status:
        raise ConfigError("read the drop-ins", message or f"the reader ended with status {status}")
    refused = [line.removeprefix(REFUSED) for line in message.splitlines() if line.startswith(REFUSED)]
    return text, "; ".join(refused)


def seconds(env: Mapping[str, str], name: str, default: float) -> float:
    text = env.get(name) or str(default)
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1e7:
        raise ConfigError("start", f"{text!r} is not a number of seconds", field=name)
    return value


def one_of(env: Mapping[str, str], name: str, known: tuple[str, ...]) -> str:
    value = env.get(name) or known[0]
    if value not in known:
        raise ConfigError("start", f"{value!r} is not one of {', '.join(known)}", field=name)
    return value


def give_up(text: str, code: int) -> int:
    """Report an error before anything was started."""
    os.write(2, f"minivm: {text}\n".encode(errors="replace"))
    last_words(f"{text}\n")
    return code


def last_words(text: str) -> None:
    """Write the reason where Kubernetes reads it, if that file exists: outside a pod it must not be created."""
    try:
        fd = os.open(TERMINATION_LOG, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC)
        os.write(fd, text.encode(errors="replace")[:4096])
        os.close(fd)
    except OSError:
        return


def end(code: int) -> NoReturn:
    """Exit without the interpreter's own cleanup: everything has been written."""
    os._exit(code)
