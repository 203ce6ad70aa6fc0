"""Slurm from a tarball: any tarball, checksum verified, configured, made, installed, and taken apart by role.

The tarball is a stand-in that behaves as autotools' do; docs/nvidia-variant.md records a run with a real one.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from images import ImagesError
from images.cli.session import Session
from images.engine.store import Chunks
from images.make.plan import Composed
from images.settings import BuildSettings
from images.ship.diff import Contents, read
from tests.container import definition, standins
from tests.container.archive import sha256
from tests.container.world import World, world

pytestmark = [pytest.mark.docker, pytest.mark.root, pytest.mark.cluster]

VERSION = "26.11.0"


@dataclass(frozen=True, slots=True)
class Built:
    world: World
    session: Session
    composed: Composed
    tarball: Path

    def contents(self) -> Contents:
        reference = self.composed.role(definition.ROLE).reference
        return read(Chunks(self.session.engine.save(reference)), reference)


def settings(here: World, tarball: Path, **changed: str) -> BuildSettings:
    """Debian's definition on a base of the site's, with Slurm from the site's tarball."""
    chosen = BuildSettings(
        prefix=f"{definition.PREFIX}-source",
        network="host",
        slurm="source",
        slurm_tarball=str(tarball),
        slurm_version=VERSION,
        slurm_sha256=sha256(tarball),
        base_image=here.base,
    )
    return replace(chosen, **changed)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Built]:
    with world(tmp_path_factory.mktemp("source"), "slurm-common", ()) as here:
        tarball = standins.slurm(here.root / f"slurm-{VERSION}.tar.gz", VERSION)
        session, composed = definition.build(here.root, settings(here, tarball))
        try:
            yield Built(here, session, composed, tarball)
        finally:
            definition.remove(session)


def test_the_tag_and_the_program_say_the_tarballs_version(built: Built) -> None:
    assert built.composed.role(definition.ROLE).tag.startswith(f"{VERSION}-debian-")
    with built.session.engine.container(built.composed.role(definition.ROLE).reference) as container:
        data = built.session.engine.read_path(container, "/usr/bin/sinfo").extractfile("sinfo")
        assert data is not None
        assert f"slurm {VERSION}" in data.read().decode()


def test_nothing_of_the_distributions_slurm_is_installed(built: Built) -> None:
    names = {package.name for slice_ in built.session.slices.values() for package in slice_.packages}
    assert not {name for name in names if name.startswith("slurm")}


def test_daemons_stay_with_their_roles_and_headers_and_compiler_with_the_builder(built: Built) -> None:
    contents = built.contents()
    assert "usr/bin/sbatch" in contents.entries
    assert "usr/lib/x86_64-linux-gnu/slurm/auth_munge.so" in contents.entries
    for path in ("usr/sbin/slurmctld", "usr/sbin/slurmd", "usr/sbin/sackd", "usr/include/slurm/slurm.h"):
        assert path not in contents.entries, path
    assert not {"gcc:amd64", "make:amd64"} & contents.packages.keys()


def test_a_tarball_of_another_checksum_is_not_unpacked(built: Built, tmp_path: Path) -> None:
    tarball = tmp_path / built.tarball.name
    shutil.copyfile(built.tarball, tarball)
    with tarball.open("ab") as file:
        file.write(b"\0")
    root = definition.again(built.world.root, tmp_path / "repository")
    chosen = settings(built.world, tarball, slurm_sha256=sha256(built.tarball), prefix=f"{definition.PREFIX}-bad")
    session = Session.open(root, chosen)
    session.relock([definition.ROLE])
    try:
        with pytest.raises(ImagesError, match="checksum mismatch") as caught:
            definition.rebuild(session)
        assert sha256(built.tarball) in str(caught.value)
        assert "(slurm_tarball)" in str(caught.value), "and not versions.yaml, in which it is not"
        assert not [name for name in definition.present(session) if "slurm-build" in name]
    finally:
        definition.remove(session)


def test_another_tarball_is_another_image(built: Built, tmp_path: Path) -> None:
    tarball = standins.slurm(tmp_path / "slurm.tar.gz", "26.11.1")
    session = Session.open(built.world.root, settings(built.world, tarball))
    other = session.compose([definition.ROLE])
    assert other.role(definition.ROLE).hash != built.composed.role(definition.ROLE).hash
    assert other.images["layer:os"].hash == built.composed.images["layer:os"].hash


@pytest.mark.parametrize("said", ["26.05.3", "26.11.01", "26.11"])
def test_a_tarball_of_another_version_than_it_is_said_to_be_is_not_compiled(
    built: Built, tmp_path: Path, said: str
) -> None:
    root = definition.again(built.world.root, tmp_path / "repository")
    session = Session.open(root, settings(built.world, built.tarball, slurm_version=said))
    session.relock([definition.ROLE])
    before = definition.present(session)
    with pytest.raises(ImagesError, match=f"the tarball is Slurm {VERSION}, and not {said}"):
        definition.rebuild(session)
    assert definition.present(session) == before


@pytest.mark.parametrize("missing", ["slurm_sha256", "slurm_version"])
def test_a_tarball_without_its_checksum_or_version_is_refused(built: Built, missing: str) -> None:
    session = Session.open(built.world.root, settings(built.world, built.tarball, **{missing: ""}))
    with pytest.raises(ImagesError, match="slurm_sha256 and slurm_version must say what it is"):
        session.compose([definition.ROLE])


def test_a_tarball_whose_configure_fails_shows_its_last_words(built: Built, tmp_path: Path) -> None:
    files = {"configure": "#!/bin/sh\necho 'configure: error: unable to locate munge'\nexit 1\n"}
    files["META"] = standins.META.format(VERSION)
    tarball = standins.tarball(tmp_path / "broken.tar.gz", "broken", files)
    root = definition.again(built.world.root, tmp_path / "repository")
    session = Session.open(root, settings(built.world, tarball))
    session.relock([definition.ROLE])
    before = definition.present(session)
    with pytest.raises(ImagesError, match="unable to locate munge") as caught:
        definition.rebuild(session)
    assert "cannot build layer:slurm-build" in str(caught.value)
    assert definition.present(session) == before
