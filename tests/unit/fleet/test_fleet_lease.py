"""Leader election with one Lease: never do two fleets act at once, whatever their clocks and delays."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet import FleetError
from fleet.act import leader_election
from fleet.act.leader_election import HOLDS_S, LASTS_S, LeaseRecord, LeaseState, after_read, after_write, should_write


def test_a_free_lease_is_taken_and_one_that_is_renewed_is_not() -> None:
    free = after_read(LeaseState(), LeaseRecord("1"), "a", 100.0)
    assert should_write(free, "a", 100.0)
    other = after_read(LeaseState(), LeaseRecord("1", "b"), "a", 100.0)
    assert not should_write(other, "a", 100.0 + LASTS_S - 0.1)
    renewed = after_read(other, LeaseRecord("2", "b"), "a", 110.0)
    assert not should_write(renewed, "a", 100.0 + LASTS_S)
    assert should_write(after_read(renewed, LeaseRecord("2", "b"), "a", 120.0), "a", 110.0 + LASTS_S)


def test_its_holder_counts_from_the_beginning_of_his_write_and_not_from_its_answer() -> None:
    held = after_write(LeaseRecord("2", "a"), begun=100.0, now=108.0)
    assert held.holds(100.0 + HOLDS_S - 0.1)
    assert not held.holds(100.0 + HOLDS_S)


def test_whoever_sees_anothers_name_in_it_does_not_act_any_more() -> None:
    held = after_write(LeaseRecord("2", "a"), 100.0, 100.0)
    assert after_read(held, LeaseRecord("2", "a"), "a", 101.0).holds(101.0)
    assert not after_read(held, LeaseRecord("3", "b"), "a", 101.0).holds(101.0)
    assert not after_read(held, LeaseRecord("3", ""), "a", 101.0).holds(101.0)


def test_a_lease_is_written_with_the_version_that_was_read_and_keeps_what_is_not_ours() -> None:
    item = {"metadata": {"name": "fleet", "resourceVersion": "7"}, "spec": {"holderIdentity": "b", "strategy": "x"}}
    written = leader_election.renew_lease(item, "a", 1_795_000_000.25)
    assert written["metadata"] == item["metadata"]
    assert written["spec"]["renewTime"] == "2026-11-18T11:06:40.250000Z"
    assert (written["spec"]["holderIdentity"], written["spec"]["leaseTransitions"], written["spec"]["strategy"]) == (
        "a", 1, "x",
    )  # fmt: skip
    assert leader_election.renew_lease(written, "a", 1_795_000_002.0)["spec"]["leaseTransitions"] == 1


@pytest.mark.parametrize("spec", [{"holderIdentity": 7}, {"leaseTransitions": "x"}, [], "x"])
def test_a_lease_that_is_none_is_nobodys(spec: object) -> None:
    with pytest.raises(FleetError):
        leader_election.parse_lease({"metadata": {"resourceVersion": "1"}, "spec": spec})


@dataclass
class Candidate:
    """Candidate whose clock has an arbitrary offset and pace, and whose calls take arbitrarily long."""

    name: str
    offset: float
    pace: float
    standing: LeaseState = field(default_factory=LeaseState)
    phase: str = "idle"
    begun: float = 0.0
    told: LeaseRecord | None = None

    def clock(self, now: float) -> float:
        return self.offset + now * self.pace


class Story:
    def __init__(self, candidates: list[Candidate]) -> None:
        self.now, self.lease, self.candidates = 1000.0, LeaseRecord("0"), candidates
        self.commits = 0

    def step(self, one: Candidate, lost: bool) -> None:
        clock = one.clock(self.now)
        if one.phase == "idle":
            one.standing, one.phase = after_read(one.standing, self.lease, one.name, clock), "looked"
        elif one.phase == "looked":
            one.begun, one.phase = clock, "writing" if should_write(one.standing, one.name, clock) else "idle"
        elif one.phase == "writing":
            seen = one.standing.lease
            one.told = None
            if seen is not None and seen.version == self.lease.version:
                self.commits += 1
                self.lease = one.told = LeaseRecord(str(self.commits), one.name)
            one.phase = "answered"
        else:
            if one.told is not None and not lost:
                one.standing = after_write(one.told, one.begun, clock)
            one.phase = "idle"

    def act(self) -> list[str]:
        return [one.name for one in self.candidates if one.standing.holds(one.clock(self.now))]


paces = st.floats(0.9, 1.1)
offsets = st.floats(-1e6, 1e6)
# How much time passes, which candidate acts, through how many of a turn's four phases, and whether an answer is lost.
moments = st.tuples(st.sampled_from([0.0, 1.0, 8.0, 14.0, 20.0]), st.integers(0, 1), st.sampled_from([4, 1, 2, 3]),
                    st.sampled_from([False, False, True]))  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(st.lists(st.tuples(offsets, paces), min_size=2, max_size=2), st.lists(moments, min_size=4, max_size=40))
def test_never_do_two_act(clocks: list[tuple[float, float]], steps: list[tuple[float, int, int, bool]]) -> None:
    story = Story([Candidate(f"c{number}", *clock) for number, clock in enumerate(clocks)])
    for passes, who, phases, lost in steps:
        story.now += passes
        assert len(story.act()) <= 1
        for _ in range(phases):
            story.step(story.candidates[who], lost)
            assert len(story.act()) <= 1


def test_when_all_is_quiet_there_is_one_and_it_stays() -> None:
    story = Story([Candidate("a", 5.0, 1.0), Candidate("b", 1e6, 1.05)])
    acted = set()
    for _ in range(100):
        story.now += 0.5
        for one in story.candidates:
            story.step(one, False)
        acted |= set(story.act())
    assert story.act() == ["a"] and acted == {"a"}
    # When the leader is gone, the other candidate takes over.
    story.candidates[0].phase = "dead"
    for _ in range(100):
        story.now += 0.5
        story.step(story.candidates[1], False)
    assert story.act() == ["b"]
