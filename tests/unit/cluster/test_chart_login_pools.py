"""Login pools in the chart: what each pool has of its own, what they share, and what stays as it was."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from shutil import copytree
from typing import Any

import helm_python
import pytest
import yaml

from cluster import ClusterError, manifests
from cluster import render as chart_render
from cluster.pods import Kubelet
from cluster.render import CHART, Document
from cluster.values import NAMESPACE, RELEASE, Options, local_values, merge
from tests.helm import rendered_for
from tests.support.kube_objects import Object, cluster_of
from tests.support.rendered_chart import KEYS, new, render, render_texts

OWN: dict[str, Any] = {
    "image": "hall/login:3",
    "replicas": 2,
    "allowedGroups": ["lab", "Domain Users"],
    "resources": {"limits": {"memory": "4Gi"}},
    "shmSize": "50%",
    "nodeSelector": {"gpu": "yes"},
    "tolerations": [{"key": "gpu"}],
    "env": {"SITE": "gpu"},
    "motd": "GPUs here.",
    "extraVolumes": [{"name": "data", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "data", "mountPath": "/data"}],
    "service": {"type": "LoadBalancer", "port": 2222, "annotations": {"lb": "internal"}},
}
LOGIN: dict[str, Any] = {"replicas": 2, "env": {"ALL": "1"}, "service": {"type": "NodePort", "nodePort": 30022}}
POOLS: dict[str, Any] = {"login": LOGIN | {"pools": {"gpu": OWN, "plain": None}}}
# Everything that may name login pods.
AROUND: dict[str, Any] = {
    "podConditions": {"enabled": True},
    "people": {"existingConfigMap": "lab"},
    "prometheusRule": {"enabled": True},
    "demo": {"enabled": True, "users": {"alice": "ssh-ed25519 AAAA"}},
}


def objects(values: dict[str, Any]) -> dict[tuple[str, str], Document]:
    return {(item["kind"], item["metadata"]["name"]): item for item in render(values, release="slurm", namespace="hpc")}


def container(item: Document) -> dict[str, Any]:
    found: dict[str, Any] = item["spec"]["template"]["spec"]["containers"][0]
    return found


def env(item: Document) -> dict[str, str]:
    return {each["name"]: each.get("value", "") for each in container(item)["env"]}


@pytest.mark.parametrize("login", [{}, {"replicas": 2}, {"keepSeconds": 43200}, LOGIN], ids=str)
def test_without_pools_every_template_renders_to_the_same_text(login: dict[str, Any]) -> None:
    with_fleet = AROUND | {"fleet": {"enabled": True}, "login": login}
    texts = render_texts(with_fleet, release="slurm", namespace="hpc")
    assert texts == render_texts(merge(with_fleet, {"login": {"pools": {}}}), release="slurm", namespace="hpc")
    text = "".join(texts.values())
    assert not [
        word for word in ("minivm.io/pool: login", "LOGIN_POOL", "the login pool", "slurm-ssh.") if word in text
    ]


def test_values_of_a_chart_without_pools_still_render_to_the_same_text() -> None:
    """`helm upgrade --reuse-values` has the older chart's values alone."""
    older = {"login": dict.fromkeys(("pools", "allowedGroups", "image", "shmSize"))}
    assert render_texts(older, release="slurm", namespace="hpc") == render_texts({}, release="slurm", namespace="hpc")


def test_another_pool_changes_no_pod_of_another_role() -> None:
    """Else it would replace every worker."""
    before, after = objects(AROUND), objects(AROUND | POOLS)
    for name in ("slurm-controller", "slurm-worker", "slurm-demo"):
        assert before["StatefulSet", name] == after["StatefulSet", name]
    # A StatefulSet's selector and serviceName cannot change.
    for field in ("selector", "serviceName"):
        assert before["StatefulSet", "slurm-login"]["spec"][field] == after["StatefulSet", "slurm-login"]["spec"][field]


def test_a_pool_has_its_own_settings_over_those_of_login() -> None:
    made = objects(POOLS)
    gpu, plain, first = (made["StatefulSet", f"slurm-login{name}"] for name in ("-gpu", "-plain", ""))
    assert [item["spec"]["replicas"] for item in (gpu, plain, first)] == [2, 2, 2]
    assert [container(item)["image"] for item in (gpu, plain)] == ["hall/login:3", "minivm/login:latest"]
    assert env(gpu).items() >= {("ALL", "1"), ("SITE", "gpu"), ("MINIVM_LOGIN_POOL", "gpu")}
    assert env(plain)["ALL"] == "1" and "SITE" not in env(plain)
    pod = gpu["spec"]["template"]["spec"]
    assert pod["nodeSelector"] == {"gpu": "yes"} and pod["tolerations"] == [{"key": "gpu"}]
    volumes = {item["name"]: item for item in pod["volumes"]}
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "2097152Ki"} and "data" in volumes
    assert {"name": "data", "mountPath": "/data"} in container(gpu)["volumeMounts"]
    # Host keys, account and drop-ins are those of all login pods.
    assert volumes["ssh-host-keys"]["secret"]["secretName"] == "slurm-ssh-host-keys"
    assert pod["serviceAccountName"] == "slurm-login" and volumes["services-d"]["configMap"]["name"] == (
        "slurm-login-services"
    )
    news = [made["ConfigMap", f"slurm-motd{name}"]["data"]["news"] for name in ("-gpu", "-plain", "")]
    assert news == [
        "This is a machine of the login pool gpu, for members of lab, Domain Users.\nGPUs here.",
        "This is a machine of the login pool plain.\n",
        "This is a machine of the login pool login.\n",
    ]


def test_each_pool_has_a_service_and_a_budget_of_its_own_and_they_select_no_pod_of_another() -> None:
    made = objects(POOLS)
    labels = {
        name: item["spec"]["template"]["metadata"]["labels"]
        for (kind, name), item in made.items()
        if kind == "StatefulSet" and "login" in name
    }
    for kind, prefix in (("Service", "slurm-ssh"), ("PodDisruptionBudget", "slurm-login")):
        for pool in ("", "-gpu", "-plain"):
            selector = made[kind, f"{prefix}{pool}"]["spec"]["selector"]
            selector = selector.get("matchLabels", selector)
            chosen = [name for name, own in labels.items() if selector.items() <= own.items()]
            assert chosen == [f"slurm-login{pool}"], (kind, pool)
    gpu, plain, first = (made["Service", f"slurm-ssh{name}"] for name in ("-gpu", "-plain", ""))
    assert gpu["metadata"]["annotations"] == {"lb": "internal"} and gpu["spec"]["type"] == "LoadBalancer"
    ports = [item["spec"]["ports"][0] for item in (gpu, plain, first)]
    assert [port["port"] for port in ports] == [2222, 22, 22]
    assert [port.get("nodePort") for port in ports] == [None, None, 30022], "a node port is one Service's"
    # Each pod has its name in the one headless Service.
    headless = made["Service", "slurm-login"]["spec"]["selector"]
    assert all(headless.items() <= own.items() for own in labels.values())
    assert all(made["StatefulSet", name]["spec"]["serviceName"] == "slurm-login" for name in labels)


SHARED = {"external-dns.alpha.kubernetes.io/hostname": "login.example.org"}


def test_no_pool_inherits_the_host_name_or_the_address_that_annotations_give_a_service() -> None:
    service = {"type": "NodePort", "annotations": SHARED, "loadBalancerSourceRanges": ["10.0.0.0/8"]}
    made = objects({"login": {"service": service, "pools": {"a": {}, "b": {"service": {"annotations": {"x": "y"}}}}}})
    given = [made["Service", f"slurm-ssh{name}"]["metadata"].get("annotations") for name in ("", "-a", "-b")]
    assert given == [SHARED, None, {"x": "y"}]
    # One that stays open to the same networks alone is a load balancer all the same.
    service["type"] = "LoadBalancer"
    made = objects({"login": {"service": service, "pools": {"a": {"service": {"annotations": {}}}}}})
    assert "annotations" not in made["Service", "slurm-ssh-a"]["metadata"]
    assert made["Service", "slurm-ssh-a"]["spec"]["loadBalancerSourceRanges"] == ["10.0.0.0/8"]


def login_pod(name: str, labels: Mapping[str, str]) -> Object:
    return {"kind": "Pod", "apiVersion": "v1", "metadata": {"name": name, "labels": {"app": "x", **labels}}}


def endpoints(*pods: str) -> Object:
    """Return what the Service slurm-ssh serves: pods, and an address that no pod has."""
    addresses = [{"ip": "10.0.0.1", "targetRef": {"kind": "Pod", "name": pod}} for pod in pods]
    return {
        "kind": "Endpoints",
        "apiVersion": "v1",
        "metadata": {"name": "slurm-ssh"},
        "subsets": [{"addresses": [*addresses, {"ip": "10.0.0.9"}]}],
    }


def upgrade(folder: Path, cluster: list[Object], pools: Mapping[str, Any]) -> dict[str, str]:
    values = {"slurm": {"auth": "slurm"}, "login": {"pools": pools}}
    with cluster_of(cluster, folder) as config, helm_python.Chart.load(CHART) as chart:
        return config.render(chart, values, name="slurm", namespace="hpc", is_upgrade=True)


def test_the_first_pool_waits_until_the_pods_that_serve_have_the_label_that_its_service_selects(tmp_path: Path) -> None:
    bare, labelled = login_pod("slurm-login-0", {}), login_pod("slurm-login-1", {"minivm.io/pool": "login"})
    cluster = [bare, labelled, endpoints("slurm-login-0", "slurm-login-1", "gone")]
    assert upgrade(tmp_path, cluster, {}), "without pools the Service selects as before"
    with pytest.raises(helm_python.HelmError) as refused:
        upgrade(tmp_path, cluster, {"gpu": {}})
    assert "the running pods lack (slurm-login-0), and new ssh connections would fail" in str(refused.value)
    labels = "app.kubernetes.io/instance=slurm,app.kubernetes.io/component=login"
    assert f"kubectl -n hpc label pod -l '{labels},!minivm.io/pool' minivm.io/pool=login" in str(refused.value)
    # The command selects the pods of `login` as they are without pools, and gives what the Service selects with pools.
    own = objects({})["StatefulSet", "slurm-login"]["spec"]["template"]["metadata"]["labels"]
    assert own.items() >= dict(pair.split("=") for pair in labels.split(",")).items()
    assert objects(POOLS)["Service", "slurm-ssh"]["spec"]["selector"] == own | {"minivm.io/pool": "login"}
    assert upgrade(tmp_path, [labelled, endpoints("slurm-login-1")], {"gpu": {}})
    # Nothing is served that could stop: a new cluster, or one whose login pods are not ready.
    assert upgrade(tmp_path, [], {"gpu": {}}) and upgrade(tmp_path, [bare, endpoints()], {"gpu": {}})


def test_ssh_in_the_cluster_knows_each_pools_service() -> None:
    public = {"sshHostKeys": {"public": ["ssh-ed25519 AAAA"]}, "workerHostKeys": {"public": ["ssh-ed25519 BBBB"]}}
    made = objects(POOLS | {"secrets": public})
    line = made["ConfigMap", "slurm-known-hosts"]["data"]["known_hosts"].splitlines()[0]
    names = line.split()[0].split(",")
    assert {"slurm-login-*", *(f"slurm-ssh{pool}{rest}" for pool in ("", "-gpu") for rest in ("", ".*"))} <= {*names}


def test_only_the_groups_that_a_pool_names_may_log_in() -> None:
    made = objects({"login": {"pools": {"gpu": OWN, "plain": None}}})
    assert made["ConfigMap", "slurm-allowed-groups-gpu"]["data"] == {"sshd.conf": 'AllowGroups "lab" "Domain Users"\n'}
    gpu, plain = made["StatefulSet", "slurm-login-gpu"], made["StatefulSet", "slurm-login-plain"]
    volumes = {item["name"]: item for item in gpu["spec"]["template"]["spec"]["volumes"]}
    # Without it the pod does not start.
    assert volumes["allowed-groups"] == {"name": "allowed-groups", "configMap": {"name": "slurm-allowed-groups-gpu"}}
    assert {
        "name": "allowed-groups",
        "mountPath": "/etc/ssh/sshd_config.d/10-allowed-groups.conf",
        "subPath": "sshd.conf",
        "readOnly": True,
    } in container(gpu)["volumeMounts"]
    assert env(gpu)["MINIVM_ALLOWED_GROUPS"] == "lab,Domain Users", "another list replaces the pods"
    assert "allowed-groups" not in yaml.safe_dump(plain) and ("ConfigMap", "slurm-allowed-groups") not in made


def test_groups_of_login_are_those_of_a_pool_without_its_own() -> None:
    made = objects({"login": {"allowedGroups": ["staff"], "pools": {"gpu": {"allowedGroups": ["lab"]}, "plain": {}}}})
    texts = {
        pool: made["ConfigMap", f"slurm-allowed-groups{pool}"]["data"]["sshd.conf"] for pool in ("", "-gpu", "-plain")
    }
    assert texts == {
        "": 'AllowGroups "staff"\n', "-gpu": 'AllowGroups "lab"\n', "-plain": 'AllowGroups "staff"\n',
    }  # fmt: skip
    assert objects({"login": {"allowedGroups": ["staff"]}})["ConfigMap", "slurm-allowed-groups"]["data"] == {
        "sshd.conf": 'AllowGroups "staff"\n'
    }


def test_a_key_without_a_value_opens_no_pool() -> None:
    pool = yaml.safe_load("allowedGroups:")
    made = objects({"login": {"allowedGroups": ["staff"], "pools": {"gpu": pool}}})
    assert made["ConfigMap", "slurm-allowed-groups-gpu"]["data"] == {"sshd.conf": 'AllowGroups "staff"\n'}
    assert env(made["StatefulSet", "slurm-login-gpu"])["MINIVM_ALLOWED_GROUPS"] == "staff"


def test_a_pool_keeps_its_sessions_where_others_do_not() -> None:
    values = AROUND | {"login": {"pools": {"long": {"keepSeconds": 7200, "graceSeconds": 90, "replicas": 2}}}}
    made = objects(values)
    deployments = [name for kind, name in made if kind == "Deployment"]
    assert deployments == ["slurm-login-long-0", "slurm-login-long-1"] and ("StatefulSet", "slurm-login") in made
    item = made["Deployment", "slurm-login-long-0"]
    selector, labels = item["spec"]["selector"]["matchLabels"], item["spec"]["template"]["metadata"]["labels"]
    assert selector == labels and labels["minivm.io/pool"] == "long" and labels["minivm.io/login"].endswith("long-0")
    assert item["spec"]["template"]["spec"]["subdomain"] == "slurm-login" and env(item)["MINIVM_KEEP_SESSIONS"] == "yes"
    assert env(made["StatefulSet", "slurm-login"]).get("MINIVM_KEEP_SESSIONS") is None
    # Rights are for pods by name: those of the pool that keeps are not known.
    (conditions,) = made["Role", "slurm-pod-conditions-login"]["rules"]
    assert conditions["resourceNames"] == ["slurm-login-0"] and ("Role", "slurm-login-stay") in made
    gates = [made[key]["spec"]["template"]["spec"].get("readinessGates") for key in (
        ("StatefulSet", "slurm-login"), ("Deployment", "slurm-login-long-0"))]  # fmt: skip
    assert [bool(gate) for gate in gates] == [True, False]
    made = objects(values | {"fleet": {"enabled": True}})
    status = [rule for rule in made["Role", "slurm-fleet"]["rules"] if rule["resources"] == ["pods/status"]]
    assert [rule.get("resourceNames") for rule in status] == [None]
    # The first login pods may keep theirs where a pool does not.
    made = objects({"login": {"keepSeconds": 7200, "pools": {"short": {"keepSeconds": 0}}}})
    assert ("StatefulSet", "slurm-login-short") in made and ("Deployment", "slurm-login-0") in made


def test_rights_by_name_are_for_the_pods_of_all_pools() -> None:
    pods = {f"slurm-login{pool}-{i}" for pool in ("", "-gpu", "-plain") for i in range(2)}
    (conditions,) = objects(AROUND | POOLS)["Role", "slurm-pod-conditions-login"]["rules"]
    assert set(conditions["resourceNames"]) == pods
    fleet = objects(AROUND | POOLS | {"fleet": {"enabled": True}})["Role", "slurm-fleet"]["rules"]
    (status,) = [rule for rule in fleet if "slurm-controller-0" in rule.get("resourceNames", ())]
    assert pods < set(status["resourceNames"])


def test_an_uninstall_ends_kept_sessions_of_each_pool_within_its_grace(tmp_path: Path) -> None:
    login = {"keepSeconds": 3600, "graceSeconds": 60, "pools": {"long": {"graceSeconds": 90}}}
    made = render_with_hooks({"login": login}, tmp_path)
    (job,) = [item for item in made if item["kind"] == "Job" and item["metadata"]["name"] == "slurm-uninstall"]
    assert job["spec"]["template"]["spec"]["containers"][0]["args"][-3:] == [
        "Deployment/slurm-login-0=60", "Deployment/slurm-login-long-0=90",
        "Leaving/app.kubernetes.io/name=minivm,app.kubernetes.io/instance=slurm,app.kubernetes.io/component=login=90",
    ]  # fmt: skip


def render_with_hooks(values: dict[str, Any], folder: Path) -> list[Document]:
    """Render the uninstall Job too: Helm alone gets it, and `helm template` knows an API that no cluster has."""
    chart = copytree(CHART, folder / "chart")
    page = chart / "templates/uninstall.yaml"
    page.write_text(page.read_text().replace('not (.Capabilities.APIVersions.Has "apps/v1beta1")', "true"))
    return documents(render_texts(values, release="slurm", namespace="hpc", chart=chart))


def documents(texts: dict[str, str]) -> list[Document]:
    return [item for name, text in texts.items() if name.endswith(".yaml") for item in yaml.safe_load_all(text) if item]


def test_the_notes_name_each_pool_with_its_service_and_groups() -> None:
    texts = render_texts(POOLS, release="slurm", namespace="hpc")
    (notes,) = (text for name, text in texts.items() if name.endswith("NOTES.txt"))
    assert "# gpu, for members of lab, Domain Users\n  ssh -p 2222 USER@ADDRESS" in notes
    for service in ("slurm-ssh", "slurm-ssh-gpu", "slurm-ssh-plain"):
        assert re.search(rf"get service {service}$", notes, re.MULTILINE), service


@pytest.mark.parametrize("version", ["v1.20.0", "v1.31.0"])
def test_pools_render_for_old_and_new_kubernetes(version: str) -> None:
    texts = rendered_for(version, POOLS, release="slurm", namespace="hpc")
    names = [(item["kind"], item["metadata"]["name"]) for item in documents(texts)]
    assert len(names) == len(set(names)) and ("StatefulSet", "slurm-login-gpu") in names


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"login": {"pools": {"login": {}}}}, "login.pools.login: `login` is the pool that the settings beside"),
        ({"login": {"pools": {"worker": {}}}}, "login.pools.worker: workers.pools has a pool worker too"),
        ({"login": {"pools": {"a": {}}}, "workers": {"pools": {"login-a": {}}}},
         "login.pools.a: its StatefulSet would have the name of that of workers.pools.login-a"),
        ({"login": {"pools": {"a": {}}}, "workers": {"pools": {"ssh-a": {}}}},
         "login.pools.a: its Service would have the name of that of workers.pools.ssh-a"),
        ({"login": {"pools": {"a" * 39: {}}}}, "take 50 characters before the number, not 51: choose a shorter name"),
        ({"login": {"pools": {"A": {}}}}, "login.pools: no such key: 'A'"),
        ({"login": {"pools": {"a": {"replicas": 0}}}}, "login.pools.a.replicas: it must be at least 1, not 0"),
        ({"login": {"pools": {"a": {"pools": {}}}}}, "login.pools.a: no such key: 'pools'"),
        ({"login": {"pools": {"a": {"allowedGroups": []}}}},
         "login.pools.a.allowedGroups: an empty list would let nobody in: name groups, or leave it out"),
        ({"login": {"allowedGroups": []}}, "login.allowedGroups: an empty list would let nobody in"),
        ({"login": {"pools": {"a": {"allowedGroups": ["root"]}}}}, "login.pools.a.allowedGroups: root is no group of"),
        ({"login": {"pools": {"a": {"allowedGroups": ["20000"]}}}}, "allowedGroups: 20000 is a number, and sshd"),
        *(({"login": {"pools": {"a": {"allowedGroups": ["lab", bad]}}}}, "is no name of a group: write letters")
          for bad in ("", "*", "la?", "!lab", 'a" "b', "a\nPermitRootLogin yes", " lab", "lab ", "a,b", "a\\b")),
        ({"login": {"pools": {"a": {"allowedGroups": ["lap"]}}}, "people": {"groups": [{"name": "lab", "gid": 5000}]}},
         "login.pools.a.allowedGroups: lap is no group of people.groups, which has lab"),
        ({"login": {"allowedGroups": ["lap"]},
          "people": {"groups": [], "users": [{"name": "ada", "uid": 5001, "group": "lab"}]}},
         "login.allowedGroups: lap is no group of people.groups, which has none"),
        ({"login": {"service": {"type": "LoadBalancer", "annotations": SHARED}, "pools": {"a": {}}}},
         "login.pools.a.service.annotations: missing, and those of login.service are not inherited"),
        ({"login": {"pools": {"a": {"keepSeconds": 30}}}}, "login.pools.a.keepSeconds: 0, or at least"),
        ({"login": {"pools": {"a": {"podLabels": {"minivm.io/pool": "b"}}}}},
         "login.pools.a.podLabels: minivm.io/pool is a label that minivm sets"),
        ({"login": {"pools": {"a": {"extraVolumeMounts": [{"name": "x", "mountPath": "/x"}]}}}},
         "login.pools.a.extraVolumeMounts: x is not in extraVolumes"),
        ({"login": {"service": {"type": "NodePort", "nodePort": 30022},
                    "pools": {"a": {"service": {"nodePort": 30022}}}}},
         "service.nodePort: 30022 is the port of"),
    ],
)  # fmt: skip
def test_a_mistake_is_refused_with_its_field_and_what_to_do(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ClusterError, match=re.escape(said)):
        render(values, release="slurm", namespace="hpc")


def test_one_machine_runs_a_pod_of_each_pool_with_its_file_of_groups(tmp_path: Path) -> None:
    pools = {"gpu": {"allowedGroups": ["lab"], "service": {"nodePort": 2233}}, "plain": {}}
    values = local_values(Options(overrides={"login": {"pools": pools}}), KEYS)
    known = manifests.parse(chart_render.render(new(values), release=RELEASE, namespace=NAMESPACE), namespace=NAMESPACE)
    assert {"slurm-login-0", "slurm-login-gpu-0", "slurm-login-plain-0"} <= {pod.name for pod in known.pods}
    ports = {service.name: service.node_port and service.node_port[0] for service in known.services}
    assert (ports["slurm-ssh"], ports["slurm-ssh-gpu"], ports["slurm-ssh-plain"]) == (2222, 2233, None)
    (mount,) = (mount for mount in known.pod("slurm-login-gpu-0").mounts if mount.sub_path == "sshd.conf")
    assert mount.path == "/etc/ssh/sshd_config.d/10-allowed-groups.conf" and mount.volume.of.endswith("groups-gpu")
    pod, kubelet = known.pod("slurm-login-gpu-0"), Kubelet(None, "test", tmp_path)
    kubelet.publish_files(pod, known)
    file = Path(kubelet.docker_mount(pod, mount)["Source"])
    assert file.read_text() == 'AllowGroups "lab"\n', "the file, not its directory"


@pytest.mark.parametrize(
    ("login", "field"),
    [({"keepSeconds": 60}, "login"), ({"pools": {"long": {"keepSeconds": 60}, "x": None}}, "login.pools.long")],
)
def test_one_machine_refuses_a_pool_that_keeps_its_sessions(login: dict[str, Any], field: str) -> None:
    with pytest.raises(ClusterError, match=rf"{re.escape(field)}\.keepSeconds"):
        local_values(Options(overrides={"login": login}), KEYS)
