"""Images that the clusters of this machine are pinned to: each starts its pods from these until its user changes them.

build/cluster/NAME/images.json holds the pins of one cluster. `build.py prune` keeps their images, also while no
container uses them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ground.files import write_json
from images import ImagesError

FILE = "images.json"


@dataclass(frozen=True, slots=True)
class EngineImage:
    """An image of the engine."""

    id: str
    # The version of Slurm in it, as in 24.11.5; "" where its labels do not say.
    slurm: str = ""

    @property
    def release(self) -> str:
        return release(self.slurm)


@dataclass(frozen=True, slots=True)
class Pins:
    # Reference, as the chart renders it -> the image that it meant when the user chose it.
    images: Mapping[str, EngineImage] = field(default_factory=dict)
    # The newest Slurm that a controller of this cluster was started with: its state has no way back.
    state: str = ""
    # The newest Slurm that an accounting pod of this cluster was started with: slurmdbd has converted its database.
    records: str = ""


def release(version: str) -> str:
    """24.11 of 24.11.5. Releases compare as text: both numbers have two digits."""
    return ".".join(version.split(".")[:2])


def read(directory: Path) -> Pins:
    """Read the pins of a cluster from its directory; none where the file is not there."""
    path = directory / FILE
    try:
        raw = json.loads(path.read_text())
        return Pins(
            {reference: EngineImage(**image) for reference, image in raw["images"].items()},
            str(raw["state"]),
            str(raw.get("records", "")),
        )
    except FileNotFoundError:
        return Pins()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"it is not a file that this version wrote: {error}"
        raise ImagesError(
            "read a cluster's images", reason, file=path, hint="`make down` and `make up` begin anew"
        ) from error


def write(directory: Path, pins: Pins) -> None:
    write_json(directory / FILE, asdict(pins), 0o600)


def map_pinned(clusters: Path) -> dict[str, str]:
    """Image id -> the name of a cluster under this directory that is pinned to it."""
    return {
        image.id: path.parent.name
        for path in sorted(clusters.glob(f"*/{FILE}"))
        for image in read(path.parent).images.values()
    }
