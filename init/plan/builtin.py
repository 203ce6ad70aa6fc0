"""Built-in commands that a service may name, and their modules. Pure."""

from __future__ import annotations

from init.errors import nearest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

MARK = "builtin:"
# The module of each, whose `main` returns the exit code; imported in the child, never by PID 1.
MODULES = {
    "cluster-proof": "init.slurm.proof",
    "fresh-node": "init.slurm.fresh",
    "prepare": "init.prepare.__main__",
    "refused": "init.dropins.refused",
}
# Steps of `prepare`, with the module and function of `init.prepare` for each.
STEPS = {
    "accounting-state": ("state_guard", "accounting"),
    "cgroups": ("cgroups", "run"),
    "cluster-number": ("database", "number"),
    "directories": ("directories", "run"),
    "fast-scripts": ("node", "fast_scripts"),
    "gather-cgroups": ("cgroups", "gather"),
    "hostkeys": ("ssh", "hostkeys"),
    "identity": ("identity", "run"),
    "jwt-key": ("secrets", "jwt"),
    "mariadb": ("database", "mariadb"),
    "munge-key": ("secrets", "munge"),
    "node": ("node", "run"),
    "pam-adopt": ("ssh", "adopt"),
    "profile": ("identity", "write_profile"),
    "saved-state": ("saved_state", "run"),
    "slurm-key": ("secrets", "slurm_key"),
    "slurm-config": ("slurm_config", "run"),
    "slurm-state": ("state_guard", "check_release"),
    "slurmdbd-config": ("database", "slurmdbd"),
    "sssd": ("secrets", "sssd"),
    "state-guard": ("state_guard", "run"),
    "stale": ("directories", "remove_stale"),
    "user-limits": ("user_limits", "run"),
}


def is_builtin(command: Sequence[str]) -> bool:
    return bool(command) and command[0].startswith(MARK)


def mistake(command: Sequence[str]) -> tuple[str, str]:
    """Return the error in a built-in command and a hint; empty if it is valid."""
    name, arguments = command[0].removeprefix(MARK), command[1:]
    if name not in MODULES:
        return f"no built-in {name!r}", nearest(name, [*MODULES])
    if name == "refused":
        return "", ""
    if name != "prepare":
        return (f"{command[0]} takes no arguments", "") if arguments else ("", "")
    unknown = next((step for step in arguments if step not in STEPS), None)
    if unknown is not None or not arguments:
        return f"no step {unknown or ''!r} of preparation", nearest(unknown or "", [*STEPS])
    return "", ""
