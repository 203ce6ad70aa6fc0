"""The conformance suite against the chart, as against any product: `python -m tests.conformance`.

By default the checks that disturb nothing. MINIVM_CONFORMANCE=whole runs all, with the fleet: half an hour.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kubernetes.kubectl import condition, going
from tests.kubernetes.world import SMALL, Release
from tests.waiting import until

pytestmark = pytest.mark.timeout(4800)
ROOT = Path(__file__).resolve().parents[2]
IS_WHOLE = os.environ.get("MINIVM_CONFORMANCE", "") == "whole"


@pytest.fixture(scope="module")
def checked(installed: Release) -> Iterator[Release]:
    """The release; for the whole suite with the fleet, which drains cordoned machines and keeps busy pods."""
    installed.wait_ready()
    if not IS_WHOLE:
        installed.as_user("alice", "true")
        yield installed
        return
    installed.upgrade(fleet={"enabled": True, **SMALL})
    try:
        wait_replaced(installed, gated=False)
        # A person's home is made at the first login.
        installed.as_user("alice", "true")
        yield installed
    finally:
        installed.shut()
        installed.upgrade(fleet={"enabled": False})
        wait_replaced(installed, gated=True)


def wait_replaced(release: Release, *, gated: bool) -> None:
    """Wait until every pod is of the new template: a pod that writes its own condition has a gate for it."""

    def replaced() -> bool:
        pods = {name: pod for name, pod in release.pods().items() if not name.startswith("demo-")}
        return all(
            ("readinessGates" in pod["spec"]) is gated and not going(pod) and condition(pod, "Ready")
            for pod in pods.values()
        )

    until(replaced, "every pod is another one", within=480, seen=release.why)
    release.wait_ready()


def test_the_cluster_keeps_every_promise_of_the_suite(checked: Release, tmp_path: Path) -> None:
    """No check fails; what the chart does not offer by default is named in its adapter."""
    release = checked
    out = tmp_path / "conformance.json"
    adapter = ROOT / "tests/conformance/adapters/minivm.yaml"
    names = (f"--name=release={release.name}", f"--name=namespace={release.namespace}")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.conformance", f"--adapter={adapter}", f"--json={out}", *names),
            *([] if IS_WHOLE else ["--gentle"]),
        ],
        cwd=ROOT,
        env=os.environ | {"MINIVM_CONFORMANCE_KUBECTL": " ".join(release.kubernetes.client)},
        capture_output=True,
        text=True,
    )
    print(done.stdout[-20000:])
    checks = json.loads(out.read_text())["checks"]
    failed = {each["check"]: each["detail"] for each in checks if each["outcome"] == "failed"}
    assert checks and not failed
    assert done.returncode == 0
