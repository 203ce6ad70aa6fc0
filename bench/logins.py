"""Measure a login: as the image does it, and beside it a plain sshd of the same image with a file of keys.

The clients are the image's own ssh, in a container on the same cores; in production they are hundreds of machines.
So beside the time until the last client of a crowd is in, the bench reports the processor time of pod and clients, and
how long the pod would take with all processors. At the end the crowd comes once more with this machine's ssh: an older
one may spend more on the key exchange than the whole login costs here.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from bench.cluster import running_cluster, ssh
from cluster.local import LocalCluster

POD = "slurm-login-0"
PEOPLE, ROUNDS, SINGLE = 200, 6, 10
OURS, PLAIN, BARE = 22, 2222, 2223
# Debian's defaults, with the same limits for a crowd; PAM has the same modules, except minivm's own and unused ones.
PLAIN_SSHD = f"""Port {PLAIN}
PidFile /run/sshd-plain.pid
HostKey /etc/ssh/ssh_host_ed25519_key
UsePAM yes
PAMServiceName sshd-plain
PrintMotd no
AuthorizedKeysFile /etc/ssh/plain_keys/%u
PerSourcePenalties no
MaxStartups 300:30:600
"""
BEGIN_PLAIN = """set -e
mkdir -p /etc/ssh/plain_keys
sss_ssh_authorizedkeys alice > /etc/ssh/plain_keys/alice
sed '/pam_exec/d' /etc/pam.d/sshd > /etc/pam.d/sshd-plain
printf '%s' "$0" > /run/sshd-plain.conf
sed '/PAM/d; s/plain.pid/bare.pid/; s/^Port .*/Port '"$1"'/' /run/sshd-plain.conf > /run/sshd-bare.conf
/usr/sbin/sshd -f /run/sshd-plain.conf
/usr/sbin/sshd -f /run/sshd-bare.conf
"""
USAGE = "cd /sys/fs/cgroup; cat cpuacct/cpuacct.usage 2>/dev/null || awk '/usage_usec/ {print $2 * 1000}' cpu.stat"
# In the container of clients: for each line "ADDRESS PORT COUNT AT-ONCE" the seconds of each login, how many failed,
# the seconds of all, and how many of a processor's the clients had.
CLIENTS = """
import json, resource, subprocess, sys, time
from concurrent.futures import ThreadPoolExecutor
options = ["-F", "none", "-i", "/root/key"]
for name, value in (("BatchMode", "yes"), ("IdentitiesOnly", "yes"), ("UserKnownHostsFile", "/dev/null"),
                    ("StrictHostKeyChecking", "no"), ("LogLevel", "ERROR"), ("ConnectTimeout", "60")):
    options += ["-o", f"{name}={value}"]
def enter(address, port):
    begun = time.monotonic()
    done = subprocess.run(["ssh", *options, "-p", port, f"alice@{address}", "true"], capture_output=True)
    return time.monotonic() - begun, done.returncode
def spent():
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return children.ru_utime + children.ru_stime
for line in sys.stdin:
    address, port, count, at_once = line.split()
    begun, before = time.monotonic(), spent()
    with ThreadPoolExecutor(int(at_once)) as people:
        done = list(people.map(lambda _: enter(address, port), range(int(count))))
    whole, failed = time.monotonic() - begun, sum(code != 0 for _, code in done)
    print(json.dumps([[one for one, _ in done], failed, whole, spent() - before]), flush=True)
"""


def main() -> int:
    with running_cluster("bench-logins") as cluster, clients(cluster) as people:
        measure(cluster, people)
    return 0


class People:
    """The container of clients, driven line by line."""

    def __init__(self, process: subprocess.Popen[str], address: str) -> None:
        self.process, self.address = process, address

    def enter(self, port: int, count: int, at_once: int = 1) -> tuple[list[float], int, float, float]:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(f"{self.address} {port} {count} {at_once}\n")
        self.process.stdin.flush()
        times, failed, whole, spent = json.loads(self.process.stdout.readline())
        return times, failed, whole, spent


@contextmanager
def clients(cluster: LocalCluster) -> Iterator[People]:
    name, image = f"minivm-{cluster.options.name}-clients", f"{cluster.options.repository}/login:latest"
    docker("run", "--detach", "--rm", "--name", name, "--network", cluster.kubelet.network, "--entrypoint", "sleep",
           image, "3600")  # fmt: skip
    try:
        docker("cp", str(cluster.keys().users["alice"]), f"{name}:/root/key")
        docker("exec", name, "sh", "-c", "chown 0:0 /root/key && chmod 600 /root/key")
        command = ["docker", "exec", "--interactive", name, "python3", "-c", CLIENTS]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
            yield People(client, cluster.kubelet.list_pods()[POD].address)
            assert client.stdin
            client.stdin.close()
    finally:
        docker("rm", "--force", name)


def measure(cluster: LocalCluster, people: People) -> None:
    output = cluster.exec(POD, ["sh", "-c", BEGIN_PLAIN, PLAIN_SSHD, str(BARE)])
    assert output[0] == 0, output[1]
    ports = {"as the image has it": OURS, "plain sshd, a file of keys": PLAIN, "plain sshd, without PAM": BARE}
    for port in ports.values():
        people.enter(port, 2)
    times: dict[str, list[float]] = {what: [] for what in ports}
    spent: dict[str, list[float]] = {what: [] for what in ports}
    for _ in range(ROUNDS):
        for what in random.sample(list(ports), len(ports)):
            before = usage(cluster)
            times[what] += people.enter(ports[what], SINGLE)[0]
            spent[what].append((usage(cluster) - before) / SINGLE)
    for what in ports:
        more = f"{statistics.median(spent[what]) * 1000:.0f} ms of processor time in the pod"
        row(f"a login, {what}", statistics.median(times[what]) * 1000, "ms", more)
    own_median, plain, _ = (statistics.median(times[what]) for what in ports)
    row("  ours against plain", own_median / plain, "x", "target 1.3")
    cores = len(os.sched_getaffinity(0))
    for what, port in ports.items():
        before = usage(cluster)
        _, failed, whole, clients_spent = people.enter(port, PEOPLE, PEOPLE)
        pod_spent = usage(cluster) - before
        row(f"{PEOPLE} logins at once, {what}: the last one in", whole, "s", f"{failed} failed")
        each = f"of each the pod {pod_spent / PEOPLE * 1000:.0f} ms, its client {clients_spent / PEOPLE * 1000:.0f}"
        row(f"  the pod alone, all its time on {cores} processors", pod_spent / cores, "s", each)
    version = subprocess.run(["ssh", "-V"], capture_output=True, text=True, check=True).stderr.split()[0].strip(",")
    begun = time.monotonic()
    with ThreadPoolExecutor(PEOPLE) as hands:
        list(hands.map(lambda _: ssh(cluster, "true"), range(PEOPLE)))
    row(f"{PEOPLE} logins at once by this machine's {version}: the last one in", time.monotonic() - begun, "s")


def usage(cluster: LocalCluster) -> float:
    """Return the pod's processor time in seconds."""
    code, output = cluster.exec(POD, ["sh", "-c", USAGE])
    assert code == 0, output
    return int(output) / 1e9


def docker(*arguments: str) -> None:
    subprocess.run(["docker", *arguments], check=True, stdout=subprocess.DEVNULL)


def row(what: str, value: float, unit: str, more: str = "") -> None:
    print(f"{what:<72} {value:8.2f} {unit:<2} {more}".rstrip(), flush=True)


if __name__ == "__main__":
    main()
