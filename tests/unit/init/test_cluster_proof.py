"""Proof of registration: whether slurmctld knows the running slurmd, or only the previous pod's."""

from __future__ import annotations

import pytest

from init.slurm.node import Node
from init.slurm.registration import _old


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
