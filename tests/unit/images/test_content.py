"""Tar archive of a layer: reproducible bytes, and no change to directories that a path only passes through."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from images import ImagesError
from images.definition.spec import EntryKind, FileEntry, User
from images.make import content
from images.make.content import Entry

EPOCH = 1_700_000_000
USERS = {"munge": User("munge", 64031, 64031)}


def packed(entries: list[Entry]) -> bytes:
    stream = io.BytesIO()
    content.write_tar(stream, entries, EPOCH)
    return stream.getvalue()


def members(data: bytes) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return {member.name: member for member in tar}


def test_the_same_files_in_any_order_and_at_any_time_give_the_same_bytes(tmp_path: Path) -> None:
    for directory, names in (("a", ["x", "y"]), ("b", ["y", "x"])):
        for name in names:
            path = tmp_path / directory / "etc" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(name)
    (tmp_path / "a/etc/x").touch()
    first, second = (packed(content.complete(content.list_tree(tmp_path / name), {})) for name in ("a", "b"))
    assert first == second
    assert all(member.mtime == EPOCH and not member.uname for member in members(first).values())


def test_every_parent_is_listed_with_the_mode_that_the_base_gives_it() -> None:
    found = members(packed(content.complete([content.file("root/.ssh/x", b""), content.file("tmp/y", b"")], {})))
    assert list(found) == ["root", "root/.ssh", "root/.ssh/x", "tmp", "tmp/y"]
    assert (found["root"].mode, found["root/.ssh"].mode, found["tmp"].mode) == (0o700, 0o755, 0o1777)


def test_a_parent_keeps_what_a_layer_below_said_of_it() -> None:
    below = {"etc/munge": Entry("etc/munge", EntryKind.DIRECTORY, 0o700, 64031, 64031)}
    found = members(packed(content.complete([content.file("etc/munge/x", b"")], below)))
    assert (found["etc/munge"].mode, found["etc/munge"].uid) == (0o700, 64031)


def test_a_later_entry_of_the_same_path_wins() -> None:
    entries = content.complete([content.file("x", b"1"), content.file("x", b"2")], {})
    assert [entry.read() for entry in entries] == [b"2"]


def test_bytes_mode_and_owner_each_change_the_digest() -> None:
    plain = Entry("x", EntryKind.FILE, 0o644, data=b"1")
    others = [Entry("x", EntryKind.FILE, 0o644, data=b"2"), Entry("x", EntryKind.FILE, 0o600, data=b"1"),
              Entry("x", EntryKind.FILE, 0o644, 1, data=b"1"), Entry("x", EntryKind.LINK, 0o644, link="1")]  # fmt: skip
    assert len({plain.digest(), *(other.digest() for other in others)}) == 5


def test_executables_stay_executable_and_byte_code_stays_out(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/run").write_text("#!/bin/sh\n")
    (tmp_path / "bin/run").chmod(0o700)
    (tmp_path / "bin/read").write_text("")
    (tmp_path / "bin/read").chmod(0o600)
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__/x.pyc").write_text("")
    (tmp_path / "removed/package/__pycache__").mkdir(parents=True)
    (tmp_path / "bin/link").symlink_to("run")
    found = {entry.path: entry for entry in content.list_tree(tmp_path, "/usr")}
    assert found.keys() == {"usr/bin", "usr/bin/run", "usr/bin/read", "usr/bin/link"}
    assert (found["usr/bin/run"].mode, found["usr/bin/read"].mode, found["usr/bin/link"].link) == (0o755, 0o644, "run")


def test_an_entry_becomes_what_it_says(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("hello")
    one = FileEntry(EntryKind.FILE, "/etc/x", "x", 0o640, "munge")
    (found,) = content.resolve(one, [tmp_path], USERS, "f")
    assert (found.path, found.mode, found.uid, found.read()) == ("etc/x", 0o640, 64031, b"hello")
    (found,) = content.resolve(FileEntry(EntryKind.DIRECTORY, "/run/m", mode=0o711), [tmp_path], USERS, "f")
    assert (found.kind, found.mode) == (EntryKind.DIRECTORY, 0o711)


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        (FileEntry(EntryKind.FILE, "/etc/x", "absent"), "absent does not exist"),
        (FileEntry(EntryKind.DIRECTORY, "/etc/x", owner="mugne"), "no user 'mugne'"),
    ],
)
def test_an_entry_that_cannot_be_placed(tmp_path: Path, entry: FileEntry, why: str) -> None:
    with pytest.raises(ImagesError, match=why):
        content.resolve(entry, [tmp_path], USERS, "images/layers/x.yaml")
