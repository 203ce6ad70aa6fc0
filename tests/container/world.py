"""The world of a build that reaches nothing real: a base image, its distribution and the vendors, all stand-ins.

Each repository has a loopback address of its own, because apt tells repositories apart by their host.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from images.cli.session import Session
from images.definition.load import load
from images.engine.docker import DockerEngine
from images.settings import BuildSettings
from images.ship.push import push
from tests.container import definition, standins
from tests.container.archive import Key, Site, repository, served, sha256
from tests.container.registryd import REPOSITORY, Registryd

SLURM = "25.05.4"
SOURCES = """Types: deb
URIs: {url}
Suites: noble
Components: main
Signed-By: /usr/share/keyrings/ubuntu-archive-keyring.gpg
"""
DOCKERFILE = """FROM {root}
ADD ubuntu.sources /etc/apt/sources.list.d/ubuntu.sources
ADD key.asc /usr/share/keyrings/ubuntu-archive-keyring.asc
RUN rm -f /etc/apt/sources.list && sed -i s/keyring.gpg/keyring.asc/ /etc/apt/sources.list.d/ubuntu.sources \\
    && chmod 644 /etc/apt/sources.list.d/ubuntu.sources /usr/share/keyrings/ubuntu-archive-keyring.asc
"""


@dataclass(frozen=True, slots=True)
class World:
    """Places of the stand-in world; `root` is the repository of the definition under test."""

    root: Path
    base: str
    ubuntu: Site
    cuda: Site
    doca: Site
    files: Site
    key: Key
    other_key: Key
    packages: standins.Repositories

    def settings(self, **values: str) -> BuildSettings:
        # The build steps must reach this machine's loopback.
        return BuildSettings(network="host", **values)


def root_image(engine: DockerEngine) -> str:
    """Return the first layer, as `make images` built it: a small system in which apt works."""
    session = Session.open(definition.ROOT, BuildSettings())
    found = session.compose(["worker"]).images["layer:root"].reference
    assert engine.has(found), f"no image {found}; `make images` builds it"
    return found


@contextlib.contextmanager
def world(directory: Path, layer: str, needs: tuple[str, ...]) -> Iterator[World]:
    """Everything made, served, and stopped again."""
    root = definition.copy(directory / "repository", layer, needs)
    asked = {name for item in load(root).layers.values() for name in item.packages.everything()}
    # What the base is made of is real.
    real = {package.name for package in Session.open(definition.ROOT, BuildSettings()).slices["root"].packages}
    made = standins.repositories(asked - real)
    key, other = Key(directory / "gpg"), Key(directory / "other-gpg")
    web = directory / "web"
    repository(web / "ubuntu", made.ubuntu, key, suite="noble")
    repository(web / "cuda", made.cuda, key)
    repository(web / "doca", made.doca, key)
    (web / "files").mkdir()
    engine = DockerEngine("classic")
    registry = Registryd(directory / "registry", auth={})
    registry.start()
    try:
        with contextlib.ExitStack() as stack:
            sites = [
                stack.enter_context(served(web / name, f"127.0.0.{number}"))
                for number, name in enumerate(("ubuntu", "cuda", "doca", "files"), start=11)
            ]
            base = base_image(engine, registry, sites[0], key)
            stack.callback(engine.remove, base)
            yield describe(World(root, base, sites[0], sites[1], sites[2], sites[3], key, other, made))
    finally:
        registry.kill()
        key.stop()
        other.stop()
        engine.client.close()


def base_image(engine: DockerEngine, registry: Registryd, ubuntu: Site, key: Key) -> str:
    """Build the stand-in of the vendor's base, in a registry, named by digest."""
    with tempfile.TemporaryDirectory() as directory:
        context = Path(directory)
        (context / "Dockerfile").write_text(DOCKERFILE.format(root=root_image(engine)))
        (context / "ubuntu.sources").write_text(SOURCES.format(url=ubuntu.url))
        (context / "key.asc").write_text(key.public())
        built = engine.builder.build(context, {}, "", lambda line: None)
    name = f"{definition.PREFIX}-base:stand-in"
    engine.tag(built, name)
    try:
        return push(engine, name, registry.place, REPOSITORY, "stand-in", None).reference
    finally:
        engine.untag(name)


def describe(world: World) -> World:
    """versions.yaml as a site would fill it in: addresses, checksums, the base's digest."""
    files = world.files.root
    (files / "key.pub").write_text(world.key.public())
    pinned = {
        "slurm": standins.slurm(files / f"slurm-{SLURM}.tar.gz", SLURM),
        "pyxis": standins.pyxis(files / "pyxis.tar.gz"),
        "hpcx": standins.hpcx(files / "hpcx.tbz"),
        "enroot": standins.enroot(files / "enroot.tar.gz"),
        "cuda-keyring": files / "key.pub",
        "doca-keyring": files / "key.pub",
    }
    with definition.edited(world.root / "images/versions.yaml") as versions:
        for name, path in pinned.items():
            versions["pins"][name].pop("commit", None)
            versions["pins"][name] |= {"url": f"{world.files.url}/{path.name}", "sha256": sha256(path)}
        versions["pins"]["slurm"]["version"] = SLURM
        variant = versions["variants"]["nvidia"]
        variant["base"] = world.base
        for source, site in zip(variant["sources"], (world.cuda, world.doca), strict=True):
            source["uri"] = site.url
    return world
