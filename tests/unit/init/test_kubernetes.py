"""The pod's conditions and the requests to the API server, over real TLS on loopback."""

from __future__ import annotations

import json
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fleet import crd
from fleet.decide.machines import add_active_results, find_hosts
from fleet.decide.remediation import evidence
from fleet.world.kubernetes import KubeNode, KubernetesView
from fleet.world.kubernetes import parse_pod as read_pod
from fleet.world.machine import ActiveHistory
from fleet.world.pod_page import deep_result as fleet_deep
from fleet.world.snapshot import Worker
from ground.files import write_json
from health import rounds as health_rounds
from health.checks import loop
from health.checks.active_checks import active_summary
from health.verdict import Class, Result, Verdict
from init.helpers import conditions
from init.helpers import conditions as kubernetes
from init.pod.pod import Pod
from init.view import conditions as page
from tests.kube_api import serve
from tests.waiting import PATIENCE, until

NOT_READY = {"ready": False, "phase": "boot", "reasons": ["munge key not proven"], "degraded": []}
READY: dict[str, Any] = {"ready": True, "phase": "running", "reasons": [], "degraded": []}


def test_a_condition_carries_the_reasons() -> None:
    item = kubernetes.condition(NOT_READY, None, "T1")
    assert item == {
        "type": "minivm.io/Ready",
        "status": "False",
        "reason": "Boot",
        "message": "munge key not proven",
        "lastTransitionTime": "T1",
    }
    degraded = kubernetes.condition(READY | {"degraded": ["slurmdbd: refused"]}, item, "T2")
    assert (degraded["status"], degraded["reason"], degraded["message"]) == ("True", "Degraded", "slurmdbd: refused")
    assert degraded["lastTransitionTime"] == "T2"
    assert kubernetes.condition(READY, degraded, "T3")["lastTransitionTime"] == "T2", "the status has not changed"
    acts = kubernetes.condition(READY | {"turn": "active, term 3", "degraded": ["x: slow"]}, None, "T")
    assert (acts["reason"], acts["message"]) == ("Degraded", "active, term 3; x: slow")
    assert kubernetes.condition(READY | {"turn": "standby: a has term 3"}, None, "T")["reason"] == "Ready"


def test_a_long_message_is_cut() -> None:
    item = kubernetes.condition(NOT_READY | {"reasons": ["x" * 5000]}, None, "T")
    assert len(item["message"]) == page.MESSAGE


class ApiServer:
    """TLS server that records patches and gives the scripted answers."""

    def __init__(self, directory: Path) -> None:
        self.account = directory
        self.answers: list[int] = []
        self.got: list[tuple[str, str, dict[str, Any]]] = []
        self.news = threading.Condition()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_PATCH(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                code = outer.answers.pop(0) if outer.answers else 200
                data = b'{"message": "told to"}'
                self.send_response(code)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)
                with outer.news:
                    outer.got.append((self.path, self.headers["Authorization"], body))
                    outer.news.notify_all()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = serve(directory, Handler)

    def wait(self, count: int) -> list[dict[str, Any]]:
        with self.news:
            assert self.news.wait_for(lambda: len(self.got) >= count, timeout=PATIENCE)
        return [body["status"]["conditions"][0] for _, _, body in self.got]


@pytest.fixture
def api_server(tmp_path: Path) -> Iterator[ApiServer]:
    server = ApiServer(tmp_path)
    yield server
    server.server.shutdown()
    server.server.server_close()


class Pid1:
    """Control socket that answers `watch` with the test's states, one after the other."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(path))
        self.listener.listen(1)
        self.connection: socket.socket | None = None

    def say(self, found: dict[str, Any]) -> None:
        if self.connection is None:
            self.connection, _ = self.listener.accept()
            assert json.loads(self.connection.makefile().readline())["op"] == "watch"
        self.connection.sendall(json.dumps({"ok": True, **found}).encode() + b"\n")

    def close(self) -> None:
        if self.connection is not None:
            self.connection.shutdown(socket.SHUT_RDWR)
            self.connection.close()
        self.listener.close()


@pytest.fixture
def pid_1(tmp_path: Path) -> Iterator[Pid1]:
    made = Pid1(tmp_path / "control.sock")
    yield made
    made.close()


def start(api_server: ApiServer, pid_1: Pid1) -> tuple[threading.Thread, list[int]]:
    api = kubernetes.Api("ns", "w1", api_server.account, f"localhost:{api_server.server.server_port}")
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(kubernetes.run(api, pid_1.path, 0.01, 0.01)), daemon=True)
    thread.start()
    return thread, codes


def test_each_change_is_told_with_the_accounts_token(api_server: ApiServer, pid_1: Pid1) -> None:
    start(api_server, pid_1)
    pid_1.say(NOT_READY)
    assert api_server.wait(1)[0]["message"] == "munge key not proven"
    pid_1.say(READY)
    assert [item["status"] for item in api_server.wait(2)] == ["False", "True"]
    path, authorization, _ = api_server.got[0]
    assert (path, authorization) == ("/api/v1/namespaces/ns/pods/w1/status", "Bearer t0ken")


def test_an_api_server_that_stumbles_is_asked_again(api_server: ApiServer, pid_1: Pid1) -> None:
    api_server.answers = [500, 503]
    start(api_server, pid_1)
    pid_1.say(READY)
    assert [item["status"] for item in api_server.wait(3)] == ["True"] * 3


def test_without_leave_it_says_so_once_and_asks_again(
    api_server: ApiServer, pid_1: Pid1, capsys: pytest.CaptureFixture[str]
) -> None:
    api_server.answers = [403, 403, 401]
    start(api_server, pid_1)
    pid_1.say(NOT_READY)
    assert [item["status"] for item in api_server.wait(4)] == ["False"] * 4, "the right came later"
    assert capsys.readouterr().err.count("403 told to") == 1


def test_the_newest_word_is_told_after_a_refusal(api_server: ApiServer, pid_1: Pid1) -> None:
    api_server.answers = [403] * 1000
    start(api_server, pid_1)
    pid_1.say(NOT_READY)
    api_server.wait(1)
    pid_1.say(READY)
    with api_server.news:
        assert api_server.news.wait_for(
            lambda: api_server.got[-1][2]["status"]["conditions"][0]["status"] == "True", timeout=PATIENCE
        )


def test_a_pod_that_is_gone_is_not_asked_for_again(api_server: ApiServer, pid_1: Pid1) -> None:
    api_server.answers = [404]
    thread, codes = start(api_server, pid_1)
    pid_1.say(READY)
    thread.join(PATIENCE)
    assert codes == [0] and len(api_server.got) == 1


def test_an_authority_without_a_key_usage_is_believed(
    api_server: ApiServer, pid_1: Pid1, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A certificate authority without key usage is accepted.

    Many clusters have such an authority, and Python 3.13, which the images use, requires the extension by default.
    """
    made = ssl.create_default_context

    def strict(**settings: Any) -> ssl.SSLContext:
        context = made(**settings)
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        return context

    monkeypatch.setattr(ssl, "create_default_context", strict)
    with pytest.raises(ssl.SSLCertVerificationError):
        context = strict(cafile=str(api_server.account / "ca.crt"))
        with socket.create_connection(("127.0.0.1", api_server.server.server_port)) as plain:
            context.wrap_socket(plain, server_hostname="localhost")
    start(api_server, pid_1)
    pid_1.say(READY)
    assert [item["status"] for item in api_server.wait(1)] == ["True"]


# GPUs of the pod

SMI = "usr/bin/nvidia-smi"
ONE, OTHER = "GPU-041a6be2-04b9-910d-91ab-94883a0ad281", "GPU-591acf50-02c8-2429-913a-3efdde8ce891"


def machine(root: Path, *lines: str, ends: str = "", device: bool = True) -> Pod:
    """Return a pod below `root` with a driver whose nvidia-smi prints these lines for `-L`."""
    for path in ("dev", "usr/bin"):
        (root / path).mkdir(parents=True)
    if device:
        (root / "dev/nvidia0").touch()
    said = "\n".join(lines)
    (root / SMI).write_text(f"#!/bin/sh\n[ \"$*\" = -L ] || exit 9\ncat <<'END'\n{said}\nEND\n{ends}\n")
    (root / SMI).chmod(0o755)
    return Pod({}, root)


def test_gpus_are_told_by_their_uuids_in_order_whatever_else_the_driver_says(tmp_path: Path) -> None:
    pod = machine(
        tmp_path,
        f"GPU 1: NVIDIA H100 80GB HBM3 (UUID: {OTHER})",
        f"GPU 0: NVIDIA H100 80GB HBM3 (UUID: {ONE})",
        "  MIG 1g.10gb Device 0: (UUID: MIG-8f3b6d2a-2c1e-5a0d-9d8e-3f1c2b4a5d6e)",
        f"GPU 0: twice (UUID: {ONE})",
        "GPU 2: not yet (UUID: GPU-????????-????-????-????-????????????)",
        f"and GPU 3: (UUID: {ONE[:-1]}f)",
    )
    assert pod.gpus
    assert conditions.gpu_uuids(pod) == (ONE, OTHER)


def test_no_more_gpus_are_told_than_a_machine_keeps(tmp_path: Path) -> None:
    listed = [f"GPU {number}: x (UUID: GPU-{number:08x}{ONE[12:]})" for number in range(200)]
    assert len(conditions.gpu_uuids(machine(tmp_path, *listed))) == conditions.MOST_GPUS == crd.GPUS


@pytest.mark.parametrize("ends", ["exit 1", "kill -9 $$"])
def test_a_driver_that_fails_has_told_nothing(tmp_path: Path, ends: str) -> None:
    assert conditions.gpu_uuids(machine(tmp_path, f"GPU 0: x (UUID: {ONE})", ends=ends)) == ()


def test_where_no_gpu_is_none_is_asked_for(tmp_path: Path) -> None:
    assert not machine(tmp_path, device=False).gpus


def test_gpus_are_told_once_the_driver_answers_and_the_api_server_listens(api_server: ApiServer) -> None:
    api = kubernetes.Api("ns", "w1", api_server.account, f"localhost:{api_server.server.server_port}")
    api_server.answers = [503, 403]
    answers = iter([(), (ONE, OTHER), (ONE, OTHER), (ONE, OTHER), (ONE,)])
    kubernetes.tell_gpus(api, lambda: next(answers), 0.01)
    assert [(item["type"], item["message"]) for item in api_server.wait(3)] == [
        ("minivm.io/Gpus", f"{ONE} {OTHER}"),
    ] * 3
    assert next(answers) == (ONE,), "and not again"


def test_gpus_are_written_for_the_page_once_the_driver_answers(tmp_path: Path) -> None:
    answers = iter([(), (), (ONE, OTHER), (ONE,)])
    file = tmp_path / page.GPU_NAME
    conditions.write_gpus(lambda: next(answers), file, 0.01)
    assert file.read_text().split() == [ONE, OTHER] and file.stat().st_mode & 0o777 == 0o644
    assert next(answers) == (ONE,), "and not again"


def test_a_token_that_is_away_for_a_moment_does_not_end_it(api_server: ApiServer) -> None:
    api = kubernetes.Api("ns", "w1", api_server.account, f"localhost:{api_server.server.server_port}")
    token = api_server.account / "token"
    kept = token.read_text()
    looks = iter(["away", "there"])

    def look() -> tuple[str, ...]:
        if next(looks) == "away":
            token.unlink()
        else:
            token.write_text(kept)
        return (ONE,)

    kubernetes.tell_gpus(api, look, 0.01)
    assert [item["message"] for item in api_server.wait(1)] == [ONE]


def test_the_fleet_reads_what_a_pod_tells(tmp_path: Path) -> None:
    """The fleet parses the condition that the pod writes; the two share no code."""
    told = page.gpu_condition(conditions.gpu_uuids(machine(tmp_path, f"GPU 0: x (UUID: {ONE})")))
    item = {"metadata": {"name": "w1", "uid": "u"}, "spec": {"nodeName": "n1"}, "status": {"conditions": [told]}}
    here = KubernetesView({"n1": KubeNode("n1", "u")}, {"w1": read_pod(item)})
    (place,) = find_hosts(here, [Worker("w1", here.pods["w1"], here.nodes["n1"], None)]).values()
    assert place.reported_gpus == {ONE}


# Results of deep checks


def deep_api(api_server: ApiServer) -> kubernetes.Api:
    return kubernetes.Api("ns", "w1", api_server.account, f"localhost:{api_server.server.server_port}")


def follows(api_server: ApiServer, tmp_path: Path, pause: float = 0.01) -> tuple[threading.Thread, Path]:
    (tmp_path / "boot_id").write_text("b1\n")
    file = tmp_path / "health/deep/said.json"
    words = (deep_api(api_server), file, tmp_path / "boot_id", pause)
    thread = threading.Thread(target=kubernetes.tell_deep, args=words, daemon=True)
    thread.start()
    return thread, file


def said(file: Path, **changes: object) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, {"boot_id": "b1", "state": "ok", "ran": 2, "said": "dcgm_diag", **changes})


def test_each_new_word_is_told_once_whatever_the_api_server_says_first(api_server: ApiServer, tmp_path: Path) -> None:
    api_server.answers = [503, 403]
    _, file = follows(api_server, tmp_path)
    said(file, state="running", ran=0, said="")
    told = [(item["status"], item["reason"], item["message"]) for item in api_server.wait(3)]
    assert told == [("Unknown", "Running", "b1 0")] * 3
    said(file, state="not asked")
    said(file, boot_id="b0")
    said(file)
    assert api_server.wait(4)[3]["message"] == "b1 2 dcgm_diag"
    said(file)
    said(file, state="problem", said="dcgm_diag[manual]@1 bad")
    last = api_server.wait(5)[4]
    assert (last["type"], last["status"], last["reason"]) == ("minivm.io/DeepCheck", "False", "Failed")
    assert last["message"] == "b1 2 dcgm_diag[manual]@1 bad"


def test_an_api_server_that_refuses_is_not_asked_as_often_as_jobs_begin(
    api_server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an error the pod retries on its own interval, not at each job.

    The checks of each job change the directory above the result file.
    """
    pauses: list[float] = []
    over = threading.Event()

    def sleep(seconds: float) -> None:
        if seconds != 7.0:  # called by a thread of another test
            return time.sleep(seconds)
        pauses.append(seconds)
        over.wait(60)
        return None

    clock = SimpleNamespace(sleep=sleep, strftime=time.strftime, gmtime=time.gmtime)
    monkeypatch.setattr(kubernetes, "time", clock)
    api_server.answers = [503]
    (tmp_path / "health").mkdir()
    _, file = follows(api_server, tmp_path, 7.0)
    said(file)
    api_server.wait(1)
    (tmp_path / "health/round.lock").touch()
    until(lambda: pauses, "it waits")
    assert len(api_server.got) == 1
    over.set()
    assert api_server.wait(2)[1]["reason"] == "Passed"


def test_a_pod_that_is_gone_is_not_told_of_deep_checks_for_ever(api_server: ApiServer, tmp_path: Path) -> None:
    api_server.answers = [404]
    thread, file = follows(api_server, tmp_path)
    said(file)
    thread.join(PATIENCE)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    "found",
    [
        {},
        {"boot_id": "", "state": "ok", "ran": 1, "said": ""},
        {"boot_id": "b0", "state": "ok", "ran": 1, "said": ""},
        {"boot_id": "b1", "state": "fine", "ran": 1, "said": ""},
        {"boot_id": "b1", "state": ["ok"], "ran": 1, "said": ""},
        {"boot_id": "b1", "state": "ok", "ran": "1", "said": ""},
        {"boot_id": "b1", "state": "ok", "ran": True, "said": ""},
        {"boot_id": "b1", "state": "ok", "ran": -1, "said": ""},
        {"boot_id": "b1", "state": "not asked", "ran": 0, "said": ""},
    ],
)
def test_what_is_of_another_boot_or_form_is_not_told(found: dict[str, Any]) -> None:
    assert page.deep_condition(found, "b1") is None
    assert page.deep_condition({"boot_id": "", "state": "ok", "ran": 1, "said": ""}, "") is None


def test_the_fleet_reads_the_active_results_that_the_health_service_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The health service, the pod and the fleet share the form of the results and no code."""
    for name, result in (("cpu", Result.OK), ("tcp", Result.PROBLEM), ("disk_write", Result.UNKNOWN)):
        write_json(tmp_path / f"{name}.json", {"at": 1000.5, "result": result.value, "failures": 0, "period_s": 1})
    monkeypatch.setattr(loop, "active_summary", lambda: active_summary(tmp_path))
    file = tmp_path / "run/said.json"
    loop.write_active(file)
    written = file.stat()
    loop.write_active(file)
    assert file.stat() == written, "the pod watches the file"
    told = page.active_condition(page.read_results(file))
    assert told is not None and (told["status"], told["message"]) == ("False", "cpu passed 1000; tcp failed 1000")
    item = {"metadata": {"name": "w1", "uid": "u"}, "spec": {"nodeName": "n1"}, "status": {"conditions": [told]}}
    worker = Worker("w1", read_pod(item), KubeNode("n1", "u"), None)
    assert add_active_results((), [worker], 2000.0) == (
        ActiveHistory("cpu", 1000, 1000, "P"),
        ActiveHistory("tcp", 1000, 0, "F"),
    )


@pytest.mark.parametrize(
    "data",
    [
        {}, {"cpu": 1}, {"cpu": [1]}, {"cpu": [1, 2]}, {"cpu": [1.5, True]}, {"cpu": [-1, True]}, {"a b": [1, True]},
        {"cpu": [10**12, True]}, {"c" * 65: [1, True]},
    ],
)  # fmt: skip
def test_active_results_of_another_form_are_not_told(data: dict[str, Any]) -> None:
    assert page.active_condition(data) is None


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, "\xff"])
def test_a_word_that_cannot_be_read_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "said.json").write_text(text, encoding="latin-1")
    assert page.read_results(tmp_path / "said.json") == {}
    assert page.read_results(tmp_path / "none") == {}


@pytest.mark.parametrize(
    ("verdicts", "passed"), [([], True), (["ok"], True), (["problem"], False), (["unknown"], None)]
)
def test_the_fleet_reads_what_the_health_service_keeps_and_the_pod_tells(
    tmp_path: Path, verdicts: list[str], passed: bool | None
) -> None:
    """The fleet parses what the health service stores and the pod reports; the three share no code."""
    found = [Verdict("dcgm_diag", Result(one), Class.MANUAL, "x; y", commit="9f2c0011") for one in verdicts]
    health_rounds.write_deep(tmp_path / "said.json", health_rounds.summarise(found, [], "b1", {"dcgm_diag"}))
    told = page.deep_condition(page.read_results(tmp_path / "said.json"), "b1")
    item = {"metadata": {"name": "w1", "uid": "u"}, "spec": {"nodeName": "n1"}, "status": {"conditions": [told]}}
    here = KubernetesView({"n1": KubeNode("n1", "u", boot="b1")}, {"w1": read_pod(item)})
    (place,) = find_hosts(here, [Worker("w1", here.pods["w1"], here.nodes["n1"], None)]).values()
    answer = fleet_deep(place.workers, "b1")
    assert answer.passed is passed
    if passed is False:
        assert (heaviest := evidence(answer.text)) is not None and heaviest.key == "dcgm_diag@9f2c001"


def test_a_pod_that_is_gone_is_not_told_of_its_gpus_for_ever(api_server: ApiServer) -> None:
    api = kubernetes.Api("ns", "w1", api_server.account, f"localhost:{api_server.server.server_port}")
    api_server.answers = [404]
    kubernetes.tell_gpus(api, lambda: (ONE,), 0.01)
    assert len(api_server.got) == 1
