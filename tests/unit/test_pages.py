"""Every fenced block of the pages has a kind, and the pages that need no cluster are followed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from fleet import cli as fleet_cli
from init import cli
from tests.pages import blocks
from tests.reader import ROOT, checkout, follow_all, programs
from tests.support.rendered_chart import render

DOCS = ROOT / "docs"
PAGES = [DOCS / "tutorial.md", *sorted((DOCS / "how-to").glob("*.md"))]
# Page: the number of blocks by kind. tests/cluster/test_pages_as_written.py runs them, unless another test is named.
BLOCKS = {
    "tutorial": {"runs": 8, "shown": 1},
    "accounting-pod": {"values": 2, "needs kubernetes": 4},  # tests/cluster/test_accounting_pod.py
    "accounts-as-code": {"file": 1, "runs": 1},  # tests/container/init/test_accounts.py
    "active-checks": {"values": 1},
    "add-a-health-check": {"runs": 4, "file": 5},  # tests/cluster/test_own_scripts.py
    "add-a-user": {"runs": 1, "shown": 1, "needs a name": 3},  # tests/cluster/test_people.py
    "add-layers": {"runs": 2, "shown": 1, "values": 1},  # tests/container/images/test_example_layers.py
    "add-to-the-pods": {"values": 1},
    "air-gapped-build": {"needs a name": 1},
    "build-for-arm64": {"needs hardware": 1, "needs a name": 1},
    "change-authentication": {"runs": 3, "file": 1, "needs kubernetes": 1},
    "change-slurm-conf": {"runs": 5, "file": 1, "shown": 2, "needs a name": 1},
    "choose-a-profile": {"values": 1},
    "come-from-slinky": {"runs": 2, "needs kubernetes": 3},  # tests/unit/cluster/test_migrate.py
    "contain-jobs-and-people": {"runs": 1, "values": 1, "shown": 1},
    "drain": {"runs": 2, "needs kubernetes": 1},
    "first-hour-for-researchers": {"runs": 6, "shown": 1},
    "get-told": {"values": 1, "runs": 1, "file": 1},  # tests/cluster/test_notifications.py
    "gitops": {"runs": 2, "file": 1, "needs kubernetes": 2},  # this file
    "install-on-kubernetes": {"runs": 3, "values": 5, "needs kubernetes": 2},
    "keep-logins": {"values": 1, "shown": 1, "needs kubernetes": 1},  # tests/kubernetes/test_logins.py
    "lend-machines-to-inference": {"values": 1, "shown": 1, "needs kubernetes": 2},
    "let-a-pool-grow-and-shrink": {"values": 2, "needs kubernetes": 3},
    "let-others-repair-machines": {"needs kubernetes": 3, "values": 1, "shown": 1},
    "login-pools": {"values": 1, "needs kubernetes": 1, "needs a name": 1},  # tests/container/init/test_login_pools.py
    "operate-a-pod": {"runs": 2},
    "people-by-scim": {"values": 1, "needs kubernetes": 2},  # tests/process/fleet/test_scim.py
    # tests/container/images/test_push.py pushes
    "push-images": {"needs a name": 3, "values": 1, "needs kubernetes": 1},
    "replace-a-gpu-node": {"runs": 2, "needs kubernetes": 1},
    "restore-accounting": {"runs": 3, "needs a name": 1},  # tests/cluster/test_accounting.py
    "restore-the-controller": {"runs": 2},  # tests/container/init/test_state.py
    "roll-a-pool-by-the-fleet": {"values": 2, "needs kubernetes": 2},
    "rotate-keys": {"runs": 2},
    "run-containers": {"needs a name": 4, "values": 3, "shown": 1},  # tests/cluster/test_containers.py
    "run-under-slinky": {"runs": 1},  # tests/container/init/test_under_slinky.py
    "switch-on-the-fleet": {"values": 3, "needs kubernetes": 5},
    "two-controllers": {"values": 1, "needs kubernetes": 3},  # tests/kubernetes/test_two_controllers.py
    "upgrade": {"runs": 4, "shown": 1, "needs a name": 1},
    "use-programs-made-for-slinky": {"values": 1},  # tests/kubernetes/test_fleet.py
    "watch-the-fleet": {"needs kubernetes": 1},
}


def test_every_page_is_counted() -> None:
    assert [page.stem for page in PAGES] == list(BLOCKS)


def test_every_command_that_a_page_names_exists() -> None:
    """A reader who types what stands in backticks, or in a block, reaches a command of that program."""
    context = click.Context(click.Group())
    commands = {"minivm": cli.main.list_commands(context), "fleet": fleet_cli.main.list_commands(context)}
    named = re.compile(r"(?:`|-- )(minivm|fleet) ([a-z][a-z-]*)")
    pages = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
    found = [(page.name, *match) for page in pages for match in named.findall(page.read_text())]
    assert len(found) > 100 and not [item for item in found if item[2] not in commands[item[1]]]


def test_an_install_by_a_page_makes_its_namespace() -> None:
    """Only a reader with a directory makes a Secret, and with it the namespace, before; `helm install` makes none."""
    typed = [line for page in PAGES for block in blocks(page) for line in block.text.splitlines()]
    installs = [line for line in typed if line.startswith("helm install")]
    assert installs and all("--create-namespace" in line for line in installs)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_of_the_page_runs_or_says_why_not(page: Path) -> None:
    kinds = [block.kind for block in blocks(page)]
    assert {kind: kinds.count(kind) for kind in kinds} == BLOCKS[page.stem]


def test_marks_are_read_and_wrong_ones_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- as alice -->\n```\nsinfo\n```\n\n```\nmake up\n```\n<!-- shown -->\n```\n1 s\n```\n"
        "<!-- may fail: make status -->\n```\nmake status\nmake down\n```\n"
        "<!-- needs hardware: a GPU -->\n```\nnvidia-smi\n```\n"
        "- in a list\n\n  <!-- file a/b.json -->\n  ```json\n  {\n    }\n  ```\n\n  ```yaml\n  login: {}\n  ```\n"
        "<!-- in slurm-login-0 -->\n```\nwho\n```\n```python\n```\n"
    )
    found = blocks(page)
    assert [(block.line, block.user or block.file or block.pod, block.kind) for block in found] == [
        (3, "alice", "runs"), (7, "", "runs"), (11, "", "shown"), (15, "", "runs"), (20, "", "needs hardware"),
        (26, "a/b.json", "file"), (31, "", "values"), (35, "slurm-login-0", "runs"), (38, "", "python"),
    ]  # fmt: skip
    assert found[3].script == "set -e\nmake status || :\nmake down\n"
    assert found[5].text == "{\n  }\n"
    for mark in ("as", "as ", "file", "needs luck: no", "may fail: make up", "needs kubernetes", "out"):
        page.write_text(f"<!-- {mark} -->\n```\nmake status\n```\n")
        with pytest.raises(ValueError, match="is no mark"):
            blocks(page)
    page.write_text("```\nopen\n")
    with pytest.raises(ValueError, match="not closed"):
        blocks(page)


def test_the_page_gitops_can_be_followed(tmp_path: Path) -> None:
    directory = checkout(tmp_path / "checkout")
    env = os.environ | {"PATH": f"{programs(tmp_path / 'bin')}:{os.environ['PATH']}"}
    page = blocks(DOCS / "how-to/gitops.md")
    follow_all(page, env, directory)
    # The user creates the Secrets that the values name, with the same keys that the Job would create.
    (values,) = [yaml.safe_load(block.text) for block in page if block.file]
    assert not jobs(values), "with all of them named there is no Job"
    made = {line.split()[0]: line.split()[1] for line in (directory / "made.txt").read_text().splitlines()}
    named = [entry["existingSecret"] for entry in (*values["secrets"].values(), values["accounting"]["database"])]
    assert sorted(made) == sorted(named)
    (job,) = jobs({})
    (container,) = job["spec"]["template"]["spec"]["containers"]
    words = container["args"][: container["args"].index("--known-hosts")]
    wanted = dict(word.split(":")[:2] for word in words)
    assert {name.removeprefix("hpc-"): key for name, key in made.items()} == {
        name.removeprefix("slurm-"): key for name, key in wanted.items()
    }
    assert not list(directory.glob("*.key")) and not list(directory.glob("*_host*")), "no key is left lying about"
    rendered = list(yaml.safe_load_all((directory / "slurm.yaml").read_text()))
    assert "StatefulSet" in {document["kind"] for document in rendered if document}


def jobs(values: dict[str, Any]) -> list[dict[str, Any]]:
    return [found for found in render(values, release="slurm", namespace="slurm") if found["kind"] == "Job"]


def test_the_check_in_another_language_is_one(tmp_path: Path) -> None:
    """The example check in add-a-health-check.md is found, and its header is accepted."""
    directory = checkout(tmp_path / "checkout")
    subprocess.run(["cp", "-rL", "scripts", "mine"], cwd=directory, check=True)
    (block,) = [block for block in blocks(DOCS / "how-to/add-a-health-check.md") if block.language == "sh"]
    before = selftest(directory / "mine")
    (directory / "mine" / block.file).write_text(block.text)
    (directory / "mine" / block.file).chmod(0o755)
    assert int(selftest(directory / "mine").split()[0]) == int(before.split()[0]) + 1


def selftest(tree: Path) -> str:
    line = [sys.executable, "-m", "health.cli", "selftest", str(tree)]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def not_run() -> set[str]:
    """Return the command lines with options in blocks that need a name, and in the text of every page."""
    found = {line for page in PAGES for block in blocks(page) if block.needs for line in block.text.splitlines()}
    for page in (ROOT / "README.md", *DOCS.rglob("*.md")):
        found |= set(re.findall(r"`((?:make|build\.py|python build\.py) [^`\n]*[-=][^`\n]*)`", page.read_text()))
    return {line for line in found if line.startswith("make ") or "build.py " in line}


@pytest.mark.parametrize("line", sorted(not_run()))
def test_a_command_that_is_not_run_is_understood(line: str) -> None:
    """Words and options of a command exist: --help succeeds only after the command line was parsed."""
    env = os.environ | {"PATH": f"{ROOT / '.venv/bin'}:{os.environ['PATH']}"}

    def shell(line: str) -> str:
        done = subprocess.run(["sh", "-c", line], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        return done.stdout

    typed = shell(line.replace("make ", "make -n ", 1)).splitlines()[-1] if line.startswith("make ") else line
    if "build.py " in typed:
        assert "Usage: build.py" in shell(f"{re.sub('^build.py', './build.py', typed)} --help")


def test_every_message_of_a_push_that_the_page_explains_is_one() -> None:
    said = " ".join(path.read_text() for path in (ROOT / "images").rglob("*.py"))
    for words in ("it wants a login, and there is none", "it refuses the password of user", "may not do that there",
                  "no space left on the registry's disk"):  # fmt: skip
        assert words in (DOCS / "how-to/push-images.md").read_text() and words in said
