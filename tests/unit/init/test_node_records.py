"""Node records in the controller: which it deletes, and for which drained nodes it preserves the drain's author."""

from __future__ import annotations

from pathlib import Path

import pytest

from init.errors import ConfigError
from init.slurm import client
from init.slurm import records as node_records
from init.slurm.node import BACK, FRESH, STOPPING, Node
from init.slurm.records import (
    Pools,
    candidates,
    explain_down,
    forgotten,
    name_state,
    parse_states,
    pools_from_json,
    read_pools,
    render_metrics,
)

POOLS = Pools("slurm", (("slurm-gpu", 2), ("slurm-worker", 4)))
VERDICT = "minivm: gpu_ecc[rma]@zero 3 errors"


def node(name: str, state: str, reason: str = "", *, busy: int = 0) -> Node:
    return Node(name, f"{state}+DYNAMIC_NORM", "10.0.0.1", reason, "2026-01-01T00:00:00", busy, "ann@2026-01-01")


@pytest.mark.parametrize(
    ("name", "beyond"),
    [
        ("slurm-gpu-1", False),
        ("slurm-gpu-2", True),
        ("slurm-worker-3", False),
        ("slurm-old-0", True),  # a pool that no longer exists
        ("slurm-gpu", False),
        ("slurm-2", False),
        ("other-gpu-7", False),
        ("slurm-gpu-x", False),
    ],
)
def test_a_worker_beyond_the_charts_count_is_no_longer_made(name: str, beyond: bool) -> None:
    assert POOLS.beyond(name) is beyond


@pytest.mark.parametrize(
    ("found", "pools", "gone"),
    [
        (node("slurm-gpu-2", "DOWN+DRAIN", STOPPING), POOLS, True),
        (node("slurm-gpu-2", "DOWN", FRESH), POOLS, True),
        (node("slurm-gpu-2", "DOWN+NOT_RESPONDING", "Not responding"), POOLS, True),
        (node("slurm-gpu-2", "DOWN+NOT_RESPONDING", f"{BACK} : Not responding"), POOLS, True),
        (node("slurm-gpu-1", "DOWN+DRAIN", STOPPING), POOLS, False),  # its pod comes back
        (node("slurm-gpu-2", "DOWN+DRAIN", STOPPING), None, False),  # the chart's list of workers is unknown
        (node("slurm-gpu-2", "IDLE+DRAIN", STOPPING), POOLS, False),  # the pod is still leaving
        (node("slurm-gpu-2", "IDLE"), POOLS, False),
        (node("slurm-gpu-2", "DOWN+DRAIN", "fan is loud"), POOLS, False),
        (node("slurm-gpu-2", "DOWN+DRAIN", "fan is loud : Not responding"), POOLS, False),
        (node("slurm-gpu-2", "DOWN", "power is off"), POOLS, False),
        (node("slurm-gpu-2", "DOWN+DRAIN", VERDICT), POOLS, False),
        (node("slurm-gpu-2", "DOWN+COMPLETING+DRAIN", STOPPING), POOLS, False),
        (Node("slurm-gpu-2", "DOWN+DRAIN", "10.0.0.1", STOPPING, "", 0), POOLS, False),  # static: in slurm.conf
    ],
)
def test_only_a_node_that_nobody_speaks_of_is_forgotten(found: Node, pools: Pools | None, gone: bool) -> None:
    assert forgotten(found, pools) is gone


@pytest.mark.parametrize(
    ("state", "reason", "busy", "kept"),
    [
        ("IDLE+DRAIN+NOT_RESPONDING", "fan is loud", 0, "fan is loud [ann@2026-01-01]"),
        ("MIXED+DRAIN+NOT_RESPONDING", "fan is loud", 1, ""),  # the outage may be short, and down ends the job
        ("IDLE+DRAIN", "fan is loud", 0, ""),
        ("DOWN+DRAIN+NOT_RESPONDING", "fan is loud", 0, ""),
        ("IDLE+DRAIN+NOT_RESPONDING", STOPPING, 0, ""),  # its pod may be back by now, with jobs
        ("IDLE+DRAIN", STOPPING, 0, ""),
        ("IDLE+DRAIN+NOT_RESPONDING", VERDICT, 0, ""),
        ("IDLE+NOT_RESPONDING", "", 0, ""),
    ],
)
def test_a_drained_node_that_is_away_is_down_and_keeps_its_author(
    state: str, reason: str, busy: int, kept: str
) -> None:
    assert explain_down(node("slurm-gpu-0", state, reason, busy=busy), POOLS) == kept


def test_a_node_whose_pod_is_no_longer_made_is_down_for_good() -> None:
    """The node of a removed pod is set down once more.

    It registered again after its pod had set it down, and only a down node is deleted.
    """
    found = node("slurm-gpu-2", "IDLE+DRAIN+NOT_RESPONDING", STOPPING)
    assert explain_down(found, POOLS) == STOPPING
    assert explain_down(found, None) == ""


def test_only_what_may_concern_us_is_looked_at() -> None:
    listed = "slurm-gpu-0|drain*\nslurm-gpu-0|drain*\nslurm-gpu-1|idle\nslurm-gpu-2|down\nx|drng*\ny|drain\nz|down*\n"
    rows = parse_states(listed)
    assert candidates(rows, POOLS) == ["slurm-gpu-0", "slurm-gpu-2", "x"]
    assert candidates(rows, None) == ["slurm-gpu-0", "x"]


def test_a_node_of_several_partitions_counts_once() -> None:
    text = render_metrics(parse_states("a|idle\na|idle\nb|drain*\nc|drng\n\nd|mix-\n"))
    samples = [line.removeprefix("minivm_nodes_by_state") for line in text.splitlines() if line[0] != "#"]
    assert samples == [
        '{state="busy"} 1', '{state="down"} 0', '{state="drained"} 2', '{state="idle"} 1', '{state="other"} 0'
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("state", "name"),
    [
        ("idle", "idle"), ("idle*", "down"), ("idle~", "other"), ("plnd", "other"), ("resv", "other"),
        ("maint", "other"), ("mix", "busy"), ("alloc", "busy"), ("alloc*", "down"), ("comp", "busy"),
        ("drain", "drained"), ("drain*", "drained"), ("drng", "drained"), ("down", "down"), ("down*", "down"),
        ("fail", "down"), ("unk", "down"), ("", "other"), ("?", "other"),
    ],
)  # fmt: skip
def test_a_state_of_slurm_has_one_word_in_the_metrics(state: str, name: str) -> None:
    assert name_state(state) == name


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"release": "s"}', '{"release": "", "pools": {}}', '{"release": "s", "pools": {"s-a": "2"}}',
     '{"release": "s", "pools": {"s-a": true}}', '{"release": "s", "pools": {}, "replicas": 2}', "[" * 100000],
)  # fmt: skip
def test_pools_that_are_not_understood_delete_nothing(text: str) -> None:
    with pytest.raises(ConfigError):
        pools_from_json(text)


def test_without_the_file_nothing_is_known(tmp_path: Path) -> None:
    assert read_pools(str(tmp_path / "pools.json")) is None
    (tmp_path / "pools.json").write_text('{"release": "slurm", "pools": {"slurm-worker": 4, "slurm-gpu": 2}}')
    assert read_pools(str(tmp_path / "pools.json")) == POOLS


def test_a_record_that_cannot_be_deleted_keeps_nobody_from_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A record that cannot be deleted, here because of a reservation, does not block the others."""
    (tmp_path / "sinfo").write_text("#!/bin/sh\necho 'slurm-gpu-2|down'; echo 'slurm-gpu-3|down'\n")
    line = f"State=DOWN+DYNAMIC_NORM Reason={STOPPING} [root@2026-01-01T00:00:00]"
    (tmp_path / "scontrol").write_text(
        f"""#!/bin/sh
case "$*" in
*show*) echo 'NodeName=slurm-gpu-2 {line}'; echo 'NodeName=slurm-gpu-3 {line}' ;;
*slurm-gpu-2) echo 'Nodes busy, in a reservation or in a job' >&2; exit 1 ;;
esac
"""
    )
    for name in ("sinfo", "scontrol"):
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(client, "SINFO", str(tmp_path / "sinfo"))
    monkeypatch.setattr(client, "SCONTROL", str(tmp_path / "scontrol"))
    monkeypatch.setattr(node_records, "read_pools", lambda: POOLS)
    monkeypatch.setattr(node_records, "METRICS", str(tmp_path / "nodes.prom"))
    assert node_records.main() == 0
    assert 'minivm_nodes_by_state{state="down"} 2\n' in (tmp_path / "nodes.prom").read_text()
    told = capsys.readouterr().out
    assert "slurm-gpu-2: cannot ask slurmctld: Nodes busy" in told and "slurm-gpu-3 is deleted" in told


def test_a_node_that_came_back_while_earlier_ones_were_updated_stays_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A person resumes the whole rack: `down` would end the jobs that have started on it."""
    away = "State=IDLE+DRAIN+DYNAMIC_NORM+NOT_RESPONDING Reason=power [ann@2026-01-01T00:00:00]"
    (tmp_path / "sinfo").write_text("#!/bin/sh\necho 'a|drain*'; echo 'b|drain*'; echo 'c|drain*'\n")
    (tmp_path / "scontrol").write_text(
        f"""#!/bin/sh
cd {tmp_path}
for name in a b c; do
    case "$*" in
    *show*" $name" | *show*,*) [ -e resumed ] && echo "NodeName=$name State=IDLE" || echo "NodeName=$name {away}" ;;
    *update*nodename=$name*) echo $name >> down; touch resumed ;;
    esac
done
"""
    )
    for name in ("sinfo", "scontrol"):
        (tmp_path / name).chmod(0o755)
        monkeypatch.setattr(client, name.upper(), str(tmp_path / name))
    monkeypatch.setattr(node_records, "read_pools", lambda: POOLS)
    monkeypatch.setattr(node_records, "METRICS", str(tmp_path / "nodes.prom"))
    assert node_records.main() == 0
    assert (tmp_path / "down").read_text() == "a\n"
    assert capsys.readouterr().out == "a is away and now down: power [ann@2026-01-01T00:00:00]\n"
