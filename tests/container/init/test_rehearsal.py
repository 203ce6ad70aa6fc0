"""Rehearsals of a changed slurm.conf on a real state: each disaster is named with its jobs, and no harmless change is.

One cluster for the module, saved once; the real daemons of both releases then run on the copy. MINIVM_REHEARSALS=100
tries that number of harmless changes, and MINIVM_REHEARSALS_FROM begins at another seed.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker  # type: ignore[import-untyped]  # it carries no types
import pytest
from docker.types import Mount  # type: ignore[import-untyped]  # it carries no types

from cluster.change.pinning import find_newest_beside
from cluster.slurm_conf import CAPABILITIES
from tests.container.harmless import harmless
from tests.container.init_pods import LABELS, PYTHON, Pod, image_of, slurm_conf, world
from tests.waiting import until

pytestmark = [pytest.mark.docker, pytest.mark.cluster]

SAME, NEWER = "24.11", "26.05"
COUNT = int(os.environ.get("MINIVM_REHEARSALS", "6"))
FROM = int(os.environ.get("MINIVM_REHEARSALS_FROM", "0"))
BACKUPS = "/var/lib/minivm/backups"
CONF = slurm_conf(
    "NodeName=s1 CPUs=2 RealMemory=500 Feature=fast",
    "NodeName=s2 NodeAddr=127.0.0.2 CPUs=4 RealMemory=900 Feature=big",
    "NodeSet=quick Feature=fast",
    "Licenses=matlab:4",
    "AccountingStorageEnforce=associations,limits,qos",
    "PriorityType=priority/multifactor",
    "PriorityWeightQOS=1000",
    "PartitionName=extra Nodes=ALL State=UP OverSubscribe=FORCE:4",
    "PartitionName=long Nodes=s1,s2 State=UP MaxTime=2-0 AllowQos=normal,high",
    "PartitionName=swift Nodes=quick State=UP OverSubscribe=FORCE:4",
)
ACCOUNTS = (
    "add qos high priority=10",
    "add account physics",
    "add user demo account=physics qos=normal,high defaultqos=normal",
)
# Each job with its options; those that run come first.
RUNNING = {"both": "-w w1 -p main,extra", "extra": "-w s1 -p extra", "swift": "-w s1 -p swift"}
WAITING = {
    "held": "--hold",
    "array": "--hold --array=1-20%3",
    "long": "-p long -t 1-00:00 --begin=now+1day",
    "high": "-p long -t 1-00:00 --qos=high --begin=now+1day",
    "after": "--dependency=afterok:{both}",
    "licence": "-L matlab:3 --begin=now+1day",
    "fast": "-C fast --begin=now+1day",
    "swiftly": "-p swift -w s1 --begin=now+1day",
    "two": "-p main,long --begin=now+1day",
    "reserved": "--reservation=maint",
    "s2": "-w s2 -t 10",
}
RESERVATION = "ReservationName=maint nodes=s1 starttime=now+1day duration=60 users=demo flags=ignore_jobs"
ALL = frozenset({*RUNNING, *WAITING})
REHEARSE = f"""
import dataclasses, json, os, sys
from pathlib import Path
from init.pod.pod import Pod
from init.state import copies, prove, rehearse
directory = Path({BACKUPS!r})
manifest = copies.load_manifest(directory, sys.argv[1])
own = prove.read_copied_files(directory, manifest)
texts = json.loads(Path("/candidates.json").read_text())
candidates = [{{**own, "slurm.conf": text.encode()}} for text in texts]
found = rehearse.rehearse(Pod(os.environ), directory, manifest, candidates)
print(json.dumps([dataclasses.asdict(each) for each in found]))
"""


@dataclass(frozen=True)
class Disaster:
    """A change, as a pattern and what takes its place; "" appends. Which jobs a loss names, and words in it."""

    name: str
    pattern: str
    text: str
    jobs: frozenset[str]
    words: str
    # The whole line for a release that finds more.
    newer_jobs: frozenset[str] | None = None


def disaster(name: str, pattern: str, text: str, jobs: str, words: str, newer: str | None = None) -> Disaster:
    return Disaster(
        name, pattern, text, frozenset(jobs.split()), words, None if newer is None else frozenset(newer.split())
    )


EVERY = " ".join(sorted(ALL))
DISASTERS = (
    # 24.11 also ends the job that runs in main and was submitted to both.
    disaster("a partition is removed", r"^PartitionName=extra.*\n", "", "extra both", "partition extra would be gone",
             newer="extra"),
    disaster("MaxJobCount is lowered", "", "MaxJobCount=5", "", "slurmctld forgets jobs beyond it: it knows"),
    disaster("a node set is deleted", r"^NodeSet=.*\n", "", EVERY, "Invalid node names in partition swift"),
    disaster("a node set is emptied", "NodeSet=quick Feature=fast", "NodeSet=quick Feature=none", "swiftly",
             "partition swift would have no nodes"),
    disaster("a node with jobs is removed", r"^NodeName=s1.*\n|s1,(?=s2)", "", "extra swift swiftly fast reserved",
             "reservation maint would be gone"),
    disaster("dynamic nodes find no room", "MaxNodeCount=2048", "MaxNodeCount=2",
             "both", "MaxNodeCount 2048 becomes 2"),
    disaster("a node has fewer CPUs", "NodeName=s1 CPUs=2", "NodeName=s1 CPUs=1", "extra swift", ""),
    disaster("a feature is removed", "CPUs=2 RealMemory=500 Feature=fast", "CPUs=2 RealMemory=500 Feature=quick",
             "fast swiftly", "a feature that no node has"),
    disaster("a partition loses a node", "Nodes=quick", "Nodes=s2", "swiftly",
             "a node that partition swift has no more"),
    disaster("another SelectType", r"select/cons_tres\nSelectTypeParameters=CR_Core_Memory", "select/linear", EVERY,
             "only compatible with cons_tres"),
    disaster("another ClusterName", "ClusterName=minivm", "ClusterName=other", EVERY, "a cluster keeps its name"),
    disaster("another StateSaveLocation", "/var/spool/slurmctld", "/var/spool/new", EVERY,
             "the saved jobs are not found again"),
    disaster("another AuthType", "auth/munge", "auth/slurm", "both extra swift",
             "AuthType auth/munge becomes auth/slurm"),
    disaster("another PriorityType", "priority/multifactor", "priority/basic",
             "long high after licence fast swiftly two reserved s2", "another order of 9 jobs"),
    disaster("a partition is down", "long Nodes=s1,s2 State=UP", "long Nodes=s1,s2 State=DOWN",
             "long high two", "partition long would be down"),
    disaster("a partition refuses a QOS", "AllowQos=normal,high", "AllowQos=normal", "high", "lets qos normal in"),
    disaster("a shorter time limit", "MaxTime=2-0", "MaxTime=30", "long high", "above that of partition long"),
    disaster("an unknown setting that the rehearsal drops", "", "PrologFoo=/x", EVERY, "unrecognized key: PrologFoo"),
    disaster("a missing plug-in", "", "JobSubmitPlugins=nothing", EVERY,
             "this Slurm has no plug-in job_submit/nothing"),
    disaster("a missing file", "", "Include /etc/other.conf", EVERY, "includes /etc/other.conf, which is not among"),
)  # fmt: skip


class Saved:
    def __init__(self, directory: Path, controller: Pod, jobs: dict[str, str]) -> None:
        self.directory, self.controller, self.jobs = directory, controller, jobs
        self.client = docker.from_env()
        self.name = str(json.loads(controller.run("minivm", "state", "save", "--json"))["name"])
        self.images = {SAME: image_of("controller")}
        self.images[NEWER] = find_newest_beside(self.client, image_of("controller"), slurm=NEWER, variant="debian")
        assert self.images[NEWER], f"no controller of {NEWER}: make images SLURM={NEWER}"

    def container(self, release: str, files: dict[str, str], *command: str) -> tuple[int, str]:
        """Run a command as the first process of a container of its own, as `make up ARGS=--rehearse` does."""
        mounts = [Mount(BACKUPS, str(self.directory), type="bind", read_only=True)]
        for name, text in files.items():
            (self.directory.parent / name).write_text(text)
            mounts.append(Mount(f"/{name}", str(self.directory.parent / name), type="bind", read_only=True))
        container = self.client.containers.create(
            self.images[release], list(command[1:]), entrypoint=[command[0]], mounts=mounts, labels=LABELS,
            cap_drop=["ALL"], cap_add=list(CAPABILITIES),
        )  # fmt: skip
        try:
            container.start()
            code = int(container.wait(timeout=900)["StatusCode"])
            return code, container.logs(stderr=code != 0).decode()
        finally:
            container.remove(force=True, v=True)

    def rehearse(self, release: str, texts: list[str]) -> list[dict[str, Any]]:
        code, text = self.container(
            release, {"candidates.json": json.dumps(texts)}, PYTHON, "-I", "-c", REHEARSE, self.name
        )
        assert code == 0, text
        found: list[dict[str, Any]] = json.loads(text)
        return found

    def named(self, losses: list[str]) -> set[str]:
        """Return the jobs that the sentences name."""
        names = {number: name for name, number in self.jobs.items()}
        lists = [re.findall(r"\bjobs? \(?([\d_\[\]%, -]+)|jobs \(([^)]*)\)", loss) for loss in losses]
        words = " ".join(" ".join(pair) for pairs in lists for pair in pairs)
        numbers = set(re.findall(r"(?<![\d_\[-])\d+", words))
        return {names[number] for number in numbers & names.keys()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Saved]:
    backups = tmp_path_factory.mktemp("rehearsal") / "backups"
    backups.mkdir(mode=0o700)
    with world(tmp_path_factory.mktemp("rehearsal"), "rehearsal") as made:
        made.configure({"slurm.conf": CONF})
        mounts = [Mount(BACKUPS, str(backups), type="bind")]
        controller = made.pod("controller", "slurm-controller", extra_mounts=mounts)
        workers = [made.pod("worker", "w1"), made.pod("worker", "s1", env={"MINIVM_NODE_MODE": "static"})]
        for pod in (controller, *workers):
            pod.add_user()
        for pod in (controller, *workers):
            pod.wait_ready()
        # The pod is ready before what it can do without.
        until(lambda: controller.service("slurmdbd")["ready"], "accounting too", seen=controller.account)
        for line in ACCOUNTS:
            controller.run("sacctmgr", "--immediate", *line.split())
        batch = ("sbatch", "--parsable", "--chdir=/tmp", "--output=/dev/null", "--mem=10")
        jobs: dict[str, str] = {}

        def submit(wanted: dict[str, str]) -> None:
            for name, options in wanted.items():
                words = options.format(**jobs).split()
                jobs[name] = controller.run(*batch, *words, "--wrap", "sleep 7777", user="demo").strip()

        def running() -> set[str]:
            return set(controller.run("squeue", "--noheader", "--states=R", "--format=%i").split())

        submit(RUNNING)
        until(lambda: running() == set(jobs.values()), "the jobs run", seen=lambda: controller.run("squeue"))
        controller.run("scontrol", "create", "reservation", *RESERVATION.split())
        submit(WAITING)
        yield Saved(backups, controller, jobs)


@pytest.mark.parametrize("release", [SAME, NEWER])
def test_each_disaster_is_named_with_its_jobs(saved: Saved, release: str) -> None:
    changed = []
    for each in DISASTERS:
        text = re.sub(each.pattern, each.text, CONF, flags=re.MULTILINE) if each.pattern else f"{CONF}{each.text}\n"
        assert text != CONF, each.name
        changed.append(text)
    wrong = {}
    for each, found in zip(DISASTERS, saved.rehearse(release, changed), strict=True):
        losses = found["losses"]
        named = saved.named(losses)
        expected = each.newer_jobs if release == NEWER and each.newer_jobs is not None else each.jobs
        is_listed = named == expected if expected and expected != ALL else bool(losses)
        if not is_listed or each.words not in " ".join(losses):
            wrong[each.name] = (sorted(named), losses)
    assert not wrong, json.dumps(wrong, indent=1)


@pytest.mark.parametrize("release", [SAME, NEWER])
def test_no_harmless_change_is_an_alarm(saved: Saved, release: str) -> None:
    changes = [harmless(seed, CONF) for seed in range(FROM, FROM + COUNT)]
    alarms = {
        f"{seed}: {what}": found["losses"]
        for seed, ((what, _), found) in enumerate(
            zip(changes, saved.rehearse(release, [text for _, text in changes]), strict=True), FROM
        )
        if found["losses"] or found["same"] != len(saved.jobs)
    }
    assert not alarms, json.dumps(alarms, indent=1)


def test_the_command_says_it_by_its_exit_code_and_touches_nothing(saved: Saved) -> None:
    jobs = saved.controller.run("squeue", "--noheader", "--format=%i|%T")
    rehearse = ("/usr/bin/minivm", "state", "rehearse", saved.name)
    code, text = saved.container(NEWER, {}, *rehearse)
    assert code == 0 and f"{len(saved.jobs)} jobs are the same; nothing would be lost" in text, text
    without = re.sub(r"^PartitionName=extra.*\n", "", CONF, flags=re.MULTILINE)
    piped = f'printf "%s" "$0" | minivm state rehearse {saved.name} --config -'
    code, text = saved.controller.code("sh", "-c", piped, without)
    assert code == 1 and f"job {saved.jobs['extra']}, running now, would be gone" in text, text
    assert saved.controller.run("squeue", "--noheader", "--format=%i|%T") == jobs
    assert saved.controller.run("find", "/var/tmp", "-name", "minivm-proof-*") == ""
