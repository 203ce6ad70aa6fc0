"""The SPDX 2.3 document of an image: its packages, and this project's files. Pure and deterministic.

The same values give the same bytes, in any order of packages and files.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

from images.archive.locked import Slice
from images.archive.wheels import Wheel
from images.definition.spec import Pin

NOASSERTION = "NOASSERTION"
# Fields that SPDX requires of each package and that this project does not examine.
UNSAID = {"downloadLocation": NOASSERTION, "licenseConcluded": NOASSERTION, "copyrightText": NOASSERTION}
TOOL = "Tool: minivm-build"
ROOT_ID = "SPDXRef-Image"
# The type that the package URL's specification has for wheels.
WHEEL = "pypi"
OURS_ID = "SPDXRef-Package-minivm"


@dataclass(frozen=True, slots=True)
class Package:
    """One installed package. `sha256` is that of its package file; empty if unknown."""

    name: str
    version: str
    arch: str
    sha256: str = ""
    source: str = ""
    licence: str = ""  # as the package itself names it, which need not be in SPDX's terms
    distribution: str = ""  # where it differs from the document's: a vendor's repository, a tarball ("generic")


@dataclass(frozen=True, slots=True)
class File:
    """One of this project's files; `path` is absolute or relative to the image's root."""

    path: str
    sha1: str
    sha256: str

    @classmethod
    def of(cls, path: str, data: bytes) -> File:
        return cls(path, hashlib.sha1(data, usedforsecurity=False).hexdigest(), hashlib.sha256(data).hexdigest())


def list_packages(
    slices: Iterable[Slice],
    downloads: Iterable[Pin],
    base: Mapping[str, str],
    vendors: Collection[str],
    wheels: Iterable[Wheel] = (),
) -> list[Package]:
    """List an image's packages: the layers' locked ones, the base's own, and the pinned files.

    `base` is `name:arch` -> version of a base image's packages; a layer's package replaces the base's.
    """
    packages = [
        Package(
            name=package.name,
            version=package.version,
            arch=package.arch,
            sha256=package.sha256,
            source=package.source or source_of(package.path),
            distribution=package.origin if package.origin in vendors else "",
        )
        for slice_ in slices
        for package in slice_.packages
    ]
    replaced = {package.name for package in packages}
    for key, version in base.items():
        name, _, arch = key.partition(":")
        if name not in replaced:
            packages.append(Package(name, version, arch))
    packages += [Package(pin.name, pin.version, "", pin.sha256, distribution="generic") for pin in downloads]
    for wheel in wheels:
        made = Package(wheel.name, wheel.version, wheel.arch, wheel.sha256, licence=wheel.licence, distribution=WHEEL)
        packages.append(made)
    return packages


def source_of(path: str) -> str:
    """Return the source package, from a path such as pool/main/g/gcc-14/libstdc++6_14.2.0-19_amd64.deb."""
    parts = path.split("/")
    return parts[-2] if parts[0] == "pool" and len(parts) >= 5 else ""


def purl(package: Package, distribution: str, suite: str) -> str:
    """Build the package URL (purl-spec, type deb): sorted qualifiers, lower-case names, encoded versions."""
    where = package.distribution or distribution
    name, version = quote(package.name.lower(), safe=""), quote(package.version, safe="")
    if where == "generic":
        return f"pkg:generic/{name}@{version}" + (f"?checksum=sha256:{package.sha256}" if package.sha256 else "")
    if where == WHEEL:
        # Wheels of several machines have one name: the checksum tells which of them it is.
        return f"pkg:{WHEEL}/{name}@{version}?checksum=sha256:{package.sha256}"
    qualifiers = {"arch": package.arch, "distro": suite if where == distribution else ""}
    text = "&".join(f"{key}={quote(value, safe='')}" for key, value in sorted(qualifiers.items()) if value)
    return f"pkg:deb/{quote(where, safe='')}/{name}@{version}" + (f"?{text}" if text else "")


def spdx_id(*parts: str) -> str:
    """Build an identifier of letters, digits, dots and dashes; a digest separates names that become equal."""
    text = "-".join(parts)
    clean = re.sub(r"[^A-Za-z0-9.-]", "-", text)
    return f"SPDXRef-{clean}" if clean == text else f"SPDXRef-{clean}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def document(
    *,
    name: str,
    version: str,
    namespace: str,
    packages: Iterable[Package],
    files: Iterable[File],
    epoch: int,
    distribution: str = "debian",
    suite: str = "",
) -> dict[str, Any]:
    """Build the document as plain data; `to_json` orders it. `namespace` is unique per content, without randomness."""
    listed = sorted(set(packages), key=lambda package: (package.name, package.arch, package.version))
    own_files = sorted(set(files), key=lambda file: file.path)
    entries = [package_entry(package, distribution, suite) for package in listed]
    file_entries = [file_entry(file) for file in own_files]
    image = {
        "SPDXID": ROOT_ID,
        "name": name,
        "versionInfo": version,
        "primaryPackagePurpose": "CONTAINER",
        "filesAnalyzed": False,
        "licenseDeclared": NOASSERTION,
        **UNSAID,
    }
    relationships = [relation("SPDXRef-DOCUMENT", "DESCRIBES", ROOT_ID)]
    relationships += [relation(ROOT_ID, "CONTAINS", entry["SPDXID"]) for entry in entries]
    if own_files:
        entries.append(our_package(version, own_files))
        relationships.append(relation(ROOT_ID, "CONTAINS", OURS_ID))
        relationships += [relation(OURS_ID, "CONTAINS", entry["SPDXID"]) for entry in file_entries]
    return {
        "spdxVersion": "SPDX-2.3",
        "dataLicense": "CC0-1.0",
        "SPDXID": "SPDXRef-DOCUMENT",
        "name": f"{name}-{version}",
        "documentNamespace": namespace,
        "creationInfo": {
            "created": datetime.fromtimestamp(epoch, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "creators": [TOOL],
        },
        "packages": [image, *entries],
        "files": file_entries,
        "relationships": relationships,
    }


def package_entry(package: Package, distribution: str, suite: str) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "SPDXID": spdx_id(*filter(None, ("Package", package.name, package.version, package.arch))),
        "name": package.name,
        "versionInfo": package.version,
        "filesAnalyzed": False,
        "licenseDeclared": NOASSERTION,
        **UNSAID,
        "externalRefs": [
            {
                "referenceCategory": "PACKAGE-MANAGER",
                "referenceType": "purl",
                "referenceLocator": purl(package, distribution, suite),
            }
        ],
    }
    if package.sha256:
        entry["checksums"] = [{"algorithm": "SHA256", "checksumValue": package.sha256}]
    if package.source:
        entry["sourceInfo"] = f"built from source package {package.source}"
    if package.licence:
        entry["licenseComments"] = f"the package itself names: {package.licence}"
    return entry


def our_package(version: str, files: Iterable[File]) -> dict[str, Any]:
    """Describe this project's files as one package with a verification code, which SPDX needs to hold files."""
    code = hashlib.sha1("".join(sorted(file.sha1 for file in files)).encode(), usedforsecurity=False).hexdigest()
    return {
        "SPDXID": OURS_ID,
        "name": "minivm",
        "versionInfo": version,
        "filesAnalyzed": True,
        "packageVerificationCode": {"packageVerificationCodeValue": code},
        "licenseDeclared": NOASSERTION,
        "licenseInfoFromFiles": [NOASSERTION],
        **UNSAID,
    }


def file_entry(file: File) -> dict[str, Any]:
    # SPDX wants a relative name; SHA1 is mandatory in 2.3; rely on SHA256.
    path = file.path.lstrip("/")
    return {
        "SPDXID": spdx_id("File", path),
        "fileName": f"./{path}",
        "checksums": [
            {"algorithm": "SHA1", "checksumValue": file.sha1},
            {"algorithm": "SHA256", "checksumValue": file.sha256},
        ],
        "licenseConcluded": NOASSERTION,
        "licenseInfoInFiles": [NOASSERTION],
        "copyrightText": NOASSERTION,
    }


def relation(subject: str, kind: str, target: str) -> dict[str, str]:
    return {"spdxElementId": subject, "relationshipType": kind, "relatedSpdxElement": target}


def to_json(value: Mapping[str, Any]) -> bytes:
    """Serialise with sorted keys, two spaces of indentation, and a final newline."""
    return (json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()
