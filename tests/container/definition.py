"""A definition of the test's own: the real layers and templates, with one small role and what the test changes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from images.cli.session import Session
from images.make.plan import Composed
from images.make.progress import Plain
from images.settings import BuildSettings

ROOT = Path(__file__).resolve().parents[2]
ROLE = "standin"
# Two runs on one machine share an engine, and must not find each other's images.
PREFIX = f"minivm-test-{os.getpid()}"


def copy(target: Path, layer: str, needs: tuple[str, ...] = ()) -> Path:
    """images/ as it is, without a lock, and with one role that stands on `layer` and carries no code of ours."""
    images = target / "images"
    for name in ("layers", "templates", "rootfs", "src"):
        shutil.copytree(ROOT / "images" / name, images / name, symlinks=True)
    for name in ("versions.yaml", "slurm.yaml", "make/sbom.py"):
        (images / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / "images" / name, images / name)
    (images / "roles").mkdir()
    role = {"describe": "a role of a test", "layer": layer, "needs": list(needs), "code": False}
    (images / "roles" / f"{ROLE}.yaml").write_text(yaml.safe_dump(role))
    return target


def again(source: Path, target: Path) -> Path:
    """Copy the definition, unlocked, for a test to change."""
    shutil.copytree(source / "images", target / "images", symlinks=True, ignore=shutil.ignore_patterns("lock"))
    return target


@contextmanager
def edited(path: Path) -> Iterator[dict[str, Any]]:
    """Yield a YAML file as data, and write it back."""
    data = yaml.safe_load(path.read_text())
    yield data
    path.write_text(yaml.safe_dump(data))


def build(root: Path, settings: BuildSettings) -> tuple[Session, Composed]:
    """Lock and build the role."""
    session = Session.open(root, settings)
    session.relock([ROLE])
    return session, rebuild(session)


def rebuild(session: Session) -> Composed:
    composed, planned = session.plan([ROLE])
    session.build(composed, planned, Plain())
    return composed


def layers(session: Session, composed: Composed) -> Mapping[str, list[str]]:
    """Map the layers below the role to their digests, which show the content whatever the names.

    The role's SBOM says its name.
    """
    below = {key: image for key, image in composed.images.items() if not image.is_role}
    return {key: session.engine.inspect(image.reference)["RootFS"]["Layers"] for key, image in below.items()}


def present(session: Session) -> set[str]:
    """List the engine's images under the session's prefix, which is the test's own."""
    return {name for name in session.list_present() if name.startswith(f"{session.settings.prefix}/")}


def remove(session: Session) -> None:
    for reference in present(session):
        session.engine.remove(reference)
