"""After a failure: an immediate start, a later start, or none. Pure functions."""

from __future__ import annotations

from init.engine.states import Cause, EndPod, Phase, Unwatch
from init.plan.service import Exhausted, Kind, When
from init.records import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from init.engine.states import State, Step
    from init.plan.service import Service


def postponed(service: Service, state: State, why: Cause, now: float, jitter: float) -> Step:
    """Retry later without limit when the machine, not the service, caused the failure."""
    if service.kind is Kind.PERIODIC and state.phase is Phase.READY:
        return replace(state, failed=state.failed + 1, why=why, deadline=now + service.restart.delay), []
    state = replace(state, since=now, ready_at=None, failed=state.failed + 1, streak=state.streak + 1, why=why)
    return _again(service, state, now, jitter)


def failed(service: Service, state: State, why: Cause, code: int | None, now: float, jitter: float) -> Step:
    rule = service.restart
    failures = (*(at for at in state.failures if now - at < rule.window), now)
    rested = state.ready_at is not None and now - state.ready_at > rule.window
    streak = 1 if rested else state.streak + 1
    state = replace(
        state, pid=0, since=now, ready_at=None, deadline=None, then=None, reloading=False,
        failures=failures, failed=state.failed + 1, streak=streak, why=why,
    )  # fmt: skip
    final: Cause | None = None
    if code is not None and code in rule.fatal_codes:
        final = replace(why, verdict=f"no retry can mend exit code {code}")
    elif rule.when is When.NEVER:
        final = why
    elif rule.limit and len(failures) > rule.limit:
        final = replace(why, verdict=f"gave up after {len(failures)} failures within {rule.window:g} s")
    if final is not None:
        state = replace(state, phase=Phase.FAILED, why=final)
        return state, [Unwatch(), *([EndPod(final)] if rule.exhausted is Exhausted.END_POD else [])]
    return _again(service, state, now, jitter)


def _again(service: Service, state: State, now: float, jitter: float) -> Step:
    """Restart at once after the first failure in a row, then after growing delays."""
    rule = service.restart
    if state.streak == 1:
        return replace(state, phase=Phase.WAITING, deadline=None), [Unwatch()]
    delay = min(rule.max_delay, rule.delay * 2.0 ** min(state.streak - 2, 20)) * (1 + rule.jitter * (2 * jitter - 1))
    return replace(state, phase=Phase.BACKOFF, deadline=now + delay), [Unwatch()]
