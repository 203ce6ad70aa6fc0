"""A script's verdict ends with the script: a drained node runs no prolog that could withdraw the verdict."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from health.broker.decide import BrokerNode
from health.checks.loop import report
from health.tell import sentence
from health.verdict import (
    Class,
    Result,
    Verdict,
    digest_published_scripts,
    drop_void,
    read_verdict,
    read_verdicts,
    script_digest,
    write_verdict,
)
from tests.support.broker import BOOT, COMMIT, Desk

SICK = "#!/bin/sh\necho the disk is gone >&2\nexit $MINIVM_UNFIT\n"


def publish(root: Path, commit: str, **scripts: str) -> Path:
    tree = root / "trees" / commit
    (tree / "prolog.d").mkdir(parents=True)
    for name, text in scripts.items():
        (tree / "prolog.d" / name).write_text(text)
    link = root / "next"
    link.symlink_to(f"trees/{commit}")
    link.rename(root / "current")
    return tree


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    """Return a desk whose node was drained by its prolog's verdict."""
    made = Desk(tmp_path)
    tree = publish(tmp_path, "a" * 40, look=SICK, other="#!/bin/sh\n")
    for number in (1, 2):
        at = made.clock + number
        write_verdict(
            made.places.verdicts,
            Verdict(
                "prolog.look", Result.PROBLEM, Class.NODE, "the disk is gone", commit=COMMIT, boot_id=BOOT, at=at,
                expires=at + 1800, digest=script_digest(tree / "prolog.d/look"),
            ),
        )  # fmt: skip
        made.broker.look()
    assert made.slurm.state.reason == "minivm: prolog.look[node]@9f2c1ab the disk is gone"
    return made


@pytest.mark.parametrize(
    ("what", "scripts", "drained"),
    [
        ("removed", {"other": "#!/bin/sh\n"}, False),
        ("reverted to another text", {"look": "#!/bin/sh\n", "other": "#!/bin/sh\n"}, False),
        ("a commit that changes another script", {"look": SICK, "other": "#!/bin/sh\n: 2\n"}, True),
    ],
)
def test_a_drain_ends_with_the_script_that_caused_it(
    desk: Desk, tmp_path: Path, what: str, scripts: dict[str, str], drained: bool
) -> None:
    publish(tmp_path, "b" * 40, **scripts)
    desk.broker.look()
    assert desk.slurm.state.drained == drained, what


@pytest.mark.parametrize(("scripts", "problems"), [({"other": "#!/bin/sh\n"}, 0), ({"look": SICK}, 1)])
def test_the_pod_tells_no_problem_of_a_script_that_is_gone(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scripts: dict[str, str], problems: int
) -> None:
    """The file stays until it expires, long after the drain has ended."""
    publish(tmp_path, "b" * 40, **scripts)
    places = {"MINIVM_VERDICTS": desk.places.verdicts, "MINIVM_GITSYNC_ROOT": tmp_path,
              "MINIVM_HEALTH_METRICS": tmp_path / "prom", "MINIVM_SOCKET": tmp_path / "none"}  # fmt: skip
    for name, path in places.items():
        monkeypatch.setenv(name, str(path))
    report("", desk.clock)
    assert f"minivm_health_problems {problems}\n" in (tmp_path / "prom").read_text()
    left = drop_void(read_verdicts(desk.places.verdicts), tmp_path)
    assert bool(sentence(left, desk.clock)) == bool(problems)
    shown = subprocess.run(
        [sys.executable, "-I", "-m", "health.cli", "health", "--nhc"], capture_output=True, text=True, check=False
    ).stdout
    assert ("the disk is gone" in shown) == bool(problems), shown


def test_the_summary_of_broken_scripts_counts_for_its_own_commit(tmp_path: Path) -> None:
    """On an idle node no prolog withdraws it: the pod would name a script that is long gone for a day."""

    def shown(commit: str) -> bool:
        verdict = Verdict(
            "scripts_prolog", Result.PROBLEM, Class.USER, "prolog.d/x: exit 2", commit=commit, boot_id=BOOT, at=1.0,
            expires=1e12,
        )  # fmt: skip
        return bool(drop_void({verdict.check: verdict}, tmp_path))

    publish(tmp_path, "a" * 40, x="#!/bin/sh\nexit 2\n")
    assert shown("a" * 40)
    publish(tmp_path, "b" * 40, x="#!/bin/sh\n")
    assert not shown("a" * 40) and shown("b" * 40)
    (tmp_path / "current").unlink()
    assert not shown("a" * 40) and shown("zero"), "the image's own tree is published"
    (tmp_path / "current").mkdir()
    assert shown("a" * 40), "unknown"


def test_a_person_s_drain_stays_when_the_script_is_gone(desk: Desk, tmp_path: Path) -> None:
    desk.slurm.state = BrokerNode(True, "Ann: fan")
    publish(tmp_path, "b" * 40, other="#!/bin/sh\n")
    desk.broker.look()
    assert desk.slurm.state == BrokerNode(True, "Ann: fan")


def unreadable(root: Path) -> None:
    (root / "current").unlink()
    (root / "current").symlink_to("trees/nowhere")


def absent(root: Path) -> None:
    (root / "current").unlink()


@pytest.mark.parametrize("broken", [unreadable, absent])
def test_a_tree_that_cannot_be_read_ends_no_drain(desk: Desk, tmp_path: Path, broken: Callable[[Path], None]) -> None:
    broken(tmp_path)
    desk.broker.look()
    assert desk.slurm.state.drained


def test_the_scripts_of_a_tree_are_named_as_their_verdicts_are(tmp_path: Path) -> None:
    tree = publish(tmp_path, "a" * 40, look=SICK, README="x", **{"_lib": "x", "notes.md": "x"})
    (tree / "epilog.d").mkdir()
    (tree / "epilog.d" / "look").write_text("other")
    found = digest_published_scripts(tmp_path)
    assert found is not None
    assert found.keys() == {"prolog.look", "prolog.README", "epilog.look"}
    assert found["prolog.look"] != found["epilog.look"]


def test_without_a_link_the_image_s_tree_is_published(tmp_path: Path) -> None:
    tree = publish(tmp_path, "a" * 40, look=SICK)
    (tmp_path / "current").unlink()
    assert digest_published_scripts(tmp_path, tree) == {"prolog.look": script_digest(tree / "prolog.d/look")}


def test_a_digest_is_kept_in_the_file_and_an_older_verdict_has_none(tmp_path: Path) -> None:
    verdict = Verdict("prolog.x", Result.PROBLEM, Class.NODE, "no", digest="0123456789abcdef")
    assert read_verdict(write_verdict(tmp_path, verdict)) == verdict
    assert "digest" not in Verdict("gpu_ecc", Result.OK, Class.RMA, "").to_json()


def test_the_pod_names_the_way_out() -> None:
    verdict = Verdict("prolog.look", Result.PROBLEM, Class.NODE, "the disk is gone", expires=10)
    assert sentence({"prolog.look": verdict}, 1) == (
        "prolog.look (node): the disk is gone (until the script is changed or removed, or: "
        "minivm health forget prolog.look)"
    )
