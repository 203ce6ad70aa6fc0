"""Decide if the node is fit for a job: from fresh verdicts, checks run now, and the broker's decision.

A healthy node costs the reading of a few small files. Only checks without a fresh verdict run, in one child.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from health.places import Places, boot_id
from health.rounds import Index, read_index
from health.runner.warm import FileCache
from health.script import run_here
from health.verdict import Class, Result, Verdict, read_verdict

# Checks of the host itself: what a job's user can cause has class `user` and stops no job.
ANY = "any"


@dataclass(frozen=True, slots=True)
class Checked:
    problems: tuple[Verdict, ...]
    # Verdicts taken as they are, and checks run for this decision.
    fresh: int
    ran: int
    # Why the checks could not run; then nothing is known, and the job may start.
    fault: str = ""

    def counts(self) -> dict[str, object]:
        """Return what the record of a run says of its checks."""
        problems = {verdict.check: verdict.reason for verdict in self.problems}
        return {"fresh": self.fresh, "ran": self.ran} | ({"problems": problems} if problems else {})


@dataclass(frozen=True, slots=True)
class FoundVerdicts:
    """Verdicts that may be believed, and the checks that must run for the rest."""

    believed: Mapping[str, Verdict]
    stale: tuple[str, ...]
    # The checks are unknown: all of this kind must run.
    unlisted: bool

    @property
    def complete(self) -> bool:
        return not self.stale and not self.unlisted


def look(
    kind: str, tree: Path, commit: str, places: Places, cache: FileCache | None = None, *, after_a_job: bool = False
) -> FoundVerdicts:
    """Read the verdicts. `after_a_job`: a job ended after the last check, so its traces are not judged yet."""
    if not (tree / "health.d").is_dir():
        return FoundVerdicts({}, (), False)
    cache = cache or FileCache()
    boot = boot_id()
    index = cache.get("index", [places.index], lambda: read_index(places.index))
    if index is not None and (index.commit, index.boot_id, index.tree) != (commit, boot, str(tree)):
        index = None
    names = checks_of_kind(index, kind)
    # Strings, not Path objects: there are some twenty before each job, and building a Path takes longer than a stat.
    files = {name: f"{places.verdicts}/{name}.json" for name in names}
    verdicts = {name: cache.get(file, [file], partial(_read, file)) for name, file in files.items()}
    believed = still_valid(verdicts, kind, time.time(), boot)
    if after_a_job and index is not None:
        doubted = {name for name, facts in index.listed.items() if "epilog" in facts.when and facts.hardware != ANY}
        believed = {name: verdict for name, verdict in believed.items() if name not in doubted}
    return FoundVerdicts(believed, tuple(sorted(names - believed.keys())), index is None or not index.listed)


def _read(file: str) -> Verdict | None:
    return read_verdict(Path(file))


def check(
    kind: str,
    tree: Path,
    commit: str,
    env: Mapping[str, str],
    budget_s: float,
    places: Places,
    cache: FileCache | None = None,
    *,
    after_a_job: bool = False,
) -> Checked:
    known = look(kind, tree, commit, places, cache, after_a_job=after_a_job)
    fault = ""
    ran: list[str] = []
    if not known.complete:
        ran, fault = _run(kind, tree, commit, list(known.stale) or None, env, budget_s)
    again = {name: read_verdict(places.verdict(name)) for name in ran}
    verdicts = {**known.believed, **{name: verdict for name, verdict in again.items() if verdict is not None}}
    problems = tuple(verdict for verdict in verdicts.values() if verdict.result is Result.PROBLEM)
    return Checked(problems, len(verdicts) - len(ran), len(ran), fault)


def checks_of_kind(index: Index | None, kind: str) -> frozenset[str]:
    """Return the checks that a job of this kind waits for; none if no round of this commit has listed any."""
    listed = index.listed.items() if index else ()
    return frozenset(name for name, facts in listed if kind in facts.when and facts.applies)


def still_valid(known: Mapping[str, Verdict | None], kind: str, now: float, boot: str) -> dict[str, Verdict]:
    """Filter the verdicts that still hold. After a job all checks run again: an older verdict proves nothing."""
    if kind == "epilog":
        return {}
    return {name: verdict for name, verdict in known.items() if verdict is not None and verdict.fresh(now, boot)}


def stops_a_job(verdict: Verdict) -> bool:
    return verdict.result is Result.PROBLEM and verdict.class_ is not Class.USER


def _run(
    kind: str, tree: Path, commit: str, names: list[str] | None, env: Mapping[str, str], budget_s: float
) -> tuple[list[str], str]:
    done = run_here(partial(_round, kind, tree, commit, names), env, budget_s)
    if done.broken or done.code:
        last = done.err.strip().splitlines()[-1:] or [""]
        return [], f"the checks could not be run: {done.broken or f'exit {done.code}'} {last[0]}"[:300]
    try:
        results = json.loads(done.out)["ran"]
        broken = [f"{item['check']}: {item['broken']}" for item in results if item["broken"]]
        return [str(item["check"]) for item in results], "; ".join(broken)[:300]
    except (ValueError, KeyError, TypeError):
        return [], "the output of the checks cannot be parsed"


def _round(kind: str, tree: Path, commit: str, names: list[str] | None) -> bytes:
    from health.api import When
    from health.checks.load import CheckSelection
    from health.checks.round import perform

    selection = CheckSelection(When(kind)) if names is None else CheckSelection(names=tuple(names))
    return perform(tree, commit, selection).encode()


def prepare() -> None:
    """Import early, so that forks of this process need not; called late, since most runs need no check."""
    import health.checks.round  # noqa: F401
