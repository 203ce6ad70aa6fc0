"""A chart in a real registry: pushed twice it is one, another one does not replace it, and its origin is verified."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import helm_python
import pytest
from click.testing import CliRunner

import build
from images import ImagesError
from images.cli import release
from images.ship import provenance
from images.ship.registry import Registry
from tests.container.registryd import PUSHER, Registryd

CONTENT = {"Chart.yaml": b"{apiVersion: v2, name: minivm, version: 0.2.0}", "values.yaml": b"{}"}
METADATA = {"apiVersion": "v2", "name": "minivm", "version": "0.2.0"}


@pytest.fixture
def charts(registryd: Registryd) -> Registry:
    return Registry(registryd.place, release.NAME, PUSHER)


def test_helm_pulls_the_chart_that_was_pushed(charts: Registry, tmp_path: Path) -> None:
    digest = release.push(charts, "0.2.0", METADATA, CONTENT)
    assert release.push(charts, "0.2.0", METADATA, CONTENT) == digest
    address = f"oci://{charts.place.host}/{charts.repository}"
    with helm_python.RegistryClient(plain_http=True, credentials_file=tmp_path / "logins.json") as client:
        client.login(charts.place.host, PUSHER.user, PUSHER.password, plain_http=True)
        client.pull(address, version="0.2.0", destination=tmp_path, plain_http=True)
    pulled = tmp_path / "minivm-0.2.0.tgz"
    assert pulled.read_bytes() == release.pack_chart(CONTENT)
    with helm_python.Chart.load(pulled) as loaded:
        assert (loaded.name, loaded.version) == ("minivm", "0.2.0")


def test_another_chart_does_not_replace_a_release(charts: Registry) -> None:
    digest = release.push(charts, "0.2.0", METADATA, CONTENT)
    with pytest.raises(ImagesError, match=r"0\.2\.0 is there and holds another chart"):
        release.push(charts, "0.2.0", METADATA, {**CONTENT, "values.yaml": b"{a: 1}"})
    assert release.find_pushed(charts, "0.2.0") == digest


def test_the_charts_origin_is_verified_like_an_images(
    charts: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = tmp_path / "builder"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    kind, public = key.with_suffix(".pub").read_text().split()[:2]
    signers = tmp_path / "signers"
    signers.write_text(f'builder@site namespaces="{provenance.NAMESPACE}" {kind} {public}\n')
    digest = release.push(charts, "0.2.0", METADATA, CONTENT)
    release.attach_provenance(charts, "0.2.0", digest, CONTENT, "1234abcd", key)
    monkeypatch.setenv("MINIVM_REGISTRY_USER", PUSHER.user)
    monkeypatch.setenv("MINIVM_REGISTRY_PASSWORD", PUSHER.password)
    reference = f"{charts.place.host}/{charts.repository}:0.2.0"
    done = CliRunner().invoke(build.main, ["verify", reference, "--signers", str(signers), "--json"])
    assert done.exit_code == 0, done.output
    said = json.loads(done.output)
    assert said["signer"] == "builder@site" and said["image"].endswith(f"@{digest}")
    assert said["statement"]["predicate"]["runDetails"]["builder"]["version"] == {"revision": "1234abcd"}
