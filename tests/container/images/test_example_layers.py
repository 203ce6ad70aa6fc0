"""The page on a site's own layers, followed: Lmod on the images under test, from the distribution's archive."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import docker  # type: ignore[import-untyped]  # it carries no types
import pytest

from tests.container.init_pods import IMAGES
from tests.pages import blocks
from tests.reader import ROOT, checkout, follow_all

pytestmark = [pytest.mark.docker, pytest.mark.root]

PAGE = ROOT / "docs/how-to/add-layers.md"
NAMES = ("login-modules", "worker-modules")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[docker.DockerClient]:
    """Follow the page in a checkout whose example is a copy; remove its images at the end."""
    directory = checkout(tmp_path_factory.mktemp("page") / "checkout")
    (directory / "images").unlink()
    (directory / "images").mkdir()
    shutil.copytree(ROOT / "images/examples", directory / "images/examples", ignore=shutil.ignore_patterns("lock"))
    client = docker.from_env()
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "MINIVM_BUILD_PREFIX": IMAGES}
    try:
        follow_all(blocks(PAGE), env, directory)
        locks = sorted(path.name for path in directory.glob("images/examples/modules/lock/*/*.json"))
        assert locks == [f"{name}.json" for name in NAMES]
        yield client
    finally:
        for image in client.images.list():
            for reference in image.tags:
                if reference.split(":")[0].removeprefix(f"{IMAGES}/").removeprefix("layer-") in NAMES:
                    client.images.remove(reference)


def shell(engine: docker.DockerClient, name: str, script: str) -> str:
    output = engine.containers.run(f"{IMAGES}/{name}:latest", ["-lc", script], entrypoint="bash", remove=True)
    return str(output.decode())


def test_a_module_sets_the_paths_of_the_images_cuda(engine: docker.DockerClient) -> None:
    shown = shell(
        engine, "worker-modules", "module load cuda; echo $CUDA_HOME; ls $CUDA_HOME/lib64; module --terse list 2>&1"
    )
    assert shown.startswith("/usr/local/cuda\n") and "libnccl.so.2" in shown and shown.endswith("cuda/default\n")


def test_a_module_that_fits_no_hardware_of_the_image_says_what_to_do(engine: docker.DockerClient) -> None:
    assert "this image has no CUDA" in shell(engine, "login-modules", "module load cuda 2>&1 || true")


@pytest.mark.parametrize("name", NAMES)
def test_the_image_is_the_role_with_more_in_it(engine: docker.DockerClient, name: str) -> None:
    plain, more = (engine.images.get(f"{IMAGES}/{of}:latest") for of in (name.removesuffix("-modules"), name))
    assert more.attrs["Config"]["Entrypoint"] == plain.attrs["Config"]["Entrypoint"]
    assert more.attrs["Config"]["ExposedPorts"] == plain.attrs["Config"]["ExposedPorts"]
