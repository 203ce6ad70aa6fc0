"""Fetch pinned files once and keep them by verified checksum; cache packages in a proxy during a build."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import io
import lzma
import os
import select
import socket
import stat
import subprocess
import tarfile
import tempfile
import threading
import zlib
from collections.abc import Iterator, Mapping
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from ground.commands import ran
from images import ImagesError
from images.definition.spec import UNFILLED, Pin
from images.settings import BuildSettings

# Sources pinned by content, from a git repository, an archive or a directory, whichever is available.
# An archive's checksum depends on the program that packed it. The pin's checksum is that of one tar, made here from
# names, contents and executable bits only: the same from every source. From a git repository it takes the pin's
# commit, which git verifies itself.
VERSIONS = "images/versions.yaml"
# Of one source, unpacked.
LARGEST_TREE = 64 << 20
TIME = 300.0

# Errors of a truncated or invalid archive; ValueError: a name that minivm's tar cannot hold.
BROKEN = (tarfile.TarError, EOFError, ValueError, zlib.error, lzma.LZMAError)

# A file's content and whether it may be executed, or where a link leads to.
Tree = Mapping[str, tuple[bytes, bool] | str]


def pack_source(pin: Pin, settings: BuildSettings) -> bytes:
    """Make the canonical tar of the source at a pin's address."""
    address = Path(pin.url)
    try:
        if address.is_file():
            with tarfile.open(address) as archive:
                return make_tar(pin, dict(list_members(archive)))
        if address.is_dir() and not (address / ".git").exists() and not (address / "HEAD").is_file():
            return make_tar(pin, dict(files(address)))
        return make_tar(pin, of_commit(pin, settings))
    except (OSError, *BROKEN, subprocess.TimeoutExpired) as error:
        raise wrong(pin, str(error)) from error


def wrong(pin: Pin, why: str) -> ImagesError:
    where = {"field": pin.setting} if pin.setting else {"file": VERSIONS, "field": f"pins.{pin.name}"}
    hint = f"have it from elsewhere: --set sources={pin.name}=PATH, a git repository, a directory or an archive of it"
    return ImagesError(f"have the source of {pin.name} {pin.version}", f"{pin.url}: {why}", **where, hint=hint)


def make_tar(pin: Pin, tree: Tree) -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name in sorted(tree):
            entry, node = tarfile.TarInfo(f"{pin.name}-{pin.version}/{name}"), tree[name]
            if isinstance(node, str):
                entry.type, entry.linkname, entry.mode = tarfile.SYMTYPE, node, 0o777
                archive.addfile(entry)
            else:
                content, executable = node
                entry.size, entry.mode = len(content), 0o755 if executable else 0o644
                archive.addfile(entry, io.BytesIO(content))
    return target.getvalue()


def of_commit(pin: Pin, settings: BuildSettings) -> Tree:
    with tempfile.TemporaryDirectory() as place:
        env = os.environ | settings.proxies | {"GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C", "GIT_DIR": place}
        if settings.ca_certificates:
            env["GIT_SSL_CAINFO"] = settings.ca_certificates
        target = f"{place}/source.tar"
        for words in (
            ["init", "--quiet", "--bare", "--template=", place],
            ["fetch", "--quiet", "--depth=1", "--no-tags", "--", pin.url, pin.commit],
            # In a new repository: a given one could name programs for git to run.
            ["archive", "--format=tar", f"--output={target}", pin.commit],
        ):
            done = ran(["git", *words], within=TIME, env=env)
            if done.returncode:
                errors = [line for line in done.stderr.splitlines() if line.startswith(("fatal: ", "error: "))]
                raise wrong(pin, f"git has no commit {pin.commit} of it: {errors[0] if errors else done.returncode}")
        with tarfile.open(target) as archive:
            return dict(list_members(archive))


def list_members(archive: tarfile.TarFile) -> Iterator[tuple[str, tuple[bytes, bool] | str]]:
    """Yield an archive's files, without the single top directory that forges add."""
    listed, size = [], 0
    for member in archive:
        size += member.size
        if size > LARGEST_TREE:
            raise OSError("it is larger than a source")
        if not member.isdir() and member.type != tarfile.XGLTYPE:
            listed.append(member)
    tops = {member.name.removeprefix("./").partition("/")[0] for member in listed}
    cut = 1 if len(tops) == 1 and all("/" in member.name.removeprefix("./") for member in listed) else 0
    for member in listed:
        name = "/".join(member.name.removeprefix("./").split("/")[cut:])
        content = archive.extractfile(member) if member.isfile() else None
        if content is not None:
            yield name, (content.read(), bool(member.mode & stat.S_IXUSR))
        elif member.issym():
            yield name, member.linkname
        else:
            raise OSError(f"{name} is no file")


def files(root: Path) -> Iterator[tuple[str, tuple[bytes, bool] | str]]:
    size = 0
    for folder, directories, names in os.walk(root):
        for name in [*directories, *names]:
            path = Path(folder, name)
            status = path.lstat()
            inside = str(path.relative_to(root))
            if stat.S_ISLNK(status.st_mode):
                yield inside, str(path.readlink())
            elif stat.S_ISREG(status.st_mode):
                size += status.st_size
                if size > LARGEST_TREE:
                    raise OSError("it is larger than a source")
                yield inside, (path.read_bytes(), bool(status.st_mode & stat.S_IXUSR))
            elif not stat.S_ISDIR(status.st_mode):
                raise OSError(f"{inside} is no file")


# HPC-X, the largest, has one and a half.
LARGEST = 16 << 30
# What may be given in place of a file that cannot be fetched.
BY_HAND = {"slurm": "have it from elsewhere: --set slurm_tarball=PATH, with slurm_version and slurm_sha256"}


def file_name(pin: Pin) -> str:
    if pin.commit:
        return f"{pin.name}-{pin.version}.tar"
    return PurePosixPath(urlsplit(pin.url).path).name or pin.name


def fetch(pin: Pin, directory: Path, settings: BuildSettings) -> Path:
    """Return the pinned file under `directory`, fetching it if needed; a pin's address may be a local path."""
    if pin.sha256 == UNFILLED:
        raise ImagesError("fetch a pinned file", f"{pin.url} has no checksum yet", file=VERSIONS,
                          field=f"pins.{pin.name}.sha256", hint="compare the file with its publisher's checksum and "
                          "write it there; or `build.py lock --trust-first` takes what is served now")  # fmt: skip
    cached = directory / pin.sha256 / file_name(pin)
    return cached if cached.exists() else download("fetch a pinned file", pin, directory, settings, pin.sha256)


def download(what: str, pin: Pin, directory: Path, settings: BuildSettings, wanted: str = "") -> Path:
    """Download a file, keep it by its checksum, and compare that with `wanted` if it is known."""
    directory.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=directory, prefix=".")
    temporary, digest, size = Path(name), hashlib.sha256(), 0
    try:
        with os.fdopen(descriptor, "wb") as target, open_pin(pin, settings) as source:
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
        sha256 = digest.hexdigest()
        if wanted and sha256 != wanted:
            raise pin_error(what, f"checksum mismatch for {pin.url}: pinned {wanted}, found {sha256}", pin)
        cached = directory / sha256 / file_name(pin)
        cached.parent.mkdir(exist_ok=True)
        temporary.chmod(0o644)
        temporary.rename(cached)
    except connection_errors() as error:
        reason = getattr(error, "reason", None) or error
        raise pin_error(what, f"{pin.url}: {reason}", pin, BY_HAND.get(pin.name)) from error
    finally:
        temporary.unlink(missing_ok=True)
    return cached


def pin_error(what: str, why: str, pin: Pin, hint: str | None = None) -> ImagesError:
    """Build the error for a pin: it names the site's setting if that supplied the file, else versions.yaml."""
    if pin.setting:
        return ImagesError(what, why, field=pin.setting)
    return ImagesError(what, why, file=VERSIONS, field=f"pins.{pin.name}", hint=hint)


def connection_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions of a failed connection; imported late, like the client itself."""
    from http.client import HTTPException

    return OSError, HTTPException  # URLError is an OSError


def open_pin(pin: Pin, settings: BuildSettings):  # type: ignore[no-untyped-def]  # a response or a file: both read bytes
    if pin.commit:
        return io.BytesIO(pack_source(pin, settings))
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


# A caching proxy for packages, on loopback, for as long as one build lasts.

KEPT = (".deb", ".udeb")
TIMEOUT = 60
CHUNK = 1 << 18
# Of the answer, these are about the connection and not about the file.
HOP = {"connection", "keep-alive", "proxy-authenticate", "te", "trailer", "transfer-encoding", "upgrade"}


class CacheHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, *arguments: object, directory: Path, upstream: str, **options: object) -> None:
        self.directory, self.upstream = directory, upstream
        super().__init__(*arguments, **options)  # type: ignore[arg-type]  # the server's own arguments

    def log_message(self, format: str, *arguments: object) -> None:
        """Log nothing: the build reports its own progress."""

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        if not parts.netloc:
            self.send_error(400, "a proxy needs the whole URL")
            return
        cached = self.directory / hashlib.sha256(self.path.encode()).hexdigest() if parts.path.endswith(KEPT) else None
        if cached and cached.exists():
            self.answer(cached)
            return
        try:
            self.forward(cached)
        except (OSError, http.client.HTTPException) as error:
            self.close_connection = True
            with contextlib.suppress(OSError):
                self.send_error(502, f"{parts.netloc}: {error}")

    def answer(self, kept: Path) -> None:
        with kept.open("rb") as data:
            self.send_response(200)
            self.send_header("Content-Length", str(os.fstat(data.fileno()).st_size))
            self.end_headers()
            while piece := data.read(CHUNK):
                self.wfile.write(piece)

    def forward(self, kept: Path | None) -> None:
        """Copy the mirror's reply to the build step, and into the cache once it is complete."""
        parts = urlsplit(self.path)
        way = urlsplit(self.upstream).netloc or parts.netloc
        target = self.path if self.upstream else parts._replace(scheme="", netloc="").geturl() or "/"
        connection = http.client.HTTPConnection(way, timeout=TIMEOUT)
        headers = {name: value for name, value in self.headers.items() if name.lower() not in HOP}
        if kept:
            headers = {name: value for name, value in headers.items() if name.lower() != "range"}
        with contextlib.closing(connection):
            connection.request("GET", target, headers=headers | {"Connection": "close"})
            response = connection.getresponse()
            length = response.getheader("Content-Length")
            self.send_response(response.status)
            for name, value in response.getheaders():
                if name.lower() not in HOP:
                    self.send_header(name, value)
            if length is None:
                self.send_header("Connection", "close")
                self.close_connection = True
            self.end_headers()
            self.relay(response, kept if response.status == 200 and length else None, int(length or 0))

    def relay(self, response: http.client.HTTPResponse, kept: Path | None, length: int) -> None:
        if kept is None:
            while piece := response.read(CHUNK):
                self.wfile.write(piece)
            return
        descriptor, name = tempfile.mkstemp(dir=self.directory)
        temporary, came = Path(name), 0
        try:
            with os.fdopen(descriptor, "wb") as copy:
                while piece := response.read(CHUNK):
                    came += len(piece)
                    copy.write(piece)
                    # Keep the file before sending its last piece, so that the client's next request finds it.
                    if came == length:
                        copy.flush()
                        temporary.rename(kept)
                    self.wfile.write(piece)
        finally:
            temporary.unlink(missing_ok=True)

    def do_CONNECT(self) -> None:
        host, _, port = self.path.rpartition(":")
        try:
            far = socket.create_connection((host.strip("[]"), int(port)), timeout=TIMEOUT)
        except (OSError, ValueError) as error:
            self.send_error(502, str(error))
            return
        with far:
            self.send_response(200)
            self.end_headers()
            ends = {self.connection: far, far: self.connection}
            while ready := select.select(list(ends), [], [], TIMEOUT)[0]:
                for end in ready:
                    piece = end.recv(CHUNK)
                    if not piece:
                        self.close_connection = True
                        return
                    ends[end].sendall(piece)


@contextlib.contextmanager
def run_cache(directory: Path, upstream: str) -> Iterator[str]:
    """Run the proxy and yield its address. `upstream` is the site's own proxy, if it has one."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        handler = partial(CacheHandler, directory=directory, upstream=upstream)
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    except OSError as error:
        raise ImagesError("keep packages", str(error), field="apt_cache") from error
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
