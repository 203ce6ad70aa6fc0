"""The lock as data: it is read back as written, and reports when the archive has changed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from images import ImagesError
from images.archive.apt import URI, resolution_error
from images.archive.lock import WantedPackages, find_stale
from images.archive.locked import LockedPackage, LockRequest, Slice, from_json, list_changes, list_vanished, to_json
from images.definition.spec import Layer

REQUEST = LockRequest(("less",), "root", ("trixie main",))
LESS = LockedPackage("less", "668-1", "amd64", 10, "a" * 64, "debian", "pool/main/l/less/less_668-1_amd64.deb")
TINFO = LockedPackage("libtinfo6", "6.5", "amd64", 20, "b" * 64, "debian", "pool/main/n/libtinfo6_6.5_amd64.deb")
SLICE = Slice("os", REQUEST, (LESS, TINFO))


@pytest.mark.parametrize("slice_", [SLICE, Slice("empty", LockRequest((), "", ()), ())])
def test_a_slice_is_read_back_as_written(slice_: Slice) -> None:
    assert from_json(to_json(slice_), "x") == slice_


def test_a_package_is_one_line_so_that_a_new_lock_reads_as_a_diff() -> None:
    assert sum("sha256" in line for line in to_json(SLICE).splitlines()) == 2


@pytest.mark.parametrize("text", ["", "{}", "[]", to_json(SLICE)[:-20], to_json(SLICE).replace('"size"', '"sise"')])
def test_a_damaged_lock_says_how_to_mend_it(text: str) -> None:
    with pytest.raises(ImagesError) as caught:
        from_json(text, "images/lock/debian/os.json")
    assert caught.value.file == "images/lock/debian/os.json"
    assert "build.py lock" in str(caught.value.hint)


def test_what_the_archive_lost_is_named_with_what_it_has_now() -> None:
    (gone,) = list_vanished([SLICE], {"less": {"669-1": "c" * 64}, "libtinfo6": {"6.5": "b" * 64}})
    assert "less 668-1 (layer os): gone, the archive has 669-1" in str(gone)


def test_the_same_version_with_other_bytes_is_a_checksum_mismatch() -> None:
    (gone,) = list_vanished([SLICE], {"less": {"668-1": "c" * 64}, "libtinfo6": {"6.5": "b" * 64}})
    assert "checksum mismatch" in str(gone)
    assert "cccccccc" in str(gone)


def test_an_archive_that_has_everything_lost_nothing() -> None:
    have = {package.name: {package.version: package.sha256, "0": "f" * 64} for package in SLICE.packages}
    assert list_vanished([SLICE], have) == []


def test_a_new_lock_is_told_by_package() -> None:
    after = Slice("os", REQUEST, (replace(LESS, version="669-1"),))
    assert list_changes([SLICE], [after]) == ["os: less 668-1 -> 669-1", "os: libtinfo6 6.5 -> not there"]


def test_a_slice_that_was_resolved_for_another_request_is_stale() -> None:
    want = WantedPackages(Layer("os", "x", "root"), ("root",), REQUEST)
    assert find_stale([want], {"os": SLICE}) == []
    assert find_stale([want], {}) == ["os"]
    assert find_stale([replace(want, request=replace(REQUEST, packages=("less", "more")))], {"os": SLICE}) == ["os"]


def test_apt_is_understood() -> None:
    line = "'http://m/pool/x/passwd_4.17_amd64.deb' passwd_1%3a4.17_amd64.deb 12 SHA256:" + "0" * 64
    match = URI.match(line)
    assert match and match["file"] == "passwd_1%3a4.17_amd64.deb"


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("E: Unable to locate package lesss", "lesss"),
        ("E: Package 'lesss' has no installation candidate", "lesss"),
    ],
)
def test_a_package_that_is_not_found_gets_the_nearest_name(text: str, missing: str) -> None:
    error = resolution_error(text, "images/layers/os.yaml", lambda: ["less", "more"])
    assert error.why == f"package not found: {missing}"
    assert error.hint == "did you mean 'less'?"
    assert error.file == "images/layers/os.yaml"
