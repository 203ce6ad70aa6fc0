"""Convert a service to supervisor's XML-RPC: states, faults, the reply of getProcessInfo. Pure."""

from __future__ import annotations

from typing import Any

from init.view.snapshot import ServiceView

# supervisor.xmlrpc.Faults and supervisor.states.ProcessStates, as the protocol numbers them.
UNKNOWN_METHOD, BAD_ARGUMENTS, BAD_NAME, BAD_SIGNAL, NO_FILE, FAILED = 1, 3, 10, 11, 20, 30
ABNORMAL_TERMINATION, ALREADY_STARTED, NOT_RUNNING, SUCCESS = 40, 60, 70, 80
STATES = {
    "waiting": (10, "STARTING"),
    "preparing": (10, "STARTING"),
    "starting": (10, "STARTING"),
    "ready": (20, "RUNNING"),
    "reloading": (20, "RUNNING"),
    "failing": (20, "RUNNING"),
    "handover": (20, "RUNNING"),
    "backoff": (30, "BACKOFF"),
    "stopping": (40, "STOPPING"),
    "stopped": (0, "STOPPED"),
    "done": (100, "EXITED"),
    "failed": (200, "FATAL"),
}


def process_info(view: ServiceView, now: float) -> dict[str, Any]:
    """Return one service as getProcessInfo does."""
    number, name = STATES.get(view.state, (1000, "UNKNOWN"))
    return {
        "name": view.name,
        "group": view.name,
        "start": int(now - view.uptime) if view.pid else 0,
        "stop": 0 if view.pid else int(now - view.since),
        "now": int(now),
        "state": number,
        "statename": name,
        "spawnerr": "; ".join(view.reasons) if view.state == "failed" else "",
        "exitstatus": 0,
        "logfile": "",
        "stdout_logfile": "",
        "stderr_logfile": "",
        "pid": view.pid,
        "description": describe(view),
    }


def describe(view: ServiceView) -> str:
    if view.pid:
        seconds = int(view.uptime)
        clock = f"{seconds // 3600 % 24}:{seconds // 60 % 60:02}:{seconds % 60:02}"
        days = seconds // 86400
        uptime = f"{days} days, {clock}" if days > 1 else f"1 day, {clock}" if days else clock
        return f"pid {view.pid}, uptime {uptime}"
    return "; ".join(view.reasons) or view.last_exit or view.state
