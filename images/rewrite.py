"""The long way to a configuration of ours, for an engine whose store takes no image without its layers' bytes."""

from __future__ import annotations

import json
import tarfile
import tempfile
from pathlib import Path
from typing import IO

from images.engine import Engine
from images.errors import ImagesError
from images.oci import Config


def reload(engine: Engine, raw: str, made: Config) -> None:
    """Save the built image, put our configuration in place of the builder's, load it."""
    with tempfile.TemporaryFile() as saved, tempfile.TemporaryFile() as changed:
        for piece in engine.save(raw):
            saved.write(piece)
        saved.seek(0)
        replace(saved, changed, made)
        changed.seek(0)
        engine.load(changed)
    if not engine.has(made.id):
        raise ImagesError("name the image", f"the engine took {made.id} and does not have it",
                          hint="an engine with containerd's image store is not served: use one with a graph driver "
                          "(`docker info`: Storage Driver)")  # fmt: skip


def replace(saved: IO[bytes], target: IO[bytes], made: Config) -> None:
    """A saved image's stream with another configuration; the layers as they are."""
    name = f"{made.id.removeprefix('sha256:')}.json"
    with tarfile.open(fileobj=saved) as source, tarfile.open(fileobj=target, mode="w") as tar:
        member = source.extractfile("manifest.json")
        assert member is not None
        manifest = json.load(member)
        old = manifest[0]["Config"]
        # An OCI index would lead a newer engine back to the old configuration.
        dropped = {"manifest.json", old, "index.json", "oci-layout", "repositories"}
        for info in source:
            if info.name not in dropped:
                tar.addfile(info, source.extractfile(info) if info.isfile() else None)
        manifest[0] |= {"Config": name, "RepoTags": None}
        for member_name, data in ((name, made.data), ("manifest.json", json.dumps(manifest).encode())):
            tar.addfile(sized(member_name, data), as_file(data))


def sized(name: str, data: bytes) -> tarfile.TarInfo:
    info = tarfile.TarInfo(Path(name).as_posix())
    info.size = len(data)
    return info


def as_file(data: bytes) -> IO[bytes]:
    import io

    return io.BytesIO(data)
