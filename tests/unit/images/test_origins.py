"""Origins of packages: both formats of apt sources, and which setting provides the address."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from images import ImagesError
from images.archive import apt
from images.archive.apt import Origin, parse_deb822, parse_one_line
from images.definition.spec import AptSource, SlurmSource, Variant
from images.make.build import read_members
from images.settings import BuildSettings

KEY = Path("/usr/share/keyrings/archive.gpg")
LINES = f"""
# a comment
deb [arch=amd64 signed-by={KEY}] http://a.invalid/debian trixie main contrib
deb http://a.invalid/debian trixie-updates main # another
deb-src http://a.invalid/debian trixie main
"""
STANZAS = f"""
# a comment
Types: deb deb-src
URIs: http://a.invalid/debian
Suites: trixie trixie-updates
Components: main contrib
Signed-By: {KEY}

Types: deb
URIs: http://off.invalid/debian
Suites: trixie
Components: main
Enabled: no

Types: deb-src
URIs: http://src.invalid/debian
Suites: trixie
Components: main
"""


def test_one_line_sources_are_read() -> None:
    assert parse_one_line(LINES) == [
        Origin("base", "http://a.invalid/debian", ("trixie",), ("main", "contrib"), KEY),
        Origin("base", "http://a.invalid/debian", ("trixie-updates",), ("main",), Path()),
    ]


def test_deb822_sources_are_read_and_what_is_off_or_source_is_left_out() -> None:
    assert parse_deb822(STANZAS) == [
        Origin("base", "http://a.invalid/debian", ("trixie", "trixie-updates"), ("main", "contrib"), KEY)
    ]


@pytest.fixture
def variant(monkeypatch: pytest.MonkeyPatch) -> Variant:
    text = "deb http://d.invalid/debian x main\ndeb http://d.invalid/debian x-updates main\n"
    text += "deb http://s.invalid/security x-security main\n"
    monkeypatch.setattr(apt, "read_default_sources", lambda suite, components: tuple(parse_one_line(text)))
    monkeypatch.setattr(apt, "read_host_uris", lambda: {"debian": "http://host.invalid/debian"})
    return Variant("debian", "x", "3.13", SlurmSource.PACKAGE, "x")


def test_a_sites_mirror_goes_over_the_hosts_and_that_over_the_default(variant: Variant) -> None:
    def uris(**settings: str) -> dict[str, str]:
        return {o.name: o.uri for o in apt.bootstrap_origins(variant, BuildSettings(**settings))}

    assert uris() == {"debian": "http://host.invalid/debian", "security": "http://s.invalid/security"}
    assert uris(mirrors="security=http://site.invalid") == {
        "debian": "http://host.invalid/debian",
        "security": "http://site.invalid",
    }


def test_the_image_names_the_default_whatever_the_build_used(variant: Variant) -> None:
    debian, security = apt.default_origins(variant)
    assert (debian.uri, debian.suites) == ("http://d.invalid/debian", ("x", "x-updates"))
    assert (security.uri, security.suites) == ("http://s.invalid/security", ("x-security",))


def test_a_mirror_for_a_repository_that_does_not_exist_is_an_error(variant: Variant) -> None:
    with pytest.raises(ImagesError) as caught:
        apt.require_mirror("debain", variant)
    assert caught.value.hint == "did you mean 'debian'?"


def test_priority_is_given_by_host() -> None:
    source = AptSource("cuda", "https://v.invalid:8443/repo", ("/",), (), "key", 600)
    assert 'Pin: origin "v.invalid"' in apt.make_preferences(source)
    assert "Pin-Priority: 600" in apt.make_preferences(source)


def test_a_key_that_is_a_link_is_what_it_leads_to() -> None:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        key = tarfile.TarInfo("keyrings/archive.pgp")
        key.size = 3
        tar.addfile(key, io.BytesIO(b"key"))
        for name, target in (("keyrings/archive.gpg", "archive.pgp"), ("keyrings/lost.gpg", "../elsewhere")):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, target
            tar.addfile(link)
    stream.seek(0)
    with tarfile.open(fileobj=stream) as tar:
        found = read_members(tar, "/usr/share")
    assert found == {"/usr/share/keyrings/archive.pgp": b"key", "/usr/share/keyrings/archive.gpg": b"key"}
