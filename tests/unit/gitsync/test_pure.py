"""gitsync's decisions, without a process: settings, schedules, rings, rules, pruning, and git's messages."""

from __future__ import annotations

import json
import re
import socket
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gitsync import layout, rings, settings, state
from gitsync.errors import GitsyncError
from gitsync.repo.reader import CommitFile
from gitsync.rings import RingView
from gitsync.settings import Ref, RefKind
from gitsync.state import Candidate, GitsyncState, Published, Quarantine
from gitsync.tree import admit, check, publish
from gitsync.tree.publish import blob_hash, mtime_of

HASH = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("text", "kind", "name"),
    [
        ("main", RefKind.BRANCH, "main"),
        ("branch:tag:x".replace("tag:", ""), RefKind.BRANCH, "x"),
        ("refs/heads/fleet/a", RefKind.BRANCH, "fleet/a"),
        ("tag:v1.2", RefKind.TAG, "v1.2"),
        ("refs/tags/v1", RefKind.TAG, "v1"),
        (HASH, RefKind.COMMIT, HASH),
        (f"commit:{HASH}", RefKind.COMMIT, HASH),
    ],
)
def test_a_ref_is_read(text: str, kind: RefKind, name: str) -> None:
    assert settings.parse_ref(text) == Ref(kind, name)


@pytest.mark.parametrize("text", ["commit:0123", "-x", "a..b", "a b", "a.lock", "a@{1}", "branch:", "tag:a:b", "+x:y"])
def test_no_ref_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"hash|not a name"):
        settings.parse_ref(text)


def test_a_misspelt_setting_is_refused_with_the_nearest() -> None:
    with pytest.raises(GitsyncError, match="did you mean MINIVM_GITSYNC_ALLOWED_SIGNERS") as caught:
        settings.from_environment({"MINIVM_GITSYNC_ALLOWED_SIGNER": "/x"})
    assert caught.value.field == "MINIVM_GITSYNC_ALLOWED_SIGNER"


def test_settings_are_parsed_by_their_type_and_empty_is_unset() -> None:
    found = settings.from_environment(
        {
            "MINIVM_GITSYNC_REPO": "https://git.example.org/scripts.git",
            "MINIVM_GITSYNC_PERIOD": "5m",
            "MINIVM_GITSYNC_MAX_BYTES": "3M",
            "MINIVM_GITSYNC_VERIFY": "no",
            "MINIVM_GITSYNC_PATHS": "prolog.d, lib",
            "MINIVM_GITSYNC_CHECK_COMMAND": '["a b", "{tree}"]',
            "MINIVM_GITSYNC_REF": "",
            "MINIVM_POD_NAME": "worker-3",
            "OTHER": "x",
        }
    )
    assert (found.period, found.max_bytes, found.verify, found.pod) == (300.0, 3 << 20, False, "worker-3")
    assert found.paths == ("prolog.d", "lib") and found.check_command == ("a b", "{tree}")
    assert found.ref == Ref(RefKind.BRANCH, "main")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PERIOD", "soon"), ("PERIOD", "-1"), ("PERIOD", "inf"), ("KEEP", "2.5"), ("VERIFY", "maybe"),
        ("NOT_BEFORE", "soon"), ("NAME", "a b"),
        ("BACKWARD", "sometimes"), ("CANARY_PERCENT", "101"), ("CHECK_COMMAND", "[1]"), ("WEBHOOK", "0.0.0.0:1"),
        ("REPO", "https://user:hunter2@host/x"), ("REPO", "https://hunter2@host/x"), ("REPO", "ext::sh -c x"),
        ("REPO", "--upload-pack=x"), ("REPO", "ftp://host/x"), ("REPO", "a b"),
        ("ROOT", "scripts"), ("SUBDIR", "/etc"), ("SUBDIR", "a/../.."), ("PERIOD", "0"), ("TIMEOUT", "0s"),
        ("RING_URL", "ring.site"), ("MIRROR", "here"), ("MIRROR", "0.0.0.0:99999"), ("PATHS", "[prolog.d]"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_refused_and_named(name: str, value: str) -> None:
    with pytest.raises(GitsyncError) as caught:
        settings.from_environment({f"MINIVM_GITSYNC_{name}": value})
    # The error must not repeat a value that is refused because it contains a credential.
    assert f"MINIVM_GITSYNC_{name}" in str(caught.value) and "hunter2" not in str(caught.value)


def test_a_webhook_listens_on_an_address() -> None:
    with pytest.raises(GitsyncError, match="'here' is not host:port"):
        settings.from_environment({"MINIVM_GITSYNC_WEBHOOK": "here", "MINIVM_GITSYNC_WEBHOOK_SECRET": "/secret"})


def test_a_root_that_cannot_be_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(GitsyncError, match=r"cannot make gitsync's directories: .*file.*MINIVM_GITSYNC_ROOT"):
        publish.prepare(layout.Layout(tmp_path / "file"))


def test_what_servers_and_commits_say_reaches_no_terminal_as_it_is() -> None:
    said = str(GitsyncError("fetch", "remote: \x1b]0;owned\x07\nhello\tyou"))
    assert said == "cannot fetch: remote:  ]0;owned \nhello you"


def test_a_token_over_plain_http_is_refused_but_to_oneself(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("x")
    env = {"MINIVM_GITSYNC_TOKEN_FILE": str(token)}
    with pytest.raises(GitsyncError, match="readable on the network"):
        settings.from_environment({**env, "MINIVM_GITSYNC_REPO": "http://git.example.org/x"})
    settings.from_environment({**env, "MINIVM_GITSYNC_REPO": "http://127.0.0.1:80/x"})
    settings.from_environment({**env, "MINIVM_GITSYNC_REPO": "https://git.example.org/x"})


def test_every_setting_has_a_parser_and_a_line_in_the_reference() -> None:
    from dataclasses import fields

    reference = (Path(__file__).resolve().parents[3] / "docs/gitsync.md").read_text()
    named = {word.removeprefix(settings.PREFIX) for word in re.findall(r"`(\w+)`", reference)}
    for field in fields(settings.GitsyncSettings):
        assert str(field.type) in settings.PARSERS
        assert field.name.upper() in named


def test_a_fleet_spreads_evenly_over_the_period() -> None:
    delays = [rings.first_delay(f"worker-{n}", 60.0, published=True) for n in range(1000)]
    buckets = [sum(1 for delay in delays if second <= delay < second + 6) for second in range(0, 60, 6)]
    assert sum(buckets) == 1000 and min(buckets) > 60 and max(buckets) < 140
    assert rings.first_delay("worker-1", 60.0, published=True) == delays[1]


def test_the_backoff_grows_to_its_maximum_and_differs_by_pod() -> None:
    steps = [rings.next_delay("worker-1", 60.0, failures, 900.0) for failures in range(1, 12)]
    assert all(delay <= 900.0 for delay in steps) and steps[-1] >= 450.0 and steps[0] >= 30.0
    late = {rings.next_delay(f"worker-{n}", 60.0, 8, 900.0) for n in range(100)}
    assert len(late) == 100 and max(late) - min(late) > 300
    assert rings.next_delay("worker-1", 60.0, 10_000, 900.0) <= 900.0


def test_a_node_without_scripts_of_its_repository_asks_again_within_seconds() -> None:
    """A new cluster's git server may start after its nodes; one that stays away is asked as rarely as ever."""
    steps = [rings.next_delay("worker-1", 60.0, failures, 900.0, published=False) for failures in range(1, 12)]
    assert steps[0] <= 2.0 and sum(steps[:3]) <= 14.0
    assert steps[-1] >= 450.0 and all(delay <= 900.0 for delay in steps)
    assert rings.next_delay("worker-1", 0.5, 1, 900.0, published=False) <= 1.0


def test_the_canaries_are_the_fraction_asked_for_and_always_the_same() -> None:
    first = [n for n in range(2000) if rings.is_canary(f"worker-{n}", 5.0)]
    assert 60 < len(first) < 140
    assert set(first) <= {n for n in range(2000) if rings.is_canary(f"worker-{n}", 20.0)}


CANARY = next(f"p{n}" for n in range(100) if rings.is_canary(f"p{n}", 10))
REST = next(f"p{n}" for n in range(100) if not rings.is_canary(f"p{n}", 10))


@pytest.mark.parametrize(
    ("pod", "percent", "now", "view", "asked", "reason"),
    [
        (REST, 0, 0.0, None, False, ""),
        (CANARY, 10, 0.0, None, True, ""),
        (REST, 10, 100.0, None, False, "in 590 s"),
        (REST, 10, 700.0, None, False, ""),
        (REST, 10, 700.0, None, True, "does not answer"),
        (REST, 10, 700.0, RingView(0.0, 5, 1, ("p1: crashed",)), True, "1 node of the ring: p1: crashed"),
        (REST, 10, 700.0, RingView(50.0, 5, 0), True, ""),
        # The fleet saw this commit long ago, so a node that starts today does not wait again.
        (REST, 10, 101.0, RingView(-5000.0, 5, 0), True, ""),
        (REST, 10, 101.0, RingView(None, 0, 0), True, "in 589 s"),
    ],
)
def test_who_takes_a_commit_when(
    pod: str, percent: float, now: float, view: RingView | None, asked: bool, reason: str
) -> None:
    given = rings.reason_to_wait(pod, percent, 600.0, now, 90.0, view, ring_asked=asked)
    assert reason in given and bool(reason) == bool(given)


LIMITS = settings.GitsyncSettings(paths=("*",), max_bytes=1000, max_file_bytes=400, max_files=5)


@pytest.mark.parametrize(
    ("path", "mode", "because"),
    [
        ("../x", 0o100644, "leaves the tree"), ("a//b", 0o100644, "leaves the tree"), (".git/x", 0o100644, "reserved"),
        ("a/.GIT/x", 0o100644, "reserved"), ("a\nb", 0o100644, "control"), ("a\udcff", 0o100644, "UTF-8"),
        ("x", 0o104755, "setuid"), ("x", 0o102755, "setuid"), ("x", 0o160000, "submodule"), ("x", 0o020000, "mode"),
        ("n" * 300, 0o100644, "too long"),
    ],
)  # fmt: skip
def test_a_bad_entry_is_named_with_its_reason(path: str, mode: int, because: str) -> None:
    found = admit.list_violations([CommitFile("fine", 0o100644, HASH, 1), CommitFile(path, mode, HASH, 1)], LIMITS)
    assert len(found) == 1 and because in found[0]


def test_limits_count_files_and_bytes() -> None:
    ok = [CommitFile(f"f{n}", 0o100644, HASH, 200) for n in range(5)]
    assert admit.list_violations(ok, LIMITS) == []
    assert "6 files" in admit.list_violations([*ok, CommitFile("g", 0o100644, HASH, 0)], LIMITS)[0]
    assert "1001 bytes" in admit.list_violations([*ok[:4], CommitFile("g", 0o100644, HASH, 201)], LIMITS)[0]
    assert "401 bytes" in admit.list_violations([CommitFile("g", 0o100644, HASH, 401)], LIMITS)[0]
    assert admit.list_violations([], LIMITS) == ["it holds no file"]


def test_a_name_that_is_a_link_and_a_directory_is_refused() -> None:
    found = admit.list_violations([CommitFile("a", 0o120000, HASH, 1), CommitFile("a/b", 0o100644, HASH, 1)], LIMITS)
    assert found == ["'a': it is both a file and a directory"]


@pytest.mark.parametrize(
    ("path", "patterns", "ok"),
    [
        ("prolog.d/x", ("prolog.d",), True), ("prolog.dx/x", ("prolog.d",), False), ("a/b/c", ("a/*",), True),
        ("x.md", ("*.md",), True), ("a/x.md", ("*.md",), False), ("a", ("a/b",), False), ("a/b", ("*",), True),
    ],
)  # fmt: skip
def test_allowed_paths(path: str, patterns: tuple[str, ...], ok: bool) -> None:
    assert admit.is_allowed(path, patterns) is ok


@given(
    st.lists(st.tuples(st.integers(0, 30), st.floats(0, 1000)), min_size=1, max_size=12),
    st.integers(0, 6),
    st.floats(0, 500),
)
def test_pruning_never_takes_the_current_or_the_kept(moves: list[tuple[int, float]], keep: int, seconds: float) -> None:
    history: list[tuple[str, float]] = []
    for name, at in sorted(moves, key=lambda move: -move[1]):
        if str(name) not in [each for each, _ in history]:
            history.append((str(name), at))
    trees = [name for name, _ in history] + ["stranger"]
    current = history[0][0]
    gone = publish.list_prunable(trees, current, history, keep, seconds, 1000.0)
    assert current not in gone and len(set(gone)) == len(gone)
    left = [name for name in trees if name not in gone]
    assert len(left) >= min(len(trees), max(keep, 1))
    for at, (commit, _) in enumerate(history):
        if commit in gone:
            assert 1000.0 - history[at - 1][1] >= seconds


@pytest.mark.parametrize(
    ("status", "said", "good", "has"),
    [
        (0, 'Good "git" signature for a@b with ED25519 key SHA256:xyz', True, "a@b (ED25519 key SHA256:xyz)"),
        (1, 'Good "git" signature with ED25519 key SHA256:xyz\nNo principal matched.', False, "SHA256:xyz"),
        (1, 'Good "git" signature for a@b with ED25519 key SHA256:xyz\nbad', False, "a@b"),
        (0, "", False, "not signed"),
        (1, "", False, "not signed"),
        (1, "Could not verify signature.", False, "Could not verify"),
        (0, "gpg: Good signature from somebody", False, "somebody"),
    ],
)
def test_only_gits_word_and_status_together_count(status: int, said: str, good: bool, has: str) -> None:
    opinion = admit.judge(status, said)
    assert opinion.good is good and has in opinion.signer + opinion.reason


@pytest.mark.parametrize(
    ("line", "path", "runs", "kind"),
    [
        (b"#!/bin/bash -e\n", "x", "bash", "bash"), (b"#!/usr/bin/env -S python3 -I\n", "x", "python3", "python"),
        (b"#! /bin/sh\n", "x", "sh", "sh"), (b"", "x.py", "", "python"), (b"", "x.sh", "", "bash"),
        (b"", "x.json", "", "data"), (b"#!/usr/bin/perl\n", "x.py", "perl", ""), (b"\x7fELF", "x", "", ""),
    ],
)  # fmt: skip
def test_what_a_script_is_written_in(line: bytes, path: str, runs: str, kind: str) -> None:
    words = check.read_interpreter(line)
    assert check.name_program(words) == runs and check.detect_language(path, words) == kind


def test_a_time_of_modification_is_the_contents() -> None:
    other = "f" + HASH[1:]
    assert mtime_of(HASH) == mtime_of(HASH) != mtime_of(other)
    assert 1_000_000_000 <= mtime_of("f" * 40) < 1_600_000_000
    assert blob_hash(b"hello\n", 40) == "ce013625030ba8dba906f756967f9e9ca394464a"


def full_state() -> GitsyncState:
    published = Published(HASH, 100.0, oid=HASH, ref="branch main", signer='a"b\\c', committed=90.0, files=3, bytes=9)
    return GitsyncState(
        published=published, candidate=Candidate("c" * 40, "c" * 40, 110.0, "waits", 1),
        quarantine=Quarantine("d" * 40, "d" * 40, "verify", "not signed", 120.0, "p"), last_attempt=130.0,
        last_success=125.0, last_error='line\none "two"', failures=4, durations={"fetch": 0.25}, history=(published,),
    )  # fmt: skip


def test_the_state_comes_back_as_it_was_and_an_unknown_key_is_dropped() -> None:
    known = full_state()
    text = state.to_json(known)
    assert state.from_json(text) == known
    data = json.loads(text)
    data["published"]["later"] = 1
    data["later"] = 1
    assert state.from_json(json.dumps(data)) == known


def test_history_holds_each_commit_once_newest_first() -> None:
    known = GitsyncState()
    for at, name in enumerate("abacd"):
        known = known.record_publication(Published(name * 40, float(at)))
    assert [each.commit[0] for each in known.history] == ["c", "a", "b"]
    assert known.published is not None and known.published.commit[0] == "d" and known.published_total == 5


def test_metrics_are_what_prometheus_reads() -> None:
    from prometheus_client.parser import text_string_to_metric_families

    text = state.render_metrics(full_state(), settings.GitsyncSettings(pod="x"), 200.0)
    samples = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    names = {name for name, _ in samples}
    assert samples[("minivm_gitsync_age_seconds", ())] == 75.0
    assert samples[("minivm_gitsync_quarantined", ())] == 1.0
    assert samples[("minivm_gitsync_step_duration_seconds", (("step", "fetch"),))] == 0.25
    assert ("minivm_gitsync_last_error_info", (("error", 'line\none "two"'),)) in samples
    assert {"minivm_gitsync_info", "minivm_gitsync_refused_total"} <= names
    assert any(dict(labels).get("signer") == 'a"b\\c' for name, labels in samples if name == "minivm_gitsync_info")


def test_trouble_is_a_sentence_only_when_there_is_some() -> None:
    some = settings.GitsyncSettings(repo="/x")
    good = GitsyncState(published=Published(HASH, 1.0))
    assert state.describe_trouble(good, some) == ""
    assert state.describe_trouble(replace(good, failures=1, last_error="e"), some) == ""
    assert "3 cycles failed: e" in state.describe_trouble(replace(good, failures=3, last_error="e"), some)
    assert "not signed" in state.describe_trouble(full_state(), some)
    zero = GitsyncState(published=Published(layout.ZERO, 1.0), failures=1, last_error="e")
    assert "the image's own" in state.describe_trouble(zero, some)


def test_a_webhook_is_authentic_by_signature_or_token() -> None:
    import hashlib
    import hmac

    signature = "sha256=" + hmac.new(b"s", b"body", hashlib.sha256).hexdigest()
    assert rings.is_authentic({"x-hub-signature-256": signature}, b"body", b"s")
    assert not rings.is_authentic({"x-hub-signature-256": signature}, b"other", b"s")
    assert rings.is_authentic({"x-gitlab-token": "s"}, b"body", b"s")
    assert not rings.is_authentic({"x-gitlab-token": ""}, b"body", b"")
    assert not rings.is_authentic({}, b"body", b"s")


@given(st.binary(max_size=200))
def test_no_answer_of_the_ring_crashes_a_node(body: bytes) -> None:
    try:
        view = rings.parse(body)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return
    assert isinstance(view, RingView)


@pytest.mark.parametrize(
    "answer",
    [
        b"no http at all\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n{",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n" + b"[" * 60_000,
        b'HTTP/1.1 200 OK\r\n\r\n{"first_seen": 0, "good": 1e999, "failed": 0}',
        b"HTTP/1.1 204 " + b"x" * 70_000,
        b"",
    ],
)
def test_a_ring_that_answers_nonsense_ends_no_cycle(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for _ in range(2):
                connection, _ = listener.accept()
                with connection:
                    connection.recv(65536)
                    connection.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/ring"
        assert rings.ask(url, HASH) is None
        assert rings.send_result(url, "pod", HASH, ok=True) is False


def test_a_pods_words_reach_no_terminal_as_they_are() -> None:
    view = rings.parse(b'{"first_seen": 1, "good": 0, "failed": 1, "reasons": ["pod: \\u001b]0;owned\\u0007 x"]}')
    assert view.reasons == ("pod:  ]0;owned  x",)


@pytest.mark.parametrize(
    ("target", "commit"),
    [
        (f"trees/{HASH}", HASH), ("/zero", "zero"), (f"/elsewhere/trees/{HASH}", None), ("trees/x", None), ("", None),
        (f"trees/{HASH}/", None), ("trees/..", None),
    ],
)  # fmt: skip
def test_which_links_name_a_commit(target: str, commit: str | None) -> None:
    assert layout.commit_of_link(target, Path("/zero")) == commit
