"""`minivm accounting` and a real PID 1: the start of slurmdbd has an end, and the pod says why slurmdbd is closed."""

from __future__ import annotations

import json

import pytest

from init.pod.pod import Pod
from init.state import move
from init.state.move import OUT, MoveError
from tests.process.init_world import NOTIFIES, World

pytestmark = pytest.mark.root
DAEMON = {"command": NOTIFIES, "ready": "notify"}


@pytest.fixture(params=[False, True], ids=["optional", "required"])
def is_required(request: pytest.FixtureRequest) -> bool:
    """Tell if the pod is ready only with slurmdbd, as the accounting pod is."""
    return bool(request.param)


@pytest.fixture
def here(pod: World, is_required: bool, monkeypatch: pytest.MonkeyPatch) -> Pod:
    pod.start({"munged": DAEMON, "slurmdbd": DAEMON | {"needs": ["munged"], "required": is_required}})
    pod.until_ready()
    pod.until_state("slurmdbd", "ready")
    monkeypatch.setenv("MINIVM_SOCKET", str(pod.run / "control.sock"))
    return Pod({}, pod.run)


def test_a_start_ends_with_what_slurmdbd_waits_for(pod: World, here: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("slurmdbd", "munged"):
        pod.ask("stop", service=name, wait=True)
    monkeypatch.setattr(move, "WITHIN", 0.1)
    with pytest.raises(MoveError) as caught:
        move._start()
    assert "waits for munged: stopped on request" in str(caught.value) and "minivm start slurmdbd" in str(caught.value)
    pod.ask("start", service="munged", wait=True)
    monkeypatch.undo()
    monkeypatch.setenv("MINIVM_SOCKET", str(pod.run / "control.sock"))
    move._start()
    assert pod.service("slurmdbd").ready


def test_the_pod_says_that_the_records_are_elsewhere(pod: World, here: Pod, is_required: bool) -> None:
    file = move.mark_file(here)
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"phase": OUT, "token": "t1", "history": ["t1"]}))
    move._update_condition(here)
    told = pod.snapshot()
    texts = told.reasons if is_required else told.degraded
    assert told.ready is not is_required and texts[0].startswith("records: its records were moved out on")
    file.unlink()
    move._update_condition(here)
    assert pod.snapshot().ready and not pod.snapshot().degraded
