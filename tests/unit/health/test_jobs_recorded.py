"""Pages of real jobs: what squeue, sacct and scontrol of Slurm 24.11.5 printed as JSON."""

from __future__ import annotations

from pathlib import Path

import pytest

from health.jobs import parse
from health.jobs.explain import explain
from health.jobs.model import JobCause, World

RECORDED = Path(__file__).resolve().parents[2] / "recordings/jobs"
NOW = 1795698440.0


def text(name: str) -> str:
    return (RECORDED / f"24.11-{name}.json").read_text()


WORLD = World(nodes=parse.parse_nodes(text("nodes")), partitions=parse.parse_partitions(text("partitions")))


@pytest.mark.parametrize(
    ("job", "words", "cause"),
    [
        (1, "held by its user (alice)", JobCause.PERSON),
        (2, "exit code 3", JobCause.CODE),
        (3, "did not end as required (afterok:2)", JobCause.REQUEST),
        (9, "refused it at submission", JobCause.REQUEST),
        (11, "The nearest, slurm-worker-0, has 23.54 GiB of memory and the job needs 85.83 TiB", JobCause.REQUEST),
    ],
)
def test_jobs_that_squeue_shows(job: int, words: str, cause: JobCause) -> None:
    (found,) = [each for each in parse.parse_queue(text("squeue")) if each.id == job]
    answer = explain(found, WORLD, NOW).answer
    assert words in answer.headline and answer.cause is cause
    assert (found.user, found.partition, found.name) == ("alice", "all", "wrap")


@pytest.mark.parametrize(
    ("job", "words", "cause"),
    [
        (4, "It used all of its memory, 60M", JobCause.REQUEST),
        (5, "could not open its output file", JobCause.REQUEST),
        (6, "It reached its time limit of 1 min after 1 min", JobCause.LIMIT),
        (12, "slurmctld lost slurm-worker-1", JobCause.MACHINE),
        (13, "root cancelled it while it ran", JobCause.PERSON),
        (14, "died of SIGSEGV", JobCause.CODE),
    ],
)
def test_jobs_that_accounting_keeps(job: int, words: str, cause: JobCause) -> None:
    (found,) = [each for each in parse.parse_accounting(text("sacct")) if each.id == job]
    item = explain(found, WORLD, NOW)
    assert words in item.answer.headline and item.answer.cause is cause
    assert [event.text.split()[0] for event in item.timeline] == ["submitted", "started", "ended"]


def test_nodes_and_partitions() -> None:
    assert WORLD.nodes is not None and WORLD.partitions is not None
    first = min(WORLD.nodes, key=lambda node: node.name)
    assert first.name == "slurm-worker-0" and first.memory == 24105 and "all" in first.partitions and first.cpus > 0
    assert WORLD.partitions[0].name == "all" and WORLD.partitions[0].states == {"UP"}
