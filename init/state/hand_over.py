"""Planned hand-over: the active controller stops gently, and a standby acts at once.

The command only looks, asks and waits. It names the heir to the service `lease`, which announces it in the term's file,
and makes one request to PID 1: stop gently what is bound to the lease, then the lease, which releases the term to the
heir. Killed at any moment it leaves nothing half done: PID 1 ends what it began, a request is void after VALID_S, and
an heir that does not come loses its right after `lease.LASTS_S`.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ground.files import locked, read_plain, rewrite, write_json, write_whole
from init.errors import InitError, describe_error
from init.lean import record
from init.pod.addresses import host_and_port
from init.pod.client import Client, service
from init.pod.pod import Pod
from init.slurm.place import base, read_release, read_term, several
from init.state import lease
from init.state.lease import Terms

LOCK = "/run/minivm/hand-over.lock"
LOOK_S = 0.05
VALID_S = 58.0  # of a request; PID 1 takes up to 48 s to stop a copy, slurmctld and slurmdbd
ANNOUNCED_S = 4.0  # the next renewal of the term
CONNECT_S = 0.3
WITHIN_S = 90.0


class HandOverError(InitError):
    """A hand-over that is refused, or that did not come to its end."""

    def __init__(self, why: str, *, hint: str = "") -> None:
        super().__init__("hand over", why, hint=hint)


@record(frozen=True, slots=True)
class HandOver:
    former: str
    former_term: int
    active: str
    term: int
    gap: float  # seconds from the moment that PID 1 stops the former slurmctld, until clients reach one that is ready

    def __str__(self) -> str:
        return (
            f"{self.active} acts in term {self.term}, after {self.former} in term {self.former_term};"
            f" no slurmctld for {self.gap:.1f} s"
        )


def hand_over(
    pod: Pod, wanted: str = "", *, report: Callable[[str], object] = print, within: float = WITHIN_S
) -> HandOver:
    """Hand over from this pod to `wanted`, or to any healthy standby; HandOverError says why not."""
    end = time.monotonic() + within
    if not several(pod):
        problem = "this pod is not one of several controllers"
        raise HandOverError(problem, hint="see docs/how-to/two-controllers.md")
    store, term = Terms(base(pod)), read_term(pod)
    with _in_words(), _only_one(pod):
        _check_acting(pod, store, term)
        heir = _find_heir(pod, wanted, end)
        report(f"{pod.name} has term {term}; {heir} takes over")
        request = pod.path(REQUEST)
        write_json(request, {"heir": heir, "term": term, "until": lease.now() + VALID_S})
        try:
            _wait_announced(store, term, heir, end)
        except BaseException:
            request.unlink(missing_ok=True)
            raise
        # From here on the request must outlive this command: without an heir this pod could take its own term back.
        stopped = _stop_acting(end)
        active, number = _wait_served(pod, store, term, heir, end)
        request.unlink(missing_ok=True)
        return HandOver(pod.name, term, active, number, time.monotonic() - stopped)


@contextmanager
def _in_words() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        hint = "run this as root in the controller's pod" if isinstance(error, PermissionError) else ""
        raise HandOverError(describe_error(error), hint=hint) from error
    except EOFError as error:
        raise HandOverError(str(error), hint="the pod ends, and its standby takes over") from error


@contextmanager
def _only_one(pod: Pod) -> Iterator[None]:
    fd = os.open(pod.path(LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        if not locked(fd):
            raise HandOverError("another hand-over is under way", hint="minivm status")
        yield
    finally:
        os.close(fd)


def _check_acting(pod: Pod, store: Terms, term: int) -> None:
    newest = store.newest()
    if newest is None:
        raise HandOverError("no controller has had a term yet", hint="minivm status")
    if not term or newest.number != term or newest.holder != pod.name:
        holder = newest.holder or "an unknown pod"
        raise HandOverError(f"{pod.name} does not act: {holder} has term {newest.number}", hint=f"run it in {holder}")


def _find_heir(pod: Pod, wanted: str, end: float) -> str:
    """Return a pod whose report changes meanwhile, so that it runs and reaches the volume."""
    directory = Terms(base(pod)).directory
    release = read_release(pod)
    before, last = read_all(directory), min(end, time.monotonic() + WATCHED_S)
    while True:
        time.sleep(LOOK_S)
        now = read_all(directory)
        heir, problem = choose(pod.name, wanted, release.protocol if release else 0, before, now)
        if heir:
            return heir
        if time.monotonic() > last:
            raise HandOverError(f"no healthy standby: {problem}", hint="`minivm status` in that pod says more")


def _wait_announced(store: Terms, term: int, heir: str, end: float) -> None:
    last = min(end, time.monotonic() + ANNOUNCED_S)
    while True:
        newest = store.newest()
        if newest is not None and newest.number == term and newest.heir == heir:
            return
        if newest is None or newest.number != term or time.monotonic() > last:
            raise HandOverError("the service lease did not announce it", hint="minivm why lease; minivm logs lease")
        time.sleep(LOOK_S)


def _stop_acting(end: float) -> float:
    """Ask PID 1, and return the moment from which slurmctld takes no more requests."""
    with Client() as pid1:
        pid1.request("restart", service="lease", bound=True, wait=False)
        while time.monotonic() < end:
            view = service(pid1, "slurmctld")
            if view is None or view.state not in ("ready", "reloading"):
                break
            time.sleep(LOOK_S / 2)
    return time.monotonic()


def _wait_served(pod: Pod, store: Terms, term: int, heir: str, end: float) -> tuple[str, int]:
    """Wait until a slurmctld of a later term is ready, and clients reach one; return its pod and term."""
    problem = f"{heir} has not taken over yet; {pod.name} acts again if it does not come"
    while time.monotonic() < end:
        newest = store.newest()
        if newest is not None and newest.number > term:
            if newest.holder == pod.name:
                raise HandOverError(f"{heir} did not take over, {pod.name} acts again in term {newest.number}",
                                    hint=f"`minivm logs lease` in {heir}")  # fmt: skip
            problem = f"{newest.holder} has term {newest.number}, and its slurmctld is not ready"
            try:
                if newest.serves:
                    socket.create_connection(pod.controller, CONNECT_S).close()
                    return newest.holder, newest.number
            except OSError as error:
                problem = f"{newest.holder} serves, and {pod.controller[0]} leads nowhere: {error.strerror or error}"
        time.sleep(LOOK_S)
    raise HandOverError(problem, hint=f"`minivm why` in {heir}")


# The standbys' files. Each standby rewrites `lease/standby-POD` every second, with what its PID 1 says of the pod. A
# reader compares numbers of one file, never clocks of two pods.


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
    reason = "".join(letter if " " <= letter <= "~" else "?" for letter in standby.why)[:LONGEST_WHY]
    content = {"beat": beat, "ready": standby.ready, "why": reason, "protocol": standby.protocol}
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
        ready, reason, protocol = data["ready"], data["why"], data["protocol"]
    except (ValueError, RecursionError, TypeError, KeyError):
        return Standby(pod, text)
    if not (isinstance(ready, bool) and isinstance(reason, str) and isinstance(protocol, int)):
        return Standby(pod, text)
    plain = "".join(letter for letter in reason if letter.isprintable())[:LONGEST_WHY]
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
    candidates = [standby for pod, standby in now.items() if pod != own and wanted in ("", pod)]
    objections = {standby.pod: objection(standby, before.get(standby.pod), protocol) for standby in candidates}
    fit = sorted(pod for pod, text in objections.items() if not text)
    if fit:
        return fit[0], ""
    return "", "; ".join(objections.values()) or "no pod stands by"


# A controller's own state, from the page of its PID 1.


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


def parse_page(page: Mapping[str, Any]) -> tuple[bool, str]:
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


def read_requested_heir(file: Path, term: int, now: float) -> str:
    """Return the pod that root wants to act after this term; "" without a valid request."""
    data = read_plain(file, 4096, trusted=True)
    try:
        request = json.loads(data or b"")
        heir, until = request["heir"], float(request["until"])
        is_for_it = request["term"] == term
    except (ValueError, RecursionError, TypeError, KeyError):
        return ""
    return heir if is_for_it and isinstance(heir, str) and now < until <= now + LONGEST_REQUEST_S else ""
