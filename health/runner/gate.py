"""Whether the node is fit for a job: fresh verdicts of the background checks, the rest run now, and the broker's word.

A healthy node costs a few small files to read. Only what is not fresh is run, in one child for all of it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from health.script import UNFIT, run
from health.verdict import VERDICTS, Class, Result, Verdict, boot_id, health_index, health_state, read_verdict


@dataclass(frozen=True, slots=True)
class Checked:
    problems: tuple[Verdict, ...]
    # How many verdicts were taken as they lay, and how many checks were run for this.
    fresh: int
    ran: int
    # Why the checks could not be run: then nothing is known, and a job is not stopped for that.
    fault: str = ""


def verdicts_directory() -> Path:
    return Path(os.environ.get("MINIVM_VERDICTS", VERDICTS))


def check(kind: str, tree: Path, commit: str, env: Mapping[str, str], budget_s: float) -> Checked:
    if not (tree / "health.d").is_dir():
        return Checked((), 0, 0)
    now, boot = time.time(), boot_id()
    directory = verdicts_directory()
    index = _index(tree, commit, boot)
    fresh: dict[str, Verdict] = {}
    stale: list[str] = []
    for name, facts in index.items():
        if kind not in facts["when"] or not facts["applies"]:
            continue
        verdict = read_verdict(directory / f"{name}.json")
        if verdict is not None and verdict.fresh(now, boot):
            fresh[name] = verdict
        else:
            stale.append(name)
    fault = ""
    ran: list[str] = []
    # After a job everything is looked at again: what a verdict said before the job proves nothing about now.
    if kind == "epilog":
        stale, fresh = sorted([*stale, *fresh]), {}
    if stale or not index:
        ran, fault = _run(kind, tree, commit, stale if index else None, env, budget_s)
        again = {name: read_verdict(directory / f"{name}.json") for name in ran}
        fresh.update({name: verdict for name, verdict in again.items() if verdict is not None})
    problems = tuple(verdict for verdict in fresh.values() if verdict.result is Result.PROBLEM)
    return Checked(problems, len(fresh) - len(ran), len(ran), fault)


def stops_a_job(verdict: Verdict) -> bool:
    return verdict.result is Result.PROBLEM and verdict.class_ is not Class.USER


def _index(tree: Path, commit: str, boot: str) -> Mapping[str, Mapping[str, Any]]:
    """What the last background round of this commit listed; empty where there was none."""
    try:
        data = json.loads(health_index(health_state()).read_bytes())
        if data["commit"] != commit or data["boot_id"] != boot or data["tree"] != str(tree):
            return {}
        checks = data["checks"]
        return checks if all("when" in facts and "applies" in facts for facts in checks.values()) else {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _run(
    kind: str, tree: Path, commit: str, names: list[str] | None, env: Mapping[str, str], budget_s: float
) -> tuple[list[str], str]:
    argv = [sys.executable, "-I", "-m", "health.checks.round", "--tree", str(tree), "--commit", commit]
    argv += ["--when", kind] if names is None else ["--checks", ",".join(names)]
    done = run(argv, env, budget_s, UNFIT)
    if done.broken or done.code:
        last = done.err.strip().splitlines()[-1:] or [""]
        return [], f"the checks could not be run: {done.broken or f'exit {done.code}'} {last[0]}"[:300]
    try:
        said = json.loads(done.out)["ran"]
        broken = [f"{item['check']}: {item['broken']}" for item in said if item["broken"]]
        return [str(item["check"]) for item in said], "; ".join(broken)[:300]
    except (ValueError, KeyError, TypeError):
        return [], "the checks said nothing that can be read"
