"""Whole cycles against real repositories with real signatures: what is published, what is refused, and why."""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from gitsync import lease
from gitsync.cycle.run import run_cycle
from gitsync.errors import GitsyncError
from gitsync.layout import ZERO
from gitsync.settings import Ref, RefKind
from gitsync.tree.admit import MARKER
from tests.process.gitsync_world import GOOD_TREE, Signer, World


def good(world: World) -> str:
    """Publish a first commit."""
    commit = world.upstream.commit(dict(GOOD_TREE), signer=world.alice)
    state = run_cycle(world.settings)
    assert state.published is not None and state.published.commit == commit, state
    return commit


def test_a_signed_commit_is_published_read_only_with_its_signer(world: World) -> None:
    commit = good(world)
    script = world.layout.current / "prolog.d/10-hello"
    assert script.read_text() == GOOD_TREE["prolog.d/10-hello"]
    assert stat.S_IMODE(script.stat().st_mode) == 0o555
    assert stat.S_IMODE((world.layout.current / "README.md").stat().st_mode) == 0o444
    state = run_cycle(world.settings)
    assert state.published is not None
    assert "alice@example.org" in state.published.signer
    assert world.live() == commit and state.failures == 0 and state.quarantine is None


def test_the_next_commit_shares_unchanged_files_and_the_old_tree_is_unchanged(world: World) -> None:
    first = good(world)
    second = world.upstream.commit({"prolog.d/10-hello": "#!/bin/bash\necho hello again\n"}, signer=world.alice)
    run_cycle(world.settings)
    old, new = world.layout.tree(first), world.layout.tree(second)
    assert world.live() == second
    assert (old / "README.md").stat().st_ino == (new / "README.md").stat().st_ino
    assert (old / "prolog.d/10-hello").read_text() == GOOD_TREE["prolog.d/10-hello"]
    assert "again" in (new / "prolog.d/10-hello").read_text()


REFUSALS = {
    "unsigned": ({"new": "x"}, None, "not signed (author Author <author@example.org>)"),
    "wrong signer": ({"new": "x"}, "mallory", "no allowed signer holds"),
    "too large a file": ({"big": "x" * 5000}, "alice", "more than 4096 a file"),
    "too many files": ({f"f{i}": "x" for i in range(60)}, "alice", "files, more than 50"),
    "too large in all": ({f"f{i}": "x" * 4000 for i in range(10)}, "alice", "bytes, more than 20000"),
    "outside the paths": ({"forbidden/x": "x"}, "alice", "'forbidden/x': it is outside the allowed paths"),
    "broken bash": ({"prolog.d/20-bad": "#!/bin/bash\nif true; then\n"}, "alice", "prolog.d/20-bad: "),
    "broken python": ({"lib/bad.py": "def broken(:\n"}, "alice", "lib/bad.py: SyntaxError"),
    "nested beyond the compiler": ({"lib/deep.py": "(" * 4000}, "alice", "lib/deep.py"),
    "broken json": ({"policy/xid.json": "{"}, "alice", "policy/xid.json: JSONDecodeError"),
    "not executable": ({"prolog.d/30-x": "echo\n"}, "alice", "prolog.d/30-x: it is not executable"),
    "no interpreter": ({"prolog.d/30-x": "#!/usr/bin/nonesuch\n"}, "alice", "/usr/bin/nonesuch is not on this node"),
    "carriage return": ({"epilog.d/30-x": "#!/bin/bash\r\necho\r\n"}, "alice", "carriage return"),
}


@pytest.mark.parametrize("case", sorted(REFUSALS))
def test_a_bad_commit_is_refused_with_the_reason_and_the_last_good_stays(world: World, case: str) -> None:
    files, who, reason = REFUSALS[case]
    world.settings = replace(
        world.settings, max_file_bytes=4096, max_files=50, max_bytes=20000,
        paths=("prolog.d", "epilog.d", "lib", "policy", "README.md", "new", "big", "f[0-9]*"),
    )  # fmt: skip
    last_good = good(world)
    signers = {"alice": world.alice, "mallory": world.mallory}
    bad = world.upstream.commit(dict(files), signer=signers[who] if who else None)
    state = run_cycle(world.settings)
    assert state.quarantine is not None and state.quarantine.commit == bad
    assert reason in state.quarantine.reason
    assert world.live() == last_good
    assert (world.layout.current / "prolog.d/10-hello").read_text() == GOOD_TREE["prolog.d/10-hello"]
    assert sorted(path.name for path in world.layout.trees.iterdir()) == [last_good]


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("/etc/passwd", "leaves the tree, to '/etc/passwd'"),
        ("../../../../etc/passwd", "leaves the tree"),
        ("nowhere", "leads to nothing"),
        ("lib/../../x", "leaves the tree"),
    ],
)
def test_a_link_that_escapes_is_refused(world: World, target: str, reason: str) -> None:
    last_good = good(world)
    (world.upstream.work / "escape").symlink_to(target)
    world.upstream.commit(signer=world.alice)
    state = run_cycle(world.settings)
    assert state.quarantine is not None and reason in state.quarantine.reason
    assert world.live() == last_good


def test_a_link_that_escapes_through_another_link_is_refused(world: World) -> None:
    last_good = good(world)
    (world.upstream.work / "deep/er").mkdir(parents=True)
    (world.upstream.work / "deep/er/file").write_text("x")
    (world.upstream.work / "door").symlink_to("deep/er")
    (world.upstream.work / "inside").symlink_to("door/file")
    inside = world.upstream.commit(signer=world.alice)
    run_cycle(world.settings)
    assert world.live() == inside != last_good
    # Lexically inside; in truth deep/er/../../.. is above the tree.
    (world.upstream.work / "outside").symlink_to("door/../../../x")
    world.upstream.commit(signer=world.alice)
    state = run_cycle(world.settings)
    assert state.quarantine is not None and "'outside' leaves the tree" in state.quarantine.reason
    assert world.live() == inside


def raw_tree(world: World, *entries: tuple[str, str, str]) -> str:
    """Write a tree object that git's own commands would not write."""
    data = b"".join(f"{mode} {name}\0".encode() + bytes.fromhex(oid) for mode, name, oid in entries)
    path = world.folder / "raw"
    path.write_bytes(data)
    return world.upstream.git("hash-object", "-w", "-t", "tree", "--literally", path)


def commit_tree(world: World, tree: str) -> str:
    sign = ["-c", "gpg.format=ssh", "-c", f"user.signingkey={world.alice.key}"]
    commit = world.upstream.git(*sign, "commit-tree", "-S", "-m", "raw", "-p", "HEAD", tree)
    world.upstream.git("push", "-q", "--force", world.upstream.path, f"{commit}:refs/heads/main")
    return commit


def test_a_setuid_mode_in_a_raw_tree_is_refused(world: World) -> None:
    last_good = good(world)
    blob = world.upstream.git("rev-parse", "HEAD:README.md")
    commit_tree(world, raw_tree(world, ("104755", "tool", blob)))
    state = run_cycle(world.settings)
    assert world.live() == last_good
    assert state.quarantine is not None
    assert "'tool': its mode 104755 is setuid, setgid or sticky" in state.quarantine.reason


def test_a_name_that_leaves_the_tree_never_gets_in(world: World) -> None:
    last_good = good(world)
    blob = world.upstream.git("rev-parse", "HEAD:README.md")
    for number, (name, because) in enumerate({"..": "hasDotdot", ".git": "hasDotgit"}.items(), 1):
        commit_tree(world, raw_tree(world, ("100644", name, blob)))
        state = run_cycle(world.settings)
        assert world.live() == last_good
        # git itself takes no such object: there is nothing here that could be refused.
        assert (state.quarantine, state.failures) == (None, number) and because in state.last_error


def test_a_submodule_is_refused(world: World) -> None:
    last_good = good(world)
    world.upstream.git("update-index", "--add", "--cacheinfo", f"160000,{last_good},sub")
    sign = ["-c", "gpg.format=ssh", "-c", f"user.signingkey={world.alice.key}"]
    world.upstream.git(*sign, "commit", "-q", "-S", "-m", "sub")
    world.upstream.push()
    state = run_cycle(world.settings)
    assert state.quarantine is not None and "submodule" in state.quarantine.reason
    assert world.live() == last_good


def test_a_quarantined_commit_is_not_tried_again_until_the_ref_moves(world: World) -> None:
    good(world)
    counter = world.folder / "tried"
    world.settings = replace(
        world.settings, check_command=("bash", "-c", f'echo >>{counter}; test ! -e "{{tree}}/bad"')
    )
    world.upstream.commit({"bad": "x"}, signer=world.alice)
    for _ in range(3):
        state = run_cycle(world.settings)
        assert state.quarantine is not None and state.failures == 0
    assert counter.read_text().count("\n") == 1
    assert state.refused_total == 1
    mended = world.upstream.commit({"bad": None}, signer=world.alice)
    state = run_cycle(world.settings)
    assert state.quarantine is None and world.live() == mended


def test_a_quarantine_ends_when_the_allowed_signers_change(world: World) -> None:
    good(world)
    commit = world.upstream.commit({"new": "x"}, signer=world.mallory)
    assert run_cycle(world.settings).quarantine is not None
    with world.settings.allowed_signers.open("a") as allowed:
        allowed.write(world.mallory.allowed_line)
    state = run_cycle(world.settings)
    assert state.quarantine is None and world.live() == commit


def test_a_check_that_changes_the_tree_is_refused(world: World) -> None:
    last_good = good(world)
    world.settings = replace(world.settings, check_command=("bash", "-c", "touch added"))
    world.upstream.commit({"new": "x"}, signer=world.alice)
    state = run_cycle(world.settings)
    assert state.quarantine is not None and "added was added" in state.quarantine.reason
    assert world.live() == last_good


def test_a_check_that_hangs_is_forgiven_twice(world: World) -> None:
    last_good = good(world)
    world.settings = replace(world.settings, check_command=("sleep", "60"), check_timeout=0.2)
    world.upstream.commit({"new": "x"}, signer=world.alice)
    for failures in (1, 2):
        state = run_cycle(world.settings)
        assert state.quarantine is None and state.failures == failures and "did not end within" in state.last_error
    state = run_cycle(world.settings)
    assert state.quarantine is not None and world.live() == last_good


def test_no_allowed_signers_is_an_error_and_not_a_licence(world: World) -> None:
    world.upstream.commit(dict(GOOD_TREE), signer=world.alice)
    world.settings = replace(world.settings, allowed_signers=world.folder / "missing")
    state = run_cycle(world.settings)
    assert state.failures == 1 and "the file of allowed signers is missing" in state.last_error
    assert state.published is not None and state.published.commit == ZERO


def test_an_older_commit_is_refused_unless_allowed(world: World) -> None:
    first = good(world)
    second = world.upstream.commit({"new": "x"}, signer=world.alice)
    run_cycle(world.settings)
    world.upstream.git("reset", "-q", "--hard", first)
    world.upstream.push()
    state = run_cycle(world.settings)
    assert state.quarantine is not None and "older than the published one" in state.quarantine.reason
    assert world.live() == second


def test_a_signed_tag_vouches_for_an_unsigned_commit(world: World) -> None:
    commit = world.upstream.commit(dict(GOOD_TREE), signer=None)
    world.upstream.tag("v1", signer=world.alice)
    world.settings = replace(world.settings, ref=Ref(RefKind.TAG, "v1"))
    state = run_cycle(world.settings)
    assert state.published is not None and state.published.commit == commit
    assert "alice" in state.published.signer


def test_a_tag_served_under_another_name_is_refused(world: World) -> None:
    world.upstream.commit(dict(GOOD_TREE), signer=None)
    world.upstream.tag("v1", signer=world.alice)
    world.upstream.git("push", "-q", world.upstream.path, "refs/tags/v1:refs/tags/v2")
    world.settings = replace(world.settings, ref=Ref(RefKind.TAG, "v2"))
    state = run_cycle(world.settings)
    assert state.quarantine is not None and "signed as 'v1'" in state.quarantine.reason
    assert world.live() == world.settings.zero.name


def test_an_exact_commit_is_followed_and_then_needs_no_server(world: World) -> None:
    first = good(world)
    world.upstream.commit({"new": "x"}, signer=world.alice)
    world.settings = replace(world.settings, ref=Ref(RefKind.COMMIT, first))
    run_cycle(world.settings)
    world.upstream.path.rename(world.folder / "gone")
    state = run_cycle(world.settings)
    assert state.failures == 0 and world.live() == first


def test_a_subdirectory_is_published_alone(world: World) -> None:
    world.upstream.commit({"scripts/prolog.d/1": "#!/bin/sh\n", "other/file": "x"}, signer=world.alice)
    world.settings = replace(world.settings, subdir="scripts")
    run_cycle(world.settings)
    assert sorted(path.name for path in world.layout.current.iterdir()) == ["prolog.d"]


def test_offline_starts_from_generation_zero_and_later_from_the_last_good(world: World) -> None:
    world.settings = replace(world.settings, repo=str(world.folder / "nothing-here"))
    state = run_cycle(world.settings)
    assert state.published is not None and state.published.commit == ZERO and state.failures == 1
    with lease.hold(world.layout) as held:
        assert held.commit == ZERO and (held.path / "prolog.d/10-hello").is_file()
    world.settings = replace(world.settings, repo=str(world.upstream.path))
    commit = good(world)
    world.settings = replace(world.settings, repo=str(world.folder / "nothing-here"))
    # The link and the state are lost with the node's power; the tree is there.
    world.layout.current.unlink()
    state = run_cycle(world.settings)
    assert world.live() == commit and state.failures == 1


def test_a_changed_tree_is_mended(world: World) -> None:
    commit = good(world)
    script = world.layout.tree(commit) / "prolog.d/10-hello"
    script.chmod(0o755)
    script.write_text("#!/bin/bash\nrm -rf /\n")
    (world.layout.tree(commit) / "stranger").write_text("x")
    run_cycle(world.settings)
    assert script.read_text() == GOOD_TREE["prolog.d/10-hello"]
    assert not (world.layout.tree(commit) / "stranger").exists()


def test_a_broken_repository_is_fetched_anew(world: World) -> None:
    good(world)
    for path in (world.layout.repository / "objects").rglob("*"):
        if path.is_file():
            path.chmod(0o644)
            path.write_bytes(b"")
    commit = world.upstream.commit({"new": "x"}, signer=world.alice)
    for _ in range(2):
        state = run_cycle(world.settings)
    assert state.failures == 0 and world.live() == commit


def test_a_transfer_beyond_the_limit_is_cut_off_and_not_fetched_twice(world: World) -> None:
    last_good = good(world)
    world.settings = replace(world.settings, max_transfer_bytes=100_000)
    big = world.upstream.commit({"big": os.urandom(1_000_000)}, signer=world.alice)
    state = run_cycle(world.settings)
    assert state.quarantine is not None and state.quarantine.oid == big and state.quarantine.step == "transfer"
    before = sum(path.stat().st_size for path in world.layout.repository.rglob("*") if path.is_file())
    assert before < 200_000
    state = run_cycle(world.settings)
    assert state.refused_total == 1 and state.failures == 0 and world.live() == last_good


def test_rollback_leaves_the_bad_commit_until_the_ref_moves(world: World) -> None:
    first = good(world)
    second = world.upstream.commit({"new": "x"}, signer=world.alice)
    run_cycle(world.settings)
    run_cycle(world.settings, only=first, leave=True)
    for _ in range(2):
        state = run_cycle(world.settings)
        assert world.live() == first
    assert state.quarantine is not None and state.quarantine.commit == second
    third = world.upstream.commit({"new": "y"}, signer=world.alice)
    run_cycle(world.settings)
    assert world.live() == third


def test_rollback_works_without_server_and_repository(world: World) -> None:
    first = good(world)
    world.upstream.commit({"new": "x"}, signer=world.alice)
    run_cycle(world.settings)
    world.layout.repository.rename(world.folder / "lost")
    world.upstream.path.rename(world.folder / "gone")
    run_cycle(world.settings, only=first, leave=True)
    assert world.live() == first
    run_cycle(world.settings, only=ZERO, leave=True)
    with lease.hold(world.layout) as held:
        assert held.commit == ZERO


def test_a_rollback_to_an_unsigned_commit_is_refused(world: World) -> None:
    unsigned = world.upstream.commit(dict(GOOD_TREE), signer=None)
    commit = world.upstream.commit({"new": "x"}, signer=world.alice)
    run_cycle(world.settings)
    with pytest.raises(GitsyncError, match="not signed"):
        run_cycle(world.settings, only=unsigned, leave=True)
    assert world.live() == commit


def test_trees_beyond_those_to_keep_are_pruned_but_not_one_that_is_held(world: World) -> None:
    world.settings = replace(world.settings, keep=2)
    first = good(world)
    with lease.hold(world.layout) as held:
        assert held.commit == first and held.locked
        for number in range(4):
            world.upstream.commit({"new": f"{number}"}, signer=world.alice)
            run_cycle(world.settings)
        assert (held.path / "prolog.d/10-hello").is_file()
        assert len(list(world.layout.trees.iterdir())) == 3
    run_cycle(world.settings)
    trees = {path.name for path in world.layout.trees.iterdir()}
    assert first not in trees and len(trees) == 2
    assert {path.name for path in world.layout.leases.iterdir()} == trees


def test_revoked_and_expired_keys_do_not_count(world: World) -> None:
    commit = good(world)
    world.settings = replace(world.settings, revoked_signers=world.alice.key.with_suffix(".pub"))
    world.upstream.commit({"new": "x"}, signer=world.alice)
    state = run_cycle(world.settings)
    assert state.quarantine is not None and "revoked" in state.quarantine.reason
    assert "alice@example.org" in state.quarantine.reason
    bob = Signer.make(world.folder, "bob")
    line = bob.allowed_line.replace('namespaces="git"', 'namespaces="git",valid-before="20200101"')
    world.settings = replace(world.settings, revoked_signers=None)
    world.settings.allowed_signers.write_text(world.alice.allowed_line + line)
    world.upstream.commit({"new": "y"}, signer=bob)
    state = run_cycle(world.settings)
    assert state.quarantine is not None and "key has expired" in state.quarantine.reason
    assert world.live() == commit


def default_tree() -> dict[str, str | bytes | None]:
    """Read the tree that every image carries."""
    scripts = Path(__file__).resolve().parents[3] / "scripts"
    return {
        str(path.relative_to(scripts)): path.read_bytes()
        for path in sorted(scripts.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_default_tree_passes_every_check(world: World) -> None:
    commit = world.upstream.commit(default_tree(), signer=world.alice)
    state = run_cycle(world.settings)
    assert state.quarantine is None and state.failures == 0, state
    assert world.live() == commit


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        (b"if measured.answering < wanted:", b"if False:", "gpu_count on sick-gpu: wanted problem"),
        (b"if measured.answering < wanted:", b"raise SystemExit(0)\n    if False:", "instead of judging"),
        (b"import re\n", b"import nonesuch\n", "nonesuch"),
    ],
    ids=["blind", "exits", "imports nothing"],
)
def test_a_health_check_that_fails_its_recordings_is_refused(
    world: World, before: bytes, after: bytes, reason: str
) -> None:
    files = default_tree()
    last_good = world.upstream.commit(files, signer=world.alice)
    run_cycle(world.settings)
    source = files["health.d/gpu_count.py"]
    assert isinstance(source, bytes) and before in source
    world.upstream.commit({"health.d/gpu_count.py": source.replace(before, after)}, signer=world.alice)
    state = run_cycle(world.settings)
    assert state.quarantine is not None and reason in state.quarantine.reason
    assert world.live() == last_good


def test_a_published_commit_is_judged_again_when_the_signers_change(world: World) -> None:
    """The commit stays published, since nothing better is known; the node reports that no signer vouches for it."""
    commit = good(world)
    world.settings.allowed_signers.write_text(world.mallory.allowed_line)
    for _ in range(2):
        state = run_cycle(world.settings)
        assert state.quarantine is not None and state.quarantine.commit == commit
        assert state.refused_total == 1 and world.live() == commit
    world.settings.allowed_signers.write_text(world.alice.allowed_line)
    state = run_cycle(world.settings)
    assert state.quarantine is None and world.live() == commit


def test_another_subdirectory_of_the_same_commit_is_published_anew(world: World) -> None:
    marker = (world.upstream.work / MARKER).read_text()
    files = {f"{name}/{MARKER}": marker for name in ("one", "two")}
    world.upstream.commit(
        {"one/prolog.d/1": "#!/bin/sh\n", "two/prolog.d/2": "#!/bin/sh\n", **files}, signer=world.alice
    )
    for name, script in (("one", "1"), ("two", "2")):
        world.settings = replace(world.settings, subdir=name)
        run_cycle(world.settings)
        assert [path.name for path in (world.layout.current / "prolog.d").iterdir()] == [script]
