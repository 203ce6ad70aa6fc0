"""Copies of the controller's state: what is copied, kept, refused, put back, and what a cut leaves."""

from __future__ import annotations

import json
import os
import pwd
import threading
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from images.definition.load import choose_build, load
from images.make.content import serialise_slurm
from init import state_cli
from init.errors import ConfigError
from init.helpers import backups
from init.lean import replace
from init.pod import release
from init.pod.pod import Pod
from init.prepare import saved_state
from init.slurm import accounting
from init.slurm.place import ACCEPTED, BACKUPS, JOURNAL, read_next_job
from init.state import copies, prove, restore, save
from init.state.copies import CopyError, Manifest, Proof
from tests.support.kill_points import killed_before

ROOT = Path(__file__).resolve().parents[3]
DEFINITION = load(ROOT)
CONF = "ClusterName=C1\n"
NAME = "20261126T120000Z"
NOON = 1795694400.0


def job_state(following: int, number: int = 42, rest: bytes = b"jobs") -> bytes:
    return (
        b"\0\0\0\x11PROTOCOL_VERSION\0" + bytes([number, 0]) + bytes(8) + following.to_bytes(4, "big") + bytes(8) + rest
    )


class Here:
    """File system of a controller of Slurm 24.11 with jobs up to number 7."""

    def __init__(self, root: Path, version: str = "24.11.5") -> None:
        self.root, self.state, self.directory = root, root / "var/spool/slurmctld", root / BACKUPS[1:]
        for directory in (self.state, root / "usr/share/minivm", root / "etc/slurm", self.state / "hash.7/job.7"):
            directory.mkdir(parents=True, exist_ok=True)
        self.version(version)
        self.configure(CONF)
        (root / "etc/slurm/slurmdbd.conf").write_text("StoragePass=secret\n")
        self.put("job_state", job_state(8))
        self.put("clustername", b"c1|5")
        self.put("node_state", b"nodes")
        self.put("hash.7/job.7/script", b"#!/bin/sh\n")
        self.pod = Pod({"MINIVM_ACCOUNTING": "none"}, root)

    def version(self, version: str) -> None:
        facts = serialise_slurm(DEFINITION, choose_build(DEFINITION, "debian", version[:5]), version)
        (self.root / release.FILE[1:]).write_text(facts)

    def configure(self, text: str) -> None:
        (self.root / "etc/slurm/slurm.conf").write_text(text)

    def put(self, name: str, data: bytes) -> None:
        (self.state / name).write_bytes(data)

    def files(self) -> dict[str, bytes]:
        """Return the state as slurmctld sees it."""
        return {
            str(path.relative_to(self.state)): path.read_bytes()
            for path in sorted(self.state.rglob("*"))
            if path.is_file() and not path.relative_to(self.state).parts[0].startswith(".")
        }

    def save(self, keep: int = 7) -> Manifest:
        return save.save(self.pod, self.directory, keep, pause=lambda seconds: None, now=lambda: NOON)

    def restore(self, manifest: Manifest) -> list[str]:
        return [*restore.restore(self.pod, self.state, self.directory, manifest)]

    def guard(self) -> str:
        return saved_state.guard(self.pod)

    def next_job(self) -> int | None:
        known = release.parse_release((self.root / release.FILE[1:]).read_text())
        assert known is not None
        return read_next_job((self.state / "job_state").read_bytes()[:43], known)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Here:
    me = pwd.getpwuid(os.getuid())
    for module in (restore, saved_state):
        monkeypatch.setattr(module, "user", lambda name: (me.pw_uid, me.pw_gid))
    return Here(tmp_path)


@pytest.mark.parametrize("name", ["job_state", "job_state.old"])
def test_an_empty_claim_beside_the_pod_s_own_with_jobs_is_refused(here: Here, name: str) -> None:
    """The pod itself sees that the state was not moved: a chart rendered without a cluster cannot."""
    (here.state / "job_state").unlink()
    own = here.root / "mnt/minivm/own-state"
    own.mkdir(parents=True)
    assert here.guard() == "there are no jobs yet"
    (own / name).write_bytes(job_state(8))
    with pytest.raises(ConfigError, match="the pod's own claim has one") as refused:
        here.guard()
    assert "move the state (docs/how-to/two-controllers.md)" in refused.value.hint
    (here.state / ACCEPTED).touch()
    assert "as an operator accepted" in here.guard()


def test_jobs_that_slurmctld_may_not_read_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a refusal slurmctld would start without any job."""
    with TemporaryDirectory() as root:  # which other users may enter, unlike pytest's
        Path(root).chmod(0o755)
        here = Here(Path(root))
        job_state = here.state / "job_state"
        job_state.chmod(0o600)
        monkeypatch.setattr(saved_state, "user", lambda name: (os.getuid(), os.getgid()))
        assert here.guard() == "the state is this cluster's"
        monkeypatch.setattr(saved_state, "user", lambda name: (os.getuid() + 401, os.getgid()))
        with pytest.raises(ConfigError, match="its jobs are uid") as refused:
            here.guard()
        assert f"slurm.uid: {os.getuid()}" in refused.value.hint
        job_state.chmod(0o640)
        assert here.guard() == "the state is this cluster's", "its group may read it"


@pytest.mark.parametrize("name", ["job_state", "job_state.old"])
def test_a_claim_with_another_operators_state_at_the_top_is_refused(here: Here, name: str) -> None:
    top = here.root / "mnt/minivm/claim"
    (top / "slurmctld").mkdir(parents=True)
    (top / "clustername").touch()
    assert here.guard() == "the state is this cluster's"
    (top / name).write_bytes(job_state(8))
    with pytest.raises(ConfigError, match="another operator's slurmctld has its state") as refused:
        here.guard()
    assert "move.sh" in refused.value.hint


@pytest.mark.parametrize("where", ["", "term-3"])
def test_what_moving_the_state_left_behind_is_no_new_cluster(here: Here, where: str) -> None:
    """A roll-back of the chart mounts the former claim again."""
    (here.state / where).mkdir(exist_ok=True)
    here.configure(f"{CONF}StateSaveLocation=/var/spool/slurmctld/{where}\n")
    (here.state / "job_state").unlink()
    (here.state / saved_state.MOVED).touch()
    with pytest.raises(ConfigError, match="the state was moved to another claim") as refused:
        here.guard()
    assert "controller.persistence.existingClaim" in refused.value.hint


def listings(monkeypatch: pytest.MonkeyPatch, *answers: Mapping[str, str]) -> None:
    left = list(answers)
    monkeypatch.setattr(save, "_list_jobs", lambda: left.pop(0))


def flip(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_a_copy_has_the_state_a_private_mode_and_no_password(here: Here) -> None:
    here.put("node_state.old", b"old")
    here.put(".minivm-database", b"stamp")
    (here.state / "link").symlink_to("/etc/passwd")
    manifest = here.save()
    copy = here.directory / manifest.name
    assert manifest.name == NAME and manifest.cluster == "C1" and manifest.protocol == 42 and manifest.highest == 7
    assert manifest.accounting == "there is no accounting" and not manifest.listed
    assert {path.stat().st_mode & 0o777 for path in copy.iterdir()} == {0o600}
    assert here.directory.stat().st_mode & 0o777 == 0o700
    unpacked = here.root / "unpacked"
    unpacked.mkdir()
    restore.unpack(copy / "state.tar", manifest, unpacked, (os.getuid(), os.getgid()))
    assert sorted(str(path.relative_to(unpacked)) for path in unpacked.rglob("*") if path.is_file()) == [
        ".minivm-database", "clustername", "hash.7/job.7/script", "job_state", "node_state",
    ]  # fmt: skip
    assert "secret" not in (copy / "config.json").read_text() and "C1" in (copy / "config.json").read_text()


def test_files_that_are_replaced_while_they_are_opened_are_of_one_moment(here: Here) -> None:
    """A writer replaces two files by rename, always one after the other: a copy never has them mixed up."""
    here.put("job_state", job_state(8, rest=b"0"))
    here.put("node_state", b"0")
    stop = threading.Event()

    def write() -> None:
        turn = 0
        while not stop.is_set():
            for name in ("job_state", "node_state"):
                data = job_state(8, rest=b"%d" % turn) if name == "job_state" else b"%d" % turn
                (here.state / f"{name}.new").write_bytes(data)
                (here.state / f"{name}.new").rename(here.state / name)
            stop.wait(0.003)
            turn += 1

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(50):
            opened = save.open_all(here.state, time.sleep)
            texts = {name: os.read(fd, 1000) for name, fd in opened.items()}
            for fd in opened.values():
                os.close(fd)
            jobs_turn, nodes_turn = int(texts["job_state"][43:]), int(texts["node_state"])
            assert jobs_turn - nodes_turn in (0, 1)
    finally:
        stop.set()
        thread.join()


def test_a_file_between_two_renames_is_waited_for(here: Here) -> None:
    (here.state / "job_state").rename(here.state / "job_state.old")
    here.put("job_state.new", job_state(9))
    waits: list[float] = []

    def pause(seconds: float) -> None:
        waits.append(seconds)
        (here.state / "job_state.new").rename(here.state / "job_state")

    opened = save.open_all(here.state, pause)
    assert len(waits) == 1 and os.read(opened["job_state"], 100) == job_state(9)
    for fd in opened.values():
        os.close(fd)


def test_jobs_that_change_around_the_copy_are_not_counted_upon(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    listings(
        monkeypatch, {"1": "RUNNING", "2": "PENDING", "3": "PENDING"}, {"1": "RUNNING", "2": "RUNNING", "4": "PENDING"}
    )
    manifest = here.save()
    assert manifest.jobs == (("RUNNING", 1),) and manifest.changing == 3 and manifest.listed
    around = copies.compare_listings({"1": "RUNNING", "2": "PENDING"}, {"1": "RUNNING"})
    assert copies.list_differences(around, {"1": "RUNNING", "2": "COMPLETED"}) == []
    assert copies.list_differences(around, {"1": "PENDING", "9": "PENDING"}) == ["job 1 is PENDING, expected RUNNING"]
    assert copies.count_unlisted(around, {"1": "PENDING", "2": "PENDING", "9": "PENDING"}) == 1
    array = copies.compare_listings({"7_[3-9]": "PENDING"}, {"7_[4-9]": "PENDING", "7_3": "RUNNING"})
    assert copies.count_unlisted(array, {"7_[5-9]": "PENDING", "7_3": "RUNNING"}) == 0


def test_the_newest_copies_stay_and_the_newest_proven_one(here: Here) -> None:
    names = [here.save(keep=9).name for _ in range(4)]
    assert names == [NAME, f"{NAME}-2", f"{NAME}-3", f"{NAME}-4"]
    copies.record_proof(here.directory, names[0], Proof(NOON, True, "good"))
    copies.record_proof(here.directory, names[1], Proof(NOON, False, "bad"))
    newest = here.save(keep=2).name
    assert copies.list_names(here.directory) == [newest, f"{NAME}-4", NAME]
    assert copies.select_superfluous([("a", False)], 0) == []


def test_what_a_killed_save_left_goes_with_the_next(here: Here) -> None:
    left = here.directory / f".{NAME}.partial"
    left.mkdir(parents=True)
    (left / "state.tar").write_bytes(b"half")
    assert copies.list_names(here.directory) == []
    here.save()
    assert [path.name for path in here.directory.glob(".*.partial")] == []


def test_a_full_volume_and_a_state_that_was_not_saved_yet_are_refused(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save, "measure_size", lambda directory: 1 << 60)
    with pytest.raises(CopyError, match=r"MiB free, expected .*remove old copies"):
        here.save()
    assert [path.name for path in here.directory.iterdir()] == [".lock"]
    (here.state / "job_state").unlink()
    with pytest.raises(CopyError, match="found no job_state, expected one"):
        here.save()


@pytest.mark.parametrize("name", ["state.tar", "config.json", "manifest.json"])
def test_one_flipped_byte_of_any_file_is_found_before_anything_is_touched(here: Here, name: str) -> None:
    manifest = here.save()
    flip(here.directory / NAME / name, at=30)
    before = here.files()
    with pytest.raises(CopyError) as caught:
        here.restore(copies.load_manifest(here.directory, manifest.name))
    assert name in str(caught.value) and "minivm state list" in str(caught.value)
    assert here.files() == before and not [path for path in here.state.iterdir() if path.name[0] == "."]


def test_a_copy_of_another_cluster_or_of_a_newer_slurm_is_refused(here: Here) -> None:
    here.put("job_state", job_state(8, number=45))
    here.version("26.05.5")
    manifest = here.save()
    here.version("24.11.5")
    with pytest.raises(CopyError, match=r"is of Slurm 26\.05, this image has 24\.11"):
        here.restore(manifest)
    here.version("26.05.5")
    here.configure("ClusterName=c2\n")
    with pytest.raises(CopyError, match="found the state of the cluster 'C1', expected 'c2'"):
        here.restore(manifest)


@pytest.mark.parametrize("name", ["../other", "20261126T120000Z/..", "", "latest"])
def test_a_name_that_is_none_is_refused(here: Here, name: str) -> None:
    here.save()
    with pytest.raises(CopyError, match="see `minivm state list`"):
        copies.load_manifest(here.directory, name)


def test_copies_that_another_user_can_write_are_refused(here: Here) -> None:
    here.save()
    (here.directory / NAME).chmod(0o777)
    with pytest.raises(CopyError, match="root alone may write there"):
        copies.load_manifest(here.directory, NAME)


def test_an_archive_that_names_a_file_outside_is_refused(here: Here) -> None:
    import tarfile

    manifest = here.save()
    for name, kind in (("../evil", tarfile.REGTYPE), ("/evil", tarfile.REGTYPE), ("evil", tarfile.SYMTYPE)):
        archive = here.root / "evil.tar"
        with tarfile.open(archive, "w") as tar:
            info = tarfile.TarInfo(name)
            info.type = kind
            tar.addfile(info)
        with pytest.raises(CopyError, match="expected plain files"):
            restore.unpack(archive, manifest, here.root, (os.getuid(), os.getgid()))


def test_a_restore_puts_the_present_state_aside_and_numbers_go_on_above_both(here: Here) -> None:
    manifest = here.save()
    saved = here.files()
    here.put("job_state", job_state(20))
    here.put("new_file", b"new")
    (here.state / "hash.5/job.25").mkdir(parents=True)
    (present,) = here.restore(manifest)
    files = here.files()
    assert here.next_job() == 26
    assert {**files, "job_state": b""} == {**saved, "job_state": b""}
    (aside,) = here.state.glob(".minivm-before-*")
    assert str(aside) in present and (aside / "new_file").read_bytes() == b"new"
    assert (aside / "job_state").read_bytes() == job_state(20) and not (here.state / JOURNAL).exists()
    assert here.guard() == "the state is this cluster's"


def test_a_kill_before_any_change_leaves_the_old_state_or_a_restore_to_finish(
    here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for flush in ("sync", "fsync"):  # a kill loses nothing that the kernel has; a disk in use would cost minutes here
        monkeypatch.setattr(os, flush, lambda *_: None)
    manifest = here.save()
    here.put("job_state", job_state(20))
    here.restore(manifest)
    restored, stages = here.files(), Counter[str]()
    for number in range(100):
        again = Here(tmp_path / str(number))
        again.save()
        again.put("job_state", job_state(20))
        again.put("new_file", b"new")
        old = again.files()
        if not killed_before(number, lambda again=again: again.restore(copies.load_manifest(again.directory, NAME))):  # type: ignore[misc]  # mypy does not infer a lambda's default
            break
        if (again.state / JOURNAL).exists():
            stages["to finish"] += 1
            with pytest.raises(ConfigError, match=f"minivm state restore {NAME}"):
                again.guard()
        else:
            stages["old"] += 1
            assert again.files() == old
            assert again.guard() == "the state is this cluster's"
        again.restore(copies.load_manifest(again.directory, NAME))
        assert again.files() == restored
        (aside,) = again.state.glob(".minivm-before-*")
        assert (aside / "job_state").read_bytes() == job_state(20) and (aside / "new_file").read_bytes() == b"new"
    assert stages["old"] > 8 and stages["to finish"] > 12, stages


def test_another_copy_does_not_continue_a_restore_that_was_cut(here: Here) -> None:
    first, second = here.save(), here.save()
    here.put(JOURNAL, json.dumps({"copy": first.name, "aside": ".minivm-before-x", "phase": "aside"}).encode())
    with pytest.raises(CopyError, match=f"first finish it: minivm state restore {first.name}"):
        here.restore(second)


def test_slurmctld_does_not_start_with_another_clusters_state(here: Here) -> None:
    here.save()
    here.put("clustername", b"other|3")
    with pytest.raises(ConfigError) as caught:
        here.guard()
    text = str(caught.value)
    assert "found the state of the cluster 'other', expected 'C1'" in text and f"minivm state restore {NAME}" in text


@pytest.mark.parametrize(("data", "why"), [(b"", "found an empty file"), (b"\0" * 4096, "found a damaged file")])
def test_slurmctld_does_not_start_with_a_damaged_job_state(here: Here, data: bytes, why: str) -> None:
    here.put("job_state", data)
    with pytest.raises(ConfigError, match=f"{why}.*there is no good copy"):
        here.guard()
    here.put("job_state", job_state(8))
    here.save()
    here.put("job_state", data)
    with pytest.raises(ConfigError, match=f"{why}.*minivm state restore {NAME}"):
        here.guard()


def test_slurmctld_does_not_start_without_the_jobs_that_a_copy_has(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    (here.state / "job_state").unlink()
    assert here.guard() == "there are no jobs yet"
    here.put("job_state", job_state(8))
    listings(monkeypatch, {"7": "RUNNING"}, {"7": "RUNNING"})
    here.save()
    (here.state / "job_state").unlink()
    with pytest.raises(ConfigError, match=f"the copy {NAME} has unfinished jobs.*restore {NAME}.*accept-loss"):
        here.guard()
    here.put(ACCEPTED, b"1")
    assert "an operator accepted" in here.guard()
    here.put("job_state", job_state(1))
    here.guard()
    (here.state / "job_state").unlink()
    with pytest.raises(ConfigError):
        here.guard()


def test_a_damaged_copy_is_not_named_as_the_way_back(here: Here) -> None:
    older, newer = here.save(), here.save()
    flip(here.directory / newer.name / "state.tar")
    here.put("job_state", b"")
    with pytest.raises(ConfigError, match=f"minivm state restore {older.name};"):
        here.guard()


def test_a_copy_of_the_accounting_pod_is_no_way_back_for_slurmctld(here: Here) -> None:
    manifest = here.save()
    files = (
        ("accounting.sql.gz", "0" * 64),
        *((name, digest) for name, digest in manifest.files if name != "state.tar"),
    )
    records = replace(manifest, name="20261127T120000Z", files=files)
    directory = here.directory / records.name
    directory.mkdir(mode=0o700)
    (directory / "manifest.json").write_text(copies.dump_manifest(records))
    assert copies.load_manifest(here.directory, records.name) == records and not records.has_state
    here.put("job_state", b"")
    with pytest.raises(ConfigError, match=f"minivm state restore {manifest.name};"):
        here.guard()
    with pytest.raises(CopyError, match=r"records of accounting alone.*restore it in the accounting pod"):
        here.restore(records)
    alone = replace(records, files=tuple(item for item in files if item[0] == "config.json"))
    with pytest.raises(CopyError, match="it names other files than a copy has"):
        copies.parse_manifest("x", copies.dump_manifest(alone), "x")


def test_the_throw_away_has_none_of_the_sites_programs_places_and_keys() -> None:
    conf = (
        b"ClusterName=c1\nSlurmctldHost=real(10.0.0.1)\nAuthType=auth/slurm\n"
        b"PrologSlurmctld=/site/p\nInclude more.conf\n"
        b"AccountingStorageType=accounting_storage/slurmdbd\nAccountingStorageHost=real\nResumeProgram=/site/r\n"
        b"PartitionName=p Nodes=ALL\nSelectType=select/cons_tres\n"
    )
    files = {"slurm.conf": conf, "more.conf": b"MailProg=/site/mail\nStateSaveLocation=/var/spool/slurmctld\n"}
    values = {"slurmctld": 1, "slurmdbd": 2, "closed": 3, "spare": 4, "root": "/tmp/x", "user": "nobody"}
    text = prove.configuration(files, values, accounting=False)
    assert "real" not in text and "/site" not in text and "/var/spool" not in text and "slurmdbd" not in text
    assert "ClusterName=c1" in text and "PartitionName=p" in text and "SelectType=select/cons_tres" in text
    assert "AccountingStoragePort=2" in prove.configuration(files, values, accounting=True)


@pytest.mark.parametrize(
    "line",
    [
        "ResvProlog=/site/p",
        "MaxJobCount=99 ResumeProgram=/site/p",
        "ResumeProgram+=/site/p",
        "MAILPROG = /site/p",
        'MaxJobCount=9 PrologSlurmctld="/site/p"',
        "PluginDir=/site/p",
        "SlurmctldPrimaryOnProg=/site/p",
        "CertmgrParameters=generate_csr_script=/site/p",
        "MaxJobCount=9 \\\nEpilogSlurmctld=/site/p",
    ],
)
def test_no_spelling_of_a_program_reaches_the_throw_away(line: str) -> None:
    values = {"slurmctld": 1, "slurmdbd": 2, "closed": 3, "spare": 4, "root": "/tmp/x", "user": "nobody"}
    assert "/site" not in prove.configuration({"slurm.conf": f"{line}\n".encode()}, values, accounting=True)


def test_the_throw_away_asks_no_name_server_for_nodes() -> None:
    values = {"slurmctld": 1, "slurmdbd": 2, "closed": 3, "spare": 4, "root": "/tmp/x", "user": "nobody"}
    conf = b"NodeName=DEFAULT CPUs=2\nNodeName=a[1-3] NodeAddr=x[1-3] NodeHostname=y[1-3] Port=7 Feature=f\n"
    lines = prove.configuration({"slurm.conf": conf}, values, accounting=True).splitlines()
    assert lines[:2] == ["NodeName=DEFAULT CPUs=2", "NodeName=a[1-3] Feature=f NodeAddr=127.0.0.1"]


def test_a_copy_is_due_by_the_newest_ones_age() -> None:
    day, up = 86400.0, 7200.0
    assert backups.is_due(NOON, day, 0.0, up) and backups.is_due(NOON, day, NOON - day, up)
    assert not backups.is_due(NOON, day, NOON - day + 1, up)
    assert backups.is_due(NOON, day, NOON + 60, up), "made by a clock that was ahead"
    assert not backups.is_due(NOON, day, 0.0, 30.0), "the pod boots"
    assert not backups.is_due(NOON, 0.0, 0.0, up), "switched off"


@pytest.mark.parametrize(("name", "value"), [("MINIVM_BACKUP_EVERY", "daily"), ("MINIVM_BACKUP_KEEP", "0")])
def test_a_wrong_schedule_is_named(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=name):
        backups.settings(Pod({name: value}))


def test_the_status_tells_of_the_newest_copy_and_the_newest_proof(here: Here) -> None:
    assert copies.describe_summary(NOON, 0.0, 0.0, "") == "saved state: no copy yet"
    here.save()
    copies.record_proof(here.directory, NAME, Proof(NOON + 60, True, "3 jobs"))
    seen = copies.summarize(here.directory)
    text = copies.describe_summary(NOON + 3660, seen.made, seen.proven, seen.failed)
    assert text == "saved state: copied 1h01m ago, a copy proven 1h00m ago"
    assert f"minivm_state_proven_timestamp_seconds {NOON + 60:.0f}" in copies.render_metrics(seen)
    copies.record_proof(here.directory, NAME, Proof(NOON + 90, False, "job 3 is missing"))
    assert copies.summarize(here.directory).failed == "job 3 is missing"


def test_a_loss_is_accepted_only_where_there_is_one(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """An acceptance that waits for a later loss would let slurmctld start without its jobs then."""
    me = pwd.getpwuid(os.getuid())
    monkeypatch.setattr(state_cli, "user", lambda name: (me.pw_uid, me.pw_gid))
    listings(monkeypatch, {"7": "RUNNING"}, {"7": "RUNNING"})
    here.save()
    with pytest.raises(CopyError, match="cannot accept a loss: there is none"):
        state_cli.accept(here.pod)
    assert not (here.state / ACCEPTED).exists()
    (here.state / "job_state").unlink()
    for _ in range(2):
        state_cli.accept(here.pod)
        assert "an operator accepted" in here.guard()


def test_a_restore_names_the_jobs_that_would_run_a_second_time(
    here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """slurmctld takes jobs of an older state for unfinished, also those that have ended since."""
    client, asked = tmp_path / "mariadb", tmp_path / "asked"
    client.write_text(f'#!/bin/sh\necho "$@" > {asked}\necho 5; echo 7\n')
    client.chmod(0o755)
    monkeypatch.setattr(accounting, "CLIENT", str(client))
    manifest = replace(here.save(), cluster="C1")
    assert restore.since(here.pod, manifest) == restore.Since((5, 7))
    assert f"time_end > {int(NOON)}" in asked.read_text() and "`c1_job_table`" in asked.read_text()
    text = restore.warn_of_second_runs([5, 7])
    assert text.startswith("2 of its jobs ended since") and text.endswith("scancel 5 7")
    many = restore.warn_of_second_runs(range(1, 1001))
    assert many.endswith("499 500 (and 500 more by sacct)")
    client.write_text("#!/bin/sh\nexit 1\n")
    assert restore.since(here.pod, manifest) == restore.Since(), "the restore goes on without an answer"


def test_slurmdbd_tells_which_jobs_ended_since_a_copy_and_the_highest_number() -> None:
    lines = (
        "3|90|95", "4|90|105", "5|90|Unknown", "6|101|110", "7|80|102", "7|80|Unknown", "8_[3-9]|101|Unknown",
        "90000000|90|110", "x|y", "",
    )  # fmt: skip
    assert restore.parse_since("\n".join(lines), 100) == restore.Since((4,), 8)
