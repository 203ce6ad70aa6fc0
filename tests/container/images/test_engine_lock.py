"""The lock against an archive that moves: a signed repository of stand-ins on loopback, and the command line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from images.engine.docker import DockerEngine
from tests.container import definition
from tests.container.archive import Key, Site, Standin, repository, served
from tests.container.world import root_image

pytestmark = [pytest.mark.docker, pytest.mark.root]

SOURCES = "deb [signed-by=/usr/share/keyrings/site.asc] {url} stable main\n"
DOCKERFILE = """FROM {root}
ADD site.list /etc/apt/sources.list
ADD site.asc /usr/share/keyrings/site.asc
RUN chmod 644 /etc/apt/sources.list /usr/share/keyrings/site.asc
"""


def tool(version: str) -> Standin:
    return Standin("tool", version, {"/usr/bin/tool": f"#!/bin/sh\necho {version}\n"})


class Archive:
    """A repository, a base image that names it, and a definition that installs from it."""

    def __init__(self, directory: Path, key: Key, engine: DockerEngine) -> None:
        self.directory, self.key, self.engine = directory, key, engine
        self.web, self.root = directory / "web", directory / "repository"
        self.prefix = f"minivm-test-lock-{os.getpid()}"
        self.base = f"{self.prefix}/base:stand-in"
        images = self.root / "images"
        for name in ("layers", "roles", "rootfs/one/etc"):
            (images / name).mkdir(parents=True)
        shutil.copytree(definition.ROOT / "images/templates", images / "templates")
        for name in ("versions.yaml", "slurm.yaml", "make/sbom.py"):
            (images / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(definition.ROOT / "images" / name, images / name)
        shutil.copyfile(definition.ROOT / "build.py", self.root / "build.py")
        (images / "layers/root.yaml").write_text(yaml.safe_dump({"describe": "the base", "bootstrap": {}}))
        (images / "roles/small.yaml").write_text(yaml.safe_dump({"describe": "x", "layer": "one", "code": False}))
        self.packages("tool")

    def packages(self, *names: str) -> None:
        text = {"describe": "the layer one", "from": "root", "packages": list(names)}
        (self.root / "images/layers/one.yaml").write_text(yaml.safe_dump(text))

    def publish(self, *packages: Standin) -> None:
        """Replace the archive's packages by these."""
        shutil.rmtree(self.web, ignore_errors=True)
        repository(self.web, packages, self.key, suite="stable", scratch=self.directory / "scratch")

    def touch(self, text: str) -> None:
        (self.root / "images/rootfs/one/etc/one.conf").write_text(text)

    def make_base(self, site: Site) -> None:
        with tempfile.TemporaryDirectory() as name:
            context = Path(name)
            (context / "Dockerfile").write_text(DOCKERFILE.format(root=root_image(self.engine)))
            (context / "site.list").write_text(SOURCES.format(url=site.url))
            (context / "site.asc").write_text(self.key.public())
            self.engine.tag(self.engine.builder.build(context, {}, "", lambda line: None), self.base)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        settings = [f"prefix={self.prefix}", f"base_image={self.base}", "network=host"]
        given = [part for setting in settings for part in ("--set", setting)]
        command = [sys.executable, str(self.root / "build.py"), *given, *arguments]
        environment = {**os.environ, "PYTHONPATH": str(definition.ROOT)}
        return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)

    def says(self) -> str:
        """Return the output of the tool in the newest image."""
        made = self.engine.client.containers.run(f"{self.prefix}/small:latest", ["/usr/bin/tool"], remove=True)
        return str(made.decode().strip())


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Key]:
    made = Key(tmp_path_factory.mktemp("key") / "gpg")
    yield made
    made.stop()


@pytest.fixture
def archive(tmp_path: Path, key: Key) -> Iterator[Archive]:
    engine = DockerEngine()
    made = Archive(tmp_path, key, engine)
    made.publish(tool("1.0"))
    with served(made.web) as site:
        made.make_base(site)
        yield made
    for image in engine.images():
        for name in image.references:
            if name.startswith(f"{made.prefix}/"):
                engine.remove(name)


def test_a_lock_that_was_never_made_is_asked_for_or_made(archive: Archive) -> None:
    refused = archive.run("build")
    assert refused.returncode == 1
    assert "the lock does not fit" in refused.stderr
    assert "build.py lock" in refused.stderr
    built = archive.run("build", "--when-vanished", "relock")
    assert built.returncode == 0, built.stderr
    assert "one: tool not there -> 1.0" in built.stdout
    assert archive.says() == "1.0"
    again = archive.run("build", "--json")
    assert not any(image["built"] for image in json.loads(again.stdout))


def test_the_locked_version_is_installed_though_a_newer_one_is_there(archive: Archive) -> None:
    assert archive.run("lock").returncode == 0
    archive.publish(tool("1.0"), tool("1.1"))
    built = archive.run("build")
    assert built.returncode == 0, built.stderr
    assert archive.says() == "1.0"


def test_a_package_that_vanished_is_named_and_relocked_only_when_asked(archive: Archive) -> None:
    assert archive.run("build", "--when-vanished", "relock").returncode == 0
    archive.publish(tool("1.1"))
    assert archive.run("build").returncode == 0, "what is there needs no archive"
    archive.touch("changed\n")
    for command in (("build",), ("lock", "--check")):
        refused = archive.run(*command)
        assert refused.returncode == 1
        assert "tool 1.0 (layer one): gone, the archive has 1.1" in refused.stderr
    assert archive.says() == "1.0"
    built = archive.run("build", "--when-vanished", "relock")
    assert built.returncode == 0, built.stderr
    assert "RESOLVING ANEW" in built.stdout
    assert "one: tool 1.0 -> 1.1" in built.stdout
    assert archive.says() == "1.1"
    assert "archive has every locked package" in archive.run("lock", "--check").stdout


def test_a_package_that_does_not_exist_gets_the_nearest_name(archive: Archive) -> None:
    archive.packages("tol")
    refused = archive.run("lock")
    assert refused.returncode == 1
    assert "package not found: tol (images/layers/one.yaml, packages)" in refused.stderr
    assert "did you mean 'tool'?" in refused.stderr


def test_plan_names_the_lock_when_the_lock_changed(archive: Archive) -> None:
    assert archive.run("build", "--when-vanished", "relock").returncode == 0
    archive.publish(tool("1.1"))
    assert archive.run("lock").returncode == 0
    planned = {item["image"].partition(":")[0].rpartition("/")[2]: item
               for item in json.loads(archive.run("plan", "--json").stdout)}  # fmt: skip
    assert planned["layer-root"]["present"]
    assert planned["layer-one"]["changed"] == ["lock"]
    assert planned["small"]["changed"] == ["parent layer:one"]


def test_packages_are_kept_between_builds_where_that_is_set(archive: Archive, tmp_path: Path) -> None:
    assert archive.run("lock").returncode == 0
    kept = ("--set", f"apt_cache={tmp_path}/kept")
    built = archive.run(*kept, "build")
    assert built.returncode == 0, built.stderr
    assert len(list((tmp_path / "kept").iterdir())) == 1
    shutil.rmtree(archive.web / "pool")
    archive.touch("changed\n")
    built = archive.run(*kept, "build")
    assert built.returncode == 0, built.stdout + built.stderr


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Return a site's own directory: one layer on a layer of the repository, and a role with it."""
    site = tmp_path / "site"
    for name in ("layers", "roles", "rootfs/extra/etc"):
        (site / name).mkdir(parents=True)
    layer = {"describe": "the site's layer", "from": "one", "packages": ["extra"],
             "files": [{"from": "hello", "to": "/etc/hello"}]}  # fmt: skip
    (site / "layers/extra.yaml").write_text(yaml.safe_dump(layer))
    role = {"describe": "the site's image", "extends": "small", "layer": "extra", "env": {"SITE": "here"}}
    (site / "roles/large.yaml").write_text(yaml.safe_dump(role))
    (site / "hello").write_text("hello\n")
    (site / "rootfs/extra/etc/site.conf").write_text("rootfs\n")
    return site


def test_a_sites_layers_are_built_on_the_repositorys_and_locked_in_its_own_directory(
    archive: Archive, site: Path
) -> None:
    extra = Standin("extra", "2.0", {"/usr/bin/extra": "#!/bin/sh\ncat /etc/hello /etc/site.conf; echo $SITE\n"})
    archive.publish(tool("1.0"), extra)
    assert archive.run("build", "--when-vanished", "relock").returncode == 0
    before = {path: path.read_bytes() for path in archive.root.rglob("images/lock/**/*.json")}
    # A newer version of a package below: the site's lock leaves the repository's as it is.
    archive.publish(tool("1.0"), tool("1.1"), extra)

    refused = archive.run("--layers", str(site), "build")
    assert refused.returncode == 1 and "the lock does not fit" in refused.stderr
    locked = archive.run("--layers", str(site), "lock")
    assert locked.returncode == 0, locked.stderr
    assert {path: path.read_bytes() for path in archive.root.rglob("images/lock/**/*.json")} == before
    assert [path.name for path in site.glob("lock/*/*.json")] == ["extra.json"]

    built = archive.run("--layers", str(site), "build", "--json")
    assert built.returncode == 0, built.stderr
    images = [image["image"].split(":")[0].rpartition("/")[2] for image in json.loads(built.stdout) if image["built"]]
    assert sorted(images) == ["large", "layer-extra"]
    shown = archive.engine.client.containers.run(f"{archive.prefix}/large:latest", ["/usr/bin/extra"], remove=True)
    assert shown.decode() == "hello\nrootfs\nhere\n"


def test_a_sites_layer_with_a_name_of_the_repository_is_refused(archive: Archive, site: Path) -> None:
    (site / "layers/extra.yaml").rename(site / "layers/one.yaml")
    refused = archive.run("--layers", str(site), "list")
    assert refused.returncode == 1
    assert (
        "images/layers/one.yaml has this name already" in refused.stderr and f"{site}/layers/one.yaml" in refused.stderr
    )
    refused = archive.run("--layers", f"{site}/layers", "list")
    assert refused.returncode == 1 and "found neither layers/ nor roles/ in it" in refused.stderr
