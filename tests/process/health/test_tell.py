"""A round's sentence reaches PID 1's control socket, wherever the pod has it."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path

import pytest

from health.tell import tell


@pytest.mark.parametrize("variable", ["MINIVM_SOCKET", "MINIVM_CONTROL"])
def test_the_pod_is_told_at_the_socket_that_minivm_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    """The second is the old name."""
    for name in ("MINIVM_SOCKET", "MINIVM_CONTROL"):
        monkeypatch.delenv(name, raising=False)
    asked: list[object] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(tmp_path / "control.sock"))
        listener.listen(2)

        def serve() -> None:
            for reply in (b'{"ok": true}\n', b'{"ok": false, "error": "no"}\n'):
                client, _ = listener.accept()
                with client:
                    asked.append(json.loads(client.makefile().readline()))
                    client.sendall(reply)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        monkeypatch.setenv(variable, str(tmp_path / "control.sock"))
        assert tell("gpu_ecc (reboot): 2 errors")
        assert not tell("refused")
        thread.join(10)
    assert asked[0] == {"op": "condition", "name": "health", "text": "gpu_ecc (reboot): 2 errors", "blocking": False}


def test_where_nobody_listens_nothing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINIVM_SOCKET", str(tmp_path / "none.sock"))
    assert not tell("gpu_ecc (reboot): 2 errors")
