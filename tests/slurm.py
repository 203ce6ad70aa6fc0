"""What the Slurm of the images under test is and can: images/slurm.yaml, by their own labels."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from images.definition.load import load
from images.definition.spec import Release

ROOT = Path(__file__).resolve().parents[1]


def labels(image: str) -> dict[str, str]:
    shown = subprocess.run(["docker", "image", "inspect", image], capture_output=True, text=True, check=True).stdout
    found: dict[str, str] = json.loads(shown)[0]["Config"]["Labels"]
    return found


def release_of(image: str) -> Release:
    return load(ROOT).slurm[labels(image)["org.opencontainers.image.version"][:5]]


def has_pmix(image: str) -> bool:
    """Of the image and not of its release: a tarball has what the release's packages may lack."""
    return "pmix" in labels(image)["io.minivm.capabilities"].split()
