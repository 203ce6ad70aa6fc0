"""From captured text to a verdict: one check, guarded. Whatever a parser does, the outcome is never a false "ok"."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

from gitsync.errors import GitsyncError
from health.api import Capture, Check, CheckModule, Context, Finding, Inputs, Limits, Result, Unreadable, UserMade
from health.verdict import Class, Verdict, shown, summarise


class _TooLong(BaseException):
    """Not an Exception, so that a check's own handlers do not swallow it."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What a verdict is bound to, equal for every check of a round."""

    commit: str
    boot_id: str
    now: float
    expect: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Judged:
    verdict: Verdict
    state: Mapping[str, Any]
    # The check's own code failed: a fault of the tree, not of the node.
    broken: str = ""


def judge(
    module: CheckModule,
    captures: Mapping[str, Capture],
    limits: Callable[[str], Limits],
    setting: Setting,
    previous: Mapping[str, Any],
) -> Judged:
    check = module.CHECK
    inputs = Inputs({source.name: captures[source.name] for source in check.sources})
    state: dict[str, Any] = {}
    broken = ""
    try:
        if not check.judges_failures:
            for source in check.sources:
                if inputs.failure(source.name) is not None:
                    raise Unreadable(inputs.why(source.name))
        known = limits(check.thresholds) if check.thresholds else Limits({}, "")
        context = Context(setting.now, known, previous, setting.expect, state)
        with _deadline(check.deadline_s):
            findings = list(module.judge(module.parse(inputs), context))
        if not all(isinstance(found, Finding) for found in findings):
            raise TypeError("judge must give Findings")
        findings = [_capped(shown(found), check) for found in findings]
    except Unreadable as error:
        findings = [_unknown(str(error))]
    except _TooLong:
        broken = f"no judgement within {check.deadline_s:g} s"
        findings = [_unknown(f"the check is broken: {broken}")]
    except GitsyncError as error:
        broken = str(error)
        findings = [_unknown(broken)]
    # Any other failure is a bug of the check: recorded as such, and nothing is known about the node.
    except Exception as error:
        broken = f"{type(error).__name__}: {error}"
        findings = [_unknown(f"the check is broken: {broken}")]
    worst = summarise(findings, check.class_)
    verdict = Verdict(
        check=check.name,
        result=worst.result,
        class_=worst.class_ or check.class_,
        reason=worst.reason,
        measured=worst.measured,
        threshold=worst.threshold,
        commit=setting.commit,
        boot_id=setting.boot_id,
        subject=worst.subject,
        at=setting.now,
        expires=setting.now + check.lifetime_s,
        # A node with a thousand sick subjects is told by its first hundred.
        findings=tuple(found for found in findings if found.result is not Result.OK)[:100],
    )
    # A check that failed forgets nothing: what it remembered stays.
    return Judged(verdict, state if state or (not broken and worst.result is not Result.UNKNOWN) else previous, broken)


def _capped(found: Finding, check: Check) -> Finding:
    """What a job's user can bring about says nothing of the node: it drains none, and counts against no part."""
    partly_his = check.user_made is UserMade.PARTLY and found.user_made is not False
    if found.result is Result.PROBLEM and (found.user_made or partly_his or check.user_made is UserMade.YES):
        return replace(found, class_=Class.USER)
    return found


def _unknown(reason: str) -> Finding:
    return shown(Finding(Result.UNKNOWN, reason[:500]))


@contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    """Interrupts pure Python after so many seconds; only the main thread can be interrupted so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, _ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _ring(number: int, frame: FrameType | None) -> None:
    raise _TooLong
