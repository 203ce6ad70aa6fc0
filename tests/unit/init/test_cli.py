"""Decisions of the command line: how it shows a snapshot and a trace, and its exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path

import pytest
from click.testing import CliRunner

from init.cli import main
from init.lean import replace
from init.plan.compile import plan_to_json
from init.view import status as render_status
from init.view import waterfall as render_trace
from init.view.status import ServiceView, Snapshot
from tests.support.cli_view import view
from tests.support.plans import ROOT, plan_of


def snapshot(*services: ServiceView, **fields: object) -> Snapshot:
    base = Snapshot(
        role="worker", pod="w1", phase="running", ready=True, started=True, uptime=3700.0, boot_seconds=1.25, drain="",
        reasons=(), degraded=(), conditions=(), services=services,
    )  # fmt: skip
    return replace(base, **fields)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0421, "42ms"), (4.25, "4.2s"), (192, "3m12s"), (7500, "2h05m"), (360000, "4d04h")],
)
def test_durations_have_two_units_at_most(seconds: float, text: str) -> None:
    assert render_status.duration(seconds) == text


def test_the_table_says_why_and_fits_the_terminal() -> None:
    reason = "waits for controller: tcp slurm-controller:6817 refused for 12 s (resolves to 10.1.2.3)"
    found = snapshot(
        view("munged", failures=2, last_exit="killed by KILL"),
        view("slurmd", "waiting", pid=0, reasons=(reason,)),
        ready=False,
        reasons=(f"slurmd {reason}",),
        degraded=("slurm.conf refused",),
    )
    lines = render_status.table(found, colour=False, width=90).splitlines()
    assert lines[0] == "w1 (worker), not ready, running, up 1h01m, ready after 1.2s"
    assert lines[1] == f"  not ready: slurmd {reason}" and lines[2] == "  degraded: slurm.conf refused"
    assert any("2 failures, last: killed by KILL" in line for line in lines)
    assert all(len(line) <= 90 for line in lines[3:])
    assert "\x1b" not in "".join(lines)
    assert "\x1b[32mready" in render_status.table(found, colour=True)


def test_why_adds_how_it_ended_and_when_it_is_tried_again() -> None:
    bad = view("slurmdbd", "backoff", pid=0, last_exit="exited 1", last_line="no database", next_start_in=2.0)
    text = render_status.reasons("slurmdbd", False, ["exited 1; failed 3 times"], snapshot(bad))
    assert "last end: exited 1: no database" in text and "next start in 2.0s" in text


def test_a_check_that_the_pod_can_do_without_is_not_called_ready_when_it_found_something() -> None:
    full = snapshot(view("room"), view("motd"), degraded=("room: /var/spool/slurmctld is full",))
    said = render_status.reasons("room", True, [], full)
    assert said == "room is degraded:\n  room: /var/spool/slurmctld is full"
    assert render_status.reasons("motd", True, [], full) == "motd is ready"
    assert "w1 is ready\n  degraded: room" in render_status.reasons(None, True, [], full)


EVENTS = [
    {"t": 0.0, "service": "munged", "event": "preparing", "detail": ""},
    {"t": 0.1, "service": "munged", "event": "starting", "detail": ""},
    {"t": 0.1, "service": "munged", "event": "spawned", "detail": "pid 9"},
    {"t": 0.4, "service": "munged", "event": "ready", "detail": ""},
    {"t": 0.4, "service": "slurmd", "event": "starting", "detail": ""},
    {"t": 1.0, "service": "slurmd", "event": "ready", "detail": ""},
    {"t": 1.0, "service": "", "event": "ready", "detail": "1.000 s after the start"},
    {"t": 9.0, "service": "slurmd", "event": "backoff", "detail": "killed by KILL <&>"},
]


def test_states_become_stretches_of_time_up_to_the_end_of_the_boot() -> None:
    end = render_trace.boot_end(EVENTS, 20.0)
    assert end == 1.0
    spans = render_trace.spans(EVENTS, end)
    assert [(s.state, s.start, s.end) for s in spans if s.service == "slurmd"] == [
        ("waiting", 0.0, 0.4),
        ("starting", 0.4, 1.0),
        ("ready", 1.0, 1.0),
    ]


def test_the_waterfall_names_what_was_waited_for() -> None:
    spans = render_trace.spans(EVENTS, 1.0)
    picture = render_trace.waterfall(spans, 1.0, {"slurmd": ["munged"]}, colour=False, width=80).splitlines()
    munged = next(line for line in picture if line.startswith("munged"))
    slurmd = next(line for line in picture if line.startswith("slurmd"))
    assert "400ms" in munged and "▒" in munged and "█" in munged
    assert slurmd.endswith("1.0s (600ms) after munged") and slurmd.index("█") > munged.index("█")


def test_chromes_trace_has_every_state_and_moment() -> None:
    data = json.loads(render_trace.to_chrome(EVENTS, 20.0))["traceEvents"]
    starting = next(item for item in data if item["name"] == "starting" and item["ts"] == 400000)
    assert (starting["ph"], starting["dur"]) == ("X", 600000)
    assert {item["args"]["name"] for item in data if item["ph"] == "M"} == {"pod", "munged", "slurmd"}
    assert any(item["ph"] == "i" and item["name"] == "spawned" for item in data)


def test_the_svg_is_well_formed_and_escaped() -> None:
    text = render_trace.to_svg(render_trace.spans(EVENTS, 20.0), 20.0)
    tree = xml.etree.ElementTree.fromstring(text)
    titles = [node.text or "" for node in tree.iter() if node.tag.endswith("title")]
    assert any("killed by KILL <&>" in title for title in titles)


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    path.write_text(plan_to_json(plan_of("worker")))
    return path


def test_plan_shows_both_orders(plan_file: Path) -> None:
    result = CliRunner().invoke(main, ["plan", "worker", "--file", str(plan_file)])
    assert result.exit_code == 0, result.output
    start, _, stop = result.output.partition("\nstop:")
    assert start.index("munged") < start.index("slurmd ")
    assert stop.index("slurmd") < stop.index("munged")
    assert "drain:" in stop


def test_plan_of_another_role_is_refused(plan_file: Path) -> None:
    result = CliRunner().invoke(main, ["plan", "login", "--file", str(plan_file)])
    assert result.exit_code == 78 and "is the plan of worker, not of login" in result.output


def test_check_tells_all_mistakes_with_file_key_and_suggestion(plan_file: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "one.yaml", tmp_path / "two.yaml"
    one.write_text("comand: [/bin/x]\n")
    two.write_text("command: [/bin/x]\nneeds: [mungd]\n")
    result = CliRunner().invoke(main, ["check", "--plan", str(plan_file), str(one)])
    assert result.exit_code == 78
    assert str(one) in result.output and "comand" in result.output and "did you mean command?" in result.output
    result = CliRunner().invoke(main, ["check", "--plan", str(plan_file), str(two)])
    assert result.exit_code == 78 and "did you mean munged?" in result.output
    two.write_text("command: [/bin/x]\nneeds: [munged]\n")
    result = CliRunner().invoke(main, ["check", "--plan", str(plan_file), str(two)])
    assert result.exit_code == 0 and "1 service is good" in result.output


def test_check_without_files_needs_a_plan(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["check", "--plan", str(tmp_path / "none.json")])
    assert result.exit_code == 78 and "no such file" in result.output and "none.json" in result.output


def test_in_a_checkout_the_plan_of_a_role_is_what_the_build_would_bake(tmp_path: Path) -> None:
    none = str(tmp_path / "none.json")
    result = CliRunner().invoke(main, ["plan", "worker", "--file", none, "--json"])
    assert result.exit_code == 0
    assert result.output.replace(f"{ROOT}/", "") == plan_to_json(plan_of("worker"))
    result = CliRunner().invoke(main, ["plan", "wroker", "--file", none])
    assert result.exit_code == 78 and "outside a pod" in result.output


def test_without_an_init_the_command_says_so(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["--socket", str(tmp_path / "none.sock"), "ready"])
    assert result.exit_code == 1
    assert "No such file" in result.output and "PID 1 is minivm's init" in result.output


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_a_script_of_the_shell(shell: str) -> None:
    result = CliRunner().invoke(main, ["completion", shell])
    assert result.exit_code == 0 and "_MINIVM_COMPLETE" in result.output


def test_help_loads_nothing_that_it_does_not_need() -> None:
    code = "import sys; from init.cli import main; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"yaml", "supervisor", "init.plan.compile", "init.view.status", "init.view.waterfall"} & set(loaded)


def test_what_runs_in_turns_is_not_told_as_started_again_and_again() -> None:
    text = render_status.table(snapshot(view("motd", kind="periodic", starts=41), view("sshd", starts=2)), colour=False)
    assert "ran 41 times" in text and "started 2 times" in text and "started 41" not in text


@pytest.mark.parametrize("command", [["-m", "gitsync.cli"], ["build.py"]])
def test_a_wrong_command_gets_the_nearest_one(command: list[str]) -> None:
    done = subprocess.run([sys.executable, *command, "stauts"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "no command 'stauts' (did you mean " in done.stderr
    assert done.stderr.startswith("Usage: build.py " if command == ["build.py"] else "Usage: gitsync ")
