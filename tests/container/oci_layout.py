"""An image as a directory, written by hand: whoever makes an image may write anything into it."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def entry(name: str, data: bytes = b"", **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(data), 0o755
    for field, value in fields.items():
        setattr(member, field, value)
    return member, data


def packed(entries: Iterable[tuple[tarfile.TarInfo, bytes]]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for member, data in entries:
            tar.addfile(member, io.BytesIO(data))
    return out.getvalue()


def write(place: Path, layers: Iterable[bytes], **config: Any) -> None:
    blobs = place / "blobs/sha256"
    blobs.mkdir(parents=True)

    def put(data: bytes, kind: str) -> dict[str, Any]:
        digest = hashlib.sha256(data).hexdigest()
        (blobs / digest).write_bytes(data)
        return {"mediaType": f"application/vnd.oci.image.{kind}", "digest": f"sha256:{digest}", "size": len(data)}

    layers = list(layers)
    about = {
        "architecture": "amd64",
        "os": "linux",
        "config": config,
        # A registry makes the oldest form of a manifest of it, for whoever asks for none by name.
        "history": [{"created_by": "a test"} for _ in layers],
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}" for layer in layers]},
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": put(json.dumps(about).encode(), "config.v1+json"),
        "layers": [put(gzip.compress(layer, 1), "layer.v1.tar+gzip") for layer in layers],
    }
    index = {"schemaVersion": 2, "manifests": [put(json.dumps(manifest).encode(), "manifest.v1+json")]}
    (place / "index.json").write_text(json.dumps(index))
    (place / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
