"""What the lab's daemons are told: command lines, configuration files, first objects. Pure."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.kubernetes import plan, registry, volumes
from tests.kubernetes.plan import Machine
from tests.kubernetes.programs import HERE, Programs

Words = tuple[str, ...]
ETCD = "http://127.0.0.1:2379"
KUBELET_PORT = 10250
# A RuntimeClass, and what runs its containers: runc, with cgroups that the pod may write to.
CGROUP_WRITABLE = "cgroup-writable"
# Kubernetes' own are 50 s and 300 s, and nobody waits so long in a test.
NODE_GRACE = "20s"
TOLERATE = 30


def etcd(machine: Machine) -> Words:
    peer = "http://127.0.0.1:2380"
    return (
        "etcd", "--data-dir", str(machine.state / "etcd"),
        "--listen-client-urls", ETCD, "--advertise-client-urls", ETCD,
        "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}",
        # The machine of a test may die; its disk need not outlive it.
        "--unsafe-no-fsync",
    )  # fmt: skip


def apiserver(keys: Path) -> Words:
    return (
        "kube-apiserver", f"--etcd-servers={ETCD}", f"--service-cluster-ip-range={plan.SERVICES}.0/24",
        "--bind-address=0.0.0.0", f"--advertise-address={plan.CONTROL_PLANE}", "--secure-port=6443",
        "--allow-privileged=true", "--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction",
        "--kubelet-preferred-address-types=InternalIP", f"--client-ca-file={keys}/ca.crt",
        f"--tls-cert-file={keys}/apiserver.crt", f"--tls-private-key-file={keys}/apiserver.key",
        f"--kubelet-client-certificate={keys}/to-kubelet.crt", f"--kubelet-client-key={keys}/to-kubelet.key",
        f"--kubelet-certificate-authority={keys}/ca.crt",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={keys}/sa.pub", f"--service-account-signing-key-file={keys}/sa.key",
        f"--default-not-ready-toleration-seconds={TOLERATE}", f"--default-unreachable-toleration-seconds={TOLERATE}",
    )  # fmt: skip


def controller_manager(keys: Path) -> Words:
    return (
        "kube-controller-manager", *as_user(keys, "controller-manager"), "--bind-address=127.0.0.1",
        "--leader-elect=false", "--use-service-account-credentials",
        f"--service-account-private-key-file={keys}/sa.key", f"--root-ca-file={keys}/ca.crt",
        f"--cluster-signing-cert-file={keys}/ca.crt", f"--cluster-signing-key-file={keys}/ca.key",
        f"--node-monitor-grace-period={NODE_GRACE}", "--node-monitor-period=2s",
        # At Kubernetes' own 0.1 nodes a second a test would see the first loss minutes later.
        "--node-eviction-rate=10",
    )  # fmt: skip


def scheduler(keys: Path) -> Words:
    return ("kube-scheduler", *as_user(keys, "scheduler"), "--leader-elect=false", "--bind-address=127.0.0.1")


def as_user(keys: Path, user: str) -> Words:
    kinds = ("kubeconfig", "authentication-kubeconfig", "authorization-kubeconfig")
    return tuple(f"--{kind}={keys}/{user}.conf" for kind in kinds)


def proxy(machine: Machine, keys: Path, node: str) -> dict[str, Any]:
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "iptables",
        "clusterCIDR": f"{plan.PODS}.0.0/16",
        "hostnameOverride": node,
        "clientConnection": {"kubeconfig": f"{keys}/proxy.conf"},
        # They are the whole host's.
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
        "healthzBindAddress": "127.0.0.1:10256",
        "metricsBindAddress": "127.0.0.1:10249",
    }


# The first release whose kubelet reads the runtime's socket from its file, and the first that refuses cgroup v1 unless
# it is allowed.
SOCKET_IN_FILE, REFUSES_CGROUP_V1 = 27, 31
RUNTIME_SOCKET = "unix:///run/containerd/containerd.sock"


def kubelet(machine: Machine, keys: Path, minor: int) -> dict[str, Any]:
    later: dict[str, Any] = {}
    if minor >= SOCKET_IN_FILE:
        later["containerRuntimeEndpoint"] = RUNTIME_SOCKET
    if minor >= REFUSES_CGROUP_V1:
        later["failCgroupV1"] = False
    return later | {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "failSwapOn": False,
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{machine.cgroup}",
        "authentication": {
            "x509": {"clientCAFile": f"{keys}/ca.crt"},
            "webhook": {"enabled": True},
            "anonymous": {"enabled": False},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": f"{keys}/{machine.name}.crt",
        "tlsPrivateKeyFile": f"{keys}/{machine.name}.key",
        "address": "0.0.0.0",
        "port": KUBELET_PORT,
        "healthzBindAddress": "127.0.0.1",
        "clusterDomain": "cluster.local",
        "clusterDNS": [plan.DNS],
        "resolvConf": "",
        # By the host's disk, which is not the lab's to judge.
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1Gi"},
        "syncFrequency": "10s",
        "nodeLeaseDurationSeconds": 20,
        "configMapAndSecretChangeDetectionStrategy": "Watch",
        "volumePluginDir": f"{machine.state}/plugins",
        "maxPods": 100,
    }


def kubelet_words(machine: Machine, keys: Path, minor: int) -> Words:
    words = (
        "kubelet", f"--config={machine.state}/kubelet.json", f"--kubeconfig={keys}/{machine.name}.conf",
        f"--hostname-override={machine.name}", f"--node-ip={machine.address}", "--root-dir=/var/lib/kubelet", "--v=2",
    )  # fmt: skip
    if minor >= SOCKET_IN_FILE:
        return words
    # The kubelet never removes the image that it knows to be the pause container's.
    runtime = ("--container-runtime=remote", f"--container-runtime-endpoint={RUNTIME_SOCKET}")
    return (*words, *runtime, f"--pod-infra-container-image={plan.PAUSE}")


def containerd(machine: Machine, programs: Programs) -> str:
    return f"""version = 2
root = "{machine.state}/containerd"
state = "/run/containerd"
[plugins."io.containerd.internal.v1.opt"]
  path = "{machine.state}/opt"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{plan.PAUSE}"
  # Who may not lower a process' oom score has it raised to what is allowed.
  restrict_oom_score_adj = true
  disable_apparmor = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{programs.cni}"
    conf_dir = "{machine.state}/cni"
  [plugins."io.containerd.grpc.v1.cri".registry.mirrors."*"]
    endpoint = ["http://{plan.CONTROL_PLANE}:{registry.PORT}"]
{runtime(machine, "runc", f"{programs.bin}/runc")}
{runtime(machine, CGROUP_WRITABLE, f"{machine.state}/{CGROUP_WRITABLE}")}
"""


def runtime(machine: Machine, name: str, binary: str) -> str:
    place = f'plugins."io.containerd.grpc.v1.cri".containerd.runtimes.{name}'
    return f"""  [{place}]
    runtime_type = "io.containerd.runc.v2"
    base_runtime_spec = "{machine.state}/spec.json"
    [{place}.options]
      BinaryName = "{binary}"
      SystemdCgroup = false"""


def writable_runc(programs: Programs) -> str:
    return f'#!/bin/sh\nexec {sys.executable} -I -S {HERE}/writable.py {programs.bin}/runc "$@"\n'


def base_spec(default: str, machine: Machine) -> dict[str, Any]:
    """containerd's own, and the machine's boot in each container: what runc is told to mount may not lie in /proc."""
    spec: dict[str, Any] = json.loads(default)
    # The machine's, as without a specification of ours.
    spec["process"].pop("rlimits", None)
    words = ["mount", "--bind", f"{machine.state}/boot_id", "proc/sys/kernel/random/boot_id"]
    # It runs in the container's own mounts, at its root, before that becomes the root.
    spec["hooks"] = {"createContainer": [{"path": "/bin/mount", "args": words}]}
    return spec


def network(machine: Machine) -> dict[str, Any]:
    ranges = {"ranges": [[{"subnet": machine.pods}]], "routes": [{"dst": "0.0.0.0/0"}]}
    ipam = {"type": "host-local", "dataDir": "/run/containerd/ipam", **ranges}
    bridge = {"type": "bridge", "bridge": "cni0", "isGateway": True, "ipMasq": False, "hairpinMode": True, "ipam": ipam}
    ports = {"type": "portmap", "capabilities": {"portMappings": True}}
    return {"cniVersion": "0.4.0", "name": "lab", "plugins": [bridge, ports]}


def first_objects() -> str:
    """The cluster's DNS behind its Service, a class for volumes that every node sees, and one for pods with cgroups."""
    ports = [{"name": name, "port": 53, "protocol": kind} for name, kind in (("dns", "UDP"), ("dns-tcp", "TCP"))]
    meta = {"name": "kube-dns", "namespace": "kube-system"}
    default = {"storageclass.kubernetes.io/is-default-class": "true"}
    objects = [
        {"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": {"clusterIP": plan.DNS, "ports": ports}},
        {
            "apiVersion": "v1",
            "kind": "Endpoints",
            "metadata": meta,
            "subsets": [{"addresses": [{"ip": plan.CONTROL_PLANE}], "ports": ports}],
        },
        {
            "apiVersion": "storage.k8s.io/v1",
            "kind": "StorageClass",
            "metadata": {"name": volumes.CLASS, "annotations": default},
            "provisioner": volumes.PROVISIONER,
        },
        {
            "apiVersion": "node.k8s.io/v1",
            "kind": "RuntimeClass",
            "metadata": {"name": CGROUP_WRITABLE},
            "handler": CGROUP_WRITABLE,
        },
    ]
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
