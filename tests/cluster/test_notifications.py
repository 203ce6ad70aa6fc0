"""Mail and webhooks about real jobs: slurmctld calls the MailProg, and a real relay and receiver take the messages."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.values import merge
from images.engine.docker import DockerEngine
from tests.cluster.conftest import NAME
from tests.cluster.researcher import Researcher, World
from tests.cluster.small import small_cluster
from tests.pages import blocks
from tests.reader import ROOT, checkout, follow_all, programs
from tests.support.mail_relay import PASSWORD, USER, Hook, Inbox, certificate, context, receiver, relay
from tests.waiting import until

pytestmark = [pytest.mark.docker, pytest.mark.cluster]

PAGE = ROOT / "docs/how-to/get-told.md"
CONTROLLER = "slurm-controller-0"
QUIET = ("--mem=50M", "-o", "/dev/null")


@dataclass
class Told:
    world: World
    inbox: Inbox
    hook: type[Hook]
    place: str

    def wait_for(self, subject: str) -> str:
        """Wait for the mail and return its text."""
        until(lambda: subject in self.inbox.subjects(), f"a mail {subject!r}", seen=self.inbox.subjects)
        return self.inbox.text(subject)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Told]:
    engine = DockerEngine().client
    # An address of this machine that pods reach. An engine that has just made its bridge does not name the gateway.
    config = engine.networks.get("bridge").attrs["IPAM"]["Config"][0]
    host = config.get("Gateway") or str(ip_network(config["Subnet"])[1])
    key, cert = certificate(tmp_path_factory.mktemp("keys"), f"IP:{host}")
    with relay(host=host, tls=context(key, cert)) as inbox, receiver(host=host) as (place, hook):
        # The page's values, with this test's relay, receiver and password.
        here = {
            "mail": {
                "relay": f"starttls://{host}:{inbox.port}", "user": USER, "password": PASSWORD,
                "domains": ["example.net"],
            },
            "webhook": {"url": f"http://{place}/T0K3N", "ofUsers": [f"http://{place}/own/"]},
            "ca": cert.read_text(),
        }  # fmt: skip
        (written,) = [yaml.safe_load(block.text) for block in blocks(PAGE) if block.kind == "values"]
        root = tmp_path_factory.mktemp("told")
        values = merge(written, {"notifications": here})
        with small_cluster(engine, f"{NAME}-told", root, values) as cluster:
            cluster.up(timeout=240)
            yield Told(World(cluster), inbox, hook, place)


@pytest.fixture(scope="module")
def slow(told: Told) -> str:
    """Return a job that ends by its time limit while the tests run: slurmctld looks each 30 s."""
    alice = Researcher(told.world, "alice")
    job = alice.submit("--mail-type=TIME_LIMIT", *QUIET, script="sleep 300")
    alice.wait_for(job, "RUNNING")
    told.world.slurm("scontrol", "update", f"jobid={job}", "endtime=now+2")
    return job


@pytest.fixture
def alice(told: Told) -> Researcher:
    return Researcher(told.world, "alice")


def test_each_event_is_told_with_its_cause(told: Told, alice: Researcher, slow: str) -> None:
    name = "<!everyone> @channel\r\nBcc: eve@x.org"
    failed = alice.submit("--mail-type=ALL", "-J", f"'{name}'", *QUIET, script="exit 3")
    again = alice.submit(
        "--mail-type=REQUEUE", "--requeue", "-J", "again", *QUIET, script="touch again-runs; exec sleep 300"
    )
    # Slurm may be unable to kill a job that it requeues while its first processes start, and drains the node.
    until(lambda: alice.try_("test -e again-runs").returncode == 0, "the script runs")
    told.world.slurm("scontrol", "requeue", again)
    tasks = alice.submit("--mail-type=END,ARRAY_TASKS", "-J", "tasks", "--array=1-2", *QUIET, script="true")
    array = alice.submit(
        "--mail-type=END", "-J", "all", "--array=1-2", "--mail-user=bob,ops@example.net", *QUIET,
        script="exit $SLURM_ARRAY_TASK_ID",
    )  # fmt: skip

    shown = "<!everyone> @channel Bcc: eve@x.org"
    text = told.wait_for(f"Job {failed} ({shown}) on minivm: Failed")
    assert "exit code 3" in text and "Cause: your code" in text and f"More: minivm job {failed}" in text
    told.wait_for(f"Job {failed} ({shown}) on minivm: Began")
    assert "waits in the queue again" in told.wait_for(f"Job {again} (again) on minivm: Requeued")
    for task in (1, 2):
        assert "It ended well" in told.wait_for(f"Job {tasks}_{task} (tasks) on minivm: Ended")
    assert "Exit codes of its tasks: 1 to 2" in told.wait_for(f"Array {array} (all) on minivm: Ended")

    to = {str(mail["Subject"]): to for to, mail in tuple(told.inbox.mails)}  # more may come meanwhile
    assert to.pop(f"Array {array} (all) on minivm: Ended") == ["bob@example.org", "ops@example.net"]
    assert {tuple(each) for each in to.values()} == {("alice@example.org",)}
    until(lambda: len(told.hook.got) == len(told.inbox.mails), "the webhook hears the same", seen=lambda: told.hook.got)
    said = json.dumps([body for _, body, _ in told.hook.got])
    assert "&lt;!everyone&gt;" in said and "@channel" not in said and "<" not in said


def test_the_page_s_commands_send_a_test(told: Told, tmp_path: Path) -> None:
    status = partial(told.world.run, CONTROLLER, "minivm", "notify", "status")

    def is_idle() -> bool:
        return all(line.endswith(", 0 messages wait") or line.startswith("new: 0;") for line in status().splitlines())

    until(is_idle, "each message of before is sent", seen=status)
    env = os.environ | {"MINIVM_NAME": told.world.cluster.options.name}
    env["PATH"] = f"{programs(tmp_path / 'bin')}:{env['PATH']}"
    said = "".join(follow_all(blocks(PAGE), env, checkout(tmp_path / "minivm")).values())
    assert "0 messages wait" in said and "alice@example.org: 250" in said and "HTTP 200 OK" in said, said
    told.wait_for("Test of notifications on minivm")


def test_a_recipient_that_is_no_address_is_refused_at_once(alice: Researcher) -> None:
    for bad in (
        "-oQ/etc/passwd",
        "|sh",
        "a b@x.org",
        "a@x..org",
        "a" * 1000,
        "ä",
        "a@elsewhere.net",
        "a%b@example.org",
    ):
        done = alice.try_("sbatch", "--mail-type=END", f"'--mail-user={bad}'", "--wrap", "true")
        assert done.returncode and "minivm: --mail-user: expected" in done.stderr, (bad, done)


def test_an_operator_sends_a_test_and_a_relay_that_is_away_is_told_but_loses_nothing(
    told: Told, alice: Researcher
) -> None:
    run = told.world.run
    said = run(CONTROLLER, "minivm", "notify", "test", "carol")
    assert "has taken it for carol@example.org: 250 queued as 42" in said and "HTTP 200 OK" in said
    # The page's own test went to alice.
    until(lambda: ["carol@example.org"] in [to for to, _ in told.inbox.mails], "the test has come to carol")
    assert told.world.cluster.exec(CONTROLLER, ["minivm", "notify", "test", "-oQ"])[0] != 0
    assert alice.try_("minivm", "notify").returncode == 1

    told.inbox.is_away = True
    alice.submit("--mail-type=FAIL", "-J", "away", *QUIET, script="false")
    told.world.wait_for_reason(CONTROLLER, "SMTP 421 (")
    told.world.wait_ready(CONTROLLER)
    status = run(CONTROLLER, "minivm", "status") + run(CONTROLLER, "minivm", "status", "--json")
    logs = run(CONTROLLER, "minivm", "logs", "notify") + run(CONTROLLER, "ps", "auxww")
    assert "SMTP 421" in status and "421 away" not in status and "421 away" in logs
    assert PASSWORD not in status + logs and "T0K3N" not in status + logs
    metrics = ("cat", "/run/minivm/metrics.d/notify.prom")
    until(lambda: 'minivm_notify_up{channel="mail"} 0' in run(CONTROLLER, *metrics), "the metric tells of it")
    told.inbox.is_away = False
    until(
        lambda: [text for text in told.inbox.subjects() if "(away)" in text], "the mail comes", seen=told.inbox.subjects
    )


def test_a_user_s_own_file_chooses_events_and_a_webhook_that_no_other_user_sees(told: Told) -> None:
    bob = Researcher(told.world, "bob")

    def write(text: str) -> None:
        done = bob.try_(f"mkdir -p .config/minivm && cat > .config/minivm/notify.toml <<'END'\n{text}\nEND")
        assert not done.returncode, done

    write(f'events = ["FAIL"]\nwebhook = {{url = "http://{told.place}/T0K3N"}}')
    wrong = bob.try_("minivm", "notify", "check")
    assert wrong.returncode == 1 and f"it begins with http://{told.place}/own/" in wrong.stderr, wrong
    job = bob.try_("sbatch", *QUIET, "--hold", "--wrap", "true")
    assert not job.returncode and "this cluster calls no such address" in job.stderr, job

    write(f'events = ["FAIL"]\nwebhook = {{url = "http://{told.place}/own/B0B"}}')
    assert "events: FAIL" in bob.try_("minivm", "notify", "check").stdout
    failed = bob.submit("-J", "own", *QUIET, script="exit 4")

    def own() -> list[dict[str, Any]]:
        return [body for path, body, _ in tuple(told.hook.got) if path == "/own/B0B"]

    until(own, "bob's webhook hears of the job", seen=lambda: told.hook.got)
    assert "exit code 4" in told.wait_for(f"Job {failed} (own) on minivm: Failed")
    held = bob.submit("--hold", "-J", "held", *QUIET, script="true")
    shown = told.world.slurm("scontrol", "show", "job", held)
    assert "B0B" not in shown and "MailType=FAIL" in shown and "minivm-notify" not in shown
    assert "B0B" not in told.world.run(CONTROLLER, "minivm", "logs", "notify")
    assert [(body["user"], body["job"]) for body in own()] == [("bob", failed)]

    done = bob.try_("rm .config/minivm/notify.toml && sbatch --hold --wrap true")
    assert not done.returncode and not done.stderr, done
    assert "bob" not in told.world.run(CONTROLLER, "ls", "/var/lib/minivm/notify/users")


def test_a_time_limit_is_told_with_what_to_do(told: Told, slow: str) -> None:
    late = told.wait_for(f"Job {slow} (sbatch) on minivm: Reached time limit")
    assert "It reached its time limit" in late and "Cause: a limit" in late
