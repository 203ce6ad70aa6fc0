"""Progress and error output of a build, and the limits that the bootstrap runs under."""

from __future__ import annotations

import errno
import io
import tarfile
from pathlib import Path

import pytest

from images import ImagesError
from images.archive import bootstrap
from images.archive.locked import LockedPackage, LockRequest, Slice
from images.definition.spec import EntryKind
from images.engine.builder import StepFailed, split_dockerfile
from images.make.build import explain_failures, move_entries
from images.make.plan import BuildResult, DockerfileContent, PlannedImage, make_strict, render_dockerfile
from images.make.progress import Plain, print_results

TEMPLATES = Path(__file__).resolve().parents[3] / "images/templates"
ROOT = Slice("root", LockRequest((), "", ()), (LockedPackage("apt", "3.0.3", "amd64", 1, "a" * 64, "debian", "p"),))


@pytest.fixture
def image() -> PlannedImage:
    step = DockerfileContent("x", "scratch", 0, False)
    return PlannedImage("layer:x", "x", "minivm/layer-x", "t", "", "", step, (), (), ())


def told(capsys: pytest.CaptureFixture[str], *lines: str) -> list[str]:
    plain = Plain()
    for line in lines:
        plain.line("layer:x", line)
    return capsys.readouterr().out.splitlines()


def test_each_step_is_told_once_by_either_builder(capsys: pytest.CaptureFixture[str]) -> None:
    lines = ["minivm: packages", "Unpacking less (668-1) ...", "minivm: packages", "#7 1.234 minivm: clean up"]
    assert told(capsys, *lines) == ["layer:x: packages", "layer:x: clean up"]


def test_images_that_are_up_to_date_share_one_line(capsys: pytest.CaptureFixture[str], image: PlannedImage) -> None:
    kept, built = BuildResult(image, ()), BuildResult(image, ("less",), seconds=2.0, built=True)
    print_results([kept] * 18, {})
    assert capsys.readouterr().out == "up to date: 18 images\n"
    print_results([kept, built], {image.reference: 5_000_000})
    _, row, last = capsys.readouterr().out.splitlines()
    assert (row.split(), last) == (["minivm/layer-x:t", "5", "MB", "less", "2.0"], "up to date: 1 image")
    print_results([built], {})
    assert "up to date" not in capsys.readouterr().out


def test_an_echoed_instruction_is_not_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    assert told(capsys, 'Step 3/4 : RUN echo "minivm: packages"; \\', '#7 [3/3] RUN echo "minivm: packages"') == []


def test_a_failure_shows_the_step_the_last_lines_the_log_and_what_to_do(image: PlannedImage, tmp_path: Path) -> None:
    log = tmp_path / "layer-x.log"
    noise = "Step 3/4 : RUN " + "x" * 1000
    log.write_text(f"{noise}\n ---> Running in abc\nminivm: packages\nE: Could not connect to m.invalid\n")
    with pytest.raises(ImagesError) as caught, explain_failures(image, log):
        raise StepFailed("The command '/bin/sh -c ...' returned a non-zero code: 100")
    text = str(caught.value)
    assert text.startswith("cannot build layer:x: step `packages` failed: status 100\n")
    assert "E: Could not connect" in text
    assert "xxx" not in text
    assert "---> Running" not in text
    assert "the mirror is not reachable" in text
    assert str(log) in text


def test_no_space_is_no_traceback(image: PlannedImage, tmp_path: Path) -> None:
    with pytest.raises(ImagesError, match="no space left on device for /here"), explain_failures(image, tmp_path):
        raise OSError(errno.ENOSPC, "No space left on device", "/here")
    with pytest.raises(OSError, match="bug"), explain_failures(image, tmp_path):
        raise OSError(errno.EINVAL, "bug", "/here")


def test_a_step_is_taken_out_of_its_instructions_as_the_engine_would_read_it() -> None:
    step = DockerfileContent("x", "base", 7, True, settings=(("QEMU_CPU", "one"),), commands=("a b", "c"),
                            env=(("LANG", "C"),), ports=(22,), stop_signal="SIGINT", entrypoint=("/x",))  # fmt: skip
    before, script, defaults = split_dockerfile(render_dockerfile(step, TEMPLATES))
    assert before == '# x\nFROM base\nADD layer.tar /\nENV LANG="C"\n'
    assert defaults == {"MINIVM_SOURCES": "", "MINIVM_CA": "", "QEMU_CPU": "one"}
    assert script.startswith("set -eu; umask 022; export SOURCE_DATE_EPOCH=7 ")
    assert "    a b;     c; " in script
    assert script.endswith("-exec touch -h -d @7 {} +")
    assert "\n" not in script


def test_instructions_without_a_step_have_no_script() -> None:
    assert split_dockerfile(render_dockerfile(DockerfileContent("x", "base", 7, True, ports=(22,)), TEMPLATES))[1] == ""


@pytest.mark.parametrize(
    ("command", "wrapped"),
    [("make", False), ("a && b", True), ("a || b", True), ("a; b", True), ("if a; then b; fi", True)],
)  # fmt: skip
def test_a_compound_command_is_wrapped_so_that_each_failure_counts(command: str, wrapped: bool) -> None:
    assert make_strict(command) == (f"{{ {command}; }} || exit 1" if wrapped else command)


def test_the_bootstrap_installs_the_locked_versions_though_newer_ones_are_there() -> None:
    assert bootstrap.preferences(ROOT) == "Package: apt\nPin: version 3.0.3\nPin-Priority: 1001\n"


def root_tar(directory: Path, version: str) -> Path:
    status = f"Package: apt\nStatus: install ok installed\nVersion: {version}\n\n"
    status += "Package: gone\nStatus: deinstall ok config-files\nVersion: 1\n"
    data = status.encode()
    with tarfile.open(directory / "root.tar", "w") as tar:
        info = tarfile.TarInfo("./var/lib/dpkg/status")
        info.size = len(data)
        tar.addfile(info, io.BytesIO(data))
    return directory / "root.tar"


def test_what_was_bootstrapped_must_be_what_was_locked(tmp_path: Path) -> None:
    bootstrap.check(root_tar(tmp_path, "3.0.3"), ROOT)
    with pytest.raises(ImagesError, match=r"apt: locked 3\.0\.3, installed 3\.0\.4"):
        bootstrap.check(root_tar(tmp_path, "3.0.4"), ROOT)


def artifact() -> tarfile.TarFile:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for name, kind in (("out", tarfile.DIRTYPE), ("out/bin", tarfile.DIRTYPE), ("out/bin/tool", tarfile.REGTYPE)):
            info = tarfile.TarInfo(name)
            info.type, info.mode = kind, 0o755
            tar.addfile(info)
    stream.seek(0)
    return tarfile.open(fileobj=stream)


@pytest.mark.parametrize(
    ("contents", "expected"),
    [
        (True, {"usr/bin": EntryKind.DIRECTORY, "usr/bin/tool": EntryKind.FILE}),
        (False, {"usr": EntryKind.DIRECTORY, "usr/bin": EntryKind.DIRECTORY, "usr/bin/tool": EntryKind.FILE}),
    ],
)
def test_an_artifact_lands_where_it_says(contents: bool, expected: dict[str, EntryKind], tmp_path: Path) -> None:
    with artifact() as tar:
        found = {entry.path: entry.kind for entry in move_entries(tar, "usr", contents, tmp_path)}
    assert found == expected
