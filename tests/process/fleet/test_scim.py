"""The SCIM receiver before an API server: what providers send, what an attacker sends, and two writers."""

from __future__ import annotations

import json
import os
import random
import secrets
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPSConnection
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import httpx2
import pytest
import scim2_tester.filling
from scim2_client.engines.httpx2 import SyncSCIMClient
from scim2_tester import check_server

from fleet.scim import server as receiver
from fleet.scim.filters import EXTENSION
from init.people.read import parse
from init.people.spec import has_access
from tests.kubernetes import programs
from tests.kubernetes.apiserver import ApiServer, api_server
from tests.support.people_files import ED, OTHER, ada, body, people
from tests.support.rendered_chart import render
from tests.support.scim_receiver import MORE, PEOPLE, TOKEN, Scim, SecretServer, serving
from tests.waiting import until


@pytest.fixture
def api() -> Iterator[SecretServer]:
    made = SecretServer()
    made.write("people", {})
    yield made
    made.http.shutdown()
    made.http.server_close()


@pytest.fixture
def scim(api: SecretServer, tmp_path: Path) -> Iterator[Scim]:
    with serving(api.url, "", tmp_path) as made:
        yield made


def names(api: SecretServer) -> list[str]:
    return [person.name for person in parse(api.file("people")).users]


def test_okta_s_requests(scim: Scim, api: SecretServer) -> None:
    assert scim.ask("GET", "Users?startIndex=1&count=2").json["totalResults"] == 0
    wanted = 'Users?filter=userName%20eq%20"carol@lab.org"&startIndex=1&count=100'
    assert scim.ask("GET", wanted).json["Resources"] == []
    profile: dict[str, Any] = {
               "name": {"givenName": "Carol", "familyName": "C"}, "displayName": "Carol C", "locale": "en-US",
               "emails": [{"primary": True, "value": "carol@lab.org", "type": "work"}], "externalId": "00u1",
               "groups": [], "password": "not held"}  # fmt: skip
    made = scim.user(**profile)
    assert (made.status, made.headers["Location"]) == (201, "/scim/v2/Users/u100000")
    assert made.json["meta"]["version"] == made.headers["ETag"]
    assert scim.ask("GET", wanted).json["Resources"][0]["id"] == "u100000"
    assert "not held" not in str(api.secrets)
    assert scim.ask("PUT", "Users/u100000", {**made.json, "active": False}).json["active"] is False
    assert scim.patch("Users/u100000", {"op": "replace", "value": {"active": True}}).json["active"] is True
    group = scim.group("Lab", "u100000")
    assert (group.status, group.json["displayName"]) == (201, "Lab")
    key = group.json["id"]
    rename = {"op": "replace", "value": {"id": key, "displayName": "Physics"}}
    assert scim.patch(f"Groups/{key}", rename).json["displayName"] == "Physics"
    assert scim.patch(f"Groups/{key}", {"op": "remove", "path": 'members[value eq "u100000"]'}).status == 200
    listed = scim.ask("GET", "Groups?startIndex=1&count=100").json["Resources"]
    assert [(item["displayName"], "members" in item) for item in listed] == [("Physics", False)]
    assert scim.ask("DELETE", f"Groups/{key}").status == 204
    assert names(api) == ["carol"]


def test_entra_s_requests(scim: Scim, api: SecretServer) -> None:
    assert scim.ask("GET", 'Users?filter=externalId+eq+"none"').json["totalResults"] == 0
    schemas = ["urn:ietf:params:scim:schemas:core:2.0:User",
               "urn:ietf:params:scim:schemas:extension:enterprise:2.0:User"]  # fmt: skip
    keys: dict[str, Any] = {EXTENSION: {"sshKeys": ED}}
    made = scim.user(schemas=schemas, externalId="carol", active="True", meta={"resourceType": "User"},
                     name={"formatted": "Carol C"}, roles=[], **keys)  # fmt: skip
    assert made.json["displayName"] == "Carol C" and made.json[EXTENSION]["sshKeys"] == [ED]
    off = {"op": "Replace", "path": "active", "value": "False"}
    assert scim.patch("Users/u100000", off).json["active"] is False
    assert not has_access(parse(api.file("people")).users[0], time.time())
    group = scim.ask("POST", "Groups", {"externalId": "8aa1", "displayName": "ml", "meta": {"resourceType": "Group"}})
    where = f"Groups/{group.json['id']}"
    assert scim.ask("GET", f"{where}?excludedAttributes=members").json["externalId"] == "8aa1"
    found = scim.ask("GET", 'Groups?excludedAttributes=members&filter=displayName+eq+"ML"').json
    assert found["totalResults"] == 1 and "members" not in found["Resources"][0]
    add = {"op": "Add", "path": "members", "value": [{"$ref": None, "value": "u100000"}]}
    assert scim.patch(where, add).json["members"][0]["value"] == "u100000"
    member = f'Groups?filter=id+eq+"{group.json["id"]}"+and+members+eq+"u100000"&attributes=id'
    assert scim.ask("GET", member).json["Resources"][0].keys() == {"schemas", "id"}
    assert scim.patch(where, {"op": "Remove", "path": "members", "value": [{"value": "u100000"}]}).status == 200
    assert scim.ask("GET", member).json["totalResults"] == 0
    assert scim.ask("DELETE", "Users/u100000").status == 204
    assert scim.ask("GET", "Users/u100000").status == 404
    assert scim.user(externalId="another").json["scimType"] == "uniqueness"


# Checks of the library that a Linux user cannot meet: a name and a uid that never change, access that is always said.
ELSEWHERE = {
    ("object_replacement", "a user's Linux name stays"),
    ("check_replace_attribute", "a user's Linux name stays"),
    ("check_replace_attribute", "a uid never changes"),
    ("check_add_attribute", "a uid never changes"),
    ("check_remove_attribute", "extension:minivm:2.0:User'"),
    ("check_remove_attribute", "'active'"),
    ("search_with_attributes", "Not Found"),  # POST .search, which no provider uses
}


def test_a_client_library_s_checks_pass(scim: Scim, monkeypatch: pytest.MonkeyPatch) -> None:
    def value(path: object) -> Any:
        match str(path).rpartition(":")[2].rpartition(".")[2].lower():
            case "username" | "displayname":
                return f"n{secrets.token_hex(6)}"
            case "uid":
                return random.randrange(200_000, 900_000)
            case "sshkeys":
                return body("ssh-ed25519", secrets.token_bytes(32))
        return None

    monkeypatch.setattr(scim2_tester.filling, "get_random_example_value", value)
    where = f"http://127.0.0.1:{scim.port}/scim/v2"
    with httpx2.Client(base_url=where, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=30) as http:
        client = SyncSCIMClient(http)
        client.discover()
        results = check_server(client)
    wrong = [
        f"{result.title}: {result.reason}"
        for result in results
        if result.status.name in ("ERROR", "CRITICAL")
        and not any(title == result.title and words in str(result.reason) for title, words in ELSEWHERE)
    ]
    assert not wrong
    assert len([result for result in results if result.status.name == "SUCCESS"]) > 50


def test_etags_keep_one_change_from_undoing_another(scim: Scim, api: SecretServer) -> None:
    etag = scim.user().headers["ETag"]
    assert scim.ask("GET", "Users/u100000", If_None_Match=etag).status == 304
    name = {"op": "replace", "path": "displayName", "value": "Carol"}
    assert scim.patch("Users/u100000", name, If_Match=etag).status == 200
    for answer in (
        scim.patch("Users/u100000", {**name, "value": "Other"}, If_Match=etag),
        scim.ask("PUT", "Users/u100000", {"userName": "carol"}, If_Match=etag),
        scim.ask("DELETE", "Users/u100000", If_Match=etag),
    ):
        assert (answer.status, answer.json["status"]) == (412, "412")
    assert parse(api.file("people")).users[0].gecos == "Carol"
    assert scim.ask("DELETE", "Users/u100000", If_Match="*").status == 204


def test_a_replay_changes_and_writes_nothing(scim: Scim, api: SecretServer) -> None:
    made = scim.user(externalId="c")
    name = {"op": "replace", "path": "displayName", "value": "Carol"}
    first = scim.patch("Users/u100000", name)
    before, puts = dict(api.secrets["people"]), api.puts
    assert scim.user(externalId="c").status == 409
    assert scim.patch("Users/u100000", name).json == first.json
    assert scim.ask("PUT", "Users/u100000", first.json).status == 200
    assert (api.secrets["people"], api.puts) == (before, puts)
    assert made.json["id"] == "u100000"


def test_two_writers_lose_nothing_of_each_other(api: SecretServer, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    with (
        serving(api.url, "", folders[0]) as one,
        serving(api.url, "", folders[1]) as two,
        ThreadPoolExecutor(8) as pool,
    ):

        def create(number: int) -> None:
            answer = (one, two)[number % 2].user(f"p{number}")
            while answer.status == 503:
                answer = (one, two)[number % 2].user(f"p{number}")
            assert answer.status == 201, answer

        list(pool.map(create, range(40)))
    users = parse(api.file("people")).users
    assert {person.name for person in users} == {f"p{number}" for number in range(40)}
    assert len({person.uid for person in users}) == 40


def test_a_hand_that_writes_between_loses_nothing(scim: Scim, api: SecretServer) -> None:
    def hand() -> None:
        api.between = lambda: None
        api.write_file("people", PEOPLE, people(ada(uid=100_000)))

    api.between = hand
    answer = scim.user()
    assert (answer.status, answer.json["id"]) == (201, "u100001"), "decided anew: the uid is ada's meanwhile"
    assert names(api) == ["ada", "carol"]
    api.between = lambda: api.write_file("people", "other", secrets.token_bytes(8))
    answer = scim.user("dave")
    assert answer.status == 503 and "other writers changed the Secret people 5 times" in answer.json["detail"]


def test_a_wrong_token_reads_and_writes_nothing(scim: Scim, api: SecretServer) -> None:
    before = dict(api.secrets["people"])
    for token in ("", "x", TOKEN[:-1], f"{TOKEN}x", TOKEN.upper(), f"\u00e9{TOKEN}".encode().decode("latin-1")):
        for method, where in (
            ("GET", "Users"),
            ("POST", "Users"),
            ("DELETE", "Users/u1"),
            ("GET", "/"),
            ("GET", "Schemas"),
        ):
            answer = scim.ask(method, where, {"userName": "mallory"} if method == "POST" else None, token=token)
            assert (answer.status, answer.json["status"]) == (401, "401")
    assert scim.ask("GET", "Users", Authorization=f"Basic {TOKEN}").status == 401
    assert scim.ask("GET", "Users", Authorization=f"bearer  {TOKEN}").status == 200
    assert api.secrets["people"] == before
    assert TOKEN not in "".join(scim.said)


def test_a_changed_token_counts_at_once_and_a_weak_one_never(scim: Scim) -> None:
    new = "another-token-0123456789abcdefghijkl"
    scim.token_file.write_text(f"{new}\n{TOKEN}\n")
    assert [scim.ask("GET", "Users", token=token).status for token in (new, TOKEN)] == [200, 200]
    scim.token_file.write_text(new)
    assert [scim.ask("GET", "Users", token=token).status for token in (new, TOKEN)] == [200, 401]
    for text in ("", "short", "short " + new):
        scim.token_file.write_text(text)
        answer = scim.ask("GET", "Users", token="short")
        assert answer.status == 503 and "at least 32 characters" in answer.json["detail"]
    scim.token_file.unlink()
    assert "cannot be read" in scim.ask("GET", "Users", token=new).json["detail"]


@pytest.mark.parametrize(
    "where",
    ["/", "/scim/v2", "/scim/v2/Users/../../../etc/passwd", "/scim/v2/Users/%2e%2e%2fpeople", "/scim/v2/Users/u1%00",
     "/scim/v2/Users/%ff", "/scim//v2/Users", "/scim/v2/users", "/scim/v2/Users/u1/x", "/api/v1/secrets",
     "//x/scim/v2/Users", "/scim/v2/Secrets/people", "/scim/v2/Groups/g100000", "/scim/v2/Users/g100000",
     "/scim/v2/Me"],
)  # fmt: skip
def test_a_path_leads_to_users_and_groups_alone(scim: Scim, where: str) -> None:
    assert scim.user().status == 201
    for method in ("GET", "DELETE"):
        answer = scim.ask(method, where)
        assert answer.status in (400, 404, 405), (where, answer)
    assert scim.ask("GET", "Users").json["totalResults"] == 1


@pytest.mark.parametrize(
    "text",
    [b"", b"[]", b"5", b"{", b'{"userName": ["x"]}', b'{"userName": {"a": 1}}', b"\xff\xfe", b"[" * 200_000,
     b"9" * 9000, b'{"userName": "\\ud800"}', b'{"userName": "x", "externalId": "\\n"}',
     b'{"userName": "x", "displayName": "\\u202e"}',
     b'{"userName": "x", "active": 1}', b'{"userName": "root"}', b'{"userName": "x", "externalId": 5}',
     json.dumps({"userName": "x", EXTENSION: {"sshKeys": ["ssh-rsa AAAA"]}}).encode(),
     json.dumps({"userName": "x", EXTENSION: {"sshKeys": [OTHER + "\n" + ED]}}).encode(),
     json.dumps({"userName": "x", EXTENSION: {"uid": 0}}).encode(),
     json.dumps({"userName": "x", EXTENSION: [1]}).encode()],
)  # fmt: skip
def test_a_hostile_body_is_refused_in_words(scim: Scim, api: SecretServer, text: bytes) -> None:
    answer = scim.ask("POST", "Users", text)
    assert answer.status == 400 and answer.json["scimType"] and answer.json["detail"], answer
    assert not api.puts


@pytest.mark.parametrize("number", ["--1", "-", "", "1e9", "%EF%BC%95", "9" * 5000])
def test_a_page_that_is_no_number_is_refused_in_words(scim: Scim, number: str) -> None:
    answer = scim.ask("GET", f"Users?startIndex={number}")
    assert answer.status == 400 and "wanted a whole number" in answer.json["detail"], answer


def test_bytes_are_bounded(scim: Scim, api: SecretServer) -> None:
    assert scim.ask("POST", "Users", b" " * ((1 << 20) + 1)).status == 413
    assert scim.ask("POST", "Users", b"\x1f\x8b", Content_Encoding="gzip").status == 415
    chunks = (
        f"POST /scim/v2/Users HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nTransfer-Encoding: chunked\r\n"
    )
    for start, more in (
        (f"{chunks}\r\n".encode(), b"10000\r\n" + b" " * 65536 + b"\r\n"),
        (b"GET /scim/v2/Users HTTP/1.1\r\n", b"X-A: " + b"a" * 4000 + b"\r\n"),
        (b"GET /", b"a" * 4000),
    ):
        with socket.create_connection(("127.0.0.1", scim.port), 30) as stream:
            stream.sendall(start)
            with pytest.raises(OSError, match=r"reset|[Bb]roken"):
                for _ in range(1 << 14):
                    stream.sendall(more)
    assert scim.user().status == 201
    assert "Traceback" not in "".join(scim.said), "no bug of the receiver"


def test_a_flood_of_connections_keeps_nobody_out(scim: Scim) -> None:
    """Connections without a token, that say nothing or only half, give way to one that has it."""
    streams = []
    for number in range(4 * receiver.MOST_CONNECTIONS):
        stream = socket.create_connection(("127.0.0.1", scim.port), 30)
        stream.sendall(b"POST /scim/v2/Users HTTP/1.1\r\nX: y\r\n" if number % 2 else b"")
        streams.append(stream)
    assert scim.user().status == 201
    assert scim.probe().status == 200
    assert scim.receiver and len(scim.receiver._connections) <= receiver.MOST_CONNECTIONS + 1
    for stream in streams:
        stream.close()


def test_a_slow_sender_is_cut(api: SecretServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiver, "CONNECTION_S", 0.5)
    head = f"POST /scim/v2/Users HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: 900\r\n\r\n{{"
    with serving(api.url, "", tmp_path) as scim:
        for text in ("", "POST /scim", head):
            with socket.create_connection(("127.0.0.1", scim.port), 30) as stream:
                stream.sendall(text.encode())
                ended = b"?"
                try:
                    ended = stream.recv(10)
                except ConnectionError:
                    ended = b""
                assert ended == b""
    assert not api.puts


def test_a_flood_of_requests_ends(scim: Scim, api: SecretServer) -> None:
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda number: scim.user(f"p{number % 10}").status, range(100)))
    assert sorted(set(answers)) == [201, 409] and answers.count(201) == 10
    assert len(names(api)) == 10
    assert 'minivm_scim_answers_total{status="201"} 10' in scim.probe("/metrics").text.decode()


def test_an_absent_or_damaged_secret_is_told_and_not_written_over(scim: Scim, api: SecretServer) -> None:
    until(lambda: scim.probe().status == 200, "ready")
    api.write_file("people", PEOPLE, b"users: [")
    answer = scim.user()
    assert answer.status == 503 and "people.yaml is refused" in answer.json["detail"]
    assert answer.headers["Retry-After"] == "5"
    assert api.file("people") == b"users: ["
    api.write_file("people", PEOPLE, b"")
    api.write_file("people", MORE, b"{}}")
    assert "scim.json is damaged" in scim.user().json["detail"]
    api.secrets.clear()
    assert "kubectl create secret generic people" in scim.user().json["detail"]


def test_a_secret_that_is_full_takes_no_more(scim: Scim, api: SecretServer) -> None:
    api.write_file("people", "other", b"x" * ((1 << 20) - 100))
    assert scim.user().status == 413
    assert not api.puts


def read_certificate_end(scim: Scim) -> float:
    name = "minivm_scim_certificate_end_timestamp_seconds "
    (line,) = [line for line in scim.probe("/metrics").text.decode().splitlines() if line.startswith(name)]
    return float(line.removeprefix(name))


def certify(folder: Path, days: int = 1) -> None:
    command = f"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days {days} -subj /CN=x"
    files = ("-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(folder / "tls.key"))
    subprocess.run([*command.split(), *files, "-out", str(folder / "tls.crt")], check=True, capture_output=True)


def ask_by_tls(port: int, folder: Path) -> int:
    trust = ssl.create_default_context(cafile=folder / "tls.crt")
    trust.verify_flags &= ~ssl.VERIFY_X509_STRICT
    http = HTTPSConnection("127.0.0.1", port, context=trust, timeout=30)
    http.request("GET", "/scim/v2/Users", headers={"Authorization": f"Bearer {TOKEN}"})
    return http.getresponse().status


def test_a_mounted_certificate_serves_https_and_is_renewed(api: SecretServer, tmp_path: Path) -> None:
    certify(tmp_path)
    with serving(api.url, "", tmp_path, tls=tmp_path) as scim:
        assert ask_by_tls(scim.port, tmp_path) == 200
        first = read_certificate_end(scim)
        assert first == pytest.approx(time.time() + 86400, abs=600)
        certify(tmp_path, days=9)
        assert ask_by_tls(scim.port, tmp_path) == 200
        assert read_certificate_end(scim) - first == pytest.approx(8 * 86400, abs=600)
        (tmp_path / "tls.key").write_text("no key")
        assert ask_by_tls(scim.port, tmp_path) == 200, "the one before serves on"
        assert "is not loaded" in "".join(scim.said)


def test_connections_that_begin_no_handshake_are_bounded(
    api: SecretServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each costs the receiver memory before TLS has said anything."""
    monkeypatch.setattr(receiver, "HANDSHAKE_S", 600.0)
    certify(tmp_path)
    with serving(api.url, "", tmp_path, tls=tmp_path) as scim:
        streams = [socket.create_connection(("127.0.0.1", scim.port), 30) for _ in range(4 * receiver.MOST_CONNECTIONS)]
        assert ask_by_tls(scim.port, tmp_path) == 200
        for stream in streams:
            stream.setblocking(False)

        def is_open(stream: socket.socket) -> bool:
            try:
                return bool(stream.recv(1))
            except BlockingIOError:
                return True
            except ConnectionResetError:
                return False

        until(lambda: sum(map(is_open, streams)) <= receiver.MOST_CONNECTIONS, "the oldest end")
        for stream in streams:
            stream.close()


KINDS = {"ServiceAccount": "/api/v1/{}/serviceaccounts", "Role": "/apis/rbac.authorization.k8s.io/v1/{}/roles",
         "RoleBinding": "/apis/rbac.authorization.k8s.io/v1/{}/rolebindings"}  # fmt: skip


@pytest.fixture(scope="module")
def kubernetes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    if not programs.built():
        pytest.skip("no API server is built: make kube-up")
    with api_server(programs.build(), tmp_path_factory.mktemp("api")) as made:
        values = {"people": {"existingSecret": "people", "scim": {"enabled": True, "tokenSecret": "token"}}}
        for item in render(values, release="slurm", namespace="default"):
            if item["kind"] in KINDS and item["metadata"]["name"] == "slurm-scim":
                made.ask("POST", KINDS[item["kind"]].format("namespaces/default"), item)
        for name in ("people", "other"):
            made.ask("POST", "/api/v1/namespaces/default/secrets", {"metadata": {"name": name}})
        yield made


@pytest.mark.timeout(600)
def test_the_chart_s_rights_are_enough_at_a_real_api_server(kubernetes: ApiServer, tmp_path: Path) -> None:
    path = "/api/v1/namespaces/default/serviceaccounts/slurm-scim/token"
    asked = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"audiences": None}}
    token = kubernetes.ask("POST", path, asked)["status"]["token"]
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    with serving(kubernetes.url, token, folders[0], namespace="default") as one:
        assert one.user().status == 201
        with serving(kubernetes.url, token, folders[1], namespace="default") as two, ThreadPoolExecutor(4) as pool:

            def create(number: int) -> int:
                scim = (one, two)[number % 2]
                while (answer := scim.user(f"p{number}")).status == 503:
                    pass
                return answer.status

            assert set(pool.map(create, range(12))) == {201}
        assert one.ask("GET", "Users").json["totalResults"] == 13
    kept, kubernetes.token = kubernetes.token, token
    secrets_ = "/api/v1/namespaces/default/secrets"
    try:
        for method, where in (
            ("GET", "/other"),
            ("GET", ""),
            ("DELETE", "/people"),
            ("POST", ""),
            ("PATCH", "/people"),
        ):
            with pytest.raises(HTTPError, match="403"):
                kubernetes.ask(method, secrets_ + where, {}, kind="application/merge-patch+json")
    finally:
        kubernetes.token = kept


def test_the_command_says_what_it_lacks() -> None:
    env = {**os.environ, "MINIVM_POD_NAMESPACE": "hpc", "MINIVM_SCIM_FIRST": "100000"}
    command = [sys.executable, "-m", "fleet", "scim"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ") and "MINIVM_SCIM_SECRET" in done.stderr
