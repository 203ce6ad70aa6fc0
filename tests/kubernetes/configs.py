"""What the lab's daemons are told: command lines, configuration files, first objects. Pure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.kubernetes import plan, volumes
from tests.kubernetes.plan import Machine
from tests.kubernetes.programs import Programs

Words = tuple[str, ...]
ETCD = "http://127.0.0.1:2379"
KUBELET_PORT = 10250
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


def kubelet(machine: Machine, keys: Path) -> dict[str, Any]:
    return {
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
        # The images were brought here by hand: nobody could fetch them again.
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1Gi"},
        "syncFrequency": "10s",
        "nodeLeaseDurationSeconds": 20,
        "configMapAndSecretChangeDetectionStrategy": "Watch",
        "volumePluginDir": f"{machine.state}/plugins",
        "maxPods": 100,
    }


def kubelet_words(machine: Machine, keys: Path) -> Words:
    return (
        "kubelet", f"--config={machine.state}/kubelet.json", f"--kubeconfig={keys}/{machine.name}.conf",
        f"--hostname-override={machine.name}", f"--node-ip={machine.address}", "--root-dir=/var/lib/kubelet", "--v=2",
        "--container-runtime=remote", "--container-runtime-endpoint=unix:///run/containerd/containerd.sock",
    )  # fmt: skip


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
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
      BinaryName = "{programs.bin}/runc"
      SystemdCgroup = false
"""


def network(machine: Machine) -> dict[str, Any]:
    ranges = {"ranges": [[{"subnet": machine.pods}]], "routes": [{"dst": "0.0.0.0/0"}]}
    ipam = {"type": "host-local", "dataDir": "/run/containerd/ipam", **ranges}
    bridge = {"type": "bridge", "bridge": "cni0", "isGateway": True, "ipMasq": False, "hairpinMode": True, "ipam": ipam}
    ports = {"type": "portmap", "capabilities": {"portMappings": True}}
    return {"cniVersion": "0.4.0", "name": "lab", "plugins": [bridge, ports]}


def first_objects() -> str:
    """The cluster's DNS behind its Service, and a class for volumes that every node sees."""
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
    ]
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
