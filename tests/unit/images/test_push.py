"""Decisions of a push: the meaning of the engine's events and of the registry's answers, and accepted names."""

from __future__ import annotations

import json

import pytest

from images import ImagesError
from images.ship.push import Event, LayerState, Progress
from images.ship.registry import RegistryPath, parse_reason

DIGEST = "sha256:e85eba2d0c6291500d62f48efeba07cee1c1ec83c191f78ea89d34cd13a52a69"


def told(*events: Event) -> Progress:
    progress = Progress()
    for event in events:
        progress.take(event)
    return progress


def layer(name: str, status: str) -> Event:
    return {"id": name, "status": status, "progressDetail": {}}


def test_layers_that_were_sent_and_layers_that_were_there() -> None:
    progress = told(
        {"status": "The push refers to repository [r/x]"},
        layer("a", "Preparing"),
        layer("b", "Preparing"),
        layer("c", "Waiting"),
        layer("a", "Pushed"),
        layer("b", "Layer already exists"),
        layer("c", "Mounted from r/y"),
        {"status": f"1: digest: {DIGEST} size: 577"},
    )
    assert (progress.count(LayerState.SENT), progress.count(LayerState.PRESENT)) == (1, 2)
    assert progress.digest == DIGEST
    assert progress.error == ""


def test_a_countdown_is_one_retry_and_the_next_countdown_another() -> None:
    counting = [layer("a", f"Retrying in {left} second{'s' if left > 1 else ''}") for left in (5, 4, 3, 2, 1)]
    assert told(*counting).retries == {"a": 1}
    assert told(*counting, layer("a", "Pushing"), *counting).retries == {"a": 2}
    assert told(*counting, layer("a", "Retrying in 10 seconds")).retries == {"a": 2}


def test_the_error_is_kept() -> None:
    progress = told(layer("a", "Pushing"), {"errorDetail": {"message": "denied"}, "error": "denied"})
    assert progress.error == "denied"
    assert progress.digest == ""


@pytest.mark.parametrize(
    ("text", "host", "repository", "loopback"),
    [
        ("127.0.0.1:5000", "127.0.0.1:5000", "worker", True),
        ("127.0.0.1:5000/hpc/a/", "127.0.0.1:5000", "hpc/a/worker", True),
        ("localhost:5000", "localhost:5000", "worker", True),
        ("[::1]:5000", "[::1]:5000", "worker", True),
        ("registry.site/hpc", "registry.site", "hpc/worker", False),
        ("10.0.0.1:5000", "10.0.0.1:5000", "worker", False),
    ],
)
def test_a_place(text: str, host: str, repository: str, loopback: bool) -> None:
    place = RegistryPath.parse(text)
    assert (place.host, place.repository("worker"), place.loopback) == (host, repository, loopback)


@pytest.mark.parametrize(
    "text", ["", "/", "https://registry.site/x", "user:pw@registry.site", "r.site/UPPER", "r.site/a b"]
)
def test_what_is_not_a_place_is_refused(text: str) -> None:
    with pytest.raises(ImagesError, match="cannot push to"):
        RegistryPath.parse(text)


FULL = {"DriverName": "filesystem", "Enclosed": {"Op": "write", "Path": "/x", "Err": 28}}


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (500, {"errors": [{"code": "UNKNOWN", "message": "unknown error", "detail": FULL}]}, "no space left"),
        (
            400,
            {"errors": [{"code": "NAME_INVALID", "message": "bad name"}]},
            "NAME_INVALID: bad name (HTTP status 400)",
        ),
        (502, "<html>", "it answered with HTTP status 502"),
        (500, {"errors": []}, "it answered with HTTP status 500"),
        (500, [], "it answered with HTTP status 500"),
    ],
)
def test_the_registrys_own_words(status: int, body: object, expected: str) -> None:
    assert expected in parse_reason(status, (body if isinstance(body, str) else json.dumps(body)).encode())
