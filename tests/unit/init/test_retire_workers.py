"""The Job that stops a release's workers before the uninstall, with an API server over real TLS."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from init.helpers import retire_workers
from init.pod.api_server import ApiServer
from tests.kube_api import serve

POOLS = [("StatefulSet", "slurm-worker"), ("WorkerPool", "slurm-gpu")]
APPS, OWN = "/apis/apps/v1/namespaces/hpc", "/apis/minivm.io/v1alpha1/namespaces/hpc"
STOPS = [
    ("PATCH", f"{APPS}/statefulsets/slurm-worker/scale?fieldManager=minivm-uninstall", {"spec": {"replicas": 0}}),
    ("DELETE", f"{OWN}/workerpools/slurm-gpu", {"propagationPolicy": "Background"}),
]
LOOK = ("GET", "/api/v1/namespaces/hpc/pods?labelSelector=app%3Dx%2Crole%3Dworker", None)


class Pods:
    """Fake API server: it records requests, and answers with the pods of each list or a status for the next request."""

    def __init__(self, account: Path) -> None:
        self.account = account
        self.asked: list[tuple[str, str, Any]] = []
        self.refuse: list[int] = []
        self.looks: list[list[str]] = [[]]
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                length = int(self.headers["Content-Length"] or 0)
                outer.asked.append((self.command, self.path, json.loads(self.rfile.read(length)) if length else None))
                status = outer.refuse.pop(0) if outer.refuse else 200
                look = outer.looks.pop(0) if self.command == "GET" and len(outer.looks) > 1 else outer.looks[0]
                pods = [{"metadata": {"name": name} | ({"deletionTimestamp": "t"} if "leaving" in name else {})}
                        for name in look]  # fmt: skip
                items = {"items": pods, "status": {"selector": "role=login"}}
                found = items if status == 200 else {"message": "no"}
                data = json.dumps(found).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_PATCH = do_DELETE = answer

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = serve(account, Handler)

    def run(self, seconds: float = 30.0, pools: list[tuple[str, str]] = POOLS) -> int:
        server = ApiServer("drain the workers", self.account, f"localhost:{self.server.server_port}")
        return retire_workers.run(server, "hpc", seconds, "app=x,role=worker", pools)


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pods]:
    monkeypatch.setattr(retire_workers, "PAUSE", 0.01)
    made = Pods(tmp_path)
    yield made
    made.server.shutdown()
    made.server.server_close()


def test_every_pool_stops_and_the_last_pod_is_waited_for(api: Pods, capsys: pytest.CaptureFixture[str]) -> None:
    api.looks = [["slurm-gpu-0", "slurm-worker-0"], ["slurm-worker-0"], []]
    assert api.run() == 0
    assert api.asked == [*STOPS, LOOK, LOOK, LOOK]
    assert capsys.readouterr().out.splitlines() == [
        "StatefulSet/slurm-worker: scaled to zero", "WorkerPool/slurm-gpu: deleted",
        "2 workers drain: slurm-gpu-0 slurm-worker-0", "1 worker drains: slurm-worker-0", "no worker is left",
    ]  # fmt: skip


def test_a_second_run_and_an_api_server_that_is_away_do_no_harm(api: Pods) -> None:
    """The Job survives an interruption at any point: a missing pool is no error, and failed requests are repeated."""
    api.refuse = [503, 404, 500, 404, 500]
    assert api.run() == 0
    patch, delete = STOPS
    assert api.asked == [patch, patch, delete, delete, LOOK, LOOK]


def test_login_pods_that_keep_sessions_for_hours_get_their_ordinary_grace(api: Pods) -> None:
    """Also one that is leaving since an earlier roll-out; one that is gone meanwhile is no error."""
    api.looks = [["slurm-login-a", "slurm-login-b"], []]
    api.refuse = [200, 200, 404]
    assert api.run(pools=[("Deployment", "slurm-login=60")]) == 0
    pods = "/api/v1/namespaces/hpc/pods"
    assert api.asked == [
        ("PATCH", f"{APPS}/deployments/slurm-login/scale?fieldManager=minivm-uninstall", {"spec": {"replicas": 0}}),
        ("GET", f"{pods}?labelSelector=role%3Dlogin", None),
        ("DELETE", f"{pods}/slurm-login-a", {"gracePeriodSeconds": 60}),
        ("DELETE", f"{pods}/slurm-login-b", {"gracePeriodSeconds": 60}),
        LOOK,
    ]


def test_login_pods_that_leave_since_older_values_get_their_ordinary_grace(api: Pods) -> None:
    """Those of a Deployment that is gone: `keepSeconds` is 0 by now, or there are fewer replicas."""
    api.looks = [["slurm-login-0", "slurm-login-0-leaving"], []]
    assert api.run(pools=[("Leaving", "app=x,role=login=60")]) == 0
    pods = "/api/v1/namespaces/hpc/pods"
    assert api.asked == [
        ("GET", f"{pods}?labelSelector=app%3Dx%2Crole%3Dlogin", None),
        ("DELETE", f"{pods}/slurm-login-0-leaving", {"gracePeriodSeconds": 60}),
        LOOK,
    ]


def test_an_uninstall_is_not_held_up_for_ever(api: Pods, capsys: pytest.CaptureFixture[str]) -> None:
    api.looks = [["slurm-worker-0"]]
    assert api.run(seconds=0.1) == 0
    assert "the uninstall continues without them" in capsys.readouterr().out


def test_a_missing_right_stops_the_uninstall_and_tells_the_way_out(
    api: Pods, capsys: pytest.CaptureFixture[str]
) -> None:
    api.refuse = [403]
    assert api.run() == 1
    assert "helm uninstall --no-hooks" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["60"],
        ["x", "app=x"],
        *(["60", "app=x", pool] for pool in ("Deployment/a", "Leaving/a=b", "Leaving/=60", "Job/a", "WorkerPool/")),
    ],
)
def test_wrong_arguments_are_refused(words: list[str]) -> None:
    with pytest.raises(ValueError, match=r"."):
        retire_workers.parse(words)


def test_arguments_are_as_the_chart_writes_them() -> None:
    words = ["150", "app=x", "StatefulSet/slurm-worker", "WorkerPool/slurm-gpu"]
    assert retire_workers.parse(words) == (150, "app=x", POOLS)
    words = ["150", "app=x", "Deployment/slurm-login=60"]
    assert retire_workers.parse(words) == (150, "app=x", [("Deployment", "slurm-login=60")])
    words = ["150", "app=x", "Leaving/app.kubernetes.io/name=x,role=login=60"]
    assert retire_workers.parse(words)[2] == [("Leaving", "app.kubernetes.io/name=x,role=login=60")]
