"""Read-only client of a registry's HTTP interface: what is there, and whether it is correct.

The engine uploads; this client reads back, and finds out why an upload failed if the engine does not say. Standard
library only. HTTPS, except for loopback addresses, as docker does it; further CAs come from docker's certs.d.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import ipaddress
import json
import re
import ssl
import subprocess
import urllib.error
import urllib.parse
import urllib.request
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPException, HTTPResponse, IncompleteRead
from pathlib import Path
from typing import Any

from images import ImagesError

# Credentials for a registry: from standard input, the environment, or docker's configuration. Never from argv.
USER, PASSWORD = "MINIVM_REGISTRY_USER", "MINIVM_REGISTRY_PASSWORD"
# Docker Hub's entry in config.json is older than the registry it names today.
DOCKER_HUB, DOCKER_HUB_KEY = "docker.io", "https://index.docker.io/v1/"
HELPER_TIMEOUT = 60


@dataclass(frozen=True, slots=True)
class Login:
    user: str
    password: str = field(repr=False)  # keep it out of logs and tracebacks, where a dataclass prints itself

    def for_engine(self) -> dict[str, str]:
        return {"username": self.user, "password": self.password}

    def basic(self) -> str:
        return "Basic " + base64.b64encode(f"{self.user}:{self.password}".encode()).decode()


def find_login(host: str, env: Mapping[str, str], *, user: str = "", password: str = "") -> Login | None:
    """Find the login for a registry's `host[:port]`; `password` is what standard input gave."""
    if user or password:
        if not (user and password):
            missing = "password" if user else "user name"
            raise ImagesError(f"log in to {host}", f"no {missing}", hint="give --user and --password-stdin together")
        return Login(user, password)
    if env.get(USER) or env.get(PASSWORD):
        absent = [name for name in (USER, PASSWORD) if not env.get(name)]
        if absent:
            raise ImagesError(f"log in to {host}", f"{absent[0]} is not set", hint=f"set {USER} and {PASSWORD}")
        return Login(env[USER], env[PASSWORD])
    path = Path(env.get("DOCKER_CONFIG") or Path(env.get("HOME", "/root")) / ".docker") / "config.json"
    return read_docker_login(path, host, env)


def read_docker_login(path: Path, host: str, env: Mapping[str, str]) -> Login | None:
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ImagesError(f"log in to {host}", f"cannot read docker's configuration: {error}", file=path) from error
    key = DOCKER_HUB_KEY if host == DOCKER_HUB else host
    helper = read_mapping(config, "credHelpers", path, host).get(key) or config.get("credsStore", "")
    if helper and (login := ask_helper(str(helper), key, env)):
        return login
    auths = read_mapping(config, "auths", path, host)
    name = key if auths.get(key) else f"https://{key}"
    return decode_login(read_mapping(auths, name, path, host), path, host)


def read_mapping(data: object, name: str, path: Path, host: str) -> Mapping[str, Any]:
    entry = data.get(name) or {} if isinstance(data, dict) else None
    if not isinstance(entry, dict):
        raise ImagesError(f"log in to {host}", "docker's configuration is not what `docker login` writes: expected a"
                          " mapping", file=path, field=name, hint=f"run `docker login {host}`")  # fmt: skip
    return entry


def decode_login(entry: Mapping[str, Any], path: Path, host: str) -> Login | None:
    if not entry.get("auth"):
        return None
    try:
        user, separator, password = base64.b64decode(str(entry["auth"]), validate=True).decode().partition(":")
    except ValueError as error:
        raise ImagesError(
            f"log in to {host}",
            "its entry is not base64 of user:password",
            file=path,
            hint=f"run `docker login {host}`",
        ) from error
    return Login(user, password) if separator else None


def ask_helper(helper: str, key: str, env: Mapping[str, str]) -> Login | None:
    """Call docker-credential-HELPER: the registry on standard input, JSON on standard output."""
    command = [f"docker-credential-{helper}", "get"]
    try:
        done = subprocess.run(
            command, input=key, capture_output=True, text=True, env=dict(env), timeout=HELPER_TIMEOUT, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ImagesError(f"log in to {key}", f"credential helper {command[0]}: {error}") from error
    if done.returncode != 0:
        return None  # by the protocol: "credentials not found"; what config.json holds itself is the next choice
    try:
        answer = json.loads(done.stdout)
        return Login(str(answer["Username"]), str(answer["Secret"]))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        # The answer itself may be a secret: it is not repeated.
        raise ImagesError(f"log in to {key}", f"credential helper {command[0]} gave no user and secret") from error


MANIFEST_TYPES = ("application/vnd.docker.distribution.manifest.v2+json", "application/vnd.oci.image.manifest.v1+json")
CERTS = Path("/etc/docker/certs.d")
TIMEOUT = 60
CHUNK = 1 << 20
LARGEST = 4 << 20  # bytes of a manifest, a configuration or a token's reply: a registry may send any amount
ENOSPC = 28
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class RegistryPath:
    """A registry and path to push to: `host[:port][/path]`."""

    host: str
    path: str

    @classmethod
    def parse(cls, text: str) -> RegistryPath:
        if re.search(r"://|@|\s", text) or not text.strip("/"):
            raise ImagesError(
                f"push to {text!r}",
                "a registry is host[:port][/path], without scheme and user",
                hint="registry.site/hpc",
            )
        host, _, path = text.strip("/").partition("/")
        if path != path.lower() or re.search(r"[^a-z0-9._/-]", path):
            raise ImagesError(f"push to {text!r}", "a path holds lower-case letters, digits, dots, dashes and slashes")
        return cls(host, path)

    def repository(self, name: str) -> str:
        return f"{self.path}/{name}" if self.path else name

    @property
    def loopback(self) -> bool:
        name = self.host.rpartition(":")[0] or self.host
        try:
            return ipaddress.ip_address(name.strip("[]")).is_loopback
        except ValueError:
            return name == "localhost"


class RegistryError(ImagesError):
    """The registry refused, failed or did not answer; `status` is its HTTP status, 0 without an answer."""

    def __init__(self, what: str, why: str, *, status: int = 0, hint: str | None = None) -> None:
        super().__init__(what, why, hint=hint)
        self.status = status


@dataclass(frozen=True, slots=True)
class Blob:
    digest: str
    size: int


@dataclass(frozen=True, slots=True)
class RegistryManifest:
    digest: str
    config: Blob
    layers: tuple[Blob, ...]


class Registry:
    """One repository of a registry, with one login."""

    def __init__(self, place: RegistryPath, name: str, login: Login | None) -> None:
        self.place, self.repository, self.login = place, place.repository(name), login
        host = "registry-1.docker.io" if place.host == DOCKER_HUB else place.host
        self.base = f"{'http' if place.loopback else 'https'}://{host}"
        self.token = ""
        handlers: list[urllib.request.BaseHandler] = [urllib.request.HTTPSHandler(context=load_trust(place.host))]
        if place.loopback:
            handlers.append(urllib.request.ProxyHandler({}))  # a proxy cannot reach this machine's loopback
        self.opener = urllib.request.build_opener(*handlers)

    def read_manifest(self, reference: str) -> RegistryManifest:
        """Return the manifest under a digest or tag; its digest is computed from the received bytes."""
        with self.request("GET", f"/manifests/{reference}", {"Accept": ", ".join(MANIFEST_TYPES)}) as answer:
            data = self.read_whole(answer)
        try:
            return parse_manifest(data)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            reason = f"{reference} is not an image manifest of schema 2"
            raise RegistryError(self.describe("read back"), reason) from error

    def read_config(self, blob: Blob) -> Mapping[str, Any]:
        value: Mapping[str, Any] = json.loads(self.read_by_digest(f"/blobs/{blob.digest}", blob.digest))
        return value

    def check_layer(self, blob: Blob, diff_id: str) -> None:
        """Read a layer back: its bytes must have the blob's digest, and, unpacked, the digest the image knows."""
        packed, unpacked = hashlib.sha256(), hashlib.sha256()
        inflate = None
        size = 0
        try:
            with self.request("GET", f"/blobs/{blob.digest}") as answer:
                while chunk := answer.read(CHUNK):
                    if size == 0:
                        inflate = zlib.decompressobj(wbits=31) if chunk[:2] == b"\x1f\x8b" else None
                    size += len(chunk)
                    packed.update(chunk)
                    for piece in inflate_bounded(inflate, chunk) if inflate else (chunk,):
                        unpacked.update(piece)
                check_complete(answer)
        except zlib.error as error:
            raise RegistryError(self.describe("trust"), f"its {blob.digest} cannot be unpacked: {error}") from error
        if inflate:
            unpacked.update(inflate.flush())
        self.require_same(blob.digest, f"sha256:{packed.hexdigest()}")
        self.require_same(diff_id, f"sha256:{unpacked.hexdigest()}")

    def has(self, blob: Blob) -> bool:
        try:
            with self.request("HEAD", f"/blobs/{blob.digest}") as answer:
                return str(answer.headers.get("Content-Length", blob.size)).strip() == str(blob.size)
        except RegistryError as error:
            if error.status == 404:
                return False
            raise

    def check_upload(self) -> None:
        """Begin an upload and take it back: raises with the registry's own reason where it would not accept one."""
        with self.request("POST", "/blobs/uploads/") as answer:
            location = urllib.parse.urljoin(f"{self.base}/", answer.headers.get("Location", ""))
        # One elsewhere, or without TLS, must not see the login; the registry forgets an upload by itself as well.
        if location.startswith(f"{self.base}/"):
            # An account that may push need not be allowed to delete.
            with contextlib.suppress(RegistryError), self.request("DELETE", location):
                pass

    def require_same(self, expected: str, actual: str) -> None:
        if expected != actual:
            raise RegistryError(self.describe("trust"), f"it holds {actual} where {expected} was pushed")

    def describe(self, verb: str) -> str:
        return f"{verb} {self.place.host}/{self.repository}"

    @contextmanager
    def request(
        self, method: str, path: str, headers: Mapping[str, str] | None = None, data: bytes | None = None
    ) -> Iterator[HTTPResponse]:
        """Open a request; a connection that breaks while it is read counts as no answer, too."""
        try:
            with self._open(method, path, headers, data) as answer:
                yield answer
        except (OSError, HTTPException) as error:
            raise self._explain_silence(error) from error

    def read_whole(self, answer: HTTPResponse) -> bytes:
        data = answer.read(LARGEST + 1)
        if len(data) > LARGEST:
            raise RegistryError(self.describe("read back"), f"it sends more than {LARGEST >> 20} MiB of description")
        check_complete(answer)
        return data

    def read_by_digest(self, path: str, digest: str, headers: Mapping[str, str] | None = None) -> bytes:
        """Read a whole object and compare it with its digest."""
        if not DIGEST.fullmatch(digest):
            raise RegistryError(self.describe("read"), f"{digest[:100]!r} is no digest")
        with self.request("GET", path, headers) as answer:
            data = self.read_whole(answer)
        self.require_same(digest, f"sha256:{hashlib.sha256(data).hexdigest()}")
        return data

    def _open(
        self, method: str, path: str, headers: Mapping[str, str] | None, data: bytes | None, again: bool = True
    ) -> HTTPResponse:
        url = path if "://" in path else f"{self.base}/v2/{self.repository}{path}"
        request = urllib.request.Request(url, data, dict(headers or {}), method=method)
        if self.token or self.login:
            # Not carried over a redirect: blobs often live on another host, which must not see the password.
            authorization = f"Bearer {self.token}" if self.token else self.login.basic() if self.login else ""
            request.add_unredirected_header("Authorization", authorization)
        try:
            answer: HTTPResponse = self.opener.open(request, timeout=TIMEOUT)
            return answer
        except urllib.error.HTTPError as error:
            challenge = error.headers.get("WWW-Authenticate", "")
            if error.code == 401 and again and challenge.lower().startswith("bearer "):
                self.token = self._fetch_token(challenge)
                return self._open(method, path, headers, data, again=False)
            raise self._explain_refusal(error) from error

    def _fetch_token(self, challenge: str) -> str:
        """Get a token by docker's protocol: the registry's challenge names the token service and the scope."""
        fields = dict(re.findall(r'(\w+)="([^"]*)"', challenge))
        realm = fields.pop("realm", "")
        if not realm.startswith(("http://", "https://")):
            raise RegistryError(self.describe("log in to"), f"it does not say who gives tokens: {realm!r}")
        if not realm.startswith("https://") and not self.place.loopback:
            raise RegistryError(self.describe("log in to"), f"it sends the password to {realm!r}, which is not HTTPS")
        fields["scope"] = f"repository:{self.repository}:pull,push"
        request = urllib.request.Request(f"{realm}?{urllib.parse.urlencode(fields)}")
        if self.login:
            request.add_unredirected_header("Authorization", self.login.basic())
        try:
            with self.opener.open(request, timeout=TIMEOUT) as answer:
                value = json.loads(self.read_whole(answer))
                return str(value.get("token") or value.get("access_token") or "")
        except urllib.error.HTTPError as error:
            raise self._explain_refusal(error) from error
        except (ValueError, AttributeError, RecursionError) as error:
            # The answer may hold a token: it is not repeated.
            raise RegistryError(self.describe("log in to"), f"{realm} gives no token that can be read") from error

    def _explain_refusal(self, error: urllib.error.HTTPError) -> RegistryError:
        what = self.describe("use")
        if error.code == 401:
            if self.login is None:
                return RegistryError(
                    what, "it wants a login, and there is none", status=401, hint="see docs/how-to/push-images.md"
                )
            return RegistryError(what, f"it refuses the password of user {self.login.user!r}", status=401)
        if error.code == 403:
            account = f"user {self.login.user!r}" if self.login else "a user without login"
            return RegistryError(what, f"{account} may not do that there", status=403)
        return RegistryError(what, parse_reason(error.code, error.read(1 << 16)), status=error.code)

    def _explain_silence(self, error: Exception) -> RegistryError:
        cause = error.reason if isinstance(error, urllib.error.URLError) else error
        hint = None
        if isinstance(cause, ssl.SSLError):
            hint = f"put its CA's certificate into {CERTS / self.place.host}/ca.crt"
        return RegistryError(self.describe("reach"), str(cause), hint=hint)


def parse_manifest(data: bytes) -> RegistryManifest:
    """Parse a manifest of schema 2; raise ValueError, KeyError or TypeError for anything else."""
    value = json.loads(data)
    if value["schemaVersion"] != 2:
        raise ValueError(value["schemaVersion"])
    blobs = [Blob(str(item["digest"]), int(item["size"])) for item in (value["config"], *value["layers"])]
    return RegistryManifest(f"sha256:{hashlib.sha256(data).hexdigest()}", blobs[0], tuple(blobs[1:]))


def check_complete(answer: HTTPResponse) -> None:
    """Detect a broken connection, which reading by pieces cannot tell from the end."""
    if answer.length:
        raise IncompleteRead(b"", answer.length)


def inflate_bounded(inflate: zlib._Decompress, chunk: bytes) -> Iterator[bytes]:
    """Decompress in pieces, so that a registry's few bytes cannot become gigabytes of memory."""
    while chunk:
        yield inflate.decompress(chunk, CHUNK)
        chunk = inflate.unconsumed_tail


def load_trust(host: str) -> ssl.SSLContext:
    context = ssl.create_default_context()
    for path in sorted((CERTS / host).glob("*.crt")):
        try:
            context.load_verify_locations(path)
        except OSError as error:  # SSLError is one
            reason = f"no certificate that can be read: {error.strerror or error}"
            raise ImagesError(f"trust {host}", reason, file=path) from error
    return context


def parse_reason(status: int, body: bytes) -> str:
    """Return the registry's message from the error document that its HTTP interface defines."""
    try:
        errors = json.loads(body)["errors"]
        detail = errors[0].get("detail")
        text = f"{errors[0].get('code', '')}: {errors[0].get('message', '')}"
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        return f"it answered with HTTP status {status}"
    if f'"Err": {ENOSPC}' in json.dumps(detail) or "no space left" in json.dumps(detail):
        return "no space left on the registry's disk"
    return f"{text} (HTTP status {status})"
