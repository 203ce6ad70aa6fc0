"""This checkout's own builds: the tag that it would give an image, and when another image's commit was made."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from ground.commands import ran
from images import settings
from images.cli.session import Session
from images.errors import ImagesError
from images.make.build import git_revision

COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(slots=True)
class Checkout:
    """A directory with minivm's source, and the settings that its builds have."""

    repository: Path
    assignments: tuple[str, ...] = ()
    _tags: dict[tuple[str, str, str], Mapping[str, str]] = field(default_factory=dict)

    def tags(self, release: str, variant: str, arch: str) -> Mapping[str, str]:
        """Return role -> tag of what `build.py build` would make now; nothing where it cannot build that."""
        choice = release, variant, arch
        if choice not in self._tags:
            # A variant built from source has one release, and no packages by that name.
            self._tags[choice] = self.composed(*choice, slurm=release) or self.composed(*choice)
        return self._tags[choice]

    def composed(self, release: str, variant: str, arch: str, slurm: str | None = None) -> dict[str, str]:
        try:
            wanted = replace(settings.read(assignments=self.assignments), variant=variant, arch=arch)
            session = Session.open(self.repository, wanted if slurm is None else replace(wanted, slurm=slurm))
            images = session.compose(session.definition.roles).images.values()
        except ImagesError:
            # A release or variant that this checkout does not have, or a lock that is not whole.
            return {}
        return {image.name: image.tag for image in images if image.is_role and image.tag.startswith(f"{release}.")}

    def committed(self, revisions: Iterable[str]) -> dict[str, int]:
        """Return the time of each commit that this checkout has."""
        listed = sorted({revision for revision in revisions if COMMIT.fullmatch(revision)})
        if not listed:
            return {}
        command = ["git", "-C", str(self.repository), "rev-list", "--no-walk", "--ignore-missing", "--timestamp"]
        try:
            done = ran([*command, *listed, "--"])
        except FileNotFoundError:
            return {}
        pairs = (line.split() for line in done.stdout.splitlines()) if done.returncode == 0 else ()
        return {revision: int(seconds) for seconds, revision in pairs}

    def age(self, revision: str) -> str:
        """Compare a build's commit with this checkout's: "older", or "other"."""
        head = git_revision(self.repository)
        times = self.committed([revision, head])
        return "older" if times.get(revision, 0) < times.get(head, 0) and revision in times else "other"
