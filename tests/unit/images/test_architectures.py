"""Two architectures from one definition: what differs, what must not differ, and the error for each mistake."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from images import ImagesError, architectures, host
from images.archive import apt, bootstrap, lock
from images.archive.lock import LockContext
from images.archive.locked import LockRequest, Slice
from images.cli.session import Session, build_tools
from images.definition.load import load, read_yaml
from images.definition.spec import BuildChoice, SlurmSource
from images.engine.docker import DockerEngine
from images.host import OWN_ENGINE
from images.make import build
from images.make.build import advise, ensure_base
from images.make.compose import Composer
from images.make.plan import Composed, PlannedImage, render_dockerfile
from images.make.progress import Plain
from images.settings import BuildSettings

ROOT = Path(__file__).resolve().parents[3]
DEFINITION = load(ROOT)
OWN = architectures.read_own()
OTHER = "amd64" if OWN == "arm64" else "arm64"


def place(arch: str, release: str = "24.11") -> LockContext:
    return LockContext(
        ROOT, DEFINITION, BuildChoice("debian", SlurmSource.PACKAGE, "13.5", release, arch), BuildSettings()
    )


def composed(arch: str) -> Composed:
    slices = {name: Slice(name, LockRequest((), "", ()), ()) for name in DEFINITION.layers}
    return Composer(place(arch), slices, read_yaml).compose(DEFINITION.roles)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [("", (OWN,)), ("arm64", ("arm64",)), ("both", (OWN, OTHER)), (f"{OTHER},{OWN},{OTHER}", (OWN, OTHER))],
)
def test_what_was_asked_for_each_once_and_the_machines_own_first(asked: str, expected: tuple[str, ...]) -> None:
    assert architectures.parse_architectures(asked) == expected


@pytest.mark.parametrize("asked", ["arm46", "amd64,riscv64", "amd64,", "both,arm64"])
def test_an_architecture_that_is_none_is_told(asked: str) -> None:
    with pytest.raises(ImagesError, match="cannot build for the architecture: no images are made for"):
        Session.open_each(ROOT, BuildSettings(arch=asked))


def test_a_variant_says_what_it_is_for() -> None:
    with pytest.raises(ImagesError) as caught:
        Session.open(ROOT, BuildSettings(variant="nvidia", arch="arm64"))
    assert "nvidia is not made for arm64" in str(caught.value) and "it is for amd64" in str(caught.value)


def test_what_takes_one_architecture_refuses_two() -> None:
    with pytest.raises(ImagesError, match="'both' is more than one"):
        Session.open(ROOT, BuildSettings(arch="both"))


def test_each_architecture_has_names_and_locks_of_its_own_and_amd64_those_of_before() -> None:
    assert place("amd64").directory == ROOT / "images/lock/debian"
    assert place("arm64").directory == ROOT / "images/lock/debian-arm64"
    assert place("amd64", "26.05").directory == ROOT / "images/lock/debian-slurm-26.05"
    assert place("arm64", "26.05").directory == ROOT / "images/lock/debian-slurm-26.05-arm64"
    below = place("arm64", "26.05").shared
    assert below and below.directory == ROOT / "images/lock/debian-arm64"
    assert composed("amd64").role("controller").tag.startswith("none-debian-")
    assert composed("arm64").role("controller").tag.startswith("none-debian-arm64-")


def test_no_name_of_one_machine_stands_in_the_instructions_for_the_other() -> None:
    for image in composed("arm64").images.values():
        assert "x86_64" not in repr(image.step), image.key
    assert "x86_64-linux-gnu" in repr(composed("amd64").images["layer:tools"].step)
    assert "aarch64-linux-gnu" in repr(composed("arm64").images["layer:tools"].step)


def test_a_layer_may_say_what_is_for_one_architecture(tmp_path: Path) -> None:
    layers = tmp_path / "images/layers"
    layers.mkdir(parents=True)
    (tmp_path / "images/templates").symlink_to(ROOT / "images/templates")
    (tmp_path / "images/versions.yaml").write_text(
        'epoch: "2026-01-01"\nvariants:\n  debian: {describe: x, python: "3.13", suite: trixie}\n'
    )
    (layers / "root.yaml").write_text("describe: r\nbootstrap: {}\n")
    (layers / "top.yaml").write_text(
        "describe: t\nfrom: root\nrun: {all: ['echo {{ multiarch }}'], arm64: [only-there]}\n"
        "verify: ['test {{nowhere}}']\n"
    )
    found = load(tmp_path)
    arm = BuildChoice("debian", SlurmSource.PACKAGE, arch="arm64")
    assert found.layers["top"].run.of(arm) == ("echo {{ multiarch }}", "only-there")
    assert found.layers["top"].run.of(replace(arm, arch="amd64")) == ("echo {{ multiarch }}",)
    slices = {name: Slice(name, LockRequest((), "", ()), ()) for name in found.layers}
    with pytest.raises(ImagesError) as caught:
        Composer(LockContext(tmp_path, found, arm, BuildSettings()), slices, read_yaml).compose(["layer:top"])
    assert caught.value.file == "images/layers/top.yaml" and "no name 'nowhere'" in caught.value.why
    assert "known: multiarch" in str(caught.value.hint)


def test_another_architecture_is_bootstrapped_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(apt, "bootstrap_origins", lambda variant, settings: ())
    slice_ = Slice("root", LockRequest((), "", ()), ())

    def words(arch: str) -> list[str]:
        return bootstrap.command(place(arch), slice_, (), tmp_path / "root.tar", tmp_path / "sources.list")

    assert f"--architectures={OTHER}" in words(OTHER)
    assert not [word for word in words(OWN) if word.startswith("--architectures")]


def test_the_roots_packages_have_this_machines_programs_and_the_root_does_not_keep_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(apt, "bootstrap_origins", lambda variant, settings: ())
    slice_, sources = Slice("root", LockRequest((), "", ()), ()), tmp_path / "sources.list"
    root, tar = tmp_path / "root", tmp_path / "native.tar"
    (root / "mnt").mkdir(parents=True)
    (tmp_path / "minivm/bin").mkdir(parents=True)
    subprocess.run(["tar", "-c", "-f", str(tar), "-C", str(tmp_path), "minivm"], check=True)

    def words(aid: bootstrap.Native | None) -> list[str]:
        return bootstrap.command(place(OTHER), slice_, (), tmp_path / "root.tar", sources, aid)

    new = [
        word for word in words(bootstrap.Native(tar, build.NATIVE_MOUNT, build.NATIVE_PATH)) if word not in words(None)
    ]
    (begins,) = (word.partition("=")[2] for word in new if word.startswith("--essential-hook="))
    (ends,) = (word.partition("=")[2] for word in new if word.startswith("--customize-hook="))
    subprocess.run(["sh", "-c", begins, "sh", str(root)], check=True)
    assert f"/{(root / 'mnt/minivm/bin').relative_to(root)}" == build.NATIVE_PATH.split(":")[0]
    assert [word for word in new if "DPkg::Path" in word and build.NATIVE_PATH in word]
    subprocess.run(["sh", "-c", ends, "sh", str(root)], check=True)
    assert not list((root / "mnt").iterdir())


@pytest.mark.parametrize(
    ("arch", "of", "builder", "base"),
    [
        (OWN, OWN, "classic", ""),
        (OTHER, OWN, "buildx", ""),
        (OTHER, OWN, "classic", "debian@sha256:1"),
        (OWN, OTHER, "classic", ""),  # a remote engine: this machine may be unable to build a root for it
    ],
)
def test_a_build_that_does_without_this_machines_programs_builds_none(
    arch: str, of: str, builder: str, base: str
) -> None:
    settings = BuildSettings(base_image=base)
    session = Session(ROOT, settings, DEFINITION, replace(place(arch), settings=settings))
    engine = SimpleNamespace(arch=of, builder=SimpleNamespace(buildx=builder == "buildx"))
    session._engine = cast("DockerEngine", engine)
    assert build_tools(session, Plain()) is None


def test_qemu_is_told_which_processor_to_play_while_an_image_is_built_and_the_image_is_not() -> None:
    """Builds set QEMU's CPU model, and the image does not contain it.

    QEMU's default makes Python and Perl eight times slower. Images for amd64 do not change for this.
    """
    for arch, expected in (("arm64", 'ARG QEMU_CPU="cortex-a72"\n'), ("amd64", "")):
        for image in composed(arch).images.values():
            if image.step.has_steps and not image.is_bootstrapped:
                before, _, after = render_dockerfile(image.step, ROOT / "images/templates").partition("RUN ")
                assert expected in before and after, image.key
                assert "QEMU" not in before.replace(expected, "") + after + repr(image.step.env), image.key


def test_qemu_is_told_which_processor_to_play_while_the_root_is_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(apt, "bootstrap_origins", lambda variant, settings: ())
    monkeypatch.setattr(apt, "default_origins", lambda variant: ())
    standin = tmp_path / "mmdebstrap"
    standin.write_text('#!/bin/sh\necho "E: plays ${QEMU_CPU-what it likes}"\nexit 1\n')
    standin.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("QEMU_CPU", raising=False)
    for arch, expected in (("arm64", "cortex-a72"), ("amd64", "what it likes")):
        with pytest.raises(ImagesError) as caught:
            bootstrap.bootstrap(
                place(arch), Slice("root", LockRequest((), "", ()), ()), (), tmp_path / "root.tar", print
            )
        assert caught.value.why == f"E: plays {expected}"


def test_every_layer_of_each_architecture_is_locked() -> None:
    """Locks match the definition for every architecture, with the same Slurm version on both."""
    versions = {}
    for arch in architectures.KNOWN:
        here = place(arch)
        slices = lock.read(here)
        assert not lock.find_stale(lock.list_wanted(here, list(DEFINITION.layers)), slices), arch
        found = {package.arch for slice_ in slices.values() for package in slice_.packages}
        assert found == {"all", arch}
        versions[arch] = Composer(here, slices, read_yaml).slurm
    assert len(set(versions.values())) == 1


# The kernel's binfmt_misc registry of interpreters.

QEMU = """enabled
interpreter {interpreter}
flags: {flags}
offset 0
magic 7f454c460201010000000000000000000200{machine}
mask ffffffffffffff00fffffffffffffffffeffffff
"""


def registry(directory: Path, **entries: str) -> Path:
    (directory / "status").write_text("enabled\n")
    for name, text in entries.items():
        (directory / name).write_text(text)
    return directory


def test_who_runs_an_architectures_programs_is_told_by_what_it_is_registered_for(tmp_path: Path) -> None:
    """The interpreter of an architecture is found by its magic number, not by its name.

    An engine or a distribution may have registered another interpreter than QEMU.
    """
    other = QEMU.format(interpreter="/usr/bin/rosetta", flags="POCF", machine="b700")
    mine = QEMU.format(interpreter="/usr/bin/qemu-riscv64-static", flags="F", machine="f300")
    found = architectures.find_interpreter(
        "arm64", registry(tmp_path, riscv=mine, somebodys=other, python3="enabled\nextension .py\n")
    )
    assert found == architectures.Interpreter("somebodys", "/usr/bin/rosetta", "POCF")
    assert architectures.explain_refusal("arm64", tmp_path) is None


def test_where_nobody_runs_them_or_not_in_containers_it_says_so(tmp_path: Path) -> None:
    assert "nothing is registered" in str(architectures.explain_refusal("arm64", tmp_path / "not-mounted"))
    text = QEMU.format(interpreter="/usr/bin/qemu-aarch64", flags="OC", machine="b700")
    registry(tmp_path, aarch=text)
    assert "lacks the flag F" in str(architectures.explain_refusal("arm64", tmp_path))
    registry(tmp_path, aarch=text.replace("enabled", "disabled"))
    assert "nothing is registered" in str(architectures.explain_refusal("arm64", tmp_path))


def test_what_the_kernel_is_told_is_an_elf_file_of_that_machine() -> None:
    _, name, kind, offset, magic, mask, interpreter, flags = (
        architectures.make_registration("arm64").decode().split(":")
    )
    assert (name, kind, offset, interpreter) == ("qemu-aarch64", "M", "", "/usr/bin/qemu-aarch64-static")
    assert "F" in flags
    # The first bytes of that machine's /bin/true, after masking, equal the magic.
    head = bytes.fromhex("7f454c460201010000000000000000000300b700")
    plain = [bytes.fromhex(text.replace("\\x", "")) for text in (magic, mask)]
    assert bytes(a & b for a, b in zip(head, plain[1], strict=True)) == bytes(
        a & b for a, b in zip(plain[0], plain[1], strict=True)
    )


def told(engine: str, settings: BuildSettings, arch: str, bootstrapped: bool, where: str = OWN_ENGINE) -> str:
    session = Session(ROOT, settings, DEFINITION, place(arch))
    session._engine = cast("DockerEngine", SimpleNamespace(arch=engine, choose=lambda: (where, "DOCKER_HOST")))
    try:
        session.check_architecture([cast("PlannedImage", SimpleNamespace(is_bootstrapped=bootstrapped))])
    except ImagesError as error:
        return str(error)
    return ""


def test_a_build_that_cannot_run_is_refused_before_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(architectures, "explain_refusal", lambda arch: f"no {arch} here")
    far = "tcp://builder.site:2376"
    asked = BuildSettings(arch=OTHER)
    assert told(OWN, BuildSettings(), OWN, True) == ""
    # An engine of another architecture, without `--arch`.
    assert f"the engine at {far} is of {OTHER}" in told(OTHER, BuildSettings(), OWN, True, far)
    assert f"--arch {OTHER} builds for it" in told(OTHER, BuildSettings(), OWN, True, far)
    # Programs of the other architecture cannot run: on this machine for the root, in the engine for other layers.
    assert f"cannot build for {OTHER}: no {OTHER} here" in told(OWN, asked, OTHER, False)
    assert "images/host.py emulation" in told(OWN, asked, OTHER, False)
    assert f"no {OTHER} here" in told(OTHER, asked, OTHER, True, far)
    assert told(OTHER, asked, OTHER, False, far) == ""


def test_what_an_engine_could_not_run_is_told_by_its_own_words() -> None:
    assert "cannot run programs of this architecture" in advise(["exec /bin/sh: exec format error"])


def test_the_host_script_says_which_architectures_there_are() -> None:
    done = subprocess.run([sys.executable, "images/host.py", "emulation", "armhf"], cwd=ROOT, capture_output=True,
                          text=True, check=False)  # fmt: skip
    assert done.returncode == 1
    assert "no images are made for 'armhf'" in done.stderr and "Traceback" not in done.stderr
    # The machine's own architecture needs no emulation.
    subprocess.run([sys.executable, "images/host.py", "emulation", OWN], cwd=ROOT, check=True)


def test_the_kernel_is_told_where_nobody_has_told_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "register").touch()
    monkeypatch.setattr(architectures, "REGISTRY", tmp_path)
    monkeypatch.setattr(architectures, "find_interpreter", lambda arch: None)
    monkeypatch.setattr(host, "apt_install", lambda packages: None)
    host.register(OTHER)
    assert (tmp_path / "register").read_bytes() == architectures.make_registration(OTHER)
    # A kernel that refuses the registration, for example in a container.
    (tmp_path / "register").unlink()
    (tmp_path / "register").mkdir()
    with pytest.raises(host.HostError, match=f"cannot run programs of {OTHER} here: .*could not be registered"):
        host.register(OTHER)


def test_a_base_of_another_architecture_is_told() -> None:
    asked: list[tuple[str, str]] = []
    engine = cast(
        "DockerEngine",
        SimpleNamespace(
            has=lambda name: bool(asked),
            pull=lambda name, arch: asked.append((name, arch)),
            inspect=lambda name: {"Architecture": OTHER},
        ),
    )
    ensure_base(engine, "base@sha256:1", OTHER)
    assert asked == [("base@sha256:1", OTHER)]
    with pytest.raises(ImagesError) as caught:
        ensure_base(engine, "base@sha256:1", OWN)
    assert f"base@sha256:1 is for {OTHER}, and this build for {OWN}" in str(caught.value)
    assert f"--arch {OTHER} builds on it" in str(caught.value)
