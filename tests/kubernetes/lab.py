"""A control plane and some nodes on this machine: up, down, and what can happen to them in between."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.kubernetes import configs, images, keys, left, network, plan, programs
from tests.kubernetes import machine as power
from tests.kubernetes.errors import LabError
from tests.kubernetes.host import attempt, run, wait_for, write
from tests.kubernetes.plan import Machine, machines
from tests.kubernetes.programs import KEPT, Programs, locked

STATE = KEPT / "lab"
UP = plan.UP
INOTIFY = "fs.inotify.max_user_instances"
WATCHERS = "1024"


@dataclass(frozen=True, slots=True)
class Lab:
    programs: Programs
    state: Path
    nodes: int
    say: Callable[[str], None] = lambda _: None

    @classmethod
    def found(cls, say: Callable[[str], None] = lambda _: None) -> Lab:
        """Find the lab that is up, or was when its keeper died."""
        if not UP.is_symlink():
            raise LabError("find a lab", "none is up", hint="make kube-up")
        state = UP.readlink()
        try:
            said = json.loads((state / "lab.json").read_text())
        except OSError:
            # It came no further than its first step.
            said = {"programs": str(programs.programs().root), "nodes": plan.MOST_NODES}
        return cls(Programs(Path(said["programs"])), state, said["nodes"], say)

    @property
    def machines(self) -> tuple[Machine, ...]:
        return machines(self.state, self.nodes)

    @property
    def control_plane(self) -> Machine:
        return self.machines[0]

    def node(self, name: str) -> Machine:
        for machine in self.machines[1:]:
            if machine.name == name:
                return machine
        raise LabError(f"find the node {name}", f"there are n1 to n{self.nodes}")

    @property
    def keys(self) -> Path:
        return self.state / "keys"

    @property
    def kubeconfig(self) -> Path:
        return self.keys / "admin.conf"

    @property
    def client(self) -> tuple[str, ...]:
        """kubectl, which keeps what it knows of the API at home if nobody says where."""
        own = (f"--kubeconfig={self.kubeconfig}", f"--cache-dir={self.state}/kubectl")
        return (str(self.programs.bin / "kubectl"), *own)

    def kubectl(self, *words: str, stdin: str = "") -> str:
        return run(*self.client, *words, stdin=stdin)

    def answers(self, *words: str) -> bool:
        return attempt(*self.client, *words).returncode == 0

    # Up

    def up(self, names: Iterable[str] = ()) -> None:
        if why := power.refusal():
            raise LabError("make machines", why, hint="KUBECONFIG=... names a Kubernetes that is there already")
        self.claim()
        images.pause(self.programs)
        store = images.store(self.programs, images.wanted([plan.PAUSE, *names]))
        self.say("images are unpacked")
        network.switch()
        for machine in self.machines:
            network.cable(machine)
        network.routes(self.machines)
        keys.make(self.keys, self.machines)
        self.say("network and keys are there")
        with ThreadPoolExecutor() as hands:
            runtimes = [hands.submit(self.runtime, node, store) for node in self.machines[1:]]
            self.rule(store)
            for done in runtimes:
                done.result()
            for done in [hands.submit(self.join, node) for node in self.machines[1:]]:
                done.result()
        for node in self.machines[1:]:
            self.wait_ready(node)
        # One that sees no machine ready when it begins takes that for a fault of its own and evicts nobody; 1.20 then
        # never began to, and a lost machine kept its pods.
        self.daemon(self.control_plane, configs.controller_manager(self.keys))
        self.wait(120, "the default account", lambda: self.answers("get", "serviceaccount", "default"))
        self.say(f"{self.nodes} nodes are ready")

    def claim(self) -> None:
        if UP.is_symlink() and UP.readlink() != self.state:
            raise LabError("start a lab", f"one is up already, from {UP.readlink()}", hint="make kube-down")
        self.state.mkdir(parents=True, exist_ok=True)
        if not UP.is_symlink():
            UP.symlink_to(self.state)
        if not (self.state / "lab.json").exists():
            made = [path for path in plan.TARGETS if not Path(path).exists()]
            said = {"programs": str(self.programs.root), "nodes": self.nodes, "made": made}
            write(self.state / "lab.json", json.dumps(said | {"inotify": power.sysctl(INOTIFY)}))
        for path in plan.TARGETS:
            Path(path).mkdir(parents=True, exist_ok=True)
        # Every node's daemons watch files as one and the same root.
        power.sysctl(INOTIFY, WATCHERS)

    def rule(self, store: Path) -> None:
        """The control plane: etcd, then the API server, then those that talk to it."""
        cp = self.control_plane
        power.power_on(cp)
        self.daemon(cp, configs.etcd(cp))
        health = (*power.entered(cp), "curl", "-sf", f"{configs.ETCD}/health")
        self.wait(120, "etcd", lambda: attempt(*health).returncode == 0)
        self.start_apiserver()
        self.say("the API server is ready")
        self.daemon(cp, configs.scheduler(self.keys))
        own = (sys.executable, "-S", "-m")
        self.daemon(cp, (*own, "tests.kubernetes.dns", str(self.keys), plan.CONTROL_PLANE), name="dns")
        self.daemon(cp, (*own, "tests.kubernetes.volumes", str(self.keys)), name="volumes")
        self.daemon(cp, (*own, "tests.kubernetes.registry", str(store), plan.CONTROL_PLANE), name="registry")
        self.proxy(cp)
        self.kubectl("apply", "-f", "-", stdin=configs.first_objects())

    def start_apiserver(self) -> None:
        self.daemon(self.control_plane, configs.apiserver(self.keys))
        self.wait(120, "the API server", lambda: self.answers("get", "--raw", "/readyz"))

    def runtime(self, node: Machine, store: Path) -> None:
        power.power_on(node)
        images.give(node, store)
        power.make_cgroups(node)
        write(node.state / "containerd.toml", configs.containerd(node, self.programs))
        default = run(self.programs.bin / "ctr", "oci", "spec")
        write(node.state / "spec.json", json.dumps(configs.base_spec(default, node)))
        write(node.state / configs.CGROUP_WRITABLE, configs.writable_runc(self.programs))
        (node.state / configs.CGROUP_WRITABLE).chmod(0o755)
        write(node.state / "cni" / "10-lab.conflist", json.dumps(configs.network(node)))
        self.start_containerd(node)

    def start_containerd(self, node: Machine) -> None:
        self.daemon(node, ("containerd", "-c", f"{node.state}/containerd.toml"))
        ctr = (*power.entered(node), str(self.programs.bin / "ctr"), "version")
        self.wait(120, f"containerd on {node.name}", lambda: attempt(*ctr).returncode == 0)

    def join(self, node: Machine) -> None:
        self.start_kubelet(node)
        self.proxy(node)
        enforcer = (sys.executable, "-S", "-m", "tests.kubernetes.policies")
        self.daemon(node, (*enforcer, str(self.keys), node.name, node.address), name="policies")

    def start_kubelet(self, node: Machine, **changes: object) -> None:
        """With what its configuration says, but for the changes."""
        write(node.state / "kubelet.json", json.dumps(configs.kubelet(node, self.keys, self.programs.minor) | changes))
        self.daemon(node, configs.kubelet_words(node, self.keys, self.programs.minor))
        # Until then nobody gets a word into its pods.
        self.wait(120, f"the kubelet of {node.name}", lambda: listens(node.address, configs.KUBELET_PORT))

    def proxy(self, machine: Machine) -> None:
        # It looks its node up; the control plane is none, and any will do.
        name = machine.name if machine.number else "n1"
        write(machine.state / "proxy.json", json.dumps(configs.proxy(machine, self.keys, name)))
        self.daemon(machine, ("kube-proxy", f"--config={machine.state}/proxy.json"))

    def daemon(self, machine: Machine, words: tuple[str, ...], *, name: str = "") -> None:
        power.start(machine, self.programs, words, name=name)

    def wait(self, within: float, what: str, look: Callable[[], bool]) -> None:
        wait_for(look, what, within=within, why=lambda: power.dead(self.machines))

    def wait_ready(self, node: Machine) -> None:
        path = 'jsonpath={.status.conditions[?(@.type=="Ready")].status}'
        self.wait(120, f"{node.name} to be ready", lambda: self.condition(node, path) == "True")

    def condition(self, node: Machine, path: str) -> str:
        return attempt(*self.client, "get", "node", node.name, "-o", path).stdout

    # What happens to nodes

    def power_cut(self, name: str) -> None:
        power.power_off(self.node(name))

    def power_back(self, name: str) -> None:
        """Power the machine on with the content of its disk."""
        node = self.node(name)
        store = images.stored()
        assert store, "no lab was up without one"
        self.runtime(node, store)
        self.join(node)
        self.wait_ready(node)

    def restart_kubelet(self, name: str, **changes: object) -> None:
        power.kill(self.node(name), "kubelet")
        self.start_kubelet(self.node(name), **changes)

    def ctr(self, name: str, *words: str) -> str:
        """containerd's own client on a node, where the kubelet's containers are."""
        return power.run_on(self.node(name), str(self.programs.bin / "ctr"), "-n", images.NAMESPACE, *words)

    def compact(self) -> int:
        """etcd forgets all that was before; the revision from which on it knows."""

        def ask(path: str, **what: object) -> dict[str, dict[str, str]]:
            words = ("curl", "-sf", "-X", "POST", "-d", json.dumps(what), f"{configs.ETCD}/v3/kv/{path}")
            found: dict[str, dict[str, str]] = json.loads(power.run_on(self.control_plane, *words))
            return found

        revision = int(ask("range", key="AA==")["header"]["revision"])
        ask("compaction", revision=revision, physical=True)
        return revision

    # Down

    def down(self) -> None:
        with ThreadPoolExecutor() as hands:
            for done in [hands.submit(power.power_off, machine) for machine in self.machines]:
                done.result()
        network.remove(self.machines)
        for top in power.CGROUPS.glob(f"*/{plan.CGROUP}"):
            power.prune(top)
        with contextlib.suppress(OSError):
            said = json.loads((self.state / "lab.json").read_text())
            power.sysctl(INOTIFY, said["inotify"])
            for path in reversed(said["made"]):
                with contextlib.suppress(OSError):
                    Path(path).rmdir()
        shutil.rmtree(plan.UNPACKING, ignore_errors=True)
        shutil.rmtree(self.state, ignore_errors=True)
        UP.unlink(missing_ok=True)
        if found := left.look(self.state):
            raise LabError("take the lab down", f"this is left: {found}")
        self.say("nothing is left")


def listens(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=1).close()
    except OSError:
        return False
    return True


@contextlib.contextmanager
def kept(nodes: int, names: Iterable[str], say: Callable[[str], None]) -> Iterator[Lab]:
    """A lab for as long as this process lives; what one before left when it was killed is taken away first."""
    # Longer than the lab lives: the next one waits until this one's is down.
    with locked(Path(f"{UP}.lock")):
        with contextlib.suppress(LabError):
            found = Lab.found(say)
            if (found.state / "stays").exists():
                raise SystemExit("error: a lab is up, of `make kube-up`\nhint: make kube-down")
            found.down()
        lab = Lab(programs.build(), STATE, nodes, say)
        try:
            lab.up(names)
            yield lab
        finally:
            lab.down()
