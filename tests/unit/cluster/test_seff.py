"""seff over recorded output of sacct, Slurm 24.11, for jobs of every kind, byte for byte."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SEFF = Path(__file__).resolve().parents[3] / "images/src/seff"
ONE = """\
1|1|minivm|alice|researchers|COMPLETED|0:0|1|1|5|00:02.247|billing=1,cpu=1,mem=600M,node=1|||
1.batch|1.batch|minivm|||COMPLETED|0:0|1|1|5|00:00.092|cpu=1,mem=600M,node=1|cpu=00:00:00,energy=0,fs/disk=2413958,mem=8744960,pages=1,vmem=4124672|8744960|1
1.extern|1.extern|minivm|||COMPLETED|0:0|1|1|5|00:00.002|billing=1,cpu=1,mem=600M,node=1|cpu=00:00:00,energy=0,fs/disk=1636,mem=262144,pages=0,vmem=106496|262144|1
1.0|1.0|minivm|||COMPLETED|0:0|1|1|5|00:02.152|cpu=1,mem=600M,node=1|cpu=00:00:02,energy=0,fs/disk=2434722,mem=213331968,pages=0,vmem=212574208|213331968|1
"""
# Four tasks on two nodes: TRESUsageInTot is the sum of all tasks, MaxRSS is the largest task's.
WIDE = """\
2|2|minivm|alice|researchers|COMPLETED|0:0|2|4|8|00:03.134|billing=4,cpu=4,mem=1800M,node=2|||
2.batch|2.batch|minivm|||COMPLETED|0:0|1|2|8|00:00.115|cpu=2,mem=900M,node=1|cpu=00:00:00,energy=0,fs/disk=0,mem=8749056,pages=3,vmem=86016|8749056|1
2.extern|2.extern|minivm|||COMPLETED|0:0|2|4|8|00:00.006|billing=4,cpu=4,mem=1800M,node=2|cpu=00:00:00,energy=0,fs/disk=1636,mem=524288,pages=0,vmem=217088|262144|2
2.0|2.0|minivm|||COMPLETED|0:0|2|4|7|00:03.012|cpu=4,mem=1800M,node=2|cpu=00:00:02,energy=0,fs/disk=4869532,mem=853344256,pages=0,vmem=235679744|213340160|4
"""
ARRAY = """\
3_1|6|minivm|alice|researchers|FAILED|3:0|1|1|3|00:00.116|billing=1,cpu=1,mem=1024M,node=1|||
3_1.batch|6.batch|minivm|||FAILED|3:0|1|1|3|00:00.113|cpu=1,mem=1024M,node=1|cpu=00:00:00,energy=0,fs/disk=0,mem=8716288,pages=0,vmem=0|8716288|1
3_2|3|minivm|alice|researchers|FAILED|3:0|1|1|3|00:00.118|billing=1,cpu=1,mem=1024M,node=1|||
3_2.batch|3.batch|minivm|||FAILED|3:0|1|1|3|00:00.115|cpu=1,mem=1024M,node=1|cpu=00:00:00,energy=0,fs/disk=0,mem=8503296,pages=0,vmem=0|8503296|1
"""
RUNNING = """\
4|4|minivm|alice|researchers|RUNNING|0:0|1|1|11|00:00:00|billing=1,cpu=1,mem=1024M,node=1|||
4.batch|4.batch|minivm|||RUNNING|0:0|1|1|11|00:00:00|cpu=1,mem=1024M,node=1|||1
"""
NEVER = "5|5|minivm|alice|researchers|CANCELLED by 20001|0:0|1|0|0|00:00:00||||\n"


def seff(bin: Path, said: str, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run seff with a sacct that prints `said` and records its arguments."""
    (bin / "said").write_text(said)
    sacct = bin / "sacct"
    sacct.write_text(f"#!/bin/sh\nset -eu\necho \"$@\" > '{bin}/asked'\ncat '{bin}/said'\nexit {code}\n")
    sacct.chmod(0o755)
    env = os.environ | {"PATH": f"{bin}:{os.environ['PATH']}"}
    return subprocess.run([str(SEFF), *arguments], env=env, capture_output=True, text=True)


def test_a_job_is_told_in_the_shape_that_people_know(tmp_path: Path) -> None:
    assert seff(tmp_path, ONE, "1").stdout == (
        "Job ID: 1\n"
        "Cluster: minivm\n"
        "User/Group: alice/researchers\n"
        "State: COMPLETED (exit code 0)\n"
        "Cores: 1\n"
        "CPU Utilized: 00:00:02\n"
        "CPU Efficiency: 44.94% of 00:00:05 core-walltime\n"
        "Job Wall-clock time: 00:00:05\n"
        "Memory Utilized: 203.45 MB\n"
        "Memory Efficiency: 33.91% of 600.00 MB\n"
    )
    asked = (tmp_path / "asked").read_text()
    assert "--noconvert" in asked and "-j 1 " in asked


def test_memory_is_that_of_all_tasks_of_the_largest_step(tmp_path: Path) -> None:
    text = seff(tmp_path, WIDE, "2").stdout
    assert "Nodes: 2\nCores per node: 2\n" in text
    assert "CPU Efficiency: 9.79% of 00:00:32 core-walltime\n" in text
    assert "Memory Utilized: 813.81 MB\nMemory Efficiency: 45.21% of 1.76 GB\n" in text
    # An older record has only the largest task.
    without = WIDE.replace("mem=853344256,", "")
    assert "Memory Utilized: 813.83 MB\n" in seff(tmp_path, without, "2").stdout


def test_each_task_of_an_array_is_told(tmp_path: Path) -> None:
    first, second = seff(tmp_path, ARRAY, "3").stdout.split("\n\n")
    assert first.startswith("Job ID: 6\nArray Job ID: 3_1\n") and "State: FAILED (exit code 3)\n" in first
    assert second.startswith("Job ID: 3\nArray Job ID: 3_2\n")


def test_of_a_job_that_runs_nothing_is_said_that_is_not_known(tmp_path: Path) -> None:
    text = seff(tmp_path, RUNNING, "4").stdout
    assert "State: RUNNING\n" in text and "Job Wall-clock time: 00:00:11\n" in text and "sstat" in text
    assert "CPU" not in text and "Memory" not in text


def test_a_job_that_never_ran_has_used_nothing(tmp_path: Path) -> None:
    text = seff(tmp_path, NEVER, "5").stdout
    assert "State: CANCELLED by 20001 (exit code 0)\n" in text
    assert "CPU Efficiency: 0.00% of 00:00:00 core-walltime\n" in text and text.endswith(
        "Memory Utilized: not measured\n"
    )


def test_the_reason_of_an_end_is_told(tmp_path: Path) -> None:
    full = "8|8|c|a|g|OUT_OF_MEMORY|0:125|1|1|5|00:00.1|billing=1,cpu=1,mem=200M,node=1||||\n"
    text = seff(tmp_path, full, "8").stdout
    assert "State: OUT_OF_MEMORY (exit code 0)\nReason: it reached its memory limit, 200.00 MB in all" in text
    row = "9|9|c|a|g|CANCELLED by 0|0:0|1|1|5|00:00.1|cpu=1,mem=200M,node=1||||{}\n"
    text = seff(tmp_path, row.format("minivm: the pod of node w1 stops"), "9").stdout
    assert "\nComment: the pod of node w1 stops\n" in text
    # A site's own comment is not for users.
    assert "billed" not in (text := seff(tmp_path, row.format("billed|to\nAnn"), "9").stdout) and "State: CANC" in text


def test_days_and_large_sizes(tmp_path: Path) -> None:
    row = "7|7|c|a|g|TIMEOUT|0:15|2|16|100000|1-02:03:04|cpu=16,mem=3T,node=2|||\n"
    step = "7.0|7.0|c|||CANCELLED|0:15|2|16|100000|1-02:03:04|cpu=16,mem=3T,node=2|mem=1.5T||16\n"
    text = seff(tmp_path, row + step, "7").stdout
    assert "State: TIMEOUT (exit code 0, signal 15)\nNodes: 2\nCores per node: 8\n" in text
    assert "CPU Utilized: 1-02:03:04\nCPU Efficiency: 5.86% of 18-12:26:40 core-walltime\n" in text
    assert "Memory Utilized: 1.50 TB\nMemory Efficiency: 50.00% of 3.00 TB\n" in text


def test_what_is_not_there_is_said_and_the_accounting_s_own_words_stay(tmp_path: Path) -> None:
    done = seff(tmp_path, "", "999")
    assert (done.returncode, done.stdout) == (1, "") and "none of that number" in done.stderr
    assert seff(tmp_path, "", "999", code=1).returncode == 1
    missing = subprocess.run([str(SEFF), "1"], env={"PATH": str(tmp_path / "none")}, capture_output=True, text=True)
    assert missing.returncode == 1 and "cannot ask the accounting" in missing.stderr


@pytest.mark.parametrize("arguments", [(), ("1", "2"), ("--users=root",), ("1 2",), ("1.0",), ("",), ("_",)])
def test_anything_else_than_a_job_is_refused_unasked(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    done = seff(tmp_path, ONE, *arguments)
    assert done.returncode == 2 and done.stderr.startswith("usage: seff JOBID")
    assert not (tmp_path / "asked").exists()
    assert seff(tmp_path, ONE, "--help").stdout.startswith("usage: seff JOBID")
