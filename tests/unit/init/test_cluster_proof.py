"""A new pod's record, and the proof that slurmctld knows the running slurmd, not only the previous pod's."""

from __future__ import annotations

from pathlib import Path

import pytest

from init.slurm import client, registration
from init.slurm.node import Node
from init.slurm.registration import _old
from tests.support import slurm_programs


@pytest.mark.parametrize(
    ("registered", "started", "ours"),
    [
        ("2026-11-20T14:37:08", "2026-11-20T14:37:08", True),
        ("2026-11-20T14:37:08", "2026-11-20T14:37:09", True),  # the second changed between two readings of slurmd
        ("2026-11-20T14:37:10", "2026-11-20T14:37:09", True),
        ("2026-11-20T14:37:08", "", True),  # slurmd does not report its start
        ("2026-11-20T14:36:08", "2026-11-20T14:37:08", False),
        ("2025-12-31T23:59:50", "2026-01-01T00:00:00", False),
    ],
)
def test_an_older_registration_is_the_last_pods(registered: str, started: str, ours: bool) -> None:
    node = Node("w1", "IDLE", "10.0.0.1", "", registered, 0)
    assert (_old(node, started) == "") is ours


def test_a_drain_that_comes_while_a_new_pod_looks_at_its_jobs_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`down` and `resume` would lift it, and jobs would start on a machine that a person has begun to repair."""
    told = tmp_path / "told"
    scontrol = (
        f"#!/bin/sh\ncd {tmp_path}\n[ ! -e drained ] || by='+DRAIN Reason=fan is loud [ann@2026-11-20T10:32:18]'\n"
        f'case "$*" in *show*) echo "NodeName=w1 State=MIXED$by CPUAlloc=1";; *) echo "$*" >> {told};; esac\n'
    )
    squeue = f'#!/bin/sh\ntouch {tmp_path}/drained\ncase "$*" in *%t*) echo "7 R";; *) echo "7||";; esac\n'
    slurm_programs.install(tmp_path, monkeypatch, scontrol=scontrol, squeue=squeue)
    node = client.node("w1", "ctl:6817")
    assert node is not None and node.busy and not node.held_by_others
    registration.renew(node, "ctl:6817")
    changes = [line for line in told.read_text().splitlines() if "admincomment" not in line]
    assert changes == ["requeue incomplete 7"]
