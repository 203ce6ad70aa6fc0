"""Pushing, for real: Debian's docker-registry on loopback, with a login, killed half way, and on a full disk."""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import json
import os
import random
import shutil
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml

from ground.version import VERSION
from images import ImagesError
from images.cli.release import CHANGELOG, CHART, STATED, list_followers
from images.cli.session import Session
from images.engine.docker import DockerEngine
from images.settings import BuildSettings
from images.ship.provenance import NAMESPACE
from images.ship.push import Event, Pushed, push
from images.ship.registry import Blob, Login, Registry, RegistryError
from tests.container import definition
from tests.container.registryd import PUSHER, REPOSITORY, Registryd
from tests.container.world import root_image
from tests.waiting import until

pytestmark = [pytest.mark.docker, pytest.mark.root]


@pytest.fixture
def registryd(tmp_path: Path) -> Iterator[Registryd]:
    daemon = Registryd(tmp_path / "registry")
    daemon.start()
    yield daemon
    daemon.kill()


class Tokens:
    """A token server, as the large registries have one: a password buys a short-lived, signed permission."""

    def __init__(self, root: Path) -> None:
        root.mkdir()
        self.key, self.certificate = root / "key.pem", root / "certificate.pem"
        command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=test", "-days", "2"]
        paths = ["-keyout", str(self.key), "-out", str(self.certificate)]
        subprocess.run([*command, *paths], check=True, capture_output=True)
        self.scopes: list[str] = []
        tokens = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                tokens.answer(self)

            def do_POST(self) -> None:
                """Newer engines try OAuth's way first; the registry that has only the older one says so."""
                self.send_error(405)

            def log_message(self, format: str, *arguments: object) -> None:
                """Quiet."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True)
        self.thread.start()

    def settings(self) -> Mapping[str, Any]:
        port = self.server.server_address[1]
        where = {"realm": f"http://127.0.0.1:{port}/token", "service": "test", "issuer": "test"}
        return {"token": {**where, "rootcertbundle": str(self.certificate)}}

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        if request.headers.get("Authorization") != PUSHER.basic():
            request.send_error(401)
            return
        query = parse_qs(urlsplit(request.path).query)
        self.scopes += query.get("scope", [])
        access = []
        for scope in query.get("scope", []):
            kind, name, actions = scope.split(":")
            access.append({"type": kind, "name": name, "actions": actions.split(",")})
        body = json.dumps({"token": self.token(access)}).encode()
        request.send_response(200)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)

    def token(self, access: Sequence[Mapping[str, Any]]) -> str:
        """Make a JSON web token, signed by openssl."""

        def part(value: object) -> bytes:
            return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=")

        der = "".join(self.certificate.read_text().splitlines()[1:-1])
        now = int(time.time())
        claims = {"iss": "test", "sub": "pusher", "aud": "test", "exp": now + 300, "nbf": now - 60, "access": access}
        text = part({"typ": "JWT", "alg": "RS256", "x5c": [der]}) + b"." + part(claims)
        command = ["openssl", "dgst", "-sha256", "-sign", str(self.key)]
        signed = subprocess.run(command, input=text, check=True, capture_output=True).stdout
        return (text + b"." + base64.urlsafe_b64encode(signed).rstrip(b"=")).decode()

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def engine() -> Iterator[DockerEngine]:
    engine = DockerEngine()
    yield engine
    engine.client.close()


def saved(layers: Sequence[bytes], reference: str) -> bytes:
    """Make an image as `docker load` takes it: one file a layer."""

    def tar(files: Mapping[str, bytes]) -> bytes:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            for name, data in files.items():
                info = tarfile.TarInfo(name)
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
        return buffer.getvalue()

    tars = [tar({f"file{number}": data}) for number, data in enumerate(layers)]
    config: dict[str, Any] = {
        "architecture": "amd64",
        "os": "linux",
        "config": {},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(data).hexdigest()}" for data in tars]},
        "history": [{"created_by": "test"} for _ in tars],
    }
    paths = [f"{number}/layer.tar" for number in range(len(tars))]
    manifest = [{"Config": "config.json", "RepoTags": [reference], "Layers": paths}]
    return tar(
        {
            "config.json": json.dumps(config).encode(),
            **dict(zip(paths, tars, strict=True)),
            "manifest.json": json.dumps(manifest).encode(),
        }
    )


@pytest.fixture
def image(engine: DockerEngine, tmp_path: Path) -> Iterator[Callable[[Sequence[int], str], str]]:
    """Make an image with a layer of each size, of bytes that are unique to the test and do not compress."""
    made: list[str] = []
    noise = random.Random(str(tmp_path))

    def make(sizes: Sequence[int], name: str = "image") -> str:
        reference = f"minivm-test-push-{name}:{noise.getrandbits(64):016x}"
        engine.load(saved([noise.randbytes(size) for size in sizes], reference))
        made.append(reference)
        return reference

    yield make
    for reference in made:
        engine.untag(reference)


Image = Callable[..., str]


def send(engine: DockerEngine, source: str, daemon: Registryd, login: Login | None = PUSHER, **options: Any) -> Pushed:
    return push(engine, source, daemon.place, REPOSITORY, "1", login, **options)


def is_absent(daemon: Registryd, tag: str = "1") -> bool:
    try:
        Registry(daemon.place, REPOSITORY, PUSHER).read_manifest(tag)
    except RegistryError as error:
        return error.status == 404
    return False


def test_a_pushed_image_is_there_by_digest_and_runs_from_there(
    engine: DockerEngine, registryd: Registryd, image: Image
) -> None:
    source = image([1000, 2000, 3000])
    pushed = send(engine, source, registryd)
    assert (pushed.sent, pushed.present) == (3, 0)
    assert pushed.reference == f"127.0.0.1:{registryd.port}/site/{REPOSITORY}@{pushed.digest}"
    assert not engine.has(pushed.tag), "the name lent for the push is still there"
    engine.api.pull(pushed.reference, auth_config=PUSHER.for_engine())
    try:
        assert engine.image_id(pushed.reference) == engine.image_id(source)
    finally:
        engine.untag(pushed.reference)


def test_a_second_push_sends_nothing(engine: DockerEngine, registryd: Registryd, image: Image) -> None:
    source = image([1000, 2000])
    first = send(engine, source, registryd)
    before = registryd.uploads()
    second = send(engine, source, registryd)
    assert (second.sent, second.present, second.digest) == (0, 2, first.digest)
    assert registryd.uploads() == before


def test_layers_read_back_once_are_only_looked_up_the_next_time(
    engine: DockerEngine, registryd: Registryd, image: Image
) -> None:
    seen: set[Blob] = set()
    send(engine, image([1000, 2000]), registryd, seen=seen)
    assert len(seen) == 2
    source = image([500])
    send(engine, source, registryd, seen=seen)
    assert len(seen) == 3
    # Two configurations and three layers; the registry writes its log after its answer.
    until(lambda: read_back(registryd) == 5, "five blobs were read")
    send(engine, source, registryd, seen=seen)
    until(lambda: read_back(registryd) > 5, "the configuration was read")
    assert read_back(registryd) == 6


def read_back(daemon: Registryd) -> int:
    """Count the blobs that minivm read; engines read existing blobs too."""
    lines = (daemon.root / "log").read_text().splitlines()
    return sum(f'"GET /v2/site/{REPOSITORY}/blobs/' in line and "Python-urllib" in line for line in lines)


@pytest.mark.parametrize(
    ("login", "words"),
    [
        (Login("pusher", "wrong battery"), "it refuses the password of user 'pusher'"),
        (None, "it wants a login, and there is none"),
    ],
    ids=["wrong password", "no login"],
)
def test_without_the_right_password_nothing_is_pushed_and_the_error_says_why(
    engine: DockerEngine, registryd: Registryd, image: Image, login: Login | None, words: str
) -> None:
    with pytest.raises(ImagesError) as caught:
        send(engine, image([1000]), registryd, login)
    text = str(caught.value)
    assert f"cannot push 127.0.0.1:{registryd.port}/site/{REPOSITORY}:1" in text
    assert words in text
    assert "battery" not in text
    assert is_absent(registryd)


def test_a_registry_that_restarts_in_the_middle_costs_a_pause(
    engine: DockerEngine, registryd: Registryd, image: Image
) -> None:
    killed: list[str] = []

    def tell(event: Event) -> None:
        if event.get("status") == "Pushed" and not killed:
            killed.append(event["id"])
            registryd.kill()
        elif str(event.get("status", "")).startswith("Retrying") and registryd.process is None:
            registryd.start()

    pushed = send(engine, image([10_000, *[2_000_000] * 7]), registryd, tell=tell)
    assert killed, "the registry was never taken away"
    assert pushed.sent + pushed.present == 8


def test_a_registry_that_went_away_is_named_and_the_next_push_sends_only_the_rest(
    engine: DockerEngine, registryd: Registryd, image: Image
) -> None:
    source = image([10_000, *[2_000_000] * 7])

    def tell(event: Event) -> None:
        if event.get("status") == "Pushed":
            registryd.kill()

    with pytest.raises(ImagesError) as caught:
        send(engine, source, registryd, retries=0, tell=tell)
    assert "Connection refused" in str(caught.value)
    assert "of 8 layers are there: the same command sends only the rest" in str(caught.value)
    arrived = registryd.uploads()

    registryd.start()
    assert is_absent(registryd), "half a push is visible under its tag"
    pushed = send(engine, source, registryd)
    assert pushed.present >= 1
    assert pushed.sent >= 1
    assert pushed.sent + pushed.present == 8
    assert registryd.uploads() - arrived == pushed.sent + 1  # and the configuration


def test_a_full_disk_is_named_and_leaves_no_tag(engine: DockerEngine, tmp_path: Path, image: Image) -> None:
    daemon = Registryd(tmp_path / "small", size="3m")
    daemon.start()
    try:
        with pytest.raises(ImagesError, match="no space left on the registry's disk"):
            send(engine, image([1_000_000] * 8), daemon, retries=0)
        assert is_absent(daemon)
    finally:
        daemon.kill()


def test_a_registry_with_a_token_server(engine: DockerEngine, tmp_path: Path, image: Image) -> None:
    tokens = Tokens(tmp_path / "tokens")
    daemon = Registryd(tmp_path / "registry", auth=tokens.settings())
    daemon.start()
    try:
        source = image([1000, 2000])
        with pytest.raises(ImagesError, match="it refuses the password of user 'pusher'"):
            send(engine, source, daemon, Login("pusher", "wrong battery"))
        assert tokens.scopes == []
        pushed = send(engine, source, daemon)
        assert (pushed.sent, pushed.present) == (2, 0)
        assert f"repository:site/{REPOSITORY}:pull,push" in tokens.scopes
    finally:
        daemon.kill()
        tokens.stop()


def test_what_the_registry_changed_is_noticed(engine: DockerEngine, registryd: Registryd, image: Image) -> None:
    """A registry that gives back other bytes than it got: seen although it says that the layer exists."""
    source = image([1000])
    first = send(engine, source, registryd)
    (blob,) = Registry(registryd.place, REPOSITORY, PUSHER).read_manifest(first.digest).layers
    name = blob.digest.removeprefix("sha256:")
    path = registryd.storage / f"docker/registry/v2/blobs/sha256/{name[:2]}/{name}/data"
    data = path.read_bytes()
    # An engine with containerd's image store sends a layer as it was loaded, the others pack it.
    data = gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data
    path.write_bytes(gzip.compress(data.replace(b"file0", b"file1"), mtime=0))
    with pytest.raises(ImagesError, match="cannot trust"):
        send(engine, source, registryd)


def test_a_registry_that_is_not_there(engine: DockerEngine, registryd: Registryd, image: Image) -> None:
    registryd.kill()
    with pytest.raises(ImagesError, match="Connection refused"):
        send(engine, image([1000]), registryd, retries=0)


@pytest.fixture
def small_role(engine: DockerEngine, tmp_path: Path) -> Iterator[Path]:
    """Make a repository with one built role: the root image under another name."""
    root = definition.copy(tmp_path / "repository", "root")
    shutil.copytree(definition.ROOT / "images/lock", root / "images/lock")
    shutil.copyfile(definition.ROOT / "build.py", root / "build.py")
    session = Session.open(root, BuildSettings(prefix=f"{definition.PREFIX}-push"))
    below = session.compose([definition.ROLE]).images["layer:root"].reference
    engine.tag(root_image(engine), below)
    definition.rebuild(session)
    yield root
    definition.remove(session)


@pytest.mark.cluster
def test_the_command_line_takes_the_password_from_standard_input_and_shows_it_nowhere(
    registryd: Registryd, small_role: Path
) -> None:
    command = [sys.executable, "build.py", "--set", f"prefix={definition.PREFIX}-push", "push", definition.ROLE]
    command += ["--registry", f"127.0.0.1:{registryd.port}/site", "--json", "--user", PUSHER.user, "--password-stdin"]
    env = {**os.environ, "PYTHONPATH": str(definition.ROOT)}

    def call(password: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd=small_role, env=env, input=password + "\n", capture_output=True, text=True)

    wrong = call("wrong battery")
    assert wrong.returncode == 1
    assert "it refuses the password of user 'pusher'" in wrong.stderr
    right = call(PUSHER.password)
    assert right.returncode == 0, right.stderr
    (pushed,) = json.loads(right.stdout)
    assert pushed["image"] == f"127.0.0.1:{registryd.port}/site/{definition.ROLE}@{pushed['digest']}"
    for text in (wrong.stdout, wrong.stderr, right.stdout, right.stderr):
        assert "battery" not in text
        assert PUSHER.password not in text


@pytest.mark.cluster
def test_a_release_is_pushed_with_its_chart_and_finished_where_it_was_cut(
    registryd: Registryd, small_role: Path, tmp_path: Path
) -> None:
    """The whole `build.py release` of a small checkout, first with a password that the registry refuses."""
    shutil.copytree(definition.ROOT / CHART, small_role / CHART)
    for file in (CHANGELOG, *STATED):
        (small_role / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(definition.ROOT / file, small_role / file)
    changes = (small_role / CHANGELOG).read_text().replace("\n## Unreleased\n", "\n## Unreleased\n\n- A change.\n", 1)
    (small_role / CHANGELOG).write_text(changes)
    (small_role / ".gitignore").write_text("/build/\n__pycache__/\n")
    key = tmp_path / "builder"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    signers = tmp_path / "signers"
    signers.write_text(f'builder@site namespaces="{NAMESPACE}" {key.with_suffix(".pub").read_text()}')
    place = f"127.0.0.1:{registryd.port}/site"
    env = {**os.environ, "PYTHONPATH": str(definition.ROOT), "MINIVM_REGISTRY_USER": PUSHER.user}
    env |= {"GIT_COMMITTER_NAME": "m", "GIT_COMMITTER_EMAIL": "m@site"}
    env |= {"GIT_AUTHOR_NAME": "m", "GIT_AUTHOR_EMAIL": "m@site"}
    for words in (["init", "--quiet"], ["add", "--all"], ["commit", "--quiet", "--message", "make everything"]):
        subprocess.run(["git", *words], cwd=small_role, env=env, check=True)

    def call(*words: str, password: str = PUSHER.password) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "build.py", "--set", f"prefix={definition.PREFIX}-push", *words]
        login = env | {"MINIVM_REGISTRY_PASSWORD": password}
        return subprocess.run(command, cwd=small_role, env=login, capture_output=True, text=True)

    version = list_followers(VERSION)[0]
    release = ("release", version, "--registry", place, "--sign", str(key))
    cut = call(*release, password="wrong battery")
    assert cut.returncode == 1 and "it refuses the password of user 'pusher'" in cut.stderr
    done = call(*release)
    assert done.returncode == 0, done.stderr
    assert f"found the commit of {version}\nfound the tag v{version}\n" in done.stdout
    digests = yaml.safe_load((small_role / f"build/release/{version}.yaml").read_text())["image"]["digests"]
    assert list(digests) == [definition.ROLE]
    for reference in (f"{place}/{definition.ROLE}@{digests[definition.ROLE]}", f"{place}/minivm:{version}"):
        verified = call("verify", reference, "--signers", str(signers))
        assert verified.returncode == 0, verified.stderr
