"""A policy with a typo: the real broker tells the pod, and takes its word back."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest

from tests.waiting import until


class Init:
    """PID 1's socket, as far as a condition goes."""

    def __init__(self, path: Path) -> None:
        self.conditions: list[tuple[str, str]] = []
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(str(path))
        self.listener.listen()
        Thread(target=self.serve, daemon=True).start()

    def serve(self) -> None:
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            with client:
                asked = json.loads(client.makefile().readline())
                self.conditions.append((asked["name"], asked["text"]))
                client.sendall(b'{"ok": true}\n')


@pytest.fixture
def init(tmp_path: Path) -> Iterator[Init]:
    made = Init(tmp_path / "control.sock")
    yield made
    made.listener.close()


def test_a_policy_that_is_left_aside_is_in_the_pods_status(tmp_path: Path, init: Init) -> None:
    policy = tmp_path / "scripts/current/lib/policy.json"
    policy.parent.mkdir(parents=True)
    policy.write_text('{"broker": {"cheks": {"gpu_ecc": "never"}}}')
    places = {"MINIVM_VERDICTS": "verdicts", "MINIVM_HEALTH_STATE": "health", "MINIVM_BROKER": "broker.sock",
              "MINIVM_BROKER_STATE": "broker.json", "MINIVM_LEDGER": "ledger", "MINIVM_GITSYNC_ROOT": "scripts",
              "MINIVM_SOCKET": "control.sock"}  # fmt: skip
    env = os.environ | {name: str(tmp_path / place) for name, place in places.items()}
    broker = subprocess.Popen([sys.executable, "-m", "health.broker"], env=env)
    try:

        def told() -> list[str]:
            return [text for name, text in init.conditions if name == "policy"]

        until(told, "the pod is told")
        text = told()[-1]
        assert text.startswith("policy file ignored: ")
        assert str(policy) in text and "cheks" in text and "checks" in text

        policy.write_text('{"broker": {"checks": {"gpu_ecc": "never"}}}')
        (tmp_path / "verdicts/next").touch()  # the next round's
        until(lambda: told()[-1] == "", "it takes its word back")
    finally:
        broker.terminate()
        broker.wait()
