"""Policy from policy.json: what the runner does with a broken script, and when the broker drains a node.

The operator's mounted file or `lib/policy.json` of the tree; the first usable file applies as a whole. The runner and
the broker each read their own sections, so a mistake in one does not affect the other.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from gitsync.layout import GENERATION_ZERO
from health.places import OPERATORS_POLICY
from health.verdict import Class
from init.errors import ConfigError, InitError
from init.fields import Reader

IN_A_TREE = Path("lib/policy.json")
KINDS = ("prolog", "epilog", "task_prolog", "health")
BROKEN = ("continue", "fail")
UNCONFIRMED = ("pass", "fail")
LONGEST_S = 3600.0
# Checks that only propose: users together can feign the one, and a fault of the test itself fails the other.
PROPOSALS: Mapping[str, str] = {"active_checks": "never", "failing_jobs": "never"}


@dataclass(frozen=True, slots=True)
class KindPolicy:
    # Below Slurm's PrologEpilogTimeout (60 s here); beyond it Slurm kills the runner and drains the node.
    budget_s: float = 45.0
    deadline_s: float = 15.0
    # "continue": a broken script is recorded and the job starts. "fail": the prolog fails, which drains the node.
    broken: str = "continue"


@dataclass(frozen=True, slots=True)
class ScriptPolicy:
    """Overrides for one script; None: the value of its kind."""

    deadline_s: float | None = None
    broken: str | None = None


@dataclass(frozen=True, slots=True)
class RunnerPolicy:
    kinds: Mapping[str, KindPolicy] = field(default_factory=dict)
    # Keys such as "prolog.d/10-x".
    scripts: Mapping[str, ScriptPolicy] = field(default_factory=dict)
    # How long a prolog waits for the broker to confirm a new problem, and what it does without an answer.
    gate_wait_s: float = 3.0
    gate_unconfirmed: str = "pass"
    # Append the cause to the output file of a batch job that failed.
    notes_failures: bool = True
    # How long a node keeps the black boxes of jobs; 0: it makes none.
    box_days: float = 14.0
    # Error of an unusable file; the next file applies, then the defaults.
    fault: str = ""

    def kind(self, name: str) -> KindPolicy:
        return self.kinds.get(name, DEFAULTS[name])

    def deadline_s(self, kind: str, script: str) -> float:
        own = self.scripts.get(script, ScriptPolicy()).deadline_s
        return self.kind(kind).deadline_s if own is None else own

    def broken(self, kind: str, script: str) -> str:
        return self.scripts.get(script, ScriptPolicy()).broken or self.kind(kind).broken


DEFAULTS: Mapping[str, KindPolicy] = {
    "prolog": KindPolicy(),
    "epilog": KindPolicy(),
    "task_prolog": KindPolicy(budget_s=8.0, deadline_s=3.0),
    # slurmd kills its health program after 60 s.
    "health": KindPolicy(budget_s=50.0, deadline_s=45.0),
}


@dataclass(frozen=True, slots=True)
class BrokerPolicy:
    # Rounds in a row that must show a problem before it counts; 0: never.
    raise_after: Mapping[str, int] = field(
        default_factory=lambda: {"user": 0, "node": 2, "reboot": 1, "manual": 1, "rma": 1}
    )
    # Good rounds, and seconds since the first of them, before a problem ends; -1: only a person ends it.
    clear_after: int = 2
    clear_wait_s: Mapping[str, float] = field(
        default_factory=lambda: {"node": 60.0, "reboot": 60.0, "manual": 300.0, "rma": -1.0}
    )
    guard_min_nodes: int = 3
    guard_fraction: float = 0.1
    guard_spread_s: float = 20.0
    guard_recheck_s: float = 30.0
    guard_lasts_s: float = 900.0
    # Drains within this time of one another may have one cause.
    guard_window_s: float = 3600.0
    rate_actions: int = 6
    rate_per_s: float = 600.0
    offender_incidents: int = 3
    offender_days: float = 30.0
    # check -> "never": the check is shown and drains nothing; "drain" lets one of PROPOSALS drain.
    checks: Mapping[str, str] = field(default_factory=lambda: PROPOSALS)


def read_runner_policy(tree: Path, operators: Path = OPERATORS_POLICY) -> RunnerPolicy:
    """Read the runner's policy; an unusable file must not stop jobs, so the tree's or the defaults apply.

    `fault` then has the error.
    """
    faults: list[str] = []
    for path in (operators, tree / IN_A_TREE):
        try:
            if (data := _load(path)) is not None:
                return replace(runner_policy(data, str(path)), fault="; ".join(faults))
            if path != operators:
                faults.append(f"cannot read the policy: {path} is missing")
        except InitError as error:
            faults.append(str(error))
    return RunnerPolicy(fault="; ".join(faults))


def read_broker_policy(scripts: Path) -> BrokerPolicy:
    """Read the published tree's policy; before the first publish, that of generation zero in the image."""
    policies = (load_broker_policy(tree / IN_A_TREE) for tree in (scripts / "current", Path(GENERATION_ZERO)))
    return next((policy for policy in policies if policy is not None), BrokerPolicy())


def load_broker_policy(path: Path) -> BrokerPolicy | None:
    """Read the file; None if there is none."""
    data = _load(path)
    return None if data is None else broker_policy(data, str(path))


def _load(path: Path) -> Mapping[str, object] | None:
    """Read the file; None if there is none."""
    try:
        data = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError("read the policy", str(error), file=str(path)) from error
    if not isinstance(data, dict):
        raise ConfigError("read the policy", "wanted a mapping", file=str(path))
    return data


def runner_policy(data: Mapping[str, object], file: str) -> RunnerPolicy:
    root = _sections(data, file)
    runner, gate = root.sub("runner"), root.sub("gate")
    _only(runner, *KINDS, "scripts", "notes_failures", "box_days")
    _only(gate, "wait_s", "unconfirmed")
    scripts = runner.sub("scripts")
    return RunnerPolicy(
        {kind: _kind(runner.sub(kind), DEFAULTS[kind]) for kind in KINDS if kind in runner.data},
        {str(name): _script(scripts.sub(name)) for name in scripts.data},
        _deadline(gate, "wait_s", 3.0),
        _one_of(gate, "unconfirmed", UNCONFIRMED, "pass"),
        runner.flag("notes_failures", default=True),
        runner.real("box_days", 14.0, most=365),
    )


def _kind(reader: Reader, default: KindPolicy) -> KindPolicy:
    _only(reader, "budget_s", "deadline_s", "broken")
    return KindPolicy(
        _deadline(reader, "budget_s", default.budget_s),
        _deadline(reader, "deadline_s", default.deadline_s),
        _one_of(reader, "broken", BROKEN, default.broken),
    )


def _script(reader: Reader) -> ScriptPolicy:
    _only(reader, "deadline_s", "broken")
    return ScriptPolicy(
        _deadline(reader, "deadline_s", 0.0) if reader.has("deadline_s") else None,
        _one_of(reader, "broken", BROKEN, "") if reader.has("broken") else None,
    )


def broker_policy(data: Mapping[str, object], file: str) -> BrokerPolicy:
    root = _sections(data, file).sub("broker")
    _only(root, "raise_after", "clear_after", "clear_wait_s", "guard", "rate", "offender", "checks")
    default = BrokerPolicy()
    raise_after, wait = root.sub("raise_after"), root.sub("clear_wait_s")
    guard, rate, offender, checks = (root.sub(key) for key in ("guard", "rate", "offender", "checks"))
    _only(raise_after, *Class)
    _only(wait, *Class)
    _only(guard, "min_nodes", "fraction", "spread_s", "recheck_s", "lasts_s", "window_s")
    _only(rate, "actions", "per_s")
    _only(offender, "incidents", "days")
    for check, value in checks.data.items():
        if value not in ("never", "drain"):
            checks.fail(str(check), f"wanted 'never' or 'drain', not {value!r}")
    return BrokerPolicy(
        {key: raise_after.number(key, default.raise_after.get(key, 1)) for key in Class},
        root.number("clear_after", default.clear_after, least=1),
        {key: _wait(wait, key, default.clear_wait_s.get(key, 60.0)) for key in Class},
        guard.number("min_nodes", default.guard_min_nodes, least=1),
        guard.real("fraction", default.guard_fraction, most=1.0),
        guard.seconds("spread_s", default.guard_spread_s),
        guard.seconds("recheck_s", default.guard_recheck_s),
        guard.seconds("lasts_s", default.guard_lasts_s),
        guard.seconds("window_s", default.guard_window_s),
        rate.number("actions", default.rate_actions, least=1),
        rate.seconds("per_s", default.rate_per_s),
        offender.number("incidents", default.offender_incidents, least=1),
        offender.real("days", default.offender_days, most=3650),
        {**PROPOSALS, **{str(check): str(value) for check, value in checks.data.items()}},
    )


def _wait(reader: Reader, key: str, default: float) -> float:
    """Read a waiting time; -1 means that only a person ends the problem."""
    for_ever = reader.data.get(key) == -1 or (key not in reader.data and default < 0)
    return -1.0 if for_ever else reader.seconds(key, default)


def _sections(data: Mapping[str, object], file: str) -> Reader:
    root = Reader(data, "the policy", file)
    _only(root, "runner", "gate", "broker")
    return root


def _only(reader: Reader, *known: str) -> None:
    """Refuse unknown keys like `Reader.only`, but quoted, as all messages of `minivm health` are."""
    for key in reader.data:
        if key not in known:
            from ground.errors import nearest  # imported late: only a typo needs it

            reader.fail(str(key), f"unknown key {key!r}", nearest(str(key), known) or "")


def _deadline(reader: Reader, key: str, default: float) -> float:
    """Read a deadline above 0 and at most an hour: a script with no time would never start."""
    seconds = reader.seconds(key, default)
    if not 0 < seconds <= LONGEST_S:
        reader.fail(key, f"wanted more than 0 and at most {LONGEST_S:g} seconds, not {seconds:g}")
    return seconds


def _one_of(reader: Reader, key: str, known: tuple[str, ...], default: str) -> str:
    value = reader.text(key, default)
    if value not in known:
        reader.fail(key, f"wanted {' or '.join(known)}, not {value!r}")
    return value


# Spread periodic work over the fleet: each pod gets its own offset within an interval.
def share(name: str) -> float:
    """Return a number in [0, 1) from the pod's name: the same at each start, and spread over the fleet."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") / 2**32
