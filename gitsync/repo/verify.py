"""Who signed it: git's own verification of ssh signatures, against the node's allowed signers and nothing else."""

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
    """What ssh-keygen said through git."""

    good: bool
    signer: str
    reason: str


def judge(status: int, said: str) -> Opinion:
    """From verify-commit's exit status and words. Good only where both agree."""
    good, unknown = GOOD.search(said), UNKNOWN.search(said)
    if status == 0 and good:
        return Opinion(True, f"{good['who']} ({good['key']})", "")
    if good:
        return Opinion(
            False, good["who"], f"the signature of {good['who']} ({good['key']}) does not count: {_last(said)}"
        )
    if unknown:
        # "key has expired", "not yet valid": why a key that is in the file does not count.
        more = "".join(
            f" ({line.strip()})" for line in said.splitlines() if "key has expired" in line or "not yet" in line
        )
        return Opinion(False, unknown["key"], f"signed with {unknown['key']}, which no allowed signer holds{more}")
    if said.strip():
        return Opinion(False, "", f"the signature is not good: {_last(said)}")
    return Opinion(False, "", "not signed")


def _last(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "no word from git"


def signature(settings: Settings, ref: Ref, tip: Tip) -> str:
    """The signer's name; Refused with the reason otherwise. Empty where verification is switched off.

    A tag's own signature counts first (it vouches for the commit it names), then the commit's.
    """
    if not settings.verify:
        return ""
    if not settings.allowed_signers.is_file():
        raise GitsyncError(
            "verify the commit",
            "there is no file of allowed signers",
            file=settings.allowed_signers,
            hint="mount one, or set MINIVM_GITSYNC_VERIFY=no to trust whoever can push",
        )
    by_tag = None if tip.tag is None else _ask(settings, "verify-tag", tip.oid)
    if by_tag is not None and by_tag.good:
        # A good signature on tag v1, served under the name v2, is an old version dressed up as a new one.
        if ref.kind is RefKind.TAG and tip.tag != ref.name:
            raise Refused("trust the tag", f"it was signed as {tip.tag!r} and is served as {ref.name!r}")
        return by_tag.signer
    by_commit = _ask(settings, "verify-commit", tip.commit)
    if by_commit.good:
        return by_commit.signer
    if by_tag is not None:
        raise Refused("trust the tag", f"{by_tag.reason}; and its commit by {tip.author}: {by_commit.reason}")
    raise Refused("trust the commit", f"{by_commit.reason} (author {tip.author})")


def _ask(settings: Settings, command: str, oid: str) -> Opinion:
    opinion = _verify(settings, command, oid, settings.revoked_signers)
    if opinion.good or settings.revoked_signers is None:
        return opinion
    # git does not say who: asked again without the list, only for the name in the refusal.
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
        # git and ssh-keygen write the signature to files of their own: those of a killed one go with the next cycle.
        with tempfile.TemporaryDirectory(prefix=f"{UNFINISHED}verify-", dir=settings.layout.root) as room:
            argv = git(settings.layout.repository, command, oid, options=tuple(options))
            done = child.run(argv, timeout=30, env={"TMPDIR": room})
    except OSError as error:
        why = error.strerror or str(error)
        raise GitsyncError("verify the commit", why, file=settings.layout.root) from error
    if done.status < 0:  # no word on the commit, which would stay refused for it
        raise GitsyncError("verify the commit", f"git was killed by signal {-done.status}")
    return judge(done.status, f"{done.err}\n{done.out.decode(errors='replace')}")


def not_backward(settings: Settings, ref: Ref, tip: Tip, published: float, floor: float) -> None:
    """A branch goes forward. An older commit, well signed, is a force push or a server that serves the past; and where
    nothing is published yet, `floor` is the past."""
    if ref.kind is not RefKind.BRANCH or settings.backward is Backward.ALLOW:
        return
    if tip.committed < published:
        raise Refused(
            "take the commit",
            f"it is {published - tip.committed:.0f} s older than the published one",
            hint="pin it, or set MINIVM_GITSYNC_BACKWARD=allow, where that is meant",
        )
    if tip.committed < floor:
        raise Refused(
            "take the commit",
            f"it is {(floor - tip.committed) / 86400:.1f} days older than what this node may start from "
            + ("(generation zero)" if settings.not_before is None else "(MINIVM_GITSYNC_NOT_BEFORE)"),
            hint="sign a new commit (git commit --allow-empty -S), or name an earlier MINIVM_GITSYNC_NOT_BEFORE",
        )
