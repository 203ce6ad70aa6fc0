"""CUDA from wheels: pip resolves and fetches them, and their files go only where the toolkit has them.

The tests make the wheels, and the real pip finds them in a directory in place of an index.
"""

from __future__ import annotations

import hashlib
import json
import stat
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from images import ImagesError
from images.archive import bootstrap, wheels
from images.archive.bootstrap import unpack
from images.archive.lock import LockContext
from images.archive.wheels import LockedWheels, Wheel
from images.definition.load import load
from images.definition.spec import BuildChoice, Cuda, EntryKind, SlurmSource
from images.make import toolkit
from images.make.content import Entry
from images.make.sbom import list_packages, purl
from images.settings import BuildSettings
from tests.support.wheel_files import FILES, TAGS, index, locked_wheel, made

# The fixtures that this module's tests ask for.
__all__ = ["index"]

ROOT = Path(__file__).resolve().parents[3]


CUDA = Cuda("13.5", "580", {"runtime": ("nvidia-cuda-runtime==13.5.*",)})


def test_every_architecture_is_locked_whichever_machine_asks(index: Path) -> None:
    paths = {arch: made(index, tag=tag) for arch, tag in TAGS.items()}
    found = wheels.resolve(CUDA, BuildSettings())
    assert {(w.group, w.wanted, w.arch, w.file, w.sha256) for w in found.wheels} == {
        ("runtime", "nvidia-cuda-runtime==13.5.1", arch, path.name, hashlib.sha256(path.read_bytes()).hexdigest())
        for arch, path in paths.items()
    }


def test_all_architectures_get_one_version(index: Path) -> None:
    """All architectures use one version.

    If only one of them has a newer version, the build fails: it neither takes the older version for all, nor mixes
    them.
    """
    made(index, tag=TAGS["arm64"])
    made(index, tag=TAGS["amd64"], version="13.5.2")
    with pytest.raises(ImagesError, match=r"nvidia-cuda-runtime==13\.5\.2 has no wheel for arm64"):
        wheels.resolve(CUDA, BuildSettings())


def test_an_index_that_knows_no_sha256_is_a_sentence(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An index without SHA-256 gives an error that names the reason.

    An old mirror's page has MD5 only, which must not get into the lock.
    """
    path = made(index)
    page = tmp_path / "page.html"
    digest = hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()
    page.write_text(f'<html><body><a href="{path.as_uri()}#md5={digest}">{path.name}</a></body></html>')
    monkeypatch.setenv("PIP_FIND_LINKS", str(page))
    with pytest.raises(ImagesError, match=f"the index says md5 of {path.name}, and no SHA-256"):
        wheels.resolve(CUDA, BuildSettings())


def test_a_platform_without_a_wheel_is_a_sentence(index: Path) -> None:
    made(index)
    with pytest.raises(ImagesError) as error:
        wheels.resolve(CUDA, BuildSettings())
    assert str(error.value).startswith("cannot resolve the wheels: nvidia-cuda-runtime==13.5.1 has no wheel for arm64")


@pytest.mark.parametrize("tag", ["manylinux_2_40_x86_64", "musllinux_1_2_x86_64"])
def test_a_wheel_for_another_c_library_is_not_taken(index: Path, tag: str) -> None:
    made(index, tag=tag)
    with pytest.raises(ImagesError, match="has no wheel for amd64"):
        wheels.resolve(CUDA, BuildSettings())


def test_a_wheel_is_fetched_once_and_kept_by_its_checksum(index: Path, tmp_path: Path) -> None:
    wheel = locked_wheel(made(index))
    kept = wheels.fetch(wheel, tmp_path / "downloads", BuildSettings())
    assert hashlib.sha256(kept.read_bytes()).hexdigest() == wheel.sha256
    (index / wheel.file).unlink()
    assert wheels.fetch(wheel, tmp_path / "downloads", BuildSettings()) == kept


def test_a_wheel_of_the_other_architecture_is_fetched_here_as_well(index: Path, tmp_path: Path) -> None:
    wheel = locked_wheel(made(index, tag=TAGS["arm64"]), arch="arm64")
    assert wheels.fetch(wheel, tmp_path / "downloads", BuildSettings()).name == wheel.file


def test_a_changed_hash_is_a_sentence_and_leaves_nothing(index: Path, tmp_path: Path) -> None:
    wheel = locked_wheel(made(index))
    made(index, files={**FILES, "nvidia/cu13/lib/libcudart.so.13": b"another library"})
    with pytest.raises(ImagesError) as error:
        wheels.fetch(wheel, tmp_path / "downloads", BuildSettings())
    changed = hashlib.sha256((index / wheel.file).read_bytes()).hexdigest()
    assert f"its hash changed: {wheel.file} is locked as {wheel.sha256}, found {changed}" in str(error.value)
    assert not [path for path in (tmp_path / "downloads").rglob("*") if path.is_file()]


def test_a_wheel_that_is_gone_is_a_sentence(index: Path, tmp_path: Path) -> None:
    wheel = locked_wheel(made(tmp_path / "elsewhere"))
    with pytest.raises(ImagesError, match=r"cannot fetch nvidia-cuda-runtime==13\.5\.1: there is no such wheel"):
        wheels.fetch(wheel, tmp_path / "downloads", BuildSettings())


def test_the_lock_names_no_host_and_reads_back(index: Path, tmp_path: Path) -> None:
    for tag in TAGS.values():
        made(index, tag=tag)
    definition = load(ROOT)
    place = LockContext(
        tmp_path, definition, BuildChoice("debian", SlurmSource.PACKAGE, "13.5", "24.11"), BuildSettings()
    )
    found = wheels.resolve(CUDA, BuildSettings())
    wheels.write(place, CUDA, found)
    text = wheels.lock_file(place, CUDA).read_text()
    assert "://" not in text and wheels.read(place, CUDA) == found
    assert wheels.list_changes(None, found)[0] == "cuda 13.5: nvidia-cuda-runtime not there -> 13.5.1 (amd64)"
    other = replace(found, wheels=tuple(replace(w, sha256="0" * 64) for w in found.wheels))
    assert (
        wheels.list_changes(found, other)[0]
        == "cuda 13.5: nvidia-cuda-runtime 13.5.1 (amd64) is another file than it was"
    )


@pytest.fixture
def place(tmp_path: Path) -> LockContext:
    """Return a repository with a CUDA of one wheel, and an empty lock."""
    definition = load(ROOT)
    versions = replace(definition.versions, cuda={"13.5": CUDA})
    choice = BuildChoice("debian", SlurmSource.PACKAGE, "13.5", "24.11")
    return LockContext(tmp_path, replace(definition, versions=versions), choice, BuildSettings())


@pytest.fixture
def locked(index: Path, place: LockContext) -> LockedWheels:
    wheels_of = [locked_wheel(made(index, tag=tag), arch=arch) for arch, tag in TAGS.items()]
    found = LockedWheels("13.5", dict(CUDA.wheels), tuple(wheels_of))
    wheels.write(place, CUDA, found)
    return found


def test_how_the_index_stands_to_the_lock_is_told_and_nothing_is_changed(
    index: Path, locked: LockedWheels, place: LockContext
) -> None:
    assert wheels.compare_with_index(place, ["cuda"]) == wheels.IndexDifferences()
    before = wheels.lock_file(place, CUDA).read_bytes()
    was, gone = locked.wheels
    # One locked wheel has changed and one is gone, which are errors; a newer version is listed apart and is no error.
    path = made(index, files={**FILES, "nvidia/cu13/lib/libcudart.so.13": b"another library"})
    (index / gone.file).unlink()
    for tag in TAGS.values():
        made(index, tag=tag, version="13.5.2")
    found = wheels.compare_with_index(place, ["cuda"])
    now = hashlib.sha256(path.read_bytes()).hexdigest()
    assert found.wrong == (
        f"CUDA 13.5: nvidia-cuda-runtime 13.5.1 (amd64): its hash changed: {path.name} is locked as {was.sha256}, "
        f"the index has {now}",
        "CUDA 13.5: nvidia-cuda-runtime 13.5.1 (arm64) is gone",
    )
    assert found.newer == tuple(f"cuda 13.5: nvidia-cuda-runtime 13.5.1 -> 13.5.2 ({arch})" for arch in TAGS)
    assert wheels.lock_file(place, CUDA).read_bytes() == before
    assert not place.downloads.exists()


def test_a_newer_wheel_of_one_architecture_alone_is_told_as_what_it_is(
    index: Path, locked: LockedWheels, place: LockContext
) -> None:
    made(index, version="13.5.2")
    (text,) = wheels.compare_with_index(place, ["cuda"]).newer
    assert text == "CUDA 13.5: a new lock cannot be made: nvidia-cuda-runtime==13.5.2 has no wheel for arm64"


def test_an_index_that_does_not_answer_is_not_taken_for_one_without_wheels(
    locked: LockedWheels, place: LockContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", "/nowhere/pip.conf")
    monkeypatch.setenv("PIP_TIMEOUT", "no number")
    with pytest.raises(ImagesError, match="cannot resolve the wheels"):
        wheels.compare_with_index(place, ["cuda"])


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"format": 1}', '{"format": 1, "cuda": "13.5", "request": [], "wheels": [{}]}']
)
def test_a_damaged_lock_is_told_with_its_file(tmp_path: Path, text: str) -> None:
    place = LockContext(
        tmp_path, load(ROOT), BuildChoice("debian", SlurmSource.PACKAGE, "13.5", "24.11"), BuildSettings()
    )
    wheels.lock_file(place, CUDA).parent.mkdir(parents=True)
    wheels.lock_file(place, CUDA).write_text(text)
    with pytest.raises(ImagesError, match=r"damaged: .*images/lock/wheels/cuda-13\.5\.json"):
        wheels.read(place, CUDA)


def everything(path: Path, into: Path) -> list[bootstrap.Member]:
    into.mkdir()
    return list(unpack(path, into, lambda name: True))


def put(name: str, data: bytes = b"x", mode: int = stat.S_IFREG | 0o644) -> Callable[[zipfile.ZipFile], None]:
    def change(archive: zipfile.ZipFile) -> None:
        info = zipfile.ZipInfo(name)
        info.external_attr = mode << 16
        archive.writestr(info, data)

    return change


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (put("../../etc/passwd"), "is not a path inside it"),
        (put("/etc/passwd"), "is not a path inside it"),
        (put("nvidia/./cu13/x"), "is not a path inside it"),
        (put("nvidia//x"), "is not a path inside it"),
        (put("nvidia/a\nb"), "is not a path inside it"),
        (put("nvidia/cu13/lib/liba.so.1", b"/etc/shadow", stat.S_IFLNK | 0o777), "is not a plain file"),
        (put("nvidia/cu13/lib/pipe", b"", stat.S_IFIFO | 0o644), "is not a plain file"),
        (put("nvidia/cu13/lib/more.so"), "is not listed in its RECORD"),
        (put("nvidia/cu13/lib/libcudart.so.13", b"another"), "it holds a file twice"),
        (put("other-1.dist-info/RECORD"), "it has no RECORD of its files"),
    ],
)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_hostile_wheel_writes_nowhere(tmp_path: Path, change: Callable[[zipfile.ZipFile], None], why: str) -> None:
    path = made(tmp_path / "index", change=change)
    with pytest.raises(ImagesError, match=why):
        everything(path, tmp_path / "into")
    written = [found for found in tmp_path.rglob("*") if found.is_file() and found != path]
    assert all(found.parent == tmp_path / "into" and found.name.isdigit() for found in written)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"lie": "nvidia/cu13/bin/nvcc"}, "nvidia/cu13/bin/nvcc is not what its RECORD says"),
        ({"unlisted": "nvidia/cu13/bin/nvcc"}, "nvidia/cu13/bin/nvcc is not listed in its RECORD"),
    ],
)
def test_a_wheel_is_what_its_own_list_says(tmp_path: Path, options: Mapping[str, Any], why: str) -> None:
    with pytest.raises(ImagesError, match=why):
        everything(made(tmp_path / "index", **options), tmp_path / "into")


def test_a_wheel_that_grows_without_end_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = made(tmp_path / "index")
    monkeypatch.setattr(bootstrap, "MOST_BYTES", 30)
    with pytest.raises(ImagesError, match="it holds more than"):
        everything(path, tmp_path / "into")
    assert not list((tmp_path / "into").iterdir())


@pytest.mark.parametrize("cut", [0, 10, 400])
def test_a_damaged_wheel_is_a_sentence(tmp_path: Path, cut: int) -> None:
    path = made(tmp_path / "index")
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(ImagesError, match="damaged"):
        everything(path, tmp_path / "into")


def test_a_flipped_byte_is_seen(tmp_path: Path) -> None:
    path = made(tmp_path / "index")
    data = path.read_bytes()
    path.write_bytes(data.replace(b"a compiler", b"b compiler"))
    with pytest.raises(ImagesError, match="damaged: Bad CRC-32"):
        everything(path, tmp_path / "into")


@pytest.mark.parametrize("damage", ["a packed file", "its list"])
def test_what_a_reader_of_its_own_stumbles_on_is_a_sentence_too(tmp_path: Path, damage: str) -> None:
    """Invalid compressed data and an endless CSV field give a one-sentence error instead of a traceback."""
    with zipfile.ZipFile(made(tmp_path / "index")) as archive:
        files = {info.filename: archive.read(info) for info in archive.infolist()}
    path = tmp_path / "packed.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            endless = damage == "its list" and name.endswith("RECORD")
            archive.writestr(name, data + b'"' + b"a" * 200_000 if endless else data)
        first = archive.infolist()[0]
    if damage == "a packed file":
        broken = bytearray(path.read_bytes())
        broken[first.header_offset + 30 + len(first.filename)] = 0xFF
        path.write_bytes(broken)
    with pytest.raises(ImagesError, match="damaged: "):
        everything(path, tmp_path / "into")


def laid(tmp_path: Path, index: Path, *, libraries: bool, devel: bool) -> dict[str, Entry]:
    wheel = locked_wheel(made(index))
    place = LockContext(
        tmp_path, load(ROOT), BuildChoice("debian", SlurmSource.PACKAGE, "13.5", "24.11"), BuildSettings()
    )
    wanted = toolkit.ToolkitWheels("13.5", (wheel,) if libraries else (), (wheel,) if devel else ())
    kept = tmp_path / "kept"
    kept.mkdir()
    return {entry.path: entry for entry in toolkit.entries(wanted, place, kept)}


def test_what_programs_need_is_a_toolkit_of_libraries_alone(index: Path, tmp_path: Path) -> None:
    found = laid(tmp_path, index, libraries=True, devel=False)
    assert {path: entry.link or entry.read().decode() for path, entry in found.items()} == {
        "usr/local/cuda": "cuda-13.5",
        "usr/local/cuda-13.5/lib": "lib64",
        "usr/local/cuda-13.5/lib64/libcudart.so.13": "a library",
        "etc/ld.so.conf.d/cuda-13.5.conf": "/usr/local/cuda-13.5/lib64\n",
        "usr/share/doc/nvidia-cuda-runtime/License.txt": "what may be done with it",
    }


def test_what_compiling_needs_is_the_rest(index: Path, tmp_path: Path) -> None:
    found = laid(tmp_path, index, libraries=False, devel=True)
    prefix = "usr/local/cuda-13.5"
    assert set(found) == {
        f"{prefix}/lib64/libcudart_static.a", f"{prefix}/lib64/device.bc", f"{prefix}/lib64/stubs/libcuda.so",
        f"{prefix}/include/cuda.h", f"{prefix}/bin/nvcc", f"{prefix}/lib64/libcudart.so",
        "usr/local/share/pkgconfig/cudart.pc",
    }  # fmt: skip
    assert found[f"{prefix}/bin/nvcc"].mode == 0o755 and found[f"{prefix}/include/cuda.h"].mode == 0o644
    assert found[f"{prefix}/lib64/libcudart.so"].link == "libcudart.so.13"
    assert (
        "Version: 13.5.1\nLibs: -L${libdir} -lcudart\n" in found["usr/local/share/pkgconfig/cudart.pc"].read().decode()
    )
    assert all(entry.kind in (EntryKind.FILE, EntryKind.LINK) for entry in found.values())


def test_a_file_outside_the_vendors_tree_is_refused(index: Path, tmp_path: Path) -> None:
    made(index, files={**FILES, "sitecustomize.py": b"import os"})
    wheel = locked_wheel(index / f"nvidia_cuda_runtime-13.5.1-py3-none-{TAGS['amd64']}.whl")
    place = LockContext(
        tmp_path, load(ROOT), BuildChoice("debian", SlurmSource.PACKAGE, "13.5", "24.11"), BuildSettings()
    )
    with pytest.raises(ImagesError, match=r"sitecustomize\.py is neither the vendor's nor about the wheel"):
        list(toolkit.entries(toolkit.ToolkitWheels("13.5", (wheel,)), place, tmp_path))


def asked(layer: str, cuda: str, below: tuple[str, ...] = ()) -> toolkit.ToolkitWheels:
    definition = load(ROOT)
    place = LockContext(ROOT, definition, BuildChoice("debian", SlurmSource.PACKAGE, cuda, "24.11"), BuildSettings())
    return toolkit.select_wheels(place, definition.layers[layer], [definition.layers[name] for name in below])


def test_the_devel_layers_bring_the_libraries_where_none_below_does() -> None:
    names = {wheel.name for wheel in asked("login-devel", "13.5").libraries}
    assert {"nvidia-cuda-runtime", "nvidia-nccl-cu13", "nvidia-nvvm"} <= names
    above = {wheel.name for wheel in asked("worker-devel", "13.5", ("cuda", "nccl")).libraries}
    assert "nvidia-nvvm" in above and not above & {"nvidia-cuda-runtime", "nvidia-nccl-cu13"}


def test_the_distributions_own_cuda_takes_no_wheels() -> None:
    assert asked("cuda", "package") == toolkit.ToolkitWheels()


def test_a_cuda_without_a_compiler_says_so() -> None:
    assert {wheel.name for wheel in asked("cuda", "12.9").libraries} == {"nvidia-cuda-runtime-cu12"}
    with pytest.raises(ImagesError, match=r"cannot build layer:worker-devel: CUDA 12\.9 has no wheels 'compiler'"):
        asked("worker-devel", "12.9", ("cuda", "nccl"))


def test_wheels_that_were_never_resolved_are_a_sentence(place: LockContext) -> None:
    with pytest.raises(ImagesError) as error:
        toolkit.select_wheels(place, place.definition.layers["cuda"], [])
    assert str(error.value).startswith(
        "cannot read the lock: the wheels of CUDA 13.5 were never resolved (images/lock/wheels/cuda-13.5.json)"
    )


def test_a_machine_that_no_wheel_is_locked_for_is_a_sentence(
    locked: LockedWheels, place: LockContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = replace(place, choice=replace(place.choice, arch="riscv64"))
    with pytest.raises(ImagesError) as error:
        toolkit.select_wheels(place, place.definition.layers["cuda"], [])
    assert str(error.value).startswith(
        "cannot build layer:cuda: no wheel of nvidia-cuda-runtime==13.5.* is locked for riscv64"
    )


def test_a_cuda_without_a_group_that_a_layer_takes_is_a_sentence(locked: LockedWheels, place: LockContext) -> None:
    with pytest.raises(ImagesError) as error:
        toolkit.select_wheels(place, place.definition.layers["nccl"], [place.definition.layers["cuda"]])
    assert "cannot build layer:nccl: CUDA 13.5 has no wheels 'nccl'" in str(error.value)
    assert "images/versions.yaml, cuda.13.5.wheels" in str(error.value)


def test_the_hash_knows_file_part_and_layout() -> None:
    one, devel = asked("cuda", "13.5"), asked("worker-devel", "13.5", ("cuda", "nccl"))
    assert {"wheel nvidia-cuda-runtime", "layout of wheels"} == set(toolkit.inputs(one))
    assert "wheel nvidia-cuda-runtime for compiling" in toolkit.inputs(devel)
    assert toolkit.inputs(one) != toolkit.inputs(asked("cuda", "12.9"))


def test_the_locks_are_of_what_the_definition_asks() -> None:
    """Locks cover every CUDA of versions.yaml and each architecture, at versions that the requirements allow."""
    definition = load(ROOT)
    for cuda in definition.versions.cuda.values():
        place = LockContext(
            ROOT, definition, BuildChoice("debian", SlurmSource.PACKAGE, cuda.name, "24.11"), BuildSettings()
        )
        locked = wheels.read(place, cuda)
        assert isinstance(locked, LockedWheels) and dict(locked.request) == dict(cuda.wheels), cuda.name
        asked_for = {item.partition("==")[0] for group in cuda.wheels.values() for item in group}
        for arch in wheels.MACHINES:
            assert {wheel.name for wheel in locked.wheels if wheel.arch == arch} == asked_for, (cuda.name, arch)


def test_an_sbom_names_wheels_by_checksum_and_licence() -> None:
    wheel = Wheel("nccl", "nvidia-nccl-cu13", "2.30.7", "amd64", "x.whl", "ab" * 32, "LicenseRef-NVIDIA-Proprietary")
    (package,) = list_packages((), (), {}, (), (wheel,))
    assert purl(package, "debian", "trixie") == f"pkg:pypi/nvidia-nccl-cu13@2.30.7?checksum=sha256:{'ab' * 32}"
    assert package.licence == "LicenseRef-NVIDIA-Proprietary" and package.sha256 == "ab" * 32


def test_the_list_of_files_may_not_be_a_zip_bomb_either(tmp_path: Path) -> None:
    about = "x-1.dist-info"
    path = tmp_path / "x-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"{about}/RECORD", b"a" * (33 << 20))
    with pytest.raises(ImagesError, match="its RECORD is larger"):
        everything(path, tmp_path / "into")


def test_the_lock_is_one_line_a_file() -> None:
    text = (ROOT / "images/lock/wheels/cuda-13.5.json").read_text()
    assert all("sha256" in line for line in text.splitlines() if '"file"' in line) and json.loads(text)["format"] == 1
