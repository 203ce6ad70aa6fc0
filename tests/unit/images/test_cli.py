"""Command line of the build: fast for small commands, plain errors, and JSON for programs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result

import build
from images import host

ROOT = Path(__file__).resolve().parents[3]
HEAVY = ("yaml", "jinja2", "docker", "requests", "rich", "images.cli.session", "cluster.cli")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(build.main, list(arguments))


def test_help_imports_nothing_that_costs_time() -> None:
    code = "import sys, build\nbuild.main(['--help'], standalone_mode=False)\nprint(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "Build what is missing" in done.stdout
    assert "Log in to the login pod" in done.stdout
    assert not set(HEAVY) & set(done.stderr.split())


@pytest.mark.parametrize("command", [("up",), ("scripts", ".")])
@pytest.mark.parametrize("seconds", ["nan", "inf", "0"])
def test_a_time_that_never_ends_is_refused(command: tuple[str, ...], seconds: str) -> None:
    result = run(*command, "--name", "no cluster has this name", "--timeout", seconds)
    assert result.exit_code == 2 and "--timeout" in result.output


@pytest.mark.parametrize("command", sorted({*build.main.commands, *build.Commands.LATE}))
def test_every_command_has_help(command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0, result.output
    assert "Usage:" in result.output


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--set", "variannt=x", "list"], "did you mean 'variant'?"),
        (["--variant", "debain", "list"], "did you mean 'debian'?"),
        (["render", "wroker"], "did you mean 'worker'?"),
        (["render", "layer:ncll"], "did you mean 'layer:nccl'?"),
        (["render", "nccl"], "`layer:nccl` is a layer"),
        (["--set", "jobs=x", "list"], "jobs cannot be 'x'"),
        (["--set", "ca_certificates=/nowhere.pem", "list"], "(/nowhere.pem, ca_certificates)"),
        (["graph", "--svg", "/nowhere/picture.svg"], "No such file or directory (/nowhere/picture.svg)"),
    ],
)
def test_a_mistake_is_one_message_and_no_traceback(arguments: list[str], told: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 1
    assert result.output.startswith("error: cannot ")
    assert told in result.output
    assert "Traceback" not in result.output


def test_an_engine_that_is_away_is_told_by_the_commands_that_need_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/nobody")
    result = run("build", "layer:root")
    assert result.exit_code == 1
    assert "cannot reach the docker engine" in result.output
    assert "make images" in result.output


def test_an_engine_that_cannot_be_made_ready_is_told_and_the_output_is_the_table_s(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/nobody")
    result = run("build", "--ready-engine", "--json", "layer:root")
    assert result.exit_code == 1
    assert result.output.startswith(
        "error: cannot make this machine ready: cannot reach the docker engine: DOCKER_HOST"
    )

    def fail() -> None:
        host.log("installing docker.io")
        raise host.HostError("cannot install docker.io: not root")

    monkeypatch.setattr(host, "ensure_engine", fail)
    result = run("build", "--ready-engine", "--json", "layer:root")
    assert result.stdout == ""
    assert result.stderr.splitlines()[0] == "host: installing docker.io"
    assert result.stderr.splitlines()[1].startswith("error: cannot make this machine ready: cannot install docker.io")


def test_make_images_starts_one_python() -> None:
    words = ["make", "--dry-run", "--assume-old=.venv/ready", "images", "SLURM=", "ARCH=", "ROLES="]
    done = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True)
    (line,) = (line for line in done.stdout.splitlines() if "python" in line)
    assert line.split() == [".venv/bin/python", "build.py", "build", "--ready-engine", "--when-vanished", "relock"]


def test_a_bug_is_not_dressed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("images.cli.session.Session.open", broken)
    assert isinstance(run("list").exception, ZeroDivisionError)


def test_the_list_for_machines() -> None:
    found = json.loads(run("list", "--json").output)
    assert {"kind": "role", "name": "worker"}.items() <= next(x for x in found if x["name"] == "worker").items()


def test_the_graph_shows_every_role_under_its_layer() -> None:
    text = run("graph").output
    assert text.startswith("root")
    assert text.index("slurm-common") < text.index("controller") < text.index("[controller]")
    assert {"[controller]", "[login]", "[worker]"} <= set(text.split())


def test_the_graph_as_a_picture_is_well_formed_and_complete(tmp_path: Path) -> None:
    assert run("graph", "--svg", str(tmp_path / "graph.svg")).exit_code == 0
    root = ElementTree.parse(tmp_path / "graph.svg").getroot()
    names = {text.text for text in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"root", "slurm-common", "controller", "login", "worker"} <= names
