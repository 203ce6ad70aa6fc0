"""A verdict: the result of one check, the class of remedy, and its expiry; reading and writing it.

The file's schema is in docs/architecture.md. Each check has one file, written to a unique temporary and renamed, so a
reader sees a whole verdict, the new one or the one before.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from gitsync.errors import GitsyncError
from gitsync.layout import GENERATION_ZERO, ZERO, commit_of_link, is_script
from ground.errors import one_line
from ground.files import write_json


class Result(StrEnum):
    OK = "ok"
    PROBLEM = "problem"
    # Nothing was measured: a missing tool, unreadable output. Never the same as ok.
    UNKNOWN = "unknown"


class Class(StrEnum):
    """Remedy: by the job's user, by the node itself, by a reboot or reset, by a person on site, by the manufacturer."""

    USER = "user"
    NODE = "node"
    REBOOT = "reboot"
    MANUAL = "manual"
    RMA = "rma"

    @property
    def weight(self) -> int:
        return list(Class).index(self)


@dataclass(frozen=True, slots=True)
class Finding:
    """One result of a check about one subject (a GPU's UUID, a port, a mount; "host" for the node as a whole)."""

    result: Result
    reason: str
    subject: str = "host"
    class_: Class | None = None
    measured: str = ""
    threshold: str = ""
    # True if a job's user can cause it; None: as the check declares. Used in judging, not written.
    user_made: bool | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    check: str
    result: Result
    class_: Class
    reason: str
    measured: str = ""
    threshold: str = ""
    evidence: str = ""
    commit: str = ""
    boot_id: str = ""
    subject: str = "host"
    at: float = 0.0
    expires: float = 0.0
    # False if the node lacks the check's hardware: nothing to judge, and nothing wrong.
    applies: bool = True
    findings: tuple[Finding, ...] = ()
    # For a script's verdict, the script's digest; the verdict is void once that script is no longer published.
    digest: str = ""

    def fresh(self, now: float, boot_id: str) -> bool:
        # After a clock jumped back, "at" lies in the future: such a verdict proves nothing either.
        return self.boot_id == boot_id and self.at <= now + 5 and now < self.expires

    def to_json(self) -> dict[str, object]:
        data = asdict(self)
        data["class"] = data.pop("class_")
        if not self.digest:
            del data["digest"]
        data["findings"] = [
            {"class" if key == "class_" else key: value for key, value in finding.items() if key != "user_made"}
            for finding in data["findings"]
        ]
        return data


def summarise(findings: Iterable[Finding], default: Class) -> Finding:
    """Choose the finding that represents all: a problem before an unknown before an ok; then the heaviest class."""
    order = {Result.OK: 0, Result.UNKNOWN: 1, Result.PROBLEM: 2}
    ranked = sorted(
        findings,
        key=lambda finding: (order[finding.result], (finding.class_ or default).weight, _number(finding.measured)),
        reverse=True,
    )
    if not ranked:
        return Finding(Result.UNKNOWN, "the check returned no finding")
    worst = ranked[0]
    same = sum(1 for finding in ranked if finding.result is worst.result)
    more = f" (and {same - 1} more)" if worst.result is not Result.OK and same > 1 else ""
    return Finding(
        worst.result, worst.reason + more, worst.subject, worst.class_ or default, worst.measured, worst.threshold
    )


def make_printable(finding: Finding) -> Finding:
    """Make a finding printable on one line: tools pass the names of users' processes and files through unchanged."""
    words = (finding.reason, finding.subject, finding.measured, finding.threshold)
    reason, subject, measured, threshold = map(one_line, words)
    return replace(finding, reason=reason, subject=subject, measured=measured, threshold=threshold)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def verdict_from_json(data: Mapping[str, object], file: str = "") -> Verdict:
    """Parse a verdict, strict about types, tolerant of a newer writer's keys."""

    def text(key: str, default: str = "") -> str:
        return str(data.get(key, default))

    try:
        return Verdict(
            check=str(data["check"]),
            result=Result(str(data["result"])),
            class_=Class(str(data["class"])),
            reason=str(data["reason"]),
            measured=text("measured"),
            threshold=text("threshold"),
            evidence=text("evidence"),
            commit=text("commit"),
            boot_id=text("boot_id"),
            subject=text("subject", "host"),
            at=float(str(data["at"])),
            expires=float(str(data["expires"])),
            applies=data.get("applies", True) is True,
            findings=tuple(_parse_finding(item) for item in _items(data.get("findings", []))),
            digest=text("digest"),
        )
    except (KeyError, ValueError, TypeError) as error:
        raise GitsyncError("read a verdict", str(error) or type(error).__name__, file=file) from error


def _items(value: object) -> list[Mapping[str, object]]:
    if not isinstance(value, list | tuple) or not all(isinstance(item, dict) for item in value):
        raise ValueError("findings: wanted a list of mappings")
    return list(value)


def _parse_finding(item: Mapping[str, object]) -> Finding:
    return Finding(
        Result(str(item["result"])),
        str(item["reason"]),
        str(item.get("subject", "host")),
        Class(str(item["class"])) if item.get("class") else None,
        str(item.get("measured", "")),
        str(item.get("threshold", "")),
    )


def read_verdict(path: Path) -> Verdict | None:
    """Read a verdict; None if it is missing or unreadable: both mean that nothing is known."""
    try:
        data = json.loads(path.read_bytes())
        return verdict_from_json(data, str(path)) if isinstance(data, dict) else None
    except (OSError, ValueError, RecursionError, GitsyncError):
        return None


def read_mapping(file: Path, what: str) -> dict[str, Any]:
    """Read a JSON mapping for a person; raise an error if the file is missing or damaged."""
    try:
        data = json.loads(file.read_bytes())
    except OSError as error:
        raise GitsyncError(what, error.strerror or str(error), file=file) from error
    except (ValueError, RecursionError) as error:
        raise GitsyncError(what, f"not JSON: {error}", file=file) from error
    if not isinstance(data, dict):
        raise GitsyncError(what, "wanted a mapping", file=file)
    return data


def read_verdicts(directory: Path) -> dict[str, Verdict]:
    verdicts = {path.stem: read_verdict(path) for path in sorted(directory.glob("[!.]*.json"))}
    return {name: verdict for name, verdict in verdicts.items() if verdict is not None}


def write_verdict(directory: Path, verdict: Verdict) -> Path:
    path = directory / f"{verdict.check}.json"
    write_json(path, verdict.to_json())
    return path


OLD_S = 600.0


def remove_cut_verdicts(directory: Path, now: float) -> None:
    """Remove the temporaries of writers that were killed. A check has several writers, so young ones stay."""
    for temporary in directory.glob(".*.json.*"):
        with contextlib.suppress(OSError):
            if now - temporary.stat().st_mtime > OLD_S:
                temporary.unlink()


# A script's verdict is about one version of the script, which a digest identifies.
# Kinds whose scripts may report the node unfit, which leaves a verdict named KIND.SCRIPT.
KINDS = ("prolog", "epilog")
# The runner's verdicts about all broken scripts of a kind. The next run withdraws them, and an idle node has none.
SUMMARIES = frozenset(f"scripts_{kind}" for kind in KINDS)
DIGITS = 16


def is_of_script(check: str) -> bool:
    """Tell if a verdict of this name comes from a script, not from a check."""
    return check.startswith(tuple(f"{kind}." for kind in KINDS))


def script_digest(script: Path) -> str:
    """Return the file's digest; "" if unreadable: such a verdict counts until it expires."""
    try:
        return hashlib.sha256(script.read_bytes()).hexdigest()[:DIGITS]
    except OSError:
        return ""


def is_void(verdict: Verdict, scripts: Mapping[str, str] | None) -> bool:
    """Tell if a script's verdict is void: its script was removed from the published tree or replaced.

    A drained node runs no prolog, so the script can never withdraw the verdict itself.
    """
    if scripts is None or not is_of_script(verdict.check):
        return False
    now = scripts.get(verdict.check)
    return now is None or bool(verdict.digest and now and verdict.digest != now)


def drop_void(verdicts: Mapping[str, Verdict], root: Path) -> dict[str, Verdict]:
    """Drop the void verdicts. `root` holds the published tree, which is read only for a script's verdict.

    A summary of broken scripts counts for its own commit: another one may have corrected them.
    """
    scripts = digest_published_scripts(root) if any(map(is_of_script, verdicts)) else None
    commit = read_published_commit(root) if SUMMARIES & {*verdicts} else ""
    return {
        name: verdict
        for name, verdict in verdicts.items()
        if not is_void(verdict, scripts) and not (name in SUMMARIES and commit not in ("", verdict.commit))
    }


def read_published_commit(root: Path, zero: str = GENERATION_ZERO) -> str:
    """Return the published commit; "" where the link cannot be read. Without a link, the image's tree is published."""
    try:
        return commit_of_link(os.readlink(root / "current"), Path(zero)) or ""  # noqa: PTH115 - as text
    except FileNotFoundError:
        return ZERO
    except OSError:
        return ""


def digest_published_scripts(root: Path, zero: Path = Path(GENERATION_ZERO)) -> Mapping[str, str] | None:
    """Map the name of each script's verdict to the script's digest; None if the published tree cannot be read.

    The link is resolved once, so that all scripts are of one commit. Without a link, the image's tree is published.
    """
    current = root / "current"
    try:
        tree = (current if current.is_symlink() else zero).resolve(strict=True)
        return {
            f"{kind}.{script.name}": script_digest(script)
            for kind in KINDS
            if (tree / f"{kind}.d").is_dir()
            for script in sorted((tree / f"{kind}.d").iterdir())
            if is_script(script.name)
        }
    except OSError:
        return None
