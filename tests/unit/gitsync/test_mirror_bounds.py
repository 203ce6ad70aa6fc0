"""Memory bounds of the mirror for arbitrary input, and the guarantee that a failure is always recorded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gitsync import rings
from gitsync.mirror import server as mirror_cache
from gitsync.mirror import server as mirror_requests
from gitsync.mirror.server import Cache
from gitsync.rings import Board

COMMIT = "a" * 40


def said(pod: str, *, ok: bool) -> bytes:
    return json.dumps({"pod": pod, "commit": COMMIT, "ok": ok, "reason": "broken"}).encode()


def test_no_number_of_good_words_crowds_out_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rings, "MAX_PODS", 100)
    board = Board(tmp_path / "ring.json", lambda: 1.0)
    board.see(COMMIT)
    for number in range(150):
        assert board.report(said(f"invented-{number}", ok=True))
    assert board.report(said("real", ok=False))
    view = board.view(COMMIT)
    assert view is not None
    assert (view["good"], view["failed"], view["reasons"]) == (100, 1, ["real: broken"])


@pytest.mark.parametrize("body", [b"[" * 5000, b"[" * 200_000, b" " * 9000 + said("pod", ok=True)])
def test_nonsense_is_no_report(tmp_path: Path, body: bytes) -> None:
    board = Board(tmp_path / "ring.json", lambda: 1.0)
    board.see(COMMIT)
    assert not board.report(body)


def test_a_reason_in_any_script_fits(tmp_path: Path) -> None:
    board = Board(tmp_path / "ring.json", lambda: 1.0)
    board.see(COMMIT)
    body = {"pod": "p" * 253, "commit": COMMIT, "ok": False, "reason": chr(0x1F525) * 300}
    assert board.report(json.dumps(body).encode())


def test_small_replies_are_bounded_by_what_an_entry_costs_and_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache(10 * (mirror_cache.OVERHEAD + 1))
    for number in range(20):
        cache.get(number, lambda: b"x")
    assert cache.get(19, lambda: b"y") == (b"x", False)
    assert cache.get(9, lambda: b"y") == (b"y", True), "the longest unused went"
    monkeypatch.setattr(mirror_cache, "MAX_ENTRIES", 3)
    cache = Cache(1 << 20)
    for number in range(4):
        cache.get(number, lambda: b"x")
    assert cache.get(1, lambda: b"y") == (b"x", False)
    assert cache.get(0, lambda: b"y") == (b"y", True)


def test_what_a_request_asks_for_is_read_from_its_packet_lines() -> None:
    body = b"0011command=fetch00010032want " + COMMIT.encode() + b"\n0009done\n0000"
    assert mirror_requests.parse_wants(body) == {COMMIT}
    assert mirror_requests.parse_wants(b"0014command=ls-refs\n0000") == set()
    for nonsense in (b"nonsense", b"00", b"0003", b"ffffx", b"00 1"):
        assert mirror_requests.parse_wants(nonsense) is None


def test_a_broken_or_huge_gzip_is_refused() -> None:
    import gzip

    packed = gzip.compress(b"x" * 1000)
    assert mirror_requests.unpack(packed) == b"x" * 1000
    assert mirror_requests.unpack(packed[:12] + b"!!!!" + packed[16:]) is None
    assert mirror_requests.unpack(gzip.compress(b"x" * (mirror_requests.LARGEST + 1))) is None
