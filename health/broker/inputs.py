"""Reads what the broker decides by: verdicts, policy, the node's GPUs. Each may be missing or damaged at any time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from health.broker.decide import CLASSES, Policy, Verdict
from init.errors import ConfigError
from init.fields import Reader

# Published trees first; before anything is published, generation zero from the image.
OPERATORS_POLICY = Path("/mnt/minivm/config/scripts/policy.json")  # wins over the tree's, whole
POLICIES = ("{root}/current/lib/policy.json", "/usr/share/minivm/scripts/lib/policy.json")
WITH_JOBS = frozenset({"prolog", "epilog"})


@dataclass(frozen=True, slots=True)
class Gpu:
    uuid: str
    serial: str
    bus: str
    model: str

    def is_called(self, subject: str) -> bool:
        """By its UUID, or by its bus: "00000000:3B:00.0" for nvidia-smi, "0000:3b:00" for the kernel."""
        bus = subject.lower()
        return subject == self.uuid or (len(bus) >= 10 and bus in self.bus.lower())


def read_verdicts(directory: Path) -> list[Verdict]:
    found = []
    for path in sorted(directory.glob("[!.]*.json")):
        data = _load(path)
        try:
            found.append(
                Verdict(
                    check=str(data["check"]),
                    result=str(data["result"]),
                    class_=str(data["class"]),
                    reason=str(data["reason"]),
                    subject=str(data.get("subject", "host")),
                    commit=str(data.get("commit", "")),
                    boot_id=str(data.get("boot_id", "")),
                    at=float(data["at"]),
                    expires=float(data["expires"]),
                    evidence=str(data.get("evidence", "")),
                    applies=data.get("applies", True) is True,
                )
            )
        except (KeyError, TypeError, ValueError):
            # Not a verdict. Nothing is known from it, and nothing is done for it.
            continue
    return found


def read_gpus(state: Path, boot_id: str) -> tuple[Gpu, ...]:
    """The GPUs that answered when they were last counted, as the check of their number remembers them."""
    data = _load(state / "memory" / "gpu_count.json")
    if data.get("boot_id") != boot_id or not isinstance(data.get("state"), dict):
        return ()
    listed = data["state"].get("gpus", [])
    if not isinstance(listed, list) or not all(isinstance(item, dict) for item in listed):
        return ()
    return tuple(Gpu(*(str(item.get(key, "")) for key in ("uuid", "serial", "bus", "model"))) for item in listed)


@dataclass(frozen=True, slots=True)
class Index:
    """The checks of the last round's commit, also those that could not be loaded, and of them those that run only where
    a job starts or ends."""

    checks: frozenset[str]
    with_jobs: frozenset[str]


def read_index(state: Path, boot_id: str) -> Index | None:
    """None where no round since the boot has left one: then no check is known to be gone."""
    data = _load(state / "index.json")
    checks = data.get("checks")
    if data.get("boot_id") != boot_id or not isinstance(checks, dict):
        return None
    when = {name: facts.get("when") for name, facts in checks.items() if isinstance(facts, dict)}
    with_jobs = {name for name, kinds in when.items() if isinstance(kinds, list) and set(map(str, kinds)) <= WITH_JOBS}
    broken = data.get("broken")
    return Index(frozenset([*checks, *(map(str, broken) if isinstance(broken, list) else ())]), frozenset(with_jobs))


def read_policy(root: str) -> Policy:
    """The tree's."""
    found = (read_policy_file(Path(pattern.format(root=root))) for pattern in POLICIES)
    return next((policy for policy in found if policy is not None), Policy())


def read_policy_file(path: Path) -> Policy | None:
    """None where there is none."""
    try:
        data = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError("read the broker's policy", str(error), file=str(path)) from error
    return parse_policy(data, str(path))


def parse_policy(data: object, file: str) -> Policy:
    if not isinstance(data, dict):
        raise ConfigError("read the broker's policy", "wanted a mapping", file=file)
    root = Reader(data, "the broker's policy", file).sub("broker")
    root.only("raise_after", "clear_after", "clear_wait_s", "guard", "rate", "offender", "checks")
    default = Policy()
    raise_after, wait = root.sub("raise_after"), root.sub("clear_wait_s")
    raise_after.only(*CLASSES)
    wait.only(*CLASSES)
    guard, rate, offender, checks = (root.sub(key) for key in ("guard", "rate", "offender", "checks"))
    guard.only("min_nodes", "fraction", "spread_s", "recheck_s", "lasts_s", "window_s")
    rate.only("actions", "per_s")
    offender.only("incidents", "days")
    for check, value in checks.data.items():
        if value != "never":
            checks.fail(str(check), f"wanted 'never', not {value!r}")
    return Policy(
        {key: raise_after.number(key, default.raise_after.get(key, 1)) for key in CLASSES},
        root.number("clear_after", default.clear_after, least=1),
        {key: _wait(wait, key, default.clear_wait_s.get(key, 60.0)) for key in CLASSES},
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
        {str(check): str(value) for check, value in checks.data.items()},
    )


def _wait(reader: Reader, key: str, default: float) -> float:
    """-1: only a person ends it."""
    return (
        -1.0 if reader.data.get(key) == -1 or (key not in reader.data and default < 0) else reader.seconds(key, default)
    )


def _load(path: Path) -> Mapping[str, Any]:
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}
