"""The `minivm accounts` command: slurmdbd follows accounts.yaml."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from ground.errors import counted
from ground.files import locked
from init.accounts import calls, file, plan, slurmdbd
from init.accounts.model import Database
from init.accounts.slurmdbd import AccountsError
from init.cli import Group

FILE = click.argument("path", metavar="FILE", type=click.Path(path_type=Path))
ADOPT = click.option("--adopt", is_flag=True, help="Take over objects of FILE that exist already.")
CHANGES = 3  # 2 is wrong usage
REPORT_EVERY = 10.0
LOCK = Path("/run/minivm/accounts-apply.lock")


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Make accounts, users, QOS and limits in slurmdbd follow a file. Only what carries minivm's mark is changed."""


@main.command("plan")
@FILE
@ADOPT
def plan_command(path: Path, adopt: bool) -> None:
    """Show what `apply` would change. Exit 0 for nothing, 3 for changes, 1 where `apply` would refuse."""
    changes, _, _ = _compare(path, adopt=adopt)
    _show(changes)
    refusal = _refusal(changes, overwrite=False)
    if refusal is not None:
        raise refusal
    sys.exit(CHANGES if changes.changes else 0)


@main.command()
@FILE
@ADOPT
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--overwrite-changes", "overwrite", is_flag=True, help="Undo what was changed by hand.")
def apply(path: Path, adopt: bool, yes: bool, overwrite: bool) -> None:
    """Change slurmdbd to what FILE says. A run that was cut is ended by the next. One runs at a time in a pod."""
    with _only_one(path):
        _apply(path, adopt=adopt, yes=yes, overwrite=overwrite)


@contextmanager
def _only_one(path: Path) -> Iterator[None]:
    """Hold the pod's lock of `apply`; a user who is not root locks FILE alone."""
    what = f"apply {path}"
    lock, flags = (LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW) if os.geteuid() == 0 else (path, os.O_RDONLY)
    try:
        if lock == LOCK:
            LOCK.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(lock, flags | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise AccountsError(what, f"{lock}: {error.strerror or error}") from error
    try:
        if not locked(fd):
            problem = "another `minivm accounts apply` is running in this pod, or waits for its answer"
            raise AccountsError(what, problem, hint="run this again when it has ended")
        yield
    finally:
        os.close(fd)


def _apply(path: Path, *, adopt: bool, yes: bool, overwrite: bool) -> None:
    changes, database, cluster = _compare(path, adopt=adopt)
    _show(changes)
    refusal = _refusal(changes, overwrite=overwrite)
    if refusal is not None:
        raise refusal
    if not changes.changes:
        return
    if not yes and not (sys.stdin.isatty() and click.confirm("Apply these changes?")):
        raise AccountsError(f"apply {path}", "not confirmed", hint="--yes applies without asking")
    if not yes:
        # The answer may have taken an hour, in which users submitted jobs.
        again, database, cluster = _compare(path, adopt=adopt)
        if again != changes:
            raise AccountsError(f"apply {path}", "slurmdbd or the jobs changed meanwhile", hint="run it again")
    _perform(calls.order_calls(changes, database, cluster))
    remaining, _, _ = _compare(path, adopt=False)
    if remaining.changes:
        _show(remaining)
        raise AccountsError(f"apply {path}", "slurmdbd has not taken the changes above", hint="run it again")
    click.echo("applied")


@main.command()
@FILE
def drift(path: Path) -> None:
    """Show what was changed by hand in the objects that FILE owns. Exit 0 for nothing, 3 for changes."""
    changes, _, _ = _compare(path, adopt=False)
    for line in plan.describe_by_hand(changes.by_hand):
        click.echo(line)
    if not changes.by_hand:
        click.echo("nothing was changed by hand")
    sys.exit(CHANGES if changes.by_hand else 0)


def _compare(path: Path, *, adopt: bool) -> tuple[plan.AccountsPlan, Database, str]:
    desired, cluster = file.load(path), slurmdbd.cluster_name()
    database = slurmdbd.read(cluster)
    changes = plan.make(desired, database, frozenset(), adopt=adopt)
    if any(change.op is plan.Op.REMOVE for change in changes.changes):
        changes = plan.make(desired, database, slurmdbd.find_busy(), adopt=adopt)
    return changes, database, cluster


def _show(made: plan.AccountsPlan) -> None:
    for line in plan.describe_plan(made) or ["nothing to change"]:
        click.echo(line)


def _refusal(made: plan.AccountsPlan, *, overwrite: bool) -> AccountsError | None:
    if made.problems:
        text = "\n".join(made.problems[: plan.SHOWN * 4])
        return AccountsError("apply this file", f"{counted(len(made.problems), 'problem')}:\n{text}")
    if made.unowned:
        names = ", ".join(str(key) for key in made.unowned[: plan.SHOWN])
        more = f" and {len(made.unowned) - plan.SHOWN} more" if len(made.unowned) > plan.SHOWN else ""
        problem = f"made by hand before this file: {names}{more}"
        return AccountsError("apply this file", problem, hint="--adopt takes them over")
    if made.by_hand and not overwrite:
        hint = "put the new values into the file, or undo them by --overwrite-changes"
        count = len(made.by_hand)
        problem = f"{count} value{'s were' if count > 1 else ' was'} changed by hand"
        return AccountsError("apply this file", problem, hint=hint)
    return None


def _perform(steps: list[calls.SacctmgrCall]) -> None:
    total, done, last_report = sum(step.size for step in steps), 0, time.monotonic()
    for step in steps:
        slurmdbd.apply(step)
        done += step.size
        if time.monotonic() - last_report > REPORT_EVERY:
            last_report = time.monotonic()
            click.echo(f"{done} of {total} objects done")


if __name__ == "__main__":
    main(prog_name="minivm accounts")
