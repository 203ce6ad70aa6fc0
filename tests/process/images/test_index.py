"""One tag for several architectures in a real registry: made of the images there, each part verified."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from images import ImagesError
from images.cli.publish import push_index
from images.engine.store import MANIFEST
from images.ship import provenance, push
from images.ship.provenance import Build
from images.ship.push import Pushed
from images.ship.registry import Registry, RegistryError
from tests.container.registryd import PUSHER

ROOT = Path(__file__).resolve().parents[3]
TAGS = {"amd64": ("24.11.5-debian-0123456789ab", "ab" * 32), "arm64": ("24.11.5-debian-arm64-ba9876543210", "cd" * 32)}


@pytest.fixture
def builder(tmp_path: Path) -> Path:
    path = tmp_path / "builder"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "builder", "-f", str(path)], check=True)
    kind, public = path.with_suffix(".pub").read_text().split()[:2]
    (tmp_path / "signers").write_text(f'builder@site namespaces="{provenance.NAMESPACE}" {kind} {public}\n')
    return path


def pushed(registry: Registry, arch: str) -> Pushed:
    """Push one architecture's image as a real push leaves it."""
    config = json.dumps({"architecture": arch, "os": "linux"}).encode()
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": provenance.put_blob(registry, "application/vnd.oci.image.config.v1+json", config),
        "layers": [],
    }
    tag = TAGS[arch][0]
    provenance.put_manifest(registry, tag, MANIFEST, json.dumps(manifest).encode())
    there = provenance.read_subject(registry, tag)
    return Pushed(f"x@{there['digest']}", tag, there["digest"], 1, 0, 100)


def both(registry: Registry) -> Pushed:
    return push_index(registry, TAGS, {arch: pushed(registry, arch) for arch in TAGS})


def attach(registry: Registry, image: Mapping[str, Any], builder: Path, arch: str) -> None:
    tag, inputs = TAGS[arch]
    build = Build({"role": "worker", "arch": arch}, inputs, tag, {}, "1234abcd")
    said = provenance.make_statement(build, "worker", image["digest"])
    provenance.attach(registry, image, provenance.TYPE, provenance.sign(said, builder))


def verify(registry: Registry, tag: str, signers: Path, *more: str) -> subprocess.CompletedProcess[str]:
    words = ["--user", PUSHER.user, "--password-stdin", "--signers", str(signers), *more]
    reference = f"{registry.place.host}/{registry.repository}:{tag}"
    return subprocess.run([sys.executable, "build.py", "verify", *words, reference], cwd=ROOT,
                          input=f"{PUSHER.password}\n", capture_output=True, text=True, check=False)  # fmt: skip


def test_one_tag_names_the_image_of_each_machine(registry: Registry) -> None:
    made = both(registry)
    tag = made.tag.rpartition(":")[2]
    there = provenance.read_subject(registry, tag)
    found = push.list_images(registry, there)
    assert there["digest"] == made.digest and made.reference.endswith(f"/worker@{made.digest}")
    for arch, image in found.items():
        config = registry.read_config(registry.read_manifest(image["digest"]).config)
        assert config["architecture"] == arch
    assert set(found) == {"amd64", "arm64"}


def test_the_tag_is_a_hash_of_both_and_says_what_they_have_in_common() -> None:
    tag = push.make_tag(TAGS)
    assert tag == push.make_tag(dict(reversed(TAGS.items())))
    assert tag.startswith("24.11.5-debian-") and len(tag.rpartition("-")[2]) == 12
    assert tag != push.make_tag({**TAGS, "arm64": (TAGS["arm64"][0], "ef" * 32)})


def test_two_releases_of_slurm_are_not_put_under_one_tag() -> None:
    with pytest.raises(ImagesError, match=r"they differ: 24\.11\.5-debian, 26\.05\.5-debian"):
        push.make_tag({**TAGS, "arm64": ("26.05.5-debian-arm64-ba9876543210", "cd" * 32)})


def test_pushed_again_it_is_the_same_index(registry: Registry) -> None:
    assert both(registry) == both(registry)


def test_an_index_is_believed_if_each_image_in_it_is(registry: Registry, builder: Path, tmp_path: Path) -> None:
    tag = both(registry).tag.rpartition(":")[2]
    there = push.list_images(registry, provenance.read_subject(registry, tag))
    attach(registry, there["amd64"], builder, "amd64")
    done = verify(registry, tag, tmp_path / "signers")
    assert done.returncode == 1 and "arm64: no provenance is attached" in done.stderr
    attach(registry, there["arm64"], builder, "arm64")
    done = verify(registry, tag, tmp_path / "signers", "--json")
    assert done.returncode == 0, done.stderr
    assert [item["signer"] for item in json.loads(done.stdout)["images"]] == ["builder@site"] * 2


def test_a_tag_that_is_a_hash_leads_to_what_it_is_a_hash_of(registry: Registry, builder: Path, tmp_path: Path) -> None:
    """A user with push rights may move the tag to another index of rightly signed images, for instance an older one."""
    right = both(registry).tag.rpartition(":")[2]
    there = push.list_images(registry, provenance.read_subject(registry, right))
    for arch, image in there.items():
        attach(registry, image, builder, arch)
    moved = "24.11.5-debian-000000000000"
    push.put_index(registry, moved, there)
    push.put_index(registry, "the-sites-own", there)
    assert verify(registry, "the-sites-own", tmp_path / "signers").returncode == 0
    done = verify(registry, moved, tmp_path / "signers")
    assert done.returncode == 1
    assert f"this tag belongs to another build: what it leads to was built as {right}" in done.stderr


def test_an_image_under_another_machines_name_is_told(registry: Registry, builder: Path, tmp_path: Path) -> None:
    """Each signed, and the index made by somebody who may push: the wrong one would run by emulation, or not at all."""
    images = {arch: provenance.read_subject(registry, pushed(registry, arch).digest) for arch in TAGS}
    for arch, image in images.items():
        attach(registry, image, builder, arch)
    push.put_index(registry, "swapped", {"amd64": images["arm64"], "arm64": images["amd64"]})
    done = verify(registry, "swapped", tmp_path / "signers")
    assert done.returncode == 1 and "what is named for amd64 was built for arm64" in done.stderr


@pytest.mark.parametrize(
    "platforms",
    [
        [{"architecture": "amd64"}, {"architecture": "amd64"}],
        [{"architecture": "amd64"}, {"architecture": "amd64", "variant": "v3"}],
        [{"architecture": "amd64"}, None],
        [{}],
        [],
        [{"architecture": f"a{number}"} for number in range(65)],
    ],
    ids=["twice", "a variant", "one without", "of nothing", "empty", "one too many to look at"],
)
def test_an_index_that_does_not_say_what_is_for_whom_is_refused(
    registry: Registry, platforms: list[Mapping[str, str] | None]
) -> None:
    image = provenance.read_subject(registry, pushed(registry, "amd64").digest)
    listed = [image if platform is None else {**image, "platform": platform} for platform in platforms]
    data = json.dumps({"schemaVersion": 2, "mediaType": provenance.INDEX, "manifests": listed}).encode()
    provenance.put_manifest(registry, "odd", provenance.INDEX, data)
    with pytest.raises(
        RegistryError, match=r"names no image|names 65 images|does not say once of each image what it is for"
    ):
        push.list_images(registry, provenance.read_subject(registry, "odd"))
