"""`minivm job` on real jobs: what each user sees, and what a failed job leaves in its output.

tests/cluster/test_forty_ways.py makes each way to wait and to end happen.
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from images.engine.docker import DockerEngine
from tests.cluster.conftest import NAME
from tests.cluster.researcher import Researcher, World
from tests.cluster.small import small_cluster
from tests.waiting import until

pytestmark = [pytest.mark.docker, pytest.mark.cluster]

FIRST, SECOND = "slurm-worker-0", "slurm-worker-1"


def explained(person: Researcher, job: str) -> dict[str, Any]:
    page: dict[str, Any] = json.loads(person(f"minivm job {job} --json"))
    return page


def says(person: Researcher, job: str, *words: str, cause: str) -> dict[str, Any]:
    """Wait until the page of the job says the words: slurmctld finds some reasons late, slurmdbd is late too."""

    def said() -> dict[str, Any]:
        page = explained(person, job)
        text = page["headline"] + "\n".join(fact["text"] for fact in page["evidence"])
        return page if page["cause"] == cause and all(part in text for part in words) else {}

    return until(said, f"the page of job {job} says {words}, {cause}", seen=lambda: person(f"minivm job {job}"))


@dataclass(frozen=True)
class Late:
    """A job with a time limit of one minute, and how many failed jobs the nodes had counted before it."""

    job: str
    code: int
    limit: int


@pytest.fixture(scope="module", autouse=True)
def late(world: World) -> Late:
    """Begin with what takes longest: the other tests run meanwhile."""
    world.wait_ready()
    alice = Researcher(world, "alice")
    code, limit = count_failed(alice, "FAILED", "your code"), count_failed(alice, "TIMEOUT", "a limit")
    alice("mkdir -p notes")
    job = alice.submit("--time=1", "--mem=100M", "-o", "notes/late", script="sleep 600")
    return Late(job, code, limit)


def test_another_user_sees_what_squeue_shows(alice: Researcher) -> None:
    job = alice.submit("-H", "--mem=100M", "-J", "secret", "-o", "/home/alice/secret-%j", script="true")
    bob = Researcher(alice.world, "bob")
    shown = bob(f"minivm job {job}")
    assert "job of alice" in shown and "JobHeldUser" in shown and "secret" not in shown
    assert "secret" in alice.world.run("slurm-login-0", "minivm", "job", job)  # root
    done = bob.try_("minivm job secret")
    assert done.returncode == 1 and "neither slurmctld nor accounting knows it" in done.stderr
    bad = alice.submit("-H", "--mem=100M", "-J", "'\x1b[31mred\x1b]0;x\x07'", script="true")
    text = alice(f"minivm job {bad}") + alice("minivm job")
    assert "red" in text and all(letter.isprintable() or letter == "\n" for letter in text)
    huge = alice.submit("-H", "--mem=100M", script="true")
    alice.world.slurm("scontrol", "update", f"jobid={huge}", "minmemorynode=90000000")
    alice.world.slurm("scontrol", "release", huge)
    page = says(alice, huge, "can ever run it", "the job needs 85.83 TiB", cause="the request")
    assert any("--mem=" in text for text in page["advice"]), page

    def listed() -> set[str]:
        return {line.split()[0] for line in alice("minivm job").splitlines() if line.strip()}

    until(lambda: {job, bad, huge} <= listed(), "each has its line", seen=listed)
    assert explained(alice, "secret")["job"]["shown"] == job, "the name is as good as the number"
    assert "Cause: a person" in alice(f"minivm job {job}")
    alice(f"scancel {job} {bad} {huge}")
    cancelled = "Its own user, alice, cancelled it before it started"
    assert cancelled in says(alice, job, cancelled, cause="a person")["headline"]
    done = alice.try_("minivm job 4000000")
    assert done.returncode == 1 and "cannot explain job 4000000" in done.stderr


ASK = """python3 - {ids} <<'END'
import json, socket, sys
with socket.socket(socket.AF_UNIX) as service:
    service.connect("/run/minivm/jobs.sock")
    asked = {{"ask": "jobs", "ids": sys.argv[1:]}} if sys.argv[1:] else {{"ask": "mine"}}
    service.sendall(json.dumps(asked).encode() + b"\\n")
    print(service.makefile().readline())
END"""


def test_users_of_a_login_share_what_slurmctld_says_and_get_only_their_own_jobs(alice: Researcher) -> None:
    bob = Researcher(alice.world, "bob")
    secret = alice.submit("-H", "--mem=100M", "-J", "secret", script="true")
    own = bob.submit("-H", "--mem=100M", "-J", "plain", script="true")

    def asked() -> int:
        """Return how often slurmctld was asked by alice; root asks for all users, more often the longer it takes."""
        lines = alice.world.slurm("sdiag", "-t").partition("by user")[2].splitlines()
        return sum(int(line.partition("count:")[2].split()[0]) for line in lines if line.split()[:1] == ["alice"])

    def shared() -> bool:
        """Return whether thirty commands made fewer requests; each asks slurmctld itself after 5 s in vain."""
        before = asked()
        assert before, "she has submitted a job"
        assert alice(f"for i in $(seq 30); do minivm job {secret} & done; wait").count("It is held by its user") == 30
        return asked() - before < 30

    until(shared, "thirty people, fewer requests", seen=asked)
    assert '"secret"' in alice(ASK.format(ids=secret)) and '"plain"' in bob(ASK.format(ids=own))
    mine = bob(ASK.format(ids=""))
    assert '"plain"' in mine and '"secret"' not in mine
    for ids in (secret, f"{own} {secret}"):
        assert json.loads(bob(ASK.format(ids=ids))) == {"direct": True}
    alice(f"scancel {secret}")
    bob(f"scancel {own}")


SCRAPE = (
    "import sys, urllib.request as u; print(u.urlopen('http://127.0.0.1:8650/metrics', timeout=20).read().decode())"
)


def count_failed(person: Researcher, state: str, cause: str) -> int:
    """Return how many jobs the workers' /metrics count with this state and cause."""
    series = re.escape(f'minivm_jobs_failed_total{{state="{state}",cause="{cause}"}}')
    total = 0
    for worker in (FIRST, SECOND):
        page = person.world.run(worker, "/opt/minivm/bin/python3", "-c", SCRAPE)
        match = re.search(rf"^{series} (\d+)", page, re.MULTILINE)
        assert match, f"{worker} has the series before the first failure:\n{page}"
        total += int(match[1])
    return total


def test_a_page_has_the_black_boxes_of_the_job_s_nodes_by_slurm_s_own_credentials(alice: Researcher) -> None:
    bob = Researcher(alice.world, "bob")
    assert "auth/slurm" in alice.world.slurm("scontrol", "show", "config")
    fill = "python3 -c 'x = bytearray(400 << 20); x[::4096] = b\"x\" * len(x[::4096])'"
    job = alice.submit("--mem=60M", "-w", FIRST, "-o", "/dev/null", script=fill)
    killed = f"on {FIRST} while it ran: the kernel ended"
    says(alice, job, killed, cause="the request")
    assert killed in alice.world.run("slurm-login-0", "minivm", "job", job), "root sees it"
    assert "while it ran" not in bob(f"minivm job {job}")
    assert killed in alice(f"srun -Q --mem=100M -w {SECOND} minivm job {job}"), "a worker asks too"


def test_the_first_task_that_failed_is_named_with_its_node(alice: Researcher) -> None:
    def failed(end: str, way: str) -> None:
        # The other task, which may begin later, is ended because of this one. Slurm decides which node has which.
        alice("rm -f rank-0 rank-1")
        script = (
            "echo $SLURMD_NODENAME > rank-$SLURM_PROCID; "
            f"[ $SLURM_PROCID = 1 ] && {{ until [ -s rank-0 ]; do sleep 0.2; done; {way}; }}; sleep 600"
        )
        job = alice.submit("-N2", "--mem=100M", "-o", "/dev/null", script=f"srun -K -n2 -N2 bash -c '{script}'")
        alice.wait_for(job, "FAILED")
        first, second = alice("cat rank-1 rank-0").split()
        assert {first, second} == {FIRST, SECOND}
        page = says(alice, job, f"followed task 0 on {second}", cause="your code")
        assert page["headline"].startswith(f"First failed task 1 on {first}, in step {job}.0: {end}. "), page

    failed("exit code 7", "exit 7")
    failed("killed by SIGSEGV", "kill -SEGV $$")
    alice("rm rank-0 rank-1")


def test_a_failed_batch_job_says_why_at_the_end_of_its_output(alice: Researcher, late: Late) -> None:
    def noted(path: str, job: str, *words: str) -> str:
        last = f"minivm: evidence and what to do: minivm job {job}\n"

        def output() -> str:
            return alice(f"cat {path} 2>/dev/null || true")

        until(lambda: output().endswith(last), f"{path} ends with the note", seen=output)
        text = output()
        assert text.count("minivm: ") == 2, text
        assert all(part in text.splitlines()[-2] for part in (f"minivm: job {job} failed: ", *words)), text
        return text

    alice("echo mine > notes/target && ln -s target notes/link")
    plain = alice.submit("--mem=100M", "-o", "notes/%x", "-J", "$'z[1]\\e[31m'", script="printf unfinished; exit 3")
    array = alice.submit("--mem=100M", "--array=1-2", "-o", "notes/%A-%a", script="exit 4")
    apart = alice.submit("--mem=100M", "-o", "notes/out", "-e", "notes/err", script="echo fine; echo bad >&2; exit 5")
    linked = alice.submit("--mem=100M", "-o", "notes/link", "--open-mode=append", script="kill -SEGV $$")
    well = alice.submit("--mem=100M", "-o", "notes/well", script="echo fine")
    away = alice.submit("--mem=100M", "-o", "notes/away", script="rm notes/away; exit 6")
    both = alice("sbatch --parsable --mem=100M -n1 -o notes/both : --mem=100M -n1 --wrap 'exit 7'").strip()
    text = noted("notes/z*", plain, "Its own program ended with exit code 3. Cause: your code, or one of its steps.")
    assert text.startswith("unfinished\nminivm: job")
    for task in (1, 2):
        noted(f"notes/{array}-{task}", f"{array}_{task}", "exit code 4")
    noted("notes/err", apart, "exit code 5")
    noted("notes/target", linked, "SIGSEGV")
    assert alice("cat notes/target").startswith("mine\n")
    noted("notes/both", f"{both}+0", "exit code 7")
    noted("notes/late", late.job, "It reached its time limit of 1 min")
    alice.wait_for(well, "COMPLETED")
    alice.wait_for(away, "FAILED")
    assert alice("cat notes/out notes/well") == "fine\nfine\n"
    assert "away" not in alice("ls notes")
    alice("rm -r notes")
    # Seven jobs ended by their own code, one at its time limit; jobs of other tests may be counted late.
    until(lambda: count_failed(alice, "FAILED", "your code") >= late.code + 7, "the nodes count the causes")
    until(lambda: count_failed(alice, "TIMEOUT", "a limit") >= late.limit + 1, "the nodes count the time limit")


def test_jobs_of_three_users_that_fail_on_one_node_alone_are_its_problem_and_drain_nothing(tmp_path: Path) -> None:
    """The same jobs end well on the other node, as accounting knows; one user's failures are nobody else's."""
    script = "#!/bin/bash\n[ ! -e /opt/broken ] || exit 1\n"
    values = {"demo": {"users": {"carol": "ssh-ed25519 AAAA"}}}
    with small_cluster(DockerEngine().client, f"{NAME}-three", tmp_path, values, workers=2) as cluster:
        cluster.up(timeout=240)
        slurm = World(cluster)
        slurm.run(FIRST, "touch", "/opt/broken")

        def run_jobs(node: str, user: str, number: int) -> None:
            line = f"sbatch -Q --parsable --mem=20M -J train -o /dev/null -w {node} <<< {shlex.quote(script)}"
            loop = f"cd /tmp; for i in $(seq {number}); do {line}; done"
            slurm.run("slurm-login-0", "runuser", "-u", user, "--", "bash", "-ec", loop)

        def waiting() -> str:
            return slurm.slurm("squeue", "-h", "-o", "%i %u %T %N").strip()

        def says(node: str) -> dict[str, Any]:
            _, text = cluster.exec(node, ["minivm", "health", "failing_jobs", "--run", "--json"])
            (verdict,) = json.loads(text)
            return dict(verdict)

        users = ("alice", "bob", "carol")
        for user in users:
            run_jobs(SECOND, user, 4)
        until(lambda: not waiting(), "the good jobs have ended", within=300, seen=waiting)
        for user in users[:2]:
            run_jobs(FIRST, user, 2)
        until(lambda: "of 2 users" in says(FIRST)["reason"], "two users prove nothing", seen=lambda: says(FIRST))
        assert says(FIRST)["result"] == "ok"
        run_jobs(FIRST, "carol", 2)
        found = until(
            lambda: says(FIRST)["result"] == "problem" and says(FIRST), "the node is named", seen=lambda: says(FIRST)
        )
        assert "jobs of 3 users failed here" in found["reason"] and "12 like them" in found["reason"], found
        assert says(SECOND)["result"] == "ok"
        slurm.wait_idle()
