"""A good signature on the wrong thing: another repository of the same person, an emptied one, the past."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest

from gitsync import state as gitsync_state
from gitsync.cycle.run import run_cycle
from gitsync.layout import ZERO
from gitsync.mirror import update as mirror_update
from gitsync.repo import transfer
from gitsync.settings import Backward, Ref, RefKind
from gitsync.state import GitsyncState
from gitsync.tree.admit import MARKER
from tests.process.gitsync_world import GOOD_TREE, World, run

DAY = 86400


def says(name: str = "minivm-scripts", **more: object) -> str:
    return json.dumps({"name": name, **more}) + "\n"


def refusal(state: GitsyncState) -> str:
    assert state.quarantine is not None, state
    return state.quarantine.reason


def test_her_dotfiles_with_her_good_signature_are_not_the_scripts(world: World) -> None:
    dotfiles = {MARKER: None, ".bashrc": "alias ll='ls -l'\n", "bin/hello": "#!/bin/sh\necho hello\n"}
    world.upstream.commit(dict(dotfiles), signer=world.alice)
    assert f"it has no {MARKER}" in refusal(run_cycle(world.settings))
    assert world.live() == world.settings.zero.name


def test_her_other_clusters_scripts_are_not_this_ones(world: World) -> None:
    last_good = world.upstream.commit(dict(GOOD_TREE), signer=world.alice)
    run_cycle(world.settings)
    world.upstream.commit({MARKER: says("scripts-of-the-test-cluster")}, signer=world.alice)
    why = refusal(run_cycle(world.settings))
    assert "it is 'scripts-of-the-test-cluster', and 'minivm-scripts' is wanted" in why
    assert world.live() == last_good
    state = run_cycle(replace(world.settings, name="scripts-of-the-test-cluster"))
    assert state.quarantine is None and world.live() != last_good


@pytest.mark.parametrize("signed", [True, False])
def test_an_emptied_tree_is_refused_and_the_last_good_one_stays(world: World, signed: bool) -> None:
    """A README left of everything: no prologs, no checks, and nobody to say so."""
    world.settings = replace(world.settings, verify=signed)
    signer = world.alice if signed else None
    last_good = world.upstream.commit(dict(GOOD_TREE), signer=signer)
    run_cycle(world.settings)
    emptied: dict[str, str | bytes | None] = {name: None for name in GOOD_TREE if name != "README.md"}
    world.upstream.commit(emptied, signer=signer)
    why = refusal(run_cycle(world.settings))
    # prolog.d by generation zero, epilog.d by the tree that was published.
    assert "it has no script in epilog.d, prolog.d" in why
    assert world.live() == last_good


def test_an_empty_tree_on_a_fresh_node_leaves_generation_zero(world: World) -> None:
    world.upstream.commit({"README.md": "nothing\n", "prolog.d/README.md": "here\n"}, signer=world.alice)
    assert "it has no script in prolog.d" in refusal(run_cycle(world.settings))
    assert world.live() == world.settings.zero.name


def test_a_site_that_means_to_be_without_says_so_in_the_signed_tree(world: World) -> None:
    world.upstream.commit(dict(GOOD_TREE), signer=world.alice)
    run_cycle(world.settings)
    meant = world.upstream.commit({"epilog.d/10-bye": None, MARKER: says(without=["epilog.d"])}, signer=world.alice)
    state = run_cycle(world.settings)
    assert state.quarantine is None and world.live() == meant


BAD_MARKERS = {
    "no JSON": ("{", "not JSON"),
    "a list": ("[]", "not an object"),
    "nested beyond the parser": ("[" * 4000, "not JSON"),
    "too long": (says(about="x" * 5000), "not a file of at most 4096 bytes"),
    "a typo": ('{"name": "minivm-scripts", "witout": []}', "unknown key 'witout', did you mean 'without'?"),
    "no such kind": (says(without=["prologs"]), "without: wanted a list of prolog.d"),
    "no name": ("{}", "name: wanted"),
    "no date": (says(not_before="soon"), "not_before: 'soon' is not a date"),
}


@pytest.mark.parametrize("case", sorted(BAD_MARKERS))
def test_a_marker_that_cannot_be_read_vouches_for_nothing(world: World, case: str) -> None:
    text, reason = BAD_MARKERS[case]
    world.upstream.commit({**GOOD_TREE, MARKER: text}, signer=world.alice)
    assert reason in refusal(run_cycle(world.settings))
    assert world.live() == world.settings.zero.name


def test_a_link_is_no_marker(world: World) -> None:
    (world.upstream.work / MARKER).unlink()
    (world.upstream.work / MARKER).symlink_to("README.md")
    world.upstream.commit(dict(GOOD_TREE), signer=world.alice)
    assert f"its {MARKER} is not a file" in refusal(run_cycle(world.settings))


def test_a_commit_named_by_its_hash_needs_no_marker_but_must_be_whole(world: World) -> None:
    """A rollback may lead to a commit older than the marker; no server can put another commit in its place."""
    old = world.upstream.commit({**GOOD_TREE, MARKER: None}, signer=world.alice)
    state = run_cycle(replace(world.settings, ref=Ref(RefKind.COMMIT, old)))
    assert state.quarantine is None and world.live() == old
    hollow = world.upstream.commit({"prolog.d/10-hello": None}, signer=world.alice)
    assert "no script in prolog.d" in refusal(run_cycle(replace(world.settings, ref=Ref(RefKind.COMMIT, hollow))))


def test_the_marker_is_allowed_whatever_the_paths_are(world: World) -> None:
    world.settings = replace(world.settings, paths=("prolog.d", "epilog.d", "lib", "README.md"))
    commit = world.upstream.commit(dict(GOOD_TREE), signer=world.alice)
    assert run_cycle(world.settings).quarantine is None and world.live() == commit


def date(days_from_now: float) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(time.time() + days_from_now * DAY))


def test_a_fresh_node_takes_no_commit_from_before_generation_zero(world: World) -> None:
    """A server that replays last year's release, holes and good signature and all, to a node that knows no other."""
    (world.settings.zero / MARKER).write_text(says(not_before=date(-30)))
    world.upstream.clock -= 365 * DAY
    world.upstream.commit(dict(GOOD_TREE), signer=world.alice)
    why = refusal(run_cycle(world.settings))
    assert "days older than the oldest commit that this node accepts (generation zero)" in why
    assert world.live() == world.settings.zero.name
    # A site whose scripts have not changed for a year says so, and keeps its floor.
    named = replace(world.settings, not_before=time.time() - 400 * DAY)
    assert run_cycle(named).quarantine is None
    world.upstream.clock += 365 * DAY
    newest = world.upstream.commit({"new": "x"}, signer=world.alice)
    run_cycle(world.settings)
    assert world.live() == newest


def test_the_operators_floor_stands_above_generation_zeros(world: World) -> None:
    world.upstream.commit(dict(GOOD_TREE), signer=world.alice)
    world.settings = replace(world.settings, not_before=time.time() + DAY)
    assert "(MINIVM_GITSYNC_NOT_BEFORE)" in refusal(run_cycle(world.settings))
    assert world.live() == world.settings.zero.name


def test_a_branch_stays_forward_without_signatures_too(world: World) -> None:
    """BACKWARD=refuse is a promise of its own: a force push to the past is not taken because nobody signs."""
    world.settings = replace(world.settings, verify=False)
    first = world.upstream.commit(dict(GOOD_TREE), signer=None)
    run_cycle(world.settings)
    second = world.upstream.commit({"new": "x"}, signer=None)
    run_cycle(world.settings)
    world.upstream.git("reset", "-q", "--hard", first)
    world.upstream.push()
    assert "older than the published one" in refusal(run_cycle(world.settings))
    assert world.live() == second
    allowed = run_cycle(replace(world.settings, backward=Backward.ALLOW))
    assert allowed.quarantine is None and world.live() == first


def test_a_generation_zero_that_cannot_be_read_is_no_licence(world: World) -> None:
    (world.settings.zero / MARKER).write_text("{")
    world.upstream.commit(dict(GOOD_TREE), signer=world.alice)
    state = run_cycle(world.settings)
    assert state.failures == 1 and "cannot read generation zero's marker" in state.last_error
    assert state.published is not None and state.published.commit == ZERO


@pytest.mark.parametrize("case", ["dotfiles", "emptied", "past"])
def test_the_mirror_shows_nothing_of_it_either(world: World, case: str) -> None:
    settings = mirror_update.inside(world.settings)
    if case == "past":
        (world.settings.zero / MARKER).write_text(says(not_before=date(1)))
    good = world.upstream.commit(dict(GOOD_TREE), signer=world.alice)
    known = mirror_update.update(settings)
    if case == "past":
        assert known.published is None and "generation zero" in refusal(known)
        return
    assert known.published is not None and known.published.commit == good
    wrong: dict[str, str | bytes | None] = {MARKER: None} if case == "dotfiles" else {"epilog.d/10-bye": None}
    world.upstream.commit(wrong, signer=world.alice)
    known = mirror_update.update(settings)
    assert known.published is not None and known.published.commit == good
    assert (f"no {MARKER}" if case == "dotfiles" else "no script in epilog.d") in refusal(known)


def test_the_mirror_keeps_what_it_serves_and_no_older_commit(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gitsync_state, "HISTORY", 1)
    settings = mirror_update.inside(world.settings)
    commits = []
    for number in range(3):
        commits.append(world.upstream.commit({**GOOD_TREE, "number": str(number)}, signer=world.alice))
        known = mirror_update.update(settings)
        assert known.published is not None and known.published.commit == commits[-1]
    listed = run("git", "-C", settings.layout.repository, "for-each-ref", "--format=%(refname:lstrip=3)", transfer.KEPT)
    assert sorted(listed.split()) == sorted(commits[1:])
