"""A signed apt repository of small stand-in packages, made by a test and served on loopback.

Stand-ins prove mechanics: which repository a package comes from, that checksums and keys hold, that what is installed
where. They prove nothing of the real packages, and no test may claim it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

EPOCH = 1_700_000_000


@dataclass(frozen=True, slots=True)
class Standin:
    """A package of a few files. A script or a binary becomes executable; a value `-> x` becomes a link."""

    name: str
    version: str = "1.0"
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    depends: str = ""
    arch: str = "amd64"


def run(command: Sequence[str | Path], **options: object) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload]  # options are subprocess.run's own
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return str(done.stdout)


def put(root: Path, files: Mapping[str, str | bytes]) -> None:
    for name, content in files.items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        data = content.encode() if isinstance(content, str) else content
        if data.startswith(b"-> "):
            path.symlink_to(data.decode().removeprefix("-> "))
        else:
            path.write_bytes(data)
            path.chmod(0o755 if data.startswith((b"#!", b"\x7fELF")) else 0o644)


def build(package: Standin, target: Path, scratch: Path) -> Path:
    """Build one .deb, with the same bytes each time."""
    tree = scratch / f"{package.name}_{package.version}"
    fields = {
        "Package": package.name,
        "Version": package.version,
        "Architecture": package.arch,
        "Maintainer": "Stand-In <stand-in@test.invalid>",
        "Depends": package.depends,
        "Description": "a stand-in of a test",
    }
    put(tree, {"DEBIAN/control": "".join(f"{key}: {value}\n" for key, value in fields.items() if value)})
    put(tree, package.files)
    if any(".so" in name for name in package.files):
        put(tree, {"DEBIAN/triggers": "activate-noawait ldconfig\n"})
    run(
        ["dpkg-deb", "--build", "--root-owner-group", "-Znone", tree, target],
        env={**os.environ, "SOURCE_DATE_EPOCH": str(EPOCH)},
    )
    shutil.rmtree(tree)
    return target / f"{package.name}_{package.version.rpartition(':')[2]}_{package.arch}.deb"


class Key:
    """A signing key of its own, in a home of its own; `stop` ends the agent that gpg started for it."""

    def __init__(self, home: Path) -> None:
        home.mkdir(mode=0o700, parents=True)
        self.env = {**os.environ, "GNUPGHOME": str(home)}
        run(
            ["gpg", "--batch", "--passphrase", "", "--quick-gen-key", "Stand-In <x@test.invalid>", "ed25519", "sign"],
            env=self.env,
        )

    def public(self) -> str:
        return run(["gpg", "--batch", "--armor", "--export"], env=self.env)

    def sign(self, release: Path) -> None:
        run(
            ["gpg", "--batch", "--yes", "--clearsign", "-o", release.with_name("InRelease"), release],
            env=self.env,
        )

    def stop(self) -> None:
        run(["gpgconf", "--kill", "gpg-agent"], env=self.env)


def repository(root: Path, packages: Iterable[Standin], key: Key, suite: str = "", scratch: Path | None = None) -> None:
    """Write a repository under `root`: flat as NVIDIA's are, or, with a suite, dists/ and pool/ as a distribution's."""
    pool = root / "pool/main" if suite else root
    pool.mkdir(parents=True, exist_ok=True)
    workspace = scratch or root.with_name(f"{root.name}.work")
    for package in packages:
        build(package, pool, workspace)
    dist = root / "dists" / suite if suite else root
    index = dist / "main/binary-amd64" if suite else root
    index.mkdir(parents=True, exist_ok=True)
    (index / "Packages").write_text(run(["apt-ftparchive", "packages", "pool/main" if suite else "."], cwd=root))
    release = dist / "Release"
    options = {"Origin": "stand-in", "Architectures": "amd64"}
    if suite:
        options |= {"Suite": suite, "Codename": suite, "Components": "main"}
    switches = [part for name, value in options.items() for part in ("-o", f"APT::FTPArchive::Release::{name}={value}")]
    release.unlink(missing_ok=True)
    (dist / "InRelease").unlink(missing_ok=True)
    text = run(["apt-ftparchive", *switches, "release", "."], cwd=dist)
    release.write_text(text)
    key.sign(release)


class Handler(SimpleHTTPRequestHandler):
    """Serves a directory and remembers what was asked for."""

    protocol_version = "HTTP/1.1"

    def __init__(self, *arguments: object, asked: list[str], **options: object) -> None:
        self.asked = asked
        super().__init__(*arguments, **options)  # type: ignore[arg-type]  # the server's own arguments

    def do_GET(self) -> None:
        self.asked.append(self.path)
        super().do_GET()

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing on the terminal: `asked` is the log."""


@dataclass(frozen=True, slots=True)
class Site:
    """A directory on the web."""

    root: Path
    url: str
    asked: list[str]


@contextlib.contextmanager
def served(root: Path, host: str = "127.0.0.1") -> Iterator[Site]:
    asked: list[str] = []
    server = ThreadingHTTPServer((host, 0), partial(Handler, directory=str(root), asked=asked))
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield Site(root, f"http://{host}:{server.server_address[1]}", asked)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
