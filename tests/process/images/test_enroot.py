"""The image's stand-ins for parts of enroot and Slurm, each as a process; no foreign source is needed."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
OURS = ROOT / "images/src/enroot"


def converted(layer: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([OURS / "enroot-aufs2ovlfs", layer], capture_output=True, text=True, check=False)


def is_mark(path: Path) -> bool:
    found = path.lstat()
    return stat.S_ISCHR(found.st_mode) and found.st_rdev == 0


def test_the_marks_of_a_layer_become_what_overlayfs_reads(tmp_path: Path) -> None:
    layer = tmp_path / "layer"
    for name in ("a/kept", "a/.wh.gone", "opaque/.wh..wh..opq", "opaque/new"):
        (layer / name).parent.mkdir(parents=True, exist_ok=True)
        (layer / name).touch()
    done = converted(layer)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in layer.rglob("*")} == {"a", "kept", "gone", "opaque", "new"}
    assert is_mark(layer / "a/gone") and os.getxattr(layer / "opaque", "user.overlay.opaque") == b"y"


@pytest.mark.parametrize("name", [".wh.", ".wh..", ".wh...", ".wh..wh.plnk", ".wh.same", ".wh.d/"])
def test_a_mark_that_nobody_understands_ends_it(tmp_path: Path, name: str) -> None:
    layer = tmp_path / "layer"
    layer.mkdir()
    (layer / "same").write_text("here")
    if name.endswith("/"):
        (layer / name).mkdir()
    else:
        (layer / name).touch()
    done = converted(layer)
    assert done.returncode == 1 and "Traceback" not in done.stderr and "enroot-aufs2ovlfs: " in done.stderr
    assert (layer / "same").read_text() == "here"


def test_a_link_leads_the_marks_nowhere(tmp_path: Path) -> None:
    """The author of an image also made the links in it."""
    layer, outside = tmp_path / "layer", tmp_path / "outside"
    for folder in (layer, outside):
        folder.mkdir()
    (outside / ".wh.file").touch()
    (outside / "file").write_text("mine")
    (layer / "out").symlink_to(outside)
    (layer / ".wh.out2").symlink_to(outside / "file")
    assert converted(layer).returncode == 0
    assert (outside / "file").read_text() == "mine" and (outside / ".wh.file").exists()
    assert is_mark(layer / "out2") and (layer / "out").is_symlink()


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("launcher")
    (made / "stepd").write_text('#!/bin/sh\necho stepd "$@"\n')
    (made / "stepd").chmod(0o755)
    line: list[str | Path] = [
        "gcc",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-static",
        f'-DSTEPD="{made}/stepd"',
        "-o",
        made / "slurmstepd",
    ]
    subprocess.run([*line, OURS / "slurmstepd.c"], check=True)
    return made / "slurmstepd"


def said(*line: str | Path, **more: object) -> str:
    return subprocess.run(line, capture_output=True, text=True, check=True, **more).stdout  # type: ignore[call-overload,no-any-return]


def test_slurmd_s_own_start_goes_on_to_slurmstepd(launcher: Path) -> None:
    assert said(launcher) == "stepd\n" and said(launcher, "-V") == "stepd -V\n"
    assert said(launcher, "slurm_script_launcher") == "stepd slurm_script_launcher\n", "without a script it is none"


def test_a_script_starts_with_a_group_of_its_own_and_no_descriptor_of_slurmstepd_s(launcher: Path) -> None:
    held = os.open(launcher, os.O_RDONLY)
    os.set_inheritable(held, True)
    line = "echo $0 $1; ls /proc/self/fd | wc -l; ps -o pgid= -p $$; echo $$"
    try:
        out = said(launcher, "slurm_script_launcher", "/bin/sh", "sh", "-c", line, "name", "word", close_fds=False)
    finally:
        os.close(held)
    words = out.split()
    # Three, and the one by which ls reads the directory.
    assert words[:3] == ["name", "word", "4"] and words[3] == words[4], out


@pytest.mark.root
def test_it_needs_nothing_of_the_file_system_that_it_is_in(launcher: Path, tmp_path: Path) -> None:
    """The script runs in a container without a loader or a library, where it is the only program."""
    root = tmp_path / "root"
    root.mkdir()
    (root / "script").write_bytes(launcher.read_bytes())
    (root / "script").chmod(0o755)
    held = os.open(launcher, os.O_PATH)
    if not (pid := os.fork()):
        os.chroot(root)
        os.chdir("/")
        # By its descriptor, as Slurm does. The second start finds no slurmstepd: it was started, and says so.
        os.execve(held, ["slurmstepd", "slurm_script_launcher", "/script", "/script"], {})
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 127
    os.close(held)
