"""The researcher's session: from a key in the directory to a job's output in the shared home."""

from __future__ import annotations

import functools
import json
import os
import re
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cluster.names import free_port
from tests.cluster.conftest import IMAGES
from tests.cluster.researcher import Researcher, World
from tests.slurm import version_of
from tests.waiting import PATIENCE, until

pytestmark = [pytest.mark.docker, pytest.mark.cluster]


def test_a_first_login_makes_the_home(alice: Researcher) -> None:
    identity = alice("id; pwd; stat -c '%U %a' .; ls -A")
    assert "uid=20001(alice) gid=20000(researchers)" in identity
    assert "/home/alice\nalice 700" in identity
    assert ".bashrc" in identity


def test_a_job_on_two_nodes_writes_into_the_shared_home_and_is_accounted(alice: Researcher) -> None:
    job = alice.submit("-N2", "-o", "out-%j.txt", script="srun bash -c 'hostname; id -un'")
    alice.wait_for(job, "COMPLETED")
    assert sorted(alice(f"cat out-{job}.txt").split()) == ["alice", "alice", "slurm-worker-0", "slurm-worker-1"]

    def accounted() -> str:
        return alice(f"sacct -n -X -P -j {job} -o jobid,state,nnodes,user")

    until(lambda: accounted().strip() == f"{job}|COMPLETED|2|alice", "it is accounted", seen=accounted)


def test_slurms_commands_answer_at_once(alice: Researcher) -> None:
    assert "slurm-worker-[0-1]" in alice("sinfo -h -o %N")
    until(lambda: alice("squeue --me -h") == "", "no job is left of the tests before")
    assert sorted(alice("srun -N2 hostname").split()) == ["slurm-worker-0", "slurm-worker-1"]
    assert alice("salloc -n1 -Q srun -n1 id -un").split() == ["alice"]


def test_hosts_are_found_by_the_names_that_slurm_gives(alice: Researcher) -> None:
    """A job's first host is where its tasks meet, and slurmctld looks for the host of an srun."""
    names = "slurm-worker-0 slurm-worker-1 slurm-login-0"
    found = alice(f"srun -N2 getent hosts {names}").splitlines()
    assert len(found) == 6 and len({line.split()[0] for line in found}) == 3
    assert alice.world.run("slurm-controller-0", "getent", "hosts", "slurm-login-0"), "the controller finds the login"


def test_a_shell_on_a_node(alice: Researcher) -> None:
    session = alice("srun --pty bash -c 'tty; hostname; echo $SLURM_JOB_ID'", options=("-tt",))
    assert "/dev/pts/" in session
    assert "slurm-worker-" in session


def test_a_person_at_a_terminal_is_told_the_state_and_others_are_not(alice: Researcher) -> None:
    def message() -> str:
        return alice.world.run("slurm-login-0", "cat", "/run/motd.d/50-minivm")

    until(lambda: "2/2" in message(), "the message of the day counts both nodes", seen=message)
    job = alice.submit("-J", "seen-at-login", script="sleep 3000")
    alice.wait_for(job, "RUNNING")
    shown = alice(options=("-tt",), stdin="exit\n")
    assert "A demo cluster on one machine." in shown
    assert "PARTITION" in shown and "2/2" in shown
    assert "Your jobs (minivm job ID says why):" in shown and "seen-at-login" in shown
    # A copy or a command must get its own output and nothing else.
    assert alice("echo only this") == "only this\n"
    alice(f"scancel {job}")
    alice.wait_for(job, "CANCELLED")


def test_files_are_copied_by_scp_and_sftp(alice: Researcher, tmp_path: Path) -> None:
    here, back = tmp_path / "data", tmp_path / "back"
    here.write_bytes(bytes(range(256)) * 4096)
    _, *options, target = alice.command()
    options = [option if option != "-p" else "-P" for option in options]
    for program in (["scp"], ["scp", "-O"]):
        subprocess.run([*program, "-q", *options, str(here), f"{target}:data"], check=True, timeout=PATIENCE)
        subprocess.run([*program, "-q", *options, f"{target}:data", str(back)], check=True, timeout=PATIENCE)
        assert back.read_bytes() == here.read_bytes()
        back.unlink()
    subprocess.run(["sftp", "-q", *options, "-b", "-", target], input=f"get data {back}\n", text=True, check=True)
    assert back.read_bytes() == here.read_bytes()


def test_an_agent_is_forwarded_and_rsync_uses_it(alice: Researcher) -> None:
    """Connect from the login pod to itself by its service name, with a key that only the agent has."""
    key = str(alice.world.cluster.keys().users["alice"])
    script = (
        "mkdir -p from && date > from/file && rm -rf to &&"
        " rsync -a -e 'ssh -o BatchMode=yes -o StrictHostKeyChecking=yes' from/ slurm-login:to/ &&"
        " cmp from/file to/file"
    )
    line = alice.command(script, options=("-A",))
    start = ["ssh-agent", "sh", "-c", 'ssh-add -q "$0" && exec "$@"', key, *line]
    done = subprocess.run(start, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr


def test_ssh_to_a_node_needs_a_job_there(alice: Researcher) -> None:
    node = "slurm-worker-0.slurm-worker"
    hop = f"ssh -o BatchMode=yes -o StrictHostKeyChecking=yes {node} hostname"
    key = str(alice.world.cluster.keys().users["alice"])

    def through_the_login_pod() -> subprocess.CompletedProcess[str]:
        start = ["ssh-agent", "sh", "-c", 'ssh-add -q "$0" && exec "$@"', key, *alice.command(hop, options=("-A",))]
        return subprocess.run(start, capture_output=True, text=True, timeout=PATIENCE)

    refused = through_the_login_pod()
    assert refused.returncode == 255, refused.stdout
    assert "Access denied" in refused.stderr
    job = alice.submit("-w", "slurm-worker-0", "-o", "/dev/null", script="sleep 3000")
    alice.wait_for(job, "RUNNING")
    entered = through_the_login_pod()
    assert entered.stdout == "slurm-worker-0\n", entered.stderr
    alice(f"scancel {job}")
    alice.wait_for(job, "CANCELLED")


def test_root_on_a_worker_has_no_key_that_a_login_pod_answers_with(healthy: World) -> None:
    """A login key would let its holder pose as a login pod.

    The test tries every private key anywhere in the pod; the worker's own is among them, so the search finds keys.
    """
    worker = "slurm-worker-0"
    answered = healthy.run(worker, "ssh-keyscan", "-T", "60", "slurm-login", f"{worker}.slurm-worker")
    keys: dict[str, set[str]] = {}
    for line in answered.splitlines():
        if not line.startswith("#"):
            host, key = line.split(maxsplit=1)
            keys.setdefault(host.partition(".")[0], set()).add(key)
    search = """
    grep -rlsI --exclude-dir=proc --exclude-dir=sys -e 'BEGIN.*PRIVATE KEY' / | while read -r file; do
        cat "$file" > /tmp/found && ssh-keygen -y -P '' -f /tmp/found || :
    done
    rm -f /tmp/found
    """
    found = healthy.run(worker, "sh", "-c", f"umask 077; {search}")
    held = {" ".join(line.split()[:2]) for line in found.splitlines()}
    assert keys[worker] and keys[worker] <= held
    assert keys["slurm-login"] and not keys["slurm-login"] & held


def test_a_job_reaches_the_login_pod_without_a_question(healthy: World) -> None:
    """The pod's key is known, as `git clone ssh://` needs; only the user's missing key is refused."""
    ssh = "ssh -o BatchMode=yes -o StrictHostKeyChecking=yes nobody@slurm-login true"
    code, said = healthy.cluster.exec("slurm-worker-0", ["sh", "-c", ssh])
    assert code == 255 and "Permission denied" in said, said


def test_ports_and_sockets_are_forwarded_as_remote_editors_need(alice: Researcher, tmp_path: Path) -> None:
    """A server of the user's own on a socket, as an editor starts one, a port of another pod, and a SOCKS proxy."""
    port, proxy, own = free_port(23400), free_port(23500), tmp_path / "own"
    serve = (
        "import socket; s = socket.socket(socket.AF_UNIX); s.bind('own'); s.listen(); s.accept()[0].sendall(b'hello')"
    )
    forward = ("-L", f"{own}:/home/alice/own", "-L", f"127.0.0.1:{port}:slurm-controller:8650", "-D", str(proxy))
    line = alice.command(f'rm -f own; exec python3 -c "{serve}"', options=("-o", "ExitOnForwardFailure=yes", *forward))
    with subprocess.Popen(line) as tunnel:
        try:

            def hello() -> bytes:
                with socket.socket(socket.AF_UNIX) as client:
                    try:
                        client.connect(str(own))
                        return client.recv(10)
                    except OSError:
                        return b""

            def answer(*options: str) -> str:
                # The proxy looks the pod's name up, not this machine.
                done = subprocess.run(["curl", "-s", "-m", "5", *options], capture_output=True, text=True)
                return done.stdout

            alive = f"http://127.0.0.1:{port}/livez"
            until(lambda: answer(alive) == "ok\n", "the controller answers through the tunnel")
            through = ("--socks5-hostname", f"127.0.0.1:{proxy}", "http://slurm-controller:8650/livez")
            until(lambda: answer(*through) == "ok\n", "the controller answers through the proxy")
            until(lambda: hello() == b"hello", "the server answers through the socket")
        finally:
            tunnel.terminate()


def test_work_in_tmux_outlives_its_connection(alice: Researcher) -> None:
    alice("tmux new-session -d -s work 'sleep 300'")
    assert "work: 1 windows" in alice("tmux list-sessions")
    alice("tmux kill-server")


def test_tab_completes_slurms_commands_as_they_are_typed(alice: Researcher) -> None:
    typed = "scontrol pin\t\nsba\t--versi\t\nexit\n"
    shown = alice(options=("-tt",), stdin=typed)
    assert "Slurmctld(primary)" in shown and "is UP" in shown
    # Debian's has a name of its own.
    version = re.escape(version_of(f"{IMAGES}/login:latest"))
    assert re.search(rf"^slurm(-wlm)? {version}\s*$", shown, re.MULTILINE), shown


def test_a_step_within_a_step_shares_what_that_has(alice: Researcher) -> None:
    """It would wait for its own parent for ever."""
    assert alice("srun -n1 srun -n1 hostname").strip() in ("slurm-worker-0", "slurm-worker-1")
    assert alice("salloc -Q -n1 srun -n1 srun --exact -n1 echo within") == "within\n"


def is_deleted(world: World, kind: str, name: str) -> bool:
    return world.cluster.exec("slurm-controller-0", ["sacctmgr", "-i", "delete", kind, name])[0] == 0


def test_an_account_and_a_qos_that_are_not_there_are_refused_or_told(alice: Researcher) -> None:
    told = alice.try_("sbatch --hold --account=fysics --wrap true")
    assert told.returncode == 0 and "this cluster has no such account, nor any other" in told.stderr
    for name in ("physics", "chem"):
        alice.world.slurm("sacctmgr", "-i", "add", "account", name)
    try:
        for command in ("sbatch --wrap true", "salloc -Q true", "srun true"):
            program, rest = command.split(maxsplit=1)
            refused = alice.try_(f"{program} --account=fysics {rest}")
            assert refused.returncode != 0 and "no such account (it has chem, physics, root)" in refused.stderr
        assert alice("sbatch --hold --parsable -A Physics --qos=normal --wrap true").strip().isdigit()
        alice.world.slurm("sacctmgr", "-i", "add", "user", "alice", "account=chem")
        refused = alice.try_("sbatch --account=fysics --wrap true")
        assert refused.returncode != 0 and "no such account (you may use chem)" in refused.stderr
    finally:
        alice("scancel --me")
        # Accounting hears of the cancelled job later, and lets no account go that has one.
        for kind, name in (("user", "alice"), ("account", "chem"), ("account", "physics")):
            until(functools.partial(is_deleted, alice.world, kind, name), f"the {kind} {name} goes")


def hints(alice: Researcher, command: str, hint: str, expected: bool) -> bool:
    return (hint in alice.try_(command).stderr) == expected


def test_a_far_start_is_explained_where_it_is_asked_for(alice: Researcher) -> None:
    hint = "a far year means after a running job that has no --time"
    commands = ("sbatch --test-only --wrap true", "srun --test-only true")
    running = "squeue --noheader --states=running --jobs="
    for limit, is_far in (("--time=10", False), ("", True), ("--time=365-0", True)):  # the last as backfill starts it
        job = alice(f"sbatch --parsable {limit} --wrap 'sleep 600'").strip()
        try:
            until(functools.partial(alice, running + job), "the job runs")
            for command in commands:
                # The filter waits 3 s for slurmctld's list of jobs; without it, it gives no hint.
                check = functools.partial(hints, alice, command, hint, is_far)
                until(check, f"{command}, a job {limit}: hint {is_far}", seen=functools.partial(alice.try_, command))
            assert hint not in alice.try_("srun --overlap --immediate=5 true").stderr
        finally:
            alice("scancel --me")


def test_a_locale_of_the_users_own_machine_brings_no_warnings(alice: Researcher) -> None:
    options = ("-o", "SendEnv=LANG", "-o", "SendEnv=LC_*")
    env = os.environ | {"LANG": "en_US.UTF-8", "LC_ALL": "en_US.UTF-8"}
    command = alice.command("bash -lc 'perl -e 1; locale charmap'", options=options)
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE)
    assert (done.stdout, "locale" in done.stderr) == ("UTF-8\n", False), done.stderr


def test_pip_names_the_way_that_people_have(alice: Researcher) -> None:
    refused = alice.try_("pip install --no-index nothing")
    assert refused.returncode != 0 and "python3 -m venv ~/env" in refused.stderr and "apt" not in refused.stderr


def test_terminals_that_people_bring_are_known(alice: Researcher) -> None:
    for name in ("xterm-kitty", "foot", "alacritty", "tmux-256color"):
        assert alice(f"TERM={name} tput colors").strip().isdigit()
        assert alice(f"srun env TERM={name} tput colors").strip().isdigit()


def test_mail_that_nobody_sends_is_told_at_submission(alice: Researcher) -> None:
    told = alice.try_("sbatch --hold --mail-type=END --wrap true")
    alice("scancel --me")
    assert told.returncode == 0 and "this cluster sends no mail" in told.stderr


def test_a_job_writes_a_core_only_where_it_asks_for_one(alice: Researcher) -> None:
    assert alice("srun -n1 bash -c 'ulimit -c; ulimit -Hc'").split() == ["0", "unlimited"]
    assert alice("ulimit -c; ulimit -Hc").split() == ["0", "unlimited"]


def test_each_part_of_a_heterogeneous_job_has_a_directory_of_its_own(alice: Researcher) -> None:
    places = alice(
        "salloc -Q -n1 -w slurm-worker-0 : -n1 -w slurm-worker-1 srun --het-group=0,1 printenv TMPDIR"
    ).split()
    assert len(set(places)) == 2 and all(place.startswith("/var/tmp/minivm/jobs/") for place in places), places


def test_a_reason_is_shown_whole_and_the_banner_has_a_time(alice: Researcher) -> None:
    reason = "the fan of the third power supply makes a noise"
    alice.world.slurm("scontrol", "update", "nodename=slurm-worker-1", "state=drain", f"reason={reason}")
    try:
        shown = alice(options=("-tt",), stdin="sinfo -R\nexit\n")
    finally:
        alice.world.slurm("scontrol", "update", "nodename=slurm-worker-1", "state=resume")
    assert reason in shown
    alice.world.run("slurm-login-0", "/usr/libexec/minivm/motd")
    assert re.search(r"The cluster at [0-9:]{5} ", alice.world.run("slurm-login-0", "cat", "/run/motd.d/50-minivm"))


def test_a_controller_that_is_away_is_told_at_login(alice: Researcher) -> None:
    alice.world.run("slurm-controller-0", "minivm", "stop", "slurmctld")
    try:
        # What its period would bring within half a minute.
        alice.world.run("slurm-login-0", "/usr/libexec/minivm/motd")
        shown = alice(options=("-tt",), stdin="exit\n")
        assert "controller is away" in shown and "Your jobs" not in shown
        refused = alice.try_("squeue")
        assert refused.returncode == 1 and "Unable to contact slurm controller" in refused.stderr
    finally:
        alice.world.run("slurm-controller-0", "minivm", "start", "slurmctld")


def test_nobody_comes_in_by_password_or_as_root(alice: Researcher, healthy: World) -> None:
    without_key = alice.try_("true", options=("-o", "PubkeyAuthentication=no"))
    assert without_key.returncode == 255
    assert "Permission denied (publickey)" in without_key.stderr
    as_root = [item.replace("alice@", "root@") for item in alice.command("true")]
    assert subprocess.run(as_root, capture_output=True, timeout=PATIENCE).returncode == 255
    stranger = Researcher(healthy, "bob").command("true")
    key = str(healthy.cluster.keys().users["alice"])
    stranger[stranger.index("-i") + 1] = key
    assert subprocess.run(stranger, capture_output=True, timeout=PATIENCE).returncode == 255


def test_sshd_offers_nothing_weak(healthy: World) -> None:
    port = healthy.cluster.options.port
    audit = Path(sys.executable).with_name("ssh-audit")
    done = subprocess.run(
        [str(audit), "-j", "--skip-rate-test", "-p", str(port), "127.0.0.1"],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    found = json.loads(done.stdout)
    weak = [
        f"{kind} {item['algorithm']}: {item['notes']['fail']}"
        for kind in ("kex", "key", "enc", "mac")
        for item in found[kind]
        if item.get("notes", {}).get("fail")
    ]
    assert not weak


def test_the_directorys_keys_are_those_that_sssds_own_program_tells(healthy: World) -> None:
    """The words between sssd and its program are nobody's promise: a newer sssd that says it otherwise shows here."""
    ours = ("/usr/libexec/minivm/authorized-keys", "alice", "/home/alice", "ssh-ed25519", "AAAAanother")
    # Beside the keys, it would say that it had to ask the program.
    assert healthy.run("slurm-login-0", *ours) == healthy.run("slurm-login-0", "sss_ssh_authorizedkeys", "alice")


def test_a_login_looks_at_no_other_process_of_the_pod(alice: Researcher, healthy: World) -> None:
    """sssd would read the state of each, three times a login: with the number of people the price of each one grew."""
    others = 300

    def reads() -> int:
        said = healthy.run("slurm-login-0", "sh", "-c", "cat /proc/$(pgrep -x sssd_pam)/io")
        return int(dict(line.split(": ") for line in said.splitlines())["syscr"])

    start = f"for i in $(seq {others}); do sleep 600 > /dev/null 2>&1 & echo $!; done"
    pids = healthy.run("slurm-login-0", "sh", "-c", start).split()
    try:
        before = reads()
        alice("true")
        assert reads() - before < others
    finally:
        healthy.run("slurm-login-0", "kill", *pids)


def test_many_log_in_at_once(alice: Researcher) -> None:
    def log_in(number: int) -> subprocess.CompletedProcess[str]:
        return alice.try_(f"echo {number}", options=("-o", "ConnectTimeout=480"), timeout=480)

    with ThreadPoolExecutor(200) as crowd:
        done = list(crowd.map(log_in, range(200)))
    assert [int(one.stdout or -1) for one in done] == list(range(200)), [one.stderr for one in done if one.returncode]


def test_a_burst_of_submissions_loses_none(alice: Researcher) -> None:
    loop = "for i in $(seq 1000); do sbatch --parsable --hold --wrap true || echo failed; done"
    jobs = alice(loop, timeout=1500).split()
    assert len(set(jobs)) == 1000 and "failed" not in jobs
    assert set(alice("squeue --me -h -o %i").split()) == set(jobs)
    alice("scancel --me")

    def queue() -> str:
        return alice("squeue --me -h")

    until(lambda: queue() == "", "the queue is empty", seen=queue)
