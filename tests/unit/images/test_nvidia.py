"""Layers of the nvidia variant, rendered and compared with tests/golden/nvidia/.

Run with MINIVM_GOLDEN=write after an intended change, and read the difference before committing it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from images import ImagesError
from images.archive.fetch import fetch
from images.archive.lock import LockContext, list_wanted
from images.archive.locked import Slice
from images.definition.load import active_chain, capabilities, load, read_yaml
from images.definition.spec import UNFILLED, BuildChoice, Definition, SlurmSource
from images.make import plan
from images.make.compose import Composer, fetch_files
from images.make.plan import PlannedImage
from images.settings import BuildSettings

ROOT = Path(__file__).resolve().parents[3]
GOLDEN = ROOT / "tests/golden/nvidia"
NVIDIA = BuildChoice("nvidia", SlurmSource.SOURCE, release="26.05")
LAYERS = ("root", "slurm-build", "cuda", "nccl", "fabric", "dcgm", "pyxis-build", "worker-pyxis", "worker-devel")


@pytest.fixture(scope="module")
def place() -> LockContext:
    return LockContext(ROOT, load(ROOT), NVIDIA, BuildSettings(variant="nvidia"))


@pytest.fixture(scope="module")
def images(place: LockContext) -> Mapping[str, PlannedImage]:
    roles = [role.layer for role in place.definition.roles.values()]
    slices = {want.layer.name: Slice(want.layer.name, want.request, ()) for want in list_wanted(place, roles)}
    return Composer(place, slices, read_yaml).compose([f"layer:{layer}" for layer in roles]).images


def rendered(image: PlannedImage, definition: Definition) -> str:
    """Return the Dockerfile and the layer's inputs: packages, downloads, artifacts of other layers and sources."""
    layer = definition.layers[image.name]
    text = plan.render_dockerfile(image.step, ROOT / "images/templates")
    # The parent's tag is a hash of everything below it; this test depends only on which image is the parent.
    text = text.replace(f"FROM {image.step.base}", f"FROM {image.parent or 'the vendor base'}")
    lists = {
        "packages": sorted(layer.packages.of(NVIDIA)),
        "downloads": sorted(layer.downloads.of(NVIDIA)),
        "artifacts": [f"{a.layer}:{a.source} -> {a.to}" for a in layer.artifacts.of(NVIDIA)],
        "sources": sorted(layer.sources.of(NVIDIA)),
    }
    return text + "".join(f"\n# {name}\n" + "".join(f"# - {item}\n" for item in items) for name, items in lists.items())


@pytest.mark.parametrize("name", LAYERS)
def test_the_layer_renders_as_recorded(name: str, place: LockContext, images: Mapping[str, PlannedImage]) -> None:
    text = rendered(images[f"layer:{name}"], place.definition)
    path = GOLDEN / f"{name}.Dockerfile"
    if os.environ.get("MINIVM_GOLDEN") == "write":
        path.write_text(text)
    assert text == path.read_text(), f"{name} renders differently; MINIVM_GOLDEN=write records it"


def test_the_vendors_repositories_arrive_with_their_priority_and_only_with_their_key(
    images: Mapping[str, PlannedImage], place: LockContext
) -> None:
    image = images["layer:fabric"]
    entries = {entry.path: entry for entry in image.entries}
    assert (
        "Signed-By: /usr/share/keyrings/minivm-doca.asc"
        in entries["etc/apt/sources.list.d/doca.sources"].read().decode()
    )
    assert "Pin-Priority: 1001" in entries["etc/apt/preferences.d/doca.pref"].read().decode()
    # The checksum of the repository key is an input of the image, so another key gives another image.
    assert "key of doca" in image.inputs
    if place.definition.versions.pins["doca-keyring"].sha256 == UNFILLED:
        with pytest.raises(ImagesError, match="has no checksum yet"):
            fetch_files(image, place)


def test_every_capability_is_provided_or_declared_absent_with_a_reason(place: LockContext) -> None:
    definition = place.definition
    for role in definition.roles.values():
        provided, absent = capabilities(definition, role, NVIDIA)
        assert set(role.needs) <= provided | absent.keys()
        _, debian_absent = capabilities(definition, role, BuildChoice("debian", SlurmSource.PACKAGE, release="24.11"))
        assert all(reason.strip() for reason in (*absent.values(), *debian_absent.values()))
    provided, absent = capabilities(definition, definition.roles["worker-pyxis"], NVIDIA)
    assert {"cuda", "nccl", "rdma", "mpi", "dcgm", "containers"} <= provided
    assert not absent
    _, absent = capabilities(definition, definition.roles["worker"], NVIDIA)
    assert set(absent) == {"containers"}
    _, debian_absent = capabilities(
        definition, definition.roles["worker"], BuildChoice("debian", SlurmSource.PACKAGE, release="24.11")
    )
    assert set(debian_absent) == {"dcgm", "containers"}


def test_a_capability_that_a_variant_neither_has_nor_declares_absent_is_refused(place: LockContext) -> None:
    variants = dict(place.definition.versions.variants)
    variants["debian"] = replace(variants["debian"], absent={"containers": "none"})
    definition = replace(place.definition, versions=replace(place.definition.versions, variants=variants))
    with pytest.raises(ImagesError, match="neither provides 'dcgm' in the layers of 'worker' nor declares it absent"):
        capabilities(
            definition, definition.roles["worker"], BuildChoice("debian", SlurmSource.PACKAGE, release="24.11")
        )


def test_the_debian_variant_takes_nothing_of_the_vendors(place: LockContext) -> None:
    debian = BuildChoice("debian", SlurmSource.PACKAGE, release="24.11")
    for role in place.definition.roles.values():
        for layer in active_chain(place.definition, role.layer, debian):
            assert not layer.sources.of(debian), f"{layer.name} switches on a vendor's repository"
            assert not layer.downloads.of(debian), f"{layer.name} downloads from outside Debian"


def test_a_file_whose_checksum_nobody_filled_in_is_never_fetch_files(place: LockContext, tmp_path: Path) -> None:
    unfilled = [pin for pin in place.definition.versions.pins.values() if pin.sha256 == UNFILLED]
    for pin in unfilled:
        with pytest.raises(ImagesError, match="has no checksum yet"):
            fetch(pin, tmp_path, BuildSettings())
    assert list(tmp_path.iterdir()) == []
