"""State of an earlier Slurm: accepted, or refused with a plain error, and never changed."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from images.definition.load import choose_build, load
from images.make.content import serialise_slurm
from init.errors import ConfigError
from init.pod import release
from init.pod.pod import Pod
from init.prepare import saved_state
from init.slurm import accounting

ROOT = Path(__file__).resolve().parents[3]
DEFINITION = load(ROOT)
STATE = "var/spool/slurmctld"


def facts(version: str) -> str:
    wish = "source" if version.startswith("26.11") else version[:5]
    return serialise_slurm(DEFINITION, choose_build(DEFINITION, "debian", wish, version), version)


def header(number: int) -> bytes:
    """Return the start of slurmctld's files: a length-prefixed word and two bytes of version."""
    return b"\0\0\0\x11PROTOCOL_VERSION\0" + bytes([number, 0]) + b"\0\0\0\0gAAA"


def pod(root: Path, version: str, **files: bytes) -> Pod:
    for name in ("usr/share/minivm", "etc/slurm", STATE):
        (root / name).mkdir(parents=True, exist_ok=True)
    (root / release.FILE[1:]).write_text(facts(version))
    for name, data in files.items():
        (root / STATE / name).write_bytes(data)
    return Pod({}, root)


@pytest.mark.parametrize(
    ("version", "left", "said"),
    [
        ("24.11.5", 42, "the state is of Slurm 24.11"),
        ("26.05.5", 42, "the state is of Slurm 24.11"),
        ("26.05.5", 45, "the state is of Slurm 26.05"),
        ("24.11.5", 40, "the state is of Slurm older than 24.11"),
    ],
)
def test_what_slurm_reads_is_taken_over(tmp_path: Path, version: str, left: int, said: str) -> None:
    assert saved_state.check_release(pod(tmp_path, version, job_state=header(left))) == said


@pytest.mark.parametrize(
    ("version", "left", "why", "hint"),
    [
        ("24.11.5", 45, "is of Slurm 26.05, this image has 24.11, and there is no way back", "nothing was touched"),
        ("26.05.5", 46, "is of Slurm newer than 26.05, this image has 26.05", "put back what was saved"),
        ("26.05.5", 41, "is of Slurm older than 24.11, and 26.05 takes over none", "24.11, 25.05, 25.11 in between"),
    ],
)
def test_what_slurm_does_not_read_is_refused_and_stays_as_it_is(
    tmp_path: Path, version: str, left: int, why: str, hint: str
) -> None:
    here = pod(tmp_path, version, job_state=header(left), node_state=header(min(left, 42)))
    before = {path.name: path.read_bytes() for path in (tmp_path / STATE).iterdir()}
    with pytest.raises(ConfigError) as caught:
        saved_state.check_release(here)
    assert why in caught.value.why and hint in str(caught.value.hint)
    assert {path.name: path.read_bytes() for path in (tmp_path / STATE).iterdir()} == before


def test_each_of_its_files_counts(tmp_path: Path) -> None:
    """Every state file is examined, because an interrupted upgrade has written only some of them."""
    for name in (*release.HEADED, *release.BARE):
        data = header(45) if name in release.HEADED else b"\x2d\0rest"
        here = pod(tmp_path / name, "24.11.5", **{name: data})
        with pytest.raises(ConfigError, match="no way back"):
            saved_state.check_release(here)


@pytest.mark.parametrize("data", [b"", b"\0", b"\0\0\0\x11PROTOCOL_VERSION", b"\xff" * 64, header(0), b"\0" * 4096])
def test_a_file_that_says_nothing_is_slurmctlds_to_judge(tmp_path: Path, data: bytes) -> None:
    assert saved_state.check_release(pod(tmp_path, "24.11.5", job_state=data)) == "no state yet"


def test_what_is_no_file_is_not_followed_nor_waited_for(tmp_path: Path) -> None:
    """Links, pipes and directories are skipped without blocking: the Slurm user owns the volume and may create them."""
    here = pod(tmp_path, "24.11.5")
    (tmp_path / "elsewhere").write_bytes(header(45))
    (tmp_path / STATE / "job_state").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(tmp_path / STATE / "node_state")
    (tmp_path / STATE / "part_state").mkdir()
    assert saved_state.check_release(here) == "no state yet"


def test_the_state_is_where_slurm_conf_says(tmp_path: Path) -> None:
    here = pod(tmp_path, "24.11.5")
    (tmp_path / "etc/slurm/slurm.conf").write_text("# a\nstatesavelocation = /shared/state # b\n")
    (tmp_path / "shared/state").mkdir(parents=True)
    (tmp_path / "shared/state/job_state").write_bytes(header(45))
    with pytest.raises(ConfigError, match="no way back"):
        saved_state.check_release(here)


def test_of_a_slurm_that_nothing_is_known_of_nothing_is_said(tmp_path: Path) -> None:
    """Without facts about the release the check is left to slurmctld.

    This is the case for a tarball newer than the facts, and for an image older than the facts file.
    """
    here = pod(tmp_path, "26.11.0", job_state=header(46))
    assert json.loads(facts("26.11.0")) == {"release": "26.11"}
    assert "checks its" in saved_state.check_release(here)
    (tmp_path / release.FILE[1:]).unlink()
    assert "checks its" in saved_state.check_release(here)


CLIENT = """#!{python}
import os, sys
open("{told}", "w").write(" ".join(sys.argv[1:]) + "|" + os.environ.get("MYSQL_PWD", ""))
sys.stdout.write({answer!r})
sys.exit({code})
"""


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of a fake MariaDB client, which the test fills."""
    path = tmp_path / "mariadb"
    monkeypatch.setattr(accounting, "CLIENT", str(path))
    return path


def answering(path: Path, answer: str, code: int = 0) -> Path:
    told = path.with_name("told")
    path.write_text(CLIENT.format(python=sys.executable, told=told, answer=answer, code=code))
    path.chmod(0o755)
    return told


def test_the_database_of_a_newer_slurm_is_refused(tmp_path: Path, client: Path) -> None:
    """Refuse the database of a newer Slurm: slurmdbd would accept it, and drop the columns that it does not know."""
    answering(client, f"{45 << 8}\n")
    with pytest.raises(ConfigError) as caught:
        saved_state.check_database(pod(tmp_path, "24.11.5"))
    assert "the accounting database is of Slurm 26.05" in caught.value.why
    assert saved_state.check_database(pod(tmp_path / "new", "26.05.5")) == "it served Slurm 26.05"


@pytest.mark.parametrize(("answer", "code"), [("NULL\n", 0), ("", 0), ("", 1), ("11520", 1), ("x" * 99, 0), ("²", 0)])
def test_a_database_that_does_not_say_is_slurmdbds_to_judge(
    tmp_path: Path, client: Path, answer: str, code: int
) -> None:
    answering(client, answer, code)
    assert saved_state.check_database(pod(tmp_path, "24.11.5")) == "no controller is known to it"


def test_it_is_asked_as_slurmdbd_would_and_the_password_is_nobodys_to_see(tmp_path: Path, client: Path) -> None:
    told = answering(client, "")
    here = pod(tmp_path, "24.11.5")
    lines = "StorageHost=db.site\nStoragePort=3307\nStorageUser=ann\nStoragePass=o\\#ne\\\\\nStorageLoc=acct\n"
    (tmp_path / "etc/slurm/slurmdbd.conf").write_text(lines)
    saved_state.check_database(here)
    arguments, _, password = told.read_text().partition("|")
    assert password == "o#ne\\" and "ne" not in arguments.replace("--no-defaults", "").replace("--connect-timeout", "")
    assert "--host db.site --port 3307 --user ann" in arguments and arguments.endswith(" acct")
