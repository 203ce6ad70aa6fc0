"""What a commit is, read from the local repository: the only importer of GitPython.

GitPython keeps `git cat-file` children and is unsuited to a long life; so it is imported and used only inside a cycle,
which is a process of seconds, and closed at the end. It reads the raw tree objects, in which a mode that git itself
would tidy up on output (a setuid bit) can still be seen.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import git
import git.exc

from gitsync.errors import Damaged, GitsyncError, Refused
from gitsync.repo import child
from gitsync.repo.listing import Entry, Tip
from ground.errors import printable


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Reader]:
    try:
        repository = git.Repo(path)
    except (git.exc.InvalidGitRepositoryError, git.exc.NoSuchPathError) as error:
        raise Damaged("open the repository", str(error) or type(error).__name__, file=path) from None
    try:
        repository.git.update_environment(**child.environment())
        yield Reader(repository)
    except (git.exc.BadObject, git.exc.ODBError, git.exc.GitCommandError) as error:
        raise Damaged("read the repository", " ".join(str(error).split())[:300], file=path) from None
    finally:
        repository.close()


class Reader:
    def __init__(self, repository: git.Repo) -> None:
        self._repository = repository

    def tip(self, name: str) -> Tip:
        """The commit behind a ref or hash."""
        try:
            found = self._repository.rev_parse(name)
        except (git.exc.BadName, ValueError):
            raise GitsyncError("find the commit", f"{name} is not in the repository") from None
        oid, tag = found.hexsha, None
        while isinstance(found, git.TagObject):
            # Nested tags: the signature checked is the outermost, and so is the name.
            tag = tag or found.tag
            found = found.object
        if not isinstance(found, git.Commit):
            raise Refused("use the ref", f"it points to a {found.type}, not to a commit")
        return Tip(
            oid=oid,
            commit=found.hexsha,
            tag=tag,
            author=printable(f"{found.author.name} <{found.author.email}>"),
            committed=float(found.committed_date),
            subject=printable(str(found.summary)[:200]),
        )

    def entries(self, commit: str, subdir: str) -> list[Entry]:
        """Every file of the commit under `subdir`, its path relative to it."""
        tree: git.Tree = self._repository.commit(commit).tree
        if subdir.strip("/"):
            try:
                found = tree / subdir.strip("/")
            except KeyError:
                raise Refused("use the commit", f"it has no directory {subdir!r}") from None
            if not isinstance(found, git.Tree):
                raise Refused("use the commit", f"{subdir!r} is no directory in it")
            tree = found
        sizes = self._sizes(tree.hexsha)
        return list(self._walk(tree, sizes))

    def entries_if_known(self, commit: str, subdir: str) -> list[Entry] | None:
        """The same of a commit that may be gone from here; None where it is."""
        try:
            return self.entries(commit, subdir)
        except (Refused, Damaged, ValueError):
            return None

    def _walk(self, tree: git.Tree, sizes: dict[str, int]) -> Iterator[Entry]:
        # The raw cache and not the objects: an object per file costs more than everything else here.
        todo: list[tuple[str, bytes]] = [("", tree.binsha)]
        while todo:
            base, binsha = todo.pop()
            for oid, mode, name in git.objects.fun.tree_entries_from_data(self._repository.odb.stream(binsha).read()):
                path = f"{base}{name}"
                if mode >> 12 == 0o04:
                    if "/" in name or name in {"", ".", ".."}:
                        raise Refused("use the commit", f"{path!r} is no name of a directory")
                    todo.append((f"{path}/", oid))
                else:
                    yield Entry(path, mode, oid.hex(), sizes.get(oid.hex(), 0))

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
