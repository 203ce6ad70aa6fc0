"""A whole cluster on one machine: the chart's pods, kept as they should be. `up` again changes what changed."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from cluster import addresses, cgroups, drop_ins, keys, names, ports, readiness, report, slurm_conf, values
from cluster.errors import ClusterError
from cluster.pods import Kubelet, Running, fingerprint, published
from cluster.publish import write_private
from cluster.rendered import manifests, objects
from cluster.rendered.manifests import Manifests
from cluster.rendered.objects import Pod
from cluster.rendered.render import render
from cluster.report import Row, Stages
from cluster.values import NAMESPACE, RELEASE, Options

STATE = Path(__file__).resolve().parents[1] / "build" / "cluster"
# What others wait for is started first.
START_ORDER = ("controller", "demo", "worker", "login")
POLL = 0.1
HANDS = 8

Log = Callable[[str], None]


class LocalCluster:
    def __init__(self, client: Any, options: Options, *, root: Path = STATE, log: Log = lambda _: None) -> None:
        self.options = options
        self.state = root / options.name
        self.kubelet = Kubelet(client, options.name, self.state)
        self.log = log
        self.stages = Stages(time.monotonic)

    @classmethod
    def saved(cls, client: Any, name: str, *, root: Path = STATE, log: Log = lambda _: None) -> LocalCluster:
        """The cluster as it was last brought up."""
        path = root / name / "options.json"
        if not path.exists():
            hint = names.hint(names.saved(root)) or "make up"
            raise ClusterError(f"find the cluster {name}", "it is not up", hint=hint)
        return cls(client, Options(**json.loads(path.read_text())), root=root, log=log)

    @contextlib.contextmanager
    def changing(self, cannot: str, *, make: bool = False) -> Iterator[LocalCluster]:
        """What changes the cluster happens in here: it is this directory's, and nothing else changes it meanwhile."""
        names.own(self.kubelet.api, self.options.name, self.state, cannot)
        if make:
            self.state.mkdir(parents=True, exist_ok=True, mode=0o700)
        with names.alone(self.state, cannot):
            yield self

    # What it should be

    def keys(self) -> keys.Keys:
        return keys.load_or_make(self.state / "keys", users=values.USERS)

    def manifests(self) -> Manifests:
        labels = self.kubelet.labels(self.options.image("controller"))
        chosen = values.local_values(self.options, self.keys(), values.slurm_of(labels))
        return manifests.parse(render(chosen, release=RELEASE, namespace=NAMESPACE), namespace=NAMESPACE)

    def saved_port(self) -> int:
        """The port that the login pod has."""
        path = self.state / "options.json"
        return int(json.loads(path.read_text())["port"]) if path.exists() else self.options.port

    def save(self) -> None:
        write_private(self.state / "options.json", json.dumps(asdict(self.options)).encode())

    # Making it so

    def up(self, *, timeout: float = 180.0, port: int = 0) -> None:
        """`port`: one that was asked for, also of a cluster that has another: its login pod is replaced then."""
        self.state.mkdir(parents=True, exist_ok=True, mode=0o700)
        there = self.kubelet.running()
        asked, own = port, self.saved_port() if there else 0
        port = ports.choose(asked, default=self.options.port, own=own)
        if asked not in (0, port):
            self.log(f"port {asked} of 127.0.0.1 is taken: {port} it is")
        no_cgroups = self.no_cgroups()
        self.options = replace(self.options, port=port, own_cgroups=not no_cgroups)
        if no_cgroups and values.proctrack(self.options) == "cgroup":
            raise ClusterError("hold jobs in cgroups", no_cgroups, hint="slurm.proctrack: linuxproc")
        with self.stages.stage("chart"):
            known = self.manifests()
            drop_ins.check(self.kubelet, known)
        self.save()
        write_private(self.known_hosts, keys.known_hosts(self.keys(), self.options.port).encode())
        with self.stages.stage("pods"):
            self.revive(known, there)
            self.reconcile(known, self.kubelet.running(), timeout=timeout)
        with self.stages.stage("ready"):
            self.wait_ready(known, timeout=timeout)
        slurm_conf.confirm(self.exec, there)

    def reconcile(self, known: Manifests, there: Mapping[str, Running], *, timeout: float) -> None:
        """Extra pods go, missing ones come, changed ones roll, and the others see changed files."""
        wanted = self.specs(known)
        with ThreadPoolExecutor(HANDS) as hands:
            for done in [hands.submit(self.retire, item) for name, item in there.items() if name not in wanted]:
                done.result()
            self.start([pod for pod in in_start_order(known.pods) if pod.name not in there], known, hands)
        for pod in known.pods:
            current = there.get(pod.name)
            if current and current.spec == wanted[pod.name] and self.kubelet.publish_files(pod, known):
                self.log(f"{pod.name}: changed files published")
        for pod in reversed(in_start_order(known.pods)):
            current = there.get(pod.name)
            if current and current.spec != wanted[pod.name]:
                # One at a time and each ready before the next goes, highest number first, as a StatefulSet rolls.
                self.log(f"{pod.name}: replaced, its description changed")
                self.delete(pod.name, known=known)
                self.wait_ready(known, timeout=timeout, only=pod.name)

    def revive(self, known: Manifests, there: Mapping[str, Running]) -> None:
        """Nobody watches the pods of one machine all the time, as a kubelet does: `up` does it in passing."""
        wanted = self.specs(known)

        def look(pod: Pod) -> None:
            current = there[pod.name]
            if not current.running and current.spec != wanted[pod.name]:
                # It may be its old description by which it cannot run: the new one is started as one that is missing.
                self.log(f"{pod.name}: made anew, it did not run and its description changed")
                self.kubelet.remove(pod.name, current.container)
            elif not current.running:
                self.log(f"{pod.name}: started again, it was stopped")
                self.kubelet.start(pod, current.container)
            elif readiness.dead(pod, current):
                self.log(f"{pod.name}: started again, its {pod.alive.path} fails")
                self.kubelet.restart(current)

        with ThreadPoolExecutor(HANDS) as hands:
            list(hands.map(look, [pod for pod in known.pods if pod.name in there]))

    def specs(self, known: Manifests) -> dict[str, str]:
        images = {image: self.kubelet.image_id(image) for image in sorted({pod.image for pod in known.pods})}
        return {pod.name: fingerprint(pod, images[pod.image], published(pod, known)) for pod in known.pods}

    def start(self, pods: Iterable[Pod], known: Manifests, hands: ThreadPoolExecutor) -> None:
        """New containers at new addresses, side by side."""
        missing, wanted = list(pods), self.specs(known)
        if not missing:
            return
        kept = self.kept_addresses(known)
        passing = [pod for pod in missing if pod.name not in kept]
        given = dict(zip((pod.name for pod in passing), self.new_addresses(len(passing), kept.values()), strict=True))
        starts = [hands.submit(self.launch, pod, known, kept | given, wanted[pod.name]) for pod in missing]
        for start in starts:
            start.result()

    def launch(self, pod: Pod, known: Manifests, given: Mapping[str, str], spec: str) -> None:
        names, address = objects.aliases(pod, known.services), given[pod.name]
        hosts = {
            name: given[behind]
            for behind, service in objects.stable_services(known.pods, known.services).items()
            for name in objects.host_names(service.name, pod.namespace)
        }
        made = self.kubelet.create(pod, known, address=address, spec=spec, aliases=names, hosts=hosts)
        self.kubelet.start(pod, made)
        self.log(f"{pod.name}: started at {address}")

    def kept_addresses(self, known: Manifests) -> dict[str, str]:
        """Pod -> the address of the Service in front of it, which outlives the pod."""
        subnet = self.kubelet.ensure_network()["IPAM"]["Config"][0]["Subnet"]
        kept = objects.stable_services(known.pods, known.services)
        found = addresses.of_services(subnet, (service.name for service in kept.values()))
        return {pod: found[service.name] for pod, service in kept.items()}

    def new_addresses(self, count: int, kept: Iterable[str] = ()) -> list[str]:
        """Addresses that no pod has, and that the last pods did not have: peers must not rely on an old one."""
        if not count:
            return []
        network = self.kubelet.ensure_network()
        config = network["IPAM"]["Config"][0]
        memory = self.state / "last-address"
        # Also of what somebody else has put there: a database, say.
        used = [str(item["IPv4Address"]).partition("/")[0] for item in network["Containers"].values()]
        used += kept
        last = memory.read_text() if memory.exists() else ""
        found = addresses.allocate(config["Subnet"], gateway=config["Gateway"], used=used, last=last, count=count)
        write_private(memory, found[-1].encode())
        return found

    def wait_ready(self, known: Manifests, *, timeout: float, only: str = "") -> None:
        """Until every pod says it is ready; says each as it comes."""
        begun = time.monotonic()
        waiting = {pod.name: pod for pod in known.pods if only in ("", pod.name)}
        reasons: dict[str, str] = {}
        while True:
            there = self.kubelet.running()
            for name, pod in list(waiting.items()):
                answer = readiness.ask(pod, there.get(name))
                if answer.ready:
                    self.log(f"{name}: ready after {time.monotonic() - begun:.1f} s")
                    del waiting[name]
                else:
                    readiness.hopeless(pod, there.get(name))
                    reasons[name] = answer.reason
            if not waiting:
                return
            if time.monotonic() - begun > timeout:
                why = "".join(f"\n  {name}: {reasons[name]}" for name in waiting)
                raise ClusterError("bring the cluster up", f"after {timeout:.0f} s not ready:{why}", hint="make status")
            time.sleep(POLL)

    # One pod

    def delete(self, name: str, *, known: Manifests | None = None, force: bool = False) -> None:
        """Delete a pod as `kubectl delete pod` does: it stops in its grace, and one of the same name takes its place.

        `force` is a machine that died: no preStop, no TERM.
        """
        known = known or self.manifests()
        pod, there = known.pod(name), self.kubelet.running()
        if name in there:
            if not force:
                self.kubelet.stop(there[name])
            self.kubelet.remove(name, there[name].container)
        with ThreadPoolExecutor(1) as hands:
            self.start([pod], known, hands)

    def retire(self, running: Running) -> None:
        """A pod that the chart no longer makes."""
        self.kubelet.stop(running)
        self.kubelet.remove(running.pod, running.container)
        shutil.rmtree(self.state / "pods" / running.pod, ignore_errors=True)
        self.log(f"{running.pod}: gone")

    def exec(self, pod: str, command: Iterable[str], *, user: str = "") -> tuple[int, str]:
        there = self.kubelet.running()
        if pod not in there:
            raise ClusterError(f"run a command in {pod}", "there is no such pod")
        return self.kubelet.exec(there[pod].container, command, user=user)

    # What it is

    def status(self) -> list[Row]:
        known, there = self.manifests(), self.kubelet.running()
        with ThreadPoolExecutor(HANDS) as hands:
            slurm = hands.submit(self.slurm_states, there)
            asked = hands.map(lambda pod: (pod.name, readiness.examine(pod, there.get(pod.name))), known.pods)
            return report.rows(known.pods, there, dict(asked), slurm.result())

    def slurm_states(self, there: Mapping[str, Running]) -> dict[str, str]:
        """Slurm's word on the nodes, asked once, of the controller, and not for long."""
        controller = f"{RELEASE}-controller-0"
        if controller not in there or not there[controller].running:
            return {}
        command = ["timeout", "3", "sinfo", "-h", "-N", "-o", "%N|%T|%E"]
        code, output = self.kubelet.exec(there[controller].container, command)
        if code != 0:
            return {controller: "slurmctld does not answer"}
        return report.slurm_states(output) | {controller: "up"}

    def not_granted(self) -> list[str]:
        info = self.kubelet.api.info()
        options = [str(option) for option in info.get("SecurityOptions") or ()]
        return report.not_granted(self.manifests().pods, cgroups=cgroups.refusal(info), security=options)

    def no_cgroups(self) -> str:
        """Why pods here cannot have cgroups of their own; empty if they can."""
        return cgroups.refusal(self.kubelet.api.info())

    # In and out

    @property
    def known_hosts(self) -> Path:
        return self.state / "known_hosts"

    def ssh_command(self, user: str, *command: str) -> list[str]:
        return keys.ssh_command(self.keys(), user, *command, port=self.options.port, known_hosts=self.known_hosts)

    def down(self) -> bool:
        """Everything of this cluster, by its label: containers, volumes, network, and the state on disk. Whether there
        was anything."""
        found = self.state.exists() or self.options.name in names.labelled(self.kubelet.api)
        there = self.kubelet.running()
        with ThreadPoolExecutor(HANDS) as hands:
            for done in [hands.submit(self.kubelet.remove, name, item.container) for name, item in there.items()]:
                done.result()
        for volume in self.kubelet.volumes():
            self.kubelet.api.remove_volume(volume, force=True)
        self.kubelet.remove_network()
        cgroups.remove(self.options.name)
        shutil.rmtree(self.state, ignore_errors=True)
        return found


def in_start_order(pods: Iterable[Pod]) -> list[Pod]:
    return sorted(pods, key=lambda pod: START_ORDER.index(pod.role))
