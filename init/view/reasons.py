"""Readiness with reasons: each reason is followed to its leaf cause. Pure.

`quoting` decides if a service's own lines are repeated: for root yes, for other users no.
"""

from __future__ import annotations

import errno
import os

from init.engine import order
from init.engine.ending import DRAIN
from init.engine.machine import times
from init.engine.states import Phase, is_failing, is_satisfied
from init.plan.service import Kind, Probe, is_builtin
from init.view.status import ConditionView, ServiceView, Snapshot

TYPE_CHECKING = False
if TYPE_CHECKING:
    from init.engine.engine import Engine
    from init.engine.states import Cause, State
    from init.plan.service import Service

# A required check whose last run failed: its target is up, but does not serve.
FAILING = "failing"
# A first start that takes less time is no problem to show.
YOUNG_S = 5.0
# The service that holds the right to act among several pods of the role.
LEASE = "lease"


def duration(seconds: float) -> str:
    seconds = max(0.0, seconds)
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h"


def explain_service(spec: Service, state: State, now: float, *, quoting: bool) -> str:
    """Return why this service itself is not ready, without its dependencies; "" if it is ready."""
    spent = duration(now - state.since)
    cause = find_own_sentence(spec, state.last_failure) or cause_text(state.last_failure, quoting=quoting)
    match state.phase:
        case Phase.READY if is_failing(spec, state):
            return last_run(spec, state, quoting=quoting)
        case Phase.READY | Phase.DONE:
            return ""
        case Phase.STARTING if state.probe_status is not None:
            more = state.probe_status.detail or (state.probe_status.quoted if quoting else "")
            return f"{state.probe_status.outcome} for {spent}" + (f" ({more})" if more else "")
        case Phase.STARTING if spec.kind is Kind.ONESHOT:
            return f"runs for {spent}" + (f"; before: {cause}" if cause else "")
        case Phase.STARTING if spec.ready.probe is Probe.NONE:
            return f"started {spent} ago; before: {cause}" if cause else f"starting for {spent}"
        case Phase.STARTING if spec.ready.probe is Probe.NOTIFY:
            before = f"; before: {cause}" if cause else ""
            return explain_missing_notification(spec, state, spent, quoting=quoting) + ("" if state.standby else before)
        case Phase.STARTING:
            probed = spec.ready.target or " ".join(spec.ready.command)
            return f"{spec.ready.probe.value} {probed}: no answer for {spent}"
        case Phase.PREPARING:
            return f"{' '.join(spec.prepare[state.step])} (prepare) runs for {spent}"
        case Phase.BACKOFF:
            remaining = duration((state.deadline or now) - now)
            return f"{cause}; failed {times(state.failure_count)}, next start in {remaining}"
        case Phase.FAILED:
            return cause
        case Phase.HANDOVER:
            return f"its main process exited {spent} ago, and no other has taken over yet"
        case Phase.STOPPING:
            return f"stopping for {spent}" + (f": {cause}" if cause else "")
        case Phase.STOPPED:
            return "stopped on request"
        case Phase.WAITING:
            return cause or "about to start"


def explain_missing_notification(spec: Service, state: State, spent: str, *, quoting: bool) -> str:
    """Return why a started service has not sent READY=1: it is on standby, or its own status."""
    if state.standby:
        status = state.status if state.status and (quoting or is_ours(spec.command)) else "another pod is active"
        return f"standby: {status}"
    quoted = f', and says "{state.status}"' if state.status and quoting else ""
    return f"started {spent} ago, no READY=1 yet{quoted}"


def leaves(engine: Engine, name: str, seen: frozenset[str] = frozenset()) -> list[str]:
    """Return the services at the end of the chain that it waits for; itself if it waits for none."""
    state, spec = engine.states[name], engine.specs[name]
    standing_by = order.on_standby(engine.specs, engine.states)
    waits = order.waits_for(spec, engine.states, standing_by) if state.phase is Phase.WAITING else ()
    ends: list[str] = []
    for other in waits:
        if other not in seen:
            ends += [leaf for leaf in leaves(engine, other, seen | {name}) if leaf not in ends]
    return ends or [name]


def service_reasons(engine: Engine, name: str, now: float, *, quoting: bool = True) -> tuple[str, ...]:
    """Return why one service is not ready: `slurmd waits for controller: tcp ... refused for 12 s`."""
    if is_satisfied(engine.states[name]) and not is_failing(engine.specs[name], engine.states[name]):
        return ()
    reasons = []
    for leaf in leaves(engine, name):
        reason = explain_service(engine.specs[leaf], engine.states[leaf], now, quoting=quoting)
        reasons.append(reason if leaf == name else f"waits for {leaf}: {reason}")
    return tuple(reasons)


def pod_reasons(engine: Engine, now: float, *, quoting: bool = True) -> tuple[str, ...]:
    """Return each leaf cause once, preceded by the services that wait for it."""
    waiting: dict[str, list[str]] = {}
    standing_by = order.on_standby(engine.specs, engine.states)
    for name, spec in engine.specs.items():
        state = engine.states[name]
        if name in standing_by:
            continue
        if spec.required and (not is_satisfied(state) or is_failing(spec, state)):
            for leaf in leaves(engine, name):
                waiting.setdefault(leaf, []).extend([name] if leaf != name else [])
    reasons = []
    for leaf, names in waiting.items():
        reason = explain_service(engine.specs[leaf], engine.states[leaf], now, quoting=quoting)
        before = f"{', '.join(names)} {'waits' if len(names) == 1 else 'wait'} for " if names else ""
        reasons.append(f"{before}{leaf}: {reason}")
    drain = drain_text(engine, quoting=quoting)
    if engine.phase.value in ("stopping", "stopped", "draining"):
        cause = cause_text(engine.ending.why, quoting=quoting)
        reasons.append(f"the pod is {engine.phase.value}" + (f": {cause}" if cause else ""))
    elif drain:
        reasons.append(f"drain: {drain}")
    reasons += [f"{item.name}: {item.text}" for item in engine.conditions.values() if item.blocking]
    return tuple(reasons)


def drain_text(engine: Engine, *, quoting: bool = True) -> str:
    """Return the drain's progress with its status, or the reason why it failed."""
    progress = engine.ending.drain_state()
    state = engine.states.get(DRAIN)
    if state is None or progress not in ("draining", "failed"):
        return progress
    if progress == "failed":
        return f"{progress}: {cause_text(state.last_failure, quoting=quoting)}"
    return (
        f"{progress}: {state.status}" if state.status and (quoting or is_ours(engine.spec(DRAIN).command)) else progress
    )


def list_degradations(engine: Engine, now: float, *, quoting: bool = True) -> tuple[str, ...]:
    """Return the problems that do not keep the pod from being ready."""
    problems = [f"{item.name}: {item.text}" for item in engine.conditions.values() if not item.blocking]
    standing_by = order.on_standby(engine.specs, engine.states)
    for name, spec in engine.specs.items():
        state = engine.states[name]
        if name in standing_by:
            continue
        if spec.kind is Kind.PERIODIC and state.last_failure is not None and not spec.required:
            problems.append(f"{name}: {last_run(spec, state, quoting=quoting)}")
        elif not spec.required and not is_satisfied(state) and state.phase is not Phase.STOPPED:
            if all(_is_young(engine.states[leaf], now) for leaf in leaves(engine, name)):
                continue
            for reason in service_reasons(engine, name, now, quoting=quoting):
                problems.append(f"{name} {reason}" if reason.startswith("waits for ") else f"{name}: {reason}")
    return tuple(problems)


def _is_young(state: State, now: float) -> bool:
    begins = state.phase in (Phase.WAITING, Phase.PREPARING, Phase.STARTING)
    return begins and not state.failure_count and now - state.since < YOUNG_S


def role_among_pods(engine: Engine, *, quoting: bool = True) -> str:
    """Return what this pod is among several that take turns: "standby: ...", "active, term 3"; "" for a pod alone."""
    for name, spec in engine.specs.items():
        state = engine.states[name]
        if state.standby and not is_satisfied(state):
            return explain_service(spec, state, state.since, quoting=quoting)
        if name == LEASE and is_satisfied(state) and (quoting or is_ours(spec.command)):
            return state.status
    return ""


def snapshot(engine: Engine, pod: str, now: float, *, quoting: bool = True) -> Snapshot:
    reasons = pod_reasons(engine, now, quoting=quoting)
    return Snapshot(
        role=engine.plan.role,
        pod=pod,
        phase=engine.phase.value,
        ready=not reasons,
        started=engine.ready_at is not None,
        uptime=now - engine.began,
        boot_seconds=engine.ready_at - engine.began if engine.ready_at is not None else None,
        drain=drain_text(engine, quoting=quoting),
        turn=role_among_pods(engine, quoting=quoting),
        reasons=reasons,
        degraded=list_degradations(engine, now, quoting=quoting),
        conditions=tuple(
            ConditionView(item.name, item.text, item.blocking, item.expires - now if item.expires is not None else None)
            for item in engine.conditions.values()
        ),
        services=tuple(view(engine, name, now, quoting=quoting) for name in engine.specs),
    )


def view(engine: Engine, name: str, now: float, *, quoting: bool = True) -> ServiceView:
    spec, state = engine.specs[name], engine.states[name]
    return ServiceView(
        name=name,
        about=spec.about,
        kind=spec.kind.value,
        state="reloading" if state.reloading else FAILING if is_failing(spec, state) else state.phase.value,
        ready=is_satisfied(state) and not is_failing(spec, state),
        required=spec.required,
        pid=state.pid,
        since=now - state.since,
        uptime=now - state.started_at if state.pid else 0.0,
        starts=state.starts,
        failures=state.failure_count,
        status=state.status if quoting else "",
        reasons=service_reasons(engine, name, now, quoting=quoting),
        last_exit=state.last_exit,
        last_line=state.last_line if quoting else "",
        next_start_in=state.deadline - now if state.phase is Phase.BACKOFF and state.deadline is not None else None,
        needs=spec.needs,
        after=spec.after,
    )


# Readers differ. A daemon's last line can contain anything, a password too: root reads it through the control socket.
# HTTP and the pod's status have a wider audience, so there a cause has init's own words alone: the last line of init's
# own programs, and the name of a system error at the end of a line.
# Modules whose last line is always a sentence of minivm.
_OWN_MODULES = ("init.", "health.broker", "health.checks.builtin")
# Its message about a mistake in people.yaml has the person's name.
_NAMES_PEOPLE = "init.people.keep"


def is_ours(command: tuple[str, ...]) -> bool:
    """Tell if it is a step or program of init, whose output consists of its own sentences and names no person."""
    module = command[command.index("-m") + 1] if "-m" in command[:-1] else ""
    return is_builtin(command) or (module.startswith(_OWN_MODULES) and module != _NAMES_PEOPLE)


def cause_text(cause: Cause | None, *, quoting: bool) -> str:
    """Format a cause: with the quotation for root; for other users only if minivm's own program wrote it."""
    if cause is None:
        return ""
    return str(cause) if quoting or is_ours(cause.speaker) else cause.text(_system_error(cause.quoted))


def find_own_sentence(spec: Service, cause: Cause | None) -> str:
    """Return the reason that a check or step of minivm printed before it exited 1; "" for any other failure."""
    if cause is None or cause.outcome != "exited 1" or spec.kind not in (Kind.ONESHOT, Kind.PERIODIC):
        return ""
    if not cause.quoted or not is_ours(cause.speaker):
        return ""
    return cause.quoted + (f"; {cause.verdict}" if cause.verdict else "")


def last_run(spec: Service, state: State, *, quoting: bool) -> str:
    """Return why a periodic service's last run failed."""
    cause = state.last_failure
    return find_own_sentence(spec, cause) or f"last run {cause_text(cause, quoting=quoting)}"


def _system_error(line: str) -> str:
    """Return ` (No space left on device)` if the line ends with a system error's name, else ""."""
    line = line.rstrip(" .)")
    return max((f" ({name})" for name in map(os.strerror, errno.errorcode) if line.endswith(name)), key=len, default="")
