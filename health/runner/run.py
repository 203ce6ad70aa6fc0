"""Run the scripts of one commit, in order, as slurm.conf's Prolog, Epilog, TaskProlog and HealthCheckProgram.

The commit is resolved once and held by a lease, so that a publish changes nothing for a run that has begun. A broken
script differs from an unfit node: Slurm drains a node whose prolog fails, and a typo must not drain a fleet. Imports
little, from the standard library only: a prolog pays for every import.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import FrameType

from gitsync import lease
from gitsync.layout import Layout
from ground.errors import one_line
from health import black_box
from health.ask import ask_broker
from health.places import Places, boot_id
from health.policy import KINDS
from health.runner import gate, record
from health.runner.plan import only_with, scripts
from health.runner.warm import Warm, read_policy, run_compiled
from health.script import UNFIT, ScriptOutcome, environment, run
from health.verdict import Class, Result, Verdict, read_verdict, script_digest, write_verdict

# Lifetime of a script's "unfit": the script does not run again on a drained node.
UNFIT_LASTS_S = 1800.0
# Lines that slurmd understands on a task prolog's standard output.
TASK_LINES = ("export ", "unset ", "print ")
# A line for this runner: the task must not start, and its user reads the reason. The node and the script are fine.
REFUSE = "refuse "


def main(kind: str, missed_reason: str = "") -> int:
    """Run the scripts; return Slurm's exit code: 0, or 1 if the node must not run this job.

    `missed_reason`: why the resident runner did not take the run; "" where it was not asked.
    """
    if kind not in KINDS:
        print(f"cannot run {kind}: not one of {', '.join(KINDS)}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, stop)
    os.chdir("/")
    if missed_reason and kind != "task_prolog":
        record.count_missed_run(Places.from_environment().runner, missed_reason)
    return perform(kind, os.environ, Warm())


def perform(kind: str, given: Mapping[str, str], warm: Warm) -> int:
    try:
        with warm.held or lease.hold() as held:
            return Run(kind, held.path, held.commit, given, warm).go()
    # A bug of this runner must not drain the node: it is recorded, and the job starts.
    except Exception:
        import traceback

        traceback.print_exc()
        record.append({"at": time.time(), "kind": kind, "result": "broken", "reason": traceback.format_exc()[-2000:]})
        return 0


def stop(number: int, frame: FrameType | None) -> None:
    # Unwinds through the running script, which is killed with its session.
    raise SystemExit(0)


class Run:
    """One run of one kind: the scripts, the checks, the record."""

    def __init__(self, kind: str, tree: Path, commit: str, given: Mapping[str, str], warm: Warm | None = None) -> None:
        self.warm = warm or Warm()
        self.kind = kind
        self.tree = tree
        self.commit = commit
        self.given = given
        self.job = given.get("SLURM_JOB_ID", "")
        self.places = self.warm.places
        self.policy = read_policy(tree, self.places, self.warm.cache)
        self.env = environment(kind, given, commit, str(tree), UNFIT)
        self.start = time.monotonic()
        self.scripts: list[dict[str, object]] = []
        self.broken: list[str] = []
        self.unfit: list[Verdict] = []
        self.checks: dict[str, object] = {}
        self.fails = False

    def left_s(self) -> float:
        return self.policy.kind(self.kind).budget_s - (time.monotonic() - self.start)

    def go(self) -> int:
        if self.kind == "health":
            self._check_in_background()
        else:
            if self.kind == "epilog" and self.policy.box_days:
                black_box.end(self.given, time.time())
            # Before a job, check first: an unfit node needs no preparation. After a job, clean up first.
            if self.kind == "prolog":
                self._check_gate()
            if not self.fails:
                self._run_scripts()
            if self.kind == "epilog" and not self.warm.looked_at_later:
                self._check_gate()
            if self.kind == "prolog" and self.policy.box_days and not self.fails:
                black_box.begin(self.given, time.time())
        self._conclude()
        return 1 if self.fails else 0

    def _run_scripts(self) -> None:
        for name in scripts(self.tree, self.kind):
            if self.kind == "task_prolog" and self._is_about_another_task(name):
                continue
            remaining = self.left_s()
            if remaining <= 0.1:
                self._record_broken_script(
                    name, ScriptOutcome(None, 0.0, broken="not started: the scripts before it used up the time")
                )
                continue
            limit = min(self.policy.deadline_s(self.kind, f"{self.kind}.d/{name}"), remaining)
            done = self._start(f"{self.kind}.d/{name}", limit)
            if done.broken:
                self._record_broken_script(name, done)
                continue
            if done.code == UNFIT:
                self._record_unfit_script(name, done)
                continue
            self.scripts.append({"script": name, "result": "ok", "seconds": round(done.seconds, 4)})
            if self.kind == "task_prolog" and (reason := _pass_on(done.out)):
                self.scripts[-1] |= {"result": "refused", "reason": reason[:300]}
                self.fails = True
                break
        self._judge([verdict for verdict in self.unfit if self.kind == "prolog"])

    def _is_about_another_task(self, name: str) -> bool:
        variable = only_with(self.tree / f"{self.kind}.d" / name)
        return bool(variable) and not self.given.get(variable)

    def _start(self, script: str, limit_s: float) -> ScriptOutcome:
        step = self.warm.image_scripts.step(self.tree, script) if self.warm.image_scripts else None
        if step is not None:
            return run_compiled(step, self.env, limit_s, UNFIT)
        return run([str(self.tree / script)], self.env, limit_s, UNFIT)

    def _record_broken_script(self, name: str, done: ScriptOutcome) -> None:
        text = f"{done.out}{done.err}"
        evidence = record.keep_output(self.kind, name, self.job, f"{done.broken}\n{text}")
        last = done.err.strip().splitlines()[-1:] or done.out.strip().splitlines()[-1:]
        reason = f"{done.broken}: {last[0]}" if last else done.broken
        self.scripts.append(
            {
                "script": name,
                "result": "broken",
                "exit": done.code,
                "seconds": round(done.seconds, 4),
                "reason": reason[:300],
                "evidence": evidence,
            }
        )
        self.broken.append(f"{self.kind}.d/{name}: {reason}"[:300])
        lease.report(self.commit, f"{self.kind}.d/{name}", reason, Layout.from_environment())
        if self.policy.broken(self.kind, f"{self.kind}.d/{name}") == "fail":
            self.fails = True
            if self.kind in ("prolog", "epilog"):
                # Slurm drains the node when this run ends, and never lifts that itself.
                ask_broker({"ask": "failed"}, 0.5)

    def _record_unfit_script(self, name: str, done: ScriptOutcome) -> None:
        reason = ([*done.err.strip().splitlines()[-1:], *done.out.strip().splitlines()[-1:], "no reason given"])[0]
        evidence = record.keep_output(self.kind, name, self.job, f"{done.out}{done.err}")
        entry = {"script": name, "result": "unfit", "seconds": round(done.seconds, 4), "reason": reason[:300]}
        self.scripts.append({**entry, "evidence": evidence})
        now = time.time()
        verdict = Verdict(
            f"{self.kind}.{name}",
            Result.PROBLEM,
            Class.NODE,
            reason[:300],
            evidence=evidence,
            commit=self.commit,
            boot_id=boot_id(),
            at=now,
            expires=now + UNFIT_LASTS_S,
            digest=script_digest(self.tree / f"{self.kind}.d" / name),
        )
        self._write(verdict)
        self.unfit.append(verdict)

    def _check_gate(self) -> None:
        checked = gate.check(
            self.kind,
            self.tree,
            self.commit,
            self.env,
            max(1.0, self.left_s() / 2),
            self.places,
            self.warm.cache,
            after_a_job=self.warm.after_a_job,
        )
        self.checks = checked.counts()
        if checked.fault:
            self.checks["fault"] = checked.fault
            self.broken.append(f"health.d: {checked.fault}")
        stopping = [verdict for verdict in checked.problems if gate.stops_a_job(verdict)]
        if self.kind == "epilog":
            # The broker decides on the drain: a failed epilog would drain the node at once.
            if stopping:
                ask_broker({"ask": "look"}, 0.5)
            return
        self._judge(stopping)

    def _judge(self, problems: list[Verdict]) -> None:
        """Fail only for problems that the broker drains for: it knows if half the fleet has the same one."""
        if not problems:
            return
        names = [verdict.check for verdict in problems]
        answer = ask_broker({"ask": "gate", "checks": names}, self.policy.gate_wait_s)
        if answer is None:
            self.checks["broker"] = "no answer"
            self.fails = self.fails or self.policy.gate_unconfirmed == "fail"
            return
        self.checks["broker"] = answer.get("decisions", {})
        self.fails = self.fails or answer.get("drained") is True

    def _check_in_background(self) -> None:
        argv = [sys.executable, "-I", "-m", "health.checks.round", "--tree", str(self.tree), "--commit", self.commit]
        done = run([*argv, "--when", "background", "--due", "--without-slurm"], self.env, self.left_s(), UNFIT)
        if done.broken or done.code:
            self._record_broken_script("health", done)
        elif '"result": "problem"' in done.out:
            ask_broker({"ask": "look"}, 0.5)

    def _conclude(self) -> None:
        if self.policy.fault:
            self.broken.append(self.policy.fault)
        refused = bool(self.scripts) and self.scripts[-1]["result"] == "refused"
        result = "refused" if refused else "unfit" if self.fails else "broken" if self.broken else "ok"
        record.append(
            record.entry(
                self.kind, self.job, self.commit, result, self.start, scripts=self.scripts, checks=self.checks,
                broken=self.broken,
            )
        )  # fmt: skip
        self._report_broken()
        if self.fails:
            for line in [*self.broken, *(str(entry.get("reason", "")) for entry in self.scripts if "reason" in entry)]:
                print(line, file=sys.stderr)

    def _report_broken(self) -> None:
        """Record broken scripts as a verdict of class user: it is visible, and drains no node."""
        if self.kind == "task_prolog":
            # A user may not write there; the record and gitsync's report remain.
            return
        name = f"scripts_{self.kind}"
        old = read_verdict(self.places.verdict(name))
        if not self.broken and (old is None or old.result is Result.OK):
            return
        now = time.time()
        self._write(
            Verdict(
                name,
                Result.PROBLEM if self.broken else Result.OK,
                Class.USER,
                "; ".join(self.broken)[:500] or "the scripts ran",
                commit=self.commit,
                boot_id=boot_id(),
                at=now,
                expires=now + 86400,
            )
        )

    def _write(self, verdict: Verdict) -> None:
        try:
            # The reason is a script's last line, which may contain anything.
            write_verdict(self.places.verdicts, replace(verdict, reason=one_line(verdict.reason)))
        except OSError as error:
            print(f"cannot write the verdict of {verdict.check}: {error}", file=sys.stderr)


def _pass_on(text: str) -> str:
    """Pass whole lines on that slurmd understands; half a line would set half a variable.

    Returns the reason if the task is refused.
    """
    for line in text.splitlines():
        if line.startswith(TASK_LINES):
            print(line, flush=True)
        if line.startswith(REFUSE):
            reason = line.removeprefix(REFUSE).strip()
            print(f"print minivm: {reason}", flush=True)
            return reason
    return ""


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:3]))
