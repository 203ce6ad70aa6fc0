"""The command that gives room back: prune."""

from __future__ import annotations

import click

from images.cli.publish import each


@click.command()
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@click.pass_context
def prune(ctx: click.Context, dry_run: bool) -> None:
    """Remove images that later builds of the same name superseded."""
    from images.cli.superseded import candidates

    kept, old = 0, list[str]()
    for session in each(ctx):
        found = candidates(session, session.every_role(()))
        old += found
        for name in found:
            reason = "" if dry_run else session.engine.release(name)
            kept += bool(reason)
            click.echo(f"{name}: {reason}" if reason else name)
    done = "would go" if dry_run else "removed"
    click.echo(f"{len(old) - kept} {done}" + (f", {kept} in use" if kept else ""))
