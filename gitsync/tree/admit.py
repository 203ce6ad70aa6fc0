"""Admission of a commit, on a node and in the mirror: its signature, age, list of files and marker file."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from gitsync.errors import GitsyncError, RefusedCommit
from gitsync.layout import UNFINISHED
from gitsync.repo import child
from gitsync.repo.listing import CommitFile, Tip
from gitsync.repo.transfer import git
from gitsync.settings import Backward, GitsyncSettings, Ref, RefKind
from gitsync.tree import marker
from gitsync.tree.write import read_blobs

if TYPE_CHECKING:
    from gitsync.repo.reader import CommitReader


# Verify who signed a commit: git's verification of ssh signatures, against the node's allowed signers only.
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


def signature(settings: GitsyncSettings, ref: Ref, tip: Tip) -> str:
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
        # An OpenPGP or X.509 signature would be checked with whatever keys happen to be on the node.
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


def not_backward(settings: GitsyncSettings, ref: Ref, tip: Tip, published: float, floor: float) -> None:
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


# Rules for a commit's list of files, checked before the first byte is written. Pure.
@dataclass(frozen=True, slots=True)
class TreeLimits:
    """The allowed paths and sizes of a tree."""

    paths: tuple[str, ...]
    max_bytes: int
    max_file_bytes: int
    max_files: int


REGULAR, LINK, SUBMODULE = 0o10, 0o12, 0o16
# Longest path that the kernel accepts; a link's target is a path.
LONGEST_LINK = 4096
MAX_REPORTED = 20


def allowed(path: str, patterns: Sequence[str]) -> bool:
    """Tell whether a pattern matches the path, name by name, or a directory above it."""
    names = path.split("/")
    for pattern in patterns:
        parts = pattern.strip("/").split("/")
        if len(names) >= len(parts) and all(map(fnmatchcase, names, parts)):
            return True
    return False


def bad_name(path: str) -> str | None:
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


def bad_entry(entry: CommitFile, limits: TreeLimits) -> str | None:
    """Explain why one file is unacceptable."""
    if reason := bad_name(entry.path):
        return reason
    kind, permissions = entry.mode >> 12, entry.mode & 0o7777
    if kind == SUBMODULE:
        return "it is a submodule"
    if kind not in {REGULAR, LINK}:
        return f"its mode {entry.mode:o} is not that of a file"
    if permissions & 0o7000:
        return f"its mode {entry.mode:o} is setuid, setgid or sticky"
    if not allowed(entry.path, limits.paths):
        return f"it is outside the allowed paths ({', '.join(limits.paths)})"
    if kind == LINK and entry.size > LONGEST_LINK:
        return "it is a symbolic link whose target is too long"
    if entry.size > limits.max_file_bytes:
        return f"it is {entry.size} bytes, more than {limits.max_file_bytes} a file"
    return None


def violations(entries: Iterable[CommitFile], limits: TreeLimits) -> list[str]:
    """List everything wrong with a commit's files, worst last, so that a person can fix all of it at once."""
    problems: list[str] = []
    paths: set[str] = set()
    total = count = 0
    for entry in entries:
        count += 1
        total += entry.size
        reason = "it is listed twice" if entry.path in paths else bad_entry(entry, limits)
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
    if count > limits.max_files:
        problems.append(f"it holds {count} files, more than {limits.max_files}")
    if total > limits.max_bytes:
        problems.append(f"it holds {total} bytes, more than {limits.max_bytes}")
    return problems


def admit(
    settings: GitsyncSettings, ref: Ref, tip: Tip, reader: CommitReader, *, newer_than: float | None,
    had: Callable[[], frozenset[str]],
) -> tuple[str, list[CommitFile]]:  # fmt: skip
    """Return the signer and the files, or raise RefusedCommit with the reason.

    `newer_than` is the date of the published commit, None to allow an older one; `had` returns the kinds of scripts in
    the published tree.
    """
    signer = signature(settings, ref, tip)
    if newer_than is not None:
        not_backward(settings, ref, tip, newer_than, marker.floor(settings))
    entries = reader.entries(tip.commit, settings.subdir)
    _refuse_violations(entries, settings)
    marker.judge(settings, ref, entries, lambda entry: next(read_blobs(settings.layout.repository, [entry])), had())
    return signer, entries


def _refuse_violations(entries: list[CommitFile], settings: GitsyncSettings) -> None:
    limits = TreeLimits(
        (*settings.paths, marker.MARKER), settings.max_bytes, settings.max_file_bytes, settings.max_files
    )
    if problems := violations(entries, limits):
        raise RefusedCommit("use the commit", "; ".join(problems))
