"""Report of a standby on the volume, by which the active controller knows that a standby can take over now.

Each standby rewrites its file `lease/standby-POD` every second, with what its PID 1 says of the pod. A reader compares
two looks: a report that changes is of a pod that runs and reaches the volume. No clocks are compared.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ground.files import read_plain, rewrite, write_whole
from init.pod.addresses import host_and_port
from init.records import record

REPORT_S = 1.0
WATCHED_S = 5.0  # a reader waits so long for a change
MOST = 16  # files of pods that are gone stay, and are few
LONGEST_WHY = 200
LENGTH = 1023  # of a file without its newline
PAGE_S = 2.0
LONGEST_PAGE = 1 << 20
REQUEST = "/run/minivm/hand-over.json"  # {"heir": POD, "term": N, "until": a time of CLOCK_BOOTTIME}
LONGEST_REQUEST_S = 60.0
_NAME = re.compile(r"standby-([a-z0-9](?:[-a-z0-9.]{0,251}[a-z0-9])?)", re.ASCII)


@record(frozen=True, slots=True)
class Standby:
    """The last report of a pod. Its text identifies it; a damaged one counts as of a pod that is not ready."""

    pod: str
    text: bytes = b""
    ready: bool = False
    why: str = "its report is damaged"  # why it is not ready
    protocol: int = 0  # the number of its Slurm's state; 0 if unknown


def publish(directory: Path, standby: Standby, beat: int) -> None:
    """Write a report in place; the first one makes the file."""
    why = "".join(letter if " " <= letter <= "~" else "?" for letter in standby.why)[:LONGEST_WHY]
    content = {"beat": beat, "ready": standby.ready, "why": why, "protocol": standby.protocol}
    data = json.dumps(content).encode().ljust(LENGTH) + b"\n"
    path = directory / f"standby-{standby.pod}"
    try:
        rewrite(path, data)
    except FileNotFoundError:
        directory.mkdir(mode=0o700, exist_ok=True)
        write_whole(path, data, 0o600)


def read_all(directory: Path) -> dict[str, Standby]:
    """Return the last report of each pod."""
    try:
        names = sorted(os.listdir(directory))  # noqa: PTH208 - names alone
    except FileNotFoundError:
        return {}
    pods = [match[1] for name in names if (match := _NAME.fullmatch(name))]
    return {pod: parse(pod, read_plain(directory / f"standby-{pod}", 4096) or b"") for pod in pods[:MOST]}


def parse(pod: str, text: bytes) -> Standby:
    try:
        data = json.loads(text)
        ready, why, protocol = data["ready"], data["why"], data["protocol"]
    except (ValueError, RecursionError, TypeError, KeyError):
        return Standby(pod, text)
    if not (isinstance(ready, bool) and isinstance(why, str) and isinstance(protocol, int)):
        return Standby(pod, text)
    plain = "".join(letter for letter in why if letter.isprintable())[:LONGEST_WHY]
    return Standby(pod, text, ready, plain, protocol)


def objection(standby: Standby, before: Standby | None, protocol: int) -> str:
    """Return why the active controller does not hand over to this pod; "" if it can. Pure."""
    if before is None or before.text == standby.text:
        return f"{standby.pod} does not report"
    if not standby.ready:
        return f"{standby.pod} is not ready: {standby.why}"
    if standby.protocol < protocol:
        return f"{standby.pod} has an older Slurm, which cannot read this one's state"
    return ""


def choose(
    own: str, wanted: str, protocol: int, before: Mapping[str, Standby], now: Mapping[str, Standby]
) -> tuple[str, str]:
    """Return the pod to hand over to, or "" and why there is none. Pure."""
    if wanted == own:
        return "", f"{own} acts already"
    if wanted and wanted not in now:
        return "", f"{wanted} has never stood by"
    others = [standby for pod, standby in now.items() if pod != own and wanted in ("", pod)]
    objections = {standby.pod: objection(standby, before.get(standby.pod), protocol) for standby in others}
    fit = sorted(pod for pod, text in objections.items() if not text)
    if fit:
        return fit[0], ""
    return "", "; ".join(objections.values()) or "no pod stands by"


# What a controller knows of itself, from the page of its PID 1.


def read_page(http: str) -> Mapping[str, Any]:
    """Return PID 1's status; an empty mapping without an answer. `http` is the address that it listens on."""
    import http.client as web

    host, port = host_and_port(http, 8650)
    connection = web.HTTPConnection("127.0.0.1" if host in ("", "0.0.0.0", "::") else host, port, timeout=PAGE_S)
    try:
        connection.request("GET", "/status")
        data = json.loads(connection.getresponse().read(LONGEST_PAGE))
    except (OSError, web.HTTPException, ValueError, RecursionError):
        return {}
    finally:
        connection.close()
    return data if isinstance(data, dict) else {}


def of_page(page: Mapping[str, Any]) -> tuple[bool, str]:
    """Tell if this standby can take over, and why not. Pure."""
    if not page:
        return False, "PID 1 does not answer"
    if page.get("phase") != "running":
        return False, f"its pod is {page.get('phase')}"
    if page.get("drain"):
        return False, "it was drained: `minivm resume` there takes that back"
    reasons = page.get("reasons")
    return page.get("ready") is True, "; ".join(map(str, reasons)) if isinstance(reasons, list) else ""


def serves(page: Mapping[str, Any]) -> bool:
    """Tell if slurmctld is ready, and clients are led to it. Pure."""
    services = page.get("services")
    views = [view for view in services if isinstance(view, dict)] if isinstance(services, list) else []
    states = {view.get("name"): view.get("ready") is True for view in views}
    return states.get("slurmctld", False) and states.get("address", True)


# The request of a hand-over, a file of root in the active controller's pod.


def requested_heir(file: Path, term: int, now: float) -> str:
    """Return the pod that root wants to act after this term; "" without a valid request."""
    try:
        status = file.lstat()
    except OSError:
        return ""
    data = read_plain(file, 4096) if status.st_uid in (0, os.geteuid()) else None
    try:
        request = json.loads(data or b"")
        heir, until = request["heir"], float(request["until"])
        is_for_it = request["term"] == term
    except (ValueError, RecursionError, TypeError, KeyError):
        return ""
    return heir if is_for_it and isinstance(heir, str) and now < until <= now + LONGEST_REQUEST_S else ""
