#!/usr/bin/env python3
"""Command line of the build. Slow imports are made where they are used, so that `--help` is instant."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

# `python build.py` works with any Python: outside a virtual environment it runs again in the project's own.
if __name__ == "__main__" and sys.prefix == sys.base_prefix:
    from images.host import rerun_in_venv

    rerun_in_venv()

import click

from ground.errors import Problem, nearest
from ground.version import VERSION
from images import ImagesError
from images.cli.publish import AS_JSON, open_session, open_sessions

if TYPE_CHECKING:
    from images.cli.session import Session
    from images.make.plan import BuildResult

REPOSITORY = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True)
class Invocation:
    """Options given before the command's name."""

    repository: Path
    assignments: tuple[str, ...]


class Commands(click.Group):
    """Command group that prints the project's errors without a traceback and imports commands when they are called."""

    # Name -> module and help text, so that --help imports none of them.
    LATE: ClassVar = {
        "push": ("images.cli.publish", "Push the roles' images to a registry."),
        "verify": ("images.cli.publish", "Verify that an allowed signer built an image in a registry."),
        "sbom": ("images.cli.publish", "Print the SPDX document of a role."),
        "diff": ("images.cli.publish", "Show what differs between two images."),
        "release": ("images.cli.release", "Make a release: version, changelog, tag, images and chart."),
        "prune": ("images.cli.check", "Remove images that later builds superseded."),
        "reproduce": ("images.cli.check", "Build twice from nothing and compare every digest."),
        "test": ("images.cli.check", "Run the container tests of the roles."),
        "up": ("cluster.cli", "Start a whole cluster on this machine."),
        "ssh": ("cluster.cli", "Log in to the login pod."),
        "status": ("cluster.cli", "Show each pod: ready, or why not."),
        "scripts": ("cluster.cli", "Try a directory of scripts: every pod takes it, or says why not."),
        "delete": ("cluster.cli", "Delete a pod, as kubectl does: a new one of its name replaces it."),
        "hand-over": ("cluster.cli", "Let the standby of two controllers act."),
        "config": ("cluster.cli", "Show what a changed slurm.conf would do to the cluster."),
        "down": ("cluster.cli", "Stop the cluster."),
        "migrate": ("cluster.cli", "Plan a move from another Slurm operator to the chart."),
    }

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            hint = nearest(args[0], self.list_commands(ctx))
            raise click.UsageError(f"no command {args[0]!r} ({hint})", ctx)
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*super().list_commands(ctx), *self.LATE]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in self.LATE:
            return super().get_command(ctx, name)
        import importlib

        command: click.Command = getattr(importlib.import_module(self.LATE[name][0]), name.replace("-", "_"))
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        own = [(name, command.get_short_help_str(80)) for name, command in sorted(self.commands.items())]
        own += [(name, about) for name, (module, about) in self.LATE.items() if module.startswith("images.")]
        cluster = [(name, about) for name, (module, about) in self.LATE.items() if module.startswith("cluster.")]
        for title, rows in (("Images", sorted(own)), ("Cluster", cluster)):
            with formatter.section(title):
                formatter.write_dl(rows)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except Problem as error:
            click.echo(f"error: {error}", err=True)
            ctx.exit(1)
        except KeyboardInterrupt:
            builds = ctx.invoked_subcommand in ("build", "reproduce")
            click.echo(
                "interrupted: every image name still points to its last build" if builds else "interrupted", err=True
            )
            ctx.exit(130)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(VERSION, prog_name="minivm")
@click.option("--variant", help="debian or nvidia; default debian.")
@click.option("--slurm", help="A packaged release of Slurm such as 26.05, or `source` for its tarball.")
@click.option("--cuda", help="The CUDA: `package`, or one of versions.yaml's `cuda`.")
@click.option("--arch", help="amd64, arm64 or both; default this machine's.")
@click.option("--layers", metavar="DIR", help="A directory of your own layers and roles.")
@click.option(
    "--set", "assignments", multiple=True, metavar="NAME=VALUE", help="Set a setting of docs/reference/build.md."
)
@click.pass_context
def main(
    ctx: click.Context,
    variant: str | None,
    slurm: str | None,
    cuda: str | None,
    arch: str | None,
    layers: str | None,
    assignments: Sequence[str],
) -> None:
    """Build minivm's images and bring up a cluster of them.

    A ROLE is controller, login, worker or another that `list` names, or layer:NAME. Without one, a command uses all
    roles that are built by default. All commands and settings: docs/reference/build.md
    """
    options = {"variant": variant, "slurm": slurm, "cuda": cuda, "arch": arch, "layers": layers}
    ctx.obj = Invocation(REPOSITORY, (*assignments, *(f"{name}={value}" for name, value in options.items() if value)))


@main.command("list")
@AS_JSON
@click.pass_context
def list_(ctx: click.Context, as_json: bool) -> None:
    """List layers and roles."""
    from images.make import progress

    session = open_session(ctx)
    rows = [("role", role.name, role.describe) for role in session.definition.roles.values()]
    rows += [("layer", layer.name, layer.describe) for layer in session.definition.layers.values()]
    if as_json:
        progress.print_json([{"kind": kind, "name": name, "describe": describe} for kind, name, describe in rows])
    else:
        progress.print_table(("kind", "name", "what"), rows)


@main.command()
@click.option("--svg", type=click.Path(path_type=Path), help="Write a picture instead.")
@click.pass_context
def graph(ctx: click.Context, svg: Path | None) -> None:
    """Show how layers and roles are built on each other."""
    from images.definition import picture

    session = open_session(ctx)
    nodes = picture.tree(session.definition, session.place.choice)
    if svg:
        try:
            svg.write_text(picture.svg(nodes))
        except OSError as error:
            raise ImagesError("write the picture", error.strerror or str(error), file=svg) from error
    else:
        click.echo("\n".join(picture.text(nodes)))


@main.command()
@click.argument("roles", nargs=-1)
@AS_JSON
@click.pass_context
def plan(ctx: click.Context, roles: Sequence[str], as_json: bool) -> None:
    """Show what a build would make, and which input of each image changed."""
    from images.make import progress

    planned = []
    for session in open_sessions(ctx):
        names = session.select_targets(roles)
        if stale := session.list_stale_layers(names):
            raise ImagesError("plan", f"the lock does not fit {', '.join(stale)}", file=session.place.directory,
                              hint="`build.py lock` resolves it anew")  # fmt: skip
        planned += session.plan(names)[1]
    if as_json:
        progress.print_json(progress.describe_plan(planned))
        return
    progress.print_table(("image", "plan", "what changed"), progress.list_plan_rows(planned))


@main.command()
@click.argument("role")
@click.pass_context
def render(ctx: click.Context, role: str) -> None:
    """Print the Dockerfiles of a role (or of layer:NAME), from the first to the last."""
    session = open_session(ctx)
    for text in session.render_dockerfiles(session.select_targets([role])):
        click.echo(text)


def trust_on_first_sight(ctx: click.Context, roles: Sequence[str]) -> None:
    """Fill in the missing checksums in versions.yaml with those of the files that are served now."""
    from images.archive import lock

    names: set[str] = set()
    for session in open_sessions(ctx):
        for pin in lock.find_unfilled_pins(session.place, session.list_layers(session.select_lock_targets(roles))):
            if pin.name not in names:
                names.add(pin.name)
                click.echo(lock.trust_on_first_use(session.place, pin), err=True)


@main.command()
@click.argument("roles", nargs=-1)
@click.option("--check", is_flag=True, help="Only check whether the archive still has everything.")
@click.option("--trust-first", is_flag=True, help="Fetch files that have no checksum yet, and record their checksums.")
@click.pass_context
def lock(ctx: click.Context, roles: Sequence[str], check: bool, trust_first: bool) -> None:
    """Resolve every package to a version and a checksum."""
    if trust_first:
        if check:
            raise ImagesError(
                "check the lock", "--trust-first changes what --check reads", hint="run one after the other"
            )
        trust_on_first_sight(ctx, roles)
    for session in open_sessions(ctx):
        names = session.select_lock_targets(roles)
        if not check:
            changes = session.relock(names)
            click.echo("\n".join(changes) if changes else f"{session.place.choice.arch}: nothing moved")
            continue
        if stale := session.list_stale_layers(names):
            raise ImagesError("build as locked", f"the lock does not fit {', '.join(stale)}",
                              file=session.place.directory, hint="`build.py lock`")  # fmt: skip
        wheels = session.compare_wheels(names)
        for text in wheels.newer:
            click.echo(f"newer: {text}")
        if missing := [*session.list_vanished_packages(session.compose(names).list_needed(names)), *wheels.wrong]:
            listed = "\n".join(f"  {item}" for item in missing)
            raise ImagesError("build as locked", f"the archive moved on:\n{listed}", file=session.place.directory,
                              hint="`build.py lock` resolves anew")  # fmt: skip
        click.echo(f"{session.place.choice.arch}: the archive has every locked package, pip's index every wheel")


@main.command()
@click.argument("roles", nargs=-1)
@click.option("--when-vanished", type=click.Choice(("fail", "relock")), default="fail", show_default=True,
              help="What to do when the lock does not fit or the archive no longer has a locked package.")  # fmt: skip
@click.option("--ready-engine", is_flag=True, help="First install and start a docker engine if there is none.")
@AS_JSON
@click.pass_context
def build(ctx: click.Context, roles: Sequence[str], when_vanished: str, ready_engine: bool, as_json: bool) -> None:
    """Build what is missing of the named roles, or of all."""
    from images.make import progress

    if ready_engine:
        ensure_engine()
    results: list[BuildResult] = []
    sizes: dict[str, int] = {}
    for session in open_sessions(ctx):
        results += build_one(session, session.select_targets(roles), when_vanished, as_json)
        sizes |= {reference: image.size for reference, image in session.list_present().items()}
    if as_json:
        progress.print_json(progress.describe_results(results, sizes))
        return
    progress.print_results(results, sizes)


def ensure_engine() -> None:
    """Make sure of a docker engine, in this process: a new Python would take a quarter of a no-op build."""
    from images import host

    try:
        with contextlib.redirect_stdout(sys.stderr):  # stdout is for the build's table or JSON
            host.ensure_engine()
    except host.HostError as error:
        raise ImagesError("make this machine ready", str(error)) from error


def build_one(session: Session, targets: Sequence[str], when_vanished: str, as_json: bool) -> list[BuildResult]:
    """Build for one architecture."""
    from images.cli.session import build_tools
    from images.make.progress import Plain, open_reporter

    messages = Plain(to=sys.stderr) if as_json else Plain()
    if removed := session.remove_leftovers():
        messages.log(f"removed {removed} containers of interrupted builds")
    with session.use_package_cache():
        session.require_lock(targets, when_vanished, messages)
        composed, planned = session.plan(targets)
        todo = [plan.image for plan in planned if not plan.present]
        if todo:
            session.check_architecture(todo)
            if session.require_packages(todo, targets, when_vanished, messages):
                composed, planned = session.plan(targets)
                todo = [plan.image for plan in planned if not plan.present]
        if todo:
            session.tools = build_tools(session, messages, when_vanished)
        with open_reporter(len(todo), sys.stderr if as_json else sys.stdout) as progress:
            return session.build(composed, planned, progress)


if __name__ == "__main__":
    sys.exit(main())
