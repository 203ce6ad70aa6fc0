"""An image's provenance in a real registry: attached, found again, and believed for the right reasons alone.

Debian's docker-registry on loopback, ssh's own keys; the image is a small one, put there without an engine.
"""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from images import ImagesError, architectures
from images.cli.publish import attach_provenance
from images.cli.session import Session
from images.engine.store import MANIFEST
from images.settings import BuildSettings
from images.ship import provenance
from images.ship.provenance import Build
from images.ship.registry import Registry, RegistryError
from tests.container.registryd import PUSHER, Registryd

ROOT = Path(__file__).resolve().parents[3]
PARAMETERS = {"role": "worker", "variant": "debian", "slurm": "package 24.11", "cuda": "13.5"}


BUILD = Build(PARAMETERS, "ab" * 32, "1", {"slurm-client=24.11.5-4": "cd" * 32, "engine format": "1"}, "1234abcd")


def key(directory: Path, name: str) -> Path:
    path = directory / name
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(path)], check=True)
    return path


@pytest.fixture
def builder(tmp_path: Path) -> Path:
    return key(tmp_path, "builder")


@pytest.fixture
def signers(tmp_path: Path, builder: Path) -> Path:
    path = tmp_path / "signers"
    kind, public = builder.with_suffix(".pub").read_text().split()[:2]
    path.write_text(f'builder@site namespaces="{provenance.NAMESPACE}" {kind} {public}\n')
    return path


def pushed(registry: Registry, tag: str, said: str = "") -> Mapping[str, Any]:
    """Store an image as a push leaves it."""
    config = json.dumps({"architecture": "amd64", "os": "linux", "said": said}).encode()
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": provenance.put_blob(registry, "application/vnd.oci.image.config.v1+json", config),
        "layers": [],
    }
    provenance.put_manifest(registry, tag, MANIFEST, json.dumps(manifest).encode())
    return provenance.read_subject(registry, tag)


def attach(registry: Registry, there: Mapping[str, Any], builder: Path, about: str = "") -> None:
    said = provenance.make_statement(BUILD, "worker", about or there["digest"])
    provenance.attach(registry, there, provenance.TYPE, provenance.sign(said, builder))


def verify(registry: Registry, there: Mapping[str, Any], signers: Path) -> provenance.Verified:
    found = provenance.read_attached(registry, there, provenance.TYPE)
    return provenance.verify(found, there["digest"], signers, "worker:1")


def test_what_was_attached_is_believed(registry: Registry, builder: Path, signers: Path) -> None:
    there = pushed(registry, "1")
    attach(registry, there, builder)
    found = verify(registry, there, signers)
    built = found.statement["predicate"]["buildDefinition"]
    assert found.signer == "builder@site"
    assert built["externalParameters"] == PARAMETERS
    # What is no checksum is no dependency.
    assert built["resolvedDependencies"] == [{"name": "slurm-client=24.11.5-4", "digest": {"sha256": "cd" * 32}}]


def test_a_tag_that_moved_is_not_what_was_signed(registry: Registry, builder: Path, signers: Path) -> None:
    attach(registry, pushed(registry, "1"), builder)
    with pytest.raises(ImagesError, match="cannot verify worker:1: no provenance is attached"):
        verify(registry, pushed(registry, "1", said="another"), signers)


def test_a_strangers_signature_is_none(registry: Registry, tmp_path: Path, signers: Path) -> None:
    there = pushed(registry, "1")
    attach(registry, there, key(tmp_path, "stranger"))
    with pytest.raises(ImagesError, match="no allowed signer signed its provenance"):
        verify(registry, there, signers)


def test_a_good_statement_is_found_behind_a_strangers(
    registry: Registry, tmp_path: Path, builder: Path, signers: Path
) -> None:
    there = pushed(registry, "1")
    attach(registry, there, key(tmp_path, "stranger"))
    provenance.attach(registry, there, provenance.TYPE, b"no envelope")
    attach(registry, there, builder)
    assert verify(registry, there, signers).signer == "builder@site"


def test_a_good_signature_of_another_image_proves_nothing(registry: Registry, builder: Path, signers: Path) -> None:
    there, other = pushed(registry, "1"), pushed(registry, "2", said="another")
    attach(registry, there, builder, about=other["digest"])
    with pytest.raises(ImagesError, match="signed by builder@site, is about another image"):
        verify(registry, there, signers)


def test_a_changed_statement_is_not_the_signed_one(registry: Registry, builder: Path, signers: Path) -> None:
    there = pushed(registry, "1")
    said = provenance.make_statement(BUILD, "worker", there["digest"])
    envelope = json.loads(provenance.sign(said, builder))
    envelope["payload"] = base64.b64encode(said.replace(b"debian", b"nvidia")).decode()
    provenance.attach(registry, there, provenance.TYPE, json.dumps(envelope).encode())
    with pytest.raises(ImagesError, match="no allowed signer signed"):
        verify(registry, there, signers)


def test_a_signature_for_something_else_is_none(registry: Registry, builder: Path, tmp_path: Path) -> None:
    """The same key, and all that it has signed for git: the namespace says what a signature is for."""
    there = pushed(registry, "1")
    said = provenance.make_statement(BUILD, "worker", there["digest"])
    words = ["ssh-keygen", "-Y", "sign", "-q", "-n", "git", "-f", str(builder)]
    done = subprocess.run(words, input=provenance.encode(said), capture_output=True, check=True)
    envelope = {
        "payloadType": provenance.TYPE,
        "payload": base64.b64encode(said).decode(),
        "signatures": [{"sig": base64.b64encode(done.stdout).decode()}],
    }
    provenance.attach(registry, there, provenance.TYPE, json.dumps(envelope).encode())
    anything = tmp_path / "anything"
    anything.write_text(f"builder@site {builder.with_suffix('.pub').read_text()}")
    with pytest.raises(ImagesError, match="no allowed signer signed"):
        verify(registry, there, anything)


def test_attached_twice_it_is_one(registry: Registry, builder: Path) -> None:
    there = pushed(registry, "1")
    said = provenance.make_statement(BUILD, "worker", there["digest"])
    envelope = provenance.sign(said, builder)
    for _ in range(2):
        provenance.attach(registry, there, provenance.TYPE, envelope)
    assert list(provenance.read_attached(registry, there, provenance.TYPE)) == [envelope]


def test_the_same_build_says_the_same() -> None:
    one, two = (provenance.make_statement(BUILD, "worker", "sha256:" + "0" * 64) for _ in range(2))
    assert one == two


def test_a_registry_that_gives_other_bytes_is_not_believed(
    registryd: Registryd, registry: Registry, builder: Path, signers: Path
) -> None:
    there = pushed(registry, "1")
    said = provenance.make_statement(BUILD, "worker", there["digest"])
    envelope = provenance.sign(said, builder)
    provenance.attach(registry, there, provenance.TYPE, envelope)
    digest = hashlib.sha256(envelope).hexdigest()
    stored = registryd.storage / f"docker/registry/v2/blobs/sha256/{digest[:2]}/{digest}/data"
    stored.write_bytes(envelope.replace(b"a", b"b", 1))
    with pytest.raises(RegistryError, match=f"where sha256:{digest} was pushed"):
        verify(registry, there, signers)


def test_a_key_that_is_not_there_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ImagesError, match="cannot sign the provenance: no such key"):
        provenance.sign(b"{}", tmp_path / "none")
    (tmp_path / "bad").write_text("no key at all\n")
    with pytest.raises(ImagesError, match="cannot sign the provenance"):
        provenance.sign(b"{}", tmp_path / "bad")


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b"[" * 30_000, b'{"payloadType": "x"}', b'{"payloadType": 3}'])
def test_what_is_no_envelope_is_passed_over(tmp_path: Path, signers: Path, data: bytes) -> None:
    with pytest.raises(ImagesError, match="the attached document is not a signed statement"):
        provenance.verify([data], "sha256:" + "0" * 64, signers, "worker:1")


def test_a_push_attaches_it_with_what_the_build_chose(registry: Registry, builder: Path, signers: Path) -> None:
    there = pushed(registry, "1")
    session = Session.open(ROOT, BuildSettings(cuda="12.9"))
    image = session.compose(["worker"]).role("worker")
    attach_provenance(session, image, registry, there["digest"], builder)
    built = verify(registry, there, signers).statement["predicate"]["buildDefinition"]
    assert built["externalParameters"] == {**PARAMETERS, "cuda": "12.9", "arch": architectures.read_own()}
    names = {item["name"] for item in built["resolvedDependencies"]}
    assert {wheel.wanted for wheel in image.wheels} <= names and any(name.startswith("parent layer:") for name in names)
    assert any(name.startswith("slurm-client=") for name in names)


def test_the_command_says_who_built_it(registry: Registry, builder: Path, signers: Path) -> None:
    there = pushed(registry, "1")
    attach(registry, there, builder)
    reference = f"{registry.place.host}/{registry.repository}"
    command = [
        sys.executable,
        "build.py",
        "verify",
        "--user",
        PUSHER.user,
        "--password-stdin",
        "--signers",
        str(signers),
    ]
    for name in (f"{reference}:1", f"{reference}@{there['digest']}"):
        done = subprocess.run([*command, name], cwd=ROOT, input=f"{PUSHER.password}\n", capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "builder@site" in done.stdout and there["digest"] in done.stdout and "role worker" in done.stdout
    signers.write_text("")
    done = subprocess.run([*command, name], cwd=ROOT, input=f"{PUSHER.password}\n", capture_output=True, text=True)
    assert done.returncode == 1 and "no allowed signer signed" in done.stderr


@pytest.mark.parametrize(
    ("repository", "tag", "more", "why"),
    [
        ("worker", "24.11.5-debian-0123456789ab", [], ""),
        ("worker", "latest", [], ""),
        ("worker", "24.11.5-debian-ba9876543210", [], "this tag belongs to another build: what it leads to was built as"
         " 24.11.5-debian-0123456789ab"),
        ("controller", "latest", [], "it was built as worker, and controller was asked for"),
        ("gpu", "latest", ["--role", "worker"], ""),
    ],
)  # fmt: skip
def test_a_rightly_signed_image_under_anothers_name_is_told(
    registryd: Registryd, builder: Path, signers: Path, repository: str, tag: str, more: list[str], why: str
) -> None:
    """A user with push rights cannot sign, but can put a name on an image that another user has signed."""
    registry = Registry(registryd.place, repository, PUSHER)
    there = pushed(registry, tag)
    build = Build(PARAMETERS, "ab" * 32, "24.11.5-debian-0123456789ab", {}, "1234abcd")
    said = provenance.make_statement(build, "worker", there["digest"])
    provenance.attach(registry, there, provenance.TYPE, provenance.sign(said, builder))
    command = [sys.executable, "build.py", "verify", "--user", PUSHER.user, "--password-stdin", "--signers"]
    reference = f"{registry.place.host}/{registry.repository}:{tag}"
    done = subprocess.run([*command, str(signers), *more, reference], cwd=ROOT, input=f"{PUSHER.password}\n",
                          capture_output=True, text=True)  # fmt: skip
    assert (done.returncode, why in done.stderr) == (int(bool(why)), True), done.stderr
