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
    made = git_release.ProjectRelease(ctx.obj.repository, version, datetime.now(UTC).date())
    login = login_to(target[0], user, password_stdin) if target else None
    made.prepare(click.echo)
    if target:
        build = ctx.find_root().command.get_command(ctx, "build")  # type: ignore[attr-defined]  # the group
        # The tag has this lock: images of another one would not be those of the release.
        ctx.invoke(build, when_vanished="fail", ready_engine=True)
        publish(ctx, made, *target, login)
    click.echo(f"`git push origin HEAD {made.tag}` publishes the commit and the tag")


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
    from images.ship import chart
    from images.ship.registry import Registry

    directory = made.repository / git_release.CHART
    metadata = read_yaml(directory / "Chart.yaml", f"{git_release.CHART}/Chart.yaml", made.what)
    assert isinstance(metadata, dict)
    content = chart.files(directory, made.chart_files())
    registry = Registry(place, chart.NAME, login)
    digest = chart.push(registry, made.version, metadata, content)
    chart.attach_provenance(registry, made.version, digest, content, git_revision(made.repository), key)
    return f"{place.host}/{registry.repository}", digest
