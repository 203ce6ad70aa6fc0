"""Decisions and files of the local cluster: addresses, published files, tags, options and tables."""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
import subprocess
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
from click.testing import CliRunner

from build import main
from cluster import ClusterError, names, report, values
from cluster.change import pinning
from cluster.change.pinning import Checkout
from cluster.local import STATE, LocalCluster
from cluster.names import choose_port, free_port
from cluster.pods import publish_files, read_published_files, write_private
from cluster.render import read_overrides
from cluster.report import Row, problems
from cluster.roles import ROLES
from cluster.values import Options, load_or_make_keys, make_known_hosts
from images import ImagesError
from tests.reader import ROOT


def test_a_pod_never_gets_the_address_it_just_had() -> None:
    found = names.allocate("172.19.0.0/29", gateway="172.19.0.1", used=["172.19.0.2"], last="172.19.0.3", count=2)
    assert found == ["172.19.0.4", "172.19.0.5"]


def test_addresses_start_again_at_the_beginning() -> None:
    found = names.allocate("172.19.0.0/29", gateway="172.19.0.1", used=["172.19.0.2"], last="172.19.0.6", count=2)
    assert found == ["172.19.0.3", "172.19.0.4"]


def test_the_networks_own_addresses_are_never_given() -> None:
    found = names.allocate("172.19.0.0/29", gateway="172.19.0.1", used=[], last="", count=5)
    assert found == [f"172.19.0.{n}" for n in (2, 3, 4, 5, 6)]
    with pytest.raises(ClusterError, match="has 5 left"):
        names.allocate("172.19.0.0/29", gateway="172.19.0.1", used=[], last="", count=6)


def test_a_long_step_says_what_it_waits_for_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    logged = threading.Event()

    def log(text: str) -> None:
        lines.append(text)
        logged.set()

    with report.progress(log, lambda: "of a short step"):
        pass
    assert lines == []
    monkeypatch.setattr(report, "QUIET_S", 0.01)
    running = threading.active_count()
    with pytest.raises(ZeroDivisionError), report.progress(log, lambda: "waits for 1 job: 7"):
        assert logged.wait(60)
        raise ZeroDivisionError
    assert {*lines} == {"waits for 1 job: 7"} and threading.active_count() == running


def test_a_service_has_one_address_whatever_the_others_are() -> None:
    """A Service keeps its address after a release with other Services, because pods learn it when they start."""
    alone = names.service_addresses("172.19.0.0/16", ["slurm-slurmctld"])
    both = names.service_addresses("172.19.0.0/16", ["rack-0", "slurm-slurmctld"])
    assert both["slurm-slurmctld"] == alone["slurm-slurmctld"] != both["rack-0"]
    quarter = ipaddress.ip_network("172.19.192.0/18")
    assert all(ipaddress.ip_address(address) in quarter for address in both.values())
    assert "172.19.255.255" not in both.values()


def test_services_of_a_small_network_share_no_address_and_the_last_has_none() -> None:
    found = names.service_addresses("172.19.0.0/28", ["a", "b", "c", "d"])
    assert sorted(found.values()) == [f"172.19.0.{n}" for n in (11, 12, 13, 14)]
    with pytest.raises(ClusterError, match="find an address for e"):
        names.service_addresses("172.19.0.0/28", ["a", "b", "c", "d", "e"])


def test_published_files_are_those_and_no_others(tmp_path: Path) -> None:
    directory = tmp_path / "config"
    assert publish_files(directory, {"slurm.conf": b"a", "gres.conf": b"b"}, mode=0o644)
    assert (directory / "slurm.conf").read_bytes() == b"a"
    assert publish_files(directory, {"slurm.conf": b"c"}, mode=0o644)
    assert read_published_files(directory) == {"slurm.conf": b"c"}
    assert not (directory / "gres.conf").is_symlink()
    # Only one version is left, not one for each change.
    assert len([path for path in directory.iterdir() if path.is_dir() and not path.is_symlink()]) == 1


def test_publishing_the_same_again_changes_nothing(tmp_path: Path) -> None:
    publish_files(tmp_path, {"a": b"1"}, mode=0o644)
    before = (tmp_path / "..data").readlink()
    assert not publish_files(tmp_path, {"a": b"1"}, mode=0o644)
    assert (tmp_path / "..data").readlink() == before


def test_a_secret_is_never_readable_by_others(tmp_path: Path) -> None:
    umask = os.umask(0o000)
    try:
        publish_files(tmp_path, {"munge.key": b"k"}, mode=0o400)
        write_private(tmp_path / "options.json", b"{}")
    finally:
        os.umask(umask)
    assert stat.S_IMODE((tmp_path / "munge.key").stat().st_mode) == 0o400
    assert stat.S_IMODE((tmp_path / "options.json").stat().st_mode) == 0o600


def test_a_reader_sees_all_old_or_all_new(tmp_path: Path) -> None:
    """A reader sees both files of one version, or both of another.

    Two files that must agree change many times while a reader goes through one version.
    """
    publish_files(tmp_path, {"a": b"0", "b": b"0"}, mode=0o644)
    mixed, done = [], threading.Event()

    def read() -> None:
        while not done.is_set():
            version = os.open(tmp_path / "..data", os.O_RDONLY | os.O_DIRECTORY)
            try:
                pair = [Path(f"/proc/self/fd/{version}/{name}").read_bytes() for name in "ab"]
            except FileNotFoundError:
                continue  # the version was removed after the reader opened it; the reader tries again
            finally:
                os.close(version)
            if pair[0] != pair[1]:
                mixed.append(pair)

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(200):
        publish_files(tmp_path, dict.fromkeys("ab", str(number).encode()), mode=0o644)
    done.set()
    reader.join()
    assert not mixed


def test_keys_are_made_once_and_are_private(tmp_path: Path) -> None:
    first = load_or_make_keys(tmp_path / "keys", users=("alice",))
    again = load_or_make_keys(tmp_path / "keys", users=("alice",))
    assert first == again
    for path in (path for path in (tmp_path / "keys").iterdir() if path.suffix != ".pub"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert first.users_public["alice"].startswith("ssh-ed25519 ")
    assert first.munge not in repr(first)


def test_workers_get_a_host_key_of_their_own_and_the_login_keeps_its(tmp_path: Path) -> None:
    """A cluster with one host key for all keeps it for its logins, and gets a new one for the workers.

    An older cluster had one key for both, which the users' known_hosts contain.
    """
    keys = load_or_make_keys(tmp_path, users=())
    for path in tmp_path.glob("worker_host_*"):
        path.unlink()
    after = load_or_make_keys(tmp_path, users=())
    assert (after.ssh_host, after.ssh_host_public) == (keys.ssh_host, keys.ssh_host_public)
    assert not set(after.worker_host.values()) & {*keys.ssh_host.values(), *keys.worker_host.values()}
    assert after.worker_host_public != after.ssh_host_public
    assert list(after.worker_host) == ["ssh_host_ed25519_key"]
    assert after.worker_host["ssh_host_ed25519_key"] not in repr(after)


IMAGES = [
    pinning.TaggedBuild(reference, tagged=when)
    for reference, when in (
        *[(f"minivm/{role}:24.11.5-debian-00000000000{n}", f"2026-11-20T1{n}") for n in (1, 2) for role in ROLES],
        *[(f"minivm/{role}:25.05.4-nvidia-aaaaaaaaaaaa", "2026-11-20T19") for role in ("controller", "worker")],
        ("minivm/worker:latest", "2026-11-20T20"),
        ("minivm/layer-os:24.11.5-debian-000000000003", "2026-11-20T21"),
        ("other/worker:24.11.5-debian-000000000009", "2026-11-20T22"),
        *[(f"minivm/{role}:24.11.5-debian-arm64-000000000004", "2026-11-20T23") for role in ROLES],
    )
]


def test_the_newest_image_of_each_role_is_chosen() -> None:
    for slurm in ("24.11.5", "24.11"):
        found = pinning.choose_newest(IMAGES, repository="minivm", slurm=slurm, variant="")
        assert found == dict.fromkeys(ROLES, "24.11.5-debian-000000000002"), slurm
    with pytest.raises(ClusterError, match=r"Slurm 24\.1"):
        pinning.choose_newest(IMAGES, repository="minivm", slurm="24.1", variant="")
    # A build is given the release only, without the patch version.
    with pytest.raises(ClusterError, match=r"hint: `make images SLURM=26\.05` builds them"):
        pinning.choose_newest(IMAGES, repository="minivm", slurm="26.05.3", variant="")


def test_only_what_the_engines_machine_runs_itself_is_chosen() -> None:
    for arch, tag in (("amd64", "24.11.5-debian-000000000002"), ("arm64", "24.11.5-debian-arm64-000000000004")):
        found = pinning.choose_newest(IMAGES, repository="minivm", slurm="24.11", variant="debian", arch=arch)
        assert found == dict.fromkeys(ROLES, tag)


class FakeCheckout:
    """A checkout that would build the tags of `own`, and has these commits."""

    def __init__(self, own: str = "", times: Mapping[str, int] | None = None) -> None:
        self.own, self.times = own, times or {}

    def tags(self, release: str, variant: str, arch: str) -> dict[str, str]:
        assert (release, variant, arch) == ("24.11", "debian", "amd64")
        return dict.fromkeys(ROLES, f"24.11.5-debian-{self.own * 12}")

    def committed(self, revisions: Iterable[str]) -> dict[str, int]:
        return {revision: self.times[revision] for revision in revisions if revision in self.times}


@pytest.mark.parametrize(
    ("builder", "latest", "taken"),
    [
        # Somebody named the oldest image last, so the engine calls it the newest.
        (None, "", "1"),
        (FakeCheckout("2", {"c1": 10, "c2": 20, "c3": 30}), "3", "2"),
        (FakeCheckout("9", {"c1": 10, "c2": 20, "c3": 30}), "", "3"),
        (FakeCheckout("9", {"c1": 10, "c2": 20}), "", "2"),
        (FakeCheckout("9", {"c1": 10, "c2": 20, "c3": 30}), "2", "2"),
        (None, "2", "2"),
    ],
)
def test_the_checkouts_own_build_is_taken_then_latest_then_the_newest_commits(
    builder: FakeCheckout | None, latest: str, taken: str
) -> None:
    listed = [
        pinning.TaggedBuild(
            f"minivm/{role}:24.11.5-debian-{n * 12}", n == latest, f"c{n}", f"2026-11-22 0{9 - int(n)}:00"
        )
        for role in ROLES
        for n in "123"
    ]
    found = pinning.choose_newest(listed, repository="minivm", slurm="", variant="debian", builder=builder)
    assert found == dict.fromkeys(ROLES, f"24.11.5-debian-{taken * 12}")


def test_a_checkout_knows_what_it_would_build_and_its_commits(tmp_path: Path) -> None:
    here = Checkout(ROOT)
    tag = here.tags("24.11", "debian", "amd64")["controller"]
    assert pinning.TAG.fullmatch(tag) and tag.startswith("24.11.")
    assert here.tags("23.11", "debian", "amd64") == here.tags("24.11", "nothing", "amd64") == {}


def test_a_checkout_orders_the_commits_that_it_has(tmp_path: Path) -> None:
    def git(*command: str, at: int = 0) -> str:
        who = {f"GIT_{role}_{what}": "x@y" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
        environment = os.environ | who | {"GIT_COMMITTER_DATE": f"@{at} +0000"}
        return subprocess.check_output(["git", "-C", tmp_path, *command], text=True, env=environment).strip()

    assert Checkout(tmp_path).committed(["f" * 40]) == {}
    git("init", "-q")
    commits = []
    for at in (1000, 2000):
        git("commit", "-q", "--allow-empty", "-m", "x", at=at)
        commits.append(git("rev-parse", "HEAD"))
    here = Checkout(tmp_path)
    # A label may say anything: only whole commits are looked up.
    assert here.committed([*commits, "f" * 40, "HEAD", "--all", ""]) == dict(zip(commits, (1000, 2000), strict=True))
    assert [here.age(commit) for commit in (*commits, "f" * 40, "")] == ["older", "other", "other", "other"]


def test_the_plan_names_builds_that_are_not_this_checkouts() -> None:
    notes = pinning.foreign_notes([
        *(pinning.ForeignBuild(role, "older", "abcdef0123", "26.05") for role in ("login", "worker")),
        pinning.ForeignBuild("worker-containers", "other", "", "24.11"),
    ])  # fmt: skip
    assert notes == [
        "login, worker: an older build of minivm than this checkout's (commit abcdef01);"
        " `make images SLURM=26.05` makes this one's",
        "worker-containers: another build of minivm than this checkout's;"
        " `build.py --slurm 24.11 build worker-containers` makes this one's",
    ]


def test_a_role_without_an_image_is_named() -> None:
    hint = "hint: `make images MINIVM_BUILD_VARIANT=nvidia` builds them"
    with pytest.raises(ClusterError, match=f"variant nvidia: none here for demo, login\n{hint}"):
        pinning.choose_newest(IMAGES, repository="minivm", slurm="", variant="nvidia")


@pytest.mark.parametrize(("name", "workers"), [("Has Space", 2), ("../up", 2), ("ok", 0), ("ok", 65)])
def test_options_that_cannot_be_are_refused(name: str, workers: int) -> None:
    with pytest.raises(ClusterError):
        Options(name=name, workers=workers)


def test_a_tag_is_for_every_role_or_for_one() -> None:
    assert pinning.parse_tags([]) == ("", {})
    assert pinning.parse_tags(["1.2-debian-abc"]) == ("1.2-debian-abc", {})
    assert pinning.parse_tags(["old", "worker=new", "login=newer"]) == ("old", {"worker": "new", "login": "newer"})
    with pytest.raises(ClusterError, match="the roles are accounting, controller, demo, worker, login"):
        pinning.parse_tags(["wroker=new"])
    with pytest.raises(ClusterError, match="not a valid tag"):
        pinning.parse_tags(["worker="])


def test_the_newest_images_are_those_of_the_repository_that_the_values_name() -> None:
    assert values.repository_of({}, "minivm") == "minivm"
    assert values.repository_of({"image": {"tag": "x"}}, "minivm") == "minivm"
    assert (
        values.repository_of({"image": {"registry": "r:5000", "repository": "hpc/minivm"}}, "m") == "r:5000/hpc/minivm"
    )


def test_overrides_are_merged_as_helm_does() -> None:
    assert values.merge({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"b": 9}, "d": {"e": 4}}) == {
        "a": {"b": 9, "c": 2},
        "d": {"e": 4},
    }


def test_state_lives_in_the_build_directory() -> None:
    assert STATE.parts[-2:] == ("build", "cluster")


def test_a_taken_port_is_passed_over() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert free_port(port) != port


def test_a_cluster_keeps_its_port_until_another_is_asked_for() -> None:
    with socket.socket() as taken, socket.socket() as own, socket.socket() as other:
        for item in (taken, own, other):
            item.bind(("127.0.0.1", 0))
            item.listen()
        port, has, free = taken.getsockname()[1], own.getsockname()[1], other.getsockname()[1]
        other.close()
        assert choose_port(0, default=port, own=has) == has
        assert choose_port(free, default=port, own=has) == free
        # The cluster's own pod listens on this port, so its use is no reason to choose another.
        assert choose_port(has, default=port, own=has) == has
        instead = choose_port(port, default=port, own=0)
        assert instead > port
        assert choose_port(port, default=port, own=instead) == instead


def test_ssh_needs_the_clusters_keys_and_not_its_engine(tmp_path: Path) -> None:
    LocalCluster(None, Options(name="here", port=2345), root=tmp_path).save()
    cluster = LocalCluster.load(None, "here", root=tmp_path)
    line = cluster.ssh_command("alice", "hostname")
    assert line[:3] == ["ssh", "-p", "2345"]
    assert line[-2:] == ["alice@127.0.0.1", "hostname"]
    assert Path(line[line.index("-i") + 1]).read_text().startswith("-----BEGIN OPENSSH PRIVATE KEY-----")
    assert f"UserKnownHostsFile={tmp_path}/here/known_hosts" in line
    with pytest.raises(ClusterError, match="alice, bob"):
        cluster.ssh_command("carol")


def test_ssh_knows_the_host_keys_of_the_values(tmp_path: Path) -> None:
    """A key that the values change is the login pod's: ssh would refuse it as another machine's."""
    made = load_or_make_keys(tmp_path, users=())
    assert values.login_host_keys(Options(), made) == [made.ssh_host_public]
    overrides = {"secrets": {"sshHostKeys": {"public": ["ssh-ed25519 AAAA", "ssh-rsa BBBB"]}}}
    public_keys = values.login_host_keys(Options(overrides=overrides), made)
    assert make_known_hosts(public_keys, 2345).splitlines() == [
        "[127.0.0.1]:2345 ssh-ed25519 AAAA", "[127.0.0.1]:2345 ssh-rsa BBBB"
    ]  # fmt: skip


def test_a_cluster_that_is_not_up_is_said(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="it is not up\nhint: make up"):
        LocalCluster.load(None, "nowhere", root=tmp_path)
    for name in ("local", "second"):
        LocalCluster(None, Options(name=name), root=tmp_path).save()
    with pytest.raises(ClusterError, match="hint: there are local, second"):
        LocalCluster.load(None, "loacl", root=tmp_path)


def test_a_second_up_keeps_the_port(tmp_path: Path) -> None:
    LocalCluster(None, Options(name="here", port=2345), root=tmp_path).save()
    assert LocalCluster(None, Options(name="here"), root=tmp_path).saved_port() == 2345


ROWS = [
    Row("slurm-controller-0", "controller", True, "", "up", 0, also=("gitsync: no route to host",)),
    Row("slurm-worker-0", "worker", False, "slurmd waits for controller\nmunged is not proven", "IDLE+DRAIN", 3),
    Row("slurm-worker-1", "worker", True, "", "idle", 0, version="24.11.5", image="ef0b1c492726"),
]


def test_the_table_says_why_a_pod_is_not_ready_and_what_else_is_wrong() -> None:
    lines = report.table(ROWS)
    assert lines[0].split()[:6] == ["POD", "ROLE", "READY", "SLURM", "VERSION", "IMAGE"]
    assert lines[1].split()[3:] == ["up", "0", *["degraded:", "gitsync:", "no", "route", "to", "host"]]
    assert lines[2].endswith("3         slurmd waits for controller")
    assert lines[3].strip() == "munged is not proven"
    assert lines[4].split() == ["slurm-worker-1", "worker", "yes", "idle", "24.11.5", "ef0b1c492726", "0"]


def test_what_degrades_several_pods_alike_is_shown_once() -> None:
    port = "probe port: the kernel refuses the filter"
    pods = [
        Row(f"w{n}", "worker", True, "", "idle", 0, also=(port, *(["home: slow"] if n == 1 else []))) for n in range(6)
    ]
    lines = report.table(pods)
    assert lines[-1] == f"all pods: degraded: {port}"
    assert [line.split()[0] for line in lines] == ["POD", "w0", "w1", "w2", "w3", "w4", "w5", "all"]
    assert lines[2].endswith("degraded: home: slow") and "probe port" not in "".join(lines[:-1])
    *_, last = report.table([*pods, Row("login", "login", True, "", "-", 0)])
    assert last == f"w0, w1, w2 and 3 more: degraded: {port}"
    *_, last = report.table([*pods[:2], Row("login", "login", False, "no route", "-", 0, also=(port,))])
    assert last == f"w0, w1: degraded: {port}"
    assert report.table(pods[:1])[-1].endswith(f"degraded: {port}")


def test_a_long_reason_is_cut_to_the_terminal() -> None:
    assert {len(line) <= 80 for line in report.table(ROWS, width=80)} == {True}


def test_a_service_that_somebody_stopped_is_told_with_what_degrades_the_pod() -> None:
    services = [{"name": "slurmdbd", "state": "stopped"}, {"name": "sshd", "state": "ready"}]
    assert problems({"degraded": ["slurm.conf refused"], "services": services}) == (
        "slurm.conf refused",
        "slurmdbd: stopped on request",
    )


def test_it_is_told_also_where_its_neighbour_complains_of_it_and_once() -> None:
    services = [{"name": "slurmdbd", "state": "stopped"}]
    accounting = "accounting: slurmdbd does not answer"
    assert problems({"degraded": [accounting], "services": services}) == (accounting, "slurmdbd: stopped on request")
    waits = "slurmrestd waits for slurmdbd: stopped on request"
    assert problems({"degraded": [waits], "services": services}) == (waits,)


def test_slurms_states_carry_the_reason_of_a_drain() -> None:
    sinfo = "w-0|idle|none\nw-1|drained|minivm: 7 of 8 GPUs answer\nw-1|drained|minivm: 7 of 8 GPUs answer\n"
    assert report.slurm_states(sinfo) == {"w-0": "idle", "w-1": "drained (minivm: 7 of 8 GPUs answer)"}


def test_what_a_machine_cannot_give_is_said() -> None:
    default = ["name=apparmor", "name=seccomp,profile=default"]
    (line,) = report.not_granted([], cgroups="docker keeps them read-only", security=default)
    assert "docker keeps them read-only. So jobs are tracked but not held" in line
    assert not report.not_granted([], cgroups="", security=default)


@pytest.mark.parametrize("security", [[], ["name=apparmor"], ["name=seccomp,profile=unconfined"]])
def test_an_engine_without_seccomp_is_told(security: list[str]) -> None:
    (line,) = report.not_granted([], cgroups="", security=security)
    assert line.startswith("seccomp: ")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\xff\xfe\x00", "not UTF-8"),
        (b"{[a]: b}", "a key is one word"),
        (b"a: 1\na: 2\n", "is given twice"),
        (b"- a\n", "holds a list, not names with values"),
        (b"[]\n", "holds a list, not names with values"),
    ],
)
def test_values_that_are_none_are_told_with_their_file(tmp_path: Path, content: bytes, said: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_bytes(content)
    with pytest.raises((ClusterError, ImagesError), match=said) as told:
        read_overrides(file)
    assert "cannot read the values" in str(told.value)
    assert "mine.yaml" in str(told.value)


def test_an_empty_file_of_values_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("# nothing yet\n")
    assert read_overrides(file) == {}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["up", "--port", "99999"], "99999 is not in the range"),
        (["--variant", "nvidia", "up"], "hint: up --variant NAME"),
        (["--slurm", "source", "up"], "hint: up --variant NAME"),
    ],
)
def test_up_says_what_it_was_given_and_cannot_take(arguments: list[str], said: str) -> None:
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code != 0
    assert said in done.output
