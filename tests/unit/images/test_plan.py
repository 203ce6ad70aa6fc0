"""A tag is a hash of the image's inputs: every relevant change gives another tag, and nothing else does."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from images import ImagesError
from images.archive.lock import LockContext
from images.archive.locked import LockedPackage, LockRequest, Slice
from images.definition.load import load, read_yaml
from images.definition.spec import BuildChoice, SlurmSource
from images.engine.store import Additions, make_config
from images.make.compose import Composer
from images.make.content import Entry, make_entrypoint
from images.make.plan import Composed, PlannedImage, list_changed
from images.settings import BuildSettings

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = LockedPackage("slurm-client", "24.11.5-4+deb13u1", "amd64", 1, "a" * 64, "debian", "pool/s.deb")
LAYERS: Mapping[str, Mapping[str, object]] = {
    "root": {"bootstrap": {}, "packages": ["passwd"]},
    "os": {"from": "root", "packages": ["slurm-client"], "users": ["slurm"]},
    "top": {"from": "os", "run": ["true"], "artifacts": [{"layer": "aside", "from": "/a", "to": "/a"}]},
    "aside": {"from": "root", "component": ["tool"], "downloads": ["tool"]},
}
VERSIONS = {
    "epoch": "2026-01-01",
    "users": {"slurm": {"uid": 64030}},
    "pins": {"tool": {"version": "1", "url": "https://files.invalid/tool.tgz", "sha256": "0" * 64}},
    "variants": {"debian": {"describe": "x", "python": "3.13", "suite": "trixie"}},
}
Edit = Callable[[Path], object]


def write(path: Path, data: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(data if isinstance(data, str) else yaml.safe_dump(data))


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    images = tmp_path / "images"
    for name, keys in LAYERS.items():
        write(images / f"layers/{name}.yaml", {"describe": name, **keys})
    write(
        images / "roles/small.yaml",
        {
            "describe": "small",
            "layer": "top",
            "code": False,
            "files": [{"from": "small.conf", "to": "/etc/small.conf"}],
        },
    )
    write(images / "versions.yaml", VERSIONS)
    write(images / "make/sbom.py", "")
    write(
        images / "templates/tool.sh.j2", "# a comment\ntar xf {{ pins.tool.file }} \\\n  -C /opt\n\nmake -j{{ jobs }}\n"
    )
    shutil.copyfile(ROOT / "images/templates/Dockerfile.j2", images / "templates/Dockerfile.j2")
    write(images / "rootfs/os/etc/os.conf", "1\n")
    write(tmp_path / "small.conf", "1\n")
    return tmp_path


def compose(repository: Path, packages: tuple[LockedPackage, ...] = (PACKAGE,), **settings: str) -> Composed:
    place = LockContext(
        repository, load(repository), BuildChoice("debian", SlurmSource.PACKAGE), BuildSettings(**settings)
    )
    slices = {name: Slice(name, LockRequest((), "", ()), packages if name == "os" else ()) for name in LAYERS}
    return Composer(place, slices, read_yaml).compose(["small"])


def hashes(composed: Composed) -> dict[str, str]:
    return {key.partition(":")[2]: image.hash for key, image in composed.images.items()}


def differing(before: Composed, after: Composed) -> set[str]:
    one, two = hashes(before), hashes(after)
    return {name for name in one if one[name] != two[name]}


def test_the_tag_says_slurm_variant_and_hash(repository: Path) -> None:
    role = compose(repository).role("small")
    assert role.reference == f"minivm/small:24.11.5-debian-{role.hash[:12]}"


def test_composing_twice_gives_the_same(repository: Path) -> None:
    assert hashes(compose(repository)) == hashes(compose(repository))


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (lambda root: write(root / "images/rootfs/os/etc/os.conf", "2\n"), {"os", "top", "small"}),
        (lambda root: (root / "images/rootfs/os/etc/os.conf").chmod(0o755), {"os", "top", "small"}),
        (lambda root: write(root / "images/rootfs/os/etc/more", ""), {"os", "top", "small"}),
        (lambda root: write(root / "small.conf", "2\n"), {"small"}),
        (lambda root: write(root / "images/make/sbom.py", "# other\n"), {"small"}),
        (lambda root: write(root / "images/templates/tool.sh.j2", "make\n"), {"aside", "top", "small"}),
        (lambda root: write(root / "images/layers/top.yaml", {"describe": "top", **LAYERS["top"], "run": ["false"]}),
         {"top", "small"}),
        (lambda root: write(root / "images/versions.yaml", {**VERSIONS, "epoch": "2026-01-02"}),
         {"root", "os", "aside", "top", "small"}),
        (lambda root: write(root / "images/versions.yaml", {**VERSIONS, "users": {"slurm": {"uid": 64031}}}),
         {"os", "top", "small"}),
    ],
)  # fmt: skip
def test_what_goes_in_changes_the_hash_of_what_depends_on_it(repository: Path, edit: Edit, expected: set[str]) -> None:
    before = compose(repository)
    edit(repository)
    assert differing(before, compose(repository)) == expected


def test_another_package_or_checksum_changes_the_hash(repository: Path) -> None:
    before = compose(repository)
    other = compose(repository, (replace(PACKAGE, sha256="b" * 64),))
    assert differing(before, other) == {"os", "top", "small"}


@pytest.mark.parametrize(
    "settings",
    [{"mirrors": "debian=http://m.invalid"}, {"http_proxy": "http://p.invalid"}, {"network": "host"},
     {"builder": "buildx"}, {"prefix": "other"}],
)  # fmt: skip
def test_a_sites_settings_change_no_hash(repository: Path, settings: dict[str, str]) -> None:
    assert hashes(compose(repository)) == hashes(compose(repository, (PACKAGE,), **settings))


def test_images_come_after_what_they_need(repository: Path) -> None:
    composed = compose(repository)
    order = [image.key for image in composed.list_needed(["small"])]
    for key in order:
        assert all(order.index(need) < order.index(key) for need in composed.images[key].needs)
    assert order.index("layer:aside") < order.index("layer:top")


def test_a_component_becomes_commands(repository: Path) -> None:
    step = compose(repository).images["layer:aside"].step
    assert step.commands == ("tar xf /usr/src/minivm/tool.tgz -C /opt", "make -j$(nproc)")


def test_a_name_that_a_component_does_not_know_is_an_error(repository: Path) -> None:
    write(repository / "images/templates/tool.sh.j2", "{{ pins.tol.file }}\n")
    with pytest.raises(ImagesError) as caught:
        compose(repository)
    assert caught.value.file == "images/templates/tool.sh.j2"
    assert "tol" in caught.value.why


def test_a_component_that_does_not_exist_is_named(repository: Path) -> None:
    (repository / "images/templates/tool.sh.j2").unlink()
    with pytest.raises(ImagesError, match=r"tool\.sh\.j2 does not exist"):
        compose(repository)


def test_a_layer_without_a_lock_says_what_resolves_it(repository: Path) -> None:
    place = LockContext(repository, load(repository), BuildChoice("debian", SlurmSource.PACKAGE), BuildSettings())
    with pytest.raises(ImagesError) as caught:
        Composer(place, {}, read_yaml).compose(["small"])
    assert "build.py lock" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("before", "after", "lines"),
    [
        (None, {"a": "1"}, ["never built here"]),
        ({"a": "1", "b": "1"}, {"a": "2", "c": "1"}, ["a", "b (removed)", "c (new)"]),
        ({"images/x as /etc/x": "1"}, {"images/x as /etc/x": "2"}, ["images/x"]),
        ({"a": "1"}, {"a": "1"}, []),
    ],
)
def test_which_input_changed(before: Mapping[str, str] | None, after: Mapping[str, str], lines: list[str]) -> None:
    assert list_changed(before, after) == lines


def test_the_projects_own_roles_compile(repository: Path) -> None:
    """Every role's services exist and fit together, as composed for the image."""
    definition = load(ROOT)
    place = LockContext(ROOT, definition, BuildChoice("debian", SlurmSource.PACKAGE, release="24.11"), BuildSettings())
    slices = {name: Slice(name, LockRequest((), "", ()), ()) for name in definition.layers}
    composed = Composer(place, slices, read_yaml).compose(definition.roles)
    for name in definition.roles:
        found: dict[str, Entry] = {entry.path: entry for entry in composed.role(name).entries}
        if program := definition.roles[name].program:
            # Images with a single program have no init: the program is PID 1, with its package and the packages it may
            # import.
            assert composed.role(name).step.entrypoint == ("/opt/minivm/bin/python3", "-I", "-m", program)
            for package in ("ground", "init", program):
                assert f"opt/minivm/lib/python3.13/site-packages/{package}/__init__.py" in found
            assert f"opt/minivm/lib/python3.13/site-packages/{program}/__main__.py" in found
            assert "etc/minivm/plan.json" not in found and "usr/share/minivm/scripts" not in found
            continue
        assert b'"role"' in found["etc/minivm/plan.json"].read()
        # PID 1's entrypoint exists in the image, and its options skip everything that startup does not need.
        _, *options, script = make_entrypoint("3.13")
        assert script.lstrip("/") in found and options == ["-I", "-S", "-Xutf8"]


def test_an_image_whose_only_program_needs_no_rights_says_whom_it_runs_as() -> None:
    assert yaml.safe_load(image_config(user="64035"))["config"]["User"] == "64035"
    assert "User" not in yaml.safe_load(image_config())["config"]


def image_config(**values: object) -> bytes:
    parent = {"Env": ["PATH=/bin", "A=1"], "Labels": {"of": "the parent"}, "Cmd": ["/bin/bash"], "Hostname": "built-on"}
    add = Additions(env={"B": "2"}, ports=(22,), entrypoint=("/init",), stop_signal="SIGTERM", labels={"x": "y"})
    return make_config(parent, 1, ["sha256:a", "sha256:b"], replace(add, **values), arch="amd64", epoch=0).data  # type: ignore[arg-type]  # the test's own values


def test_the_configuration_holds_what_we_say_and_nothing_of_the_builder() -> None:
    made = yaml.safe_load(image_config())
    assert made["config"]["Env"] == ["PATH=/bin", "A=1", "B=2"]
    assert made["config"]["Entrypoint"] == ["/init"]
    assert made["config"]["ExposedPorts"] == {"22/tcp": {}}
    assert made["config"]["Labels"] == {"x": "y"}
    assert "Cmd" not in made["config"]
    assert "Hostname" not in made["config"]
    assert len(made["history"]) == 2
    assert image_config() == image_config()
    assert image_config() != image_config(labels={"x": "z"})


def test_every_image_knows_its_packages(repository: Path) -> None:
    image: PlannedImage = compose(repository).role("small")
    assert [package.name for slice_ in image.slices for package in slice_.packages] == ["slurm-client"]
