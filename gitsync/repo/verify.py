"""Verify who signed a commit: git's verification of ssh signatures, against the node's allowed signers only."""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from gitsync.errors import GitsyncError, Refused
from gitsync.layout import UNFINISHED
from gitsync.repo import child
from gitsync.repo.listing import Tip
from gitsync.repo.transfer import git
from gitsync.settings import Backward, Ref, RefKind, Settings

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


def signature(settings: Settings, ref: Ref, tip: Tip) -> str:
    """Return the signer's name, or raise Refused with the reason. Empty when verification is off.

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
            raise Refused("trust the tag", f"it was signed as {tip.tag!r} and is served as {ref.name!r}")
        return by_tag.signer
    by_commit = _check_signature(settings, "verify-commit", tip.commit)
    if by_commit.good:
        return by_commit.signer
    if by_tag is not None:
        raise Refused("trust the tag", f"{by_tag.reason}; and its commit by {tip.author}: {by_commit.reason}")
    raise Refused("trust the commit", f"{by_commit.reason} (author {tip.author})")


def _check_signature(settings: Settings, command: str, oid: str) -> Opinion:
    opinion = _verify(settings, command, oid, settings.revoked_signers)
    if opinion.good or settings.revoked_signers is None:
        return opinion
    # git does not name a revoked signer: verify again without the list, only for the name in the refusal.
    without = _verify(settings, command, oid, None)
    return Opinion(False, without.signer, f"signed by {without.signer}, revoked") if without.good else opinion


def _verify(settings: Settings, command: str, oid: str, revoked: Path | None) -> Opinion:
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


def not_backward(settings: Settings, ref: Ref, tip: Tip, published: float, floor: float) -> None:
    """Refuse a branch's commit that is older than the published one, or than `floor` when nothing is published.

    A well signed older commit is a force push, or a server that serves old commits.
    """
    if ref.kind is not RefKind.BRANCH or settings.backward is Backward.ALLOW:
        return
    if tip.committed < published:
        raise Refused(
            "take the commit",
            f"it is {published - tip.committed:.0f} s older than the published one",
            hint="if this is intended, pin it or set MINIVM_GITSYNC_BACKWARD=allow",
        )
    if tip.committed < floor:
        raise Refused(
            "take the commit",
            f"it is {(floor - tip.committed) / 86400:.1f} days older than the oldest commit that this node accepts "
            + ("(generation zero)" if settings.not_before is None else "(MINIVM_GITSYNC_NOT_BEFORE)"),
            hint="sign a new commit (git commit --allow-empty -S), or name an earlier MINIVM_GITSYNC_NOT_BEFORE",
        )
