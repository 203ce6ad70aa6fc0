"""Release and capabilities of the tested images' Slurm (images/slurm.yaml), read from their own labels."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from images.definition.load import load
from images.definition.spec import SlurmRelease

ROOT = Path(__file__).resolve().parents[1]
# The word by which slurmd starts itself anew to start a script, as the library that spares it that looks for it.
(STARTS_SCRIPTS_BY,) = re.findall(r'#define MODE "(\w+)"', (ROOT / "images/src/runner/launch.c").read_text())


def labels(image: str) -> dict[str, str]:
    shown = subprocess.run(["docker", "image", "inspect", image], capture_output=True, text=True, check=True).stdout
    found: dict[str, str] = json.loads(shown)[0]["Config"]["Labels"]
    return found


def version_of(image: str) -> str:
    """Return the image's Slurm version, with which its tag begins."""
    return labels(image)["org.opencontainers.image.version"].partition("-")[0]


def release_of(image: str) -> SlurmRelease:
    return load(ROOT).slurm[version_of(image)[:5]]


def has_pmix(image: str) -> bool:
    """Tell whether the image has PMIx: a tarball may have it where the packages of its release lack it."""
    return "pmix" in labels(image)["io.minivm.capabilities"].split()


def built(prefix: str, role: str) -> str:
    """Build an image that is made only by name, with the Slurm of the other images here, and return its reference."""
    wish = os.environ.get("MINIVM_BUILD_SLURM") or release_of(f"{prefix}/worker:latest").name
    line = [sys.executable, "build.py", "--slurm", wish, "--set", f"prefix={prefix}", "build", role]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    versions = [version_of(f"{prefix}/{name}:latest") for name in (role, "worker")]
    assert versions[0] == versions[1], f"{versions}: one built as MINIVM_BUILD_SLURM says, the other not"
    return f"{prefix}/{role}:latest"
