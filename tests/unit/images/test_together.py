"""Concurrent image builds: an image waits for its dependencies, and a failure stops the builds beside it."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import pytest

from images.make.build import build_concurrently

PATIENCE = 30.0


@dataclass(frozen=True)
class Named:
    key: str
    needs: tuple[str, ...] = ()


def named(**needs: str) -> dict[str, Any]:
    return {key: Named(key, tuple(below.split())) for key, below in needs.items()}


def not_asked() -> None:
    pytest.fail("nothing failed")


def test_each_is_made_when_all_that_it_needs_are_there() -> None:
    images = named(role="left right", left="os", right="os", os="", alone="elsewhere")
    there: list[str] = []

    def make(image: Any) -> float:
        assert {"os", "left", "right"} & set(image.needs) <= set(there), image
        return 1.5

    took: list[float] = []

    def done(image: Any, seconds: float) -> None:
        there.append(image.key)
        took.append(seconds)

    build_concurrently(images, 2, make, done, not_asked)
    assert sorted(there) == sorted(images) and took == [1.5] * 5
    assert set(images) == {"role", "left", "right", "os", "alone"}, "whose they are still has them"


def test_two_are_made_at_once_where_there_are_two_hands() -> None:
    both = threading.Barrier(2, timeout=PATIENCE)

    def make(image: Any) -> float:
        both.wait()
        return 0.0

    build_concurrently(named(left="", right=""), 2, make, lambda image, seconds: None, not_asked)


def test_a_failure_ends_the_others_and_begins_none() -> None:
    begun, ended = threading.Event(), threading.Event()
    made: list[str] = []

    def make(image: Any) -> float:
        made.append(image.key)
        if image.key == "fails":
            assert begun.wait(PATIENCE)
            raise ValueError("no space left")
        begun.set()
        ended.wait(PATIENCE)
        return 0.0

    with pytest.raises(ValueError, match="no space left"):
        build_concurrently(
            named(fails="", runs="", later="fails", waits="runs"), 2, make, lambda image, seconds: None, ended.set
        )
    assert sorted(made) == ["fails", "runs"]
    assert ended.is_set(), "what ran was sat through"
