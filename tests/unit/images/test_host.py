"""Host script: it reports what is missing, and never leaves an installation half-done."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from images import host
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[3]


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


def test_an_engine_that_is_there_is_given_time_and_no_second_one_beside_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Wait for an existing engine and start no second one, which would take over its socket and share its files."""
    address = str(tmp_path / "engine.sock")
    for name in ("DOCKER_HOST", "DOCKER_CONFIG", "DOCKER_CONTEXT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    done: list[object] = []
    monkeypatch.setattr(host, "OWN_ENGINE", f"unix://{address}")
    monkeypatch.setattr(host, "start_engine", done.append)
    monkeypatch.setattr(host, "apt_install", lambda packages: None)
    monkeypatch.setattr(host, "ENGINE_START_DEADLINE", 0.3)
    host.ensure_engine()
    assert done == [address], "nobody is there"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(address)
        server.listen(0)
        late = f"cannot reach the docker engine at {address}: the listener there does not answer within 0.3 s"
        for _ in range(4):  # the last connections do not fit into the engine's backlog
            with pytest.raises(host.HostError, match=late):
                host.ensure_engine()
        monkeypatch.setattr(host, "ENGINE_START_DEADLINE", 60.0)

        def answer() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection, contextlib.suppress(OSError):
                        if connection.recv(100).startswith(b"GET /_ping"):
                            connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            host.ensure_engine()
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()
    assert done == [address]


def context(home: Path, name: str, address: str) -> None:
    """Write a context as `docker context create` does."""
    meta = home / ".docker/contexts/meta" / hashlib.sha256(name.encode()).hexdigest() / "meta.json"
    meta.parent.mkdir(parents=True)
    meta.write_text(json.dumps({"Name": name, "Metadata": {}, "Endpoints": {"docker": {"Host": address}}}))


def test_the_engine_is_the_one_that_a_person_has_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    context(tmp_path, "rootless", "unix:///run/user/1000/docker.sock")
    mine = ("unix:///run/user/1000/docker.sock", "docker's context rootless")
    assert host.choose_engine({}) == (host.OWN_ENGINE, "")
    assert host.choose_engine({"DOCKER_HOST": "", "DOCKER_CONTEXT": "default"}) == (host.OWN_ENGINE, "")
    assert host.choose_engine({"DOCKER_CONTEXT": "rootless"}) == mine
    (tmp_path / ".docker/config.json").write_text('{"currentContext": "rootless"}')
    assert host.choose_engine({}) == mine
    assert host.choose_engine({"DOCKER_CONTEXT": "default"}) == (host.OWN_ENGINE, "")
    # DOCKER_HOST takes precedence over contexts, as in docker itself.
    assert host.choose_engine({"DOCKER_HOST": "tcp://a:1", "DOCKER_CONTEXT": "x"}) == ("tcp://a:1", "DOCKER_HOST")
    with pytest.raises(host.HostError, match="docker's context gone, which DOCKER_CONTEXT names"):
        host.choose_engine({"DOCKER_CONTEXT": "gone"})
    (tmp_path / ".docker/config.json").write_text('{"currentContext": "gone"}')
    with pytest.raises(host.HostError, match=r"docker's context gone, which .*/config.json names"):
        host.choose_engine({})


@pytest.mark.parametrize("by", ["DOCKER_HOST", "docker's context mine"])
def test_where_a_chosen_engine_does_not_answer_no_other_is_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, by: str
) -> None:
    """Start no other engine when the chosen one does not answer: it would use the files of the machine's own engine."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("DOCKER_CONFIG", "DOCKER_CONTEXT"):
        monkeypatch.delenv(name, raising=False)
    nobody = f"unix://{tmp_path}/nobody.sock"
    if by == "DOCKER_HOST":
        monkeypatch.setenv("DOCKER_HOST", nobody)
    else:
        monkeypatch.delenv("DOCKER_HOST", raising=False)
        monkeypatch.setenv("DOCKER_CONTEXT", "mine")
        context(tmp_path, "mine", nobody)
    done: list[object] = []
    monkeypatch.setattr(host, "start_engine", done.append)
    monkeypatch.setattr(host, "apt_install", done.append)
    with pytest.raises(host.HostError, match=f"{by} says {nobody}, and nothing answers there"):
        host.ensure_engine()
    assert not done


def test_an_engine_that_is_there_and_does_not_answer_gets_no_second_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engine = tmp_path / "dockerd"
    shutil.copy("/bin/sleep", engine)
    monkeypatch.setattr(host, "ENGINE_PID", tmp_path / "docker.pid")
    monkeypatch.setattr(host, "ENGINE_START_DEADLINE", 0.1)
    with subprocess.Popen([engine, "600"]) as running:
        try:
            host.ENGINE_PID.write_text(str(running.pid))
            until(lambda: host.running_engine() == running.pid, "the process has its name")
            with pytest.raises(host.HostError, match=f"process {running.pid} does not answer at {tmp_path}/none"):
                host.start_engine(f"{tmp_path}/none")
        finally:
            running.kill()
    assert host.ENGINE_PID.exists()
    # The recorded process ID is free, or another program has it now.
    assert host.running_engine() == 0
    host.ENGINE_PID.write_text("1")
    assert host.running_engine() == 0


def test_a_remote_engine_needs_no_local_one() -> None:
    assert "docker.io" not in host.without_engine(host.TOOLS["engine"]).values()
    assert "mmdebstrap" in host.without_engine(host.TOOLS["engine"]).values()


def test_another_python_hands_over_to_the_one_that_has_the_packages(tmp_path: Path) -> None:
    """A Python without the packages re-executes in the virtual environment, with unchanged arguments.

    The system's Python, for example, does not have click.
    """
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
