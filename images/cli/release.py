"""The command release: the commit and the tag of a version, and its images and chart in a registry."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from images.cli.publish import each, login_to, push_roles
from images.errors import ImagesError
from images.ship import release as git_release

if TYPE_CHECKING:
    from images.ship.credentials import Login
    from images.ship.registry import RegistryPath
import fnmatch
import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath

from images.engine.store import MANIFEST, descriptor
from images.ship import provenance
from images.ship.registry import Registry, RegistryError


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
    # A mistake in where to push is told before anything is changed.
    target = push_target(registry, key)
    project_release = git_release.ProjectRelease(ctx.obj.repository, version, datetime.now(UTC).date())
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


def publish(
    ctx: click.Context, made: git_release.ProjectRelease, place: RegistryPath, key: Path, login: Login | None
) -> None:
    """Push the images, then the chart, and write the values that name the images by digest."""
    digests = {role: pushed.digest for role, pushed in push_roles(each(ctx), (), place, login, key=key)}
    name, digest = push_chart(made, place, key, login)
    file = made.repository / f"build/release/{made.version}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(git_release.values(place.host, place.path, digests.items()))
    click.echo(f"pushed {len(digests)} images; their digests are in {file}")
    click.echo(f"pushed {name}:{made.version}@{digest}")
    click.echo(f"`helm install NAME oci://{name} --version {made.version} --values {file}` installs it")


def push_chart(
    made: git_release.ProjectRelease, place: RegistryPath, key: Path, login: Login | None
) -> tuple[str, str]:
    """Push the chart of this checkout with its provenance; return its repository and digest."""
    from images.definition.load import read_yaml
    from images.make.build import git_revision
    from images.ship.registry import Registry

    directory = made.repository / git_release.CHART
    metadata = read_yaml(directory / "Chart.yaml", f"{git_release.CHART}/Chart.yaml", made.what)
    assert isinstance(metadata, dict)
    content = files(directory, made.chart_files())
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


def files(chart: Path, tracked: Iterable[str]) -> dict[str, bytes]:
    """Return those of the tracked files that its .helmignore does not name: folders as `NAME/`, files by pattern."""
    patterns = [line.strip() for line in (chart / IGNORE).read_text().splitlines() if line.strip()]
    folders = {pattern.rstrip("/") for pattern in patterns if pattern.endswith("/")}
    release_files = {}
    for name in tracked:
        path = PurePosixPath(name)
        if folders.isdisjoint(path.parts[:-1]) and not any(fnmatch.fnmatch(path.name, p) for p in [IGNORE, *patterns]):
            release_files[name] = (chart / name).read_bytes()
    return release_files


def package(content: Mapping[str, bytes]) -> bytes:
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
    layer = provenance.put_blob(registry, CONTENT, package(content))
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
    there = pushed(registry, version)
    if there not in ("", digest):
        raise ImagesError(registry.what("push the chart to"), f"{version} is there and holds another chart: {there}",
                          hint="release a new version")  # fmt: skip
    if not there:
        provenance.put_manifest(registry, version, MANIFEST, data)
        registry.same(digest, pushed(registry, version))
    return digest


def pushed(registry: Registry, version: str) -> str:
    """Return the digest of the chart that the registry has under a version; empty if there is none."""
    try:
        return str(provenance.subject(registry, version)["digest"])
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
    statement = provenance.statement(build, f"{registry.place.host}/{registry.repository}", digest)
    provenance.attach(
        registry, provenance.subject(registry, digest), provenance.TYPE, provenance.signed(statement, key)
    )
