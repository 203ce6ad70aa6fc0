"""Decisions for the engine's image stores, tested with recorded answers of real engines.

tests/recordings/docker has the part of `docker info` that names the store and, for engines with containerd's image
store, `docker save` and `docker inspect` of an image of two small layers.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from images import ImagesError
from images.engine.store import Config, ContentStore, GraphDriver, read, select_store

RECORDINGS = Path(__file__).resolve().parents[2] / "recordings/docker"
CONTENT_STORES = sorted(path.stem.removeprefix("save-") for path in RECORDINGS.glob("save-*-containerd.tar"))


def members(data: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return {member.name: content.read() for member in tar if (content := tar.extractfile(member))}


class Recorded:
    """Fake engine that returns recorded answers and accepts images."""

    def __init__(self, name: str) -> None:
        self.inspected: Mapping[str, Any] = json.loads((RECORDINGS / f"inspect-{name}.json").read_text())
        self.saved = (RECORDINGS / f"save-{name}.tar").read_bytes()
        self.calls: list[tuple[str, object]] = []
        self.images = {str(self.inspected["Id"])}

    def inspect(self, reference: str) -> Mapping[str, Any]:
        return {"Id": reference} if reference in self.images else self.inspected

    def has(self, reference: str) -> bool:
        return reference in self.images

    def save(self, reference: str) -> Iterator[bytes]:
        self.calls.append(("save", reference))
        yield from (self.saved[start : start + 1000] for start in range(0, len(self.saved), 1000))

    def load(self, data: bytes) -> None:
        self.calls.append(("load", data))
        (manifest,) = json.loads(members(data)["index.json"])["manifests"]
        self.images.add(manifest["digest"])

    def discard(self, image_id: str) -> None:
        self.calls.append(("discard", image_id))


def ours(engine: Recorded) -> Config:
    return Config(b'{"ours":true}', tuple(engine.inspected["RootFS"]["Layers"]))


@pytest.mark.parametrize("path", sorted(RECORDINGS.glob("info-*.json")), ids=lambda path: path.stem)
def test_an_engine_tells_how_it_keeps_images(path: Path) -> None:
    expected = ContentStore if path.stem.endswith("-containerd") else GraphDriver
    store = select_store(json.loads(path.read_text()), Recorded(CONTENT_STORES[0]))
    assert type(store) is expected


@pytest.mark.parametrize("name", CONTENT_STORES)
def test_an_image_is_its_configuration_whatever_the_engine_calls_it(name: str) -> None:
    engine = Recorded(name)
    store = ContentStore(engine)
    identity = store.identity("some:name")
    assert identity != engine.inspected["Id"]
    config = members(engine.saved)[f"blobs/sha256/{identity.removeprefix('sha256:')}"]
    assert hashlib.sha256(config).hexdigest() == identity.removeprefix("sha256:")
    assert json.loads(config)["rootfs"]["diff_ids"] == engine.inspected["RootFS"]["Layers"]
    assert store.identity("other:name") == identity
    assert engine.calls == [("save", "some:name")], "what a manifest names never changes: one look is enough"


@pytest.mark.parametrize("name", CONTENT_STORES)
def test_our_configuration_goes_over_the_very_blobs_that_the_builder_made(name: str) -> None:
    engine = Recorded(name)
    store = ContentStore(engine)
    config = ours(engine)
    made = store.take_over("built", config)
    (first, data), discarded, (second, again) = engine.calls[1:]
    # Run twice, with the builder's image removed in between: see ContentStore.adopt.
    assert (first, discarded, second) == ("load", ("discard", "built"), "load")
    assert data == again
    assert isinstance(data, bytes)
    loaded = members(data)
    manifest = json.loads(loaded[f"blobs/sha256/{made.removeprefix('sha256:')}"])
    assert loaded[f"blobs/sha256/{config.id.removeprefix('sha256:')}"] == config.data
    assert manifest["config"]["digest"] == config.id
    before = members(engine.saved)
    for layer, diff_id in zip(manifest["layers"], config.diff_ids, strict=True):
        blob = before[f"blobs/sha256/{layer['digest'].removeprefix('sha256:')}"]
        assert layer["size"] == len(blob)
        assert layer["mediaType"] == "application/vnd.oci.image.layer.v1.tar+gzip"
        assert diff_id == f"sha256:{hashlib.sha256(gzip.decompress(blob)).hexdigest()}"
    assert len(loaded) == 4, "no layer's bytes are sent"
    assert store.identity(made) == config.id


def test_an_engine_that_takes_an_image_and_does_not_have_it_is_told_of() -> None:
    engine = Recorded(CONTENT_STORES[0])
    engine.images = set()
    engine.load = lambda data: None  # type: ignore[method-assign]  # an engine that forgets
    with pytest.raises(ImagesError, match="does not have it"):
        ContentStore(engine).take_over("built", ours(engine))


@pytest.mark.parametrize("cut", [0, 700, 5000])
def test_a_broken_stream_is_an_error_that_names_the_image(cut: int) -> None:
    data = (RECORDINGS / f"save-{CONTENT_STORES[0]}.tar").read_bytes()[:cut]
    with pytest.raises(ImagesError, match="read image some:name"):
        read([data], "some:name")


def test_two_images_in_one_stream_are_not_one() -> None:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        data = json.dumps([{"Config": "a", "Layers": []}, {"Config": "b", "Layers": []}]).encode()
        info = tarfile.TarInfo("manifest.json")
        info.size = len(data)
        tar.addfile(info, io.BytesIO(data))
    with pytest.raises(ImagesError, match="not one whole image"):
        read([stream.getvalue()], "some:name")
