"""SBOMs: valid for SPDX's own tools, deterministic, and explicit about unknown facts."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from spdx_tools.spdx.parser.parse_anything import parse_file
from spdx_tools.spdx.validation.document_validator import validate_full_spdx_document

from images.archive.locked import LockedPackage, LockRequest, Slice
from images.definition.spec import Pin
from images.make.sbom import NOASSERTION, File, Package, document, list_packages, purl, spdx_id, to_json

MUNGE = Package("munge", "0.5.16-1.1", "amd64", "ab" * 32, "munge")
LIBSTDCPP = Package("libstdc++6", "14.2.0-19", "amd64", "cd" * 32, "gcc-14")
SHADOW = Package("login", "1:4.16.0-2+really2.41-5", "amd64", "ef" * 32, "util-linux")
SLURM = Package("slurm", "25.05.1", "amd64", "12" * 32, distribution="generic")
PLAN = File.of("/etc/minivm/plan.json", b"{}\n")
SCRIPT = File.of("usr/share/minivm/scripts/prolog.d/10 disk", b"#!/bin/sh\n")


def make(
    packages: tuple[Package, ...] = (MUNGE, LIBSTDCPP, SHADOW, SLURM), files: tuple[File, ...] = (PLAN, SCRIPT)
) -> dict[str, Any]:
    return document(
        name="minivm/worker",
        version="24.11.5-debian-0123456789ab",
        namespace="https://minivm.invalid/spdx/worker/0123456789ab",
        packages=packages,
        files=files,
        epoch=1_700_000_000,
        suite="trixie",
    )


def problems(path: Path, value: dict[str, Any]) -> list[str]:
    path.write_bytes(to_json(value))
    return [message.validation_message for message in validate_full_spdx_document(parse_file(str(path)))]


@pytest.mark.parametrize("files", [(PLAN, SCRIPT), ()], ids=["with files of ours", "without"])
def test_spdx_tools_finds_nothing_to_complain_about(tmp_path: Path, files: tuple[File, ...]) -> None:
    assert problems(tmp_path / "image.spdx.json", make(files=files)) == []


def test_the_validator_would_see_a_broken_document(tmp_path: Path) -> None:
    broken = make()
    broken["relationships"][1]["relatedSpdxElement"] = "SPDXRef-nobody"
    assert problems(tmp_path / "image.spdx.json", broken)


def test_the_order_of_the_input_does_not_show() -> None:
    assert to_json(make()) == to_json(make((SLURM, SHADOW, LIBSTDCPP, MUNGE), (SCRIPT, PLAN)))


def test_the_time_is_the_epoch_not_the_clock() -> None:
    assert make()["creationInfo"]["created"] == "2023-11-14T22:13:20Z"


def test_a_changed_version_or_file_changes_the_document() -> None:
    newer = Package("munge", "0.5.16-1.2", "amd64")
    assert to_json(make((newer,))) != to_json(make((MUNGE,)))
    assert to_json(make(files=(PLAN,))) != to_json(make(files=(File.of("/etc/minivm/plan.json", b"{ }\n"),)))


def test_every_package_is_in_the_image_with_its_checksum_and_source() -> None:
    value = make()
    by_name = {entry["name"]: entry for entry in value["packages"]}
    contained = {
        relation["relatedSpdxElement"]
        for relation in value["relationships"]
        if relation["spdxElementId"] == "SPDXRef-Image" and relation["relationshipType"] == "CONTAINS"
    }
    for name in ("munge", "libstdc++6", "login", "slurm"):
        assert by_name[name]["SPDXID"] in contained
        assert by_name[name]["downloadLocation"] == NOASSERTION
    assert by_name["munge"]["checksums"] == [{"algorithm": "SHA256", "checksumValue": "ab" * 32}]
    assert by_name["libstdc++6"]["sourceInfo"] == "built from source package gcc-14"
    assert by_name["munge"]["licenseDeclared"] == NOASSERTION
    assert by_name["login"]["licenseDeclared"] == NOASSERTION


def test_files_carry_the_digests_of_their_bytes() -> None:
    (entry,) = make(files=(PLAN,))["files"]
    assert entry["fileName"] == "./etc/minivm/plan.json"
    sums = {item["algorithm"]: item["checksumValue"] for item in entry["checksums"]}
    assert sums == {"SHA1": hashlib.sha1(b"{}\n").hexdigest(), "SHA256": hashlib.sha256(b"{}\n").hexdigest()}


@pytest.mark.parametrize(
    ("package", "expected"),
    [
        (MUNGE, "pkg:deb/debian/munge@0.5.16-1.1?arch=amd64&distro=trixie"),
        (LIBSTDCPP, "pkg:deb/debian/libstdc%2B%2B6@14.2.0-19?arch=amd64&distro=trixie"),
        (SHADOW, "pkg:deb/debian/login@1%3A4.16.0-2%2Breally2.41-5?arch=amd64&distro=trixie"),
        (Package("hpcx", "2.21", "amd64", distribution="nvidia"), "pkg:deb/nvidia/hpcx@2.21?arch=amd64"),
        (SLURM, f"pkg:generic/slurm@25.05.1?checksum=sha256:{'12' * 32}"),
    ],
)
def test_purl(package: Package, expected: str) -> None:
    assert purl(package, "debian", "trixie") == expected


@given(st.sets(st.text(min_size=1), min_size=2, max_size=8))
def test_identifiers_never_collide(names: set[str]) -> None:
    identifiers = {spdx_id("Package", name) for name in names}
    assert len(identifiers) == len(names)
    assert all(set(item.removeprefix("SPDXRef-")) <= set("-." + ALNUM) for item in identifiers)


ALNUM = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"


def test_an_image_is_its_locked_packages_its_base_and_its_pinned_files(tmp_path: Path) -> None:
    pool = "pool/main/g/gcc-14/libstdc++6_14.2.0-19_amd64.deb"
    locked = [
        LockedPackage("libstdc++6", "14.2.0-19", "amd64", 1, "ab" * 32, "base", pool),
        LockedPackage(
            "doca-ofed-userspace", "3.1", "amd64", 1, "cd" * 32, "doca", "./doca-ofed-userspace_3.1_amd64.deb"
        ),
    ]
    slices = [Slice("worker", LockRequest(("x",), "", ()), tuple(locked))]
    pin = Pin("hpcx", "2.24.1", "https://x.invalid/hpcx.tbz", "ef" * 32)
    found = {
        package.name: package
        for package in list_packages(
            slices, [pin], {"libc6:amd64": "2.39", "libstdc++6:amd64": "14.1"}, {"cuda", "doca"}
        )
    }
    assert found["libstdc++6"].version == "14.2.0-19", "the base's older one was replaced"
    assert found["libstdc++6"].source == "gcc-14"
    assert found["doca-ofed-userspace"].source == ""
    assert {name: purl(package, "ubuntu", "") for name, package in found.items()} == {
        "libstdc++6": "pkg:deb/ubuntu/libstdc%2B%2B6@14.2.0-19?arch=amd64",
        "doca-ofed-userspace": "pkg:deb/doca/doca-ofed-userspace@3.1?arch=amd64",
        "libc6": "pkg:deb/ubuntu/libc6@2.39?arch=amd64",
        "hpcx": f"pkg:generic/hpcx@2.24.1?checksum=sha256:{'ef' * 32}",
    }
    assert problems(tmp_path / "image.spdx.json", make(tuple(found.values()))) == []


def test_what_has_no_word_in_spdx_stays_visible(tmp_path: Path) -> None:
    value = make((Package("git", "1", "amd64", licence="GPL-2+, mingw-runtime"),))
    entry = value["packages"][1]
    assert entry["licenseDeclared"] == NOASSERTION
    assert "mingw-runtime" in entry["licenseComments"]
    assert problems(tmp_path / "image.spdx.json", value) == []
