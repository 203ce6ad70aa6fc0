"""What may be repeated to everybody of what a service said."""

from __future__ import annotations

import errno
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from init.quotes import is_ours, public, unquoted
from init.spec import parse_service

PROOF = ["builtin:cluster-proof"]
KEY = ["builtin:prepare", "munge-key"]
REASON = "exited 1: munge key rejected by slurm-controller:6817"


@pytest.mark.parametrize(
    ("why", "shown"),
    [
        ("exited 3: password hunter2", "exited 3"),
        ("killed by KILL: a: b: c", "killed by KILL"),
        ("ended, and its parent took its status: x", "ended, and its parent took its status"),
        ("exited 3: x; gave up after 5 failures within 60 s", "exited 3; gave up after 5 failures within 60 s"),
        ("exited 78: x; no retry can mend exit code 78", "exited 78; no retry can mend exit code 78"),
        ("/bin/rm (prepare) exited 1: x", "/bin/rm (prepare) exited 1"),
        (
            "slurmctld exited 1: x; gave up after 21 failures within 600 s",
            "slurmctld exited 1; gave up after 21 failures within 600 s",
        ),
        ("exited 1: Error: Failed to bind x: No space left on device", "exited 1 (No space left on device)"),
        (
            "exited 1: fatal: open(/x): Permission denied.; gave up after 5 failures within 60 s",
            "exited 1 (Permission denied); gave up after 5 failures within 60 s",
        ),
        ("exited 3", "exited 3"),
        ("cannot fork: Resource temporarily unavailable",) * 2,
        ("watchdog: no sign of life for 30 s",) * 2,
        (
            "not ready within 30 s: tcp ctl:6817 refused\t(resolves to 10.1.2.3)",
            "not ready within 30 s: tcp ctl:6817 refused",
        ),
        ("exited 0 and left processes behind (7): it went to the background; run it in the foreground",) * 2,
        ("",) * 2,
    ],
)
def test_an_end_goes_without_the_line_it_quotes(why: str, shown: str) -> None:
    assert unquoted(why) == shown


@given(st.text(st.characters(exclude_characters=";")))
def test_whatever_the_line_it_is_not_repeated(line: str) -> None:
    shown = unquoted(f"exited 1: {line}")
    assert shown == "exited 1" or shown[len("exited 1 (") : -1] in {os.strerror(number) for number in errno.errorcode}


def test_the_words_of_inits_own_programs_are_shown() -> None:
    daemon = parse_service("munged", {"command": ["/usr/sbin/munged"], "prepare": [["/bin/rm", "x"], KEY]}, "t")
    proof = parse_service("cluster-proof", {"kind": "oneshot", "command": PROOF}, "t")
    assert public(REASON, proof) == REASON
    assert public(REASON, daemon) == "exited 1"
    assert public(f"{KEY[0]} (prepare) {REASON}", daemon) == f"{KEY[0]} (prepare) {REASON}"
    assert public("/bin/rm (prepare) exited 1: x", daemon) == "/bin/rm (prepare) exited 1"


@pytest.mark.parametrize(
    ("command", "ours"),
    [
        (PROOF, True),
        (["/opt/minivm/bin/python3", "-I", "-m", "init.broker"], True),
        (["/opt/minivm/bin/python3", "-I", "-m", "gitsync.mounts_answer"], True),
        (["/usr/bin/gitsync", "loop"], False),
        (["/opt/minivm/bin/python3", "-I", "-m", "gitsync.health_loop"], False),
        (["/bin/sh", "-m"], False),
    ],
)
def test_whose_program_it_is(command: list[str], ours: bool) -> None:
    assert is_ours(tuple(command)) is ours
