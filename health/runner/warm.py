"""State that a run finds ready: a fork of the resident runner inherits it, a run started alone has none."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from gitsync.lease import Lease
from health.places import Places
from health.policy import IN_A_TREE, RunnerPolicy, read_runner_policy
from health.runner.image_scripts import ImageScripts
from health.runner.kept import FileCache


@dataclass(frozen=True, slots=True)
class Warm:
    places: Places = field(default_factory=Places.from_environment)
    kept: FileCache | None = None
    image_scripts: ImageScripts | None = None
    # The commit, resolved and held for this run.
    held: Lease | None = None
    # A job has ended since the last check of the node.
    after_a_job: bool = False
    # The runner checks the node after this epilog, once for all ended jobs, so the epilog need not wait.
    looked_at_later: bool = False


def policy_of(tree: Path, places: Places, kept: FileCache | None) -> RunnerPolicy:
    files = [places.policy, tree / IN_A_TREE]
    return (kept or FileCache()).get(("policy", tree), files, lambda: read_runner_policy(tree, places.policy))
