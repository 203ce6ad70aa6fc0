"""The image that each pod of a cluster on one machine starts from: the pinned one, until the user requests another.

A tag such as `latest` moves with each build, and a build of images must not change a cluster's Slurm. So `up` stores
the image of each reference (`images.pins`), and `choose` keeps it, with these exceptions: a new build of the same Slurm
replaces it, unless the user keeps it; the user requests another one (`Wish`); or workers and logins need the
controller's release (`ReleaseFit`). `check_releases` refuses what Slurm cannot run before any pod is touched.

Further down: the choice of image tags for a requested version of Slurm, and notes about builds of another checkout.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from cluster import ClusterError
from cluster.manifests import PodSpec
from cluster.report import VERSION_LABEL
from cluster.roles import CLIENTS, MORE_IMAGES, OPTIONAL, ROLES
from ground.commands import ran
from images import ImagesError, settings
from images.cli.session import Session
from images.make.build import git_revision
from images.pins import EngineImage, Pins, release

REVISION_LABEL = "org.opencontainers.image.revision"


@dataclass(frozen=True, slots=True)
class Wish:
    """The user's requests about images, in addition to their names."""

    # Take the current target of every reference, or of these roles' references, whichever Slurm that is.
    anew: bool = False
    roles: frozenset[str] = frozenset()
    # Also keep the pinned image when a new build of the same Slurm exists.
    keep: bool = False

    def renews(self, reference: str) -> bool:
        return self.anew or read_role(reference) in self.roles


@dataclass(frozen=True, slots=True)
class ReleaseFit:
    """The release of an image that the cluster is not pinned to, without a user's request.

    It is the state's for the controller, and the controller's for the others. `latest` may be of another release: for a
    role that `make images` does not build, or under another repository's name.
    """

    release: str
    references: frozenset[str]
    # Finds the newest image of a reference's role with that release.
    newest: Callable[[str], EngineImage | None]

    def wants_another(self, reference: str, now: EngineImage | None) -> bool:
        """Return whether the reference moves with each build, and its image is not of that release."""
        moves = reference in self.references and reference.endswith(":latest")
        return moves and bool(self.release) and (now is None or now.release not in ("", self.release))


NO_FIT = ReleaseFit("", frozenset(), lambda _: None)


@dataclass(frozen=True, slots=True)
class ImageChoice:
    images: Mapping[str, EngineImage] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def read_role(reference: str) -> str:
    """Return an image's role: "worker" of registry:5000/minivm/worker:latest."""
    return reference.partition("@")[0].rpartition("/")[2].partition(":")[0]


def find_image_of(role: str, images: Mapping[str, EngineImage]) -> EngineImage | None:
    return next((image for reference, image in images.items() if read_role(reference) == role), None)


def choose(
    references: Iterable[str],
    pins: Mapping[str, EngineImage],
    find_image: Callable[[str], EngineImage | None],
    wish: Wish,
    fit: ReleaseFit = NO_FIT,
) -> ImageChoice:
    """Choose an image for every reference. `find_image` finds an image on this machine by its reference or id."""
    images: dict[str, EngineImage] = {}
    notes: list[str] = []
    for reference in sorted(set(references)):
        images[reference], note = choose_one(reference, pins.get(reference), find_image, wish, fit)
        notes += [note] if note else []
    return ImageChoice(images, tuple(notes))


def choose_one(
    reference: str,
    pin: EngineImage | None,
    find_image: Callable[[str], EngineImage | None],
    wish: Wish,
    fit: ReleaseFit,
) -> tuple[EngineImage, str]:
    """Return the image, and the plan's note about it."""
    present = find_image(reference)  # the reference's image now
    if pin is None or wish.renews(reference):
        if read_role(reference) not in wish.roles and fit.wants_another(reference, present):
            return choose_fitting(reference, present, fit)
        if present is None:
            raise ClusterError(
                f"start from {reference}", "this machine does not have it", hint=explain_how_to_get(reference)
            )
        return present, ""
    pinned_image = find_image(pin.id)
    if present is None or present.id == pin.id:
        return (pinned_image or present or refuse_removed(reference, pin)), ""
    is_same_release = bool(pin.release) and present.release == pin.release
    if not is_same_release:
        version = present.slurm or "of an unknown version"
        note = f"{reference} has Slurm {version} now, the cluster keeps its {pin.slurm}"
        if present.slurm:
            note += f"; `--slurm-version {present.release}` changes it"
        return pinned_image or refuse_removed(reference, pin), note
    if pinned_image is None:
        return present, f"{reference}: the image of this cluster was removed, its new build takes its place"
    if wish.keep:
        return pinned_image, f"{reference} was built anew, the cluster keeps the build that it has"
    return present, f"{reference} was built anew; `--keep-images` keeps the build that the cluster has"


def choose_fitting(reference: str, present: EngineImage | None, fit: ReleaseFit) -> tuple[EngineImage, str]:
    """Return the newest image of the cluster's release, and the plan's note; refuse where there is none."""
    problem = f"it has Slurm {present.slurm}" if present else "this machine does not have it"
    if (newest := fit.newest(reference)) is not None:
        return newest, f"{reference}: {problem}, the cluster takes its newest build of {fit.release}"
    raise ClusterError(
        f"start from {reference}",
        f"{problem}, the cluster has Slurm {fit.release}, and there is no image of that; no pod was touched",
        hint=f"{how_to_build(reference, fit.release)} builds it",
    )


def refuse_removed(reference: str, pin: EngineImage) -> EngineImage:
    """Refuse to start from an image that was removed."""
    what = f"Slurm {pin.slurm}, {short(pin.id)}" if pin.slurm else short(pin.id)
    raise ClusterError(f"start from {reference}", f"the image of this cluster ({what}) was removed from this machine",
                       hint=f"{how_to_build(reference, pin.release)}, then `make up`, takes a new build")  # fmt: skip


def how_to_build(reference: str, slurm: str = "") -> str:
    """Return the command that builds the reference's role, of the release and the variant that its tag names."""
    role, tag = read_role(reference), TAG.fullmatch(reference.rpartition(":")[2])
    slurm_release = slurm or (release(tag["slurm"]) if tag else "")
    if tag is None and role not in MORE_IMAGES:
        return f"`make images SLURM={slurm_release}`" if slurm_release else "`make images`"
    options = [f"--slurm {slurm_release}" if slurm_release else ""]
    if tag:
        options += [f"--variant {tag['variant']}" if tag["variant"] != settings.BuildSettings().variant else "",
                    f"--arch {tag['arch']}" if tag["arch"] else ""]  # fmt: skip
    return f"`{' '.join(['build.py', *filter(None, options), 'build', role])}`"


def explain_how_to_get(reference: str) -> str:
    """Return the hint for a reference that this machine does not have: a tag other than `latest` cannot be ordered."""
    if reference.endswith(":latest"):
        return how_to_build(reference)
    command = f"`docker images {reference.partition('@')[0].rpartition(':')[0]}` lists the tags that are here"
    if TAG.fullmatch(reference.rpartition(":")[2]) is None:
        return command
    return f"{command}; {how_to_build(reference)} makes this checkout's"


def short(image_id: str) -> str:
    return image_id.removeprefix("sha256:")[:12]


def check_releases(pods: Iterable[PodSpec], images: Mapping[str, EngineImage], pinned: Pins) -> None:
    """Refuse images that cannot work before any pod is touched. `pods` name their images by reference."""
    everything = [(pod, images[pod.image]) for pod in pods]
    controller = max((image.release for pod, image in everything if pod.role == "controller"), default="")
    if not controller:
        return
    state = release(pinned.state)
    if controller < state:
        raise ClusterError(
            f"start Slurm {controller} in this cluster",
            f"its state is of Slurm {state}, and Slurm has no way back; no pod was touched",
            hint=f"`--slurm-version {state}` stays with it; or `make down`, then `make up`, for a new cluster"
            " without the jobs and the accounting of this one",
        )
    records = release(pinned.records)
    for pod, image in everything:
        if pod.role == "accounting" and image.release and image.release < records:
            raise ClusterError(
                f"start {pod.name} with Slurm {image.release}",
                f"slurmdbd {records} has converted its database, and Slurm has no way back; no pod was touched",
                hint=f"`--slurm-version {records}` goes on with it",
            )
        if pod.role == "accounting" and image.release and image.release < controller:
            raise ClusterError(
                f"start {pod.name} with Slurm {image.release}",
                f"its slurmdbd does not understand the controller's newer Slurm {controller}; no pod was touched",
                hint=f"`make images SLURM={controller}`, then `--slurm-version {controller}`, upgrades it too",
            )
        if pod.role in CLIENTS and image.release > controller:
            raise ClusterError(
                f"start {pod.name} with Slurm {image.release}",
                f"the controller has Slurm {controller}, which does not understand a newer one; no pod was touched",
                hint=f"`--slurm-version {image.release}` upgrades all pods, the controller first",
            )


# Image tags of the roles, for a requested Slurm version and variant: <slurm version>-<variant>-<hash12>, and
# <slurm version>-<variant>-<architecture>-<hash12> for other architectures than amd64.
TAG = re.compile(r"(?P<slurm>[0-9.]+)-(?P<variant>[a-z0-9]+)(-(?P<arch>arm64))?-(?P<hash>[0-9a-f]{12})")


def parse_tags(texts: Iterable[str]) -> tuple[str, dict[str, str]]:
    """Parse TAG and ROLE=TAG into the tag of all roles and those of single roles; an empty tag counts as absent."""
    every, single = "", {}
    for text in texts:
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


@dataclass(frozen=True, slots=True)
class TaggedBuild:
    """A name of an image on this machine, and the keys that order the builds of its role."""

    reference: str
    # ROLE:latest is the same image.
    latest: bool = False
    revision: str = ""
    # When the engine last tagged the image; a new name for an older image counts too.
    tagged: str = ""


class CheckoutBuilds(Protocol):
    """A checkout of minivm that builds images (`Checkout`)."""

    def tags(self, release: str, variant: str, arch: str) -> Mapping[str, str]: ...

    def committed(self, revisions: Iterable[str]) -> Mapping[str, int]: ...


def choose_newest(
    images: Iterable[TaggedBuild],
    *,
    repository: str,
    slurm: str,
    variant: str,
    arch: str = "amd64",
    builder: CheckoutBuilds | None = None,
) -> dict[str, str]:
    """Return role -> tag of the images on this machine that have this Slurm and variant; ClusterError without one."""
    best = choose_newest_of(images, repository=repository, slurm=slurm, variant=variant, arch=arch, builder=builder)
    missing = [role for role in ROLES if role not in best and role not in OPTIONAL]
    if missing:
        wish = " ".join(filter(None, [f"Slurm {slurm}" if slurm else "", f"variant {variant}" if variant else ""]))
        raise ClusterError(f"start images of {wish}", f"none here for {', '.join(missing)}",
                           hint=f"`{make_command(slurm, variant)}` builds them")  # fmt: skip
    return best


def choose_newest_of(
    images: Iterable[TaggedBuild],
    *,
    repository: str,
    slurm: str,
    variant: str,
    arch: str = "amd64",
    builder: CheckoutBuilds | None = None,
) -> dict[str, str]:
    """Return role -> tag like `newest`, for the roles that have an image of this Slurm version and variant.

    The build that this checkout would make comes first, then ROLE:latest, then the newest commit's.
    """
    builds_of: dict[str, list[tuple[TaggedBuild, str, bool]]] = {}
    for build in images:
        name, _, tag = build.reference.rpartition(":")
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
        tags = builder.tags(release(parts["slurm"]), parts["variant"], arch) if builder else {}
        own = tags.get(role) == tag
        builds_of.setdefault(role, []).append((build, tag, own))
    revisions = [build.revision for builds in builds_of.values() for build, _, _ in builds]
    times = builder.committed(revisions) if builder else {}

    def order(item: tuple[TaggedBuild, str, bool]) -> tuple[bool, bool, int, str, str]:
        build, tag, own = item
        return own, build.latest, times.get(build.revision, 0), build.tagged, tag

    return {role: max(builds, key=order)[1] for role, builds in builds_of.items()}


def make_command(slurm: str, variant: str) -> str:
    """Return the command that builds images of a Slurm version (a build takes the release) and a variant."""
    release = ".".join(slurm.split(".")[:2])
    more = [f"SLURM={release}" if release else "", f"MINIVM_BUILD_VARIANT={variant}" if variant else ""]
    return " ".join(["make images", *filter(None, more)])


def find_newest_here(
    client: Any, repository: str, *, slurm: str = "", variant: str = "", builder: CheckoutBuilds | None = None
) -> dict[str, str]:
    """Return role -> tag of the images on this machine."""
    listed, arch = list_images_here(client, repository), client.api.version()["Arch"]
    return choose_newest(listed, repository=repository, slurm=slurm, variant=variant, arch=arch, builder=builder)


def find_newest_beside(
    client: Any, reference: str, *, slurm: str, variant: str = "", builder: CheckoutBuilds | None = None
) -> str:
    """Return the newest image of the reference's role, as the engine names it; "" without one."""
    repository, _, role = reference.rpartition(":")[0].rpartition("/")
    listed, arch = list_images_here(client, repository), client.api.version()["Arch"]
    tag_of = choose_newest_of(listed, repository=repository, slurm=slurm, variant=variant, arch=arch, builder=builder)
    return f"{repository}/{role}:{tag_of[role]}" if role in tag_of else ""


def list_images_here(client: Any, repository: str) -> list[TaggedBuild]:
    """List the references of this machine's images."""
    return [
        TaggedBuild(
            reference,
            f"{reference.rpartition(':')[0]}:latest" in item["RepoTags"],
            (item.get("Labels") or {}).get(REVISION_LABEL, ""),
            str(client.api.inspect_image(reference)["Metadata"]["LastTagTime"]),
        )
        for item in client.api.images(name=f"{repository}/*")
        for reference in item["RepoTags"] or []
    ]


# Notes of the plan about builds of another checkout.


@dataclass(frozen=True, slots=True)
class ForeignBuild:
    """An image of the plan that this checkout would build differently."""

    role: str
    age: str  # older, other
    revision: str
    release: str


def foreign_notes(foreign: Iterable[ForeignBuild]) -> list[str]:
    """Return one line for each build of minivm, with the roles that have it."""
    lines = []
    grouped: dict[tuple[str, str, str], set[str]] = {}
    for image in foreign:
        grouped.setdefault((image.age, image.revision, image.release), set()).add(image.role)
    for (age, revision, slurm), roles in sorted(grouped.items()):
        what = "an older build" if age == "older" else "another build"
        commit = f" (commit {revision[:8]})" if revision else ""
        more = sorted(roles & set(MORE_IMAGES))
        command = f"make images SLURM={slurm}"
        if more:
            command = f"build.py --slurm {slurm} build {' '.join(sorted(roles))}"
        lines.append(
            f"{', '.join(sorted(roles))}: {what} of minivm than this checkout's{commit}; `{command}` makes this one's"
        )
    return lines


COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(slots=True)
class Checkout:
    """A directory with minivm's source, and the settings that its builds have."""

    repository: Path
    assignments: tuple[str, ...] = ()
    _tags: dict[tuple[str, str, str], Mapping[str, str]] = field(default_factory=dict)

    def tags(self, release: str, variant: str, arch: str) -> Mapping[str, str]:
        """Return role -> tag of the images that `build.py build` would make now; none where it cannot build them."""
        choice = release, variant, arch
        if choice not in self._tags:
            # A variant built from source has one release, and no packages of that name.
            self._tags[choice] = self.composed(*choice, slurm=release) or self.composed(*choice)
        return self._tags[choice]

    def composed(self, release: str, variant: str, arch: str, slurm: str | None = None) -> dict[str, str]:
        try:
            chosen_settings = replace(settings.read(assignments=self.assignments), variant=variant, arch=arch)
            session = Session.open(
                self.repository, chosen_settings if slurm is None else replace(chosen_settings, slurm=slurm)
            )
            images = session.compose(session.definition.roles).images.values()
        except ImagesError:
            # A release or variant that this checkout does not have, or a lock that is not whole.
            return {}
        return {image.name: image.tag for image in images if image.is_role and image.tag.startswith(f"{release}.")}

    def committed(self, revisions: Iterable[str]) -> dict[str, int]:
        """Return the commit times of revisions in this checkout."""
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
        """Return "older" if a build's commit is older than this checkout's, else "other"."""
        head = git_revision(self.repository)
        times = self.committed([revision, head])
        return "older" if times.get(revision, 0) < times.get(head, 0) and revision in times else "other"


def release_fit(
    client: Any,
    references: Iterable[str],
    release: str,
    labels: Mapping[str, str],
    find_image: Callable[[str], EngineImage | None],
    checkout: Checkout | None,
) -> ReleaseFit:
    """Return the rule that keeps these references at a release, regardless of `latest`.

    `labels` are those of an image that has the release: its variant counts too.
    """
    tag = TAG.fullmatch(labels.get(VERSION_LABEL, ""))
    variant = tag["variant"] if tag else ""

    def newest_image(reference: str) -> EngineImage | None:
        newest = find_newest_beside(client, reference, slurm=release, variant=variant, builder=checkout)
        return find_image(newest) if newest else None

    return ReleaseFit(release, frozenset(references), newest_image)


def foreign_builds(
    images: Mapping[str, EngineImage], labels_of: Callable[[str], Mapping[str, str]], checkout: Checkout
) -> list[ForeignBuild]:
    """Return those of the images that this checkout would build differently. Keys are their references."""
    foreign = []
    for reference, image in sorted(images.items()):
        labels, role = labels_of(image.id), read_role(reference)
        tag = TAG.fullmatch(labels.get(VERSION_LABEL, ""))
        if tag is None:
            continue
        own = checkout.tags(image.release, tag["variant"], tag["arch"] or "amd64").get(role)
        if own not in (None, tag[0]):
            revision = labels.get(REVISION_LABEL, "")
            foreign.append(ForeignBuild(role, checkout.age(revision), revision, image.release))
    return foreign
