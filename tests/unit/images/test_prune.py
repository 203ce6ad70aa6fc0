"""Images that a prune removes: old tags of this variant made by this project, and never an image of another name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest

from images.cli.check import list_still_made, select_superseded
from images.cli.session import Session
from images.make.plan import PlannedImage
from images.settings import BuildSettings

ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class Named:
    repo: str
    tag: str


NOW = cast(
    "list[PlannedImage]",
    [
        Named("minivm/layer-os", "debian-000000000001"),
        Named("minivm/login", "24.11.5-debian-000000000002"),
        Named("minivm/login", "26.05.5-debian-000000000003"),
    ],
)


@pytest.mark.parametrize(
    ("name", "goes"),
    [
        ("minivm/login:24.11.5-debian-0123456789ab", True),
        ("minivm/login:24.05.1-debian-0123456789ab", True),
        ("minivm/layer-os:debian-0123456789ab", True),
        ("minivm/login:24.11.5-debian-000000000002", False),
        ("minivm/login:26.05.5-debian-000000000003", False),
        ("minivm/login:26.05.5-debian-000000000002", True),
        ("minivm/login:latest", False),
        ("minivm/login:keep-this", False),
        ("minivm/login:24.11.5-debian-arm64-0123456789ab", False),
        ("minivm/login:24.11.5-nvidia-0123456789ab", False),
        ("minivm/retired:24.11.5-debian-0123456789ab", False),
        ("registry.example/minivm/login:24.11.5-debian-0123456789ab", False),
    ],
)
def test_only_our_own_old_tags_go(name: str, goes: bool) -> None:
    assert select_superseded(NOW, [name], "debian") == ([name] if goes else [])


def test_roles_go_before_the_layers_under_them() -> None:
    old = ["minivm/layer-os:debian-0123456789ab", "minivm/login:24.11.5-debian-0123456789ab"]
    assert select_superseded(NOW, old, "debian") == old[::-1]


@pytest.mark.parametrize(
    "chosen", [{"cuda": "12.9"}, {"cuda": "package"}, {"slurm": "26.05"}, {"slurm": "26.05", "cuda": "12.9"}]
)
def test_what_was_built_with_another_slurm_or_cuda_stays(chosen: dict[str, str]) -> None:
    """A prune keeps images of another Slurm or CUDA.

    The worker for older drivers exists beside the default one, whichever of the two the user prunes by.
    """
    for mine, other in (({}, chosen), (chosen, {})):
        session = Session.open(ROOT, BuildSettings(**mine))
        image = Session.open(ROOT, BuildSettings(**other)).compose(["worker"]).role("worker")
        targets = session.select_targets(())
        flavour = session.place.choice.flavour
        assert select_superseded(list_still_made(session, targets), [f"{image.repo}:{image.tag}"], flavour) == []
