"""Admission of a commit, on a node and in the mirror: its signature, age, list of files and marker file."""

from __future__ import annotations

import functools
import json
import re
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from gitsync.errors import GitsyncError, RefusedCommit
from gitsync.layout import UNFINISHED, is_script
from gitsync.repo import child
from gitsync.repo.reader import CommitFile, CommitReader, Tip
from gitsync.repo.transfer import git
from gitsync.settings import TREE_NAME, Backward, GitsyncSettings, Ref, RefKind, parse_date
from gitsync.tree.check import EXECUTED
from gitsync.tree.publish import read_blobs
from ground.errors import nearest

# Verify the signer of a commit: git's verification of ssh signatures, against the node's allowed signers only.
GOOD = re.compile(r'Good "git" signature for (?P<who>.+?) with (?P<key>\S+ key \S+)')
UNKNOWN = re.compile(r'Good "git" signature with (?P<key>\S+ key \S+)')


@dataclass(frozen=True, slots=True)
class Opinion:
    """Result of ssh-keygen's verification, as git reports it."""

    good: bool
    signer: str
    reason: str


def judge(status: int, output: str) -> Opinion:
    """Interpret verify-commit's exit status and output. Good only if both agree."""
    good, unknown = GOOD.search(output), UNKNOWN.search(output)
    if status == 0 and good:
        return Opinion(True, f"{good['who']} ({good['key']})", "")
    if good:
        return Opinion(
            False, good["who"], f"the signature of {good['who']} ({good['key']}) does not count: {_last(output)}"
        )
    if unknown:
        # "key has expired" and "not yet valid" explain why git ignores a key that is in the file.
        more = "".join(
            f" ({line.strip()})" for line in output.splitlines() if "key has expired" in line or "not yet" in line
        )
        return Opinion(False, unknown["key"], f"signed with {unknown['key']}, which no allowed signer holds{more}")
    if output.strip():
        return Opinion(False, "", f"the signature is not good: {_last(output)}")
    return Opinion(False, "", "not signed")


def _last(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "git printed no reason"


def verify_signature(settings: GitsyncSettings, ref: Ref, tip: Tip) -> str:
    """Return the signer's name, or raise RefusedCommit with the reason. Empty when verification is off.

    A tag's own signature counts first, because it covers the commit that it names; then the commit's.
    """
    if not settings.verify:
        return ""
    if not settings.allowed_signers.is_file():
        raise GitsyncError(
            "verify the commit",
            "the file of allowed signers is missing",
            file=settings.allowed_signers,
            hint="mount one, or set MINIVM_GITSYNC_VERIFY=no to trust everyone with push access",
        )
    by_tag = None if tip.tag is None else _check_signature(settings, "verify-tag", tip.oid)
    if by_tag is not None and by_tag.good:
        # A good signature on tag v1, served as v2, would pass off an old version as a new one.
        if ref.kind is RefKind.TAG and tip.tag != ref.name:
            raise RefusedCommit("trust the tag", f"it was signed as {tip.tag!r} and is served as {ref.name!r}")
        return by_tag.signer
    by_commit = _check_signature(settings, "verify-commit", tip.commit)
    if by_commit.good:
        return by_commit.signer
    if by_tag is not None:
        raise RefusedCommit("trust the tag", f"{by_tag.reason}; and its commit by {tip.author}: {by_commit.reason}")
    raise RefusedCommit("trust the commit", f"{by_commit.reason} (author {tip.author})")


def _check_signature(settings: GitsyncSettings, command: str, oid: str) -> Opinion:
    opinion = _verify(settings, command, oid, settings.revoked_signers)
    if opinion.good or settings.revoked_signers is None:
        return opinion
    # git does not name a revoked signer: verify again without the list, only for the name in the refusal.
    without = _verify(settings, command, oid, None)
    return Opinion(False, without.signer, f"signed by {without.signer}, revoked") if without.good else opinion


def _verify(settings: GitsyncSettings, command: str, oid: str, revoked: Path | None) -> Opinion:
    options = [
        "gpg.format=ssh",
        f"gpg.ssh.allowedSignersFile={settings.allowed_signers}",
        # An OpenPGP or X.509 signature would be checked with any keys that happen to be on the node.
        "gpg.program=/bin/false",
        "gpg.openpgp.program=/bin/false",
        "gpg.x509.program=/bin/false",
        "gpg.ssh.program=ssh-keygen",
    ]
    if revoked is not None:
        options.append(f"gpg.ssh.revocationFile={revoked}")
    try:
        # git and ssh-keygen write temporary files. If they are killed, the next cycle removes this directory.
        with tempfile.TemporaryDirectory(prefix=f"{UNFINISHED}verify-", dir=settings.layout.root) as directory:
            argv = git(settings.layout.repository, command, oid, options=tuple(options))
            done = child.run(argv, timeout=30, env={"TMPDIR": directory})
    except OSError as error:
        raise GitsyncError("verify the commit", error.strerror or str(error), file=settings.layout.root) from error
    if done.status < 0:  # says nothing about the commit, so do not quarantine it
        raise GitsyncError("verify the commit", f"git was killed by signal {-done.status}")
    return judge(done.status, f"{done.err}\n{done.out.decode(errors='replace')}")


def refuse_backward(settings: GitsyncSettings, ref: Ref, tip: Tip, published: float, floor: float) -> None:
    """Refuse a branch's commit that is older than the published one, or than `floor` when nothing is published.

    A well signed older commit is a force push, or a server that serves old commits.
    """
    if ref.kind is not RefKind.BRANCH or settings.backward is Backward.ALLOW:
        return
    if tip.committed < published:
        raise RefusedCommit(
            "take the commit",
            f"it is {published - tip.committed:.0f} s older than the published one",
            hint="if this is intended, pin it or set MINIVM_GITSYNC_BACKWARD=allow",
        )
    if tip.committed < floor:
        raise RefusedCommit(
            "take the commit",
            f"it is {(floor - tip.committed) / 86400:.1f} days older than the oldest commit that this node accepts "
            + ("(generation zero)" if settings.not_before is None else "(MINIVM_GITSYNC_NOT_BEFORE)"),
            hint="sign a new commit (git commit --allow-empty -S), or name an earlier MINIVM_GITSYNC_NOT_BEFORE",
        )


# The marker file says which repository a tree belongs to, and which kinds of scripts it intentionally lacks. A
# signature proves the author, not the purpose: the same person signs dotfiles, another cluster's scripts, and a commit
# that empties this repository by mistake.

MARKER = "minivm-scripts.json"
KEYS = ("about", "name", "not_before", "without")
KINDS = (*EXECUTED, "health.d")
LONGEST_MARKER = 4096


@dataclass(frozen=True, slots=True)
class Marker:
    """The content of a marker file."""

    name: str
    without: frozenset[str] = frozenset()
    not_before: float = 0.0


def parse_marker(text: bytes) -> Marker:
    """Parse a marker file; raise ValueError with the key and what is wrong with it."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(data, dict):
        raise ValueError("not an object")
    for key in data:
        if key not in KEYS:
            raise ValueError(f"unknown key {key[:40]!r}, {nearest(key, KEYS)}")
    name, without, date = data.get("name"), data.get("without", []), data.get("not_before")
    if not isinstance(name, str) or not TREE_NAME.fullmatch(name):
        raise ValueError("name: wanted up to 64 letters, digits, '.', '_' or '-'")
    if not isinstance(without, list) or not all(kind in KINDS for kind in without):
        raise ValueError(f"without: wanted a list of {', '.join(KINDS)}")
    if date is not None and not isinstance(date, str):
        raise ValueError("not_before: wanted a date such as 2026-01-31")
    try:
        return Marker(name, frozenset(without), 0.0 if date is None else parse_date(date))
    except ValueError as error:
        raise ValueError(f"not_before: {error}") from None


def list_kinds(paths: Iterable[str]) -> frozenset[str]:
    """Return the kinds of scripts of which a list of files has at least one."""
    parts = (path.rpartition("/") for path in paths)
    return frozenset(kind for kind, _, name in parts if kind in KINDS and is_script(name))


def list_kinds_on_disk(tree: Path) -> frozenset[str]:
    return list_kinds(f"{kind}/{path.name}" for kind in KINDS for path in tree.glob(f"{kind}/*") if path.is_file())


def find_floor(settings: GitsyncSettings) -> float:
    """Return the oldest commit date that a node without a published commit accepts from a branch.

    It is the operator's MINIVM_GITSYNC_NOT_BEFORE, or generation zero's `not_before`.
    """
    if settings.not_before is not None:
        return settings.not_before
    path = settings.zero / MARKER
    try:
        return parse_marker(path.read_bytes()).not_before
    except FileNotFoundError:
        return 0.0  # a site's image may have none
    except (OSError, ValueError) as error:
        raise GitsyncError("read generation zero's marker", str(error), file=path) from None


def check_marker(
    settings: GitsyncSettings, ref: Ref, entries: Sequence[CommitFile], kinds_before: frozenset[str]
) -> None:
    """Raise RefusedCommit if the tree belongs to another repository, or has lost a kind of script.

    `kinds_before` are the kinds in the published tree, added to generation zero's.
    """
    wrong = functools.partial(RefusedCommit, "accept the commit for this repository")
    without = frozenset[str]()
    entry = next((entry for entry in entries if entry.path == MARKER), None)
    if entry is not None:
        if entry.is_link or entry.size > LONGEST_MARKER:
            raise wrong(f"its {MARKER} is not a file of at most {LONGEST_MARKER} bytes")
        try:
            marker = parse_marker(next(read_blobs(settings.layout.repository, [entry])))
        except ValueError as error:
            raise wrong(str(error), file=MARKER) from None
        if marker.name != settings.name:
            raise wrong(f"it is {marker.name!r}, and {settings.name!r} is wanted", field="MINIVM_GITSYNC_NAME")
        without = marker.without
    elif ref.kind is not RefKind.COMMIT:
        # A ref that is a whole hash cannot lead to another repository's commit, so its tree needs no marker.
        hint = f'add one that says {{"name": "{settings.name}"}} in a signed commit'
        raise wrong(f"it has no {MARKER}", hint=hint)
    lost = sorted(
        (list_kinds_on_disk(settings.zero) | kinds_before) - list_kinds(entry.path for entry in entries) - without
    )
    if lost:
        raise RefusedCommit(
            "accept the commit as complete",
            f"it has no script in {', '.join(lost)}, unlike generation zero or the published tree",
            hint=f'if this is intended, add {{"without": {json.dumps(lost)}}} to its {MARKER}',
        )


# Rules for a commit's list of files, checked before the first byte is written. Pure.

REGULAR, LINK, SUBMODULE = 0o10, 0o12, 0o16
# Longest path that the kernel accepts; a link's target is a path.
LONGEST_LINK = 4096
MAX_REPORTED = 20


def is_allowed(path: str, patterns: Sequence[str]) -> bool:
    """Tell whether a pattern matches the path, name by name, or a directory above it."""
    names = path.split("/")
    for pattern in patterns:
        parts = pattern.strip("/").split("/")
        if len(names) >= len(parts) and all(map(fnmatchcase, names, parts)):
            return True
    return False


def explain_bad_name(path: str) -> str | None:
    """Explain why a path is unacceptable. git's own checks refuse most of these; a hostile server skips them."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return "its name is not UTF-8"
    if any(ord(letter) < 32 or ord(letter) == 127 for letter in path):
        return "its name holds a control character"
    for part in path.split("/"):
        if part in {"", ".", ".."}:
            return "its path leaves the tree"
        if part.lower() == ".git":
            return "its name is reserved for git's own directory"
        if len(part.encode()) > 255:
            return "its name is too long"
    return None


def explain_bad_entry(entry: CommitFile, settings: GitsyncSettings) -> str | None:
    """Explain why one file is unacceptable."""
    if reason := explain_bad_name(entry.path):
        return reason
    kind, permissions = entry.mode >> 12, entry.mode & 0o7777
    if kind == SUBMODULE:
        return "it is a submodule"
    if kind not in {REGULAR, LINK}:
        return f"its mode {entry.mode:o} is not that of a file"
    if permissions & 0o7000:
        return f"its mode {entry.mode:o} is setuid, setgid or sticky"
    if entry.path != MARKER and not is_allowed(entry.path, settings.paths):
        return f"it is outside the allowed paths ({', '.join(settings.paths)})"
    if kind == LINK and entry.size > LONGEST_LINK:
        return "it is a symbolic link whose target is too long"
    if entry.size > settings.max_file_bytes:
        return f"it is {entry.size} bytes, more than {settings.max_file_bytes} a file"
    return None


def list_violations(entries: Iterable[CommitFile], settings: GitsyncSettings) -> list[str]:
    """List everything wrong with a commit's files, worst last, so that a person can fix all of it at once."""
    problems: list[str] = []
    paths: set[str] = set()
    total = count = 0
    for entry in entries:
        count += 1
        total += entry.size
        reason = "it is listed twice" if entry.path in paths else explain_bad_entry(entry, settings)
        paths.add(entry.path)
        if reason and len(problems) < MAX_REPORTED:
            problems.append(f"{entry.path!r}: {reason}")
    # A hostile tree may give a link and a directory one name: a file "below" the link would be written elsewhere.
    for path in paths:
        parent = path.rpartition("/")[0]
        while parent:
            if parent in paths:
                problems.append(f"{parent!r}: it is both a file and a directory")
            parent = parent.rpartition("/")[0]
    if count == 0:
        problems.append("it holds no file")
    if count > settings.max_files:
        problems.append(f"it holds {count} files, more than {settings.max_files}")
    if total > settings.max_bytes:
        problems.append(f"it holds {total} bytes, more than {settings.max_bytes}")
    return problems


def admit(
    settings: GitsyncSettings, ref: Ref, tip: Tip, reader: CommitReader, *, newer_than: float | None,
    kinds_before: Callable[[], frozenset[str]],
) -> tuple[str, list[CommitFile]]:  # fmt: skip
    """Return the signer and the files, or raise RefusedCommit with the reason.

    `newer_than` is the date of the published commit, None to allow an older one; `kinds_before` returns the kinds of
    scripts in the published tree.
    """
    signer = verify_signature(settings, ref, tip)
    if newer_than is not None:
        refuse_backward(settings, ref, tip, newer_than, find_floor(settings))
    entries = reader.entries(tip.commit, settings.subdir)
    if problems := list_violations(entries, settings):
        raise RefusedCommit("use the commit", "; ".join(problems))
    check_marker(settings, ref, entries, kinds_before())
    return signer, entries
