"""Command line of `minivm job`."""

from __future__ import annotations

import argparse
import json
import os
import pwd
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from health import black_box
from health.jobs import explain
from health.jobs.ask import Asker, explain_own_jobs, find_pages, is_visible
from health.jobs.model import Job, JobNode, Page, list_briefly, safe
from health.jobs.shared import Shared
from init.errors import InitError
from init.slurm import client

if TYPE_CHECKING:
    from health.jobs.boxes import Box

ABOUT = """Say why a job waits, how it runs, or why it ended: the cause, whose it is, the evidence, and what to do.

JOB: 12, 12_3 (a task of an array), 12+1 (a component), or the name of a job of yours; without it, your jobs.
Of other users' jobs you see what squeue shows; operators of Slurm and root see all."""
EPILOG = "Exit codes: 0 explained, 1 no such job or no answer, 2 wrong usage."


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="minivm job", description=ABOUT, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("job", nargs="?", metavar="JOB")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--capsule", nargs="?", const="", metavar="FILE",
        help="write one archive for a support ticket: the page and what the nodes recorded",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    if options.capsule is not None and not options.job:
        parser.error("--capsule wants the JOB first: minivm job JOB --capsule [FILE]")
    controller = client.address(os.environ)
    is_root = os.geteuid() == 0

    def direct(argv: Sequence[str]) -> str:
        return client.run(argv, controller)

    asker = Asker(run=direct if is_root else Shared(direct), user=_user(), is_root=is_root, now=time.time())
    asker.reads_output = options.capsule is None
    asker.fetch = None if not black_box.port() else _fetch
    try:
        pages = find_pages(asker, options.job) if options.job else explain_own_jobs(asker)
        if options.capsule is not None:
            _pack(asker, pages, options.capsule)
            return 0
    except InitError as error:
        print(f"minivm: {safe(str(error), 1000)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    _print(explain.as_json(pages[0]) if options.json and options.job and len(pages) == 1 else None, pages, options)
    return 0


def _fetch(job: Job, nodes: Sequence[JobNode]) -> tuple[Box, ...]:
    from health.jobs.boxes import fetch  # imported late: a list and a waiting job have no boxes

    return fetch(job, nodes)


def _pack(asker: Asker, pages: Sequence[Page], name: str) -> None:
    if len(pages) > 1:
        ids = list_briefly(page.job.shown for page in pages)
        raise InitError("write a capsule", f"one has one job, and these are several: {ids}; name one of them")
    if not is_visible(asker, pages[0].job):
        raise InitError("write a capsule", f"this is a job of {pages[0].job.user}; its user or an operator can")
    from health.jobs import boxes

    path = Path(name or boxes.capsule_name(pages[0]))
    boxes.write_capsule(path, pages[0], asker.fetched, time.time())
    print(f"written: {safe(str(path), 1000)}")


def _print(single: object, pages: Sequence[Page], options: argparse.Namespace) -> None:
    try:
        if options.json:
            print(json.dumps(single or [explain.as_json(page) for page in pages], indent=1))
        elif options.job and len(pages) == 1:
            print(explain.render_page(pages[0]))
        else:
            print(
                explain.render_table(pages)
                if pages
                else "You have no jobs in the queue. `minivm job JOBID` explains ended ones."
            )
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


if __name__ == "__main__":
    raise SystemExit(main())
