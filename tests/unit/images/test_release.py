"""A release in a real git repository: what it refuses, what it makes, and that an interrupted one is finished."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import tarfile
from datetime import date
from pathlib import Path

import helm_python
import pytest
import yaml
from click.testing import CliRunner

import build
from ground.version import VERSION
from images import ImagesError
from images.cli import release
from images.cli.release import (
    CHANGELOG,
    CHART,
    STATED,
    ProjectRelease,
    close_section,
    list_followers,
    make_values,
    push_target,
    replace_version,
)

ROOT = Path(__file__).resolve().parents[3]
DAY, LATER = date(2027, 1, 31), date(2027, 2, 1)
ENTRIES = "**Added**\n\n- A thing.\n  Its second line.\n\n**Fixed**\n\n- A bug.\n\n"
LOG = f"# Changelog\n\nAbout it.\n\n## Unreleased\n\nGoes here, under **Added**.\n\n{ENTRIES}## 0.1.0\n\n- The first.\n"


def git(repository: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(repository), *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a repository with the project's own files that state the version, as of 0.1.0."""
    for name in ("GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM"):
        monkeypatch.setenv(name, "/dev/null")
    path = tmp_path / "checkout"
    git(tmp_path, "init", "--quiet", "--initial-branch", "main", str(path))
    git(path, "config", "user.name", "A Maintainer")
    git(path, "config", "user.email", "maintainer@site")
    for file in STATED:
        (path / file).parent.mkdir(parents=True, exist_ok=True)
        (path / file).write_text(stated(file, "0.1.0"))
    (path / CHANGELOG).write_text(LOG)
    committed(path, "make everything")
    committed(path, "change something")
    return path


def stated(file: str, version: str) -> str:
    """Return the project's own file, with a version of the test's."""
    current = re.search(r'"(.+)"', (ROOT / "ground/version.py").read_text().splitlines()[-1])
    assert current
    return replace_version(file, (ROOT / file).read_text(), current[1], version)


def committed(repository: Path, subject: str) -> str:
    git(repository, "add", "--all")
    git(repository, "commit", "--quiet", "--allow-empty", "--message", subject)
    return git(repository, "rev-parse", "HEAD")


def released(repository: Path, version: str = "0.2.0", day: date = DAY) -> list[str]:
    said: list[str] = []
    ProjectRelease(repository, version, day).prepare(said.append)
    return said


def check_made(repository: Path, version: str = "0.2.0") -> None:
    assert git(repository, "status", "--porcelain") == ""
    assert git(repository, "rev-parse", f"v{version}^{{commit}}") == git(repository, "rev-parse", "HEAD")
    assert git(repository, "cat-file", "-t", f"v{version}") == "tag"
    for file in STATED:
        assert (repository / file).read_text() == stated(file, version)


def test_a_release_is_one_commit_and_its_tag(checkout: Path) -> None:
    before = git(checkout, "rev-parse", "HEAD")
    assert released(checkout) == ["made the commit of 0.2.0", "made the tag v0.2.0"]
    check_made(checkout)
    assert git(checkout, "rev-parse", "HEAD^") == before
    assert git(checkout, "log", "-1", "--format=%s") == "release: make version 0.2.0"
    assert git(checkout, "diff", "--name-only", "HEAD^").splitlines() == sorted([CHANGELOG, *STATED])
    chart_file = yaml.safe_load((checkout / "cluster/chart/Chart.yaml").read_text())
    assert (chart_file["version"], chart_file["appVersion"]) == ("0.2.0", "0.2.0")
    assert chart_file["dependencies"][0]["version"] == "0.2.0"


def test_the_entries_move_to_a_section_and_the_introduction_stays() -> None:
    moved = close_section(LOG, "0.2.0", DAY)
    unreleased = "## Unreleased\n\nGoes here, under **Added**.\n\n"
    assert moved == LOG.replace(f"{unreleased}{ENTRIES}", f"{unreleased}## 0.2.0 - 2027-01-31\n\n{ENTRIES}")
    with pytest.raises(ImagesError, match="nothing is listed under Unreleased"):
        close_section(moved, "0.3.0", DAY)


def test_the_projects_own_changelog_can_be_released() -> None:
    text = (ROOT / CHANGELOG).read_text()
    try:
        moved = close_section(text, "999.0.0", DAY)
    except ImagesError as error:
        assert "nothing is listed" in str(error)  # right after a release
    else:
        assert moved.replace("## 999.0.0 - 2027-01-31\n\n", "") == text


@pytest.mark.parametrize("empty", ["", "**Added**\n\n**Fixed**\n\n"])
def test_nothing_unreleased_is_refused(checkout: Path, empty: str) -> None:
    (checkout / CHANGELOG).write_text(LOG.replace(ENTRIES, empty))
    head = committed(checkout, "empty the section")
    with pytest.raises(ImagesError, match="nothing is listed under Unreleased"):
        released(checkout)
    assert git(checkout, "rev-parse", "HEAD") == head


def test_a_changelog_without_the_section_or_with_the_version_is_refused() -> None:
    with pytest.raises(ImagesError, match="no section `## Unreleased`"):
        close_section(LOG.replace("Unreleased", "Next"), "0.2.0", DAY)
    with pytest.raises(ImagesError, match=r"a section 0\.1\.0 already"):
        close_section(LOG, "0.1.0", DAY)


@pytest.mark.parametrize("version", ["", "1", "v0.2.0", "0.2", "0.2.0-rc1", "0.02.0", "0.2.0\n", "--all", "\u0660.2.0"])
def test_what_is_no_version_is_refused(tmp_path: Path, version: str) -> None:
    with pytest.raises(ImagesError, match=r"MAJOR\.MINOR\.PATCH"):
        ProjectRelease(tmp_path, version, DAY)


@pytest.mark.parametrize("version", ["0.1.0", "0.0.9", "0.1.2", "0.3.0", "0.2.1", "2.0.0", "1.1.0"])
def test_a_version_that_does_not_follow_is_refused(checkout: Path, version: str) -> None:
    with pytest.raises(ImagesError, match=r"the version here is 0\.1\.0.*\n.*0\.1\.1, 0\.2\.0, 1\.0\.0 may follow"):
        released(checkout, version)
    assert git(checkout, "tag") == "" and git(checkout, "status", "--porcelain") == ""


def test_the_next_versions() -> None:
    assert list_followers("1.9.10") == ["1.9.11", "1.10.0", "2.0.0"]


@pytest.mark.parametrize("name", ["README.md", CHANGELOG, "ground/version.py"])
@pytest.mark.parametrize("staged", [True, False])
def test_a_dirty_tree_is_refused(checkout: Path, name: str, staged: bool) -> None:
    with (checkout / name).open("a") as file:
        file.write("a change\n")
    if staged:
        git(checkout, "add", "--all")
    with pytest.raises(ImagesError, match=f"changes that are not committed: {name}"):
        released(checkout)
    assert git(checkout, "tag") == "" and (checkout / name).read_text().endswith("a change\n")


def test_a_tag_on_another_commit_is_refused(checkout: Path) -> None:
    git(checkout, "tag", "v0.2.0", "HEAD^")
    with pytest.raises(ImagesError, match=r"the tag v0\.2\.0 is there, on another commit"):
        released(checkout)


def test_a_tag_on_a_commit_that_is_no_release_is_refused(checkout: Path) -> None:
    git(checkout, "tag", "v0.2.0")
    with pytest.raises(ImagesError, match="its commit does not make this version"):
        released(checkout)


def test_a_branch_named_like_the_tag_is_no_tag(checkout: Path) -> None:
    git(checkout, "branch", "v0.2.0", "HEAD^")
    released(checkout)
    assert git(checkout, "rev-parse", "refs/tags/v0.2.0^{commit}") == git(checkout, "rev-parse", "HEAD")


def test_a_release_needs_a_branch(checkout: Path) -> None:
    git(checkout, "checkout", "--quiet", "--detach")
    with pytest.raises(ImagesError, match="no branch is checked out"):
        released(checkout)


def test_a_place_that_states_another_version_is_refused(checkout: Path) -> None:
    path = checkout / "cluster/chart/Chart.yaml"
    path.write_text(path.read_text().replace('appVersion: "0.1.0"', 'appVersion: "0.0.9"'))
    committed(checkout, "break the chart")
    with pytest.raises(ImagesError, match=r"states 0\.1\.0 in 2 places, not in 3 \(cluster/chart/Chart.yaml\)"):
        released(checkout)


@pytest.mark.parametrize("files", [1, 2, 3, 4])
def test_a_release_cut_before_its_commit_is_finished_on_another_day(checkout: Path, files: int) -> None:
    planned = ProjectRelease(checkout, "0.2.0", DAY).plan_files()
    for file, text in list(planned.items())[:files]:
        (checkout / file).write_text(text)
    released(checkout, day=LATER)
    check_made(checkout)
    assert "\n## 0.2.0 - 2027-02-01\n" in (checkout / CHANGELOG).read_text()


def test_a_release_cut_before_its_tag_is_finished(checkout: Path) -> None:
    ProjectRelease(checkout, "0.2.0", DAY).commit()
    head = git(checkout, "rev-parse", "HEAD")
    assert released(checkout, day=LATER) == ["found the commit of 0.2.0", "made the tag v0.2.0"]
    assert git(checkout, "rev-parse", "HEAD") == head
    check_made(checkout)


def test_a_release_that_is_done_is_done_again_without_a_change(checkout: Path) -> None:
    released(checkout)
    head, tag = git(checkout, "rev-parse", "HEAD", "v0.2.0").splitlines()
    git(checkout, "checkout", "--quiet", "v0.2.0")  # as when its images are pushed later
    assert released(checkout, day=LATER) == ["found the commit of 0.2.0", "found the tag v0.2.0"]
    assert git(checkout, "rev-parse", "HEAD", "v0.2.0").splitlines() == [head, tag]
    (checkout / "new").touch()
    with pytest.raises(ImagesError, match="changes that are not committed: new"):
        released(checkout)


def test_a_second_release_follows_the_first(checkout: Path) -> None:
    released(checkout)
    path = checkout / CHANGELOG
    path.write_text(path.read_text().replace("## 0.2.0", "- One more.\n\n## 0.2.0"))
    committed(checkout, "list a change")
    released(checkout, "0.2.1")
    check_made(checkout, "0.2.1")
    assert re.findall(r"^## (.+)$", path.read_text(), re.MULTILINE)[:3] == [
        "Unreleased", "0.2.1 - 2027-01-31", "0.2.0 - 2027-01-31",
    ]  # fmt: skip


def test_gits_own_reason_is_told(checkout: Path, tmp_path: Path) -> None:
    hook = checkout / ".git/hooks/pre-commit"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text("#!/bin/sh\necho the lint failed >&2\nexit 1\n")
    hook.chmod(0o755)
    with pytest.raises(ImagesError, match="`git commit`: the lint failed"):
        released(checkout)
    hook.unlink()
    released(checkout)
    check_made(checkout)
    with pytest.raises(ImagesError, match="not a git repository"):
        released(tmp_path)


def command(*arguments: str) -> str:
    done = CliRunner().invoke(build.main, ["release", "0.2.0", *arguments])
    return f"{done.exit_code}: {done.output}"


def test_the_command_makes_the_release_of_the_checkout(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "REPOSITORY", checkout)
    (checkout / "new").touch()
    assert command().startswith("1: error: cannot release 0.2.0: changes that are not committed: new\n")
    (checkout / "new").unlink()
    assert command().startswith("0: made the commit of 0.2.0\nmade the tag v0.2.0\n`git push origin HEAD v0.2.0`")
    check_made(checkout)


def test_a_push_without_an_engine_leaves_the_tag_and_goes_on_there(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "REPOSITORY", checkout)
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no-engine")
    (tmp_path / "key").touch()
    target = ("--registry", "127.0.0.1:1/hpc", "--sign", str(tmp_path / "key"))
    for found in ("made", "found"):
        said = command(*target)
        assert said.startswith(
            f"1: {found} the commit of 0.2.0\n{found} the tag v0.2.0\nerror: cannot make this machine"
        )
        check_made(checkout)


# The push.
@pytest.mark.parametrize(
    ("registry", "key", "told"),
    [
        ("https://registry.site/hpc", "key", "without scheme"),
        ("registry.site", "key", "no path for the images"),
        ("registry.site/hpc", "", "a release has a signed provenance"),
        ("registry.site/hpc", "absent", "no key .*absent"),
        ("", "key", "nothing to sign"),
    ],
)
def test_a_push_that_cannot_be_is_refused_at_the_start(tmp_path: Path, registry: str, key: str, told: str) -> None:
    (tmp_path / "key").touch()
    with pytest.raises(ImagesError, match=told):
        push_target(registry, tmp_path / key if key else None)


def test_the_package_has_the_charts_files_and_is_the_same_each_time(tmp_path: Path) -> None:
    directory = tmp_path / "chart"
    shutil.copytree(ROOT / CHART, directory)
    (directory / "leftover").touch()
    tracked = git(ROOT, "ls-files", "-z", "--", CHART).replace(f"{CHART}/", "").strip("\0").split("\0")
    content = release.select_chart_files(directory, tracked)
    packed = release.pack_chart(content)
    assert packed == release.pack_chart(dict(reversed(content.items())))
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        names = set(archive.getnames())
    assert {"minivm/Chart.yaml", "minivm/values.yaml", "minivm/charts/crds/Chart.yaml"} <= names
    assert not [name for name in names if "/examples/" in name or name.endswith((".md", ".helmignore", "leftover"))]
    file = tmp_path / "minivm.tgz"
    file.write_bytes(packed)
    with helm_python.Chart.load(file) as loaded:
        assert (loaded.name, loaded.version) == ("minivm", VERSION)


def test_the_values_name_each_image_by_digest() -> None:
    said = yaml.safe_load(make_values("registry.site:5000", "hpc", [("worker", "sha256:ab")]))
    assert said == {
        "image": {"registry": "registry.site:5000", "repository": "hpc", "digests": {"worker": "sha256:ab"}}
    }
