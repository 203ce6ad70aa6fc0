"""Pins by content: one pin fits a repository, a directory and an archive, and admits no other content."""

from __future__ import annotations

import hashlib
import os
import subprocess
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from images import ImagesError
from images.archive.fetch import fetch, pack_source
from images.definition.load import load
from images.definition.spec import UNFILLED, Pin
from images.settings import BuildSettings, read

ROOT = Path(__file__).resolve().parents[3]
OURS = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a"}


def git(where: Path, *words: str) -> str:
    line = ["git", "-C", str(where), *words]
    return subprocess.run(line, check=True, capture_output=True, text=True, env=os.environ | OURS).stdout.strip()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    made = tmp_path / "tree"
    (made / "src").mkdir(parents=True)
    (made / "src/main.c").write_text("int main;\n")
    (made / "build.sh").write_text("#!/bin/sh\n")
    (made / "build.sh").chmod(0o755)
    (made / "link").symlink_to("src/main.c")
    return made


@pytest.fixture
def pin(tree: Path, tmp_path: Path) -> Pin:
    """Return the pin of a commit that has later commits and uncommitted changes after it."""
    repository = tmp_path / "repository"
    subprocess.run(["cp", "-a", tree, repository], check=True)
    git(repository, "init", "--quiet")
    git(repository, "add", ".")
    git(repository, "commit", "--quiet", "--message=one")
    commit = git(repository, "rev-parse", "HEAD")
    (repository / "src/main.c").write_text("int later;\n")
    git(repository, "commit", "--quiet", "--all", "--message=two")
    (repository / "src/main.c").write_text("int never;\n")
    found = Pin("tool", "1.0", str(repository), "0" * 64, commit=commit)
    return replace(found, sha256=hashlib.sha256(pack_source(found, BuildSettings())).hexdigest())


def test_a_repository_an_archive_and_a_directory_of_one_commit_are_one_file(
    pin: Pin, tree: Path, tmp_path: Path
) -> None:
    bare = tmp_path / "bare"
    git(tmp_path, "clone", "--quiet", "--bare", pin.url, str(bare))
    archive = tmp_path / "v1.0.tar.gz"
    git(Path(pin.url), "archive", "--prefix=tool-v1.0/", f"--output={archive}", pin.commit)
    # Times, owners and other mode bits depend on who unpacked the tree, and do not count.
    os.utime(tree / "build.sh", (1, 1))
    (tree / "src/main.c").chmod(0o664)
    for number, address in enumerate((pin.url, bare, archive, tree)):
        kept = fetch(replace(pin, url=str(address)), tmp_path / str(number), BuildSettings())
        assert kept.name == "tool-1.0.tar" and hashlib.sha256(kept.read_bytes()).hexdigest() == pin.sha256
    with tarfile.open(kept) as made:
        entries = {entry.name: entry for entry in made}
    assert set(entries) == {"tool-1.0/src/main.c", "tool-1.0/build.sh", "tool-1.0/link"}
    assert entries["tool-1.0/build.sh"].mode == 0o755 and entries["tool-1.0/link"].issym()


@pytest.mark.parametrize("change", ["content", "bit", "more", "less", "link"])
def test_another_tree_is_refused_and_nothing_of_it_kept(pin: Pin, tree: Path, tmp_path: Path, change: str) -> None:
    if change == "content":
        (tree / "src/main.c").write_text("int evil;\n")
    elif change == "bit":
        (tree / "src/main.c").chmod(0o755)
    elif change == "more":
        (tree / ".hidden").write_text("")
    elif change == "less":
        (tree / "build.sh").unlink()
    else:
        (tree / "link").unlink()
        (tree / "link").symlink_to("/etc/passwd")
    with pytest.raises(ImagesError, match="checksum mismatch") as caught:
        fetch(replace(pin, url=str(tree)), tmp_path / "kept", BuildSettings())
    assert "pins.tool" in str(caught.value)
    assert not [path for path in (tmp_path / "kept").rglob("*") if path.is_file()]


def test_a_repository_without_the_commit_is_told_with_the_way_out(pin: Pin, tmp_path: Path) -> None:
    for change in ({"commit": "1" * 40}, {"url": "/nothing/here"}, {"url": "--upload-pack=x"}):
        with pytest.raises(ImagesError, match="git has no commit") as caught:
            fetch(replace(pin, **change), tmp_path / "kept", BuildSettings())
        assert "--set sources=tool=PATH" in str(caught.value.hint)


def test_what_is_no_source_is_refused(pin: Pin, tree: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.tar"
    broken.write_bytes(b"no tar at all")
    os.mkfifo(tree / "pipe")
    for address, why in ((broken, "cannot have the source"), (tree, "pipe is no file")):
        with pytest.raises(ImagesError, match=why):
            fetch(replace(pin, url=str(address)), tmp_path / "kept", BuildSettings())


def test_a_repository_s_own_settings_start_nothing_here(pin: Pin, tmp_path: Path) -> None:
    """A repository's own configuration runs no program here.

    A checkout would run any filter that the configuration names.
    """
    ran = tmp_path / "ran"
    repository = Path(pin.url)
    git(repository, "config", "filter.evil.smudge", f"touch {ran}")
    git(repository, "config", "tar.tar.command", f"touch {ran}")
    (repository / ".git/info/attributes").write_text("* filter=evil\n")
    assert hashlib.sha256(pack_source(pin, BuildSettings())).hexdigest() == pin.sha256
    assert not ran.exists()


def test_the_shipped_sources_are_pinned_by_commit_and_content() -> None:
    pins = load(ROOT).versions.pins
    for name in ("pyxis", "enroot"):
        assert pins[name].commit and pins[name].sha256 != UNFILLED and pins[name].url.startswith("https://")


def test_a_source_of_the_sites_is_a_setting_and_a_typo_an_error() -> None:
    assert read({}, ["sources=pyxis=/a, enroot=/b"]).source_map == {"pyxis": "/a", "enroot": "/b"}
    with pytest.raises(ImagesError, match="'/a' is not NAME=PATH"):
        read({}, ["sources=/a"])
    from images.archive.lock import LockContext
    from images.definition.spec import BuildChoice, SlurmSource
    from images.make.compose import map_pins

    definition, choice = load(ROOT), BuildChoice("debian", SlurmSource.PACKAGE, release="24.11")
    place = LockContext(ROOT, definition, choice, BuildSettings(sources="enrot=/b"))
    with pytest.raises(ImagesError, match="no source 'enrot'") as caught:
        map_pins(place)
    assert "enroot" in str(caught.value.hint)
    place = LockContext(ROOT, definition, choice, BuildSettings(sources="enroot=/b"))
    shipped = definition.versions.pins["enroot"]
    assert map_pins(place)["enroot"] == replace(shipped, url="/b", setting="sources")


def test_a_source_without_a_checksum_is_trusted_on_first_sight_as_any_file(pin: Pin, tmp_path: Path) -> None:
    from images.archive import lock
    from images.archive.lock import LockContext
    from images.definition.spec import BuildChoice, SlurmSource

    place = LockContext(
        tmp_path, load(ROOT), BuildChoice("debian", SlurmSource.PACKAGE, release="24.11"), BuildSettings()
    )
    unfilled = replace(pin, sha256=UNFILLED)
    with pytest.raises(ImagesError, match="has no checksum yet"):
        fetch(unfilled, place.downloads, place.settings)
    assert lock.download_pin(unfilled, place) == pin.sha256
    versions = tmp_path / "versions.yaml"
    versions.write_text(f"pins:\n  tool:\n    url: x\n    commit: {pin.commit}\n    sha256: {UNFILLED}\n")
    lock.record_checksum(versions, unfilled, pin.sha256)
    assert f"sha256: {pin.sha256}\n" in versions.read_text()


def test_an_archive_that_is_cut_or_has_a_name_too_long_is_a_sentence(pin: Pin, tree: Path, tmp_path: Path) -> None:
    (tree / "random").write_bytes(os.urandom(1 << 16))
    cut = tmp_path / "cut.tgz"
    with tarfile.open(cut, "w:gz") as archive:
        archive.add(tree, "tool-1.0")
    cut.write_bytes(cut.read_bytes()[: 1 << 15])
    (tree / ("d" * 150)).mkdir()
    (tree / ("d" * 150) / ("f" * 120)).touch()
    for given in (cut, tree):
        with pytest.raises(ImagesError, match="have the source of tool"):
            pack_source(replace(pin, url=str(given)), BuildSettings())
