"""Waiting in tests: returns the first true value, or fails with the awaited condition and the last observation."""

from __future__ import annotations

import pytest

from tests.waiting import until


def test_the_first_true_answer_is_returned() -> None:
    answers = iter([0, "", None, 7, 8])
    assert until(lambda: next(answers), "a number") == 7


def test_a_wait_in_vain_says_for_what_how_long_and_what_was_there_instead() -> None:
    with pytest.raises(AssertionError) as failure:
        until(list, "a line", within=0, seen=lambda: "the log")
    assert str(failure.value) == "waited 0 s in vain: a line; the last look found []\nthe log"


def test_a_look_may_fail_at_once() -> None:
    def look() -> bool:
        raise AssertionError("it ended")

    with pytest.raises(AssertionError, match="it ended"):
        until(look, "an answer")
