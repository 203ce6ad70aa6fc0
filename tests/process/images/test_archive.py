"""Two builds of one tree at once: each asks an archive of its own repositories, and not what the other made of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
# What a build asks with, for long enough to meet the other's; no repository is needed for it.
BUILD = """
import sys
from pathlib import Path
from images.archive.lock import Place, open_archive
from images.archive.origins import BaseFiles
from images.definition.load import load
from images.definition.spec import Choice, SlurmSource
from images.settings import Settings

root, tree, name = sys.argv[1:]
choice = Choice("debian", SlurmSource.PACKAGE, release="24.11")
place = Place(Path(tree), load(Path(root)), choice, Settings(http_proxy=f"http://{name}.test:1"))
for turn in range(20):
    with open_archive(place, BaseFiles("", ()), ()) as archive:
        assert f"//{name}.test" in (archive.directory / "apt.conf").read_text(), f"turn {turn}: it is another's"
"""


def test_two_builds_at_once_ask_each_its_own_archive(tmp_path: Path) -> None:
    line = [sys.executable, "-c", BUILD, str(ROOT), str(tmp_path)]
    builds = [
        subprocess.Popen([*line, name], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for name in ("one", "two")
    ]
    for build in builds:
        said, _ = build.communicate()
        assert build.returncode == 0, said
