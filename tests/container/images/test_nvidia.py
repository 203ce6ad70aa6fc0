"""The nvidia variant's mechanics, really built, from stand-ins.

Shown: the base pinned by digest, repositories switched on with their key and priority, pinned files by checksum, Slurm
from a tarball, artifacts between images, what is declared absent. Not shown, and not claimed: that NVIDIA's own
packages install or work. No machine of the tests reaches them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from images import ImagesError
from images.archive.locked import find
from images.cli.session import Session
from images.engine.store import Chunks
from images.make.build import Maker
from images.make.plan import Composed
from images.make.progress import Plain
from images.ship.diff import Contents, read
from tests.container import definition
from tests.container.archive import repository
from tests.container.world import SLURM, World, world

pytestmark = [pytest.mark.docker, pytest.mark.root, pytest.mark.cluster]

NEEDS = ("cuda", "nccl", "rdma", "mpi", "dcgm", "containers")


@dataclass(frozen=True, slots=True)
class Built:
    world: World
    session: Session
    composed: Composed
    contents: Contents


def settings(here: World, **values: str):  # type: ignore[no-untyped-def]  # Settings, as World makes them
    return here.settings(variant="nvidia", prefix=f"{definition.PREFIX}-nvidia", **values)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Built]:
    with world(tmp_path_factory.mktemp("nvidia"), "worker-pyxis", NEEDS) as here:
        session, composed = definition.build(here.root, settings(here))
        try:
            reference = composed.role(definition.ROLE).reference
            contents = read(Chunks(session.engine.save(reference)), reference)
            yield Built(here, session, composed, contents)
        finally:
            definition.remove(session)


def labels(built: Built, key: str) -> dict[str, str]:
    found: dict[str, str] = built.session.engine.inspect(built.composed.images[key].reference)["Config"]["Labels"]
    return found


def test_every_capability_is_on_the_label_and_none_is_absent(built: Built) -> None:
    found = labels(built, "role:standin")
    assert set(NEEDS) <= set(found["io.minivm.capabilities"].split())
    assert "io.minivm.absent" not in found
    assert found["io.minivm.base"] == built.world.base


def test_the_tag_names_the_slurm_of_the_tarball_and_the_variant(built: Built) -> None:
    assert built.composed.role(definition.ROLE).tag.startswith(f"{SLURM}-nvidia-")


def test_packages_come_from_the_repository_that_the_layer_switched_on(built: Built) -> None:
    origins = {package.name: package.origin for slice_ in built.session.slices.values() for package in slice_.packages}
    assert origins["cuda-cudart-13-0"] == origins["libnccl2"] == "cuda"
    assert origins["datacenter-gpu-manager-4-cuda13"] == "cuda"
    assert origins["doca-ofed-userspace"] == "doca"
    assert origins["munge"] == "base"
    installed = {name.partition(":")[0] for name in built.contents.packages}
    assert {"cuda-cudart-13-0", "libnccl2", "datacenter-gpu-manager-4-cuda13"} <= installed
    assert {"usr/bin/enroot", "usr/lib/enroot/enroot"} <= built.contents.entries.keys()


def test_the_vendors_older_package_wins_by_its_pin(built: Built) -> None:
    """The distribution's rdma-core is newer: user space must be of the vendor's release all the same."""
    assert built.contents.packages["rdma-core:amd64"] == "24.10-doca"
    package = find(built.session.slices["fabric"].packages, "rdma-core")
    assert package is not None
    assert package.origin == "doca"


def spoilable(built: Built, tmp_path: Path) -> Session:
    """Copy the definition, unlocked, for a test to change."""
    return Session.open(definition.again(built.world.root, tmp_path / "repository"), settings(built.world))


def reopened(session: Session) -> Session:
    return Session.open(session.repository, session.settings)


def test_without_the_pin_the_newer_package_wins(built: Built, tmp_path: Path) -> None:
    """The counter-proof: it is the pin that decides."""
    session = spoilable(built, tmp_path)
    with definition.edited(session.repository / "images/versions.yaml") as versions:
        for source in versions["variants"]["nvidia"]["sources"]:
            source.pop("pin", None)
    session = reopened(session)
    session.relock([definition.ROLE])
    package = find(session.slices["fabric"].packages, "rdma-core")
    assert package is not None
    assert (package.version, package.origin) == ("50.0-ubuntu", "base")


def test_the_image_knows_the_vendors_repositories_and_their_keys(built: Built) -> None:
    entries = built.contents.entries
    assert {"etc/apt/sources.list.d/cuda.sources", "etc/apt/sources.list.d/doca.sources"} <= entries.keys()
    assert entries["etc/apt/preferences.d/doca.pref"].mode == 0o644
    keys = [path for path in entries if path.startswith("usr/share/keyrings/minivm-")]
    assert len(keys) == 2
    assert all(entries[path].mode == 0o644 for path in keys)


def test_slurm_is_what_the_tarball_made_and_its_headers_stayed_behind(built: Built) -> None:
    entries = built.contents.entries
    for path in ("usr/sbin/slurmd", "usr/bin/sinfo", "usr/lib/x86_64-linux-gnu/slurm/gpu_nvml.so"):
        assert path in entries, path
    assert "usr/lib/x86_64-linux-gnu/security/pam_slurm_adopt.so" in entries
    assert "usr/sbin/slurmctld" not in entries, "a controller's daemon on a worker"
    assert not [path for path in entries if path.startswith("usr/src/minivm/slurm")]
    names = {name.partition(":")[0] for name in built.contents.packages}
    # The compiler is there for people's own work; what only the build of Slurm needs is not.
    assert not names & {"libmunge-dev", "libmariadb-dev", "cuda-nvml-dev-13-0"}
    with built.session.engine.container(built.composed.role(definition.ROLE).reference) as container:
        data = built.session.engine.read_path(container, "/usr/share/slurm/configured").extractfile("configured")
        assert data is not None
        asked = data.read().decode().splitlines()
    assert "--with-nvml=/usr/local/cuda" in asked
    assert "--with-munge" in asked


def test_what_the_pinned_files_brought(built: Built) -> None:
    entries = built.contents.entries
    assert "opt/hpcx/ompi/bin/mpirun" in entries
    assert "opt/hpcx/sources" not in entries
    assert "usr/lib/x86_64-linux-gnu/slurm/spank_pyxis.so" in entries


def test_the_sbom_names_the_base_the_vendors_and_what_was_compiled(built: Built) -> None:
    maker = Maker(built.session.place, built.composed, built.session.engine, Plain(), "")
    value = json.loads(maker.sbom(built.composed.role(definition.ROLE)))
    found = {ref["referenceLocator"] for item in value["packages"] for ref in item.get("externalRefs", [])}
    assert any(ref.startswith("pkg:deb/doca/doca-ofed-userspace@3.1.0") for ref in found)
    assert any(ref.startswith(f"pkg:generic/slurm@{SLURM}?checksum=sha256:") for ref in found)
    assert any(ref.startswith("pkg:generic/hpcx@") for ref in found)
    assert any(ref.startswith("pkg:deb/ubuntu/libc6@") for ref in found), "nothing of the base"
    assert not any("/libmunge-dev@" in ref for ref in found), "what only the builder needs is not in the image"


def test_no_list_of_packages_and_no_key_is_left_in_any_layer(built: Built) -> None:
    left = [
        path
        for path, entry in built.contents.entries.items()
        if path.startswith(("etc/munge/munge.key", "etc/ssh/ssh_host_"))
        or (path.startswith("var/lib/apt/lists/") and entry.size > 0)
    ]
    assert left == []


def test_a_second_build_makes_nothing(built: Built) -> None:
    session = reopened(built.session)
    _, planned = session.plan([definition.ROLE])
    assert [item.image.key for item in planned if not item.present] == []


def test_a_keyring_with_another_checksum_is_refused_before_its_repository_is_asked(
    built: Built, tmp_path: Path
) -> None:
    session = spoilable(built, tmp_path)
    with definition.edited(session.repository / "images/versions.yaml") as versions:
        versions["pins"]["doca-keyring"]["sha256"] = "0" * 64
    session = reopened(session)
    before = len(built.world.doca.asked)
    with pytest.raises(ImagesError, match="checksum mismatch") as caught:
        session.relock([definition.ROLE])
    assert "doca-keyring" in str(caught.value)
    assert len(built.world.doca.asked) == before
    assert not list((session.repository / "images").glob("lock/**/*.json"))


def test_a_base_whose_digest_nobody_filled_in_is_refused(built: Built, tmp_path: Path) -> None:
    session = spoilable(built, tmp_path)
    with definition.edited(session.repository / "images/versions.yaml") as versions:
        versions["variants"]["nvidia"]["base"] = "nvidia/cuda:13.0.1-base-ubuntu24.04@sha256:to-be-filled"
    with pytest.raises(ImagesError, match="has no digest yet"):
        reopened(session).relock([definition.ROLE])


def test_a_repository_signed_by_somebody_else_is_refused(built: Built, tmp_path: Path) -> None:
    session = spoilable(built, tmp_path)
    release = built.world.doca.root / "Release"
    built.world.other_key.sign(release)
    try:
        with pytest.raises(ImagesError, match=r"(?s)cannot reach the mirror.*(NO_PUBKEY|not signed|verified)"):
            session.relock([definition.ROLE])
    finally:
        built.world.key.sign(release)


def test_a_package_that_changed_under_its_version_is_named(built: Built) -> None:
    """The vendor put other bytes under a version that is locked."""
    old = next(package for package in built.world.packages.doca if package.name == "doca-ofed-userspace")
    changed = replace(old, files={**old.files, "usr/share/doc/changed": "yes\n"})
    others = [package for package in built.world.packages.doca if package.name != old.name]
    repository(built.world.doca.root, [*others, changed], built.world.key)
    try:
        session = reopened(built.session)
        composed = session.compose([definition.ROLE])
        gone = [str(item) for item in session.list_vanished_packages(composed.list_needed([definition.ROLE]))]
        assert len(gone) == 1
        assert "doca-ofed-userspace 3.1.0 (layer fabric): checksum mismatch" in gone[0]
    finally:
        repository(built.world.doca.root, [*others, old], built.world.key)


def test_a_tarball_with_another_checksum_builds_nothing(built: Built, tmp_path: Path) -> None:
    session = spoilable(built, tmp_path)
    with definition.edited(session.repository / "images/versions.yaml") as versions:
        versions["pins"]["hpcx"]["sha256"] = "0" * 64
    session = reopened(session)
    session.relock([definition.ROLE])
    before = definition.present(session)
    with pytest.raises(ImagesError, match="checksum mismatch") as caught:
        definition.rebuild(session)
    assert "hpcx" in str(caught.value)
    assert definition.present(session) == before


def test_what_the_variant_cannot_is_on_the_label_with_the_reason(built: Built, tmp_path: Path) -> None:
    session = spoilable(built, tmp_path)
    with definition.edited(session.repository / "images/layers/dcgm.yaml") as layer:
        del layer["provides"]
    with definition.edited(session.repository / "images/versions.yaml") as versions:
        versions["variants"]["nvidia"]["absent"] = {"dcgm": "this site monitors from outside"}
    session = reopened(session)
    session.relock([definition.ROLE])
    composed = definition.rebuild(session)
    found = session.engine.inspect(composed.role(definition.ROLE).reference)["Config"]["Labels"]
    assert json.loads(found["io.minivm.absent"]) == {"dcgm": "this site monitors from outside"}
    assert "dcgm" not in found["io.minivm.capabilities"].split()
