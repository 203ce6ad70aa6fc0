"""Judge captured text with one check and return a verdict. No error of a parser yields a false "ok"."""

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
from health.verdict import Class, Verdict, make_printable, summarise


class _TooLong(BaseException):
    """Raised at a check's deadline; not an Exception, so that the check's own handlers do not swallow it."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Facts common to all verdicts of a round."""

    commit: str
    boot_id: str
    now: float
    expect: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Judged:
    verdict: Verdict
    state: Mapping[str, Any]
    # Error of the check's own code: a fault of the tree, not of the node.
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
        thresholds = limits(check.thresholds) if check.thresholds else Limits({}, "")
        context = Context(setting.now, thresholds, previous, setting.expect, state)
        with _deadline(check.deadline_s):
            findings = list(module.judge(module.parse(inputs), context))
        if not all(isinstance(finding, Finding) for finding in findings):
            raise TypeError("judge must return Findings")
        findings = [_cap(make_printable(finding), check) for finding in findings]
    except Unreadable as error:
        findings = [_make_unknown(str(error))]
    except _TooLong:
        broken = f"no judgement within {check.deadline_s:g} s"
        findings = [_make_unknown(f"the check is broken: {broken}")]
    except GitsyncError as error:
        broken = str(error)
        findings = [_make_unknown(broken)]
    # Any other failure is a bug of the check: recorded as such, and nothing is known about the node.
    except Exception as error:
        broken = f"{type(error).__name__}: {error}"
        findings = [_make_unknown(f"the check is broken: {broken}")]
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
        # A node with a thousand faulty subjects lists the first hundred.
        findings=tuple(finding for finding in findings if finding.result is not Result.OK)[:100],
    )
    # A check that failed keeps its previous state.
    return Judged(verdict, state if state or (not broken and worst.result is not Result.UNKNOWN) else previous, broken)


def _cap(finding: Finding, check: Check) -> Finding:
    """Lower to class `user` what a job's user can cause: it drains no node and counts against no part."""
    partly_user_made = check.user_made is UserMade.PARTLY and finding.user_made is not False
    if finding.result is Result.PROBLEM and (finding.user_made or partly_user_made or check.user_made is UserMade.YES):
        return replace(finding, class_=Class.USER)
    return finding


def _make_unknown(reason: str) -> Finding:
    return make_printable(Finding(Result.UNKNOWN, reason[:500]))


@contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    """Interrupt pure Python code after some seconds; works in the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, _raise_timeout)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _raise_timeout(number: int, frame: FrameType | None) -> None:
    raise _TooLong
