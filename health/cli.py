"""Command line of `minivm health`, `minivm replay` and the self-test of a tree, which gitsync runs on each commit.

    health [CHECK...] [--run] [--json | --nhc | --npd] [--class C] [--when W] [--recording CASE]
    replay CAPSULE [CHECK...]       run the same checks on a capsule or recording, anywhere
    selftest TREE                   test whether a tree's checks are fit to be published
    ledger [--forgive UUID]         show the incidents of each GPU of this host
    clear CHECK                     discard what a check remembers (an XID); it reports only new events
    forget CHECK                    discard a check's verdict and its part of the drain

`minivm health ledger`, `clear`, `forget` and `selftest` are the last four.

Exit codes of health and replay: 0 ok, 1 a problem of a job's user only, 2 a problem of the node, 3 unknown.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tarfile
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from types import FrameType
from typing import Any

from gitsync import lease
from gitsync.errors import GitsyncError
from ground.errors import counted, nearest
from health.api import When
from health.ask import ask_broker
from health.checks.cases import examine, read_case, replay
from health.checks.load import CheckSelection
from health.checks.round import forget, one_round, recall, remember, run
from health.ledger import Ledger, read_book
from health.places import Places, boot_id
from health.verdict import Class, Result, Verdict, drop_void, read_verdicts

# Format verdicts and incidents as tables, JSON, NHC's line and node-problem-detector's answer. Pure functions.
COLOURS = {Result.OK: "32", Result.PROBLEM: "31", Result.UNKNOWN: "33"}
WORDS = {Result.OK: "ok", Result.PROBLEM: "PROBLEM", Result.UNKNOWN: "unknown"}
INCIDENTS_SHOWN = 5
# Advice for each class, shown below a problem.
ACTIONS = {
    Class.USER: "inform the job's user or the script's author; the node is fine",
    Class.NODE: "recovers by itself, or by a restart of the service that it names",
    Class.REBOOT: "reset the GPU or reboot the node",
    Class.MANUAL: "inspect the machine: cable, cooling, configuration",
    Class.RMA: "replace the part",
}


def exit_code(verdicts: Sequence[Verdict], form: str = "table", *, complete: bool = True) -> int:
    """Return the exit code: Nagios' 0 1 2 3; for node-problem-detector 0 ok, 1 problem, 2 unknown; for NHC 0 or 1."""
    judged = [verdict for verdict in verdicts if verdict.applies]
    problems = [verdict for verdict in judged if verdict.result is Result.PROBLEM]
    hard = [verdict for verdict in problems if verdict.class_ is not Class.USER]
    # A complete view with nothing judged is not healthy; a filtered view without problems is.
    unknown = [verdict for verdict in judged if verdict.result is Result.UNKNOWN] or (complete and not judged)
    if form == "nhc":
        return 1 if hard else 0
    if form == "npd":
        return 1 if hard else 2 if unknown else 0
    return 2 if hard else 1 if problems else 3 if unknown else 0


def table(verdicts: Sequence[Verdict], now: float, colour: bool) -> str:
    order = {Result.PROBLEM: 0, Result.UNKNOWN: 1, Result.OK: 2}
    ranked = sorted(verdicts, key=lambda item: (not item.applies, order[item.result], -item.class_.weight, item.check))
    rows = [("CHECK", "VERDICT", "MEASURED", "THRESHOLD", "AGE", "REASON")]
    for item in ranked:
        word = WORDS[item.result] if item.applies else "-"
        if item.result is Result.PROBLEM:
            word += f" {item.class_}"
        rows.append((item.check, word, item.measured or "-", item.threshold or "-", _age(now - item.at), item.reason))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    widths[2:4] = [min(width, 16) for width in widths[2:4]]
    lines = []
    for row, verdict in zip(rows, [None, *ranked], strict=True):
        cells = [cell[:width].ljust(width) for cell, width in zip(row[:5], widths, strict=True)]
        if colour and verdict is not None:
            code = COLOURS[verdict.result] if verdict.applies else "2"
            cells[1] = f"\x1b[{code}m{cells[1]}\x1b[0m"
        lines.append("  ".join([*cells, row[5]]).rstrip())
        if verdict is not None and verdict.result is Result.PROBLEM:
            lines.append(
                f"    {ACTIONS[verdict.class_]}" + (f"; evidence: {verdict.evidence}" if verdict.evidence else "")
            )
    counts = {result: sum(1 for item in verdicts if item.applies and item.result is result) for result in Result}
    absent = sum(1 for item in verdicts if not item.applies)
    summary = f"{counts[Result.OK]} ok, {counts[Result.PROBLEM]} problems, {counts[Result.UNKNOWN]} unknown"
    return "\n".join([*lines, summary + (f", {absent} not for this node" if absent else "")])


def as_json(verdicts: Sequence[Verdict], now: float, colour: bool) -> str:
    return json.dumps([verdict.to_json() for verdict in verdicts], indent=1)


def nhc(verdicts: Sequence[Verdict], now: float, colour: bool) -> str:
    """Format one line as Node Health Check does, with its message for success."""
    worst = _worst(verdicts)
    if worst is None or worst.result is not Result.PROBLEM or worst.class_ is Class.USER:
        return "nhc: Health check passed"
    return f"ERROR: nhc: Health check failed:  {worst.check}: {worst.reason}"


def npd(verdicts: Sequence[Verdict], now: float, colour: bool) -> str:
    """Format a custom plugin's message; node-problem-detector keeps 80 characters by default."""
    worst = _worst(verdicts)
    if worst is None:
        return "no verdict"
    if worst.result is Result.OK:
        return "all checks pass"
    return f"{worst.check}: {worst.reason}"[:80]


def book_lines(book: Mapping[str, Any]) -> list[str]:
    """Format a GPU's file in the ledger: its identity and its last incidents."""
    events = book.get("events", [])
    mark = "  repeat offender" if book.get("offender") else ""
    incidents = counted(len(events), "incident")
    head = f"{book.get('uuid')}  {book.get('model')}  serial {book.get('serial') or '-'}  {incidents}{mark}"
    last = events[-INCIDENTS_SHOWN:]
    days = [time.strftime("%Y-%m-%d %H:%M", time.localtime(event["at"])) for event in last]
    return [head, *(f"  {day}  {event['check']}: {event['reason']}" for day, event in zip(days, last, strict=True))]


def _worst(verdicts: Sequence[Verdict]) -> Verdict | None:
    order = {Result.OK: 0, Result.UNKNOWN: 1, Result.PROBLEM: 2}
    judged = [verdict for verdict in verdicts if verdict.applies]
    return max(judged, key=lambda verdict: (order[verdict.result], verdict.class_.weight, verdict.check), default=None)


def _age(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f}{unit}"
    return f"{max(0.0, seconds):.0f}s"


FORMATS: Mapping[str, Callable[[Sequence[Verdict], float, bool], str]] = {
    "table": table,
    "json": as_json,
    "nhc": nhc,
    "npd": npd,
}


# Evidence is bounded when it is written; an archive packed by hand may hold anything.
UNPACKED_LIMIT = 64 << 20
# The broker asks the controller before it answers, which may take time.
BROKER_S = 45.0
# A background round takes seconds; deep checks take minutes, and a person need not wait for those.
FORGET_WAIT_S = 30.0
# Ctrl-C, and the end of the user's terminal or of `kubectl exec`.
ENDS = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)
SUBCOMMANDS = ("ledger", "clear", "forget", "selftest")


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["health"] and words[1:2] and words[1] in SUBCOMMANDS:
        words = words[1:]
    try:
        options = _parser().parse_args(words)
        return int(options.act(options))
    except GitsyncError as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # `minivm health | head` is no error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _stop(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt on SIGHUP or SIGTERM, so that running checks, each in its own session, are ended too."""
    raise KeyboardInterrupt


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="minivm", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    health = commands.add_parser(
        "health",
        help="show the verdicts of this node",
        description="Show this node's verdicts. Exit codes: 0 ok, 1 a user's problem, 2 a node's problem, 3 unknown.",
        epilog="More commands: health ledger, health clear CHECK, health forget CHECK, health selftest TREE.",
    )
    health.add_argument("checks", nargs="*", metavar="CHECK", help="only these checks; default: all")
    health.add_argument("--run", action="store_true", help="run the checks now instead of showing the last verdicts")
    health.add_argument(
        "--when", type=_one_of(When), metavar="W", help="with --run: prolog, background, epilog, boot, deep"
    )
    health.add_argument(
        "--class", dest="classes", action="append", type=_one_of(Class), metavar="C",
        help="only problems of this class: user, node, reboot, manual, rma",
    )  # fmt: skip
    health.add_argument("--recording", type=Path, help="judge a recording as if it were this node, for a drill")
    _formats(health)
    health.set_defaults(act=_health)

    again = commands.add_parser("replay", help="run the same checks on an evidence capsule")
    again.add_argument("capsule", type=Path, help="a directory, or a .tar.gz of one")
    again.add_argument("checks", nargs="*", metavar="CHECK")
    again.add_argument("--tree", type=Path, help="the scripts to judge with; default: this node's")
    _formats(again)
    again.set_defaults(act=_replay)

    test = commands.add_parser("selftest", help="run every check of a tree against its recordings")
    test.add_argument("tree", type=Path)
    test.set_defaults(act=_selftest)

    book = commands.add_parser("ledger", help="show the incidents of each GPU of this host")
    book.add_argument("--forgive", metavar="UUID", help="stop counting this GPU's incidents up to now")
    book.add_argument("--json", action="store_true")
    book.set_defaults(act=_ledger)

    clear = commands.add_parser("clear", help="discard what a check remembers")
    clear.add_argument("check")
    clear.set_defaults(act=_clear)

    forgotten = commands.add_parser("forget", help="discard a check's verdict and its part of the drain")
    forgotten.add_argument("check")
    forgotten.set_defaults(act=_forget)
    return parser


def _one_of(known: type[When] | type[Class]) -> Callable[[str], When | Class]:
    def parse(text: str) -> When | Class:
        try:
            return known(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(known)}") from None

    return parse


def _formats(parser: argparse.ArgumentParser) -> None:
    group = parser.add_mutually_exclusive_group()
    for name, about in (
        ("json", "every verdict, for programs"),
        ("nhc", "one line and an exit code in NHC's format"),
        ("npd", "one line and an exit code for node-problem-detector"),
    ):
        group.add_argument(f"--{name}", dest="format", action="store_const", const=name, help=about)
    parser.set_defaults(format="table")


def _health(options: argparse.Namespace) -> int:
    places = Places.from_environment()
    if options.run or options.recording:
        for number in ENDS:
            signal.signal(number, _stop)
        with lease.hold() as held:
            selection = (
                CheckSelection(names=tuple(options.checks))
                if options.checks
                else CheckSelection(options.when or When.BACKGROUND)
            )
            captures = read_case(options.recording).captures if options.recording else None
            run(held.path.resolve(), held.commit, selection, places, captures)
        ask_broker({"ask": "look"}, 5.0)
    verdicts = drop_void(read_verdicts(places.verdicts), places.scripts)
    if missing := [name for name in options.checks if name not in verdicts]:
        hint = nearest(missing[0], verdicts)
        raise GitsyncError("show the verdict", f"no check {missing[0]!r} has a verdict", hint=hint)
    shown = [verdict for name, verdict in verdicts.items() if not options.checks or name in options.checks]
    now = time.time()
    # An expired verdict counts as unknown.
    shown = [verdict if now < verdict.expires else _mark_expired(verdict) for verdict in shown]
    if options.classes:
        shown = [item for item in shown if item.result is Result.PROBLEM and item.class_ in options.classes]
    return _show(shown, options.format, now, not options.classes)


def _unpack(packed: Path, into: Path) -> None:
    """Extract the files of the directory that holds case.json, each by its base name, so none can land elsewhere.

    Avoids extractall(): its filters came with Python 3.11.4, and Debian 12 has an older one.
    """
    try:
        with tarfile.open(packed) as archive:
            files = {PurePosixPath(member.name): member for member in archive if member.isreg()}
            cases = sorted(path.parent for path in files if path.name == "case.json")
            if not cases:
                raise GitsyncError("replay a capsule", "no case.json in it", file=packed)
            members = {path.name: member for path, member in files.items() if path.parent == cases[0]}
            if sum(member.size for member in members.values()) > UNPACKED_LIMIT:
                raise GitsyncError("replay a capsule", f"it holds more than {UNPACKED_LIMIT >> 20} MiB", file=packed)
            for name, member in members.items():
                source = archive.extractfile(member)
                if name not in {"", ".."} and source is not None:
                    with source, (into / name).open("wb") as out:
                        shutil.copyfileobj(source, out)
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise GitsyncError("replay a capsule", "neither a directory nor a packed one (.tar.gz)", file=packed) from error


def _replay(options: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as scratch:
        capsule = options.capsule
        if capsule.is_file():
            _unpack(capsule, Path(scratch))
            capsule = Path(scratch)
        case = read_case(capsule)
        if options.tree:
            judged = replay(options.tree.resolve(), case, options.checks or None)
        else:
            with lease.hold() as held:
                judged = replay(held.path.resolve(), case, options.checks or None)
    return _show([item.verdict for item in judged], options.format, case.now or time.time(), True)


def _selftest(options: argparse.Namespace) -> int:
    if not (options.tree / "health.d").is_dir():
        raise GitsyncError("test the tree", "it has no directory health.d", file=options.tree)
    try:
        result = examine(options.tree.resolve())
    except SystemExit as end:
        # The exit status decides if gitsync publishes the commit: a check's `sys.exit(0)` must not set it.
        print(f"a check ended the process with {end.code!r} instead of judging", file=sys.stderr)
        return 3
    for fault in result.faults:
        print(fault, file=sys.stderr)
    if not result.faults:
        print("\n".join(result.words()))
    return 1 if result.faults else 0


def _ledger(options: argparse.Namespace) -> int:
    ledger = Ledger(Places.from_environment().ledger)
    if options.forgive:
        ledger.forgive(options.forgive, time.time())
        return 0
    books, code = [], 0
    for path in ledger.files():
        try:
            books.append(read_book(path))
        except GitsyncError as error:
            # Show the remaining books.
            print(f"error: {error}", file=sys.stderr)
            code = 3
    if options.json:
        print(json.dumps(books, indent=1))
    else:
        for book in books:
            print("\n".join(book_lines(book)))
    return code


def _clear(options: argparse.Namespace) -> int:
    """Discard what a check remembers, so that it reports only new events."""
    places = Places.from_environment()
    path = places.memory(options.check)
    if not path.exists() and not places.verdict(options.check).exists():
        raise GitsyncError("clear a check", f"no check {options.check!r} has a verdict or a memory")
    # Keep the check's cursor, the position up to which its log has been read; drop the rest.
    remembered = {key: value for key, value in recall(places, options.check, boot_id()).items() if key == "cursor"}
    remember(places, options.check, boot_id(), remembered)
    return 0


def _forget(options: argparse.Namespace) -> int:
    """Discard a check's verdict, its memory and its part of the drain; a check that still fails reports again."""
    if "/" in options.check:
        raise GitsyncError("forget a check", f"{options.check!r} is not a check's name")
    places = Places.from_environment()
    # A round that runs has read its sources before, and would write the verdict again.
    with one_round(places, FORGET_WAIT_S) as alone:
        forget(places, options.check)
    if not alone:
        print(f"a round of checks runs for more than {FORGET_WAIT_S:g} s: forget {options.check} again after it",
              file=sys.stderr)  # fmt: skip
    answer = ask_broker({"ask": "forget", "checks": [options.check]}, BROKER_S)
    if answer is None:
        raise GitsyncError("forget a check", "the broker does not answer", hint="run this as root in a worker's pod")
    print(f"{options.check} is forgotten; the broker says: {answer.get('said', '')}")
    return 0


def _mark_expired(verdict: Verdict) -> Verdict:
    from dataclasses import replace

    return replace(verdict, result=Result.UNKNOWN, reason=f"out of date; it was {verdict.result}: {verdict.reason}")


def _show(verdicts: Sequence[Verdict], form: str, now: float, complete: bool) -> int:
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    print(FORMATS[form](verdicts, now, colour))
    return exit_code(verdicts, form, complete=complete)


if __name__ == "__main__":
    raise SystemExit(main())
