"""Generated faults of users and machines: no user's fault is called the machine's, and a lost link is not forgotten."""

from __future__ import annotations

import pytest

from bench.blame import CONSEQUENCES, MACHINE, USER, USER_LINES, FaultyJob, Generator, page_of, recorded_worlds, tally
from health.jobs.model import JobCause, Sure


def test_no_generated_fault_of_a_user_is_blamed_on_a_machine() -> None:
    causes, wrong = tally(200, seed=2)
    assert not wrong[USER], wrong[USER][:5]
    assert causes[MACHINE, JobCause.MACHINE] >= 198, wrong[MACHINE][:5]


@pytest.mark.parametrize(
    ("lost", "line", "cause"),
    [
        (1, CONSEQUENCES[0], JobCause.MACHINE),
        (0, CONSEQUENCES[0], JobCause.CODE),
        (1, USER_LINES[0], JobCause.CODE),
        (1, "", JobCause.CODE),
    ],
)
def test_a_lost_link_counts_where_the_output_tells_of_no_more_than_a_network_s_error(
    lost: int, line: str, cause: JobCause
) -> None:
    made = Generator(3, recorded_worlds()[:1])
    job = made.job("FAILED", exit_code=1, nodes="w[0-3]", node_count=4)
    job, boxes = made.boxes(job, 1, 0, {"ib/mlx5_0/link_downed": lost})
    answer = page_of(FaultyJob("", job, made.nodes(job, {}), f"[rank0]: {line}", boxes)).answer
    assert answer.cause is cause
    assert (answer.sure is Sure.POSSIBLE and "lost a link while it ran" in answer.headline) == (
        cause is JobCause.MACHINE
    )
