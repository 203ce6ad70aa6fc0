"""Cost of a changed slurm.conf for a cluster's jobs: what the change does, and which jobs it would end."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from init.pod.pod import Pod
from init.prepare import slurm_config
from init.slurm.change import (
    SHOWN,
    effect,
    find_missing_plugins,
    find_missing_topology,
    find_unknown_parameters,
    hidden_lists,
    impossible_settings,
    warn_about_elsewhere,
)
from init.slurm.conf import expand, number, read
from init.slurm.daemon import FIELDS, KnownJob, count, jobs
from init.slurm.files import LastGoodConfig, decode_config_map, digest

BASE = """\
ClusterName=c  # a comment
SlurmctldHost=one(address)
StateSaveLocation=/var/spool/slurmctld
SelectType=select/cons_tres
MaxNodeCount=1024
GresTypes=gpu,nvme
SlurmdPort=6818
NodeName=DEFAULT CPUs=2
NodeName=st[1-3] RealMemory=1000
NodeSet=pool_worker Feature=worker
PartitionName=DEFAULT State=UP
PartitionName=all Nodes=pool_worker Default=YES
PartitionName=long Nodes=pool_worker MaxTime=7-00:00:00 \\
    AllowAccounts=lab,other
"""


def job(number: str = "1", **given: object) -> KnownJob:
    known: dict[str, object] = {
        "holds": True, "partitions": frozenset({"all"}), "nodes": frozenset({"dyn-0"}), "wanted": frozenset(),
        "account": "lab", "qos": "normal", "gres": frozenset(),
    }  # fmt: skip
    return KnownJob(id=number, **(known | given))  # type: ignore[arg-type]


RUNS = job()
WAITS = job("2", holds=False, nodes=frozenset())
LONG = job("3", partitions=frozenset({"long"}))
LATER = job("4", holds=False, nodes=frozenset(), partitions=frozenset({"all", "long"}))
STATIC = job("5", nodes=frozenset({"st2"}))
WANTS = job("6", holds=False, nodes=frozenset(), wanted=frozenset({"st3"}))
GPU = job("7", gres=frozenset({"gpu"}))
OTHER = job("8", holds=False, nodes=frozenset(), partitions=frozenset({"long"}), account="other", qos="high")
NOBODY = job("9", holds=False, nodes=frozenset(), account="")
JOBS = [RUNS, WAITS, LONG, LATER, STATIC, WANTS, GPU, OTHER, NOBODY]


def files(text: str) -> dict[str, bytes]:
    return {"slurm.conf": text.encode()}


def swap(old: str, new: str) -> str:
    assert old in BASE
    return BASE.replace(old, new)


LONG_LINES = BASE[BASE.index("PartitionName=long") :]


@pytest.mark.parametrize(
    ("new", "lost"),
    [
        (BASE, {}),
        # Additions cost no job, in any spelling.
        (BASE + "PartitionName=more Nodes=ALL\n", {}),
        (BASE + "NodeName=st4 CPUs=1\n", {}),
        (swap("MaxNodeCount=1024", "MaxNodeCount=2048"), {}),
        (swap("SlurmdPort=6818", "SlurmdTimeout=9"), {}),
        (swap("Default=YES", "Default=NO MaxTime=1"), {}),
        (swap("NodeName=st[1-3]", "NodeName=st1,st[2-3]"), {}),
        (BASE.replace("PartitionName", "partitionname"), {}),
        # A removed partition costs its jobs, and jobs that could have started there.
        (BASE.replace(LONG_LINES, ""), {"partition long goes": ("3", "4", "8")}),
        (swap("PartitionName=all", "PartitionName=every"), {"partition all goes": ("1", "2", "4", "5", "6", "7", "9")}),
        # Nodes: the jobs on them, and the jobs that wait for one of them by name.
        (swap("st[1-3]", "st[1-2]"), {"node st3 goes": ("6",)}),
        (swap("NodeName=st[1-3] RealMemory=1000\n", ""), {"node st1, st2, st3 goes": ("5", "6")}),
        (
            swap("MaxNodeCount=1024\n", ""),
            {
                "MaxNodeCount 1024 becomes none, and nodes that registered themselves may find no room": ("1", "3", "7")
            },
        ),
        # State directory and daemons.
        (
            swap("/var/spool/slurmctld", "/elsewhere"),
            {
                "StateSaveLocation /var/spool/slurmctld becomes /elsewhere, and the saved jobs are not found again":
                tuple("123456789")
            },
        ),
        (
            swap("SlurmdPort=6818", "SlurmdPort=7777"),
            {"SlurmdPort 6818 becomes 7777, and what runs is not found again": ("1", "3", "5", "7")},
        ),
        (
            swap("cons_tres", "linear"),
            {
                "SelectType select/cons_tres becomes select/linear, and what runs is not found again":
                ("1", "3", "5", "7")
            },
        ),
        (swap("gpu,nvme", "nvme"), {"gres gpu goes": ("7",)}),
        (swap("gpu,nvme", "gpu"), {}),
        # Accounts and QOS: only pending jobs with no other partition.
        (swap("lab,other", "lab"), {"partition long lets account lab in and no other": ("8",)}),
        (swap("lab,other", "ALL"), {}),
        (swap("lab,other", "lab,other DenyQos=high"), {"partition long turns qos high away": ("8",)}),
        (swap("lab,other", "lab,other AllowQos=high,normal"), {}),
        (
            BASE + "AccountingStorageEnforce=associations,limits\n",
            {
                "AccountingStorageEnforce becomes associations,limits, and who has no account is not let in": ("9",)
            },
        ),
    ],
)  # fmt: skip
def test_a_change_costs_the_jobs_that_slurmctld_would_end(new: str, lost: dict[str, tuple[str, ...]]) -> None:
    found = effect(files(BASE), files(new), JOBS)
    assert {loss.what: loss.jobs for loss in found.losses} == lost


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (BASE, ""),
        (BASE.replace("ClusterName=c ", "ClusterName=C "), ""),  # Slurm stores the name in lower case
        (
            BASE.replace("ClusterName=c ", "ClusterName=other "),
            "ClusterName is other, and the state in StateSaveLocation is that of c: a cluster keeps its name",
        ),
        (BASE + "NodeName=gpu[1-3 CPUs=1\n", "NodeName=gpu[1-3: a bracket is not closed, or not opened"),
        (BASE + "NodeName=gpu1-3] CPUs=1\n", "NodeName=gpu1-3]: a bracket is not closed, or not opened"),
        (BASE + "NodeName=r[1-2]n[01-16] CPUs=1\n", ""),
        (
            BASE + "PartitionName=x Nodes=gpu[1-3\n",
            "partition x: Nodes=gpu[1-3: a bracket is not closed, or not opened",
        ),
        (
            BASE.replace("ClusterName=c ", "ClusterName=d ")
            + "NodeName=gpu[1-3 CPUs=1\nPartitionName=x Nodes=gpu1-3]\n",
            "ClusterName is d, and the state in StateSaveLocation is that of c: a cluster keeps its name; "
            "NodeName=gpu[1-3: a bracket is not closed, or not opened; "
            "partition x: Nodes=gpu1-3]: a bracket is not closed, or not opened",
        ),
    ],
)
def test_what_only_slurmctld_refuses_is_told_before_it_is_asked(text: str, why: str) -> None:
    assert impossible_settings(read(files(text)), "c") == why


PRESENT = frozenset({
    "priority_basic", "priority_multifactor", "select_cons_tres", "job_submit_lua", "preempt_qos", "sched_backfill",
    "sched_builtin", "task_affinity", "task_cgroup", "topology_tree",
})  # fmt: skip


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            "PriorityType=priority/bogus",
            "PriorityType=priority/bogus: this Slurm has no plug-in priority/bogus, but basic, multifactor",
        ),
        ("priorityTYPE=priority/multifactor\nPreemptType=preempt/none\nJobSubmitPlugins=lua", ""),
        ("JobSubmitPlugins=lua,mine", "JobSubmitPlugins=lua,mine: this Slurm has no plug-in job_submit/mine, but lua"),
        (
            "PriorityType=priority/bogus\nJobSubmitPlugins=mine",
            "JobSubmitPlugins=mine: this Slurm has no plug-in job_submit/mine, but lua; "
            "PriorityType=priority/bogus: this Slurm has no plug-in priority/bogus, but basic, multifactor",
        ),
        ("MCSPlugin=mcs/any", ""),  # none of this kind is known here: nothing is claimed
        ("SchedulerType=sched/backfill\nTopologyPlugin=topology/none", ""),
        (
            "SchedulerType=sched/none",  # the name that means "no plug-in" elsewhere
            "SchedulerType=sched/none: this Slurm has no plug-in sched/none, but backfill, builtin",
        ),
        (
            "TopologyPlugin=topology/tre",
            "TopologyPlugin=topology/tre: this Slurm has no plug-in topology/tre, but tree",
        ),
        ("TaskPlugin=task/any", ""),  # a worker's image may have it
        ("AuthType=auth/any", ""),  # clients load it too, and test it
    ],
)
def test_a_plug_in_that_is_not_there_is_named_with_those_that_are(text: str, why: str) -> None:
    assert find_missing_plugins(read(files(f"SelectType=select/cons_tres\n{text}\n")), PRESENT) == why


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("SchedulerType=backfill", "sched/backfill"),
        ("SchedulerType=priority/backfill", "sched/backfill"),
        ("PriorityType=multifactor", "priority/multifactor"),
        ("TopologyPlugin=tree", "topology/tree"),
        ("AccountingStorageType=slurmdbd", "accounting_storage/slurmdbd"),
        ("ProctrackType=cgroup", "proctrack/cgroup"),
        ("MpiDefault=mpi/pmi2", "pmi2"),
        ("TaskPlugin=sched/cgroup,affinity", "cgroup"),
        ("TaskPlugin=task/cgroup,affinity", ""),
        ("MpiDefault=pmi2", ""),
        ("JobSubmitPlugins=job_submit/lua", ""),
        ("SwitchType=none", ""),
        ("JobCompType=none", ""),
        ("AccountingStorageType=accounting_storage/none", ""),
        ("SchedulerType=sched/backfill", ""),
    ],
)
def test_a_plug_in_that_slurm_does_not_find_as_written_is_refused(line: str, expected: str) -> None:
    """slurmctld, slurmd or srun of 24.11 and 26.05 refused the former and took the latter."""
    present = PRESENT | {"accounting_storage_slurmdbd", "proctrack_cgroup", "mpi_pmi2", "jobcomp_lua"}
    key, _, word = line.partition("=")
    why = f"slurm.conf: {key}: found {word.split(',')[0]}, expected {expected}: " if expected else ""
    told = find_missing_plugins(read(files(f"{line}\n")), present)
    assert told.startswith(why) if why else told == ""


def test_the_name_of_the_flat_topology_before_25_05_is_taken() -> None:
    newer = (PRESENT - {"topology_default"}) | {"topology_flat"}
    for word in ("default", "topology/default", "topology/flat"):
        assert find_missing_plugins(read(files(f"TopologyPlugin={word}\n")), newer) == ""


def test_a_topology_without_its_file_is_refused() -> None:
    for plugin in ("tree", "block"):
        text = files(f"TopologyPlugin=topology/{plugin}\n")
        assert find_missing_topology(text) == (
            f"topology.conf: found no such file, expected one for TopologyPlugin=topology/{plugin} in slurm.conf:"
            " slurmctld ends without it; set slurm.topologyConfig, or remove the line"
        )
        for name in ("topology.conf", "topology.yaml"):
            assert find_missing_topology({**text, name: b"SwitchName=s Nodes=n1\n"}) == ""
    for line in ("TopologyPlugin=topology/default", ""):
        assert find_missing_topology(files(f"{line}\n")) == ""


def test_a_plug_in_that_the_workers_alone_load_is_a_warning() -> None:
    text = "TaskPlugin=task/cgroup,task/mine\nProctrackType=proctrack/mine\nSchedulerType=sched/mine\n"
    assert warn_about_elsewhere(read(files(text)), PRESENT) == [
        "unknown: TaskPlugin=task/cgroup,task/mine: this image has no plug-in task/mine, but affinity, cgroup;"
        " pods that lack it too run no job"
    ]
    assert warn_about_elsewhere(read(files("TaskPlugin=task/cgroup,affinity\n")), PRESENT) == []


def test_a_cluster_without_state_may_have_any_name() -> None:
    assert impossible_settings(read(files(BASE)), "") == ""


def test_where_nobody_can_be_asked_what_goes_counts_and_what_comes_does_not() -> None:
    (loss,) = effect(files(BASE), files(BASE.replace(LONG_LINES, "")), None).losses
    assert loss.jobs is None
    assert str(loss) == "partition long goes, and slurmctld did not answer which jobs that ends"
    assert effect(files(BASE), files(BASE + "PartitionName=more Nodes=ALL\n"), None).losses == ()


@pytest.mark.parametrize(
    ("old", "new", "known", "cost"),
    [
        ("MaxJobCount=200000", "", 9_999, ""),
        (
            "MaxJobCount=200000",
            "",
            10_000,
            "MaxJobCount 200000 becomes 10000, and slurmctld forgets jobs beyond it: it knows 10000, ended ones too",
        ),
        (
            "",
            "maxjobcount=500",
            600,
            "MaxJobCount 10000 becomes 500, and slurmctld forgets jobs beyond it: it knows 600, ended ones too",
        ),
        (
            "MaxJobCount=200000",
            "",
            None,
            "MaxJobCount 200000 becomes 10000, and slurmctld did not answer which jobs that ends",
        ),
        ("", "MaxJobCount=200000", 50_000, ""),
        ("MaxJobCount=10000", "", 50_000, ""),
        ("MaxJobCount=UNLIMITED", "MaxJobCount=20000", 19_999, ""),
        (
            "MaxJobCount=100k",
            "MaxJobCount=0x8000",
            40_000,
            "MaxJobCount 102400 becomes 32768, and slurmctld forgets jobs beyond it: it knows 40000, ended ones too",
        ),
        (
            "",
            "MaxJobCount=20000\nFirstJobId=5000\nMaxJobId=6000",
            1_200,
            "MaxJobCount 10000 becomes 1001 (the numbers from FirstJobId to MaxJobId), and slurmctld forgets jobs"
            " beyond it: it knows 1200, ended ones too",
        ),
    ],
)
def test_slurmctld_is_not_told_to_know_fewer_jobs_than_it_knows(
    old: str, new: str, known: int | None, cost: str
) -> None:
    before, after = (BASE.replace("SlurmdPort=6818\n", f"SlurmdPort=6818\n{line}\n") for line in (old, new))
    assert effect(files(before), files(after), [], known=known).cost == cost


@pytest.mark.parametrize(
    ("written", "read_as"),
    [
        ("0", 0), ("+200", 200), (" 300", 300), ("0x100", 256), ("0X1K", 1024), ("01000", 512), ("100k", 102_400),
        ("unlimited", 2**32 - 1), ("INFINITE", 2**32 - 1),
        ("", None), ("-1", None), ("1e3", None), ("1m", None), ("300,", None), ("09", None), ("k", None), ("0x", None),
        ("²", None), ("9" * 5000, None),
    ],
)  # fmt: skip
def test_a_number_is_read_as_slurm_reads_it(written: str, read_as: int | None) -> None:
    assert number(written) == read_as


def test_room_for_nodes_is_a_number_of_slurms_too() -> None:
    old, new = swap("MaxNodeCount=1024", "MaxNodeCount=1k"), swap("MaxNodeCount=1024", "MaxNodeCount=512")
    assert "MaxNodeCount 1k becomes 512" in effect(files(old), files(new), JOBS).cost
    assert effect(files(BASE), files(old), JOBS).cost == ""


def test_the_cost_is_a_sentence_that_names_a_few_and_counts_all() -> None:
    many = [job(str(number), partitions=frozenset({"long"})) for number in range(100, 150)]
    cost = effect(files(BASE), files(BASE.replace(LONG_LINES, "")), many).cost
    assert cost == f"partition long goes: 50 jobs ({', '.join(str(n) for n in range(100, 100 + SHOWN))}, ...)"
    assert effect(files(BASE), files(BASE.replace(LONG_LINES, "")), [LONG]).cost == "partition long goes: job 3"


def test_a_running_job_that_asked_for_the_partition_among_others_counts_too() -> None:
    """A running job submitted to several partitions counts for each.

    slurmctld ends the job when one of them goes, and shows only the partition that it runs in.
    """
    running = read(files(BASE)).partitions
    state = b"\x00\x00\x00\x09all,long\x00\x00\x00\x00\x09all,long\x00cpu=1,mem=100M,node=1\x001,2\x00"
    assert hidden_lists(state, running, [frozenset({"all"})]) == ("all,long",)
    assert hidden_lists(state, running, [frozenset({"all", "long"})]) == (), "it waits, and is seen"
    assert hidden_lists(b"\x00\x00\x00Aall,long\x00", running, []) == ("all,long",), "a length that is a letter"
    assert hidden_lists(b"\x00\x00\x00,all,long\x00", running, []) == ("all,long",), "or a comma"
    gone = files(BASE.replace(LONG_LINES, ""))
    assert effect(files(BASE), gone, [RUNS], ("all,long",)).cost == (
        "partition long goes: running jobs that were submitted to all,long"
    )
    assert effect(files(BASE), files(BASE), [RUNS], ("all,long",)).losses == ()


def test_words_of_a_jobs_user_in_the_state_hold_nobody_up() -> None:
    """Text of a job's user in the state file does not slow down the search.

    Each of these inputs once took minutes: the arguments and the submit line are saved unchanged.
    """
    running = read(files(BASE)).partitions
    for words in ("a" * 4_000_000, "a," * 2_000_000, "all," * 1_000_000, "all,long," * 500_000):
        state = f"\x00\x00{words} x\x00\x00{words}all\x00\x00\x00\x00\x09all,long\x00".encode()
        assert hidden_lists(state, running, []) == ("all,long",)


def test_changes_are_told_one_by_one() -> None:
    new = swap("Default=YES", "Default=NO").replace("SlurmdPort=6818\n", "SlurmdTimeout=9\n") + "PartitionName=b\n"
    found = effect({**files(BASE), "gres.conf": b"1"}, {**files(new), "topology.conf": b""}, JOBS)
    assert found.changes == (
        "SlurmdPort: 6818 -> -", "SlurmdTimeout: - -> 9", "partition all: default: YES -> NO", "partition b: comes",
        "gres.conf: goes", "topology.conf: comes",
    )  # fmt: skip
    assert effect(files("ProctrackType=a"), files("ProctrackType=b"), []).restarts == (
        "ProctrackType: the workers' pods",
    )


def test_slurm_conf_is_read_as_slurm_reads_it() -> None:
    found = read({
        "slurm.conf": b"ClusterName=a SlurmctldHost=h1\nSlurmctldHost=h2\ninclude /etc/slurm/more.conf\n#NodeName=no\n"
        b'NodeName=n[08-10] Reason="two words = here" CPUs=4\nPartitionName=p Nodes=n08\nPartitionName=p State=DOWN\n',
        "more.conf": b"Include more.conf\nMaxNodeCount = 5\n",
    })  # fmt: skip
    assert found.settings == {"clustername": "a", "slurmctldhost": "h1,h2", "maxnodecount": "5"}
    assert list(found.nodes) == ["n08", "n09", "n10"] and found.nodes["n09"]["reason"] == "two words = here"
    assert found.partitions == {"p": {"nodes": "n08", "state": "DOWN"}}


@pytest.mark.parametrize(
    "text",
    [
        "include\tmore.conf\n",
        "INCLUDE   /etc/slurm/more.conf  # here\n",
        "# more of them: \\\nMaxJobCount=77\n",
        "MaxJobCount=7\\\n7\n",
        "MaxJobCount=7\\ \t\r\n7\r\n",
        "MaxJobCount=7\\ # and\n7\n",
        "MaxJobCount=88\nmaxjobcount = 77 # 99\n#a\x0cMaxJobCount=4321\n#a\u2028MaxJobCount=4321\n",
        "MaxJobCount=77\\",
    ],
)
def test_lines_go_on_and_end_where_slurm_says(text: str) -> None:
    """Line continuation and line ends match slurmctld, as seen in `scontrol show config`."""
    assert read({"slurm.conf": text.encode(), "more.conf": b"MaxJobCount=77\n"}).value("maxjobcount") == "77"


@pytest.mark.parametrize(
    ("hosts", "names"),
    [
        ("", []),
        ("a,b-1", ["a", "b-1"]),
        ("w[1-2,07],x", ["w1", "w2", "w07", "x"]),
        ("r[1-2]n[0-1]", ["r1n0", "r1n1", "r2n0", "r2n1"]),
        ("n[a-b]", ["n[a-b]"]),
        ("n[1-999999999]", ["n[1-999999999]"]),
        ("n[²]", ["n[²]"]),
    ],
)
def test_a_list_of_hosts_is_its_hosts(hosts: str, names: list[str]) -> None:
    assert expand(hosts) == names


def test_ranges_within_ranges_are_no_more_than_slurm_takes() -> None:
    many = "w[0-60000]r[0-60000]"
    assert expand(f"{many},x[1-2]a[1-2]") == [many, "x1a1", "x1a2", "x2a1", "x2a2"]


def test_squeue_is_read_field_by_field() -> None:
    text = (
        "12_[1-100%5]|PD|main,p2|||cpu=1,mem=100M,node=1,billing=1,gres/gpu=2,gres/gpu:h100=2|normal|(null)|\n"
        "11|R|main|w[1-2]||cpu=1|normal|lab|\n13|PD|main||w7|cpu=1|normal|lab|\nshort|R|\n"
    )
    assert len(FIELDS) == 8
    assert list(jobs(text)) == [
        job("12_[1-100%5]", holds=False, partitions=frozenset({"main", "p2"}), nodes=frozenset(), account="",
            gres=frozenset({"gpu"})),
        job("11", partitions=frozenset({"main"}), nodes=frozenset({"w1", "w2"})),
        job("13", holds=False, partitions=frozenset({"main"}), nodes=frozenset(), wanted=frozenset({"w7"})),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "known"),
    [
        ("", 0),
        ("7\n8_2\n9+1\n", 3),
        ("12_[0-100:2]\n", 51),
        ("12_[1-10%3]\n12_11\n13_[5]\n14_[0-8:2,11,20-21]\n", 20),
        ("12_[0-299999:3]\n" * 1000, 100_000_000),
        ("12_[1104,2993,4826\n", None),
        ("12_[1,...]\n", None),
        ("squeue: error\n", None),
    ],
)
def test_each_task_of_an_array_is_a_job_that_slurmctld_knows(text: str, known: int | None) -> None:
    """Array tasks count as jobs, as slurmctld counts them; `squeue --array` lacks a line for an array with a step."""
    assert count(text) == known


def test_an_account_of_its_users_own_words_hides_no_job_and_writes_on_no_terminal() -> None:
    (found,) = jobs("11|R|main|w1||gres/gpu=1|normal|a|b\n\x1b[2J|R|all|w1||cpu=1|normal|a|\n")
    assert (found.id, found.partitions, found.gres) == ("11", frozenset({"main"}), frozenset({"gpu"}))


@given(st.binary(), st.binary())
def test_whatever_stands_in_a_file_is_judged_and_never_a_crash(old: bytes, new: bytes) -> None:
    effect({"slurm.conf": old}, {"slurm.conf": new}, JOBS)


# The last good configuration, which outlives its pod.


def test_what_is_kept_is_what_was_kept(tmp_path: Path) -> None:
    kept = LastGoodConfig(Pod({}, tmp_path))
    assert kept.read() is None and kept.read_acceptance() == ""
    kept.keep({"slurm.conf": b"a=\xff\n", "job_submit.lua": "ä".encode()})
    assert kept.read() == {"slurm.conf": b"a=\xff\n", "job_submit.lua": "ä".encode()}
    assert (kept.directory / "good.json").stat().st_mode & 0o777 == 0o600, "a password may be in it"
    assert kept.directory.stat().st_mode & 0o777 == 0o700
    kept.accept("abc", 1.0)
    assert kept.read_acceptance() == "abc 1.000"


@pytest.mark.parametrize("damage", [b"", b"{", b"[1]", b'{"slurm.conf": 1}', b"\xff\xfe", b"null"])
def test_what_cannot_be_read_is_not_there(tmp_path: Path, damage: bytes) -> None:
    kept = LastGoodConfig(Pod({}, tmp_path))
    kept.keep({"slurm.conf": b"a"})
    (kept.directory / "good.json").write_bytes(damage)
    assert kept.read() is None


def test_a_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    """A symbolic link in place of the kept file is not followed.

    The Slurm user can write to the volume, and root must not install a file of its choice that all users can read.
    """
    kept = LastGoodConfig(Pod({}, tmp_path))
    kept.keep({"slurm.conf": b"a"})
    (kept.directory / "good.json").rename(tmp_path / "elsewhere")
    (kept.directory / "good.json").symlink_to(tmp_path / "elsewhere")
    assert kept.read() is None


def test_the_hash_names_these_files_and_no_others() -> None:
    assert digest({"a": b"1", "b": b"2"}) == digest({"b": b"2", "a": b"1"})
    assert len({digest(one) for one in ({"a": b"1"}, {"a": b"2"}, {"a": b"1", "b": b""}, {"a1": b""}, {})}) == 5


SIGNED = {"slurm.conf": b"AuthType=auth/slurm\n"}
MOUNTED, GOOD = {"slurm.conf": b"new"}, {"slurm.conf": b"good", "gres.conf": b"old gres"}

# slurmctld hangs in a reconfigure while it waits for a slurmdbd whose pod is gone: it starts with the present address.
AT_POD = {"slurm.conf": b"MaxNodeCount=2\nAccountingStorageHost=apart\n"}
AT_CONTROLLER = {"slurm.conf": b"MaxNodeCount=1\nAccountingStorageHost=slurm-controller # there\n"}


@pytest.mark.parametrize(
    ("mounted", "good", "starts_from"),
    [
        (MOUNTED, None, MOUNTED),
        (MOUNTED, GOOD, GOOD),
        (MOUNTED, MOUNTED, MOUNTED),
        ({}, GOOD, {}),  # the controller writes its own
        (MOUNTED, {}, MOUNTED),
        (MOUNTED, {"gres.conf": b""}, MOUNTED),
        (SIGNED, GOOD, SIGNED),  # no running slurmctld can change to it
        (SIGNED, SIGNED | {"gres.conf": b"old"}, SIGNED | {"gres.conf": b"old"}),
        (AT_POD, AT_CONTROLLER, {"slurm.conf": b"MaxNodeCount=1\nAccountingStorageHost=apart # there\n"}),
    ],
)
def test_a_new_pod_starts_from_what_the_last_one_ran_with(
    mounted: dict[str, bytes], good: dict[str, bytes] | None, starts_from: dict[str, bytes]
) -> None:
    assert slurm_config.start_from(mounted, good) == starts_from


def test_a_config_map_holds_what_will_be_mounted_of_it() -> None:
    """The hash to accept covers only Slurm's files: other keys of the ConfigMap are for other readers."""
    text = "kind: ConfigMap\ndata: {slurm.conf: A=1, pools.json: '{}', job_submit.lua: --, topology.yaml: x}\n"
    assert sorted(decode_config_map(text)) == ["job_submit.lua", "slurm.conf", "topology.yaml"]


PROGRAMS = b"ELF\0bf_max_job_test=\0sched_interval=\0defer\0max_rpc_cnt=\0bf_window\0"


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("defer,bf_max_job_test=5,BF_WINDOW=1,max_rpc_cnt=,bf_window", []),
        ("salloc_wait_nodes,Ignore_NUMA", []),  # other programs read these
        ("", []),
        ("bf_maxjob_test=5,defer", ["this Slurm has no 'bf_maxjob_test'; did you mean 'bf_max_job_test'?"]),
        ("max_job_test=5", ["this Slurm has no 'max_job_test'; did you mean 'bf_max_job_test'?"]),
        ("xx", ["this Slurm has no 'xx'"]),
    ],
)
def test_a_scheduler_parameter_that_slurmctld_would_ignore_is_told(value: str, told: list[str]) -> None:
    found = find_unknown_parameters(read(files(f"SchedulerParameters={value}\n")), PROGRAMS)
    assert found == [f"ignored: SchedulerParameters: {line}" for line in told]
