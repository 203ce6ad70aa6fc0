"""The chart as an OCI artifact: the package that `helm install oci://...` takes, and its push.

The package is made of the files' content alone, so the same commit gives the same digest.
"""

from __future__ import annotations

import fnmatch
import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

from images.engine.store import MANIFEST, descriptor
from images.errors import ImagesError
from images.ship import provenance, referrers
from images.ship.registry import Registry, RegistryError

NAME = "minivm"  # of the chart: helm looks for a directory of this name in the package
CONFIG = "application/vnd.cncf.helm.config.v1+json"
CONTENT = "application/vnd.cncf.helm.chart.content.v1.tar+gzip"
IGNORE = ".helmignore"


def files(chart: Path, tracked: Iterable[str]) -> dict[str, bytes]:
    """Return those of the tracked files that its .helmignore does not name: folders as `NAME/`, files by pattern."""
    patterns = [line.strip() for line in (chart / IGNORE).read_text().splitlines() if line.strip()]
    folders = {pattern.rstrip("/") for pattern in patterns if pattern.endswith("/")}
    found = {}
    for name in tracked:
        path = PurePosixPath(name)
        if folders.isdisjoint(path.parts[:-1]) and not any(fnmatch.fnmatch(path.name, p) for p in [IGNORE, *patterns]):
            found[name] = (chart / name).read_bytes()
    return found


def package(content: Mapping[str, bytes]) -> bytes:
    """Pack the files as helm does, with neither times nor owners."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, data in sorted(content.items()):
            entry = tarfile.TarInfo(f"{NAME}/{name}")
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return gzip.compress(packed.getvalue(), mtime=0)


def push(registry: Registry, version: str, metadata: Mapping[str, object], content: Mapping[str, bytes]) -> str:
    """Push the chart under its version and return its digest; a version that holds another chart is not replaced."""
    layer = referrers.put_blob(registry, CONTENT, package(content))
    data = json.dumps(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": referrers.put_blob(registry, CONFIG, json.dumps(metadata, sort_keys=True).encode()),
            "layers": [layer],
            "annotations": {"org.opencontainers.image.title": NAME, "org.opencontainers.image.version": version},
        },
        sort_keys=True,
    ).encode()
    digest = str(descriptor(MANIFEST, data)["digest"])
    there = pushed(registry, version)
    if there not in ("", digest):
        raise ImagesError(registry.what("push the chart to"), f"{version} is there and holds another chart: {there}",
                          hint="release a new version")  # fmt: skip
    if not there:
        referrers.put_manifest(registry, version, MANIFEST, data)
        registry.same(digest, pushed(registry, version))
    return digest


def pushed(registry: Registry, version: str) -> str:
    """Return the digest of the chart that the registry has under a version; empty if there is none."""
    try:
        return str(referrers.subject(registry, version)["digest"])
    except RegistryError as error:
        if error.status == 404:
            return ""
        raise


def attach_provenance(
    registry: Registry, version: str, digest: str, content: Mapping[str, bytes], revision: str, key: Path
) -> None:
    """Attach a signed statement of the files and the commit that the chart is made of."""
    went_in = {name: hashlib.sha256(data).hexdigest() for name, data in content.items()}
    inputs = hashlib.sha256(json.dumps(went_in, sort_keys=True).encode()).hexdigest()
    build = provenance.Build({"role": NAME, "version": version}, inputs, version, went_in, revision)
    said = provenance.statement(build, f"{registry.place.host}/{registry.repository}", digest)
    referrers.attach(registry, referrers.subject(registry, digest), provenance.TYPE, provenance.signed(said, key))
