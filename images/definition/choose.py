"""Which variant with which Slurm a build is of: what was wished, against what the definition has. Pure."""

from __future__ import annotations

from images.definition.spec import Choice, Definition, SlurmSource
from images.errors import ImagesError


def choice(definition: Definition, name: str, wish: str = "", tarball: str = "") -> Choice:
    """Choose a variant's Slurm: `package`, `source`, a release, or the variant's default.

    `tarball` is the version of a site's own tarball.
    """
    variant = definition.versions.variants[name]
    if wish == SlurmSource.SOURCE.value or (not wish and variant.slurm is SlurmSource.SOURCE):
        pin = definition.versions.pins.get("slurm")
        version = tarball or (pin.version if pin else "")
        return Choice(variant.name, SlurmSource.SOURCE, variant.cuda, nearest_release(definition, version))
    packaged = [*variant.releases]
    if wish in ("", SlurmSource.PACKAGE.value):
        return Choice(variant.name, SlurmSource.PACKAGE, variant.cuda, packaged[0] if packaged else "")
    if wish not in packaged:
        raise ImagesError("use the setting", f"variant {variant.name!r} has no packages of Slurm {wish}", field="slurm",
                          hint=f"{', '.join(packaged) or 'none'}; or source, with a tarball")  # fmt: skip
    return Choice(variant.name, SlurmSource.PACKAGE, variant.cuda, wish)


def nearest_release(definition: Definition, version: str) -> str:
    """Return the release whose facts apply to a tarball: its own, or the newest known one before it."""
    release = ".".join(version.split(".")[:2])
    older = [name for name in definition.slurm if name <= release]
    if definition.slurm and not older:
        raise ImagesError("use the tarball", f"Slurm {version or 'of no version'} is older than all that is known",
                          file="images/slurm.yaml", hint=f"from {min(definition.slurm)} on")  # fmt: skip
    return max(older, default="")
