"""The lease of several controllers: who may act when, by table; its files; the state directories of its terms."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from init.errors import ConfigError
from init.helpers.lease import Keeper, LeaseKeeper, address_request, announcement
from init.lean import replace
from init.pod.pod import Pod
from init.slurm import place
from init.state import lease
from init.state.lease import FRESH_S, HOLDS_S, LASTS_S, RENEW_S, WITHIN_S, Contest, Term, Terms
from tests.waiting import until

OTHER = Term(4, b"beat 1", "slurm-controller-1", "other")
ME = "me"


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def watching(seen: Term | None, since: float = 0.0, looked: float = 0.0) -> Contest:
    return Contest(seen, since, looked)


@pytest.mark.parametrize(
    ("contest", "at", "first", "term"),
    [
        (watching(None), 0.1, True, 1),
        (watching(None), 0.1, False, 0),  # pod 0 alone begins
        (watching(OTHER), 0.1, True, 0),
        (watching(OTHER, looked=LASTS_S - 0.1), LASTS_S - 0.1, True, 0),
        (watching(OTHER, looked=LASTS_S), LASTS_S, False, 5),
        (watching(OTHER, looked=LASTS_S), LASTS_S + FRESH_S + 0.1, False, 0),  # it slept after its look
        (watching(replace(OTHER, released=True)), 0.1, False, 5),
        (watching(replace(OTHER, life=ME)), 0.1, False, 5),  # of a former process in this container
        (watching(Term(4)), 0.1, False, 0),  # a damaged file: time decides
        (watching(Term(4), looked=LASTS_S), LASTS_S, False, 5),
        (watching(replace(OTHER, alone=True), looked=LASTS_S), LASTS_S, False, 0),
        (watching(replace(OTHER, alone=True)), 0.1, True, 5),
        (replace(watching(OTHER, looked=LASTS_S), mine=4), LASTS_S, False, 0),
        (Contest(), 0.0, True, 0),  # it has not looked yet
    ],
)
def test_who_may_claim_the_next_term(contest: Contest, at: float, first: bool, term: int) -> None:
    assert lease.choose_term(contest, ME, at, first=first) == term


def test_a_renewed_term_is_not_free_however_long_it_is_held() -> None:
    contest = Contest()
    for beat in range(50):
        at = beat * RENEW_S
        contest = lease.update_after_look(contest, replace(OTHER, text=b"%d" % beat), at, at)
        assert lease.choose_term(contest, ME, at, first=True) == 0
    assert lease.choose_term(replace(contest, looked=at + LASTS_S), ME, at + LASTS_S, first=True) == 5


def test_the_time_counts_from_the_end_of_a_look_that_showed_a_change() -> None:
    contest = lease.update_after_look(Contest(), OTHER, begun=0.0, ended=6.0)
    assert contest.since == 6.0


def test_a_holder_whose_last_renewal_is_old_is_over_and_stays_so() -> None:
    claimed = lease.update_after_claim(watching(OTHER), Term(5), OTHER, begun=10.0, at=10.1)
    assert claimed.holds(10.1) and claimed.holds(10.0 + HOLDS_S - 0.1) and not claimed.holds(10.0 + HOLDS_S)
    late = lease.update_after_renewal(claimed, begun=15.5, ended=15.6, newest=5)
    assert late.mine == 0 and not late.holds(15.6)


def test_a_slow_renewal_does_not_count() -> None:
    claimed = lease.update_after_claim(watching(OTHER), Term(5), OTHER, begun=10.0, at=10.1)
    assert lease.update_after_renewal(claimed, 12.0, 12.0 + WITHIN_S + 0.1, newest=5).until == claimed.until
    assert lease.update_after_renewal(claimed, 12.0, 12.1, newest=5).until == 12.0 + HOLDS_S


def test_a_newer_term_ends_the_older_one() -> None:
    claimed = lease.update_after_claim(watching(OTHER), Term(5), OTHER, begun=10.0, at=10.1)
    assert lease.update_after_renewal(claimed, 12.0, 12.1, newest=6).mine == 0


def test_the_winner_waits_if_the_former_holder_was_alive_after_all() -> None:
    claimed = lease.update_after_claim(watching(OTHER), Term(5), replace(OTHER, text=b"beat 2"), begun=10.0, at=10.1)
    assert not claimed.holds(10.2) and claimed.mine == 5
    assert replace(claimed, until=30.0).holds(10.1 + LASTS_S)


@given(st.lists(st.tuples(st.integers(0, 1), st.floats(0.0, 12.0)), max_size=60), st.floats(0.99, 1.01))
def test_two_pods_never_hold_at_once_whatever_is_stopped_for_how_long(
    steps: list[tuple[int, float]], pace: float
) -> None:
    """One pod at a time makes a turn after any pause; its clock runs at its own pace."""
    newest: Term | None = None
    views, clock = [Contest(), Contest()], 0.0
    for pod, pause in steps:
        clock += pause
        mine = clock * (pace if pod else 1.0) + 1000.0 * pod
        view = views[pod]
        if view.lapsed(mine):
            view = replace(view, mine=0, looked=lease.NEVER)
        if view.mine:
            if newest is not None and newest.number == view.mine:
                newest = replace(newest, text=b"%f" % clock)
            view = lease.update_after_renewal(view, mine, mine, newest=newest.number if newest else 0)
        else:
            view = lease.update_after_look(view, newest, mine, mine)
            wanted = lease.choose_term(view, f"life {pod}", mine, first=pod == 0)
            if wanted:
                former, newest = newest, Term(wanted, b"claim", str(pod), f"life {pod}")
                view = lease.update_after_claim(view, newest, former, mine, mine)
        views[pod] = view
        holding = [other for other in (0, 1) if views[other].holds(clock * (pace if other else 1.0) + 1000.0 * other)]
        assert len(holding) < 2


def test_one_pod_alone_gets_a_term_and_its_file_has_one_length(tmp_path: Path) -> None:
    store = Terms(tmp_path)
    assert store.newest() is None
    mine = store.claim(1, "a-0", "life")
    assert mine is not None and mine.holder == "a-0" and store.claim(1, "a-1", "other") is None
    size = (tmp_path / "lease/term-1").stat().st_size
    store.renew(1, "a-0", "life", 10**12, released=True)
    newest = store.newest()
    assert newest is not None and newest.released and (tmp_path / "lease/term-1").stat().st_size == size
    assert names(tmp_path / "lease") == ["term-1"]


def test_a_damaged_or_hostile_file_is_a_term_of_an_unknown_holder(tmp_path: Path) -> None:
    store = Terms(tmp_path)
    (tmp_path / "lease").mkdir()
    for text in (b"", b"[" * 4096, b'{"holder": 3, "released": "yes"}', b"\xff"):
        (tmp_path / "lease/term-7").write_bytes(text)
        newest = store.newest()
        assert newest is not None and newest.number == 7 and not newest.released
    (tmp_path / "lease/term-8").symlink_to("/dev/zero")
    newest = store.newest()
    assert newest == Term(8)
    for name in ("term-0", "term-x", "term-12345678901"):
        (tmp_path / "lease" / name).touch()
    assert store.last() == 8


def test_old_terms_are_forgotten(tmp_path: Path) -> None:
    store = Terms(tmp_path)
    for number in range(1, 10):
        assert store.claim(number, "a-0", "life")
    assert names(tmp_path / "lease") == [f"term-{number}" for number in range(5, 10)]


def a_state(directory: Path) -> None:
    job = directory / "hash.3/job.13"
    job.mkdir(parents=True)
    (job / "script").write_text("#!/bin/sh\n")
    (job / "environment").write_text("A=1")
    (job / "other").write_text("x")
    (directory / "crontab").mkdir()
    (directory / "crontab/crontab.1000").write_text("cron")
    for name in ("job_state", "clustername", "dbd.messages"):
        (directory / name).write_text(name)
    (directory / "link").symlink_to("/etc/passwd")


def test_the_first_term_takes_over_the_state_of_a_single_controller(tmp_path: Path) -> None:
    a_state(tmp_path)
    Terms(tmp_path).claim(1, "a-0", "life")
    lease.build(tmp_path, 1)
    made = tmp_path / "term-1"
    assert names(made) == ["clustername", "crontab", "dbd.messages", "hash.3", "job_state"]
    script = Path("hash.3/job.13/script")
    assert (made / script).stat().st_ino == (tmp_path / script).stat().st_ino
    for copied in ("job_state", "clustername", "dbd.messages", "crontab/crontab.1000", "hash.3/job.13/other"):
        assert (made / copied).stat().st_ino != (tmp_path / copied).stat().st_ino
        assert (made / copied).read_bytes() == (tmp_path / copied).read_bytes()


def test_each_term_begins_with_the_last_one_and_three_stay(tmp_path: Path) -> None:
    a_state(tmp_path)
    for number in range(1, 6):
        lease.build(tmp_path, number)
        (tmp_path / f"term-{number}/job_state").write_text(f"written in term {number}")
    assert lease.terms(tmp_path) == [3, 4, 5]
    lease.build(tmp_path, 9)
    assert (tmp_path / "term-9/job_state").read_text() == "written in term 5"
    # A former controller that wakes up finds its directory closed, also by an NFS client that knows its way there.
    assert [(tmp_path / f"term-{number}").stat().st_mode & 0o777 for number in (4, 5, 9)] == [0, 0, 0o700]
    (tmp_path / "term-5").chmod(0o700)
    assert (tmp_path / "term-5/hash.3").stat().st_mode & 0o777 == 0o500
    assert (tmp_path / "term-9/hash.3").stat().st_mode & 0o777 == 0o700


def test_a_copy_that_was_cut_is_made_again_and_a_made_one_is_left(tmp_path: Path) -> None:
    a_state(tmp_path)
    (tmp_path / ".term-1.abcd").mkdir()
    lease.build(tmp_path, 1)
    (tmp_path / "term-1/job_state").write_text("newer")
    lease.build(tmp_path, 1)
    assert (tmp_path / "term-1/job_state").read_text() == "newer" and not (tmp_path / ".term-1.abcd").exists()


def test_a_copy_ends_with_its_term_and_publishes_nothing(tmp_path: Path) -> None:
    a_state(tmp_path)
    held = iter([True, True, False])
    with pytest.raises(lease.StateError, match="the term was lost meanwhile"):
        lease.build(tmp_path, 1, lambda: next(held, False))
    assert lease.terms(tmp_path) == [] and not list(tmp_path.glob(".term-*"))


def test_a_former_holder_that_wakes_up_takes_no_file_from_the_state_of_the_next_term(tmp_path: Path) -> None:
    """The volume hung for the former holder, and answers again while the next one copies."""
    a_state(tmp_path)
    lease.build(tmp_path, 1)
    looks = 0

    def wake_the_former_holder() -> bool:
        nonlocal looks
        looks += 1
        if list(tmp_path.glob(".term-3.*/hash.3/job.13")):
            with pytest.raises(lease.StateError):
                lease.build(tmp_path, 2, lambda: False)
        return True

    lease.build(tmp_path, 3, wake_the_former_holder)
    assert looks > 2
    kept = tmp_path / "term-3"
    assert names(kept) == ["clustername", "crontab", "dbd.messages", "hash.3", "job_state"]
    assert (kept / "hash.3/job.13/script").read_text() == "#!/bin/sh\n"


def test_an_empty_volume_gives_an_empty_term(tmp_path: Path) -> None:
    lease.build(tmp_path, 1)
    assert names(tmp_path / "term-1") == []


def test_a_controller_that_is_alone_again_takes_the_newest_state(tmp_path: Path) -> None:
    assert lease.become_single(tmp_path, "a-0") == 0
    store = Terms(tmp_path)
    store.claim(1, "a-1", "life")
    store.renew(1, "a-1", "life", 1, released=True)
    assert lease.become_single(tmp_path, "a-0") == 2
    assert lease.become_single(tmp_path, "a-0") == 2  # its restart keeps the term
    newest = store.newest()
    assert newest is not None and newest.alone
    # With several controllers again, pod 0 begins, for it has replaced the single one.
    contest = lease.update_after_look(Contest(), newest, 0.0, 0.0)
    assert lease.choose_term(contest, ME, 0.1, first=False) == 0
    assert lease.choose_term(contest, ME, 0.1, first=True) == 3


class Address:
    """An address that the kernel refuses."""

    def take(self) -> None:
        raise OSError(1, "Operation not permitted")

    def leave(self) -> None:
        pass


def test_a_pod_that_cannot_act_gives_the_lease_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("init.helpers.lease.kill_daemons", lambda: True)
    keeper = Keeper(Terms(tmp_path), "a-0", "life")
    keeper.start()
    service = LeaseKeeper(keeper, tmp_path / "lease.json", Address())  # type: ignore[arg-type]  # as far as it is used
    until(lambda: not service.tick(), "it gives up")
    service.end()
    newest = Terms(tmp_path).newest()
    assert newest is not None and newest.released
    assert capsys.readouterr().out.endswith("\nterm 1 cannot begin: Operation not permitted\n")


def test_a_volume_that_fails_is_no_standby(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr("init.helpers.lease.notify", told.append)
    (tmp_path / "lease").touch()
    keeper = Keeper(Terms(tmp_path), "a-0", "life")
    keeper.start()
    service = LeaseKeeper(keeper, tmp_path / "lease.json", None)
    until(lambda: service.tick() and any("Not a directory" in text for text in told), "it says so")
    assert not any("STANDBY" in text for text in told if "cannot use" in text)
    keeper.leaving.set()


CONF = (
    b"ClusterName=c\nSlurmctldHost=slurm-controller-0(slurm-slurmctld)\nStateSaveLocation=/var/spool/slurmctld\nX=1\n"
)


def test_slurm_conf_of_the_holder_alone_names_its_state_and_its_host() -> None:
    files = place.fill_in_term({"slurm.conf": CONF, "gres.conf": b"g"}, Path("/v"), 7, "slurm-controller-1")
    assert files["gres.conf"] == b"g"
    assert files["slurm.conf"].decode().splitlines() == [
        "ClusterName=c", "SlurmctldHost=slurm-controller-1(slurm-slurmctld)", "StateSaveLocation=/v/term-7", "X=1",
        "DebugFlags=NO_CONF_HASH",
    ]  # fmt: skip
    again = place.fill_in_term(files, Path("/v"), 8, "slurm-controller-0")["slurm.conf"]
    assert (
        b"term-8" in again
        and b"term-7" not in again
        and again.count(b"SlurmctldHost") == again.count(b"DebugFlags") == 1
    )


def test_a_slurm_conf_without_the_setting_gets_it() -> None:
    text = place.fill_in_term({"slurm.conf": b"slurmctldhost=a"}, Path("/v"), 1, "b")["slurm.conf"]
    assert text == b"SlurmctldHost=b(a)\nStateSaveLocation=/v/term-1\nDebugFlags=NO_CONF_HASH\n"
    text = place.fill_in_term({"slurm.conf": b"SlurmctldHost=a\nDebugFlags=Gres"}, Path("/v"), 1, "b")["slurm.conf"]
    assert text.endswith(b"DebugFlags=Gres,NO_CONF_HASH\n")


def test_two_hosts_are_refused() -> None:
    with pytest.raises(ConfigError, match="2 lines SlurmctldHost"):
        place.fill_in_term({"slurm.conf": b"SlurmctldHost=a\nSlurmctldHost=b\n"}, Path("/v"), 1, "b")


def test_without_a_term_nothing_changes(tmp_path: Path) -> None:
    pod = Pod({}, tmp_path)
    assert place.read_term(pod) == 0 and not place.several(pod)
    assert place.place_files(pod, {"slurm.conf": CONF}) == {"slurm.conf": CONF}
    assert place.several(Pod({"MINIVM_CONTROLLERS": "2"}, tmp_path))


def test_the_address_is_announced_to_everybody() -> None:
    frame = announcement(bytes(range(6)), bytes([10, 0, 0, 9]))
    assert len(frame) == 42 and frame[:6] == b"\xff" * 6 and frame.count(bytes([10, 0, 0, 9])) == 2
    assert len(address_request(20, 0x600, 2, bytes([10, 0, 0, 9]))) == 40
