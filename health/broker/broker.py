"""Posts the node's drain to Slurm and takes it back: acts on what `health.broker.decide` decides.

One call to look and one to act each time something changes, none while nothing does. How many other nodes say the same
costs one sinfo, and only when a drain is due.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field

from health.broker.calls import Slurm
from health.broker.decide import Act, Node, Seen, decide, is_script, left, observe, raised, reason, unreleased
from health.broker.decide import names as posted_names
from health.broker.guard import guarded, within_rate
from health.broker.incidents import enter, incident
from health.broker.inputs import read_gpus
from health.files import write_json
from health.index import Index, read_index
from health.ledger import Ledger
from health.places import Places, boot_id
from health.policy import BrokerPolicy, broker_policy_of, read_broker_policy
from health.spread import share
from health.verdict import Result, read_verdicts
from init.errors import InitError
from init.slurm.client import SlurmError

LOOK_S = 5.0
RETRY_S = (5.0, 15.0, 60.0, 300.0)
# A person's resume is honoured for a day; a problem that is still there then is told again.
RESUMED_LASTS_S = 86400.0


@dataclass(slots=True)
class Broker:
    places: Places
    slurm: Slurm
    policy: BrokerPolicy = field(default_factory=BrokerPolicy)
    memory: dict[str, Seen] = field(default_factory=dict)
    # check@commit -> until when it drains nothing: too many nodes say the same, or a person has resumed the node.
    held: dict[str, float] = field(default_factory=dict)
    # Of this process alone and by the monotonic clock, as is all that is due: a node whose clock is set drains in time.
    actions: list[float] = field(default_factory=list)
    # What stood when we last acted: while it stands, nobody is asked anything.
    settled: frozenset[str] | None = None
    drained: bool = False
    # The node's reason when we last saw it, where it is ours.
    posted: str = ""
    said: str = "starting"
    due: float = 0.0
    failures: int = 0
    recheck: float = 0.0
    index: Index | None = None
    # Checks that have a verdict, and those that a person has told us to forget until they speak again.
    written: frozenset[str] = frozenset()
    forgotten: set[str] = field(default_factory=set)
    _mtime: int = -1

    def look(self) -> None:
        """Verdicts in, perhaps one act out."""
        now = time.time()
        boot = boot_id()
        before = raised(self.memory)
        verdicts = read_verdicts(self.places.verdicts).values()
        gpus = read_gpus(self.places.memory("gpu_count"), boot)
        counted = next((item for item in verdicts if item.check == "gpu_count"), None)
        complete = counted is not None and counted.result is Result.OK and bool(gpus)
        present = frozenset(gpu.uuid for gpu in gpus) if complete else None
        index = read_index(self.places.index)
        # Another boot's says nothing of this one: then no check is known to be gone.
        self.index = index if index and index.boot_id == boot else None
        self.written = frozenset(verdict.check for verdict in verdicts)
        with_jobs = self.index.with_jobs if self.index else frozenset()
        seen_now = observe(self.memory, verdicts, self.policy, now, boot, present, with_jobs)
        self.memory = {check: seen for check, seen in seen_now.items() if not self._is_gone(check)}
        for check, seen in raised(self.memory).items():
            if check not in before:
                evidence = next((item.evidence for item in verdicts if item.check == check), "")
                event = incident(check, seen, now, self.slurm.name, evidence)
                self.memory[check] = enter(Ledger(self.places.ledger), seen, event, gpus, self.policy, say)
        standing = self._standing(now)
        names = frozenset(seen.name(check) for check, seen in standing.items())
        live = reason(standing, left(standing, self._kept(self.posted, now)))
        if (names != self.settled or not posted_names(self.posted) <= posted_names(live)) and not self.due:
            # A whole fleet finds a bad commit's check at the same moment; each node waits its own part of the time,
            # so that the later ones see the earlier ones. A lone node's prolog is not kept waiting for that.
            spread = self.policy.guard_spread_s if standing and not self.drained else 0.0
            self.due = later(spread * share(self.slurm.name))
        if is_over(self.due):
            self._act(standing, now)
        elif is_over(self.recheck):
            self._recheck(standing, now)
        self._save(standing)

    def _is_gone(self, check: str) -> bool:
        """No longer in the tree, and without a verdict.

        A script that has said nothing since the pod began is as good as gone: on a drained node it does not run.
        """
        if check in self.written:
            return False
        return is_script(check) or (self.index is not None and check not in self.index.checks)

    def _standing(self, now: float) -> dict[str, Seen]:
        self.held = {name: until for name, until in self.held.items() if until > now}
        return {check: seen for check, seen in raised(self.memory).items() if seen.key(check) not in self.held}

    def _kept(self, text: str, now: float) -> dict[str, str]:
        def dead(check: str) -> bool:
            return check in self.forgotten or self._is_gone(check)

        return unreleased(text, self.memory, self.held, self.policy, now, dead)

    def _act(self, standing: Mapping[str, Seen], now: float) -> None:
        try:
            node = self.slurm.node()
            if node is None:
                raise SlurmError("find the node", f"slurmctld knows no node {self.slurm.name} yet")
            act = decide(standing, node, self._kept(node.reason, now))
            if act.kind in {"drain", "update"}:
                standing, act = self._ask_others(standing, node, act, now)
            if act.kind != "nothing" and not within_rate(self.actions, self.policy, later(0)):
                self.said = f"too many changes within {self.policy.rate_per_s:g} s: waits ({act.kind}: {act.text})"
                self.due = later(self.policy.rate_per_s / self.policy.rate_actions)
                return
            self._do(act, node)
        except InitError as error:
            self.said = str(error)
            pause = RETRY_S[min(self.failures, len(RETRY_S) - 1)]
            self.due = later(pause)
            self.failures += 1
            say(f"{error}: again in {pause:.0f} s")
            return
        self.settled = frozenset(seen.name(check) for check, seen in standing.items())
        self.due, self.failures = 0.0, 0
        self.forgotten.clear()

    def _ask_others(
        self, standing: Mapping[str, Seen], node: Node, act: Act, now: float
    ) -> tuple[Mapping[str, Seen], Act]:
        others, total = self.slurm.others()
        many = guarded(standing, others, total, self.policy, now)
        for check in many:
            seen = standing[check]
            self.held[seen.key(check)] = now + self.policy.guard_lasts_s
            say(f"{seen.name(check)} stands on too many nodes: this one is not drained for it ({seen.reason})")
        rest = {check: seen for check, seen in standing.items() if check not in many}
        return rest, decide(rest, node, self._kept(node.reason, now))

    def _do(self, act: Act, node: Node) -> None:
        self.said = f"{act.kind}: {act.text}"
        if act.kind == "nothing":
            self.drained = node.drained
            self.posted = node.reason if node.drained and node.ours else ""
            return
        say(f"{act.kind} {self.slurm.name}: {act.text}")
        if act.kind == "clear":
            self.slurm.undrain()
            self.drained, self.recheck, self.posted = False, 0.0, ""
        else:
            self.slurm.drain(act.text)
            self.drained, self.posted = True, act.text
            self.recheck = later(self.policy.guard_recheck_s)
        now = later(0)
        self.actions = [*(at for at in self.actions if at > now - self.policy.rate_per_s), now]

    def _recheck(self, standing: Mapping[str, Seen], now: float) -> None:
        """Once after a drain: did the rest of the fleet say the same at the same moment?"""
        self.recheck = 0.0
        try:
            others, total = self.slurm.others()
        except InitError as error:
            say(f"{error}: the drain stands")
            return
        many = guarded(standing, others, total, self.policy, now)
        if many:
            for check in many:
                self.held[standing[check].key(check)] = now + self.policy.guard_lasts_s
            say(f"{', '.join(sorted(many))} stand on too many nodes: the drain is taken back")
            self.due = later(0)

    def _resumed(self, standing: Mapping[str, Seen]) -> None:
        """A job starts on a node that we drained: then a person has resumed it, and knows why."""
        try:
            node = self.slurm.node()
        except InitError as error:
            say(str(error))
            return
        if node is not None and not node.drained:
            self.drained, self.posted = False, ""
            for check, seen in standing.items():
                self.held[seen.key(check)] = time.time() + RESUMED_LASTS_S
            self.said = "a person has resumed the node: what stood against it then drains it no more"
            say(self.said)

    def answer(self, request: Mapping[str, object]) -> Mapping[str, object]:
        ask = request.get("ask")
        if ask not in ("gate", "look", "status", "forget"):
            return {"error": f"unknown question {ask!r}: gate, look, status, forget"}
        checks = request.get("checks", [])
        named = [str(check) for check in checks] if isinstance(checks, list) else []
        if ask == "forget":
            self._forget(named)
        if ask != "status":
            self.look()
        standing = self._standing(time.time())
        if ask == "gate" and self.drained and any(check in standing for check in named):
            self._resumed(standing)
            standing = self._standing(time.time())
        decisions = {check: self._decision(check, standing) for check in named}
        # A job is kept off only for what has drained the node: then nothing is drained that the guard held back.
        stops = self.drained and any(check in standing for check in named)
        return {"decisions": decisions, "drained": stops, "said": self.said}

    def _forget(self, named: Iterable[str]) -> None:
        """A person has dealt with it: what these checks have said counts no more. What they say from now on does."""
        for check in named:
            self.memory.pop(check, None)
            self.forgotten.add(check)
            self.held = {key: until for key, until in self.held.items() if key.split("@")[0] != check}
            say(f"{check} is forgotten, a person says")
        self.settled = None

    def _decision(self, check: str, standing: Mapping[str, Seen]) -> str:
        seen = self.memory.get(check, Seen())
        if check in standing:
            return "drained" if self.drained else "about to drain"
        if seen.key(check) in self.held:
            return "held back: too many nodes say the same, or a person has resumed the node"
        return "seen, not long enough" if seen.problems else "not seen"

    def wait_s(self) -> float:
        times = [at - later(0) for at in (self.due, self.recheck) if at]
        return max(0.05, min([LOOK_S, *times]))

    def changed(self) -> bool:
        """A rename in the directory changes its time: without one, and nothing due, there is nothing to look at."""
        try:
            mtime = self.places.verdicts.stat().st_mtime_ns
        except OSError:
            mtime = 0
        changed = mtime != self._mtime
        self._mtime = mtime
        waiting = any(seen.oks for seen in self.memory.values() if seen.raised)
        return changed or waiting or bool(self.posted) or bool(self.due or self.recheck)

    def _save(self, standing: Mapping[str, Seen]) -> None:
        data = {
            "node": self.slurm.name,
            "drained": self.drained,
            "said": self.said,
            "standing": {check: asdict(seen) for check, seen in standing.items()},
            "held": self.held,
            "reason": reason(standing) if standing else "",
            "at": time.time(),
        }
        with contextlib.suppress(OSError):
            write_json(self.places.broker_state, data)

    def reread(self) -> None:
        """The operator's policy, else the tree's; of a file with a typo the reason is told."""
        own = None
        try:
            own = broker_policy_of(self.places.policy)
        except InitError as error:
            say(str(error))
        try:
            self.policy = own or read_broker_policy(self.places.scripts)
        except InitError as error:
            say(str(error))  # the last good one stays


def say(text: str) -> None:
    print(f"broker: {text}", file=sys.stderr, flush=True)


def later(seconds: float) -> float:
    return time.monotonic() + seconds


def is_over(moment: float) -> bool:
    """Of a moment that `later` gave; 0 is none."""
    return bool(moment) and time.monotonic() >= moment
