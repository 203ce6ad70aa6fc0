"""Read-only requests on the control socket."""

from __future__ import annotations

import re

from init.errors import CannotStart, RequestError, nearest
from init.pid1.log.logs import OWN
from init.pid1.serve.control import text
from init.view import reasons

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from init.pid1.core import Core
    from init.pid1.serve.control import Connection, Request
    from init.view.snapshot import Snapshot

_SECRET = r"(?i)SECRET|PASSWORD|PASSWD|TOKEN|CREDENTIAL|PRIVATE|(^|_)KEY$"

# Objects of "cannot ..." for requests whose name is no verb.
_ABOUT = {
    "why": "tell why {} is not ready", "logs": "show the log of {}", "env": "show the environment of {}",
}  # fmt: skip


class Look:
    def __init__(self, core: Core) -> None:
        self._core = core
        self._watchers: dict[Connection, object] = {}

    def status(self, caller: Connection, _: Request) -> None:
        from init.view.snapshot import to_mapping

        caller.reply(snapshot=to_mapping(self._snapshot()))

    def _snapshot(self) -> Snapshot:
        core = self._core
        return reasons.snapshot(core.engine, core.settings.pod, core.poller.now())

    def why(self, caller: Connection, request: Request) -> None:
        engine, now = self._core.engine, self._core.poller.now()
        if request.get("service") is None:
            causes = reasons.pod_reasons(engine, now)
            caller.reply(ready=not causes, reasons=causes)
            return
        name = named(self._core, request)
        causes = reasons.service_reasons(engine, name, now)
        caller.reply(ready=not causes, reasons=causes)

    def trace(self, caller: Connection, _: Request) -> None:
        began = self._core.engine.began
        events = [
            {"t": round(item.at - began, 6), "service": item.service, "event": item.event, "detail": item.detail}
            for item in self._core.engine.trace.happenings()
        ]
        caller.reply(events=events, now=round(self._core.poller.now() - began, 6))

    def logs(self, caller: Connection, request: Request) -> None:
        logs = self._core.logs
        name = text(request, "service", OWN)
        if name not in logs.rings:
            named(self._core, request)  # known, but silent so far; otherwise an error with a hint
        lines = request.get("lines", 100)
        ring = logs.rings.get(name)
        caller.reply(lines=ring.tail(lines) if ring is not None and isinstance(lines, int) else [])
        if not request.get("follow"):
            return
        carry = caller

        def follow(block: bytes) -> None:
            carry.attempt(lambda: carry.reply(lines=block.decode(errors="backslashreplace").split("\n")[:-1]))

        followers = logs.followers.setdefault(name, [])
        followers.append(follow)
        caller.waiting = True
        caller.at_close.append(lambda: followers.remove(follow))

    def env(self, caller: Connection, request: Request) -> None:
        from init.pid1.spawn.procs import environment

        name = named(self._core, request)
        try:
            values = environment(self._core.engine.spec(name), self._core.settings.env, masked=True)
        except (OSError, CannotStart) as error:
            raise RequestError(f"show the environment of {name}", str(error)) from None
        caller.reply(
            environment={key: "********" if re.search(_SECRET, key) else values[key] for key in sorted(values)}
        )

    def plan(self, caller: Connection, _: Request) -> None:
        from json import loads

        from init.plan.compile import plan_to_json

        caller.reply(plan=loads(plan_to_json(self._core.engine.plan)))

    def watch(self, caller: Connection, _: Request) -> None:
        caller.waiting = True
        self._watchers[caller] = None
        caller.at_close.append(lambda: self._unwatched(caller))
        self.tell_watchers()

    def _unwatched(self, caller: Connection) -> None:
        self._watchers.pop(caller, None)

    def tell_watchers(self) -> None:
        """Tell watchers about changed causes; durations in the reasons change all the time and do not count."""
        if not self._watchers:
            return
        engine = self._core.engine
        states = tuple((name, state.phase, state.said, state.why) for name, state in engine.states.items())
        key = (engine.phase, reasons.drain_text(engine), states, tuple(engine.conditions.values()))
        now = self._core.poller.now()
        for caller, before in list(self._watchers.items()):
            if before != key:
                self._watchers[caller] = key
                caller.attempt(self._telling(caller, now))

    def _telling(self, caller: Connection, now: float) -> Callable[[], None]:
        def tell() -> None:
            engine = self._core.engine
            causes = reasons.pod_reasons(engine, now, quoting=False)  # a watcher may pass them on to others
            degraded = reasons.degraded(engine, now, quoting=False)
            caller.reply(ready=not causes, phase=engine.phase.value, reasons=causes, degraded=degraded)

        return tell


def named(core: Core, request: Request) -> str:
    """Return the service that a request names."""
    name = text(request, "service")
    known = core.engine.specs
    if name not in known:
        what = _ABOUT.get(str(request["op"]), f"{request['op']} {{}}").format(name)
        raise RequestError(what, "no such service", hint=nearest(name, list(known)))
    return name
