"""Python libraries from wheels: locked for each architecture, and complete in the image without running any of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from images import ImagesError
from images.archive import wheels
from images.archive.lock import LockContext
from images.archive.wheels import Wheel
from images.definition.load import load
from images.definition.spec import BuildChoice, Libraries, Selected, SlurmSource
from images.make import toolkit
from images.settings import BuildSettings
from tests.support.wheel_files import index, locked_wheel, made

ROOT = Path(__file__).resolve().parents[3]
HERE = BuildChoice("debian", SlurmSource.PACKAGE, "13.5", "24.11")
MODULES = {"kube/__init__.py": b"raise SystemExit('imported')\n", "kube/client.py": b"x = 1\n"}
__all__ = ["index"]


def place(root: Path = ROOT) -> LockContext:
    return LockContext(root, load(ROOT), HERE, BuildSettings())


def laid_out(path: Path, tmp_path: Path) -> dict[str, bytes]:
    here = replace(place(tmp_path), settings=BuildSettings())
    wheel = replace(locked_wheel(path, "kube"), group="kubernetes")
    (tmp_path / "kept").mkdir()
    return {entry.path: entry.read() for entry in toolkit.library_entries((wheel,), here, tmp_path / "kept")}


def test_one_that_runs_everywhere_is_locked_for_every_architecture_whatever_python_it_asks_for(index: Path) -> None:
    """A wheel for any platform is locked for all architectures without checking its Python requirement.

    The builder's Python differs from the image's; the layer's `verify` step shows that the library works there.
    """
    path = made(index, "kube", tag="any", files=MODULES)
    found = wheels.resolve(Libraries({"kubernetes": ("kube==13.5.*",)}), BuildSettings())
    assert {(wheel.arch, wheel.file) for wheel in found.wheels} == {("amd64", path.name), ("arm64", path.name)}
    assert wheels.list_changes(None, found)[0] == "python: kube not there -> 13.5.1 (amd64)"


def test_it_lies_whole_beside_debians_modules_and_not_among_them(index: Path, tmp_path: Path) -> None:
    found = laid_out(made(index, "kube", tag="any", files=MODULES), tmp_path)
    at = "usr/local/lib/python3.13/dist-packages"
    assert found[f"{at}/kube/client.py"] == b"x = 1\n"
    assert f"{at}/kube-13.5.1.dist-info/METADATA" in found, "scanners know it by what it says of itself"
    assert f"{at}/kube-13.5.1.dist-info/licenses/License.txt" in found


def test_what_a_wheel_would_put_elsewhere_is_refused(index: Path, tmp_path: Path) -> None:
    path = made(index, "kube", tag="any", files={**MODULES, "kube-13.5.1.data/scripts/run": b"#!/bin/sh\n"})
    with pytest.raises(ImagesError, match=r"kube-13\.5\.1\.data/scripts/run is not a module"):
        laid_out(path, tmp_path)


def test_the_lock_is_of_what_the_definition_asks() -> None:
    definition = load(ROOT)
    python = definition.versions.python
    locked = wheels.read(place(), python)
    assert locked is not None and dict(locked.request) == dict(python.wheels)
    asked = {item.partition("==")[0] for group in python.wheels.values() for item in group}
    for arch in wheels.MACHINES:
        assert {wheel.name for wheel in locked.wheels if wheel.arch == arch} == asked


def test_a_layer_that_asks_for_one_is_told_where_nobody_has_locked_it(tmp_path: Path) -> None:
    layer = place().definition.layers["fleet"]
    with pytest.raises(ImagesError, match="the wheels of Python were never resolved"):
        toolkit.select_libraries(place(tmp_path), layer)
    assert wheels.list_stale(place(tmp_path), ["fleet"]) == ["the wheels of Python"]
    assert wheels.list_stale(place(tmp_path), ["controller"]) == []
    assert toolkit.select_libraries(place(tmp_path), replace(layer, python=Selected())) == ()


def test_the_hash_knows_the_file_and_the_layout() -> None:
    one = Wheel("kubernetes", "kube", "1", "amd64", "kube-1-py3-none-any.whl", "ab" * 32)
    assert toolkit.library_inputs((one,)) != toolkit.library_inputs((replace(one, sha256="cd" * 32),))
    assert set(toolkit.library_inputs((one,))) == {"wheel kube", "layout of libraries"}
    assert toolkit.library_inputs(()) == {}
