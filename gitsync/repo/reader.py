"""Commits and their files, read from the local repository: the adapter of GitPython.

GitPython keeps `git cat-file` children and costs more to import than a cycle without a new commit. So it is imported
where it is used: inside a cycle, which lives for seconds and closes it at its end. It reads raw tree objects, which
still show a mode (a setuid bit) that git's own commands would normalise.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gitsync.errors import Damaged, GitsyncError, RefusedCommit
from gitsync.repo import child
from gitsync.settings import Ref
from gitsync.state import Published
from ground.errors import printable

if TYPE_CHECKING:
    import git


@dataclass(frozen=True, slots=True)
class Tip:
    """The commit that a ref points to, directly or through an annotated tag."""

    oid: str
    commit: str
    tag: str | None
    author: str
    committed: float
    subject: str


@dataclass(frozen=True, slots=True)
class CommitFile:
    """One file of a commit. `mode` is raw, as the tree object has it."""

    path: str
    mode: int
    oid: str
    size: int

    @property
    def is_link(self) -> bool:
        return self.mode >> 12 == 0o12

    @property
    def is_executable(self) -> bool:
        return not self.is_link and bool(self.mode & 0o111)


def as_published(tip: Tip, ref: Ref, signer: str, entries: Sequence[CommitFile], policy: str, at: float) -> Published:
    """Build the state's record of a commit that has been published."""
    return Published(
        commit=tip.commit, at=at, oid=tip.oid, ref=str(ref), signer=signer, author=tip.author, subject=tip.subject,
        committed=tip.committed, files=len(entries), bytes=sum(entry.size for entry in entries), policy=policy,
    )  # fmt: skip


@contextlib.contextmanager
def open_repository(path: Path) -> Iterator[CommitReader]:
    """Open the repository for reading; raise Damaged when an object is missing or broken."""
    import git.exc

    try:
        repository = git.Repo(path)
    except (git.exc.InvalidGitRepositoryError, git.exc.NoSuchPathError) as error:
        raise Damaged("open the repository", str(error) or type(error).__name__, file=path) from None
    try:
        repository.git.update_environment(**child.make_environment())
        yield CommitReader(repository)
    except (git.exc.BadObject, git.exc.ODBError, git.exc.GitCommandError) as error:
        raise Damaged("read the repository", " ".join(str(error).split())[:300], file=path) from None
    finally:
        repository.close()


class CommitReader:
    """Commits and file lists of one open repository."""

    def __init__(self, repository: git.Repo) -> None:
        self._repository = repository

    def tip(self, name: str) -> Tip:
        """Resolve a ref or hash to its commit."""
        import git.exc

        try:
            target = self._repository.rev_parse(name)
        except (git.exc.BadName, ValueError):
            raise GitsyncError("find the commit", f"{name} is not in the repository") from None
        oid, tag = target.hexsha, None
        while isinstance(target, git.TagObject):
            # Nested tags: gitsync verifies the signature of the outermost tag, so keep its name.
            tag = tag or target.tag
            target = target.object
        if not isinstance(target, git.Commit):
            raise RefusedCommit("use the ref", f"it points to a {target.type}, not to a commit")
        return Tip(
            oid=oid,
            commit=target.hexsha,
            tag=tag,
            author=printable(f"{target.author.name} <{target.author.email}>"),
            committed=float(target.committed_date),
            subject=printable(str(target.summary)[:200]),
        )

    def entries(self, commit: str, subdir: str) -> list[CommitFile]:
        """List every file of the commit under `subdir`, with paths relative to it."""
        import git

        tree: git.Tree = self._repository.commit(commit).tree
        if subdir.strip("/"):
            try:
                below = tree / subdir.strip("/")
            except KeyError:
                raise RefusedCommit("use the commit", f"it has no directory {subdir!r}") from None
            if not isinstance(below, git.Tree):
                raise RefusedCommit("use the commit", f"{subdir!r} is not a directory in it")
            tree = below
        sizes = self._sizes(tree.hexsha)
        return list(self._walk(tree, sizes))

    def entries_if_known(self, commit: str, subdir: str) -> list[CommitFile] | None:
        """List the files of a commit that the repository may no longer hold; None when it does not."""
        try:
            return self.entries(commit, subdir)
        except (RefusedCommit, Damaged, ValueError):
            return None

    def _walk(self, tree: git.Tree, sizes: dict[str, int]) -> Iterator[CommitFile]:
        from git.objects.fun import tree_entries_from_data

        # Parse the raw tree data: an object per file would cost more than everything else here.
        todo: list[tuple[str, bytes]] = [("", tree.binsha)]
        while todo:
            base, binsha = todo.pop()
            for oid, mode, name in tree_entries_from_data(self._repository.odb.stream(binsha).read()):
                path = f"{base}{name}"
                if mode >> 12 == 0o04:
                    if "/" in name or name in {"", ".", ".."}:
                        raise RefusedCommit("use the commit", f"{path!r} is not a valid directory name")
                    todo.append((f"{path}/", oid))
                else:
                    yield CommitFile(path, mode, oid.hex(), sizes.get(oid.hex(), 0))

    def _sizes(self, tree: str) -> dict[str, int]:
        out: bytes = self._repository.git.ls_tree(
            "-r", "-l", "-z", tree, stdout_as_string=False, strip_newline_in_stdout=False
        )
        sizes = {}
        for line in out.split(b"\0"):
            if line:
                _, _, oid, size = line.partition(b"\t")[0].split()
                sizes[oid.decode()] = int(size) if size != b"-" else 0
        return sizes
