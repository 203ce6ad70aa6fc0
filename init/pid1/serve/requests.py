"""Requests on the control socket: those that look, and those that change something."""

from __future__ import annotations

import os
import re

from init.engine.ending import DRAIN, RESUME
from init.engine.engine import Condition
from init.engine.states import Phase, PodPhase
from init.errors import CannotStart, RequestError, nearest
from init.fields import ENDLESS
from init.pid1.logs import OWN
from init.pid1.serve.control import text
from init.plan.service import SIGNALS, Kind
from init.view import reasons

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from init.pid1.children import Children
    from init.pid1.core import Core
    from init.pid1.serve.control import Connection, Request
    from init.view.status import Snapshot


# Read-only requests on the control socket.
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
        from init.view.status import to_mapping

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
        name = read_service_name(self._core, request)
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
            read_service_name(self._core, request)  # known, but silent so far; otherwise an error with a hint
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

        name = read_service_name(self._core, request)
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
        caller.at_close.append(lambda: self._forget_watcher(caller))
        self.tell_watchers()

    def _forget_watcher(self, caller: Connection) -> None:
        self._watchers.pop(caller, None)

    def tell_watchers(self) -> None:
        """Tell watchers about changed causes; durations in the reasons change all the time and do not count."""
        if not self._watchers:
            return
        engine = self._core.engine
        states = tuple(
            (name, state.phase, state.standby, state.probe_status, state.last_failure)
            for name, state in engine.states.items()
        )
        turn = reasons.role_among_pods(engine, quoting=False)
        key = (engine.phase, reasons.drain_text(engine), states, tuple(engine.conditions.values()), turn)
        now = self._core.poller.now()
        for caller, before in list(self._watchers.items()):
            if before != key:
                self._watchers[caller] = key
                caller.attempt(self._make_report(caller, now))

    def _make_report(self, caller: Connection, now: float) -> Callable[[], None]:
        def tell() -> None:
            engine = self._core.engine
            causes = reasons.pod_reasons(engine, now, quoting=False)  # a watcher may publish them
            degraded = reasons.list_degradations(engine, now, quoting=False)
            turn = reasons.role_among_pods(engine, quoting=False)
            caller.reply(ready=not causes, phase=engine.phase.value, reasons=causes, degraded=degraded, turn=turn)

        return tell


def read_service_name(core: Core, request: Request) -> str:
    """Return the service that a request names."""
    name = text(request, "service")
    specs = core.engine.specs
    if name not in specs:
        what = _ABOUT.get(str(request["op"]), f"{request['op']} {{}}").format(name)
        raise RequestError(what, "no such service", hint=nearest(name, list(specs)))
    return name


# How long a daemon must stay ready after a start or a reload before the request is answered: many die just after READY.
STAYS_READY = 1.0


class Requests:
    def __init__(self, core: Core, children: Children) -> None:
        self._core, self._children = core, children
        self._removed: set[str] = set()  # services whose log is kept until they have stopped
        self._waiters: list[tuple[Connection, Callable[[], bool], Callable[[], None]]] = []
        self._look = look = Look(core)
        self._ops: dict[str, Callable[[Connection, Request], None]] = {
            "status": look.status,
            "why": look.why,
            "trace": look.trace,
            "logs": look.logs,
            "start": self._change_service,
            "stop": self._change_service,
            "restart": self._change_service,
            "reload": self._reload,
            "signal": self._signal,
            "drain": self._drain,
            "resume": self._resume,
            "shutdown": self._shutdown,
            "env": look.env,
            "plan": look.plan,
            "apply": self._apply,
            "condition": self._condition,
            "watch": look.watch,
        }

    def handle(self, caller: Connection, request: Request) -> None:
        name = text(request, "op")
        op = self._ops.get(name)
        if op is None:
            raise RequestError(name or "answer", "no such request", hint=nearest(name, list(self._ops)))
        op(caller, request)

    # Requests.

    def _change_service(self, caller: Connection, request: Request) -> None:
        bound, engine, now = request.get("bound") is True, self._core.engine, self._core.poller.now()
        name = self._require_running(request, PodPhase.DRAINING if bound else PodPhase.RUNNING)
        if text(request, "op") == "restart" and bound:
            self._core.perform(engine.again(name, now, bound=True))
        else:
            act = {"start": engine.up, "stop": engine.down, "restart": engine.again}[text(request, "op")]
            self._core.perform(act(name, now))
        self._answer_when_stable(caller, request, name)

    def _reload(self, caller: Connection, request: Request) -> None:
        name = self._require_running(request)
        spec, state = self._core.engine.specs[name], self._core.engine.states[name]
        if not spec.reload.signal and not spec.reload.command:
            raise RequestError(f"reload {name}", "it cannot reload its configuration", hint="restart it")
        if not state.pid:
            raise RequestError(f"reload {name}", f"it does not run ({state.phase.value})")
        if spec.reload.signal:
            self._children.kill(state.pid, spec.reload.signal)
            self._answer_when_stable(caller, request, name)
            return
        caller.waiting = True

        def answer(how: str) -> None:
            if how == "exited 0":
                self._answer_when_stable(caller, request, name)
                return
            last = self._core.logs.finish(name)
            raise RequestError(f"reload {name}", f"{spec.reload.command[0]} {how}: {last}")

        def answer_end(how: str) -> None:
            caller.attempt(lambda: answer(how))
            if not caller.waiting:
                caller.resume()

        self._children.run_helper(name, spec.reload.command, None, answer_end)

    def _signal(self, caller: Connection, request: Request) -> None:
        name = read_service_name(self._core, request)
        number = text(request, "signal").upper().removeprefix("SIG")
        if number not in SIGNALS:
            raise RequestError(f"signal {name}", f"unknown signal {number!r}", hint=nearest(number, list(SIGNALS)))
        pid = self._core.engine.states[name].pid
        if not pid:
            raise RequestError(f"signal {name}", "it does not run")
        self._children.kill(pid, number)
        caller.reply(pid=pid)

    def _drain(self, caller: Connection, request: Request) -> None:
        engine = self._core.engine
        if engine.plan.drain is None:
            caller.reply(drain="drained")  # a role without a drain counts as drained
            return
        self._core.perform(engine.drain(self._core.poller.now()))
        self._answer_when(
            caller, request, lambda: engine.ending.drain_state() != "draining", self._make_drain_answer(caller, DRAIN)
        )

    def _resume(self, caller: Connection, request: Request) -> None:
        engine = self._core.engine
        if engine.phase not in (PodPhase.BOOT, PodPhase.RUNNING):
            raise RequestError("take the drain back", f"the pod is {engine.phase.value}")
        self._core.perform(engine.resume(self._core.poller.now()))
        self._answer_when(
            caller, request, lambda: not engine.ending.is_resuming(), self._make_drain_answer(caller, RESUME)
        )

    def _make_drain_answer(self, caller: Connection, requested: str) -> Callable[[], None]:
        """Return the callback that answers with one word on success, and with a reason on failure."""

        def answer() -> None:
            engine = self._core.engine
            if requested == DRAIN and engine.ending.requested == RESUME:
                raise RequestError("drain", "it was taken back meanwhile")
            if requested == RESUME and engine.ending.requested == DRAIN:
                raise RequestError("take the drain back", "the pod was asked to drain again meanwhile")
            progress, back = engine.ending.drain_state(), engine.states.get(RESUME)
            if progress == "failed":
                progress = reasons.drain_text(engine)
            elif back is not None and back.phase is Phase.FAILED:
                progress = f"failed: {back.last_failure}"
            caller.reply(drain=progress)

        return answer

    def _shutdown(self, caller: Connection, _: Request) -> None:
        self._core.perform(self._core.engine.end(self._core.poller.now()))
        caller.reply(phase=self._core.engine.phase.value)

    def _apply(self, caller: Connection, request: Request) -> None:
        from json import dumps

        from init.plan.compile import plan_from_json, select

        core = self._core
        if core.engine.phase not in (PodPhase.BOOT, PodPhase.RUNNING):
            raise RequestError("apply the plan", f"the pod is {core.engine.phase.value}")
        plan = plan_from_json(dumps(request.get("plan")), "the new plan")
        chosen = select(plan, core.settings.env, os.path.exists)
        change, todo = core.engine.apply(chosen, core.poller.now())
        core.perform(todo)
        for name in change.removed:
            self._removed.add(name)
        caller.reply(added=change.added, removed=change.removed, changed=change.changed)

    def _condition(self, caller: Connection, request: Request) -> None:
        core, expires = self._core, request.get("expires")
        if isinstance(expires, int | float) and not -ENDLESS < expires < ENDLESS:
            raise RequestError("set the condition", f"expires is {expires}", hint="a number of seconds")
        at = core.poller.now() + float(expires) if isinstance(expires, int | float) else None
        item = Condition(text(request, "name"), text(request, "text", ""), request.get("blocking") is True, at)
        core.engine.set_condition(item)
        caller.reply(conditions={other.name: other.text for other in core.engine.conditions.values()})

    # Delayed answers.

    def _answer_when_stable(self, caller: Connection, request: Request, name: str) -> None:
        core, requested = self._core, self._core.poller.now()
        is_reload = text(request, "op") == "reload"
        awaited = 0.0  # the moment for which a timer is set

        def is_settled() -> bool:
            nonlocal awaited
            state = core.engine.states.get(name)
            if not core.engine.stable(name):
                return False
            if state is None or state.ready_at is None or core.engine.spec(name).kind is not Kind.LONGRUN:
                return True
            until = (max(state.ready_at, requested) if is_reload else state.ready_at) + STAYS_READY
            now = core.poller.now()
            if state.phase is Phase.READY and now < until:
                if until > awaited:
                    awaited = until
                    core.poller.after(until - now, lambda: None)  # ends the wait of the loop
                return False
            return True

        def answer() -> None:
            engine = self._core.engine
            state = engine.states.get(name)
            if state is None:
                caller.reply(state="removed", ready=False, reasons=[])
                return
            shown = reasons.view(engine, name, self._core.poller.now())
            caller.reply(state=shown.state, ready=shown.ready, reasons=shown.reasons)

        self._answer_when(caller, request, is_settled, answer)

    def _answer_when(
        self, caller: Connection, request: Request, done: Callable[[], bool], answer: Callable[[], None]
    ) -> None:
        if request.get("wait", True) is False or done():
            answer()
            if caller.waiting:
                caller.resume()
            return
        caller.waiting = True
        self._waiters.append((caller, done, answer))

    def after_turn(self) -> None:
        for name in [name for name in self._removed if name not in self._core.engine.states]:
            self._removed.discard(name)
            self._core.logs.forget(name)
        if self._waiters:
            ready = [waiter for waiter in self._waiters if waiter[1]()]
            self._waiters = [waiter for waiter in self._waiters if waiter not in ready]
            for caller, _, answer in ready:
                caller.attempt(answer)
                caller.resume()
        self._look.tell_watchers()

    def _require_running(self, request: Request, also: PodPhase = PodPhase.RUNNING) -> str:
        if self._core.engine.phase not in (PodPhase.BOOT, PodPhase.RUNNING, also):
            raise RequestError(f"{request['op']}", f"the pod is {self._core.engine.phase.value}")
        name = read_service_name(self._core, request)
        self._core.logs.log(f"{name}: {request['op']} was asked for", aloud=False)
        return name
