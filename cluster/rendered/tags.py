"""Image tags of the roles, for a requested Slurm version and variant.

Tags are <slurm version>-<variant>-<hash12>, and <slurm version>-<variant>-<architecture>-<hash12> for other
architectures than amd64.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from cluster.errors import ClusterError
from cluster.roles import MORE_IMAGES, ROLES

TAG = re.compile(r"(?P<slurm>[0-9.]+)-(?P<variant>[a-z0-9]+)(-(?P<arch>arm64))?-(?P<hash>[0-9a-f]{12})")


def chosen(given: Iterable[str]) -> tuple[str, dict[str, str]]:
    """Parse TAG and ROLE=TAG into the tag of all roles and those of single roles; an empty tag counts as absent."""
    every, single = "", {}
    for text in given:
        role, equals, tag = text.rpartition("=")
        if equals and role not in (*ROLES, *MORE_IMAGES):
            raise ClusterError(f"take the tag {text!r}", f"the roles are {', '.join((*ROLES, *MORE_IMAGES))}")
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}", tag):
            raise ClusterError(f"take the tag {text!r}", "it is not a valid tag")
        if equals:
            single[role] = tag
        else:
            every = tag
    return every, single


def tagged(reference: str, beside: Iterable[str], metadata: Mapping[str, Any]) -> str:
    """Return when the image got its name, for newest().

    ROLE:latest counts as the newest build: the engine's time belongs to the image, and moves when an older image gets
    another name.
    """
    latest = f"{reference.rpartition(':')[0]}:latest"
    return "~" if latest in beside else str(metadata["LastTagTime"])


def newest(
    images: Iterable[tuple[str, str]], *, repository: str, slurm: str, variant: str, arch: str = "amd64"
) -> dict[str, str]:
    """Return role -> tag from the engine's (reference, tag time) pairs, for the engine's own architecture."""
    best = newest_of(images, repository=repository, slurm=slurm, variant=variant, arch=arch)
    missing = [role for role in ROLES if role not in best]
    if missing:
        wish = " ".join(filter(None, [f"Slurm {slurm}" if slurm else "", f"variant {variant}" if variant else ""]))
        raise ClusterError(f"start images of {wish}", f"none here for {', '.join(missing)}",
                           hint=f"`{how_to_build(slurm, variant)}` builds them")  # fmt: skip
    return best


def newest_of(
    images: Iterable[tuple[str, str]], *, repository: str, slurm: str, variant: str, arch: str = "amd64"
) -> dict[str, str]:
    """Return role -> tag like `newest`, for the roles that have an image of this Slurm version and variant."""
    best: dict[str, tuple[str, str]] = {}
    for reference, tag_time in images:
        name, _, tag = reference.rpartition(":")
        role = name.removeprefix(f"{repository}/")
        parts = TAG.fullmatch(tag)
        if name == role or role not in (*ROLES, *MORE_IMAGES) or not parts:
            continue
        if arch != (parts["arch"] or "amd64"):
            continue
        if slurm and slurm != parts["slurm"] and not parts["slurm"].startswith(f"{slurm}."):
            continue
        if variant not in ("", parts["variant"]):
            continue
        best[role] = max(best.get(role, ("", "")), (tag_time, tag))
    return {role: tag for role, (_, tag) in best.items()}


def how_to_build(slurm: str, variant: str) -> str:
    """Return the command that builds images of a Slurm version (a build takes the release) and a variant."""
    release = ".".join(slurm.split(".")[:2])
    more = [f"SLURM={release}" if release else "", f"MINIVM_BUILD_VARIANT={variant}" if variant else ""]
    return " ".join(["make images", *filter(None, more)])


def newest_here(client: Any, repository: str, *, slurm: str = "", variant: str = "") -> dict[str, str]:
    """Return role -> tag of the images on this machine."""
    listed = listed_here(client, repository)
    return newest(listed, repository=repository, slurm=slurm, variant=variant, arch=client.api.version()["Arch"])


def newest_beside(client: Any, reference: str, *, slurm: str, variant: str = "") -> str:
    """Return the newest image of the reference's role, as the engine names it; "" without one."""
    repository, _, role = reference.rpartition(":")[0].rpartition("/")
    listed, arch = listed_here(client, repository), client.api.version()["Arch"]
    tag = newest_of(listed, repository=repository, slurm=slurm, variant=variant, arch=arch).get(role)
    return f"{repository}/{role}:{tag}" if tag else ""


def listed_here(client: Any, repository: str) -> list[tuple[str, str]]:
    """List references with their tag times: all images have the lock's creation time, so these distinguish them."""
    return [
        (reference, tagged(reference, item["RepoTags"], client.api.inspect_image(reference)["Metadata"]))
        for item in client.api.images(name=f"{repository}/*")
        for reference in item["RepoTags"] or []
    ]
