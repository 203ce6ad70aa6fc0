"""What the runner does with a script that is broken, and how long it may take.

The operator's mounted file, or `lib/policy.json` of the tree.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from gitsync.errors import GitsyncError

# Mounted beside the tree: it wins over the tree's file, whole.
OPERATORS = Path("/mnt/minivm/config/scripts/policy.json")
KINDS = ("prolog", "epilog", "task_prolog", "health")
# A script says "this node is unfit" by this code; anything else that is not 0 is a script that broke. 1 and 2 are what
# shells and Python exit with when the script itself is wrong, 126 and 127 when a program is missing.


@dataclass(frozen=True, slots=True)
class KindPolicy:
    # Under Slurm's own PrologEpilogTimeout (60 s here), or Slurm kills the runner and drains the node.
    budget_s: float = 45.0
    deadline_s: float = 15.0
    # "continue": a broken script is recorded and the job starts. "fail": the prolog fails, which drains the node.
    broken: str = "continue"


@dataclass(frozen=True, slots=True)
class Policy:
    kinds: Mapping[str, KindPolicy] = field(default_factory=dict)
    # "prolog.d/10-x": what differs for one script.
    scripts: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    # How long a prolog waits for the broker to confirm a problem that was found just now, and what it does without.
    gate_wait_s: float = 3.0
    gate_unconfirmed: str = "pass"
    # Why a file could not be used; then the next one holds, and at last the defaults.
    fault: str = ""

    def kind(self, name: str) -> KindPolicy:
        return self.kinds.get(name, DEFAULTS[name])

    def deadline_s(self, kind: str, script: str) -> float:
        value = self.scripts.get(script, {}).get("deadline_s", self.kind(kind).deadline_s)
        return float(str(value))

    def broken(self, kind: str, script: str) -> str:
        return str(self.scripts.get(script, {}).get("broken", self.kind(kind).broken))


DEFAULTS: Mapping[str, KindPolicy] = {
    "prolog": KindPolicy(),
    "epilog": KindPolicy(),
    "task_prolog": KindPolicy(budget_s=8.0, deadline_s=3.0),
    # slurmd kills its health program after 60 s.
    "health": KindPolicy(budget_s=50.0, deadline_s=45.0),
}


def read_policy(tree: Path, operators: Path = OPERATORS) -> Policy:
    """A file that cannot be used must not stop jobs: the tree's or the defaults hold, and `fault` says why."""
    own = _read(operators)
    if own is not None and not own.fault:
        return own
    path = tree / "lib" / "policy.json"
    found = _read(path) or Policy(fault=f"cannot read the policy: {path} is missing")
    faults = [policy.fault for policy in (own, found) if policy is not None and policy.fault]
    return replace(found, fault="; ".join(faults))


def _read(path: Path) -> Policy | None:
    try:
        return parse_policy(json.loads(path.read_bytes()), str(path))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        return Policy(fault=f"cannot read the policy: {path}: {error}")
    except OSError as error:
        return Policy(fault=f"cannot read the policy: {error}")
    except GitsyncError as error:
        return Policy(fault=str(error))


def parse_policy(data: object, file: str) -> Policy:
    root = _mapping(data, {"runner", "gate", "broker"}, file, "")
    runner = _mapping(root.get("runner", {}), {*KINDS, "scripts"}, file, "runner")
    kinds = {}
    for kind in KINDS:
        if kind in runner:
            values = _mapping(runner[kind], {"budget_s", "deadline_s", "broken"}, file, f"runner.{kind}")
            default = DEFAULTS[kind]
            kinds[kind] = KindPolicy(
                _positive(values.get("budget_s", default.budget_s), file, f"runner.{kind}.budget_s"),
                _positive(values.get("deadline_s", default.deadline_s), file, f"runner.{kind}.deadline_s"),
                _choice(values.get("broken", default.broken), ("continue", "fail"), file, f"runner.{kind}.broken"),
            )
    scripts = {}
    for name, value in _mapping(runner.get("scripts", {}), None, file, "runner.scripts").items():
        values = _mapping(value, {"deadline_s", "broken"}, file, f"runner.scripts.{name}")
        if "deadline_s" in values:
            _positive(values["deadline_s"], file, f"runner.scripts.{name}.deadline_s")
        if "broken" in values:
            _choice(values["broken"], ("continue", "fail"), file, f"runner.scripts.{name}.broken")
        scripts[name] = values
    gate = _mapping(root.get("gate", {}), {"wait_s", "unconfirmed"}, file, "gate")
    return Policy(
        kinds,
        scripts,
        _positive(gate.get("wait_s", 3.0), file, "gate.wait_s"),
        _choice(gate.get("unconfirmed", "pass"), ("pass", "fail"), file, "gate.unconfirmed"),
    )


def _mapping(value: object, known: set[str] | None, file: str, field: str) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise GitsyncError("read the policy", "wanted a mapping", file=file, field=field)
    for key in value:
        if known is not None and key not in known:
            import difflib

            near = difflib.get_close_matches(str(key), sorted(known), n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known))}"
            raise GitsyncError("read the policy", f"unknown key {key!r}", file=file, field=field, hint=hint)
    return value


def _positive(value: object, file: str, field: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 3600:
        raise GitsyncError("read the policy", f"wanted seconds, not {value!r}", file=file, field=field)
    return float(value)


def _choice(value: object, known: tuple[str, ...], file: str, field: str) -> str:
    if value not in known:
        raise GitsyncError("read the policy", f"wanted {' or '.join(known)}, not {value!r}", file=file, field=field)
    return str(value)
