"""Fetch pinned files from outside once, keep them by checksum, never use one unverified."""

from __future__ import annotations

import hashlib
import io
import os
import tempfile
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from images.archive import trees
from images.definition.spec import UNFILLED, Pin
from images.errors import ImagesError
from images.settings import Settings

VERSIONS = "images/versions.yaml"
# HPC-X, the largest, has one and a half.
LARGEST = 16 << 30
# What may be given in place of a file that cannot be fetched.
BY_HAND = {"slurm": "have it from elsewhere: --set slurm_tarball=PATH, with slurm_version and slurm_sha256"}


def file_name(pin: Pin) -> str:
    if pin.commit:
        return f"{pin.name}-{pin.version}.tar"
    return PurePosixPath(urlsplit(pin.url).path).name or pin.name


def fetch(pin: Pin, directory: Path, settings: Settings) -> Path:
    """Return the pinned file under `directory`, fetching it if needed; a pin's address may be a local path."""
    if pin.sha256 == UNFILLED:
        raise ImagesError("fetch a pinned file", f"{pin.url} has no checksum yet", file=VERSIONS,
                          field=f"pins.{pin.name}.sha256", hint="compare the file with its publisher's checksum and "
                          "write it there; or `build.py lock --trust-first` takes what is served now")  # fmt: skip
    kept = directory / pin.sha256 / file_name(pin)
    return kept if kept.exists() else download("fetch a pinned file", pin, directory, settings, pin.sha256)


def download(what: str, pin: Pin, directory: Path, settings: Settings, wanted: str = "") -> Path:
    """Download a file, keep it by its checksum, and compare that with `wanted` if it is known."""
    directory.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=directory, prefix=".")
    temporary, digest, size = Path(name), hashlib.sha256(), 0
    try:
        with os.fdopen(descriptor, "wb") as target, opened(pin, settings) as source:
            while piece := source.read(1 << 20):
                size += len(piece)
                if size > LARGEST:
                    raise OSError("it does not end")
                digest.update(piece)
                target.write(piece)
            target.flush()
            os.fsync(target.fileno())
        if not size:
            raise OSError("it is empty")
        found = digest.hexdigest()
        if wanted and found != wanted:
            raise refused(what, f"checksum mismatch for {pin.url}: pinned {wanted}, found {found}", pin)
        kept = directory / found / file_name(pin)
        kept.parent.mkdir(exist_ok=True)
        temporary.chmod(0o644)
        temporary.rename(kept)
    except connection_errors() as error:
        why = getattr(error, "reason", None) or error
        raise refused(what, f"{pin.url}: {why}", pin, BY_HAND.get(pin.name)) from error
    finally:
        temporary.unlink(missing_ok=True)
    return kept


def refused(what: str, why: str, pin: Pin, hint: str | None = None) -> ImagesError:
    """Build the error for a pin: it names the site's setting if that supplied the file, else versions.yaml."""
    if pin.setting:
        return ImagesError(what, why, field=pin.setting)
    return ImagesError(what, why, file=VERSIONS, field=f"pins.{pin.name}", hint=hint)


def connection_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions of a failed connection; imported late, like the client itself."""
    from http.client import HTTPException

    return OSError, HTTPException  # URLError is an OSError


def opened(pin: Pin, settings: Settings):  # type: ignore[no-untyped-def]  # a response or a file: both read bytes
    if pin.commit:
        return io.BytesIO(trees.packed(pin, settings))
    if not urlsplit(pin.url).scheme:
        return Path(pin.url).open("rb")
    # Late: a build that fetches nothing does not pay for TLS.
    import ssl
    import urllib.request

    context = ssl.create_default_context()
    if settings.ca_certificates:
        context.load_verify_locations(settings.ca_certificates)

    class Encrypted(urllib.request.HTTPRedirectHandler):
        """Refuse redirects to plain HTTP for a file that has no checksum yet."""

        def redirect_request(self, req, fp, code, msg, headers, newurl):  # type: ignore[no-untyped-def]
            if pin.sha256 == UNFILLED and not newurl.startswith("https://"):
                raise OSError(f"it leads to {newurl}, which is not https")
            return super().redirect_request(req, fp, code, msg, headers, newurl)

    proxies = {name.removesuffix("_proxy"): value for name, value in settings.proxies.items() if name != "no_proxy"}
    handlers: list[urllib.request.BaseHandler] = [urllib.request.HTTPSHandler(context=context), Encrypted()]
    if proxies:
        handlers.append(urllib.request.ProxyHandler(proxies))
    return urllib.request.build_opener(*handlers).open(pin.url, timeout=60)
