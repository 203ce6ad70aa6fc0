"""Planned hand-over: the active controller stops gently, and a standby acts at once.

The command only looks, asks and waits. It names the heir to the service `lease`, which announces it in the term's file,
and makes one request to PID 1: stop gently what is bound to the lease, then the lease, which releases the term to the
heir. Killed at any moment it leaves nothing half done: PID 1 ends what it began, a request is void after VALID_S, and
an heir that does not come loses its right after `lease.LASTS_S`.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ground.files import locked, write_json
from init.errors import InitError, in_words
from init.pod.client import Client
from init.pod.helper import service
from init.pod.pod import Pod
from init.records import record
from init.slurm.place import base, held, known, several
from init.state import lease, standby
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
        why = "this pod is not one of several controllers"
        raise HandOverError(why, hint="see docs/how-to/two-controllers.md")
    store, term = Terms(base(pod)), held(pod)
    with _in_words(), _only_one(pod):
        _check_acting(pod, store, term)
        heir = _find_heir(pod, wanted, end)
        report(f"{pod.name} has term {term}; {heir} takes over")
        request = pod.path(standby.REQUEST)
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
        raise HandOverError(in_words(error), hint=hint) from error
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
    release = known(pod)
    before, last = standby.read_all(directory), min(end, time.monotonic() + standby.WATCHED_S)
    while True:
        time.sleep(LOOK_S)
        now = standby.read_all(directory)
        heir, why = standby.choose(pod.name, wanted, release.protocol if release else 0, before, now)
        if heir:
            return heir
        if time.monotonic() > last:
            raise HandOverError(f"no healthy standby: {why}", hint="`minivm status` in that pod says more")


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
    why = f"{heir} has not taken over yet; {pod.name} acts again if it does not come"
    while time.monotonic() < end:
        newest = store.newest()
        if newest is not None and newest.number > term:
            if newest.holder == pod.name:
                raise HandOverError(f"{heir} did not take over, {pod.name} acts again in term {newest.number}",
                                    hint=f"`minivm logs lease` in {heir}")  # fmt: skip
            why = f"{newest.holder} has term {newest.number}, and its slurmctld is not ready"
            try:
                if newest.serves:
                    socket.create_connection(pod.controller, CONNECT_S).close()
                    return newest.holder, newest.number
            except OSError as error:
                why = f"{newest.holder} serves, and {pod.controller[0]} leads nowhere: {error.strerror or error}"
        time.sleep(LOOK_S)
    raise HandOverError(why, hint=f"`minivm why` in {heir}")
