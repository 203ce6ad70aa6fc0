"""Slurm release of a build: several releases side by side, each with its facts, packages, and a lock of differences."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from images import ImagesError
from images.archive import apt, lock
from images.archive.apt import Origin
from images.archive.fetch import fetch
from images.archive.lock import LockContext
from images.archive.locked import LockedPackage, LockRequest, Slice
from images.definition import parse
from images.definition.load import capabilities, choose_build, load, read_yaml
from images.definition.parse import DefinitionFields
from images.definition.spec import AptSource, BuildChoice, Definition, SlurmSource
from images.make import compose, content
from images.settings import BuildSettings

ROOT = Path(__file__).resolve().parents[3]
DEFINITION = load(ROOT)
NEWER = AptSource("newer", "", ("next",), ("main",), "", 990, ("slurm*", "libllhttp*"), dated=False)
KEY = Path("/usr/share/keyrings/archive.gpg")
OWN = (Origin("debian", "http://d.invalid/debian", ("now", "now-updates"), ("main", "contrib"), KEY),
       Origin("security", "http://s.invalid/debian", ("now-security",), ("main",), KEY))  # fmt: skip


@pytest.mark.parametrize(
    ("variant", "wish", "tarball", "source", "release"),
    [
        ("debian", "", "", SlurmSource.PACKAGE, "24.11"),
        ("debian", "package", "", SlurmSource.PACKAGE, "24.11"),
        ("debian", "26.05", "", SlurmSource.PACKAGE, "26.05"),
        ("debian", "source", "25.11.2", SlurmSource.SOURCE, "25.11"),
        # Newer than every known release: the facts of the newest known one apply.
        ("debian", "source", "26.11.0", SlurmSource.SOURCE, "26.05"),
        ("nvidia", "", "24.11.5", SlurmSource.SOURCE, "24.11"),
    ],
)
def test_what_is_wished_becomes_a_release(
    variant: str, wish: str, tarball: str, source: SlurmSource, release: str
) -> None:
    found = choose_build(DEFINITION, variant, wish, tarball)
    assert found == BuildChoice(variant, source, DEFINITION.versions.variants[variant].cuda, release)
    assert {f"slurm-{source.value}", f"slurm-{release}"} <= found.selectors


@pytest.mark.parametrize(
    ("variant", "wish", "tarball", "why", "hint"),
    [
        ("debian", "25.05", "", "no packages of Slurm 25.05", "24.11, 26.05; or source"),
        ("nvidia", "26.05", "", "no packages of Slurm 26.05", "none; or source"),
        ("debian", "source", "23.02.7", "Slurm 23.02.7 is older than all that is known", "from 24.11 on"),
    ],
)
def test_a_release_that_is_not_there_is_a_sentence(variant: str, wish: str, tarball: str, why: str, hint: str) -> None:
    with pytest.raises(ImagesError) as caught:
        choose_build(DEFINITION, variant, wish, tarball)
    assert why in caught.value.why and hint in str(caught.value.hint)


def test_what_a_release_lacks_is_absent_with_its_reason() -> None:
    """A capability that a release's packages lack is declared absent with a reason; a build from source provides it."""
    for wish, there in (("24.11", True), ("26.05", False), ("source", True)):
        chosen = choose_build(DEFINITION, "debian", wish, "26.05.5" if wish == "source" else "")
        for role in ("controller", "login", "worker"):
            provided, absent = capabilities(DEFINITION, DEFINITION.roles[role], chosen)
            assert ("pmix" in provided, "pmix" not in absent) == (there, there), (wish, role)
    assert "mpirun" in absent.get("pmix", DEFINITION.slurm["26.05"].absent["pmix"])


def test_the_default_is_one_word_for_builds_and_chart() -> None:
    default = yaml.safe_load((ROOT / "images/slurm.yaml").read_text())["default"]
    assert DEFINITION.versions.variants["debian"].releases[0] == default


def test_every_release_reads_the_state_of_those_before_it() -> None:
    facts = [DEFINITION.slurm[name] for name in sorted(DEFINITION.slurm)]
    assert [release.protocol for release in facts] == sorted({release.protocol for release in facts})
    for older, newer in pairwise(facts):
        assert newer.reads <= older.protocol < newer.protocol, (older.name, newer.name)


def plan_of(role: str, release: str, definition: Definition = DEFINITION) -> dict[str, Any]:
    chosen = choose_build(definition, "debian", release)
    found: dict[str, Any] = json.loads(
        content.compile_role(definition.roles[role], definition, chosen, ROOT, read_yaml)
    )
    return dict(found["services"])


@pytest.mark.parametrize("role", ["worker", "login"])
def test_a_newer_slurm_is_asked_whether_it_serves_and_an_older_one_as_ever(role: str) -> None:
    older, newer = plan_of(role, "24.11"), plan_of(role, "26.05")
    where = "${MINIVM_CONTROLLER_ADDRESS:-slurm-controller:6817}"
    assert older["controller"]["ready"] == {"tcp": where}
    assert newer["controller"]["ready"] == {"http": f"{where}/readyz"}
    assert {name for name in older if older[name] != newer[name]} == {"controller"}, "and nothing else differs"


def test_a_required_service_that_the_role_lacks_is_an_error() -> None:
    role = replace(DEFINITION.roles["accounting"], required=("mariadbd",))
    with pytest.raises(ImagesError, match=r"'mariadbd' is not among the services .*roles/accounting\.yaml, required"):
        plan_of("accounting", "24.11", replace(DEFINITION, roles={"accounting": role}))


def test_facts_of_a_service_that_is_not_there_are_an_error() -> None:
    wrong = replace(DEFINITION.slurm["26.05"], ready={"controler": {"tcp": "x:1"}})
    with pytest.raises(ImagesError, match=r"no service 'controler' .*images/slurm\.yaml, releases\.26\.05\.ready"):
        plan_of("worker", "26.05", replace(DEFINITION, slurm={**DEFINITION.slurm, "26.05": wrong}))


def test_nothing_but_the_named_packages_comes_from_the_other_suite() -> None:
    never, named = apt.make_preferences(NEWER).split("\n\n")
    assert never == "Package: *\nPin: release n=next\nPin-Priority: -1"
    assert named == "Package: slurm* libllhttp*\nPin: release n=next\nPin-Priority: 990\n"


def test_the_other_suite_is_at_the_archives_own_address_under_its_own_key() -> None:
    found = apt.suite_of(NEWER, OWN)
    assert found.lines() == f"deb [signed-by={KEY} check-valid-until=no] http://d.invalid/debian next main\n"
    assert "check-valid-until" not in OWN[0].lines(), "for this suite alone"


def test_the_image_has_it_where_its_other_sources_point(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apt, "default_origins", lambda variant: OWN)
    text = apt.image_suite(NEWER, DEFINITION.versions.variants["debian"])
    assert text == (
        "Types: deb\nURIs: http://d.invalid/debian\nSuites: next\nComponents: main\n"
        f"Signed-By: {KEY}\nCheck-Valid-Until: no\n"
    )


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ({"name": "x", "suites": ["next"], "components": ["main"]}, "names its packages"),
        ({"name": "x", "suites": ["next"], "components": ["main"], "packages": ["slurm*"]}, "'pin' is missing"),
        ({"name": "x", "uri": "http://v.invalid", "suites": ["/"], "components": []}, "'key' is missing"),
        ({"name": "x", "key": "k", "suites": ["/"], "components": []}, "'uri' is missing"),
        ({"name": "x", "suites": ["next"], "dated": "no"}, "names its packages"),
    ],
)
def test_a_suite_that_would_take_over_the_base_is_refused(data: object, why: str) -> None:
    with pytest.raises(ImagesError) as caught:
        parse.parse_apt_source(DefinitionFields(data, "versions.yaml", parse.SOURCE_KEYS))
    assert why in caught.value.why


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ({"releases": {"24.11": {"protocol": 42}}}, "'mpi' is missing"),
        ({"releases": {24.11: {"protocol": 42, "mpi": ["pmix"]}}}, "24.11 is no release"),
        ({"releases": {"24.11": {"protocl": 42}}}, "unknown key 'protocl'"),
        ({"default": "26.05", "releases": {}}, "no facts of '26.05'"),
    ],
)
def test_wrong_facts_are_an_error(text: object, why: str) -> None:
    with pytest.raises(ImagesError) as caught:
        parse.parse_releases(text, "images/slurm.yaml")
    assert why in caught.value.why


def place(repository: Path, wish: str) -> LockContext:
    return LockContext(repository, DEFINITION, choose_build(DEFINITION, "debian", wish), BuildSettings())


def test_a_layer_is_looked_for_where_one_below_it_has_switched_on_to_look(tmp_path: Path) -> None:
    """Switch on the repositories of lower layers when only an upper layer is locked again.

    A worker alone is updated: its slurmd is in the suite that slurm-common has switched on.
    """
    assert lock.list_repositories(place(tmp_path, "26.05"), ["worker"]) == ["newer-slurm"]
    assert lock.list_repositories(place(tmp_path, ""), ["worker"]) == []


def slice_of(layer: str, version: str) -> Slice:
    package = LockedPackage(layer, version, "amd64", 1, "a" * 64, "debian", "pool/x.deb")
    return Slice(layer, LockRequest((layer,), "", ("now main",)), (package,))


def test_two_releases_share_what_is_below_slurm(tmp_path: Path) -> None:
    """Locks of two releases share one file for the layers below Slurm, so that these are always the same images."""
    own, other = place(tmp_path, ""), place(tmp_path, "26.05")
    lock.write(own, [slice_of("os", "1"), slice_of("slurm-common", "24.11.5")])
    lock.write(other, [slice_of("os", "1"), slice_of("slurm-common", "26.05.5")])
    assert [path.name for path in other.directory.iterdir()] == ["slurm-common.json"]
    assert lock.read(other) == {"os": slice_of("os", "1"), "slurm-common": slice_of("slurm-common", "26.05.5")}
    assert lock.read(own)["slurm-common"] == slice_of("slurm-common", "24.11.5")
    # The other release reads a newly resolved layer from the shared lock, and keeps no copy of it.
    lock.write(own, [slice_of("os", "2")])
    assert lock.read(other)["os"] == slice_of("os", "2")


def test_the_projects_own_locks_are_whole_and_share_the_base() -> None:
    for wish in DEFINITION.versions.variants["debian"].releases:
        here = place(ROOT, wish)
        layers = [role.layer for role in DEFINITION.roles.values()]
        slices = lock.read(here)
        assert lock.find_stale(lock.list_wanted(here, layers), slices) == []
        client = next(p for p in slices["slurm-common"].packages if p.name == "slurm-client")
        assert client.version.startswith(f"{wish}.")
        assert {"root", "os"}.isdisjoint(p.stem for p in here.directory.iterdir()) == (wish != "24.11")


def test_a_base_of_the_sites_own_shares_with_the_same_base_alone(tmp_path: Path) -> None:
    here = place(tmp_path, "26.05")
    based = replace(here, settings=BuildSettings(base_image="site/base@sha256:" + "1" * 64))
    assert based.shared is not None and here.shared is not None
    assert (based.directory.name, based.shared.directory.name) == ("debian-slurm-26.05-base", "debian-base")
    assert here.shared.directory.name == "debian"


def test_a_pin_in_the_archive_is_fetched_from_the_sites_mirror(tmp_path: Path) -> None:
    """Fetch a pinned file of the archive from the site's mirror.

    When the mirror does not serve the file, the error names the alternative.
    """
    pin = DEFINITION.versions.pins["slurm"]
    (tmp_path / "served").mkdir()
    settings = BuildSettings(mirrors=f"debian=file://{tmp_path}/served")
    found = apt.resolve_archive_pin(pin, DEFINITION, settings)
    assert found.url == f"file://{tmp_path}/served/{pin.url.removeprefix('archive:')}"
    with pytest.raises(ImagesError, match="No such file or directory") as caught:
        fetch(found, tmp_path / "kept", settings)
    assert "--set slurm_tarball=PATH" in str(caught.value.hint)
    file = tmp_path / "served" / pin.url.removeprefix("archive:")
    file.parent.mkdir(parents=True)
    file.write_bytes(b"another one")
    with pytest.raises(ImagesError, match=f"checksum mismatch .*pinned {pin.sha256}"):
        fetch(found, tmp_path / "kept", settings)
    assert not [path for path in (tmp_path / "kept").rglob("*") if path.is_file()]


def test_a_tarball_that_a_site_has_given_is_told_by_its_setting(tmp_path: Path) -> None:
    tarball = tmp_path / "slurm.tar.gz"
    settings = BuildSettings(slurm="source", slurm_tarball=str(tarball), slurm_version="26.05.3", slurm_sha256="a" * 64)
    pin = compose.map_pins(replace(place(tmp_path, "source"), settings=settings))["slurm"]
    for why in ("No such file or directory", f"checksum mismatch for {tarball}: pinned {'a' * 64}, found "):
        with pytest.raises(ImagesError, match=why) as caught:
            fetch(pin, tmp_path / "kept", settings)
        assert str(caught.value).endswith(" (slurm_tarball)"), (
            "it is not in versions.yaml, and no hint says to give one"
        )
        tarball.write_bytes(b"another one")
