"""A site's proxy, mirrors and CA; and the errors when they do not answer.

The tests use the machine's real mirror once, through a caching proxy; everything else runs cut off from it.
"""

from __future__ import annotations

import contextlib
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterable, Iterator
from functools import partial
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from images import ImagesError
from images.archive import apt
from images.archive.locked import LockedPackage, Slice
from images.cli.session import Session
from images.make.plan import Composed
from images.settings import BuildSettings
from tests.container import definition
from tests.container.archive import Handler, Site, served
from tests.container.proxy import Proxy, proxy

pytestmark = [pytest.mark.docker, pytest.mark.root, pytest.mark.cluster]


def settings(part: str, **values: str) -> BuildSettings:
    """Use the classic builder and the host's network: the build steps must reach this machine's loopback."""
    return BuildSettings(prefix=f"{definition.PREFIX}-{part}", network="host", **values)


class Built:
    """The first build, through the proxy."""

    def __init__(self, proxy: Proxy, session: Session, composed: Composed) -> None:
        self.proxy, self.session, self.composed = proxy, session, composed
        self.layers = definition.layers(session, composed)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Built]:
    """Lock and build the layer `os` through the proxy, on the root that `make images` made, if it is still current."""
    root = tmp_path_factory.mktemp("proxied")
    with proxy(root / "kept") as way_out:
        chosen = settings("proxy", http_proxy=way_out.url)
        session = Session.open(definition.copy(root / "repository", "os"), chosen)
        session.relock([definition.ROLE])
        below = session.compose([definition.ROLE]).images["layer:root"].reference
        if session.engine.has(made := below.replace(chosen.prefix, "minivm", 1)):
            session.engine.tag(made, below)
        composed = definition.rebuild(session)
        yield Built(way_out, session, composed)
        definition.remove(session)


def test_with_a_proxy_everything_passes_through_it(built: Built) -> None:
    asked = names(built.proxy.asked)
    assert {name(package) for package in built.session.slices["os"].packages} <= asked
    assert "InRelease" in asked


def packages(session: Session) -> set[str]:
    return {name(package) for slice_ in session.slices.values() for package in slice_.packages}


def name(package: LockedPackage) -> str:
    return unquote(package.path).rpartition("/")[2]


def names(urls: Iterable[str]) -> set[str]:
    return {unquote(url).rpartition("/")[2] for url in urls}


def test_the_proxy_leaves_no_trace_in_the_image(built: Built) -> None:
    for image in built.composed.images.values():
        inspected = built.session.engine.inspect(image.reference)
        assert built.proxy.url not in str(inspected)
        if image.key == "role:standin":
            with built.session.engine.container(image.reference) as container:
                for path in ("/etc/apt", "/etc/environment", "/etc/profile.d"):
                    try:
                        tar = built.session.engine.read_path(container, path)
                    except ImagesError:
                        continue
                    for member in tar:
                        if data := tar.extractfile(member) if member.isfile() else None:
                            assert built.proxy.url.encode() not in data.read(), member.name


@pytest.fixture(scope="module")
def mirror(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a mirror of only what the build requested, as an air-gapped site would carry it in."""
    session = built.session
    uris = {origin.name: origin.uri for origin in apt.bootstrap_origins(session.place.variant, BuildSettings())}
    for package in session.slices["root"].packages:
        assert built.proxy.fetch(f"{uris[package.origin]}/{package.path}"), package
    target = tmp_path_factory.mktemp("mirror")
    built.proxy.mirror(target)
    return target


def mirrors(url: str, root: Path) -> str:
    """Return the setting for a mirror at `url`, from where the distribution's parts lie under it."""
    places = {"security" if "-security" in path.parts[-2] else "debian" for path in root.glob("*/dists/*")}
    paths = {path.parent.parent for path in root.glob("*/dists/*")}
    named = {("security" if path.name.endswith("-security") else "debian"): path.name for path in paths}
    assert set(named) >= places
    return ",".join(f"{name}={url}/{path}" for name, path in sorted(named.items()))


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make an unknown CA and its certificate for loopback; return the directory with both."""
    root = tmp_path_factory.mktemp("authority")
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=site"]
    made += ["-addext", "subjectAltName=IP:127.0.0.1", "-addext", "basicConstraints=critical,CA:TRUE"]
    subprocess.run([*made, "-keyout", root / "key.pem", "-out", root / "ca.pem"], check=True, capture_output=True)
    return root


class Politely(ThreadingHTTPServer):
    """Ends TLS as the protocol wants it: a connection that just closes is an error to apt."""

    def shutdown_request(self, request: Any) -> None:
        with contextlib.suppress(OSError):
            request.unwrap()
        super().shutdown_request(request)


@pytest.fixture
def secure(mirror: Path, authority: Path) -> Iterator[Site]:
    """Serve the mirror by HTTPS."""
    asked: list[str] = []
    server = Politely(("127.0.0.1", 0), partial(Handler, directory=str(mirror), asked=asked))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority / "ca.pem", authority / "key.pem")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield Site(mirror, f"https://127.0.0.1:{server.server_address[1]}", asked)
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_mirror_with_a_ca_of_the_sites_gives_the_same_layers_without_a_way_out(
    built: Built, secure: Site, authority: Path, tmp_path: Path
) -> None:
    built.proxy.online = False
    before = len(built.proxy.asked)
    chosen = settings("mirror", mirrors=mirrors(secure.url, secure.root), ca_certificates=str(authority / "ca.pem"))
    session, composed = definition.build(definition.again(built.session.repository, tmp_path / "repository"), chosen)
    try:
        assert definition.layers(session, composed) == built.layers
        assert len(built.proxy.asked) == before
        assert packages(session) <= names(secure.asked)
    finally:
        definition.remove(session)


def test_a_ca_that_nobody_told_us_is_not_trusted(secure: Site, tmp_path: Path) -> None:
    session = Session.open(
        definition.copy(tmp_path, "os"), settings("distrust", mirrors=mirrors(secure.url, secure.root))
    )
    with pytest.raises(ImagesError, match=r"(?s)cannot reach the mirror.*certificate"):
        session.relock([definition.ROLE])


def test_a_mirror_that_does_not_answer_is_named(tmp_path: Path) -> None:
    with served(tmp_path) as site:
        gone = site.url  # free again once the block is left
    session = Session.open(
        definition.copy(tmp_path / "repository", "os"), settings("gone", mirrors=f"debian={gone}/x,security={gone}/y")
    )
    with pytest.raises(ImagesError, match="cannot reach the mirror") as caught:
        session.relock([definition.ROLE])
    assert f"{gone}/x" in str(caught.value)
    assert "--set mirrors=" in str(caught.value)


@pytest.fixture
def copied(mirror: Path, tmp_path: Path) -> Iterator[Site]:
    """Serve a copy of the mirror that a test may spoil."""
    target = tmp_path / "mirror"
    shutil.copytree(mirror, target, copy_function=shutil.copyfile)
    with served(target) as site:
        yield site


def one_package(slice_: Slice, site: Site) -> Path:
    """Return the file of a package that the layer `os` adds."""
    return next(site.root.rglob(name(slice_.packages[0])))


@pytest.mark.parametrize(("spoil", "said"), [("other bytes", "Hash Sum mismatch"), ("gone", "404")])
def test_a_spoiled_package_stops_the_build_and_leaves_no_image(
    spoil: str, said: str, built: Built, copied: Site, tmp_path: Path
) -> None:
    chosen = settings("proxy", mirrors=mirrors(copied.url, copied.root))
    root = tmp_path / "repository"
    shutil.copytree(built.session.repository / "images", root / "images", symlinks=True)
    with definition.edited(root / "images/layers/os.yaml") as layer:
        layer["env"] = {"SPOILED": spoil}  # another image of the same packages, on the root that is there
    session = Session.open(root, chosen)
    path = one_package(session.slices["os"], copied)
    if spoil == "gone":
        path.unlink()
    else:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(bytes(data))
    before = definition.present(session)
    with pytest.raises(ImagesError) as caught:
        definition.rebuild(session)
    assert said in str(caught.value)
    assert session.slices["os"].packages[0].name in str(caught.value)
    assert "log:" in str(caught.value)
    assert definition.present(session) == before
