"""Real lack of disk space: an engine of the test's own on a small disk, and a small disk under build/."""

from __future__ import annotations

import io
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from images import ImagesError
from images.archive.locked import LockRequest, Slice
from images.cli.session import Session
from images.engine.docker import DockerEngine
from images.settings import BuildSettings
from tests.container import definition
from tests.container.dockerd import SmallEngine
from tests.container.world import root_image

pytestmark = [pytest.mark.docker, pytest.mark.root, pytest.mark.cluster]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallEngine]:
    """Start an engine with room for the root image twice: loading it needs the second place."""
    engine = SmallEngine(tmp_path_factory.mktemp("engine") / "small", "320m")
    yield engine
    engine.stop()


def fat(root: Path, layer: dict[str, object], settings: BuildSettings) -> Session:
    """Make a definition with one more layer, `fat`, straight on the root, and with the repository's lock."""
    definition.copy(root, "fat")
    (root / "images/layers/fat.yaml").write_text(yaml.safe_dump({"describe": "too much", "from": "root", **layer}))
    shutil.copytree(definition.ROOT / "images/lock", root / "images/lock")
    session = Session.open(root, settings)
    session.slices["fat"] = Slice("fat", LockRequest((), "root", ()), ())
    return session


def test_a_step_that_fills_the_engines_disk_says_so_and_leaves_nothing(
    small: SmallEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machines = DockerEngine("classic")
    root = root_image(machines)
    whole = tmp_path / "root.tar"
    with whole.open("wb") as target:
        for piece in machines.save(root):
            target.write(piece)
    monkeypatch.setenv("DOCKER_HOST", small.address)
    layer: dict[str, object] = {"run": ["head -c 600M /dev/zero > /var/fat"]}
    session = fat(tmp_path / "repository", layer, BuildSettings(network="host", builder="classic"))
    with whole.open("rb") as source:
        session.engine.load(source)
    with pytest.raises(ImagesError, match="No space left on device") as caught:
        definition.rebuild(session)
    assert "cannot build layer:fat" in str(caught.value)
    assert "docker system df" in str(caught.value)
    assert [image.references for image in session.engine.images()] == [(root,)]
    assert session.engine.api.containers(all=True) == []


def test_an_image_that_does_not_fit_is_not_half_there(small: SmallEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", small.address)
    engine = DockerEngine("classic")
    before = engine.images()
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        info = tarfile.TarInfo("fat")
        info.size = 400 << 20
        tar.addfile(info, io.BytesIO(bytes(info.size)))
    data.seek(0)
    with pytest.raises(ImagesError, match="no space left on device"):
        engine.import_root(data)
    assert engine.images() == before


@pytest.fixture
def narrow(tmp_path: Path) -> Iterator[Path]:
    """Make a repository whose build/ is a disk of two megabytes."""
    root = tmp_path / "repository"
    (root / "build").mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", root / "build"], check=True)
    yield root
    subprocess.run(["umount", root / "build"], check=True)


def test_a_full_disk_under_build_is_named_and_the_engine_is_not_asked(narrow: Path) -> None:
    session = fat(narrow, {"files": [{"from": "fat", "to": "/var/fat"}]}, BuildSettings())
    (narrow / "fat").write_bytes(bytes(5 << 20))
    with pytest.raises(ImagesError, match="no space left on device") as caught:
        definition.rebuild(session)
    assert "build/" in str(caught.value)
    assert not any(name.startswith("minivm/layer-fat:") for name in session.list_present())
    assert list((narrow / "build/context").iterdir()) == []
