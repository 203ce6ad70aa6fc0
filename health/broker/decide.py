"""Decide on the node's state in Slurm. Pure functions: verdicts, memory and policy in, one action out.

The flow, once a look: `observe` counts good and bad rounds of each check and raises lasting problems; `select_raised`
lists the problems that stand; `find_unreleased` lists the parts of the posted reason that must stay; `decide` compares
both with the node and returns an `Act`. `health.broker.step` calls them, and applies the guard and the rate limit.

A reason in Slurm is a line of parts, `minivm: CHECK[CLASS]@COMMIT TEXT; ...`: `reason` writes it, `parts` reads it.
Only raised problems drain, and only a drain with this prefix is ever changed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ground.errors import one_line
from ground.files import read_json
from health.policy import BrokerPolicy
from health.verdict import Class, Result, Verdict, is_of_script

PREFIX = "minivm:"
CLASSES = tuple(Class)
# slurmctld stores longer reasons; sinfo and people do not read them.
REASON_LIMIT = 220
PART_LIMIT = 160
# The fleet's drain of a machine that it rebooted (fleet/decide/causes.py) waits for the result of the deep checks.
_TO_PROVE = re.compile(r"minivm: fleet: (?:[a-z]+\+)*proof(?:\+[a-z]+)*: ")
_NAMED = re.compile(r"([\w.-]+)\[(\w+)\]@([0-9a-z]+)")


@dataclass(frozen=True, slots=True)
class Seen:
    """Memory of one check: its latest rounds, and its problem once raised."""

    # Rounds in a row with a problem, and without one since.
    problems: int = 0
    oks: int = 0
    first_ok: float = 0.0
    last_at: float = 0.0  # of the newest verdict that counted
    raised_at: float = 0.0  # 0: not raised
    class_: str = "node"
    reason: str = ""
    subject: str = "host"
    commit: str = ""
    # Commit with which it last passed on this node.
    passed: str = ""

    @property
    def raised(self) -> bool:
        return self.raised_at > 0

    def name(self, check: str) -> str:
        return f"{check}[{self.class_}]@{self.commit[:7] or 'none'}"

    def key(self, check: str) -> str:
        return f"{check}@{self.commit[:7] or 'none'}"


@dataclass(frozen=True, slots=True)
class BrokerNode:
    """The node as the controller has it."""

    drained: bool
    reason: str
    busy: bool = False
    # The user that set the reason, and when; empty and None where slurmctld does not say.
    author: str = ""
    since: float | None = None

    @property
    def is_own_drain(self) -> bool:
        """True for a reason posted for a check: "minivm: pod stops" has the prefix too, but is not the broker's."""
        return bool(names(self.reason))


@dataclass(frozen=True, slots=True)
class OtherNode:
    """Another node's reason, and its time; None if unknown."""

    reason: str
    since: float | None = None


@dataclass(frozen=True, slots=True)
class OtherNodes:
    """All other nodes of the cluster, for the guard: many nodes with one problem are no reason to drain any."""

    nodes: tuple[OtherNode, ...]
    # Number of nodes, this one included.
    total: int


@dataclass(frozen=True, slots=True)
class Act:
    """An action: drain, update, clear or nothing, with the text for Slurm or the reason for doing nothing."""

    kind: str
    text: str


def observe(
    memory: Mapping[str, Seen],
    verdicts: Iterable[Verdict],
    policy: BrokerPolicy,
    now: float,
    boot_id: str,
    gpus: frozenset[str] | None = None,
    with_jobs: frozenset[str] = frozenset(),
    once: frozenset[str] = frozenset(),
) -> dict[str, Seen]:
    """Update the memory with the verdicts.

    `gpus`: UUIDs of the node's GPUs if all of them answer. `with_jobs`: checks that run only when a job starts or ends.
    `once`: checks that no round repeats, for which one good round is enough.
    """
    after = dict(memory)
    for verdict in verdicts:
        seen = after.get(verdict.check, Seen())
        result = _read_proof(verdict, now, boot_id, gpus, with_jobs)
        fresh = verdict.at > seen.last_at
        need = policy.raise_after.get(verdict.class_, 1) if policy.checks.get(verdict.check) != "never" else 0
        # A problem that drains nothing keeps no node drained either: a user could prolong a drain at will.
        over = result == "problem" and seen.raised and not need
        if result == "problem" and fresh and not over:
            # Another subject or a heavier class is another problem; but the streak counts per check.
            problems = seen.problems + 1
            raised_at = seen.raised_at or (now if 0 < need <= problems else 0.0)
            class_ = verdict.class_ if not seen.raised else max(seen.class_, verdict.class_, key=_weight)
            facts = (class_, verdict.reason, verdict.subject, verdict.commit, seen.passed)
            after[verdict.check] = Seen(problems, 0, 0.0, verdict.at, raised_at, *facts)
        elif (result == "ok" or over) and (fresh or (verdict.result is Result.PROBLEM and not over)):
            first = seen.first_ok or now
            oks = max(seen.oks + 1, policy.clear_after if verdict.check in once else 0)
            seen = replace(seen, problems=0, oks=oks, first_ok=first, last_at=max(seen.last_at, verdict.at))
            after[verdict.check] = replace(seen, passed=verdict.commit) if verdict.result is Result.OK else seen
        seen = after.get(verdict.check, seen)
        if seen.raised and _has_passed(seen, seen.class_, policy, now):
            after[verdict.check] = replace(seen, raised_at=0.0)
    return after


def _read_proof(
    verdict: Verdict, now: float, boot_id: str, gpus: frozenset[str] | None, with_jobs: frozenset[str]
) -> str:
    """Return what the verdict proves now: "problem", "ok", or "" for nothing."""
    if verdict.boot_id != boot_id or not verdict.applies:
        return ""
    if now >= verdict.expires:
        # A script or check that runs only with jobs does not run again on a drained node: its problem lapses.
        lapses = is_of_script(verdict.check) or verdict.check in with_jobs
        return "ok" if lapses and verdict.result is Result.PROBLEM else ""
    if verdict.result is Result.PROBLEM and gpus is not None and verdict.subject.startswith("GPU-"):
        # That GPU has been replaced: it is no longer in this node.
        return "problem" if verdict.subject in gpus else "ok"
    return "" if verdict.result is Result.UNKNOWN else str(verdict.result)


def _has_passed(seen: Seen, class_: str, policy: BrokerPolicy, now: float) -> bool:
    """Tell if the check has passed often and long enough for its class; a negative wait means never by itself."""
    wait = policy.clear_wait_s.get(class_, 60.0)
    return wait >= 0 and seen.oks >= policy.clear_after and now - seen.first_ok >= wait


def _weight(class_: str) -> int:
    return CLASSES.index(class_) if class_ in CLASSES else 0


def select_raised(memory: Mapping[str, Seen]) -> dict[str, Seen]:
    """Return the raised problems, the heaviest first."""
    standing = [(check, seen) for check, seen in memory.items() if seen.raised]
    return dict(sorted(standing, key=lambda item: (-_weight(item[1].class_), item[0])))


def reason(standing: Mapping[str, Seen], carried: Iterable[str] = ()) -> str:
    """Format one line for sinfo: each check with its class, commit and reason."""
    parts = [f"{seen.name(check)} {seen.reason}" for check, seen in standing.items()]
    # Quotes and newlines would have to survive sinfo, scontrol and shells; "; " separates the checks.
    parts = [one_line(part) for part in [*parts, *carried]]
    parts = [re.sub(r"[\s\"'`|;]+", " ", part)[:PART_LIMIT].strip() for part in parts]
    while len(parts) > 1 and len("; ".join(parts)) > REASON_LIMIT:
        # Keep every name; drop the texts, starting with the lightest class.
        longest = max(range(len(parts)), key=lambda index: (len(parts[index]), index))
        name = parts[longest].split(" ", 1)[0]
        if parts[longest] == name:
            break
        parts[longest] = name
    return f"{PREFIX} {'; '.join(parts)}"


def split_reason(text: str) -> list[tuple[str, str, str, str]]:
    """Split the broker's reason into (check, class, commit, whole part) per check; empty for any other."""
    if not text.startswith(PREFIX):
        return []
    matches = [(_NAMED.match(part), part) for part in text[len(PREFIX) :].strip().split("; ")]
    return [(match[1], match[2], match[3], part) for match, part in matches if match]


def asks_for_deep(node: BrokerNode) -> bool:
    """Tell if a pod that starts on this node must run the deep checks first.

    The fleet, or an earlier pod's verdict, keeps jobs off for a reboot or a replacement. With jobs on the node, or a
    person's drain, nothing starts.
    """
    heavy = {class_ for _, class_, _, _ in split_reason(node.reason)} & {Class.REBOOT, Class.RMA}
    return node.drained and not node.busy and (bool(heavy) or bool(_TO_PROVE.match(node.reason)))


def names(text: str) -> frozenset[str]:
    """Return CHECK@COMMIT of each part of the broker's reason."""
    return frozenset(f"{check}@{commit}" for check, _, commit, _ in split_reason(text))


def find_unreleased(
    text: str,
    memory: Mapping[str, Seen],
    excused: Iterable[str],
    policy: BrokerPolicy,
    now: float,
    dead: Callable[[str], bool] = lambda check: False,
) -> dict[str, str]:
    """Return the parts of the broker's reason that must stay, as check -> part: their checks have not passed again.

    This includes a reason that an earlier pod posted: it ends only when this pod's checks have passed. `dead` tells if
    a check no longer exists or was forgotten; its part ends with it.
    """
    remaining = {}
    for check, class_, commit, part in split_reason(text):
        seen = memory.get(check, Seen())
        if f"{check}@{commit}" in excused or (dead(check) and not seen.raised):
            continue
        if seen.raised or seen.problems or not _has_passed(seen, class_, policy, now):
            remaining[check] = part
    return remaining


def find_left(standing: Mapping[str, Seen], kept: Mapping[str, str]) -> list[str]:
    """Return the kept parts that no standing check repeats."""
    return [part for check, part in kept.items() if check not in standing]


def keep_class(standing: Mapping[str, Seen], kept: Mapping[str, str]) -> dict[str, Seen]:
    """Keep the class of a check that the posted reason has already, if the new one is lighter.

    The next pod of the node reads only that reason: a lighter class would drop, for example, a reboot that is due.
    """
    posted = {check: class_ for part in kept.values() for check, class_, _, _ in split_reason(f"{PREFIX} {part}")}
    return {
        check: replace(seen, class_=max(seen.class_, posted.get(check, seen.class_), key=_weight))
        for check, seen in standing.items()
    }


def decide(standing: Mapping[str, Seen], node: BrokerNode, kept: Mapping[str, str]) -> Act:
    """Decide on the node, before guard and rate limit. `kept`: see `find_unreleased`."""
    if node.drained and not node.is_own_drain:
        # A person's drain, or Slurm's own: never change it; it keeps jobs off as well.
        return Act("nothing", f"drained already: {node.reason}")
    carried = find_left(standing, kept) if node.drained else []
    if node.drained:
        standing = keep_class(standing, kept)
    if not standing and not carried:
        if node.drained:
            return Act("clear", "every check that drained it passes again")
        return Act("nothing", "the node has no problem")
    text = reason(standing, carried)
    if not node.drained:
        return Act("drain", text)
    if {part[:3] for part in split_reason(node.reason)} != {part[:3] for part in split_reason(text)}:
        return Act("update", text)
    return Act("nothing", "already drained for the same reason")


# Incidents: each new problem of a GPU is one, and a GPU with too many is out for good. The GPUs are those in the memory
# of the check that counts them.
@dataclass(frozen=True, slots=True)
class Gpu:
    uuid: str
    serial: str
    bus: str
    model: str

    def is_called(self, subject: str) -> bool:
        """Match a subject by UUID or bus: "00000000:3B:00.0" for nvidia-smi, "0000:3b:00" for the kernel."""
        bus = subject.lower()
        return subject == self.uuid or (len(bus) >= 10 and bus in self.bus.lower())


def read_gpus(memory: Path, boot_id: str) -> tuple[Gpu, ...]:
    """Return the GPUs that answered at the last count."""
    data = read_json(memory)
    if data.get("boot_id") != boot_id or not isinstance(data.get("state"), dict):
        return ()
    listed = data["state"].get("gpus", [])
    if not isinstance(listed, list) or not all(isinstance(item, dict) for item in listed):
        return ()
    return tuple(Gpu(*(str(item.get(key, "")) for key in ("uuid", "serial", "bus", "model"))) for item in listed)


DAY_S = 86400.0


@dataclass(frozen=True, slots=True)
class Enter:
    """Request to enter an incident into a GPU's file of the ledger; the answer is the number of incidents."""

    check: str
    uuid: str
    event: Mapping[str, object]
    since: float
    most: int
    serial: str = ""
    model: str = ""


def entry(
    check: str, seen: Seen, evidence: str, node: str, gpus: tuple[Gpu, ...], policy: BrokerPolicy, now: float
) -> Enter | None:
    """Build the request; None if the problem concerns no GPU or has class user."""
    gpu = next((item for item in gpus if item.is_called(seen.subject)), None)
    uuid = gpu.uuid if gpu else seen.subject if seen.subject.startswith("GPU-") else ""
    if not uuid or seen.class_ == "user":
        return None
    event = {"at": now, "check": check, "class": seen.class_, "reason": seen.reason, "node": node, "evidence": evidence}
    serial, model = (gpu.serial, gpu.model) if gpu else ("", "")
    since = now - policy.offender_days * DAY_S
    return Enter(check, uuid, event, since, policy.offender_incidents, serial, model)


def classify(seen: Seen, entered: Enter, count: int) -> Seen:
    """Return the problem, with class rma if its GPU has had too many incidents."""
    if count < entered.most:
        return seen
    return replace(seen, class_="rma", reason=f"{seen.reason} (incident {count} of {entered.uuid})")
