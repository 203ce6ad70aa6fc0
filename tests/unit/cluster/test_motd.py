"""Message of the day: the cluster's free resources, computed outside the login pods."""

from __future__ import annotations

import importlib.machinery
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "images/rootfs/login/usr/libexec/minivm/motd"


@pytest.fixture(scope="module")
def motd() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("motd", str(SCRIPT))
    spec = importlib.util.spec_from_loader("motd", loader)
    assert spec
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def sinfo(motd: ModuleType, *cells: tuple[str, ...]) -> str:
    """Format rows as `sinfo -O Name:width,...` does."""
    lines = (
        "".join(cell.ljust(width) for cell, (_, width) in zip(row, motd.WIDTHS, strict=True)).rstrip() for row in cells
    )
    return "\n".join(lines) + "\n"


def test_free_is_what_nodes_that_take_work_have_left(motd: ModuleType) -> None:
    lines = motd.table(
        sinfo(
            motd,
            ("gpu*", "3", "mix", "32/160/0/192", "gpu:h100:8(S:0-1),nvme:4", "gpu:h100:2(IDX:0-1)", "none"),
            ("gpu*", "1", "drain", "0/0/64/64", "gpu:h100:8(S:0-1)", "gpu:h100:0(IDX:N/A)", "fan 3"),
            ("cpu", "2", "idle", "0/64/0/64", "(null)", "gpu:0", "none"),
        )
    )
    assert [line.split() for line in lines[1:]] == [
        ["gpu*", "3/4", "160/256", "18/32"],
        ["cpu", "2/2", "64/64", "-"],
    ]


def test_a_node_that_does_not_answer_offers_nothing(motd: ModuleType) -> None:
    (_, line) = motd.table(sinfo(motd, ("all*", "2", "idle*", "0/8/0/8", "(null)", "gpu:0", "none")))
    assert line.split() == ["all*", "0/2", "0/8", "-"]


def test_what_comes_when_jobs_ask_is_said_in_a_line(motd: ModuleType) -> None:
    # Reason that the fleet sets on a node whose pod it has scaled down.
    sleeps = "minivm: fleet: surplus: idle for 600 s, slurm-gpu grows again when jobs ask"
    nodes = ("gpu*", "5", "drain*", "0/0/320/320", "gpu:h100:8", "gpu:h100:0(IDX:N/A)", sleeps)
    lines = motd.table(sinfo(motd, nodes, ("gpu*", "1", "idle", "0/64/0/64", "gpu:h100:8", "gpu:h100:0", "none")))
    assert lines[1].split()[:2] == ["gpu*", "1/6"]
    assert lines[-1] == "More nodes come when jobs ask for them: 5 of gpu"


@pytest.mark.parametrize(
    ("text", "number"), [("gpu:8", 8), ("gpu:h100:8(S:0-1)", 8), ("gpu:a:1,gpu:b:2", 3), ("(null)", 0), ("nvme:4", 0)]
)
def test_gpus_of_a_gres(motd: ModuleType, text: str, number: int) -> None:
    assert motd.gpus(text) == number


def test_a_controller_that_is_away_is_said(motd: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Report an unavailable controller. This machine has no sinfo, which fails in the same way."""
    for name, path in (("SHOWN", "motd.d/50"), ("AWAY", "away"), ("NEWS", "news")):
        monkeypatch.setattr(motd, name, tmp_path / path)
    (tmp_path / "news").write_text("Maintenance on Tuesday")
    assert motd.main() == 0
    shown = (tmp_path / "motd.d/50").read_text()
    assert "Maintenance on Tuesday" in shown
    assert "controller is away" in shown
    assert (tmp_path / "away").exists()
    assert not list((tmp_path / "motd.d").glob(".*"))
