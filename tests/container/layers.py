"""Every file of every layer of an image, those hidden by a later layer among them, in one pass over `docker save`."""

from __future__ import annotations

import json
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

# Manifests and configurations are smaller; an empty layer is, too, and holds nothing to look at.
SMALLEST_LAYER = 4096


@dataclass(frozen=True, slots=True)
class Found:
    layer: str
    member: tarfile.TarInfo
    content: Callable[[], bytes]  # only until the next one is taken

    @property
    def path(self) -> str:
        return "/" + self.member.name.removeprefix("./")


def walk(*images: str) -> Iterator[Found]:
    """Walk the layers of several images, each shared one once. Read each entry before taking the next."""
    with subprocess.Popen(["docker", "save", *images], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        with tarfile.open(fileobj=process.stdout, mode="r|") as outer:
            for blob in outer:
                stream = outer.extractfile(blob) if blob.isreg() else None
                if stream is None or blob.size < SMALLEST_LAYER or blob.name.endswith(".json"):
                    continue
                try:
                    layer = tarfile.open(fileobj=stream, mode="r|*")  # noqa: SIM115 # a manifest raises here
                except tarfile.ReadError:
                    continue
                with layer:
                    for member in layer:
                        yield Found(blob.name, member, partial(content, layer, member))
        # Nothing reads the padding after the last entry otherwise, and docker would die of a closed pipe.
        process.stdout.read()
    assert process.returncode == 0


def content(layer: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    stream = layer.extractfile(member)
    return stream.read() if stream else b""


def size(image: str) -> int:
    """Bytes uncompressed, as the engine counts them."""
    done = subprocess.run(["docker", "image", "inspect", image], capture_output=True, check=True)
    return int(json.loads(done.stdout)[0]["Size"])
