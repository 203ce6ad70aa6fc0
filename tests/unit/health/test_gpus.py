"""GPUs in black boxes and on the page of a running job, from `nvidia-smi -q` as recorded."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from health import black_box, gpus
from health.api import When
from health.checks import collect, round
from health.checks.load import CheckSelection
from health.jobs import ask, boxes
from health.jobs.boxes import Box
from health.jobs.model import Answer, Job, JobCause, World
from health.places import Places

ROOT = Path(__file__).resolve().parents[3]
RECORDED = ROOT / "tests/recordings/nvidia-smi"
NOW = 1_795_800_000.0
JOB = {"SLURM_JOB_ID": "12", "SLURM_JOB_UID": "1001", "SLURM_JOB_GPUS": "1,3"}


def recorded(name: str) -> str:
    return (RECORDED / name / "nvidia_smi_q.txt").read_text()


H100 = recorded("h100-job-runs")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MINIVM_LOG", str(tmp_path))
    return tmp_path


def test_each_gpu_has_a_use_and_counters() -> None:
    samples = gpus.parse(H100, NOW, {})
    assert sorted(samples) == [0, 1, 2, 3]
    second = samples[1]
    assert (second.bus[:5], second.use, second.memory, second.room) == ("0000:", 0, 71331, 81559)
    assert second.idle_since == NOW
    assert second.counts == {"replays": 0, "ecc_corrected": 0, "ecc_uncorrected": 0}
    sick = gpus.parse(recorded("h100-sram-uncorrected"), NOW, {})
    assert sum(gpu.counts["ecc_uncorrected"] for gpu in sick.values()) == 1, "no lifetime counters"


@pytest.mark.parametrize("path", sorted(RECORDED.glob("*/nvidia_smi_q.txt")), ids=lambda path: path.parent.name)
def test_any_answer_of_the_tool_is_read(path: Path) -> None:
    gpus.parse(path.read_text(), NOW, {})


def test_a_gpu_is_idle_since_the_first_sample_that_saw_it_so() -> None:
    idle = gpus.parse(H100, NOW, {})
    later = gpus.parse(H100, NOW + 60, idle)
    assert {gpu.idle_since for gpu in later.values()} == {NOW}
    busy = gpus.parse(
        H100.replace("Gpu                               : 0 %", "Gpu                               : 9 %"),
        NOW + 90,
        later,
    )
    assert {(gpu.use, gpu.idle_since) for gpu in busy.values()} == {(9, 0.0)}
    assert {gpu.idle_since for gpu in gpus.parse(H100, NOW + 120, busy).values()} == {NOW + 120}


def test_names_of_processes_forge_no_gpu() -> None:
    name = "x\n    Utilization\n        Gpu        : 99 %\nGPU 00000000:FF:00.0\n    Minor Number : 0"
    listed = f"    Processes\n        Process ID : 1\n            Name : {name}\n"
    forged = H100.replace("    Processes                             : None\n", listed, 1)
    assert forged != H100 and gpus.parse(forged, NOW, {}) == {}
    inside = H100.replace("    Processes                             : None\n", listed.replace("GPU 0", "GPU x"), 1)
    assert inside != H100 and gpus.parse(inside, NOW, {})[0].use == 0
    parted = inside.replace("Gpu                               : 0 %", "Gpu                               : N/A", 1)
    assert 0 not in gpus.parse(parted, NOW, {}), "its use is not known, whatever a process is called"
    cut = H100[: len(H100) // 2]
    assert gpus.parse(cut, NOW, {}) == {} == gpus.parse("", NOW, {})


def test_a_round_of_checks_notes_in_the_boxes_what_moved(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = root / "bin/nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(f"#!/bin/sh\ncat {root}/answer\n")
    tool.chmod(0o755)
    monkeypatch.setitem(collect.ENVIRONMENT, "PATH", f"{tool.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("MINIVM_EXPECT_GPUS", "4")
    places = replace(Places(), verdicts=root / "verdicts", state=root / "state", capsules=root / "capsules")
    places.verdicts.mkdir()
    black_box.begin(JOB, NOW)
    healthy = H100.replace("Replays Since Reset               : 0", "Replays Since Reset               : 5", 1)
    errors = healthy.replace("DRAM Uncorrectable            : 0", "DRAM Uncorrectable            : 3")
    for text in (healthy, errors):
        (root / "answer").write_text(text)
        round.run(ROOT / "scripts", "", CheckSelection(When.BACKGROUND, ("gpu_ecc",)), places)
    texts = [str(entry.get("text")) for entry in black_box.parse_lines(black_box.find(12, 1001))]
    assert [text.partition(" (0000")[0] for text in texts if "GPU" in text] == [
        f"3 uncorrected memory errors (ECC) on GPU {number}" for number in range(4)
    ]
    assert oct(places.gpus.stat().st_mode)[-3:] == "600"


def test_the_box_of_a_running_job_is_led_by_the_present_use_of_its_gpus(root: Path) -> None:
    path = root / "gpus.json"
    gpus.take(path, H100, NOW)
    black_box.begin(JOB, NOW - 60)

    def lead(now: float) -> dict[str, object]:
        (entry,) = black_box.parse_lines(gpus.describe_now(black_box.find(12, 1001), path, now))
        assert isinstance(entry.pop("boot"), float)
        return entry

    assert lead(NOW + 5) == {
        "kind": "now", "at": NOW + 5, "sampled": NOW, "gpus": [[1, 0, 71331, 81559, NOW], [3, 0, 1, 81559, NOW]]
    }  # fmt: skip
    assert lead(NOW + 5000) == {"kind": "now", "at": NOW + 5000}, "an old sample says nothing of now"
    path.write_text('{"at": 1, "gpus": [[1]]}')
    assert lead(NOW) == {"kind": "now", "at": NOW}
    black_box.end(JOB, NOW + 9)
    assert lead(NOW + 9) == {"kind": "now", "at": NOW + 9}


def test_a_job_without_gpus_has_none_in_its_box(root: Path) -> None:
    black_box.begin({**JOB, "SLURM_JOB_GPUS": "x,-1,,²"}, NOW)
    (begin,) = black_box.parse_lines(black_box.find(12, 1001))
    assert "gpus" not in begin


def running() -> Job:
    return Job(id=12, shown="12", states=frozenset({"RUNNING"}), nodes="w0,w1", started=NOW - 9000)


def box(node: str, idle: float, use: int = 0, *seen: str) -> Box:
    row = [1, use, 1024, 81920, NOW - idle if idle else 0]
    lead: dict[str, object] = {"kind": "now", "at": NOW, "sampled": NOW, "gpus": [row]}
    noted: list[dict[str, object]] = [{"kind": "seen", "at": NOW, "text": text} for text in seen]
    return Box(node, (lead, {"kind": "begin"}, *noted))


def page(*given: Box, silent: float | None = None, cause: JobCause = JobCause.NONE) -> Answer:
    return ask.add_node_reports(Answer("It runs.", cause), given, running(), World(output_age=silent), NOW)


def test_a_job_without_output_and_with_unused_gpus_may_hang() -> None:
    answer = page(box("w0", 3000), box("w1", 2820), silent=4000)
    assert answer.headline == "It runs. No output and 0 % of its GPUs for 47 min: hung?"
    assert answer.cause is JobCause.UNKNOWN
    assert answer.evidence[0].text == "on w0 it uses GPU 1 0 %, 1 GiB of 80 GiB"
    writes = page(box("w0", 3000), box("w1", 2820), silent=5)
    assert writes.headline == "It runs." and "unused for 47 min" in writes.advice[0]
    for calm in (
        page(box("w0", 3000), box("w1", 0, 97), silent=4000),
        page(box("w0", 300), box("w1", 300), silent=4000),
        page(silent=4000),
    ):
        assert calm.headline == "It runs." and not calm.advice
    partly = page(box("w0", 3000), Box("w1", obstacle="no answer"), silent=4000)
    assert partly.headline == "It runs.", "the node that is silent may work"


def test_a_problem_that_a_check_found_meanwhile_is_named_while_it_lasts() -> None:
    xid = "xid: XID 79 on 0000:18:00: GPU has fallen off the bus"
    answer = page(box("w0", 0, 9), box("w1", 0, 9, "disk: full", xid, "drained by the broker: xid", "no longer: disk"))
    assert answer.headline == f"It runs. A check found a problem while it ran: w1: {xid}."
    assert answer.cause is JobCause.MACHINE
    assert page(box("w1", 0, 9, xid, "no longer: xid")).headline == "It runs."


@pytest.mark.parametrize(
    "rows", [1, [1], [[1, 2]], [["x", 1, 1, 1, 1]], [[1, 1, 1, 1, float("inf")]], [[-1, 0, 0, 0, 1]]]
)
def test_a_hostile_lead_says_nothing(rows: object) -> None:
    lead: dict[str, object] = {"kind": "now", "at": NOW, "sampled": NOW, "gpus": rows}
    odd: dict[str, object] = {"kind": "seen", "text": ["x"]}
    answer = page(Box("w\x1b0", (lead, {"kind": "begin"}, odd)), silent=9000)
    assert answer.headline == "It runs." and not answer.evidence


def test_errors_of_gpus_of_other_jobs_are_not_this_job_s() -> None:
    begin: dict[str, object] = {"kind": "begin", "gpus": [1]}
    seen: list[dict[str, object]] = [
        {"kind": "seen", "at": NOW, "text": f"3 PCIe replays on GPU {number} (0000:18:00)"} for number in (1, 2)
    ]
    facts, _ = boxes.explain([Box("w0", (begin, *seen))], running())
    assert [fact.text.partition(" (")[0] for fact in facts] == ["on w0 while it ran: 3 PCIe replays on GPU 1"]
