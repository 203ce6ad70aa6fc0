"""The two image stores of an engine, and what they mean for image ids.

An engine with a graph driver identifies an image by the digest of its configuration. One with containerd's image store
uses the digest of its manifest, which also names the compressed layers and so differs from machine to machine. The
project's id of an image is the configuration's digest on both (docs/decisions/image-id-from-configuration.md).

The module also lists the engine's images over its socket without docker's library, whose import takes half of a no-op
build. `build.py` asks here first. The answer is None, or "" for the architecture, when the engine is remote, does not
answer, or answers in another form: then the caller uses docker's library (`images.engine.docker`), which explains the
problem.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import posixpath
import socket
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Protocol

from images import ImagesError
from images.host import HostError, choose_engine


class Chunks(io.RawIOBase):
    """A readable file over an iterator of byte strings, which is what an HTTP client returns."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces: Iterator[bytes] = iter(pieces)
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._rest = memoryview(piece)
        count = min(len(buffer), len(self._rest))
        buffer[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count


# The configuration of an image. It is made here and not by the builder, without dates and host names, so that an image
# has the same id on every machine.

INHERITED = ("Env", "ExposedPorts", "WorkingDir", "User", "Volumes", "StopSignal", "Shell", "Entrypoint", "Cmd")


@dataclass(frozen=True, slots=True)
class Config:
    """The bytes of a configuration, whose digest is the image's id, and its layers."""

    data: bytes
    diff_ids: tuple[str, ...]

    @property
    def id(self) -> str:
        return f"sha256:{hashlib.sha256(self.data).hexdigest()}"


@dataclass(frozen=True, slots=True)
class Additions:
    """Additions of one image to the configuration of the one below."""

    env: Mapping[str, str]
    ports: Sequence[int] = ()
    entrypoint: Sequence[str] = ()
    stop_signal: str = ""
    user: str = ""
    labels: Mapping[str, str] | None = None
    created_by: str = ""


def make_config(
    parent: Mapping[str, Any] | None, parent_layers: int, diff_ids: Sequence[str], add: Additions, *, arch: str,
    epoch: int,
) -> Config:  # fmt: skip
    """Build a configuration. `parent` is that of the image below; its labels describe that image, so drop them."""
    inherited = {key: value for key, value in (parent or {}).items() if key in INHERITED and value}
    env = dict(item.split("=", 1) for item in inherited.pop("Env", []))
    env.setdefault("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
    env.update(add.env)
    inherited["Env"] = [f"{name}={value}" for name, value in env.items()]
    if add.ports:
        inherited["ExposedPorts"] = {**inherited.get("ExposedPorts", {}), **{f"{port}/tcp": {} for port in add.ports}}
    if add.entrypoint:
        inherited["Entrypoint"] = list(add.entrypoint)
        inherited.pop("Cmd", None)
    elif not inherited.get("Entrypoint") and not inherited.get("Cmd"):
        inherited["Cmd"] = ["/bin/bash"]
    if add.stop_signal:
        inherited["StopSignal"] = add.stop_signal
    if add.user:
        inherited["User"] = add.user
    inherited["Labels"] = dict(sorted((add.labels or {}).items()))
    created = datetime.fromtimestamp(epoch, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    history = [
        {"created": created, "created_by": add.created_by if index >= parent_layers else "the image below"}
        for index in range(len(diff_ids))
    ]
    whole = {
        "architecture": arch,
        "os": "linux",
        "created": created,
        "config": inherited,
        "rootfs": {"type": "layers", "diff_ids": list(diff_ids)},
        "history": history,
    }
    return Config(json.dumps(whole, sort_keys=True, separators=(",", ":")).encode(), tuple(diff_ids))


OCI = "application/vnd.oci.image"
MANIFEST = f"{OCI}.manifest.v1+json"
# A layer's first bytes -> how its media type ends.
COMPRESSIONS = {b"\x1f\x8b": "+gzip", b"\x28\xb5\x2f\xfd": "+zstd"}
LONGEST_MAGIC = 4


class StoreEngine(Protocol):
    """The engine's interface that a store needs."""

    def inspect(self, reference: str) -> Mapping[str, Any]: ...
    def has(self, reference: str) -> bool: ...
    def save(self, reference: str) -> Iterator[bytes]: ...
    def load(self, data: bytes) -> None: ...
    def discard(self, image_id: str) -> None: ...


class Store(Protocol):
    def identity(self, reference: str) -> str:
        """Return the digest of an image's configuration."""

    def take_over(self, built: str, config: Config) -> str:
        """Put the layers of a built image under a configuration of minivm's; return the engine's id of the result.

        The built image is consumed.
        """


def select_store(info: Mapping[str, Any], daemon: StoreEngine) -> Store:
    """Select the store by the engine's reply to `docker info`."""
    status = {str(pair[0]): str(pair[1]) for pair in info.get("DriverStatus") or () if len(pair) == 2}
    if status.get("driver-type", "").startswith("io.containerd."):
        return ContentStore(daemon)
    return GraphDriver(daemon)


@dataclass(slots=True)
class GraphDriver:
    """Store with unpacked layers, found by their chain of digests: stacking them needs no layer's bytes."""

    daemon: StoreEngine

    def identity(self, reference: str) -> str:
        return str(self.daemon.inspect(reference)["Id"])

    def take_over(self, built: str, config: Config) -> str:
        # The names of layers that are not in the stream: the engine only counts them.
        layers = [f"{diff_id.removeprefix('sha256:')}/layer.tar" for diff_id in config.diff_ids]
        name = f"{config.id.removeprefix('sha256:')}.json"
        self.daemon.load(pack_stream({name: config.data, "manifest.json": json_bytes([
            {"Config": name, "RepoTags": None, "Layers": layers}])}))  # fmt: skip
        return require_image(self.daemon, config.id)


@dataclass(slots=True)
class ContentStore:
    """Store with packed layers as blobs that any manifest may name: minivm's names those of the built image."""

    daemon: StoreEngine
    known: dict[str, str] = field(default_factory=dict)  # manifest -> configuration; digests never change

    def identity(self, reference: str) -> str:
        manifest = str(self.daemon.inspect(reference)["Id"])
        if manifest not in self.known:
            self.known[manifest] = read(self.daemon.save(reference), reference).config
        return self.known[manifest]

    def take_over(self, built: str, config: Config) -> str:
        packed = read(self.daemon.save(built), built)
        manifest = json_bytes({
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": descriptor(f"{OCI}.config.v1+json", config.data),
            "layers": [blob.descriptor for blob in packed.layers],
        })  # fmt: skip
        whole = descriptor(MANIFEST, manifest)
        layout = pack_stream({
            blob_path(config.id): config.data,
            blob_path(whole["digest"]): manifest,
            "index.json": json_bytes({"schemaVersion": 2, "mediaType": f"{OCI}.index.v1+json", "manifests": [whole]}),
            "oci-layout": json_bytes({"imageLayoutVersion": "1.0.0"}),
        })  # fmt: skip
        # The first load keeps the blobs for this image too. The unpacked files stay those of the builder's image and go
        # with it: an image gets its own only where it finds none, so at the second load.
        self.daemon.load(layout)
        self.daemon.discard(built)
        self.daemon.load(layout)
        self.known[whole["digest"]] = config.id
        return require_image(self.daemon, whole["digest"])


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """A layer in the content store."""

    digest: str
    size: int
    magic: bytes

    @property
    def descriptor(self) -> dict[str, Any]:
        packing = next((end for magic, end in COMPRESSIONS.items() if self.magic.startswith(magic)), "")
        return {"mediaType": f"{OCI}.layer.v1.tar{packing}", "digest": self.digest, "size": self.size}


@dataclass(frozen=True, slots=True)
class Packed:
    """An image in the content store: its configuration's digest, and its layers from the base up."""

    config: str
    layers: tuple[PackedLayer, ...]


def read(pieces: Iterable[bytes], name: str) -> Packed:
    """Read an image's manifest from `docker save`, the only way to it. Blobs are skipped, not read."""
    blobs: dict[str, PackedLayer] = {}
    images: list[Mapping[str, Any]] = []
    try:
        with tarfile.open(fileobj=io.BufferedReader(Chunks(pieces)), mode="r|") as tar:
            for member in tar:
                content = tar.extractfile(member)
                if member.name == "manifest.json" and content is not None:
                    images = json.load(content)
                elif content is not None:
                    magic = content.read(LONGEST_MAGIC)
                    blobs[member.name] = PackedLayer(digest_of(member.name), member.size, magic)
        (image,) = images
        return Packed(digest_of(image["Config"]), tuple(blobs[path] for path in image["Layers"]))
    except (tarfile.TarError, EOFError, ValueError, KeyError) as error:
        raise ImagesError(f"read image {name}", f"the engine's stream is not one whole image: {error}") from error


def digest_of(path: str) -> str:
    return f"sha256:{posixpath.basename(path)}"


def blob_path(digest: str) -> str:
    return f"blobs/{digest.replace(':', '/')}"


def descriptor(media_type: str, data: bytes) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": f"sha256:{hashlib.sha256(data).hexdigest()}", "size": len(data)}


def json_bytes(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def pack_stream(files: Mapping[str, bytes]) -> bytes:
    """Build the stream that `docker load` takes."""
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return whole.getvalue()


def require_image(daemon: StoreEngine, reference: str) -> str:
    if not daemon.has(reference):
        raise ImagesError("name the image", f"the engine took {reference} and does not have it")
    return reference


DEADLINE = 600.0  # the same as docker's library: a busy engine is slow


@dataclass(frozen=True, slots=True)
class ListedImage:
    """One image that the engine has."""

    id: str
    size: int
    references: tuple[str, ...]


def list_images() -> list[ListedImage] | None:
    """Return the engine's images; None if only docker's library can ask."""
    return parse_images(get_json("/images/json"))


def read_architecture() -> str:
    """Return the engine's architecture; "" if only docker's library can ask."""
    version = get_json("/version")
    architecture = version.get("Arch") if isinstance(version, dict) else None
    return architecture if isinstance(architecture, str) else ""


def parse_images(answer: Any) -> list[ListedImage] | None:
    """Parse the engine's list of images; None if any part of it has another form."""
    if not isinstance(answer, list):
        return None
    images = []
    for item in answer:
        image = parse_image(item)
        if image is None:
            return None
        images.append(image)
    return images


def parse_image(item: Any) -> ListedImage | None:
    if not isinstance(item, dict):
        return None
    image_id, size, references = item.get("Id"), item.get("Size"), item.get("RepoTags") or []
    if not (isinstance(image_id, str) and isinstance(size, int) and isinstance(references, list)):
        return None
    return ListedImage(image_id, size, tuple(map(str, references)))


def get_json(path: str) -> Any:
    """Return the engine's answer to a GET; None if it is no JSON, or the engine has no local socket."""
    try:
        address, _ = choose_engine(os.environ)
        if not address.startswith("unix://"):
            return None
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(DEADLINE)
            connection.connect(address.removeprefix("unix://"))
            # HTTP/1.0: the engine closes the connection at the end of its answer.
            connection.sendall(f"GET {path} HTTP/1.0\r\nHost: engine\r\n\r\n".encode())
            answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
        head, _, body = answer.partition(b"\r\n\r\n")
        return json.loads(body) if head.split(b" ")[1:2] == [b"200"] else None
    except (HostError, OSError, ValueError, RecursionError):
        return None
