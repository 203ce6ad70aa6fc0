"""In which order missing pods are made: no pool, however much it misses, keeps another from its pods."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

from fleet.decide.actions import Change, CreatePod, Key, deed


def in_turn(changes: Iterable[Change], refused: Container[Key], paces: Mapping[str, int]) -> list[Change]:
    """One of each pool's, then the second of each, after all else. `paces`: of which pool no more than so many."""
    rest: list[Change] = []
    found: dict[str, list[CreatePod]] = {}
    for change in changes:
        if isinstance(change, CreatePod):
            found.setdefault(change.pool.name, []).append(change)
        else:
            rest.append(change)
    turns: list[tuple[int, CreatePod]] = []
    for name, ones in found.items():
        # Those first that were not refused: what keeps one from coming may be its own matter.
        ones.sort(key=lambda one: deed(one) in refused)
        turns += enumerate(ones[: paces.get(name, len(ones))])
    turns.sort(key=lambda turn: turn[0])
    return [*rest, *(one for _, one in turns)]
