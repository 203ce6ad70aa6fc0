"""Machines before a real API server: their kind as the chart has it, what people may write, and how the fleet does."""

from __future__ import annotations

import base64
import contextlib
import json
import ssl
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from fleet import FleetError, crd
from fleet.act import changes
from fleet.act.api_client import ApiClient
from fleet.decide.actions import Annotate, Cordon, Fence, Make, Protect, Record, ShowOnNode, StartJob, Withdraw
from fleet.report.events import EventRateLimit, events
from fleet.world.kubernetes import KubeCondition, KubernetesView
from fleet.world.machine import HistoryEntry, MachineObject, MachineStatus, Remedy, parse_machine
from tests.kubernetes import programs
from tests.kubernetes.apiserver import ApiServer, Object, api_server, install
from tests.kubernetes.fleet_api import do, refused
from tests.waiting import until

pytestmark = pytest.mark.timeout(3600)

MACHINES = f"/apis/{crd.GROUP}/{crd.VERSION}/namespaces/default/{crd.PLURAL}"
EVENTS = "/api/v1/namespaces/default/events"
WEBHOOKS = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"
NODE = "/api/v1/nodes/n0"
FULL = MachineStatus(
    goal="drain",
    state="Drained",
    why="a person",
    node="n0",
    node_uid="u0",
    boot="b",
    provider="cloud:///a",
    gpus=("GPU-1",),
    worker="w0",
    verdict="ecc[rma]@1 x",
    ill=True,
    repeats=1,
    history=(HistoryEntry(1_795_000_000, "verdict", "ecc[rma]@1 x"), HistoryEntry(1_795_000_001, "well")),
    remedy=Remedy("reboot", 1, 1_795_000_000, "b", True),
    remedies=1,
    fulfilled=2,
)


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    if not programs.built() and (why := programs.refusal()):
        pytest.skip(f"no Kubernetes: {why}")
    with api_server(programs.build(), tmp_path_factory.mktemp("machines")) as api:
        install(api)
        api.ask("POST", "/api/v1/nodes", {"metadata": {"name": "n0"}})
        yield api


@pytest.fixture
def name(api: ApiServer, request: pytest.FixtureRequest) -> Iterator[str]:
    made = f"n0-{abs(hash(request.node.name)) % 10**8}"
    assert do(api, lambda fleet: changes.apply_change(fleet, Make(made, "n0")))
    yield made
    api.ask("DELETE", f"{MACHINES}/{made}")


def read(api: ApiServer, name: str) -> MachineObject:
    return parse_machine(api.ask("GET", f"{MACHINES}/{name}"))


def note(api: ApiServer, seen: MachineObject, status: MachineStatus) -> bool:
    return do(api, lambda fleet: changes.apply_change(fleet, Record(seen.name, seen.version, status)))


def test_what_is_noted_is_read_back_and_what_is_over_goes(api: ApiServer, name: str) -> None:
    """Every field passes the schema: one that the API server does not know it would drop without a word."""
    assert note(api, read(api, name), FULL)
    assert read(api, name).status == FULL
    less = replace(FULL, remedy=None, worker="", gpus=())
    assert note(api, read(api, name), less)
    assert read(api, name).status == less


def test_a_note_on_what_has_changed_meanwhile_does_nothing(api: ApiServer, name: str) -> None:
    seen = read(api, name)
    api.merge(f"{MACHINES}/{name}", {"spec": {"goal": "drain", "reason": "fan 3"}})
    assert not note(api, seen, FULL)
    before = read(api, name)
    api.ask("DELETE", f"{MACHINES}/{name}")
    assert not note(api, before, FULL), "it is no more"
    assert do(api, lambda fleet: changes.apply_change(fleet, Make(name, "n0")))
    assert not note(api, before, FULL), "it is another one"
    seen = read(api, name)
    api.merge(f"{MACHINES}/{name}", {"spec": {"goal": "drain", "reason": "fan 3"}})
    found = read(api, name)
    assert (found.goal, found.status) == ("drain", MachineStatus())
    assert found.generation == seen.generation + 1, "what people want is counted"
    assert note(api, found, FULL)
    assert read(api, name).generation == found.generation, "and what the fleet notes is not"
    assert read(api, name).goal == "drain"


def test_made_twice_it_is_made_once(api: ApiServer, name: str) -> None:
    uid = read(api, name).uid
    assert not do(api, lambda fleet: changes.apply_change(fleet, Make(name, "n0")))
    assert read(api, name).uid == uid
    labels = api.ask("GET", f"{MACHINES}/{name}")["metadata"]["labels"]
    assert labels == {"app.kubernetes.io/name": "minivm", "app.kubernetes.io/instance": "slurm"}


def test_a_remedys_job_is_started_once_and_noted(api: ApiServer, name: str) -> None:
    api.merge(f"{MACHINES}/{name}", {"spec": {"goal": "reboot", "reason": "$(rm -rf /) `x`"}})
    template = {"template": {"spec": {"containers": [{"name": "x", "image": "x", "command": ["true"]}]}}}
    after = replace(FULL, remedies=1)
    for _ in range(2):
        seen = read(api, name)
        job = StartJob(f"{name}-1", "n7", seen, "reboot", seen.reason, template, True, after)
        assert do(api, partial(changes.apply_change, change=job))
    assert read(api, name).status == after
    jobs = api.ask("GET", "/apis/batch/v1/namespaces/default/jobs")["items"]
    (found,) = [one for one in jobs if one["metadata"]["name"] == f"{name}-1"]
    (owner,) = found["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"], owner["uid"]) == ("Machine", name, seen.uid)
    pod = found["spec"]["template"]["spec"]
    told = {one["name"]: one["value"] for one in pod["containers"][0]["env"]}
    assert told == {
        "MINIVM_MACHINE": name, "MINIVM_NODE": "n7", "MINIVM_GOAL": "reboot", "MINIVM_REASON": "$$(rm -rf /) `x`",
    }  # fmt: skip
    assert (pod["nodeName"], pod["containers"][0]["command"], pod["restartPolicy"]) == ("n7", ["true"], "Never")


def test_a_nodes_annotations_are_asked_for_and_taken_away_on_what_was_seen(api: ApiServer) -> None:
    made = api.ask("POST", "/api/v1/nodes", {"metadata": {"name": "n7", "annotations": {"others": "stay"}}})
    uid, version = made["metadata"]["uid"], made["metadata"]["resourceVersion"]
    asked = Annotate("n7", uid, version, (("reboot.example/please", "now"), ("minivm.io/remedy", "m/1")))
    assert do(api, lambda fleet: changes.apply_change(fleet, asked))
    assert not do(api, lambda fleet: changes.apply_change(fleet, asked)), "it has changed since"
    found = api.ask("GET", "/api/v1/nodes/n7")["metadata"]
    assert {"others": "stay", "reboot.example/please": "now"}.items() <= found["annotations"].items()
    names = ("reboot.example/please", "minivm.io/remedy", "minivm.io/remedy-reason")
    away = Withdraw("n7", uid, found["resourceVersion"], names)
    assert do(api, lambda fleet: changes.apply_change(fleet, away))
    assert api.ask("GET", "/api/v1/nodes/n7")["metadata"]["annotations"] == {"others": "stay"}


@pytest.mark.parametrize("spec", [{"goal": "sleep"}, {"goal": 1}, {"goal": "drain", "reason": "a\nb"}])
def test_a_goal_that_is_none_is_refused_at_once(api: ApiServer, name: str, spec: Object) -> None:
    assert "spec." in refused(api, f"{MACHINES}/{name}", {"spec": spec})


def test_what_is_noted_of_one_is_an_event_of_it_and_not_again_on_the_next_look(api: ApiServer, name: str) -> None:
    before, often = read(api, name), EventRateLimit()
    note_of_it = Record(name, before.version, FULL)

    def told(seen: MachineObject, change: Record) -> int:
        found = events([change], KubernetesView(machines={name: seen}), "default", 30, often, 0.0)
        for one in found:
            do(api, partial(_tell, one))
        return len(found)

    assert note(api, before, FULL)
    assert told(before, note_of_it) == 1
    (event,) = api.ask("GET", f"{EVENTS}?fieldSelector=involvedObject.uid={before.uid}")["items"]
    assert (event["reason"], event["message"]) == ("Noted", "verdict ecc[rma]@1 x; well")
    assert event["involvedObject"]["kind"] == crd.KIND
    # Who is slow and decides it once more changes nothing, and who has seen it has nothing new.
    assert not note(api, before, FULL), "on the version before nothing is noted, and so nothing told"
    after = read(api, name)
    assert told(after, Record(name, after.version, replace(FULL, state="Down"))) == 0


async def _tell(event: Object, fleet: ApiClient) -> bool:
    await fleet.create_event(event)
    return True


def test_people_see_them_in_columns(api: ApiServer, name: str) -> None:
    note(api, read(api, name), FULL)
    headers = {
        "Authorization": f"Bearer {api.token}",
        "Accept": "application/json;as=Table;v=v1;g=meta.k8s.io",
    }
    request = urllib.request.Request(f"{api.url}{MACHINES}", headers=headers)
    with urllib.request.urlopen(request, context=api.context, timeout=10) as reply:
        table: dict[str, Any] = json.load(reply)
    names = [one["name"] for one in table["columnDefinitions"]]
    (row,) = [one["cells"] for one in table["rows"] if one["cells"][0] == name]
    said = dict(zip(names, row, strict=True))
    wanted = {"Goal": "drain", "State": "Drained", "Node": "n0", "Worker": "w0", "Repeats": 1, "Why": "a person"}
    wanted |= {"Verdict": "ecc[rma]@1 x"}
    assert wanted.items() <= said.items()
    assert names[-1] == "Age" and said["Age"] not in (None, "", "<unknown>", "<invalid>")


def seen_now(api: ApiServer) -> tuple[str, str]:
    found = api.ask("GET", NODE)["metadata"]
    return found["uid"], found["resourceVersion"]


def test_another_object_of_the_name_is_no_refusal(api: ApiServer) -> None:
    _, version = seen_now(api)

    async def each(fleet: ApiClient) -> list[bool]:
        return [
            await changes.apply_change(fleet, ShowOnNode("n0", "another", KubeCondition("t", "True"))),
            await changes.apply_change(fleet, Cordon("n0", "another", version, "why")),
            await changes.apply_change(fleet, Annotate("n0", "another", version, (("a", "b"),))),
            await changes.apply_change(fleet, Protect("none", "another", version)),
        ]

    assert do(api, each) == [False] * 4


@contextlib.contextmanager
def webhook(api: ApiServer, directory: Path, answers: Callable[[], int]) -> Iterator[None]:
    """One that refuses each change of a Node, with the status that a test says."""
    key, certificate = directory / "key", directory / "certificate"
    made = ("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1",
            "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate)  # fmt: skip
    subprocess.run(made, check=True, capture_output=True)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status = {"code": answers(), "reason": "Invalid", "message": "nobody changes a Node here"}
            response = {"uid": asked["request"]["uid"], "allowed": False, "status": status}
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            review = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}
            self.wfile.write(json.dumps(review).encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    trusted = base64.b64encode(certificate.read_bytes()).decode()
    hook = {
        "name": "no.example.com",
        "clientConfig": {"url": f"https://127.0.0.1:{server.server_port}/", "caBundle": trusted},
        "rules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["UPDATE"], "resources": ["nodes"]}],
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
    }
    api.ask("POST", WEBHOOKS, {"metadata": {"name": "no"}, "webhooks": [hook]})
    try:
        change = {"metadata": {"labels": {"a": "b"}}}
        until(lambda: "nobody changes" in refused(api, NODE, change), "the webhook is asked")
        yield
    finally:
        api.ask("DELETE", f"{WEBHOOKS}/no")
        until(lambda: not refused(api, NODE, change), "the webhook is asked no more")
        server.shutdown()
        server.server_close()


def test_who_refuses_a_change_is_told_whatever_his_answer_looks_like(api: ApiServer, tmp_path: Path) -> None:
    """A webhook answers 404, 409, 422 as it likes, and a policy 422: taken for "not as it was seen" it would be tried
    again at once and for ever, and nobody told."""
    codes = [422]
    with webhook(api, tmp_path, lambda: codes[-1]):
        uid, version = seen_now(api)

        async def cordon(fleet: ApiClient) -> bool:
            return await changes.apply_change(fleet, Cordon("n0", uid, version, "why"))

        async def fence(fleet: ApiClient) -> bool:
            return await changes.apply_change(fleet, Fence("n0", uid, version, "why"))

        async def annotate(fleet: ApiClient) -> bool:
            return await changes.apply_change(fleet, Annotate("n0", uid, version, (("a", "c"),)))

        for codes[-1] in (404, 409, 422):
            for deed in (cordon, fence, annotate):
                with pytest.raises(FleetError, match="nobody changes a Node here"):
                    do(api, deed)
