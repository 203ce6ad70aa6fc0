"""Wheels and an index that tests make."""

from __future__ import annotations

import base64
import hashlib
import stat
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from images.archive.wheels import Wheel

TAGS = {"amd64": "manylinux2014_x86_64", "arm64": "manylinux_2_28_aarch64"}
FILES = {
    "nvidia/cu13/lib/libcudart.so.13": b"a library",
    "nvidia/cu13/lib/libcudart_static.a": b"for linking",
    "nvidia/cu13/lib/device.bc": b"device code",
    "nvidia/cu13/lib/stubs/libcuda.so": b"stands for the driver's",
    "nvidia/cu13/include/cuda.h": b"a header",
    "nvidia/cu13/bin/nvcc": b"a compiler",
    "nvidia/__init__.py": b"raise SystemExit('imported')",
}


def made(
    directory: Path, name: str = "nvidia-cuda-runtime", version: str = "13.5.1", tag: str = TAGS["amd64"],
    files: Mapping[str, bytes] = FILES, change: Callable[[zipfile.ZipFile], None] = lambda archive: None,
    lie: str = "", unlisted: str = "",
) -> Path:  # fmt: skip
    """Write a wheel like a publisher's; `lie` names a file with a wrong checksum in RECORD."""
    stem = f"{name.replace('-', '_')}-{version}"
    about = f"{stem}.dist-info"
    files = {
        **files,
        f"{about}/METADATA": f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n".encode(),
        f"{about}/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-{tag}\n".encode(),
        f"{about}/licenses/License.txt": b"what may be done with it",
    }
    rows = []
    for path, data in files.items():
        said = b"a lie" if path == lie else data
        digest = base64.urlsafe_b64encode(hashlib.sha256(said).digest()).decode().rstrip("=")
        if path != unlisted:
            rows.append(f"{path},sha256={digest},{len(said)}\n")
    target = directory / f"{stem}-py3-none-{tag}.whl"
    directory.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(target, "w") as archive:
        for path, data in files.items():
            info = zipfile.ZipInfo(path)
            info.external_attr = (stat.S_IFREG | (0o755 if "/bin/" in path else 0o644)) << 16
            archive.writestr(info, data)
        archive.writestr(f"{about}/RECORD", "".join(rows) + f"{about}/RECORD,,\n")
        change(archive)
    return target


def locked_wheel(path: Path, name: str = "nvidia-cuda-runtime", arch: str = "amd64") -> Wheel:
    return Wheel("runtime", name, "13.5.1", arch, path.name, hashlib.sha256(path.read_bytes()).hexdigest())


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory that is pip's only source of wheels."""
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    (tmp_path / "index").mkdir()
    return tmp_path / "index"
