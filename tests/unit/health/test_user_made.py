"""Evidence that a job's user can cause or forge drains nothing: a draining verdict needs evidence of the hardware."""

from __future__ import annotations

import os
import re
import shutil
import tracemalloc
from pathlib import Path

import pytest

from health.api import Capture, Check, CheckModule, Class, Failure, Inputs, Limits, Result, UserMade, problem
from health.checks import builtin
from health.checks.cases import Case, examine, judge_case, read_case
from health.checks.judge import Setting, judge
from health.checks.load import load_checks
from health.verdict import Finding, verdict_from_json

ROOT = Path(__file__).resolve().parents[3]
TREE = ROOT / "scripts"
CHECKS = load_checks(TREE).checks
RECORDED = ROOT / "tests/recordings/nvidia-smi"


class Made:
    """Check that finds one given problem."""

    def __init__(self, user_made: UserMade, finding: Finding) -> None:
        self.CHECK = Check("made", "", Class.RMA, 60, (), thresholds="", user_made=user_made)
        self.finding = finding

    def parse(self, inputs: Inputs) -> None:
        """Read nothing."""

    def judge(self, measured: None, context: object) -> list[Finding]:
        return [self.finding]


@pytest.mark.parametrize(
    ("check", "finding", "class_"),
    [
        (UserMade.NO, None, Class.RMA),
        (UserMade.NO, False, Class.RMA),
        (UserMade.NO, True, Class.USER),
        (UserMade.PARTLY, None, Class.USER),
        (UserMade.PARTLY, False, Class.RMA),
        (UserMade.PARTLY, True, Class.USER),
        (UserMade.YES, None, Class.USER),
        (UserMade.YES, False, Class.USER),
        (UserMade.YES, True, Class.USER),
    ],
)
@pytest.mark.parametrize("said", [None, *Class])
def test_what_a_user_can_bring_about_is_of_class_user_whatever_the_check_says(
    check: UserMade, finding: bool | None, class_: Class, said: Class | None
) -> None:
    made: CheckModule = Made(check, problem("x", class_=said, user_made=finding))  # type: ignore[assignment]  # wider
    verdict = judge(made, {}, lambda _: Limits({}, ""), Setting("c", "b", 1.0, {}), {}).verdict
    wanted = class_ if class_ is Class.USER else said or Class.RMA
    assert (verdict.class_, verdict.findings[0].class_ or Class.RMA) == (wanted, wanted)
    assert verdict_from_json(verdict.to_json()).class_ is wanted


@pytest.mark.parametrize("file", ["uptime.py", "scratch"])
def test_a_check_that_users_make_and_that_drains_is_refused(tmp_path: Path, file: str) -> None:
    tree = Path(shutil.copytree(TREE, tmp_path / "tree"))
    path = tree / "health.d" / file
    if file == "scratch":
        path.write_text('#!/bin/sh\n# minivm-check: {"about": "x", "class": "node", "user_made": "yes"}\n')
        path.chmod(0o755)
    else:
        path.write_text(path.read_text().replace('thresholds="host",', 'thresholds="host", user_made=UserMade.YES,'))
        path.write_text(path.read_text().replace("import Check,", "import UserMade, Check,"))
    assert any(f"{file}: declares that a job's user can cause it: set the class to user" in fault
               for fault in examine(tree).faults), examine(tree).faults  # fmt: skip


def test_a_program_says_yes_or_no(tmp_path: Path) -> None:
    (tmp_path / "health.d").mkdir()
    for said, class_, broken in (("partly", "user", True), (1, "user", True), ("yes", "user", False)):
        path = tmp_path / "health.d/scratch"
        shown = f'"{said}"' if isinstance(said, str) else said
        path.write_text(f'#!/bin/sh\n# minivm-check: {{"about": "x", "class": "{class_}", "user_made": {shown}}}\n')
        path.chmod(0o755)
        assert bool(load_checks(tmp_path).broken) is broken


def test_every_check_answers_whether_a_user_can_bring_it_about() -> None:
    text = (ROOT / "docs/health.md").read_text().split("### May a job's user")[1].split("\n\nCommands of Slurm")[0]
    told = {
        name: row.split("|")[1].strip()
        for row in text.splitlines()
        if row.startswith("| ")
        for name in re.findall(r"`(\w+)`", row.split("|")[2])
    }
    assert told == {name: module.CHECK.user_made.value for name, module in CHECKS.items()}


SAID = (
    "WARNING: infoROM is corrupted at gpu 0000:2A:00.0",
    "No devices were found",
    "GPU is lost",
    "Unable to determine the device handle for GPU 0000:2A:00.0: GPU is lost",
    "Failed to initialize NVML: x",
    "x\nWARNING: infoROM is corrupted at gpu 0000:2A:00.0",
    "x\nNo devices were found",
    "x\n    ECC Errors\n        Aggregate\n            SRAM Uncorrectable Parity : 9",
    "x\n    GPU Recovery Action : Reboot\n    Remapped Rows\n        Remapping Failure Occurred : Yes",
    "x\nGPU 00000000:2A:00.0\n    Product Name : NVIDIA H100\n    GPU UUID : GPU-forged",
)


@pytest.mark.parametrize("name", SAID)
def test_a_process_on_a_gpu_says_nothing_by_its_name(name: str) -> None:
    case = read_case(RECORDED / "h100-job-runs")
    text = case.captures["nvidia_smi_q"].text
    assert ": python\n" in text
    forged = Capture(text.replace(": python\n", f": {name}\n", 1))
    for check in (check for check in sorted(CHECKS) if check.startswith("gpu_") and check != "gpu_leftovers"):
        if not all(source.name in case.captures for source in CHECKS[check].CHECK.sources):
            continue
        true = judge_case(CHECKS[check], TREE, case).verdict
        got = judge_case(CHECKS[check], TREE, Case(case.path, {**case.captures, "nvidia_smi_q": forged})).verdict
        allowed = {(true.result, true.class_), (Result.PROBLEM, Class.USER)}
        assert (got.result, got.class_) in allowed, f"{check}: {got.class_} {got.reason}"


@pytest.mark.parametrize("end", ["\n", "\v", "\x1c", "\u2028"])
def test_a_process_on_one_gpu_is_not_the_next_gpu_by_its_name(end: str) -> None:
    """A process name on one GPU is not parsed as the next GPU.

    The user writes a whole GPU section into the name, with any character that may end a line.
    """
    case = read_case(RECORDED / "h100-job-runs")
    text = case.captures["nvidia_smi_q"].text
    block = text.split("\nGPU 00000000:3A:00.0")[1].split("    Processes")[0]
    broken = re.sub(r"(Uncorrectable.*): 0", r"\1: 7", block).replace("Occurred        : No", "Occurred        : Yes")
    name = f"x\nGPU 00000000:3A:00.0{broken}".replace("\n", end)
    given = Capture(text.replace(": python\n", f": {name}\n", 1))
    for check in (check for check in sorted(CHECKS) if check.startswith("gpu_") and check != "gpu_leftovers"):
        if not all(source.name in case.captures for source in CHECKS[check].CHECK.sources):
            continue
        true = judge_case(CHECKS[check], TREE, case).verdict
        got = judge_case(CHECKS[check], TREE, Case(case.path, {**case.captures, "nvidia_smi_q": given})).verdict
        # When the two cannot be told apart the result is unknown; otherwise the name does not hide a problem either.
        assert got.result is not Result.PROBLEM, f"{check}: {got.class_} {got.reason}"
        if end != "\n":
            assert got.result is true.result, f"{check}: {got.reason}"


def test_memory_that_nobody_holds_is_the_gpu_s_only_where_nobody_is() -> None:
    case = read_case(RECORDED / "a100-leftover-memory")
    assert judge_case(CHECKS["gpu_leftovers"], TREE, case).verdict.class_ is Class.REBOOT
    listed = case.captures["processes"].text
    person = "31337 777 1 S 7000 20001 bash\n# end: 4 processes"
    crowded = Capture(listed.replace("# end: 3 processes", person))
    got = judge_case(CHECKS["gpu_leftovers"], TREE, Case(case.path, {**case.captures, "processes": crowded}))
    assert got.verdict.class_ is Class.USER


def test_a_job_with_more_logs_than_anybody_reads_does_not_keep_the_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job with very many logs does not delay the round or fill its memory.

    A user owns the job's directory, and may create any number of names there and links to files of root.
    """
    monkeypatch.setattr(builtin, "NCCL_LOGS", tmp_path)
    for job in ("1", "2", "3"):
        (tmp_path / job).mkdir()
    (tmp_path / "1" / "nccl").write_text("flood")
    os.utime(tmp_path / "1" / "nccl", (1e9, 1e9))
    for number in range(20_000):
        os.link(tmp_path / "1" / "nccl", tmp_path / "1" / f"nccl.{number}")
    (tmp_path / "2" / "nccl.host.1.log").write_text("the word of an honest job")
    (tmp_path / "3" / "nccl.log").symlink_to("/etc/passwd")
    os.mkfifo(tmp_path / "3" / "nccl.fifo")
    tracemalloc.start()
    try:
        text = builtin.nccl_log().text
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert text == f"==> {tmp_path}/2/nccl.host.1.log <==\nthe word of an honest job"
    assert most < 2**21


def test_a_log_that_its_user_replaces_by_a_pipe_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "nccl.log")
    (tmp_path / "12").mkdir()
    monkeypatch.setattr(builtin, "NCCL_LOGS", tmp_path)
    monkeypatch.setattr(builtin, "_newest_log", lambda directory: [(1.0, str(tmp_path / "nccl.log"))])
    got = builtin.nccl_log()
    assert got.failure is Failure.FAILED and "not a regular file" in got.why
