"""The command line: gitsync once | loop | status | why | rollback | pin | unpin | now | mirror."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict
from typing import Any

import click

from gitsync.errors import GitsyncError
from gitsync.layout import ZERO, is_commit
from gitsync.settings import GitsyncSettings, from_environment
from gitsync.state import GitsyncState, describe_trouble, load_state, read_pin, summarise
from gitsync.tree import publish
from ground.errors import nearest
from ground.version import VERSION

# Fewest digits of a hash that name a commit.
SHORTEST = 6


def why_published(settings: GitsyncSettings, state: GitsyncState, live: str | None) -> list[str]:
    """List the facts, one sentence each, that explain the published commit; the deciding fact comes last."""
    if live is None:
        return ["nothing is published: no cycle has run, and the image's tree is missing"]
    published = state.published
    lines = [f"{live} is published"]
    if published is not None and published.commit == live and published.ref:
        by = f", signed by {published.signer}" if published.signer else ", its signature not verified"
        lines[0] += f": it was the newest commit of {published.ref}{by}"
    elif live == ZERO:
        lines[0] = f"generation zero, from the image, is published ({settings.zero})"
    pin = read_pin(settings.layout)
    if pin is not None:
        lines.append(f"it is pinned to {pin}: gitsync unpin follows {settings.ref} again")
        return lines
    if settings.repo is None:
        lines.append("no repository is set (MINIVM_GITSYNC_REPO)")
    if state.candidate is not None:
        lines.append(f"{state.candidate.commit} is newer and waits: {state.candidate.reason or 'it is being checked'}")
    if state.quarantine is not None:
        lines.append(
            f"{state.quarantine.commit or state.quarantine.oid} is newer and was refused at the step "
            f"{state.quarantine.step}: {state.quarantine.reason}"
        )
        ends = "the ref moves" if not state.quarantine.policy else "the ref moves or the settings change"
        lines.append(f"it is not tried again until {ends}")
    if state.failures:
        lines.append(f"the last {state.failures} cycles failed: {state.last_error}")
    if len(lines) == 1:
        lines.append("nothing newer is known" + (f": {describe_trouble(state, settings)}" if state.last_error else ""))
    return lines


def full_commit(settings: GitsyncSettings, text: str) -> str:
    """Expand what a person typed: `zero`, a whole hash, or the beginning of one that is or was published here."""
    if text == ZERO or is_commit(text):
        return text
    names = {published.commit for published in load_state(settings.layout.state).commits}
    names |= set(publish.list_trees(settings.layout))
    matches = sorted(name for name in names if is_commit(name) and name.startswith(text))
    if len(text) < SHORTEST or len(matches) != 1:
        raise GitsyncError(
            "tell which commit is meant",
            f"{text!r} is the beginning of {len(matches)} commits on this node",
            hint="give the whole hash" + (f", such as {', '.join(name[:12] for name in matches)}" if matches else ""),
        )
    return matches[0]


class GitsyncGroup(click.Group):
    """Commands that suggest the nearest name for a typo and report errors without a traceback."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            hint = nearest(args[0], self.list_commands(ctx))
            raise click.UsageError(f"no command {args[0]!r} ({hint})", ctx)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; print a GitsyncError as one sentence and exit with 1. Any other exception is a bug."""
        try:
            return super().invoke(ctx)
        except GitsyncError as error:
            click.echo(f"error: {error}", err=True)
            sys.exit(1)


@click.group(cls=GitsyncGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(VERSION, prog_name="gitsync")
def main() -> None:
    """Keep a verified, atomic checkout of the node's scripts. Settings come from MINIVM_GITSYNC_*."""


def _settings() -> GitsyncSettings:

    return from_environment(os.environ)


@main.command()
def once() -> None:
    """Run one cycle: fetch, verify, check, publish, prune. Exit 1 if it failed or the newest commit is refused."""
    from gitsync.cycle.run import run_cycle

    settings = _settings()
    state = run_cycle(settings)
    click.echo(summarise(state, settings))
    if state.failures or state.quarantine is not None:
        sys.exit(1)


@main.command()
def loop() -> None:
    """Run cycles for ever, with jitter and backoff derived from the pod's name. The service runs this."""
    # Exec: the loop runs for weeks and should not carry the memory of the command line.
    os.execv(sys.executable, [sys.executable, "-I", "-m", "gitsync.cycle.loop"])


@main.command()
@click.option("--json", "as_json", is_flag=True, help="The whole state, for programs.")
def status(as_json: bool) -> None:
    """Show what is published, since when, and what is wrong. Exit 1 if something is wrong."""
    settings = _settings()
    state = load_state(settings.layout.state)
    live = publish.read_current(settings.layout)
    if as_json:
        data = asdict(state) | {
            "current": live, "pin": read_pin(settings.layout), "trees": publish.list_trees(settings.layout),
            "trouble": describe_trouble(state, settings), "repo": settings.repo, "ref": str(settings.ref),
        }  # fmt: skip
        click.echo(json.dumps(data, indent=1, sort_keys=True))
    else:
        for name, value in _lines(settings, state, live):
            click.echo(f"{name:<10} {value}")
    if live is None or describe_trouble(state, settings):
        sys.exit(1)


def _ago(at: float) -> str:
    if not at:
        return "never"
    seconds = max(0.0, time.time() - at)
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def _lines(settings: GitsyncSettings, state: GitsyncState, live: str | None) -> list[tuple[str, str]]:
    lines = [("current", live or "nothing")]
    published = state.published
    if published is not None and published.commit == live:
        lines.append(("since", _ago(published.at)))
        if published.subject:
            lines.append(("what", f"{published.subject} ({published.author})"))
        if published.signer:
            lines.append(("signed", published.signer))
    lines.append(("follows", f"{settings.ref} of {settings.repo}" if settings.repo else "no repository"))
    pin = read_pin(settings.layout)
    if pin:
        lines.append(("pinned", pin))
    if state.candidate is not None:
        lines.append(("waiting", f"{state.candidate.commit}: {state.candidate.reason or 'being checked'}"))
    if state.quarantine is not None:
        lines.append(("refused", f"{state.quarantine.commit or state.quarantine.oid}: {state.quarantine.reason}"))
    lines.append(("asked", f"{_ago(state.last_attempt)}; answered {_ago(state.last_success)}"))
    if state.failures:
        lines.append(("failed", f"{state.failures} in a row: {state.last_error}"))
    return lines


@main.command()
def why() -> None:
    """Explain why this commit is published and no other: one sentence a line, the deciding one last."""
    settings = _settings()
    for line in why_published(settings, load_state(settings.layout.state), publish.read_current(settings.layout)):
        click.echo(line)


@main.command()
@click.argument("commit")
def rollback(commit: str) -> None:
    """Publish COMMIT now, and ignore the present one until the ref moves. `zero` is the image's own tree."""
    from gitsync.cycle.run import run_cycle
    from gitsync.cycle.webhook import poke

    settings = _settings()
    state = run_cycle(settings, only=full_commit(settings, commit), leave=True)
    # The loop reports the pod's status: run it now rather than after a period.
    poke(settings)
    click.echo(f"published {state.published.commit if state.published else 'nothing'}")


@main.command()
@click.argument("commit")
def pin(commit: str) -> None:
    """Stay on COMMIT, wherever the ref moves, until `gitsync unpin`."""
    from gitsync.cycle.run import run_cycle
    from gitsync.cycle.webhook import poke
    from gitsync.state import write_pin

    settings = _settings()
    full = full_commit(settings, commit)
    state = run_cycle(settings, only=full)
    write_pin(settings.layout, full, time.time())
    poke(settings)
    click.echo(f"pinned to {state.published.commit if state.published else full}")


@main.command()
def unpin() -> None:
    """Follow the ref again."""
    from gitsync.cycle.webhook import poke

    settings = _settings()
    if not settings.layout.pin.exists():
        click.echo("not pinned")
        return
    settings.layout.pin.unlink()
    click.echo("follows the ref again, " + ("now" if poke(settings) else "at the next cycle"))


@main.command()
def now() -> None:
    """Start the running loop's next cycle now."""
    from gitsync.cycle.webhook import poke

    if not poke(_settings()):
        raise GitsyncError("start a cycle", "no loop is running here", hint="gitsync once runs a cycle by itself")


@main.command()
def mirror() -> None:
    """Serve the repository to other nodes, read-only over HTTP, as the git server's only client."""
    from gitsync.mirror.server import serve

    serve(_settings())


if __name__ == "__main__":
    main(prog_name="gitsync")
