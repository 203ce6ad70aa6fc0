"""The command release: the commit and the tag of a version, and its images and chart in a registry."""

from __future__ import annotations

import fnmatch
import gzip
import hashlib
import io
import json
import re
import subprocess
import tarfile
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, date, datetime
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import click

from ground.errors import counted
from ground.files import write_whole
from images import ImagesError
from images.cli.publish import login_to, open_sessions, push_roles
from images.engine.store import MANIFEST, descriptor
from images.ship import provenance
from images.ship.registry import Registry, RegistryError

if TYPE_CHECKING:
    from images.ship.registry import Login, RegistryPath


# A release in git: the version, its section of the changelog, the commit and the tag.

CHANGELOG = "CHANGELOG.md"
UNRELEASED = "## Unreleased\n"
VERSION_FILE = "ground/version.py"
CHART = "cluster/chart"
# Each file that states the version, with its number of places: the file that programs read, and the chart's copies.
STATED = {VERSION_FILE: 1, f"{CHART}/Chart.yaml": 3, f"{CHART}/charts/crds/Chart.yaml": 1}
VERSION = re.compile(r'^VERSION = "([^"]+)"$', re.MULTILINE)
FORM = re.compile(r"(0|[1-9][0-9]{0,5})\.(0|[1-9][0-9]{0,5})\.(0|[1-9][0-9]{0,5})")


def list_followers(current: str) -> list[str]:
    """Return the versions that may follow the current one: the next patch, minor and major release."""
    match = FORM.fullmatch(current)
    if not match:
        raise ImagesError(f"release after {current!r}", "it is not MAJOR.MINOR.PATCH", file=VERSION_FILE)
    major, minor, patch = map(int, match.groups())
    return [f"{major}.{minor}.{patch + 1}", f"{major}.{minor + 1}.0", f"{major + 1}.0.0"]


def close_section(text: str, version: str, day: date) -> str:
    """Move the entries under Unreleased to a section of the version; the introduction of Unreleased stays."""
    what = f"release {version}"
    before, heading, after = text.partition(f"\n{UNRELEASED}")
    if not heading:
        raise ImagesError(what, "no section `## Unreleased`", file=CHANGELOG)
    if has_section(text, version):
        raise ImagesError(what, f"there is a section {version} already", file=CHANGELOG)
    section, older_heading, older = after.partition("\n## ")
    lines = section.splitlines(keepends=True)
    first = next((number for number, line in enumerate(lines) if line.startswith(("**", "- "))), len(lines))
    if not any(line.startswith("- ") for line in lines[first:]):
        raise ImagesError(what, "nothing is listed under Unreleased", file=CHANGELOG,
                          hint="list there what operators and users notice")  # fmt: skip
    introduction, entries = "".join(lines[:first]), "".join(lines[first:])
    return f"{before}{heading}{introduction}## {version} - {day}\n\n{entries}{older_heading}{older}"


def has_section(text: str, version: str) -> bool:
    return re.search(rf"^## {re.escape(version)}(?: |$)", text, re.MULTILINE) is not None


def replace_version(file: str, text: str, current: str, version: str) -> str:
    """Replace the current version in a file that states it."""
    places = re.compile(rf'^(VERSION = "| *version: | *appVersion: "){re.escape(current)}("?)$', re.MULTILINE)
    changed, count = places.subn(rf"\g<1>{version}\g<2>", text)
    if count != STATED[file]:
        raise ImagesError(f"release {version}", f"it states {current} in {count} places, not in {STATED[file]}",
                          file=file, hint=f"every place must state the version of {VERSION_FILE}")  # fmt: skip
    return changed


class ProjectRelease:
    """The release of one version from one checkout."""

    def __init__(self, repository: Path, version: str, day: date) -> None:
        self.repository, self.version, self.day = repository, version, day
        self.tag, self.what = f"v{version}", f"release {version}"
        if not FORM.fullmatch(version):
            raise ImagesError(self.what, "a version is MAJOR.MINOR.PATCH", hint="such as 1.4.0")

    def prepare(self, log: Callable[[str], None]) -> None:
        """Leave a clean checkout whose commit has the version, the changelog's section and the tag."""
        head = self.git("rev-parse", "HEAD")
        tagged = self.git("rev-parse", "--verify", "--quiet", f"refs/tags/{self.tag}^{{commit}}", missing="")
        if tagged and tagged != head:
            raise ImagesError(self.what, f"the tag {self.tag} is there, on another commit", hint="raise the version;"
                              f" or, to push this release again, `git checkout {self.tag}` first")  # fmt: skip
        commit = self.is_made_by(head)
        if tagged and not commit:
            raise ImagesError(self.what, f"the tag {self.tag} is there, and its commit does not make this version",
                              hint=f"`git tag -d {self.tag}` removes it here")  # fmt: skip
        if commit:
            self.check_clean({})
        else:
            self.commit()
        log(f"{'found' if commit else 'made'} the commit of {self.version}")
        if not tagged:
            self.git("tag", "--annotate", "--message", f"minivm {self.version}", self.tag)
        log(f"{'found' if tagged else 'made'} the tag {self.tag}")

    def list_chart_files(self) -> list[str]:
        """List the chart's tracked files, by their names in the chart."""
        return [name.removeprefix(f"{CHART}/") for name in self.list_names("ls-files", "-z", "--", CHART)]

    def commit(self) -> None:
        planned = self.plan_files()
        self.check_clean(planned)
        if not self.git("symbolic-ref", "--quiet", "HEAD", missing=""):
            raise ImagesError(self.what, "no branch is checked out", hint="`git switch BRANCH` first")
        for file, text in planned.items():
            write_whole(self.repository / file, text)
        reason = "Move the entries of the changelog to the version's section, and state the version."
        message = f"release: make version {self.version}\n\n{reason}"
        self.git("commit", "--quiet", "--message", message, "--", *planned)

    def plan_files(self) -> dict[str, str]:
        """Return the content of every file that the release changes, made from the last commit."""
        current = self.read_version("HEAD")
        if self.version not in list_followers(current):
            hint = f"{', '.join(list_followers(current))} may follow it"
            if self.version == current:
                hint += f"; the commit that made {current} has no tag {self.tag}: `git tag --annotate` it by hand"
            raise ImagesError(self.what, f"the version here is {current}", field="VERSION", hint=hint)
        planned = {CHANGELOG: close_section(self.read_at("HEAD", CHANGELOG), self.version, self.day)}
        for file in STATED:
            planned[file] = replace_version(file, self.read_at("HEAD", file), current, self.version)
        return planned

    def is_made_by(self, commit: str) -> bool:
        """Tell if this very commit changed to the version and has its section."""
        before = self.read_version(f"{commit}^")
        return before != self.version == self.read_version(commit) and has_section(
            self.read_at(commit, CHANGELOG), self.version
        )

    def read_version(self, commit: str) -> str:
        match = VERSION.search(self.read_at(commit, VERSION_FILE, missing=""))
        return match[1] if match else ""

    def check_clean(self, planned: dict[str, str]) -> None:
        """Refuse uncommitted changes, except those that a run of this release made before it was interrupted."""
        changed = self.list_names("diff", "--name-only", "-z", "HEAD")
        changed += self.list_names("ls-files", "--others", "--exclude-standard", "-z")
        foreign = [name for name in changed if name not in planned or not self.is_own(name, planned[name])]
        if foreign:
            shown = ", ".join(foreign[:5]) + (f" and {len(foreign) - 5} more" if foreign[5:] else "")
            raise ImagesError(self.what, f"changes that are not committed: {shown}", hint="commit or remove them first")

    def is_own(self, name: str, planned: str) -> bool:
        """Tell if the file has the planned content, perhaps with the date of an earlier day."""
        dated = re.compile(rf"^(## {re.escape(self.version)} - )\d{{4}}-\d\d-\d\d$", re.MULTILINE)
        try:
            text = (self.repository / name).read_bytes().decode()
        except (OSError, UnicodeDecodeError):
            return False
        return dated.sub(r"\1", text) == dated.sub(r"\1", planned)

    def list_names(self, *arguments: str) -> list[str]:
        return [name for name in self.git(*arguments).split("\0") if name]

    def read_at(self, commit: str, file: str, missing: str | None = None) -> str:
        return self.git("show", f"{commit}:{file}", missing=missing, strip=False)

    def git(self, *arguments: str, missing: str | None = None, strip: bool = True) -> str:
        """Return what git prints; on an error `missing`, or raise with git's reason."""
        try:
            done = subprocess.run(["git", "-C", str(self.repository), *arguments], capture_output=True, check=False)
        except FileNotFoundError as error:
            raise ImagesError(self.what, "git is not installed") from error
        if done.returncode == 0:
            text = done.stdout.decode(errors="surrogateescape")
            return text.strip() if strip else text
        if missing is not None:
            return missing
        reason = done.stderr.decode(errors="replace").strip() or f"exit code {done.returncode}"
        raise ImagesError(self.what, f"`git {arguments[0]}`: {reason}", file=self.repository)


def make_values(host: str, path: str, digests: Iterable[tuple[str, str]]) -> str:
    """Return the chart's values that name the images of a release by digest."""
    listed = "".join(f'    {role}: "{digest}"\n' for role, digest in digests)
    return f'image:\n  registry: "{host}"\n  repository: "{path}"\n  digests:\n{listed}'


@click.command()
@click.argument("version")
@click.option("--registry", default="", metavar="HOST[:PORT]/PATH", help="Push the images and the chart there.")
@click.option("--sign", "key", type=click.Path(path_type=Path), help="The ssh key that signs the provenance.")
@click.option("--user", default="", help="Log in as; with --password-stdin.")
@click.option("--password-stdin", is_flag=True, help="Read the password from standard input.")
@click.pass_context
def release(
    ctx: click.Context, version: str, registry: str, key: Path | None, user: str, password_stdin: bool
) -> None:  # fmt: skip
    """Make a release: state the version, close the changelog's section, commit and tag; with --registry push it.

    An interrupted release is finished by the same command. Nothing is pushed to git.
    """
    # Report a wrong registry before changing anything.
    target = push_target(registry, key)
    project_release = ProjectRelease(ctx.obj.repository, version, datetime.now(UTC).date())
    login = login_to(target[0], user, password_stdin) if target else None
    project_release.prepare(click.echo)
    if target:
        build = ctx.find_root().command.get_command(ctx, "build")  # type: ignore[attr-defined]  # the group
        # The tag has this lock: images of another one would not be those of the release.
        ctx.invoke(build, when_vanished="fail", ready_engine=True)
        publish(ctx, project_release, *target, login)
    click.echo(f"`git push origin HEAD {project_release.tag}` publishes the commit and the tag")


def push_target(registry: str, key: Path | None) -> tuple[RegistryPath, Path] | None:
    """Check what a push needs; None without a registry."""
    from images.ship.registry import RegistryPath

    if not registry:
        if key:
            raise ImagesError("release", "--sign has nothing to sign without --registry")
        return None
    place = RegistryPath.parse(registry)
    if not place.path:
        raise ImagesError("release", f"{registry} has no path for the images", field="--registry",
                          hint=f"{registry}/minivm")  # fmt: skip
    if key is None or not key.is_file():
        raise ImagesError("release", f"no key {key}" if key else "a release has a signed provenance", field="--sign",
                          hint="an ssh key: `ssh-keygen -t ed25519 -f KEY`")  # fmt: skip
    return place, key


def publish(ctx: click.Context, made: ProjectRelease, place: RegistryPath, key: Path, login: Login | None) -> None:
    """Push the images, then the chart, and write the values that name the images by digest."""
    digests = {role: pushed.digest for role, pushed in push_roles(open_sessions(ctx), (), place, login, key=key)}
    name, digest = push_chart(made, place, key, login)
    file = made.repository / f"build/release/{made.version}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(make_values(place.host, place.path, digests.items()))
    click.echo(f"pushed {counted(len(digests), 'image')}; their digests are in {file}")
    click.echo(f"pushed {name}:{made.version}@{digest}")
    click.echo(f"`helm install NAME oci://{name} --version {made.version} --values {file}` installs it")


def push_chart(made: ProjectRelease, place: RegistryPath, key: Path, login: Login | None) -> tuple[str, str]:
    """Push the chart of this checkout with its provenance; return its repository and digest."""
    from images.definition.load import read_yaml
    from images.make.build import git_revision
    from images.ship.registry import Registry

    directory = made.repository / CHART
    metadata = read_yaml(directory / "Chart.yaml", f"{CHART}/Chart.yaml", made.what)
    assert isinstance(metadata, dict)
    content = select_chart_files(directory, made.list_chart_files())
    registry = Registry(place, NAME, login)
    digest = push(registry, made.version, metadata, content)
    attach_provenance(registry, made.version, digest, content, git_revision(made.repository), key)
    return f"{place.host}/{registry.repository}", digest


# The chart as an OCI artifact: the package that `helm install oci://...` takes, and its push.
#
# The package is made of the files' content alone, so the same commit gives the same digest.

NAME = "minivm"  # of the chart: helm looks for a directory of this name in the package
CONFIG = "application/vnd.cncf.helm.config.v1+json"
CONTENT = "application/vnd.cncf.helm.chart.content.v1.tar+gzip"
IGNORE = ".helmignore"


def select_chart_files(chart: Path, tracked: Iterable[str]) -> dict[str, bytes]:
    """Return those of the tracked files that its .helmignore does not name: folders as `NAME/`, files by pattern."""
    patterns = [line.strip() for line in (chart / IGNORE).read_text().splitlines() if line.strip()]
    folders = {pattern.rstrip("/") for pattern in patterns if pattern.endswith("/")}
    release_files = {}
    for name in tracked:
        path = PurePosixPath(name)
        if folders.isdisjoint(path.parts[:-1]) and not any(fnmatch.fnmatch(path.name, p) for p in [IGNORE, *patterns]):
            release_files[name] = (chart / name).read_bytes()
    return release_files


def pack_chart(content: Mapping[str, bytes]) -> bytes:
    """Pack the files as helm does, with neither times nor owners."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, data in sorted(content.items()):
            entry = tarfile.TarInfo(f"{NAME}/{name}")
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return gzip.compress(packed.getvalue(), mtime=0)


def push(registry: Registry, version: str, metadata: Mapping[str, object], content: Mapping[str, bytes]) -> str:
    """Push the chart under its version and return its digest; a version that holds another chart is not replaced."""
    layer = provenance.put_blob(registry, CONTENT, pack_chart(content))
    data = json.dumps(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": provenance.put_blob(registry, CONFIG, json.dumps(metadata, sort_keys=True).encode()),
            "layers": [layer],
            "annotations": {"org.opencontainers.image.title": NAME, "org.opencontainers.image.version": version},
        },
        sort_keys=True,
    ).encode()
    digest = str(descriptor(MANIFEST, data)["digest"])
    existing = find_pushed(registry, version)
    if existing not in ("", digest):
        reason = f"{version} is there and holds another chart: {existing}"
        raise ImagesError(registry.describe("push the chart to"), reason, hint="release a new version")
    if not existing:
        provenance.put_manifest(registry, version, MANIFEST, data)
        registry.require_same(digest, find_pushed(registry, version))
    return digest


def find_pushed(registry: Registry, version: str) -> str:
    """Return the digest of the chart that the registry has under a version; empty if there is none."""
    try:
        return str(provenance.read_subject(registry, version)["digest"])
    except RegistryError as error:
        if error.status == 404:
            return ""
        raise


def attach_provenance(
    registry: Registry, version: str, digest: str, content: Mapping[str, bytes], revision: str, key: Path
) -> None:
    """Attach a signed statement of the files and the commit that the chart is made of."""
    went_in = {name: hashlib.sha256(data).hexdigest() for name, data in content.items()}
    inputs = hashlib.sha256(json.dumps(went_in, sort_keys=True).encode()).hexdigest()
    build = provenance.Build({"role": NAME, "version": version}, inputs, version, went_in, revision)
    provenance.attach_build(registry, build, digest, key)
