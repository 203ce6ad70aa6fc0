"""Jobs that fail on one machine: many users' failures blame it, and no fault of users does."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from health.api import Capture, Class, Result
from health.checks.cases import Case, judge_case
from health.checks.failed_jobs import ASK_AGAIN_S, MOST_OF_A_USER, SACCT, WITHIN_S, FailedJob, failed_jobs, note
from health.checks.load import load_checks
from health.jobs.model import Job
from health.runner.failed import EndedJob, note_failures
from health.verdict import Verdict

TREE = Path(__file__).resolve().parents[3] / "scripts"
CHECK = load_checks(TREE).checks["failing_jobs"]
NOW = 1_800_000_000.0
Ends = list[tuple[str, str, str, str]]  # user, name, state, node


class Accounting:
    """sacct, as its options are in `elsewhere`."""

    def __init__(self, ends: Ends, why: str = "") -> None:
        self.ends, self.why, self.calls = ends, why, list[Sequence[str]]()

    def __call__(self, argv: Sequence[str]) -> str:
        self.calls.append(argv)
        if self.why:
            raise OSError(self.why)
        assert argv[0] == SACCT
        lists = {part.split("=")[0]: part.split("=")[1].split(",") for part in argv if "=" in part}
        return "".join(
            f"{user}|{name}|{state}|{node}\n"
            for user, name, state, node in self.ends
            if user in lists["--user"] and name in lists["--name"]
        )


def failures(ends: Ends, node: str) -> list[FailedJob]:
    return [
        FailedJob(user, name, str(number), NOW - 60)
        for number, (user, name, state, place) in enumerate(ends)
        if state == "FAILED" and place == node
    ]


def verdict(path: Path, now: float = NOW) -> Verdict:
    case = Case(path, {"failed_jobs": failed_jobs(path)}, now=now)
    return judge_case(CHECK, TREE, case).verdict


def judged(path: Path, ends: Ends, node: str = "w0") -> Verdict:
    path.unlink(missing_ok=True)
    note(failures(ends, node), node, NOW, Accounting(ends), path)
    return verdict(path)


def of(user: str, *states: str, node: str, name: str = "train") -> Ends:
    return [(user, name, state, node) for state in states]


def broken_machine() -> Ends:
    return [
        end
        for user in ("alice", "bob", "carol")
        for end in (*of(user, "FAILED", "FAILED", node="w0"), *of(user, *["COMPLETED"] * 4, node="w1"))
    ]


def test_jobs_of_three_users_that_fail_here_alone_are_the_machine_s_matter(tmp_path: Path) -> None:
    found = judged(tmp_path / "x", broken_machine())
    assert (found.result, found.class_) == (Result.PROBLEM, Class.MANUAL)
    assert found.reason == (
        "jobs of 3 users failed here within an hour (0, 1, 6, 7, 12); 12 like them ended well elsewhere"
    )
    assert verdict(tmp_path / "x", NOW + WITHIN_S + 60).result is Result.OK


@pytest.mark.parametrize(
    "change",
    [
        [end for end in broken_machine() if end[0] != "carol"],
        [(user.replace("carol", "bob"), *rest) for user, *rest in broken_machine()],
        [*broken_machine(), *of("carol", "COMPLETED", node="w0")],
        [*broken_machine(), *of("carol", "FAILED", node="w2")],
        [*broken_machine(), *of("carol", "NODE_FAIL", node="w[1-3]")],
        [end for end in broken_machine() if end[0] != "carol" or end[3] == "w0"],
        [(user, name if node == "w0" else "other", state, node) for user, name, state, node in broken_machine()],
        list(dict.fromkeys(broken_machine())),
    ],
    ids=["two users", "two names of three", "passed here", "failed elsewhere", "failed on several",
         "ran here alone", "other jobs", "too few to tell"],
)  # fmt: skip
def test_anything_else_may_be_the_users_fault(tmp_path: Path, change: Ends) -> None:
    assert judged(tmp_path / "x", [tuple(end) for end in change]).result is Result.OK  # type: ignore[misc]  # rows


def test_faults_of_users_never_blame_a_machine_and_a_broken_machine_is_found(tmp_path: Path) -> None:
    """In 200 hours of 8 nodes each job has a fault of its own or none; in the second run w0 is broken, too."""
    chance = random.Random(30)
    blamed = found = 0
    for _ in range(200):
        ends: Ends = []
        for user in range(chance.randrange(1, 12)):
            for name in range(chance.randrange(1, 4)):
                # Mostly the same end everywhere; some fail now and then, wherever they run.
                rate = chance.choice((0.0, 0.0, 0.1, 0.5, 1.0))
                for _ in range(chance.randrange(1, 12)):
                    node = f"w{chance.randrange(8)}"
                    state = "FAILED" if chance.random() < rate else "COMPLETED"
                    ends.append((f"u{user}", f"job{name}", state, node))
        broken = [(user, name, "FAILED" if node == "w0" else state, node) for user, name, state, node in ends]
        blamed += sum(judged(tmp_path / "x", ends, f"w{node}").result is Result.PROBLEM for node in range(8))
        found += judged(tmp_path / "x", broken).result is Result.PROBLEM
    assert blamed == 0
    assert found > 70, f"a broken machine is found in {found} of 200 hours"


def test_accounting_is_asked_once_in_a_while_and_only_about_three_users_or_more(tmp_path: Path) -> None:
    path, sacct = tmp_path / "x", Accounting(broken_machine())
    note([FailedJob("alice", "train", "1", NOW)], "w0", NOW, sacct, path)
    assert not sacct.calls
    for number, user in enumerate(("bob", "carol", "dave")):
        note([FailedJob(user, "train", str(number), NOW)], "w0", NOW + number, sacct, path)
    assert len(sacct.calls) == 1
    note([FailedJob("eve", "train", "9", NOW)], "w0", NOW + 2 + ASK_AGAIN_S, sacct, path)
    assert "--user=alice,bob,carol,dave,eve" in sacct.calls[1] and len(sacct.calls) == 2


def test_without_accounting_nothing_is_blamed_and_the_verdict_is_unknown(tmp_path: Path) -> None:
    path = tmp_path / "x"
    assert note(failures(broken_machine(), "w0"), "w0", NOW, Accounting([], "disabled"), path) == "disabled"
    assert verdict(path).result is Result.UNKNOWN


def test_one_user_s_flood_leaves_room_for_the_failures_of_other_users(tmp_path: Path) -> None:
    path, ends = tmp_path / "x", broken_machine()
    flood = [FailedJob("eve", f"x{number}", str(number), NOW) for number in range(5000)]
    note([*failures(ends, "w0"), *flood], "w0", NOW, Accounting(ends), path)
    assert verdict(path).result is Result.PROBLEM
    assert failed_jobs(path).text.count('"eve"') == MOST_OF_A_USER


def test_hostile_names_reach_no_command_and_no_line(tmp_path: Path) -> None:
    path, sacct = tmp_path / "x", Accounting([])
    names = ("a,b --state=ALL", "-x", "a|b\nfailed jobs 0\nend", "\x1b[31m", "")
    note([FailedJob(f"u{n}", name, "1", NOW) for n, name in enumerate(names)], "w0", NOW, sacct, path)
    assert not sacct.calls
    assert verdict(path).result is Result.UNKNOWN
    assert "\x1b" not in failed_jobs(path).text and failed_jobs(path).text.count("\n") == 2 + len(names)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"jobs": 3, "runs": [1]}', '{"jobs": [{}, 4], "runs": {}}'])
def test_a_damaged_file_counts_as_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "x").write_text(text)
    assert verdict(tmp_path / "x").result is Result.OK


CUT = '{"user": "a", "jobs": ["1"], "times": [], "other_runs": null}'


@pytest.mark.parametrize(
    "text", ["", "failed jobs 1\nend\n", "failed jobs 1\n{}\nend\n", f"failed jobs 1\n{CUT}\nend\n"]
)
def test_a_source_that_is_cut_is_unknown(text: str, tmp_path: Path) -> None:
    case = Case(tmp_path, {"failed_jobs": Capture(text)}, now=NOW)
    assert judge_case(CHECK, TREE, case).verdict.result is Result.UNKNOWN


def test_the_runner_notes_failures_of_code_and_no_limit_or_wrong_request(tmp_path: Path) -> None:
    def job(number: int, state: str, **more: object) -> Job:
        facts: dict[str, object] = {
            "id": number, "shown": str(number), "name": "train", "user": f"u{number}", "nodes": "w0",
            "states": frozenset({state}), "started": NOW - 500, "ended": NOW, "limit": 60,
        } | more  # fmt: skip
        return Job(**facts)  # type: ignore[arg-type]  # a table of fields

    seen = [
        job(1, "FAILED", exit_code=3), job(2, "FAILED", signal=11), job(3, "FAILED", signal=9), job(4, "TIMEOUT"),
        job(5, "OUT_OF_MEMORY"), job(6, "FAILED", reason="SystemFailure", exit_code=1),
    ]  # fmt: skip
    ended = [EndedJob(each.id, 1000 + each.id, 100, time.time()) for each in seen]
    sacct = Accounting([])
    note_failures(ended, {each.id: each for each in seen}, tmp_path / "x", sacct)
    lines = map(json.loads, failed_jobs(tmp_path / "x").text.splitlines()[1:-1])
    assert {line["user"] for line in lines} == {"u1", "u2", "u3"}
    assert len(sacct.calls) == 1
