"""Layers, roles and versions as data: accepted forms, and the error for each mistake."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from images import ImagesError
from images.definition.load import active_chain, capabilities, load
from images.definition.spec import BuildChoice, SlurmSource

ROOT = Path(__file__).resolve().parents[3]
DEBIAN = BuildChoice("debian", SlurmSource.PACKAGE)
VERSIONS = f"""
epoch: "2026-01-01"
users:
  slurm: {{uid: 64030}}
pins:
  tool: {{version: "1", url: "https://files.invalid/tool.tgz", sha256: "{"0" * 64}"}}
variants:
  debian:
    describe: packages
    python: "3.13"
    suite: trixie
    absent: {{dcgm: "no package"}}
  nvidia:
    describe: vendor
    python: "3.12"
    slurm: source
    base: "base@sha256:{"1" * 64}"
"""
FILES = {
    "versions.yaml": VERSIONS,
    "layers/root.yaml": "describe: the root\nbootstrap: {}\npackages: [passwd]\n",
    "layers/os.yaml": "describe: the system\nfrom: root\npackages: [less]\nusers: [slurm]\n",
    "layers/cuda.yaml": "describe: gpus\nfrom: os\nprovides: [cuda]\npackages: {debian: [libcudart12]}\n",
    "layers/dcgm.yaml": "describe: health\nfrom: cuda\nonly: [nvidia]\nprovides: [dcgm]\n",
    "roles/worker.yaml": "describe: works\nlayer: dcgm\nneeds: [cuda, dcgm]\n",
}
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Return a function that writes the definition above, with some files replaced."""

    def written(**changed: str) -> Path:
        named = {name.replace("__", "/") + ".yaml": text for name, text in changed.items()}
        for name, text in {**FILES, **named}.items():
            path = tmp_path / "images" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return written


def failure(root: Path) -> ImagesError:
    with pytest.raises(ImagesError) as caught:
        load(root)
    return caught.value


def test_the_projects_own_definition_is_sound() -> None:
    definition = load(ROOT)
    assert {"controller", "login", "worker"} <= definition.roles.keys()
    assert {"debian", "nvidia"} <= definition.versions.variants.keys()


@pytest.mark.parametrize("role", ["login", "worker"])
def test_the_role_for_compiling_is_the_same_pod_with_a_compiler(role: str) -> None:
    """The role for compiling differs by its compiler only, and limits users and jobs in the same way."""
    found = load(ROOT).roles
    plain, devel = found[role], found[f"{role}-devel"]
    for part in ("services", "capabilities", "ports", "drain", "files", "env"):
        assert getattr(devel, part) == getattr(plain, part), part
    assert set(devel.needs) == {*plain.needs, "devel"} and not devel.default


@pytest.mark.parametrize(
    ("role", "other", "added"),
    [
        ("login", "login-pyxis", set()),
        ("worker", "worker-containers", {"containers"}),
        ("worker", "worker-pyxis", {"containers"}),
    ],
)
def test_a_role_with_containers_runs_every_service_of_the_plain_one(role: str, other: str, added: set[str]) -> None:
    roles = load(ROOT).roles
    plain, more = (set(roles[name].services.parts[0][1]) for name in (role, other))
    assert more == plain | added


def test_a_role_that_extends_another_adds_to_its_lists_and_replaces_its_values(write: Write) -> None:
    root = write(
        roles__base="describe: b\nlayer: os\nservices: [a]\nports: [22]\nenv: {X: '1', Y: '2'}\ndefault: false\n",
        roles__more="describe: m\nextends: base\nlayer: cuda\nservices: {all: [b], nvidia: [c]}\nenv: {Y: '3'}\n",
    )
    more = load(root).roles["more"]
    assert (more.layer, more.ports, more.env, more.default) == ("cuda", (22,), {"X": "1", "Y": "3"}, True)
    assert more.services.of(DEBIAN) == ("a", "b")
    assert more.services.of(BuildChoice("nvidia", SlurmSource.SOURCE)) == ("a", "b", "c")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("extends: workr\n", "no role 'workr'"),
        ("extends: more\n", "more would extend itself"),
        ("extends: [worker]\n", "expected text"),
        ("extends: worker\nneeds: gpu\n", "expected a list"),
    ],
)
def test_a_role_that_cannot_be_extended_is_named(write: Write, text: str, words: str) -> None:
    error = failure(write(roles__more=f"describe: m\nlayer: os\n{text}"))
    assert words in str(error) and "images/roles/more.yaml" in str(error)


def test_a_layer_for_another_variant_is_left_out_and_its_parent_takes_its_place(write: Write) -> None:
    definition = load(write())
    assert [layer.name for layer in active_chain(definition, "dcgm", DEBIAN)] == ["root", "os", "cuda"]
    nvidia = BuildChoice("nvidia", SlurmSource.SOURCE)
    assert [layer.name for layer in active_chain(definition, "dcgm", nvidia)] == ["root", "os", "cuda", "dcgm"]


def test_lists_follow_the_selectors_that_hold(write: Write) -> None:
    text = """
describe: x
from: root
packages:
  all: [a]
  slurm-package: [b]
  debian+slurm-source: [c]
  nvidia: [d]
"""
    layer = load(write(layers__os=text)).layers["os"]
    assert layer.packages.of(DEBIAN) == ("a", "b")
    assert layer.packages.of(BuildChoice("debian", SlurmSource.SOURCE)) == ("a", "c")
    assert layer.packages.of(BuildChoice("nvidia", SlurmSource.SOURCE)) == ("a", "d")


def test_what_a_variant_cannot_is_absent_with_its_reason(write: Write) -> None:
    definition = load(write())
    provided, absent = capabilities(definition, definition.roles["worker"], DEBIAN)
    assert provided == {"cuda"}
    assert absent == {"dcgm": "no package"}


@pytest.mark.parametrize(
    ("changed", "why", "hint"),
    [
        ({"layers__os": "describe: x\nfrom: root\npakages: [a]\n"}, "unknown key 'pakages'", "packages"),
        ({"roles__worker": "describe: x\nlayer: os\nservises: []\n"}, "unknown key 'servises'", "services"),
        ({"versions": VERSIONS.replace("    python:", "    pyhton:")}, "unknown key 'pyhton'", "python"),
        ({"layers__os": "describe: x\nfrom: root\nfrom: cuda\n"}, "'from' is given twice", None),
        ({"layers__os": "describe: x\nfrom: root\npackages: less\n"}, "expected a list, found text", None),
        ({"layers__os": "describe: x\nfrom: root\npackages: [1]\n"}, "expected text, found a number", "quotes"),
        ({"layers__os": "describe: [\n"}, "not YAML", None),
        ({"layers__os": "? [a, b]\n: c\n"}, "a key is one word", None),
        ({"layers__os": "describe: [x]\nfrom: root\n"}, "expected text, found a list", None),
        ({"layers__os": "describe: x\nfrom: root\npackages: {debain: [a]}\n"}, "selector 'debain'", "debian"),
        ({"layers__os": "describe: x\nfrom: root\nusers: [slrum]\n"}, "no user 'slrum'", "slurm"),
        ({"layers__os": "describe: x\nfrom: root\ndownloads: [toool]\n"}, "no pin 'toool'", "tool"),
        ({"layers__os": "describe: x\nfrom: root\npython: [kube]\n"}, "no libraries 'kube'", None),
        ({"versions": f"{VERSIONS}python: {{k: [a, 'a==1']}}\n"}, "'a' is given twice", None),
        ({"versions": f"{VERSIONS}python: {{k: ['a @ https://x.invalid']}}\n"}, "is not NAME, NAME==VERSION", None),
        ({"roles__worker": "describe: x\nlayer: os\nprogram: p\nservices: [s]\n"}, "p is the only program", None),
        ({"roles__worker": "describe: x\nlayer: os\nuser: slrum\n"}, "no user 'slrum' in its layers", "slurm"),
        ({"layers__os": "describe: x\n"}, "either `from` or `bootstrap`", None),
        ({"layers__os": "describe: x\nfrom: rooot\n"}, "no layer 'rooot'", "root"),
        ({"roles__worker": "describe: x\nlayer: dcgn\n"}, "no layer 'dcgn'", "dcgm"),
        ({"roles__worker": "describe: x\nlayer: os\nneeds: [cudda]\n"}, "no variant has the capability", "cuda"),
        ({"roles__worker": "describe: x\nlayer: os\nneeds: [cuda]\n"}, "neither provides 'cuda'", "cuda"),
        ({"layers__os": "describe: x\nfrom: dcgm\n"}, "a cycle: ", None),
        ({"layers__os": "describe: x\nfrom: root\nfiles: [{dir: /lib/x}]\n"}, "symbolic link of the base", "/usr/lib"),
        ({"layers__os": 'describe: x\nfrom: root\nfiles: [{dir: /x, mode: "755"}]\n'}, "four octal digits", None),
        ({"layers__os": 'describe: x\nfrom: root\nrun: ["a\\nb"]\n'}, "a command is one line", "component"),
        ({"layers__root": "describe: x\nbootstrap: {}\nrun: [a]\n"}, "holds packages alone", None),
        ({"versions": VERSIONS.replace("@sha256:", ":latest#")}, "not pinned by digest", None),
        ({"versions": VERSIONS.replace("2026-01-01", "soon")}, "'soon' is not a date", None),
        ({"versions": VERSIONS.replace("0" * 64, "abc")}, "not a SHA-256", None),
    ],
)  # fmt: skip
def test_a_mistake_is_told_with_file_and_nearest_name(
    write: Write, changed: dict[str, str], why: str, hint: str | None
) -> None:
    error = failure(write(**changed))
    assert why in error.why
    assert error.file is not None and str(error.file).startswith("images/")
    if hint:
        assert error.hint is not None and hint in error.hint


def test_a_file_that_is_not_text_is_named(write: Write) -> None:
    root = write()
    (root / "images/layers/os.yaml").write_bytes(b"\xff\xfe\x00")
    error = failure(root)
    assert (error.why, error.file) == ("not UTF-8 text", "images/layers/os.yaml")


def test_two_users_of_one_number_are_refused(write: Write) -> None:
    versions = VERSIONS.replace("users:\n", "users:\n  munge: {uid: 64030}\n")
    with pytest.raises(ImagesError) as told:
        load(write(versions=versions))
    assert "users.slurm.uid" in str(told.value) and "64030 is munge's already" in str(told.value)


def test_artifacts_that_lead_in_a_circle_are_a_cycle(write: Write) -> None:
    takes = "describe: x\nfrom: root\nartifacts: [{layer: cuda, from: /a, to: /b}]\n"
    assert "a cycle" in failure(write(layers__os=takes)).why


def test_a_layer_that_artifacts_name_must_exist(write: Write) -> None:
    takes = "describe: x\nfrom: root\nartifacts: [{layer: biulder, from: /a, to: /b}]\n"
    assert "no layer 'biulder'" in failure(write(layers__os=takes)).why
