"""Trust on first use for a file without a checksum: pinned from then on, with a clear warning."""

from __future__ import annotations

import hashlib
import ssl
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from images import ImagesError
from images.archive import lock
from images.archive.fetch import fetch
from images.archive.lock import LockContext
from images.definition.load import load
from images.definition.spec import UNFILLED, BuildChoice, Definition, Pin, SlurmSource
from images.settings import BuildSettings

ROOT = Path(__file__).resolve().parents[3]
NVIDIA = BuildChoice("nvidia", SlurmSource.SOURCE, release="26.05")


@pytest.fixture
def place(tmp_path: Path) -> Iterator[LockContext]:
    """Yield the real definition, with each vendor file replaced by one on this machine."""
    definition = load(ROOT)
    (tmp_path / "images").mkdir()
    (tmp_path / "images/versions.yaml").write_text((ROOT / "images/versions.yaml").read_text())
    pins = {}
    for name, pin in definition.versions.pins.items():
        file = tmp_path / f"{name}.file"
        file.write_text(name)
        pins[name] = replace(pin, url=str(file))
    yield LockContext(tmp_path, with_pins(definition, pins), NVIDIA, BuildSettings(variant="nvidia"))


def with_pins(definition: Definition, pins: dict[str, Pin]) -> Definition:
    return replace(definition, versions=replace(definition.versions, pins=pins))


def text(place: LockContext) -> str:
    return (place.repository / "images/versions.yaml").read_text()


def test_what_is_served_first_is_what_every_later_build_insists_on(place: LockContext) -> None:
    before = text(place)
    pins = lock.find_unfilled_pins(place, ["worker"])
    wanted = [pin.name for pin in pins]
    assert wanted, "some file of this variant has no checksum yet"
    said = [lock.trust_on_first_use(place, pin) for pin in pins]
    assert [line.split()[4].split(".")[1] for line in said] == wanted
    assert all("TRUSTED ON FIRST SIGHT" in line and "Nobody has compared it" in line for line in said)
    found = load_versions(place)
    for name in wanted:
        assert found[name].sha256 == hashlib.sha256(name.encode()).hexdigest()
        assert f"pins.{name}.sha256 is {found[name].sha256}" in "".join(said)
    # Comments and all other lines stay, and a second run finds nothing to trust.
    same = [line for line in before.splitlines() if "sha256: " not in line]
    assert same == [line for line in text(place).splitlines() if "sha256: " not in line]
    again = replace(place, definition=with_pins(place.definition, served(place, found)))
    assert lock.find_unfilled_pins(again, ["worker"]) == []
    # The fetched file is kept for the build, and a different file in its place is refused.
    pin = again.definition.versions.pins[wanted[0]]
    assert fetch(pin, place.downloads, place.settings).read_text() == pin.name
    Path(pin.url).write_text("another")
    with pytest.raises(ImagesError, match=f"checksum mismatch for .*{wanted[0]}"):
        fetch(pin, place.repository / "elsewhere", place.settings)


def load_versions(place: LockContext) -> dict[str, Pin]:
    import yaml

    pins = yaml.safe_load(text(place))["pins"]
    return {name: Pin(name, str(pin["version"]), pin["url"], pin["sha256"]) for name, pin in pins.items()}


def served(place: LockContext, found: dict[str, Pin]) -> dict[str, Pin]:
    return {name: replace(pin, url=place.definition.versions.pins[name].url) for name, pin in found.items()}


def test_a_checksum_that_stands_there_is_never_written_over(place: LockContext) -> None:
    assert "slurm" not in [pin.name for pin in lock.find_unfilled_pins(place, ["slurm-build"])]
    pin = place.definition.versions.pins["slurm"]
    with pytest.raises(ImagesError, match="no line of its own says to-be-filled"):
        lock.record_checksum(place.repository / "images/versions.yaml", pin, "0" * 64)
    assert pin.sha256 in text(place)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://example.org/x.tar.gz", "is not https: the network may have changed it"),
        ("file:///etc/passwd", "is not https"),
        ("/nothing/here", "No such file"),
        ("EMPTY", "it is empty"),
    ],
)
def test_what_cannot_be_trusted_leaves_everything_as_it_was(place: LockContext, url: str, why: str) -> None:
    empty = place.repository / "empty"
    empty.touch()
    pins = dict(place.definition.versions.pins)
    pins["hpcx"] = Pin("hpcx", "1", str(empty) if url == "EMPTY" else url, UNFILLED)
    before = text(place)
    with pytest.raises(ImagesError, match=why):
        lock.download_pin(pins["hpcx"], place)
    assert text(place) == before and not [path for path in place.downloads.rglob("*") if path.is_file()]


class Hosts:
    """HTTPS server with a valid certificate that redirects, and a plain HTTP server."""

    def __init__(self, directory: Path) -> None:
        key, self.certificate = directory / "key.pem", directory / "certificate.pem"
        made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"]
        subprocess.run([*made, "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out",
                        str(self.certificate)], check=True, capture_output=True)  # fmt: skip
        hosts = self

        class Answer(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path == "/file":
                    self.send_response(200)
                    self.end_headers()
                    self.wfile.write(b"a file")
                    return
                self.send_response(302)
                self.send_header("Location", f"{hosts.url(self.path.strip('/'))}/file")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                """Log nothing."""

        self.servers = {name: ThreadingHTTPServer(("127.0.0.1", 0), Answer) for name in ("http", "https")}
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificate, key)
        self.servers["https"].socket = context.wrap_socket(self.servers["https"].socket, server_side=True)
        for server in self.servers.values():
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()

    def url(self, scheme: str) -> str:
        return f"{scheme}://127.0.0.1:{self.servers[scheme].server_address[1]}"


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    found = Hosts(tmp_path)
    yield found
    for server in found.servers.values():
        server.shutdown()
        server.server_close()


def test_a_host_that_leads_to_a_way_without_encryption_is_not_trusted_on_first_sight(
    place: LockContext, hosts: Hosts
) -> None:
    """Refuse redirects to plain HTTP for a file that has no checksum yet.

    With a checksum they are allowed, because a changed file would be detected.
    """
    wanted = hashlib.sha256(b"a file").hexdigest()
    settings = BuildSettings(ca_certificates=str(hosts.certificate))
    here = replace(place, settings=settings)
    assert lock.download_pin(Pin("hpcx", "1", f"{hosts.url('https')}/https", UNFILLED), here) == wanted
    away = Pin("hpcx", "1", f"{hosts.url('https')}/http", UNFILLED)
    with pytest.raises(ImagesError, match=r"it leads to http://127\.0\.0\.1:\d+/file, which is not https"):
        lock.download_pin(away, here)
    assert fetch(replace(away, sha256=wanted), place.repository / "other", settings).read_text() == "a file"
