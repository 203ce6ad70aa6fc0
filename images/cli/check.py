"""The commands that check: reproduce, test."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import click

from images.cli.publish import AS_JSON, each, opened
from images.errors import ImagesError


@click.command()
@click.argument("roles", nargs=-1)
@AS_JSON
@click.pass_context
def reproduce(ctx: click.Context, roles: Sequence[str], as_json: bool) -> None:
    """Build twice from nothing and compare every layer's digest and every image's id."""
    from images.cli import renew, report
    from images.cli.reproduce import build_twice
    from images.make.progress import Plain

    compared = []
    for session in each(ctx):
        names = session.roles(roles)
        renew.if_stale(session, names, "fail", Plain())
        todo = session.compose(names).needed(names)
        session.check_architecture(todo)
        renew.if_gone(session, todo, names, "fail", Plain())
        reporter = Plain(to=sys.stderr)
        compared += build_twice(session, names, reporter, reporter.log)
    if as_json:
        report.as_json([{"image": c.image.key, "equal": c.equal, "ids": [c.first.id, c.second.id],
                         "layers": [list(c.first.layers), list(c.second.layers)]} for c in compared])  # fmt: skip
    else:
        rows = [(c.image.key, c.first.id[7:19], c.second.id[7:19], str(len(c.first.layers)),
                 "equal" if c.equal else f"DIFFERS in layers {c.differing or 'none: the configuration'}",
                 f"{c.first.seconds:.1f}", f"{c.second.seconds:.1f}") for c in compared]  # fmt: skip
        report.table(("image", "first id", "second id", "layers", "verdict", "s", "s"), rows)
    if different := [c.image.key for c in compared if not c.equal]:
        raise ImagesError("reproduce", f"{', '.join(different)} differ")


@click.command()
@click.argument("roles", nargs=-1)
@click.pass_context
def test(ctx: click.Context, roles: Sequence[str]) -> None:
    """Run the container tests of the roles, or of all."""
    files = container_tests(ctx.obj.repository, opened(ctx).roles(roles))
    raise SystemExit(subprocess.run([sys.executable, "-m", "pytest", *map(str, files)], check=False).returncode)


def container_tests(repository: Path, roles: Iterable[str]) -> list[Path]:
    """List the tests of every image, then each role's own."""
    directory = repository / "tests/container/images"
    own = (directory / f"test_{name.replace('-', '_')}.py" for name in roles)
    return [directory / "test_common.py", *(path for path in own if path.exists())]
