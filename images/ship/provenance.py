"""Provenance of an image: an in-toto statement, signed with the builder's ssh key.

`ssh-keygen -Y` signs, so that people's existing keys work, also those in agents and hardware tokens. It signs DSSE's
encoding of the statement, which rules out another reading of the same bytes.
"""

from __future__ import annotations

import base64
import json
import re
import subprocess
import tempfile
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from images import ImagesError
from images.engine.store import MANIFEST, descriptor
from images.ship.registry import DIGEST, LARGEST, MANIFEST_TYPES, Registry, RegistryError

TYPE = "application/vnd.in-toto+json"
STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://slsa.dev/provenance/v1"
# Names, like the SBOM's namespace: no host answers there.
BUILDER = "https://minivm.invalid/build.py"
NAMESPACE = "minivm-provenance"  # what these signatures are for: one made for git or a file is none
SHA256 = re.compile(r"[0-9a-f]{64}")
TIMEOUT = 60


@dataclass(frozen=True, slots=True)
class Build:
    """The parameters and inputs that decide a build's output."""

    parameters: Mapping[str, str]
    inputs: str  # the whole hash
    tag: str
    went_in: Mapping[str, str]  # by name and SHA-256: files, packages, wheels, the image below
    revision: str


@dataclass(frozen=True, slots=True)
class Verified:
    """A statement about this image, signed by an allowed signer."""

    signer: str
    statement: Mapping[str, Any]


def make_statement(build: Build, name: str, digest: str) -> bytes:
    """Serialise the inputs, the builder and the result. No time: the same build gives the same bytes."""
    went_in = sorted((name, sha256) for name, sha256 in build.went_in.items() if SHA256.fullmatch(sha256))
    data = {
        "_type": STATEMENT,
        "subject": [{"name": name, "digest": {"sha256": digest.removeprefix("sha256:")}}],
        "predicateType": PREDICATE,
        "predicate": {
            "buildDefinition": {
                "buildType": f"{BUILDER}#role",
                "externalParameters": dict(build.parameters),
                "internalParameters": {"inputs": build.inputs, "tag": build.tag},
                "resolvedDependencies": [{"name": name, "digest": {"sha256": sha256}} for name, sha256 in went_in],
            },
            "runDetails": {"builder": {"id": BUILDER, "version": {"revision": build.revision or "unknown"}}},
        },
    }
    return json.dumps(data, sort_keys=True, separators=(",", ":")).encode()


def encode(payload: bytes) -> bytes:
    """Return DSSE's pre-authentication encoding: type and length before the bytes."""
    return b"DSSEv1 %d %s %d %s" % (len(TYPE), TYPE.encode(), len(payload), payload)


def sign(payload: bytes, key: Path) -> bytes:
    """Sign a payload and return the envelope; ssh-keygen may ask for the key's passphrase."""
    what = "sign the provenance"
    if not key.is_file():
        raise ImagesError(what, "no such key", file=key, hint="an ssh key: `ssh-keygen -t ed25519 -f KEY`")
    done = run_keygen(what, ["-Y", "sign", "-q", "-n", NAMESPACE, "-f", str(key)], encode(payload))
    if done.returncode != 0 or b"BEGIN SSH SIGNATURE" not in done.stdout:
        raise ImagesError(
            what, done.stderr.decode(errors="replace").strip() or "ssh-keygen printed no signature", file=key
        )
    signature = {"keyid": "", "sig": base64.b64encode(done.stdout).decode()}
    whole = {"payloadType": TYPE, "payload": base64.b64encode(payload).decode(), "signatures": [signature]}
    return json.dumps(whole, sort_keys=True).encode()


def verify(envelopes: Iterable[bytes], digest: str, signers: Path, reference: str) -> Verified:
    """Return the first statement about this image by an allowed signer, or raise the most specific reason."""
    what = f"verify {reference}"
    if not signers.is_file():
        raise ImagesError(what, "no such file of signers", file=signers,
                          hint="lines of `NAME KEYTYPE KEY`, as ssh-keygen's ALLOWED SIGNERS has them")  # fmt: skip
    reason = "no provenance is attached"
    for data in envelopes:
        envelope = open_envelope(data)
        if envelope is None:
            reason = "the attached document is not a signed statement"
            continue
        payload, signatures = envelope
        signer = next((name for sig in signatures if (name := find_signer(payload, sig, signers, what))), "")
        if not signer:
            reason = "no allowed signer signed its provenance"
        elif (statement := parse_statement(payload, digest)) is None:
            reason = f"its provenance, signed by {signer}, is about another image"
        else:
            return Verified(signer, statement)
    raise ImagesError(what, reason, file=signers)


def open_envelope(data: bytes) -> tuple[bytes, list[bytes]] | None:
    try:
        whole = json.loads(data)
        if whole["payloadType"] != TYPE:
            return None
        signatures = [base64.b64decode(item["sig"], validate=True) for item in whole["signatures"][:16]]
        return base64.b64decode(whole["payload"], validate=True), signatures
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def parse_statement(payload: bytes, digest: str) -> Mapping[str, Any] | None:
    """Return the statement if this image is its subject. Call it only after the signature was verified."""
    try:
        statement = json.loads(payload)
        subjects = [item["digest"].get("sha256") for item in statement["subject"]]
        kind = (statement["_type"], statement["predicateType"])
        statement["predicate"]["buildDefinition"]["externalParameters"]["role"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    if kind != (STATEMENT, PREDICATE) or digest.removeprefix("sha256:") not in subjects:
        return None
    return dict(statement)


def find_signer(payload: bytes, signature: bytes, signers: Path, what: str) -> str:
    """Return the name of the allowed signer; empty if there is none."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "signature"
        file.write_bytes(signature)
        common = ["-s", str(file), "-f", str(signers)]
        named = run_keygen(what, ["-Y", "find-principals", *common], b"")
        for name in named.stdout.decode(errors="replace").splitlines() if named.returncode == 0 else []:
            done = run_keygen(what, ["-Y", "verify", "-q", "-n", NAMESPACE, "-I", name, *common], encode(payload))
            if done.returncode == 0:
                return name
    return ""


def run_keygen(what: str, words: Sequence[str], data: bytes) -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(["ssh-keygen", *words], input=data, capture_output=True, timeout=TIMEOUT, check=False)
    except FileNotFoundError as error:
        raise ImagesError(what, "ssh-keygen is not installed", hint="Debian has it in openssh-client") from error
    except subprocess.TimeoutExpired as error:
        raise ImagesError(what, f"ssh-keygen gave no answer within {TIMEOUT} s") from error


# Documents attached to an image in the registry: OCI artifacts whose subject is the image.
#
# A registry without the referrers interface keeps them too; their list is then a tag of the image's digest, as the
# distribution specification defines.

INDEX = "application/vnd.oci.image.index.v1+json"
EMPTY = "application/vnd.oci.empty.v1+json"
NOTHING = b"{}"
# Every account that may push may attach: the rest beyond this number is ignored.
MOST = 64

Descriptor = Mapping[str, Any]


def read_subject(registry: Registry, reference: str) -> dict[str, Any]:
    """Return the descriptor of the image under a tag or digest, computed from the received bytes."""
    with registry.request("GET", f"/manifests/{reference}", {"Accept": ", ".join((*MANIFEST_TYPES, INDEX))}) as answer:
        media_type = answer.headers.get("Content-Type", MANIFEST).partition(";")[0]
        subject_descriptor = descriptor(media_type, registry.read_whole(answer))
    if reference.startswith("sha256:"):
        registry.require_same(reference, subject_descriptor["digest"])
    return subject_descriptor


def attach(registry: Registry, image: Descriptor, artifact_type: str, payload: bytes) -> str:
    """Attach a document to an image; return its digest. Attaching the same document again changes nothing."""
    layer = put_blob(registry, artifact_type, payload)
    data = json.dumps(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "artifactType": artifact_type,
            "config": put_blob(registry, EMPTY, NOTHING),
            "layers": [layer],
            "subject": dict(image),
        },
        sort_keys=True,
    ).encode()
    manifest = descriptor(MANIFEST, data)
    headers = put_manifest(registry, manifest["digest"], MANIFEST, data)
    if "OCI-Subject" not in headers:
        listed = read_index(registry, f"/manifests/{make_fallback_tag(image)}") or []
        rest = [item for item in listed if item.get("digest") != manifest["digest"]]
        whole = {
            "schemaVersion": 2,
            "mediaType": INDEX,
            "manifests": [*rest, {**manifest, "artifactType": artifact_type}],
        }
        put_manifest(registry, make_fallback_tag(image), INDEX, json.dumps(whole, sort_keys=True).encode())
    return str(manifest["digest"])


def read_attached(registry: Registry, image: Descriptor, artifact_type: str) -> Iterator[bytes]:
    """Yield the documents of a type attached to an image. Only their digests are checked here."""
    listed = read_index(registry, f"/referrers/{image['digest']}")
    if listed is None:
        listed = read_index(registry, f"/manifests/{make_fallback_tag(image)}") or []
    for item in [item for item in listed if item.get("artifactType") == artifact_type][-MOST:]:
        digest = str(item.get("digest", ""))
        data = registry.read_by_digest(f"/manifests/{digest}", digest, {"Accept": MANIFEST})
        try:
            (layer,) = json.loads(data)["layers"]
            layer_digest = str(layer["digest"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise RegistryError(registry.describe("read"), f"{digest} is not one document") from error
        yield registry.read_by_digest(f"/blobs/{layer_digest}", layer_digest)


def make_fallback_tag(image: Descriptor) -> str:
    return str(image["digest"]).replace(":", "-")


def read_index(registry: Registry, path: str) -> list[dict[str, Any]] | None:
    """Return the descriptors of a list; None if there is no such list."""
    try:
        with registry.request("GET", path, {"Accept": INDEX}) as answer:
            return parse_manifests(registry, registry.read_whole(answer))
    except RegistryError as error:
        if error.status == 404:
            return None
        raise


def parse_manifests(registry: Registry, data: bytes) -> list[dict[str, Any]]:
    try:
        manifests_found = json.loads(data)["manifests"]
        if not isinstance(manifests_found, list) or not all(
            DIGEST.fullmatch(item["digest"]) for item in manifests_found
        ):
            raise ValueError("not a list of descriptors")
        return manifests_found
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise RegistryError(registry.describe("read"), "its list of referrers is not a list of descriptors") from error


def put_blob(registry: Registry, media_type: str, data: bytes) -> dict[str, Any]:
    blob = descriptor(media_type, data)
    if len(data) > LARGEST:
        raise RegistryError(registry.describe("attach to"), f"a document of more than {LARGEST >> 20} MiB")
    with registry.request("POST", "/blobs/uploads/") as answer:
        location = urllib.parse.urljoin(f"{registry.base}/", answer.headers.get("Location", ""))
    if not location.startswith(f"{registry.base}/"):
        # Only the registry may see the login.
        raise RegistryError(registry.describe("attach to"), f"it takes uploads elsewhere: {location}")
    joined = f"{location}{'&' if '?' in location else '?'}digest={urllib.parse.quote(blob['digest'])}"
    with registry.request("PUT", joined, {"Content-Type": "application/octet-stream"}, data):
        return blob


def put_manifest(registry: Registry, reference: str, media_type: str, data: bytes) -> Mapping[str, str]:
    with registry.request("PUT", f"/manifests/{reference}", {"Content-Type": media_type}, data) as answer:
        return dict(answer.headers.items())


def attach_build(registry: Registry, build: Build, digest: str, key: Path) -> None:
    """Attach a signed statement about a build to the image with this digest."""
    payload = make_statement(build, f"{registry.place.host}/{registry.repository}", digest)
    attach(registry, read_subject(registry, digest), TYPE, sign(payload, key))
