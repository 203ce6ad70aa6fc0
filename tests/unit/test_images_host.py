"""The host script: it says what is missing, and never half-installs."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from images import host

ROOT = Path(__file__).resolve().parents[2]


def test_missing_packages_names_each_package_once_in_order(tmp_path: Path) -> None:
    absent = str(tmp_path / "no-such-file")
    tools = {"sh": "dash", "no-such-tool-b": "b", absent: "a", "no-such-tool-b2": "b"}
    assert host.missing_packages(tools) == ["b", "a"]


def test_without_apt_the_error_names_the_packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(host.HostError, match=r"cannot install mmdebstrap: no apt-get here"):
        host.apt_install(["mmdebstrap"])


def test_engine_answers_only_when_a_ping_is_ok(tmp_path: Path) -> None:
    address = str(tmp_path / "engine.sock")
    assert not host.engine_answers(address)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(address)
        server.listen()

        def answer(reply: bytes) -> None:
            connection, _ = server.accept()
            with connection:
                assert connection.recv(100).startswith(b"GET /_ping")
                connection.sendall(reply)

        for reply, expected in ((b"HTTP/1.0 200 OK\r\n\r\nOK", True), (b"HTTP/1.0 500 no\r\n\r\n", False)):
            thread = threading.Thread(target=answer, args=(reply,))
            thread.start()
            assert host.engine_answers(address) is expected
            thread.join()


def test_a_remote_engine_needs_no_local_one() -> None:
    assert "docker.io" not in host.without_engine(host.ENGINE_TOOLS).values()
    assert "mmdebstrap" in host.without_engine(host.ENGINE_TOOLS).values()


def test_another_python_hands_over_to_the_one_that_has_the_packages(tmp_path: Path) -> None:
    """The system's Python has no click; its arguments arrive as they were."""
    python = tmp_path / "bin/python"
    python.parent.mkdir()
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    code = f"import images.host as host, pathlib; host.VENV = pathlib.Path({str(tmp_path)!r}); host.rerun_in_venv()"
    done = subprocess.run([sys.executable, "-c", code, "plan", "a b"], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["-c", code, "plan", "a b"]
    python.unlink()
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert "`make images` makes it" in done.stderr and "Traceback" not in done.stderr
