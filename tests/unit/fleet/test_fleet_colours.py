"""Contrast of the page's colours in its style sheet: every state is visible on a light and on a dark background."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[3] / "fleet" / "page"
# WCAG 2.1 contrast: 1.4.3 for letters, 1.4.11 for meaningful non-text shapes.
LETTERS, SHAPES = 4.5, 3.0
# These two states have no letter and the same shape, so only their lightness tells them apart.
BARE = ("TakesJobs", "Busy")


def sheet() -> str:
    return (PAGE / "page.css").read_text()


def names(text: str) -> dict[str, str]:
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", text))


def scheme(dark: bool) -> Mapping[str, str]:
    of_dark = re.search(r"@media \(prefers-color-scheme: dark\) \{\n(.*?)\n\}", sheet(), re.DOTALL)
    assert of_dark is not None
    light = names(sheet()[: of_dark.start()])
    assert light.keys() >= names(of_dark[1]).keys(), "dark only says another colour for what light has"
    return {**light, **names(of_dark[1])} if dark else light


def states() -> list[str]:
    table = re.search(r"const STATES = \{(.*?)\};", (PAGE / "page.js").read_text(), re.DOTALL)
    assert table is not None
    return re.findall(r"(\w+): \[", table[1])


def colours(state: str, of: Mapping[str, str]) -> tuple[str, str]:
    """Return the colours of a cell and of its letter; a state without a rule has those of every cell."""
    rules = dict(re.findall(r"^(\.[\w., ]+) \{(.*?)\}", sheet(), re.DOTALL | re.MULTILINE))
    said = next((body for who, body in rules.items() if f".{state}" in who.split(", ")), rules[".cell, .sample"])
    found = re.search(r"background: ([^;]+); color: ([^;]+);", said)
    assert found is not None, state
    own, letter = (of[one[6:-1]] if one.startswith("var(--") else one for one in found.groups())
    return own, letter


def light(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    less, more = sorted((light(one), light(other)))
    return (more + 0.05) / (less + 0.05)


DARK = pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])


def test_contrast_is_as_it_is_defined() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#767676", "#ffffff") == pytest.approx(4.54, abs=0.01)


@DARK
@pytest.mark.parametrize("state", states())
def test_every_cell_stands_out_from_the_paper_and_its_letter_from_it(state: str, dark: bool) -> None:
    of = scheme(dark)
    own, letter = colours(state, of)
    assert max(contrast(own, of["paper"]), contrast(of["edge"], of["paper"])) >= SHAPES
    assert contrast(own, letter) >= LETTERS


@DARK
def test_a_machine_that_waits_for_jobs_is_told_from_one_that_has_some(dark: bool) -> None:
    idle, busy = (colours(state, scheme(dark))[0] for state in BARE)
    assert contrast(idle, busy) >= SHAPES


def test_the_edge_is_drawn_and_no_state_takes_it_away() -> None:
    rules = re.findall(r"^(\.[\w., ]+) \{(.*?)\}", sheet(), re.DOTALL | re.MULTILINE)
    edges = {who: edge for who, body in rules for edge in re.findall(r"border(?:-color)?: ([^;]+);", body)}
    assert edges == {
        ".cell, .sample": "1px solid var(--edge)",
        ".cordoned": "2px solid var(--ink)",
        ".close": "1px solid var(--line)",
    }


def test_in_the_dark_a_cell_is_seen_without_its_edge() -> None:
    """Cells stand out in dark mode without their border.

    A thin grey line on black is easily lost, and cells of one colour are the largest part of the page.
    """
    of = scheme(dark=True)
    found = {state: contrast(colours(state, of)[0], of["paper"]) for state in states()}
    assert {state: one for state, one in found.items() if one < SHAPES} == {}


@DARK
def test_words_marks_and_alarms_are_read(dark: bool) -> None:
    of = scheme(dark)
    for word in ("ink", "quiet", "down"):
        for under in ("paper", "panel"):
            assert contrast(of[word], of[under]) >= LETTERS, (word, under)
    assert contrast(of["mark"], of["paper"]) >= SHAPES, "what is proposed, and where the keys are"
