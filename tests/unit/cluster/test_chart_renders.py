"""The chart, rendered by Helm's own engine over its example values: lint, schemas, and what each object contains."""

from __future__ import annotations

import base64
import contextlib
import json
import re
import shutil
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import helm_python
import kubernetes_validate  # type: ignore[import-untyped]  # it has no stubs
import pytest
import yaml

from cluster import ClusterError
from cluster import render as chart_render
from cluster.render import CHART, Document
from gitsync.settings import PREFIX, GitsyncSettings
from health.policy import broker_policy
from init.helpers.retire_workers import parse as parse_retirement
from tests.helm import rendered_for
from tests.support.rendered_chart import new, render, render_texts

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = sorted(path.stem for path in (CHART / "examples").glob("*.yaml"))
# Custom resources of operators: the schemas of Kubernetes do not contain them.
CUSTOM = {"PodMonitor", "PrometheusRule"}
OWN_PARTS = {
    "extraVolumes": [{"name": "scratch", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "scratch", "mountPath": "/scratch"}],
    "initContainers": [{"name": "before", "image": "tools:1"}],
    "sidecars": [{"name": "beside", "image": "tools:2"}],
    "podLabels": {"team": "a"},
    "schedulerName": "other",
    "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}],
}


def example(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((CHART / "examples" / f"{name}.yaml").read_text())
    return loaded


def test_two_controllers_share_the_state_and_no_pod_is_behind_the_moving_address() -> None:
    two = {"accounting": {"mode": "none"}, "controller": {"replicas": 2, "moveAddress": True}}
    documents = render(two, release="slurm", namespace="hpc")
    (spec,) = [item["spec"] for item in documents if item["metadata"]["name"] == "slurm-controller"
               and item["kind"] == "StatefulSet"]  # fmt: skip
    pod, container = spec["template"]["spec"], spec["template"]["spec"]["containers"][0]
    assert spec["replicas"] == 2
    mounts = {item["mountPath"]: item["name"] for item in container["volumeMounts"]}
    assert mounts["/var/spool/slurmctld"] == mounts["/var/lib/minivm/slurm"] == "shared"
    claims = {item["name"]: item.get("persistentVolumeClaim") for item in pod["volumes"]}
    # The claim that a single controller has: nothing is copied on the way there or back.
    assert claims["shared"] == {"claimName": "state-slurm-controller-0"}
    assert {"NET_ADMIN", "NET_RAW"} <= set(container["securityContext"]["capabilities"]["add"])
    env = {item["name"]: item.get("value") for item in container["env"]}
    assert env["MINIVM_CONTROLLERS"] == "2" and env["MINIVM_LEASE_ADDRESS"] == "holder"
    (service,) = [item for item in documents if item["metadata"]["name"] == "slurm-slurmctld"]
    assert "selector" not in service["spec"]


@pytest.mark.parametrize(
    ("volume", "source"),
    [
        ({}, None),
        ({"claim": "copies"}, {"persistentVolumeClaim": {"claimName": "copies"}}),
        ({"nfs": {"server": "nas", "path": "/copies"}}, {"nfs": {"server": "nas", "path": "/copies"}}),
    ],
)
def test_copies_of_the_accounting_pod_are_apart_from_the_controllers(
    volume: dict[str, Any], source: dict[str, Any] | None
) -> None:
    backups = {"every": "12h", "keep": 3, "volume": volume}
    values = {"accounting": {"mode": "pod", "pod": {"backups": backups}}, "controller": {"backups": backups}}
    documents = render(values, release="slurm", namespace="hpc")
    pods = {
        item["metadata"]["name"]: item["spec"]["template"]["spec"]
        for item in documents
        if item["kind"] == "StatefulSet"
    }
    places = []
    for name in ("slurm-accounting", "slurm-controller"):
        (container,) = pods[name]["containers"]
        (mount,) = (item for item in container["volumeMounts"] if item["mountPath"] == "/var/lib/minivm/backups")
        places.append((mount["name"], mount.get("subPath")))
        env = {item["name"]: item.get("value") for item in container["env"]}
        assert (env["MINIVM_BACKUP_EVERY"], env["MINIVM_BACKUP_KEEP"]) == ("12h", "3")
        sources = [item for item in pods[name]["volumes"] if item["name"] == "backups"]
        assert sources == ([{"name": "backups", **source}] if source else [])
    own = "backups" if source else "records"
    assert places[0] == (own, "accounting-backups") and places[1][1] in ("backups", None)


SHARED = {"replicas": 2, "persistence": {"existingClaim": "shared-state"}}


def test_two_controllers_on_kubernetes_are_apart_and_the_acting_one_writes_the_only_endpoint() -> None:
    values = {"accounting": {"mode": "none"}, "podConditions": {"enabled": True}, "controller": SHARED}
    documents = render(values, release="slurm", namespace="hpc")
    objects = {(item["kind"], item["metadata"]["name"]): item for item in documents}
    spec = objects["StatefulSet", "slurm-controller"]["spec"]
    pod, container = spec["template"]["spec"], spec["template"]["spec"]["containers"][0]
    assert spec["replicas"] == 2 and [item["metadata"]["name"] for item in spec["volumeClaimTemplates"]] == ["state"]
    mounts = {item["mountPath"]: item["name"] for item in container["volumeMounts"]}
    assert mounts["/var/spool/slurmctld"] == mounts["/var/lib/minivm/backups"] == "shared"
    volumes = {item["name"]: item for item in pod["volumes"]}
    assert volumes["shared"]["persistentVolumeClaim"] == {"claimName": "shared-state"}
    assert mounts["/mnt/minivm/secrets/api"] == "api" and volumes["api"]["projected"]["defaultMode"] == 0o400
    assert "NET_ADMIN" not in container["securityContext"]["capabilities"]["add"]
    env = {item["name"]: item.get("value", item.get("valueFrom")) for item in container["env"]}
    assert (env["MINIVM_CONTROLLERS"], env["MINIVM_LEASE_ADDRESS"]) == ("2", "endpointslice")
    assert env["MINIVM_POD_UID"] == {"fieldRef": {"fieldPath": "metadata.uid"}}
    (apart,) = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    labels = spec["selector"]["matchLabels"]
    assert apart == {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": labels}}
    selector = objects["Service", "slurm-slurmctld"]["spec"]["selector"]
    assert selector.items() > labels.items() and not selector.items() <= spec["template"]["metadata"]["labels"].items()
    assert objects["PodDisruptionBudget", "slurm-controller"]["spec"]["maxUnavailable"] == 1
    (right,) = objects["Role", "slurm-controller-address"]["rules"]
    assert right["resourceNames"] == ["slurm-slurmctld-active"] and right["verbs"] == ["get", "create", "patch"]
    (status,) = objects["Role", "slurm-pod-conditions-controller"]["rules"]
    assert status["resourceNames"] == ["slurm-controller-0", "slurm-controller-1"]


def test_an_operators_own_rule_for_where_controllers_run_is_kept() -> None:
    own: dict[str, Any] = {
        "podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []},
        "nodeAffinity": {},
    }
    values = {"accounting": {"mode": "none"}, "controller": {**SHARED, "affinity": own}}
    (found,) = [
        item["spec"]["template"]["spec"]["affinity"] for item in render(values, release="slurm", namespace="hpc")
        if item["metadata"]["name"] == "slurm-controller" and item["kind"] == "StatefulSet"
    ]  # fmt: skip
    assert found == own


def test_a_single_controller_may_have_its_state_on_the_claim_that_two_will_share() -> None:
    one = {"controller": {"persistence": {"existingClaim": "shared-state"}}}
    (spec,) = [
        item["spec"]["template"]["spec"] for item in render(one, release="slurm", namespace="hpc")
        if item["metadata"]["name"] == "slurm-controller" and item["kind"] == "StatefulSet"
    ]  # fmt: skip
    mounts = {item["mountPath"]: item["name"] for item in spec["containers"][0]["volumeMounts"]}
    assert (mounts["/var/spool/slurmctld"], mounts["/var/lib/mysql"]) == ("shared", "state")
    # By which the pod sees a state that was not moved to the claim.
    (own,) = [item for item in spec["containers"][0]["volumeMounts"] if item["mountPath"] == "/mnt/minivm/own-state"]
    assert own == {"name": "state", "mountPath": "/mnt/minivm/own-state", "subPath": "slurmctld", "readOnly": True}
    # By which it sees the state of another operator's controller.
    (top,) = [item for item in spec["containers"][0]["volumeMounts"] if item["mountPath"] == "/mnt/minivm/claim"]
    assert top == {"name": "shared", "mountPath": "/mnt/minivm/claim", "readOnly": True}
    assert "affinity" not in spec and "/mnt/minivm/secrets/api" not in mounts


@pytest.mark.parametrize("uid", [None, 401])
def test_slurms_user_has_one_number_in_all_pods(uid: int | None) -> None:
    documents = render({"slurm": {"uid": uid}}, release="slurm", namespace="hpc")
    pods = [item for kind_ in ("StatefulSet", "Deployment") for item in kind(documents, kind_)]
    assert {env(item).get("MINIVM_SLURM_UID") for item in pods} == {None if uid is None else str(uid)}


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"accounting": {"mode": "none"}, "controller": {"replicas": 2}}, "persistence.existingClaim is empty"),
        ({"controller": SHARED}, "its database lives in one controller's pod"),
        ({"accounting": {"mode": "none"}, "controller": {**SHARED, "stableAddress": False}}, "stableAddress is false"),
        ({"controller": {"replicas": 2, "moveAddress": True}}, "its database lives in one controller's pod"),
        (
            {
                "accounting": {"mode": "none"},
                "controller": {"replicas": 2, "moveAddress": True, "stableAddress": False},
            },
            "the address of one pod cannot move",
        ),
        ({"controller": {"replicas": 3}}, "replicas"),
    ],
)
def test_two_controllers_that_cannot_work_are_refused(values: dict[str, Any], reason: str) -> None:
    with pytest.raises(ClusterError, match=reason):
        render(values, release="slurm", namespace="hpc")


def test_the_controller_is_told_which_workers_there_are() -> None:
    pools = {"gpu": {"replicas": 4}, "cpu": {}}
    documents = render({"workers": {"pools": pools}}, release="slurm", namespace="hpc")
    sets = {item["metadata"]["name"]: item["spec"]["replicas"] for item in documents if item["kind"] == "StatefulSet"}
    (config,) = [item for item in documents if item["metadata"]["name"] == "slurm-config"]
    told = json.loads(config["data"]["pools.json"])
    assert told == {"release": "slurm", "pools": {name: sets[name] for name in ("slurm-gpu", "slurm-cpu")}}


LOGINS, WORKERS = "slurm-login,slurm-login.*,slurm-login-*", "slurm-cpu-*,[slurm-gpu-*]:2222"
POOLS = {"workers": {"pools": {"gpu": {"ports": {"ssh": 2222}}, "cpu": {}}}}


def known_hosts(values: dict[str, Any]) -> tuple[str | None, list[str], list[dict[str, Any]]]:
    """Return the known_hosts text, the arguments of the Job that writes it, and all rules of that Job's Role."""
    documents = render(POOLS | values, release="slurm", namespace="hpc")
    (found,) = [item for item in documents if item["metadata"]["name"] == "slurm-known-hosts"]
    assert found["kind"] == "ConfigMap", "nothing of it is secret"
    words: list[str] = []
    rules: list[dict[str, Any]] = []
    for job in kind(documents, "Job"):
        args = job["spec"]["template"]["spec"]["containers"][0]["args"]
        words = args[args.index("--known-hosts") :] if "--known-hosts" in args else []
        (rules,) = [role["rules"] for role in kind(documents, "Role") if role["metadata"]["name"] == "slurm-keys"]
    return (found.get("data") or {}).get("known_hosts"), words, rules


def test_the_clusters_own_pods_are_known_to_ssh_in_it() -> None:
    """SSH in the cluster knows the cluster's pods by every name that users type, and no other host.

    Each pool of pods has its own key, which the Job reads in its Secret.
    """
    text, words, rules = known_hosts({})
    assert text is None
    secrets = [f"{LOGINS}=slurm-ssh-host-keys", f"{WORKERS}=slurm-worker-host-keys"]
    assert words == ["--known-hosts", "slurm-known-hosts", *secrets]
    assert rules[-1] == {
        "apiGroups": [""], "resources": ["configmaps"], "verbs": ["patch"], "resourceNames": ["slurm-known-hosts"],
    }  # fmt: skip


def test_of_a_secret_that_somebody_else_fills_the_job_only_reads() -> None:
    """The keys Job only reads a Secret that the user provides, and still creates the workers' Secret.

    This is the case after an upgrade: older charts had one Secret for all pods, and the values name it.
    """
    _, words, rules = known_hosts({"secrets": {"sshHostKeys": {"existingSecret": "hpc-ssh"}}})
    assert words[2:] == [f"{LOGINS}=hpc-ssh", f"{WORKERS}=slurm-worker-host-keys"]
    assert [(rule["verbs"], "hpc-ssh" in rule["resourceNames"]) for rule in rules] == [
        (["get", "patch"], False), (["get"], True), (["patch"], False),
    ]  # fmt: skip


def test_public_halves_that_the_values_say_are_written_without_a_job() -> None:
    logins, workers = ["ssh-ed25519 AAAA me@here now", "ssh-rsa BBBB="], ["ssh-ed25519 CCCC"]
    said = {"sshHostKeys": {"public": logins}, "workerHostKeys": {"public": workers}}
    lines = f"{LOGINS} ssh-ed25519 AAAA\n{LOGINS} ssh-rsa BBBB=\n{WORKERS} ssh-ed25519 CCCC\n"
    text, words, rules = known_hosts({"secrets": said})
    assert (text, words) == (lines, [])
    assert [rule["resources"] for rule in rules] == [["secrets"]]
    text, words, _ = known_hosts({"secrets": {"sshHostKeys": {"public": logins}}})
    assert text is None, "one file has one writer"
    assert words[2:] == [*(f"{LOGINS}={key}" for key in logins), f"{WORKERS}=slurm-worker-host-keys"]
    with pytest.raises(ClusterError, match="public"):
        known_hosts({"secrets": {"sshHostKeys": {"public": ["ssh-ed25519 AAAA\n* ssh-ed25519 EVIL"]}}})


def test_clients_reach_the_controller_by_an_address_that_outlives_its_pod() -> None:
    """Clients use a Service with a stable clusterIP.

    The StatefulSet keeps the headless Service, because neither its name nor a clusterIP of `None` can be changed later.
    """
    documents = render({}, release="slurm", namespace="hpc")
    services = {item["metadata"]["name"]: item["spec"] for item in kind(documents, "Service")}
    (controller,) = [item for item in kind(documents, "StatefulSet") if item["metadata"]["name"] == "slurm-controller"]
    assert controller["spec"]["serviceName"] == "slurm-controller"
    assert services["slurm-controller"]["clusterIP"] == "None"
    stable = services["slurm-slurmctld"]
    # A pod that stops leaves the address at once, and answers for some seconds what still comes.
    assert "clusterIP" not in stable and "publishNotReadyAddresses" not in stable
    assert container(controller)["lifecycle"]["preStop"]["exec"]["command"] == ["sh", "-c", "minivm drain; sleep 3"]
    assert container(controller)["readinessProbe"]["failureThreshold"] == 2
    assert stable["selector"] == services["slurm-controller"]["selector"]
    assert {port["name"]: port["port"] for port in stable["ports"]} == {
        "slurmctld": 6817,
        "slurmdbd": 6819,
        "http": 8650,
    }
    conf = slurm_conf_of(documents)
    assert "SlurmctldHost=slurm-controller-0(slurm-slurmctld)" in conf
    assert "AccountingStorageHost=slurm-slurmctld" in conf
    hosts = {
        (item["metadata"]["name"], variable["value"])
        for item in kind(documents, "StatefulSet")
        for variable in item["spec"]["template"]["spec"]["containers"][0]["env"]
        if variable["name"] == "MINIVM_CONTROLLER"
    }
    assert hosts == {(f"slurm-{name}", "slurm-slurmctld") for name in ("controller", "login", "worker")}


def test_a_network_that_hides_sources_has_the_pods_own_address() -> None:
    documents = render({"controller": {"stableAddress": False}}, release="slurm", namespace="hpc")
    assert "slurm-slurmctld" not in {item["metadata"]["name"] for item in kind(documents, "Service")}
    conf = slurm_conf_of(documents)
    assert "SlurmctldHost=slurm-controller-0(slurm-controller)" in conf
    assert "AccountingStorageHost=slurm-controller" in conf


def slurm_conf_of(documents: list[Document]) -> list[str]:
    (config,) = [item for item in documents if item["metadata"]["name"] == "slurm-config"]
    return str(config["data"]["slurm.conf"]).splitlines()


def test_a_render_without_a_cluster_has_no_hook() -> None:
    """A plain render contains no hook: `helm template` prints hooks too, and `kubectl apply` would run the stop Job."""
    for name in EXAMPLES:
        assert not [item for item in rendered(name) if "helm.sh/hook" in item["metadata"].get("annotations", {})]


def hooks(tmp_path: Path, values: dict[str, Any]) -> dict[str, Document]:
    """Return the uninstall hooks that Helm stores, by kind, as rendered on a cluster."""
    chart = tmp_path / "chart"
    shutil.copytree(CHART, chart)
    page = chart / "templates/uninstall.yaml"
    text = page.read_text()
    assert text.count('(.Capabilities.APIVersions.Has "apps/v1beta1")') == 1
    page.write_text(text.replace('not (.Capabilities.APIVersions.Has "apps/v1beta1")', "true"))
    texts = render_texts(values, release="slurm", namespace="hpc", chart=chart)
    (found,) = (text for name, text in texts.items() if name.endswith("/uninstall.yaml"))
    documents = [item for item in yaml.safe_load_all(found) if item]
    assert all(item["metadata"]["annotations"]["helm.sh/hook"] == "pre-delete" for item in documents)
    return {item["kind"]: item for item in documents}


LEAVING = "Leaving/app.kubernetes.io/name=minivm,app.kubernetes.io/instance=slurm,app.kubernetes.io/component=login=60"


def test_an_uninstall_stops_the_workers_first(tmp_path: Path) -> None:
    pools = {"cpu": {}, "gpu": {"kind": "WorkerPool", "graceSeconds": 900, "drainSeconds": 800}}
    fleet = {"enabled": True, "workerPools": {"enabled": True}}
    found = hooks(tmp_path, {"workers": {"pools": pools}, "fleet": fleet})
    assert set(found) == {"ServiceAccount", "Role", "RoleBinding", "Job"}
    (container,) = found["Job"]["spec"]["template"]["spec"]["containers"]
    limit, selector, *stopped = container["args"]
    assert (limit, stopped) == ("930", ["StatefulSet/slurm-cpu", "WorkerPool/slurm-gpu", LEAVING])
    labels = dict(pair.split("=") for pair in selector.split(","))
    (pool,) = (
        item for item in kind(list(rendered("minimal")), "StatefulSet") if item["metadata"]["name"].endswith("-worker")
    )
    assert (
        labels.items()
        <= (pool["spec"]["template"]["metadata"]["labels"] | {"app.kubernetes.io/instance": "slurm"}).items()
    )
    assert found["Role"]["rules"] == [
        {
            "apiGroups": ["apps"],
            "resources": ["statefulsets/scale"],
            "verbs": ["patch"],
            "resourceNames": ["slurm-cpu"],
        },
        {"apiGroups": ["minivm.io"], "resources": ["workerpools"], "verbs": ["delete"], "resourceNames": ["slurm-gpu"]},
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["delete"]},
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]},
    ]
    # The account exists before the Job, and is deleted with it.
    weights = {kind: item["metadata"]["annotations"].get("helm.sh/hook-weight", "0") for kind, item in found.items()}
    assert weights == {"ServiceAccount": "-5", "Role": "-5", "RoleBinding": "-5", "Job": "0"}
    assert all(
        "hook-succeeded" in item["metadata"]["annotations"]["helm.sh/hook-delete-policy"] for item in found.values()
    )


def test_login_pods_that_keep_their_sessions_have_new_ones_beside_them(tmp_path: Path) -> None:
    """One Deployment a pod, each with a name in DNS that another template changes, and no right that names pods."""
    values: dict[str, Any] = {"podConditions": {"enabled": True}, "login": {"keepSeconds": 43200, "replicas": 2}}
    names = []
    for login in ({}, {"env": {"A": "b"}}, {"podAnnotations": {"a": "b"}}):
        documents = render({**values, "login": values["login"] | login}, release="slurm", namespace="hpc")
        made = [item for item in kind(documents, "Deployment") if "login" in item["metadata"]["name"]]
        assert [item["metadata"]["name"] for item in made] == ["slurm-login-0", "slurm-login-1"]
        assert not [item for item in kind(documents, "StatefulSet") if item["metadata"]["name"] == "slurm-login"]
        for item in made:
            spec = item["spec"]["template"]["spec"]
            env = {each["name"]: each.get("value") for each in spec["containers"][0]["env"]}
            assert item["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
            assert spec["terminationGracePeriodSeconds"] == 43200 == int(env["MINIVM_GRACE_SECONDS"])
            assert env["MINIVM_KEEP_SESSIONS"] == "yes" and spec["subdomain"] == "slurm-login"
            assert "readinessGates" not in spec
            # What is no planned end has the ordinary grace: a hung PID 1 is not waited for for hours.
            assert env["MINIVM_SHORT_GRACE_SECONDS"] == "60"
            (main, *_) = spec["containers"]
            assert {main[each]["terminationGracePeriodSeconds"] for each in ("livenessProbe", "startupProbe")} == {60}
            # A kubelet renews a token after a day or four fifths of its time, and none of a pod that leaves.
            (own,) = [each for each in spec["volumes"] if each["name"] == "own-pod"]
            (seconds,) = [each["serviceAccountToken"]["expirationSeconds"] for each in own["projected"]["sources"]
                          if "serviceAccountToken" in each]  # fmt: skip
            assert seconds - min(24 * 3600, seconds * 4 // 5) > 43200
            names.append(spec["hostname"])
    assert len(set(names)) == 6 and all(len(name) <= 63 for name in names)
    roles = {item["metadata"]["name"] for item in kind(documents, "Role")}
    assert "slurm-login-stay" in roles and "slurm-pod-conditions-login" not in roles
    job = hooks(tmp_path, values)["Job"]["spec"]["template"]["spec"]["containers"][0]
    assert job["args"][-3:-1] == ["Deployment/slurm-login-0=60", "Deployment/slurm-login-1=60"]


@pytest.mark.parametrize(("version", "seconds"), [("v1.24.17", None), ("v1.25.0-gke.1", 60)])
def test_a_probe_names_a_grace_period_where_kubernetes_knows_it(version: str, seconds: int | None) -> None:
    texts = rendered_for(version, {"login": {"keepSeconds": 43200}}, release="slurm", namespace="hpc")
    (made,) = (yaml.safe_load(text) for name, text in texts.items() if name.endswith("/login.yaml"))
    probes = made["spec"]["template"]["spec"]["containers"][0]
    assert probes["livenessProbe"].get("terminationGracePeriodSeconds") == seconds


def test_an_uninstall_ends_login_pods_that_leave_since_older_values(tmp_path: Path) -> None:
    """`keepSeconds` back at 0: pods that leave are nobody's, and would stay for hours beside nothing."""
    documents = render({"login": {"keepSeconds": 43200}}, release="slurm", namespace="hpc")
    (made,) = [item for item in kind(documents, "Deployment") if "login" in item["metadata"]["name"]]
    found = hooks(tmp_path, {})
    word = found["Job"]["spec"]["template"]["spec"]["containers"][0]["args"][-1]
    _, _, words = parse_retirement(["1", "app=x", word])
    selector, _, grace = words[0][1].rpartition("=")
    labels = dict(pair.split("=") for pair in selector.split(","))
    assert words[0][0] == "Leaving" and grace == "60"
    assert labels.items() <= made["spec"]["template"]["metadata"]["labels"].items()
    assert {"apiGroups": [""], "resources": ["pods"], "verbs": ["delete"]} in found["Role"]["rules"]


@pytest.mark.parametrize(("seconds", "is_taken"), [(0, True), (19, False), (59, False), (60, True), (82800, True)])
def test_sessions_are_not_kept_for_less_than_a_pods_ordinary_end(seconds: int, is_taken: bool) -> None:
    with contextlib.nullcontext() if is_taken else pytest.raises(ClusterError, match="keepSeconds: 0, or at least"):
        render({"login": {"keepSeconds": seconds}}, release="slurm", namespace="hpc")


def test_no_worker_mounts_the_logins_host_keys() -> None:
    """Workers have a host key Secret of their own; the logins' key stays in the Secret that older charts used."""
    mounted = {}
    for item in kind(render(POOLS, release="slurm", namespace="hpc"), "StatefulSet"):
        volumes = item["spec"]["template"]["spec"]["volumes"]
        secrets = {volume["secret"]["secretName"] for volume in volumes if "secret" in volume}
        mounted[item["metadata"]["name"]] = {name for name in secrets if "host-keys" in name}
    assert mounted == {
        "slurm-controller": set(), "slurm-login": {"slurm-ssh-host-keys"},
        "slurm-cpu": {"slurm-worker-host-keys"}, "slurm-gpu": {"slurm-worker-host-keys"},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("slurm", "plugin"),
    [
        ({}, "cli_filter/lua"),
        ({"files": {"oci.conf": "RunTimeRun=crun run %n"}}, "cli_filter/lua"),
        # A filter that the site provides is left alone, also when no setting names it.
        ({"files": {"cli_filter.lua": "--"}}, ""),
        ({"files": {"cli_filter.lua": "--"}, "config": {"CliFilterPlugins": "cli_filter/lua"}}, "cli_filter/lua"),
        ({"config": {"CliFilterPlugins": "cli_filter/user_defaults"}}, "cli_filter/user_defaults"),
        ({"config": {"CliFilterPlugins": None}}, ""),
    ],
)
def test_commands_are_filtered_where_the_site_has_no_filter_of_its_own(slurm: dict[str, Any], plugin: str) -> None:
    documents = render({"slurm": slurm}, release="slurm", namespace="hpc")
    (config,) = [item for item in documents if item["metadata"]["name"] == "slurm-config"]
    said = [line for line in config["data"]["slurm.conf"].splitlines() if line.startswith("CliFilterPlugins=")]
    assert said == ([f"CliFilterPlugins={plugin}"] if plugin else [])
    ours = "slurm_cli_pre_submit" in config["data"].get("cli_filter.lua", "")
    assert ours == (plugin == "cli_filter/lua" and "cli_filter.lua" not in slurm.get("files", {}))


@pytest.mark.parametrize(
    ("values", "has"),
    [
        ({}, "containers = false, accounting = true, mail = false"),
        ({"containers": {"enabled": True}}, "containers = true, accounting = true, mail = false"),
        ({"slurm": {"files": {"oci.conf": "-"}}}, "containers = true, accounting = true, mail = false"),
        ({"accounting": {"mode": "none"}}, "containers = false, accounting = false, mail = false"),
        (
            {"accounting": {"mode": "none"}, "slurm": {"config": {"accountingstoragetype": "x/slurmdbd"}}},
            "containers = false, accounting = true, mail = false",
        ),
        ({"slurm": {"extraConfig": "mailprog=/usr/sbin/mail"}}, "containers = false, accounting = true, mail = true"),
    ],
)  # fmt: skip
def test_the_filter_knows_what_the_cluster_has(values: dict[str, Any], has: str) -> None:
    documents = render(values, release="slurm", namespace="hpc")
    (config,) = [item for item in documents if item["metadata"]["name"] == "slurm-config"]
    first, *_ = config["data"]["cli_filter.lua"].splitlines()
    rest = 'addresses = false, mpi = {"pmix", "pmi2"}, release = "24.11", brings_back = true, enforces = false'
    assert first == f"local has = {{{has}, {rest}}}"


def test_the_filter_knows_what_mpi_the_controllers_release_has() -> None:
    documents = render({"image": {"tags": {"controller": "26.05.5-debian-a"}}}, release="slurm", namespace="hpc")
    (config,) = [item for item in documents if item["metadata"]["name"] == "slurm-config"]
    first, *_ = config["data"]["cli_filter.lua"].splitlines()
    assert first.endswith('mpi = {"pmi2"}, release = "26.05", brings_back = true, enforces = false}')


@cache
def rendered(name: str) -> tuple[Document, ...]:
    return tuple(render(example(name), release="slurm", namespace="hpc"))


def one(name: str, kind: str, called: str) -> Document:
    (found,) = [
        document for document in rendered(name) if (document["kind"], document["metadata"]["name"]) == (kind, called)
    ]
    return found


def container(document: Document) -> dict[str, Any]:
    found, *_ = document["spec"]["template"]["spec"]["containers"]
    assert isinstance(found, dict)
    return found


def env(document: Document) -> dict[str, str]:
    return {item["name"]: item["value"] for item in container(document)["env"] if "value" in item}


def slurm_conf(name: str, fullname: str = "slurm") -> list[str]:
    text: str = one(name, "ConfigMap", f"{fullname}-config")["data"]["slurm.conf"]
    return text.splitlines()


def stateful_sets(name: str) -> list[Document]:
    return [document for document in rendered(name) if document["kind"] == "StatefulSet"]


def test_there_is_an_example_for_every_way_to_install() -> None:
    wanted = {"minimal", "h100-infiniband", "no-accounting", "external-database", "static-nodes", "host-network"}
    assert wanted <= set(EXAMPLES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_lint_finds_nothing(name: str) -> None:
    report = helm_python.lint(CHART, example(name), strict=True, namespace="hpc")
    # Lint recommends only an icon beyond what the chart has.
    serious = [message for message in report["messages"] if message["severity"] > 1]
    assert not serious and not report["errors"]


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_object_is_valid_for_kubernetes(name: str) -> None:
    for document in rendered(name):
        if document["kind"] not in CUSTOM:
            kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_volume_mounted_is_there_and_every_object_named_is_made_or_existing(name: str) -> None:
    made = {(document["kind"], document["metadata"]["name"]) for document in rendered(name)}
    existing = set(yaml_strings(example(name)))
    for document in stateful_sets(name):
        spec = document["spec"]["template"]["spec"]
        claims = {claim["metadata"]["name"] for claim in document["spec"].get("volumeClaimTemplates", [])}
        volumes = {volume["name"] for volume in spec["volumes"]} | claims
        assert {mount["name"] for mount in container(document)["volumeMounts"]} == volumes
        for volume in spec["volumes"]:
            if "configMap" in volume:
                assert ("ConfigMap", volume["configMap"]["name"]) in made
            if "secret" in volume:
                secret = volume["secret"]["secretName"]
                assert secret in existing | {name for kind, name in made if kind == "Secret"}
                assert volume["secret"]["defaultMode"] == 0o400
            if "persistentVolumeClaim" in volume:
                claim = volume["persistentVolumeClaim"]["claimName"]
                assert claim in existing | {name for kind, name in made if kind == "PersistentVolumeClaim"}


def yaml_strings(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [text for item in value.values() for text in yaml_strings(item)]
    if isinstance(value, list):
        return [text for item in value for text in yaml_strings(item)]
    return [value] if isinstance(value, str) else []


@pytest.mark.parametrize("name", EXAMPLES)
def test_services_select_the_pods_they_are_for(name: str) -> None:
    pods = [document["spec"]["template"]["metadata"]["labels"] for document in stateful_sets(name)]
    for document in rendered(name):
        if document["kind"] == "Service":
            selector = {
                key: value
                for key, value in document["spec"]["selector"].items()
                if key != "statefulset.kubernetes.io/pod-name"
            }
            matching = [labels for labels in pods if selector.items() <= labels.items()]
            # The one headless Service of all login pools gives each login pod its name.
            everybody = document["metadata"]["name"].endswith("-login") and name == "login-pools"
            assert len(matching) == (3 if everybody else 1), document["metadata"]["name"]


def test_bare_names_of_login_pods_and_workers_resolve_in_every_pod() -> None:
    """Slurm uses bare host names: between jobs, for users' ssh, and from slurmctld to an srun on a login pod."""
    values = {"clusterDomain": "k8s.site", "workers": {"pools": {"b": {}, "a": {}}}, "demo": PEOPLE}
    searches = {
        document["metadata"]["name"]: document["spec"]["template"]["spec"].get("dnsConfig", {}).get("searches")
        for document in render(values, release="slurm", namespace="hpc")
        if document["kind"] == "StatefulSet"
    }
    wanted = [f"slurm-{name}.hpc.svc.k8s.site" for name in ("login", "a", "b")]
    names = ("slurm-controller", "slurm-login", "slurm-a", "slurm-b")
    assert searches == {**dict.fromkeys(names, wanted), "slurm-demo": None}


def test_a_cluster_of_many_pools_keeps_within_kubernetes_search_domains() -> None:
    pools: dict[str, Any] = {f"pool{i}": {} for i in range(40)}
    (login,) = [
        document
        for document in render({"workers": {"pools": pools}}, release="slurm", namespace="hpc")
        if (document["kind"], document["metadata"]["name"]) == ("StatefulSet", "slurm-login")
    ]
    assert len(login["spec"]["template"]["spec"]["dnsConfig"]["searches"]) <= 28


def test_a_pod_of_a_broken_image_is_replaced_by_the_upgrade_that_mends_it() -> None:
    """Every StatefulSet uses Parallel pod management.

    An ordered StatefulSet waits for its unready pod for ever, and never applies the new template.
    """
    documents = render({"demo": PEOPLE}, release="slurm", namespace="hpc")
    policies = {
        document["metadata"]["name"]: document["spec"].get("podManagementPolicy")
        for document in documents
        if document["kind"] == "StatefulSet"
    }
    assert policies == dict.fromkeys(("slurm-controller", "slurm-demo", "slurm-login", "slurm-worker"), "Parallel")


@pytest.mark.parametrize("name", EXAMPLES)
def test_pods_have_what_the_init_expects(name: str) -> None:
    for document in stateful_sets(name):
        spec = document["spec"]["template"]["spec"]
        variables = env(document)
        assert variables["MINIVM_GRACE_SECONDS"] == str(spec["terminationGracePeriodSeconds"])
        assert variables["MINIVM_CONTROLLER"] in {
            found["metadata"]["name"] for found in rendered(name) if found["kind"] == "Service"
        }
        port = next(item["containerPort"] for item in container(document)["ports"] if item["name"] == "http")
        assert variables["MINIVM_HTTP"] == f"0.0.0.0:{port}"
        probes = next(item["containerPort"] for item in container(document)["ports"] if item["name"] == "probes")
        assert variables["MINIVM_PROBES"] == f"0.0.0.0:{probes}" and probes != port
        assert {container(document)[probe]["httpGet"]["port"] for probe in PROBES} == {"probes"}
        # On the host's network the kubelet itself connects through the loopback device.
        anywhere = "anywhere" if spec.get("hostNetwork") else None
        assert variables.get("MINIVM_PROBES_FROM") == anywhere
        paths = {probe: container(document)[probe]["httpGet"]["path"] for probe in PROBES}
        assert paths == PROBES
        startup = container(document)["startupProbe"]
        # Seconds that the controller may be unavailable before the kubelet kills a waiting pod and backs off.
        assert startup["failureThreshold"] * startup["periodSeconds"] >= 3600
        drains = " ".join(container(document)["lifecycle"]["preStop"]["exec"]["command"])
        assert "minivm drain" in drains
        assert "MINIVM_POD_IP" in {item["name"] for item in container(document)["env"]}


PROBES = {"startupProbe": "/startupz", "livenessProbe": "/livez", "readinessProbe": "/readyz"}


@pytest.mark.parametrize("role", ["controller", "login", "worker", "demo"])
def test_capabilities_are_those_of_the_role(role: str) -> None:
    """Each role has the capabilities that images/roles declares for PID 1.

    Pods break with fewer capabilities; more would be an unnecessary risk.
    """
    wanted = yaml.safe_load((ROOT / "images" / "roles" / f"{role}.yaml").read_text())["capabilities"]
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    given = values["workers" if role == "worker" else role]["capabilities"]
    assert sorted(given) == sorted(wanted)


def test_all_capabilities_but_the_named_are_dropped() -> None:
    for document in stateful_sets("minimal"):
        assert container(document)["securityContext"]["capabilities"]["drop"] == ["ALL"]
        assert "privileged" not in container(document)["securityContext"]


def test_the_pools_of_a_gpu_cluster() -> None:
    worker = one("h100-infiniband", "StatefulSet", "hall2-h100")
    limits = container(worker)["resources"]["limits"]
    assert (limits["nvidia.com/gpu"], limits["rdma/ib"]) == ("8", "8")
    variables = env(worker)
    assert variables["MINIVM_NODE_CONF"] == "Gres=gpu:h100:8,nvme:4"
    assert variables["MINIVM_NODE_FEATURES"] == "h100,nvlink,gpu,rdma,zone-$(MINIVM_TOPOLOGY_0)"
    names = [item["name"] for item in container(worker)["env"]]
    # Kubernetes expands $(NAME) only from variables that precede it.
    assert names.index("MINIVM_TOPOLOGY_0") < names.index("MINIVM_NODE_FEATURES")
    lines = slurm_conf("h100-infiniband", "hall2")
    assert "GresTypes=gpu,nvme" in lines
    assert "NodeSet=pool_h100 Feature=h100" in lines
    assert [line for line in lines if line.startswith("PartitionName=gpu Nodes=pool_h100 Default=YES")]
    assert [line.split()[0] for line in lines if line.startswith("PartitionName=")] == [
        f"PartitionName={name}" for name in ("cpu", "gpu", "interactive")
    ], "what was taken away by null is not there"
    shm = next(volume for volume in worker["spec"]["template"]["spec"]["volumes"] if volume["name"] == "shm")
    assert shm["emptyDir"] == {"medium": "Memory", "sizeLimit": "256Gi"}
    cpu = one("h100-infiniband", "StatefulSet", "hall2-cpu")
    # A pod without a memory limit has no half to compute: the kubelet uses the machine's allocatable memory.
    shm = next(volume for volume in cpu["spec"]["template"]["spec"]["volumes"] if volume["name"] == "shm")
    assert shm["emptyDir"] == {"medium": "Memory"}
    assert "limits" not in container(cpu)["resources"]


@pytest.mark.parametrize(
    ("pool", "refuses"),
    [
        ({}, True),
        ({"kind": "WorkerPool", "replicas": 3}, True),
        ({"kind": "WorkerPool", "elastic": {"min": 0, "max": 8}}, False),
        ({"kind": "WorkerPool", "perNode": True, "nodeSelector": {"gpu": "h100"}}, False),
        ({"kind": "WorkerPool", "replicas": 9, "externalScaling": True}, False),
    ],
)
def test_a_job_that_no_partition_can_run_is_refused_unless_a_pool_grows(pool: dict[str, Any], refuses: bool) -> None:
    """In a pool that grows it may be what the pool grows for."""
    fleet = {"enabled": True, "workerPools": {"enabled": True}}
    values = {"fleet": fleet, "workers": {"pools": {"worker": {}, "other": pool}}}
    documents = render(values, release="slurm", namespace="hpc")
    (config,) = [item for item in documents if item["metadata"]["name"] == "slurm-config"]
    assert ("EnforcePartLimits=ANY" in config["data"]["slurm.conf"].splitlines()) == refuses


def test_what_a_job_gets_unasked() -> None:
    """Job defaults match docs/limits-and-defaults.md, which gives the reasons."""
    lines = slurm_conf("minimal")
    unasked = ["DefMemPerCPU=1024", "JobRequeue=1", "JobFileAppend=1", "LaunchParameters=use_interactive_step"]
    unasked.append("MpiDefault=pmix")
    assert set(unasked) <= set(lines)
    assert [line for line in lines if line.startswith("InactiveLimit")] == ["InactiveLimit=600"]
    page = (ROOT / "docs/limits-and-defaults.md").read_text()
    for word in ("DefMemPerCPU", "JobRequeue", "use_interactive_step", "MpiDefault", "InactiveLimit"):
        assert word in page


def test_the_controller_and_the_logins_are_the_last_to_be_pushed_aside() -> None:
    """Controller and login pods have the highest priority class.

    A pod without a class would be preempted before every worker, and workers without a controller are useless.
    """
    objects = rendered("h100-infiniband")
    classes = {item["metadata"]["name"]: item["value"] for item in objects if item["kind"] == "PriorityClass"}
    sets = [item for item in objects if item["kind"] == "StatefulSet"]
    found = {
        item["metadata"]["labels"]["app.kubernetes.io/component"]: item["spec"]["template"]["spec"]["priorityClassName"]
        for item in sets
    }
    assert found == {"controller": "minivm-cluster", "login": "minivm-cluster", "worker": "minivm-training"}
    assert classes["minivm-training"] < classes["minivm-inference"] < classes["minivm-cluster"]


def config(**slurm: object) -> dict[str, str]:
    values = {"slurm": slurm, "workers": {"pools": {"gpu": {"gpu": {"count": 8}}}}}
    (found,) = [
        document
        for document in render(values, release="slurm", namespace="hpc")
        if (document["kind"], document["metadata"]["name"]) == ("ConfigMap", "slurm-config")
    ]
    data: dict[str, str] = found["data"]
    return data


@pytest.mark.parametrize(
    ("tag", "version", "mpi", "gpu"),
    [
        ("latest", "", "pmix", "nvml"),
        ("24.11.5-debian-0123456789ab", "", "pmix", "nvml"),
        ("26.05.5-debian-0123456789ab", "", "pmi2", "nvidia"),
        ("latest", "26.05", "pmi2", "nvidia"),
        ("latest", "26.05.5", "pmi2", "nvidia"),
        # Newer than every known release.
        ("26.11.0-debian-0123456789ab", "", "pmi2", "nvidia"),
    ],
)
def test_what_the_controllers_slurm_has_decides_the_defaults(tag: str, version: str, mpi: str, gpu: str) -> None:
    values = {
        "image": {"tag": "latest", "tags": {"controller": tag}},
        "slurm": {"version": version},
        "workers": {"pools": {"gpu": {"gpu": {"count": 8}}}},
    }
    documents = render(values, release="slurm", namespace="hpc")
    data = next(d["data"] for d in documents if d["kind"] == "ConfigMap" and d["metadata"]["name"] == "slurm-config")
    assert f"MpiDefault={mpi}" in data["slurm.conf"].splitlines()
    assert f"AutoDetect={gpu}" in data["gres.conf"].splitlines()


def test_a_word_of_the_operators_goes_over_what_the_release_has() -> None:
    data = config(version="26.05", mpiDefault="pmix")
    assert "MpiDefault=pmix" in data["slurm.conf"].splitlines()


def test_a_release_that_is_older_than_all_is_refused() -> None:
    with pytest.raises(ClusterError, match=r"Slurm 23.02 is older than all that the chart knows"):
        config(version="23.02")


TREE = "SwitchName=s1 Nodes=x-[1-2]\n"
BLOCKS = "- topology: b\n  cluster_default: true\n  block: {block_sizes: [2], blocks: [{block: b1}]}\n"


def test_a_topology_goes_into_the_file_that_the_release_reads() -> None:
    for version in ("24.11", "26.05"):
        data = config(version=version, topologyConfig=TREE)
        assert data["topology.conf"] == TREE and "TopologyPlugin=topology/tree" in data["slurm.conf"], version
    data = config(version="26.05", topologyConfig=BLOCKS)
    assert data["topology.yaml"] == BLOCKS and "topology.conf" not in data
    assert "TopologyPlugin" not in data["slurm.conf"], "the file says it"
    with pytest.raises(ClusterError, match=r"is a topology.yaml, and this release of Slurm reads topology.conf"):
        config(version="24.11", topologyConfig=BLOCKS)


def test_conditions_may_touch_only_this_clusters_pods() -> None:
    """Status rights are limited to the pods of this cluster and of the same role.

    Root on a worker cannot write the phase of the controller or the address of a login pod.
    """
    workers = {f"hall2-h100-{i}" for i in range(32)} | {f"hall2-cpu-{i}" for i in range(4)}
    wanted = {"controller": {"hall2-controller-0"}, "login": {f"hall2-login-{i}" for i in range(3)}, "worker": workers}
    for role, pods in wanted.items():
        (rule,) = one("h100-infiniband", "Role", f"hall2-pod-conditions-{role}")["rules"]
        assert (rule["apiGroups"], rule["resources"], rule["verbs"]) == ([""], ["pods/status"], ["patch"])
        assert set(rule["resourceNames"]) == pods
        binding = one("h100-infiniband", "RoleBinding", f"hall2-pod-conditions-{role}")
        assert binding["roleRef"]["name"] == f"hall2-pod-conditions-{role}"
        assert [subject["name"] for subject in binding["subjects"]] == [f"hall2-{role}"]
    accounts = {
        document["spec"]["template"]["spec"]["serviceAccountName"] for document in stateful_sets("h100-infiniband")
    }
    assert accounts == {f"hall2-{role}" for role in wanted}
    made = {item["metadata"]["name"] for item in rendered("h100-infiniband") if item["kind"] == "ServiceAccount"}
    assert accounts <= made


def test_without_conditions_pods_have_no_token() -> None:
    roles = [document for document in rendered("minimal") if document["kind"] in ("Role", "RoleBinding")]
    assert {document["metadata"]["name"] for document in roles} == {"slurm-keys"}, "the Job's, and no pod's"
    for document in stateful_sets("minimal"):
        assert document["spec"]["template"]["spec"]["automountServiceAccountToken"] is False


def test_only_root_reads_the_token_of_the_conditions() -> None:
    for document in stateful_sets("h100-infiniband"):
        spec = document["spec"]["template"]["spec"]
        assert spec["automountServiceAccountToken"] is False, "the automatic token is readable by every user and job"
        (token,) = [volume["projected"] for volume in spec["volumes"] if "projected" in volume]
        assert token["defaultMode"] == 0o400
        assert {"serviceAccountToken", "configMap", "downwardAPI"} == {key for part in token["sources"] for key in part}
        mounts = {mount["mountPath"]: mount["name"] for mount in container(document)["volumeMounts"]}
        assert mounts["/var/run/secrets/kubernetes.io/serviceaccount"] == "api-token"


def test_users_and_jobs_do_not_reach_the_networks_that_the_site_names() -> None:
    """The egress policy blocks the networks that the site names and allows the rest.

    Pods anywhere in the Kubernetes cluster stay reachable, because the directory and DNS may be among them.
    """

    def egress(*deny: str) -> list[Document]:
        documents = render({"networkPolicy": {"egressDeny": list(deny)}}, release="slurm", namespace="hpc")
        return [item for item in kind(documents, "NetworkPolicy") if item["metadata"]["name"] == "slurm-egress"]

    assert egress() == []
    (policy,) = egress("169.254.169.254/32", "10.20.0.0/16", "fd00:ec2::254/128")
    kubernetes_validate.validate(policy, "1.29", strict=True)
    spec = policy["spec"]
    (roles,) = spec["podSelector"]["matchExpressions"]
    assert (roles["operator"], roles["values"]) == ("In", ["login", "worker"]), "the controller has its database"
    assert spec["policyTypes"] == ["Egress"]
    (rule,) = spec["egress"]
    assert rule == {
        "to": [
            {"namespaceSelector": {}},
            {"ipBlock": {"cidr": "0.0.0.0/0", "except": ["169.254.169.254/32", "10.20.0.0/16"]}},
            {"ipBlock": {"cidr": "::/0", "except": ["fd00:ec2::254/128"]}},
        ]
    }
    (policy,) = egress("10.0.0.0/8")
    assert {"ipBlock": {"cidr": "::/0"}} in policy["spec"]["egress"][0]["to"]
    for wrong in ("0.0.0.0/0", "10.0.0.1", "::/0", "metadata.google.internal"):
        with pytest.raises(ClusterError, match="egressDeny"):
            egress(wrong)


def test_workers_on_their_hosts_network_pass_the_network_policy() -> None:
    for policy in ("slurm-inside", "slurm-clock"):
        (inside,) = one("host-network", "NetworkPolicy", policy)["spec"]["ingress"]
        assert {"ipBlock": {"cidr": "10.20.0.0/16"}} in inside["from"]


def admitted(name: str, port: int, named: str) -> list[tuple[str, Any]]:
    """Return the sources that policies admit to a port of the cluster's pods: `from`, or None for any source."""
    found = []
    for document in rendered(name):
        if document["kind"] != "NetworkPolicy":
            continue
        for rule in document["spec"]["ingress"]:
            ports = rule.get("ports", [{"port": 1, "endPort": 65535, "protocol": "TCP"}])
            if any(
                item["protocol"] == "TCP"
                and (item["port"] == named if "endPort" not in item else item["port"] <= port <= item["endPort"])
                for item in ports
            ):
                found.append((document["metadata"]["name"], rule.get("from")))
    return found


@pytest.mark.parametrize("name", EXAMPLES)
def test_init_is_asked_by_the_kubelet_and_by_who_is_named(name: str) -> None:
    """The policies restrict init's two HTTP ports.

    No pod reaches the probe port, whatever runs in it. The metrics port is open to the configured readers, and the
    controller's to all pods of the cluster, which read its clock.
    """
    policies = [document for document in rendered(name) if document["kind"] == "NetworkPolicy"]
    if not policies:
        pytest.skip("without policies")
    assert admitted(name, 8651, "probes") == []
    http = dict(admitted(name, 8650, "http"))
    (clock,) = [who for who in http if who.endswith("-clock")]
    controller = next(document for document in policies if document["metadata"]["name"] == clock)
    assert controller["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "controller"
    assert None not in http.values()
    metrics = (
        yaml.safe_load((CHART / "examples" / f"{name}.yaml").read_text()).get("networkPolicy", {}).get("metricsFrom")
    )
    assert {who for who in http if who != clock} == ({clock.replace("-clock", "-inside")} if metrics else set())
    # All other traffic between the pods stays allowed.
    assert admitted(name, 45000, "") and admitted(name, 6817, "")


def test_no_accounting_leaves_no_trace_of_a_database() -> None:
    assert "AccountingStorageType=accounting_storage/none" in slurm_conf("no-accounting")
    assert not [document for document in rendered("no-accounting") if "database" in document["metadata"]["name"]]
    controller = one("no-accounting", "StatefulSet", "slurm-controller")
    assert "/var/lib/mysql" not in {mount["mountPath"] for mount in container(controller)["volumeMounts"]}


def test_an_external_database_is_told_to_the_controller_without_its_password() -> None:
    controller = one("external-database", "StatefulSet", "slurm-controller")
    assert env(controller)["MINIVM_DATABASE_HOST"] == "mariadb.databases.svc:3306"
    assert env(controller)["MINIVM_ACCOUNTING"] == "external"
    assert not [name for name in env(controller) if "PASSWORD" in name]


def test_static_nodes_have_a_name_that_resolves_and_an_address_that_stays() -> None:
    lines = slurm_conf("static-nodes")
    nodes = [line for line in lines if line.startswith("NodeName=")]
    assert len(nodes) == 3
    assert nodes[1].startswith("NodeName=slurm-rack1-1 NodeAddr=slurm-rack1-1 CPUs=32 RealMemory=120000")
    service = one("static-nodes", "Service", "slurm-rack1-1")
    assert service["spec"]["selector"]["statefulset.kubernetes.io/pod-name"] == "slurm-rack1-1"
    assert "clusterIP" not in service["spec"]
    assert not [line for line in lines if line.startswith("MaxNodeCount")]


def test_one_worker_a_machine_on_the_hosts_network() -> None:
    spec = one("host-network", "StatefulSet", "slurm-fabric")["spec"]["template"]["spec"]
    assert (spec["hostNetwork"], spec["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
    (term,) = spec["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["topologyKey"] == "kubernetes.io/hostname"
    assert (
        "IPC_LOCK"
        in container(one("host-network", "StatefulSet", "slurm-fabric"))["securityContext"]["capabilities"]["add"]
    )


def test_workers_spread_over_machines_unless_the_site_says_how() -> None:
    """Workers of all pools prefer different machines, because pools share machines.

    This is only a preference: a pool with more workers than machines still starts.
    """

    def affinity(pool: dict[str, Any]) -> Any:
        documents = render({"workers": {"pools": {"a": pool}}}, release="slurm", namespace="hpc")
        (found,) = [item for item in kind(documents, "StatefulSet") if item["metadata"]["name"] == "slurm-a"]
        return found["spec"]["template"]["spec"]["affinity"]

    (preferred,) = affinity({})["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert preferred["podAffinityTerm"]["topologyKey"] == "kubernetes.io/hostname"
    labels = preferred["podAffinityTerm"]["labelSelector"]["matchLabels"]
    assert labels["app.kubernetes.io/component"] == "worker" and "minivm.io/pool" not in labels
    own: dict[str, Any] = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}}
    assert affinity({"affinity": own}) == own


MADE = {
    "slurm-key": "slurm.key:bytes:1024",
    "jwt": "jwt_hs256.key:bytes:32",
    "ssh-host-keys": "ssh_host_ed25519_key:ed25519",
    "worker-host-keys": "ssh_host_ed25519_key:ed25519",
    "ring": "ring.key:letters:32",
    "database": "password:letters:32",
}
PEOPLE = {"enabled": True, "users": {"alice": "ssh-ed25519 AAAA alice@example.org"}}
RING = {"scripts": {"env": {"MINIVM_GITSYNC_RING_URL": "http://slurm-controller:8651/ring"}}}


def kind(documents: list[Document], wanted: str) -> list[Document]:
    return [document for document in documents if document["kind"] == wanted]


@pytest.mark.parametrize("name", EXAMPLES)
def test_two_renders_are_one_text(name: str) -> None:
    """Two renders are identical.

    Argo CD and `helm template` have no cluster to read existing keys from, so a key made in the template would differ
    each time.
    """
    texts = [render_texts(example(name), release="slurm", namespace="hpc") for _ in range(2)]
    assert texts[0] == texts[1]


def test_keys_that_nobody_gave_are_made_in_the_cluster_by_one_that_may_do_nothing_else() -> None:
    documents = render(RING, release="slurm", namespace="hpc")
    secrets = {secret["metadata"]["name"]: secret for secret in kind(documents, "Secret")}
    assert set(secrets) == {f"slurm-{name}" for name in MADE}
    assert not any("data" in secret or "stringData" in secret for secret in secrets.values())
    (job,) = kind(documents, "Job")
    spec = job["spec"]["template"]["spec"]
    args = spec["containers"][0]["args"]
    assert args[: args.index("--known-hosts")] == [f"slurm-{name}:{how}" for name, how in MADE.items()]
    (role,) = [role for role in kind(documents, "Role") if role["metadata"]["name"] == spec["serviceAccountName"]]
    rule, known = role["rules"]
    assert rule["verbs"] == ["get", "patch"] and set(rule["resourceNames"]) == set(secrets)
    assert (known["resources"], known["verbs"], known["resourceNames"]) == (
        ["configmaps"], ["patch"], ["slurm-known-hosts"],
    )  # fmt: skip
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["containers"][0]["securityContext"] == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
    }  # fmt: skip


def mounts(document: Document) -> dict[str, str]:
    return {mount["name"]: mount["mountPath"] for mount in container(document)["volumeMounts"]}


def test_a_cluster_by_auth_slurm_has_its_key_in_munges_place() -> None:
    documents = render({"slurm": {"auth": "slurm"}}, release="slurm", namespace="hpc")
    conf = slurm_conf_of(documents)
    assert {"AuthType=auth/slurm", "CredType=cred/slurm"} <= {*conf}
    assert "SlurmdParameters=conmgr_max_connections=8192" in conf
    secrets = {secret["metadata"]["name"] for secret in kind(documents, "Secret")}
    assert "slurm-slurm-key" in secrets and "slurm-munge" not in secrets
    (job,) = kind(documents, "Job")
    assert "slurm-slurm-key:slurm.key:bytes:1024" in job["spec"]["template"]["spec"]["containers"][0]["args"]
    for document in kind(documents, "StatefulSet"):
        assert env(document)["MINIVM_AUTH"] == "slurm"
        assert mounts(document)["slurm-key"] == "/mnt/minivm/secrets/slurm-key" and "munge" not in mounts(document)
        volumes = {volume["name"]: volume.get("secret") for volume in document["spec"]["template"]["spec"]["volumes"]}
        assert volumes["slurm-key"]["items"] == [{"key": "slurm.key", "path": "slurm.key"}]
        assert volumes["slurm-jwks"]["optional"] is True and mounts(document)["slurm-jwks"]


def test_a_cluster_by_munge_has_the_pods_that_it_had_before_there_was_a_choice() -> None:
    documents = render({"slurm": {"auth": "munge"}}, release="slurm", namespace="hpc")
    assert "slurm-munge" in {secret["metadata"]["name"] for secret in kind(documents, "Secret")}
    (job,) = kind(documents, "Job")
    assert "slurm-munge:munge.key:bytes:1024" in job["spec"]["template"]["spec"]["containers"][0]["args"]
    for document in kind(documents, "StatefulSet"):
        assert "MINIVM_AUTH" not in env(document) and "slurm-key" not in mounts(document)
        assert mounts(document)["munge"] == "/mnt/minivm/secrets/munge"


def test_slurms_keys_that_are_given_are_written_and_mounted_whole() -> None:
    given = {"slurm": {"auth": "slurm"}, "secrets": {"slurm": {"key": "c2x1" * 12, "jwks": '{"keys": []}'}}}
    documents = render(given, release="slurm", namespace="hpc")
    (secret,) = [item for item in kind(documents, "Secret") if item["metadata"]["name"] == "slurm-slurm-key"]
    assert secret["data"] == {"slurm.key": "c2x1" * 12, "slurm.jwks": "eyJrZXlzIjogW119"}
    for document in kind(documents, "StatefulSet"):
        assert "slurm-jwks" not in mounts(document)
    named = {"slurm": {"auth": "slurm"}, "secrets": {"slurm": {"existingSecret": "hpc-slurm"}}}
    for document in kind(render(named, release="slurm", namespace="hpc"), "StatefulSet"):
        volumes = {volume["name"]: volume.get("secret") for volume in document["spec"]["template"]["spec"]["volumes"]}
        assert volumes["slurm-key"] == {"secretName": "hpc-slurm", "defaultMode": 0o400}


def test_no_pod_starts_without_the_keys_that_are_made() -> None:
    """Key volumes name their keys, so that the pod waits for them; otherwise it would mount an empty directory."""
    for document in kind(render(RING, release="slurm", namespace="hpc"), "StatefulSet"):
        for volume in document["spec"]["template"]["spec"]["volumes"]:
            name = volume.get("secret", {}).get("secretName", "").removeprefix("slurm-")
            if name in MADE and volume["name"] != "slurm-jwks":
                key = MADE[name].partition(":")[0]
                assert volume["secret"]["items"] == [{"key": key, "path": key}]


def test_a_key_that_is_given_is_written_and_no_job_is_needed() -> None:
    munge, jwt = (base64.b64encode(text * 32).decode() for text in (b"m", b"j"))
    given = {
        "slurm": {"auth": "munge"},
        "secrets": {
            "munge": {"key": munge}, "jwt": {"key": jwt},
            "sshHostKeys": {"keys": {"ssh_host_rsa_key": "pem"}, "public": ["ssh-rsa AAAA"]},
            "workerHostKeys": {"keys": {"ssh_host_rsa_key": "PEM"}, "public": ["ssh-rsa BBBB"]},
        },
        "accounting": {"database": {"existingSecret": "slurm-db"}},
    }  # fmt: skip
    documents = render(given, release="slurm", namespace="hpc")
    assert {secret["metadata"]["name"]: secret["data"] for secret in kind(documents, "Secret")} == {
        "slurm-munge": {"munge.key": munge},
        "slurm-jwt": {"jwt_hs256.key": jwt},
        "slurm-ssh-host-keys": {"ssh_host_rsa_key": "cGVt"},
        "slurm-worker-host-keys": {"ssh_host_rsa_key": "UEVN"},
    }
    assert not kind(documents, "Job")
    for document in kind(documents, "StatefulSet"):
        assert not any("items" in each.get("secret", {}) for each in document["spec"]["template"]["spec"]["volumes"])


def test_another_image_is_another_job() -> None:
    """The Job's name depends on the image.

    A Job's template cannot be changed, so an upgrade under the same name would fail.
    """
    jobs = [
        kind(render({"image": {"tag": tag}}, release="slurm", namespace="hpc"), "Job")[0]["metadata"]["name"]
        for tag in ("one", "two")
    ]
    assert jobs[0] != jobs[1]


def ring_mounts(values: dict[str, Any]) -> dict[str, tuple[str | None, str | None]]:
    """Return, for each role, the Secret mounted for the ring and the keyring path given to gitsync."""
    found = {}
    for document in render(values, release="slurm", namespace="hpc"):
        if document["kind"] == "StatefulSet":
            volumes = {item["name"]: item for item in document["spec"]["template"]["spec"]["volumes"]}
            mounts = {item["mountPath"]: item["name"] for item in container(document)["volumeMounts"]}
            name = mounts.get("/mnt/minivm/secrets/ring")
            secret = volumes[name]["secret"]["secretName"] if name else None
            role = document["metadata"]["labels"]["app.kubernetes.io/component"]
            found[role] = (secret, env(document).get("MINIVM_GITSYNC_RING_SECRET"))
    return found


def test_reports_to_a_ring_are_signed_without_being_asked_for() -> None:
    url = {"MINIVM_GITSYNC_RING_URL": "http://slurm-controller:8651/ring"}
    asked = {"scripts": {"env": url}, "demo": PEOPLE}
    file = "/mnt/minivm/secrets/ring/ring.key"
    signed = ("slurm-ring", file)
    nodes = ("controller", "login", "worker")
    assert ring_mounts(asked) == {**dict.fromkeys(nodes, signed), "demo": (None, None)}
    own = {**asked, "secrets": {"ring": {"existingSecret": "board"}}}
    assert ring_mounts(own)["worker"] == ("board", file)
    assert ("Secret", "slurm-ring") not in {
        (document["kind"], document["metadata"]["name"]) for document in render(own, release="slurm", namespace="hpc")
    }
    elsewhere = {"scripts": {"env": {**url, "MINIVM_GITSYNC_RING_SECRET": "/etc/site/ring"}}}
    assert ring_mounts(elsewhere)["worker"] == (None, "/etc/site/ring")
    assert ring_mounts({})["worker"] == (None, None), "nobody is asked: nothing is signed"


ALL = "PartitionName=all Nodes=pool_a,pool_b Default=YES State=UP"
A = "PartitionName=a Nodes=pool_a Default=NO State=UP"
B = "PartitionName=b Nodes=pool_b Default=NO State=UP"
LONG = {"pools": ["a"], "default": True, "options": {"MaxTime": "7-00:00:00"}}


@pytest.mark.parametrize(
    ("given", "lines"),
    [
        ({}, [A, ALL, B]),
        (
            {"long": {"pools": ["a"]}},
            [A, ALL, B, "PartitionName=long Nodes=pool_a Default=NO State=UP"],
        ),
        (
            {"long": LONG},
            [
                A,
                ALL.replace("YES", "NO"),
                B,
                "PartitionName=long Nodes=pool_a Default=YES State=UP MaxTime=7-00:00:00",
            ],
        ),
        ({"all": {"options": {"MaxTime": "60"}}}, [A, f"{ALL} MaxTime=60", B]),
        ({"a": {"pools": ["b"], "default": True}, "b": None}, ["PartitionName=a Nodes=pool_b Default=YES State=UP",
                                                               ALL.replace("YES", "NO")]),
        ({"all": None}, [A, B]),
        ({"all": {"default": False}}, [A, ALL.replace("YES", "NO"), B]),
    ],
)  # fmt: skip
def test_a_partition_that_is_added_takes_none_away(given: dict[str, Any], lines: list[str]) -> None:
    """Adding a partition keeps the default ones, because slurmctld ends the jobs of a partition that is removed."""
    values = {"slurm": {"partitions": given}, "workers": {"pools": {"a": {}, "b": {}}}}
    (config,) = [
        item
        for item in render(values, release="slurm", namespace="hpc")
        if (item["kind"], item["metadata"]["name"]) == ("ConfigMap", "slurm-config")
    ]
    text: str = config["data"]["slurm.conf"]
    assert [line for line in text.splitlines() if line.startswith("PartitionName=")] == lines


def test_a_rings_key_that_is_given_is_the_one() -> None:
    (secret,) = [
        document
        for document in render(
            {"secrets": {"ring": {"key": "cmluZydzIHNlY3JldCBrZXk="}}}, release="slurm", namespace="hpc"
        )
        if document["metadata"]["name"] == "slurm-ring"
    ]
    assert secret["data"] == {"ring.key": "cmluZydzIHNlY3JldCBrZXk="}


@pytest.mark.parametrize(("grace", "drain", "given"), [(60, 55, 75), (120, 60, 120), (600, 580, 600), (20, 0, 20)])
def test_the_drain_fits_into_the_grace_period(grace: int, drain: int, given: int) -> None:
    """A pool with a short graceSeconds worked before, and gets what its drainSeconds need."""
    pools = {"a": {"graceSeconds": grace, "drainSeconds": drain}}
    sets = [
        item["spec"]["template"]["spec"]
        for item in render({"workers": {"pools": pools}}, release="s", namespace="n")
        if item["kind"] == "StatefulSet" and item["metadata"]["name"] == "s-a"
    ]
    variables = {item["name"]: item.get("value") for item in sets[0]["containers"][0]["env"]}
    assert [spec["terminationGracePeriodSeconds"] for spec in sets] == [given]
    assert (variables["MINIVM_GRACE_SECONDS"], variables["MINIVM_DRAIN_SECONDS"]) == (str(given), str(drain))


POOLED: dict[str, Any] = {"fleet": {"enabled": True, "workerPools": {"enabled": True}}}
ELASTIC = {"kind": "WorkerPool", "elastic": {"min": 0, "max": 64000}}
MANY = {"slurm": {"maxNodes": 65000}}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"workers": {"pools": {"gpu": {"replica": 3}}}}, "replica"),
        ({"slurm": {"proctrack": "pgid"}}, "proctrack"),
        ({"accounting": {"mode": "extern"}}, "mode"),
        ({"clusterName": "Has Capitals"}, "clusterName"),
        ({"slurm": {"partitions": {"p": {"pools": ["nowhere"]}}}}, "nowhere"),
        ({"slurm": {"partitions": {"p": {"default": True}}}}, "partitions.p names no pools"),
        ({"slurm": {"partitions": {"alll": None}}}, "partitions.alll is null"),
        ({"slurm": {"nodeMode": "static"}}, "needs cpus and memoryMiB"),
        ({"accounting": {"mode": "external"}}, "accounting.database"),
        ({"workers": {"pools": {"a": {"hostNetwork": True}}}}, "networkPolicy.nodeCidrs"),
        ({"networkPolicy": {"nodeCidrs": ["anywhere"]}}, "nodeCidrs"),
        ({"podMonitor": {"enabled": True}}, "networkPolicy.metricsFrom"),
        ({"workers": {"pools": {"login": {}}}}, "belongs to another part"),
        ({"mounts": {"data": {"mountPath": "/data"}}}, "mounts"),
        ({"workers": {"pools": {"a": {"replicas": 1000}, "b": {"replicas": 25}}}}, "have 1025 nodes together"),
        (POOLED | {"workers": {"pools": {"a": ELASTIC}}}, "maxNodes: .*elastic.max, and slurmctld takes 1024"),
        (MANY | {"fleet": {"enabled": True}, "workers": {"pools": {"a": {"replicas": 60000}}}}, "too many for one"),
        (
            MANY | {"podConditions": {"enabled": True}, "workers": {"pools": {"a" * 20: {"replicas": 64000}}}},
            "too many",
        ),
    ],
)
def test_a_wrong_value_is_refused_with_its_name(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ClusterError, match=said):
        render(values, release="slurm", namespace="hpc")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"secrets": {"munge": {"key": "YWJj"}}}, "secrets.munge.key has 3 bytes, and a key has 32 to 1024"),
        ({"secrets": {"jwt": {"key": "YWJj"}}}, "secrets.jwt.key has 3 bytes"),
        ({"secrets": {"ring": {"key": "not base64"}}}, "secrets.ring.key is no base64"),
        ({"networkPolicy": {"metricsFrom": [{}]}}, "networkPolicy.metricsFrom: {} names no peer"),
        ({"networkPolicy": {"sshFrom": [{}]}}, "networkPolicy.sshFrom: {} names no peer"),
        ({"networkPolicy": {"metricsFrom": [{"namespace": {}}]}}, "metricsFrom: namespace is no part of a peer"),
        ({"networkPolicy": {"nodeCidrs": ["0.0.0.0/0"]}}, "nodeCidrs: 0.0.0.0/0 is more than the machines' network"),
        ({"networkPolicy": {"nodeCidrs": ["10.0.0.0/16", "::/0"]}}, "nodeCidrs: ::/0 is more"),
        ({"home": {"mountPath": "/"}}, "home.mountPath: / hides"),
        (
            {"login": {"extraVolumeMounts": [{"name": "x", "mountPath": "/x"}]}},
            "login.extraVolumeMounts: x is not in extraVolumes, which has: nothing",
        ),
        (
            {"login": OWN_PARTS | {"extraVolumeMounts": [{"name": "scratch", "mountPath": "/usr/bin"}]}},
            "login.extraVolumeMounts: scratch at /usr/bin hides /usr/bin",
        ),
        (
            {"login": OWN_PARTS | {"extraVolumeMounts": [
                {"name": "scratch", "mountPath": "/etc/slurm"}, {"name": "scratch", "mountPath": "/data"},
            ]}},
            "login.extraVolumeMounts: scratch at /etc/slurm hides /etc/slurm",
        ),
        ({"login": {"podLabels": {"minivm.io/pool": "b"}}}, "login.podLabels: minivm.io/pool is a label that"),
        *(
            ({"fleet": {kind: {"enabled": True}}}, f"fleet.{kind}.enabled: the fleet makes these objects, and")
            for kind in ("machines", "workerPools")
        ),
        ({"workers": {"defaults": {"sidecars": [{"name": "a"}]}}}, "image"),
        ({"home": {"mountPath": "/usr"}}, "home.mountPath: /usr hides /usr/bin"),
        (
            {"mounts": {"data": {"mountPath": "/home/", "claim": "c"}}},
            "mounts.data.mountPath: /home/ is the path of home.mountPath too",
        ),
        (
            {"mounts": {name: {"mountPath": "/data", "claim": "c"} for name in "ab"}},
            "mounts.b.mountPath: /data is the path of mounts.a.mountPath too",
        ),
        (
            {"slurm": {"partitions": {name: {"pools": ["worker"], "default": True} for name in "xy"}}},
            "slurm.partitions.y.default: x is the default too, and Slurm has one",
        ),
        (
            {"workers": {"pools": {"a": {"resources": {"limits": {"memory": "4GB"}}}}}},
            "workers.pools.a.resources.limits.memory is 4GB",
        ),
        (
            {"login": {"shmSize": "50%", "resources": {"limits": {"memory": "4GB"}}}},
            "login.resources.limits.memory is 4GB",
        ),
        *(
            ({"mounts": {"data": {"mountPath": path, "claim": "c"}}}, f"mounts.data.mountPath: {path} hides {hidden}")
            for path, hidden in (
                ("/etc/slurm", "/etc/slurm"), ("/etc", "/etc/"), ("/run/minivm", "/run"), ("/var", "/var/"),
                ("/opt/minivm/", "/opt/minivm"), ("/data/../etc/munge", "/etc/munge"), ("/mnt", "/mnt/minivm"),
            )
        ),
    ],
)  # fmt: skip
def test_a_value_that_renders_and_is_a_mistake_is_refused_in_words(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ClusterError, match=re.escape(said)):
        render(values, release="slurm", namespace="hpc")


def test_the_black_boxes_of_workers_may_lie_on_a_volume_and_each_pod_has_a_directory_of_it() -> None:
    page = (ROOT / "docs/reference/runner.md").read_text()
    example = page.partition("outlive the pod")[2].partition("```yaml\n")[2].partition("```")[0]
    documents = render(yaml.safe_load(example), release="slurm", namespace="hpc")
    (worker,) = [item for item in documents if item["kind"] == "StatefulSet" and container(item)["name"] == "worker"]
    (mount,) = [item for item in container(worker)["volumeMounts"] if item["name"] == "boxes"]
    assert mount["mountPath"] == "/var/log/minivm/boxes"
    names = {item["name"] for item in container(worker)["env"] if item.get("valueFrom", {}).get("fieldRef")}
    assert mount["subPathExpr"] == "$(MINIVM_POD_NAME)" and "MINIVM_POD_NAME" in names


def test_a_pod_has_the_parts_that_the_site_adds_beside_its_own() -> None:
    fleet = {"enabled": True, "workerPools": {"enabled": True}}
    pools = {"a": {"image": "hall/worker:3"}, "b": {"kind": "WorkerPool"}, "c": {"sidecars": [], "initContainers": []}}
    values = {"login": OWN_PARTS, "fleet": fleet, "workers": {"defaults": OWN_PARTS, "pools": pools}}
    documents = render(values, release="slurm", namespace="hpc")
    plain = render(
        {"fleet": fleet, "workers": {"pools": {name: {} for name in pools}}}, release="slurm", namespace="hpc"
    )
    before = {item["metadata"]["name"]: item for item in plain if item["kind"] == "StatefulSet"}
    found = {item["metadata"]["name"]: item for item in documents if item["kind"] in ("StatefulSet", "WorkerPool")}
    for name in ("slurm-login", "slurm-a", "slurm-b"):
        template = found[name]["spec"]["template"]
        spec, (own, *beside) = template["spec"], template["spec"]["containers"]
        assert [item["name"] for item in beside] == ["beside"] and spec["initContainers"] == OWN_PARTS["initContainers"]
        assert spec["schedulerName"] == "other" and spec["topologySpreadConstraints"][0]["topologyKey"] == "zone"
        assert template["metadata"]["labels"]["team"] == "a" and own["name"] in ("login", "worker")
        was = before[name]["spec"]["template"]["spec"]
        assert spec["volumes"] == [*was["volumes"], {"name": "scratch", "emptyDir": {}}]
        assert own["volumeMounts"][-1] == {"name": "scratch", "mountPath": "/scratch"}
        assert own["volumeMounts"][:-1] == was["containers"][0]["volumeMounts"]
    assert container(found["slurm-a"])["image"] == "hall/worker:3"
    assert container(found["slurm-c"])["image"] == container(before["slurm-c"])["image"]
    assert "initContainers" not in found["slurm-c"]["spec"]["template"]["spec"]
    assert len(found["slurm-c"]["spec"]["template"]["spec"]["containers"]) == 1
    assert found["slurm-controller"] == before["slurm-controller"]


def test_pods_request_local_storage_and_have_no_limit_of_it() -> None:
    """Pods have no limit of local storage: the kubelet evicts a pod over its limit, with every user's work in it."""
    for document in kind(render({}, release="slurm", namespace="hpc"), "StatefulSet"):
        resources = container(document)["resources"]
        assert resources["requests"]["ephemeral-storage"] == "1Gi", document["metadata"]["name"]
        assert "ephemeral-storage" not in resources.get("limits", {})


def test_values_beside_such_mistakes_are_taken() -> None:
    peer = {"namespaceSelector": {}, "podSelector": {"matchLabels": {"app": "prometheus"}}}
    mounts = {name: {"mountPath": path, "claim": "c"} for name, path in (("a", "/etc/pki"), ("b", "/mnt/data"))}
    network = {"metricsFrom": [peer], "nodeCidrs": ["10.0.0.0/8", "fd00:1::/32"]}
    key = {"munge": {"key": base64.b64encode(bytes(1024)).decode()}}
    assert render({"networkPolicy": network, "mounts": mounts, "secrets": key}, release="slurm", namespace="hpc")


@pytest.mark.parametrize(
    ("slurm", "wanted"), [({}, "disable_token_creation"), ({"userTokenSeconds": 600}, "max_token_lifespan=600")]
)
def test_users_make_tokens_only_where_the_site_says_for_how_long(slurm: dict[str, Any], wanted: str) -> None:
    lines = with_slurm(slurm)
    assert f"AuthAltParameters=jwt_key=/etc/slurm/jwt_hs256.key,{wanted}" in lines
    assert "DisableRootJobs=YES" in lines


@pytest.mark.parametrize(
    "slurm",
    [
        {"maxNodes": 1100},
        {"config": {"MaxNodeCount": 1100}},
        {"extraConfig": "maxnodecount=1100"},
        {"extraConfig": "MaxNodeCount=10\nMaxNodeCount=1100"},
        {"config": {"MAXNODECOUNT": 1100}},
        {"nodeMode": "static"},
    ],
)
def test_as_many_nodes_as_slurm_takes_are_taken(slurm: dict[str, Any]) -> None:
    pool = {"replicas": 1100, "node": {"cpus": 1, "memoryMiB": 1000}}
    assert with_slurm(slurm, pool)


def test_slurmd_is_kept_from_what_a_pod_must_not() -> None:
    """slurmd does not load users' environments itself.

    It needs a PID namespace for that, which a pod denies, and it would exit on the error.
    """
    documents = render({}, release="slurm", namespace="hpc")
    (config,) = [item for item in documents if item["metadata"]["name"] == "slurm-config"]
    assert "GetEnvTimeout=0" in config["data"]["slurm.conf"].splitlines()


PROFILES: dict[str, dict[str, str]] = yaml.safe_load((CHART / "files/profiles.yaml").read_text())


def with_slurm(slurm: dict[str, Any], pool: dict[str, Any] | None = None) -> list[str]:
    documents = render({"slurm": slurm, "workers": {"pools": {"worker": pool or {}}}}, release="slurm", namespace="hpc")
    (config,) = [item for item in documents if item["metadata"]["name"] == "slurm-config"]
    return config["data"]["slurm.conf"].splitlines()  # type: ignore[no-any-return]  # YAML has no types


def test_a_prolog_may_take_as_long_before_a_batch_job_as_before_any_other() -> None:
    lines = with_slurm({"scripts": {"prologEpilogTimeout": 90}})
    assert {"PrologEpilogTimeout=90", "BatchStartTimeout=90"} <= {*lines}


@pytest.mark.parametrize(
    ("slurm", "said"),
    [
        ({"config": {"PrologEpilogTimeout": 300}}, "300"),
        ({"config": {"PrologEpilogTimeout": 300}, "scripts": {"enabled": False}}, "300"),
        ({"extraConfig": "# the site's\nprologepilogtimeout = 240 # s"}, "240"),
        ({"config": {"PrologEpilogTimeout": 300, "BatchStartTimeout": 20}}, "20"),
        ({"config": {"PrologEpilogTimeout": None}}, "60"),
        ({"config": {"prologepilogtimeout": 300}}, "300"),
        ({"extraConfig": "PrologEpilogTimeout=30\nprologEpilogTimeout=240\n#PrologEpilogTimeout=20"}, "240"),
        ({"extraConfig": 'PrologEpilogTimeout \\\n = "240"\nDebugFlags=none \\\nPrologEpilogTimeout=20'}, "240"),
        ({"config": {"PrologEpilogTimeout": 300, "batchstarttimeout": 20}}, "20"),
        ({"scripts": {"prologEpilogTimeout": None}}, ""),
        ({"config": {"BatchStartTimeout": None}}, ""),
        ({"scripts": {"enabled": False}}, ""),
    ],
)
def test_what_a_site_says_of_prologs_counts_before_a_batch_job_too(slurm: dict[str, Any], said: str) -> None:
    lines = with_slurm(slurm)
    found = [line.partition("=")[2] for line in lines if line.lower().startswith("batchstarttimeout=")]
    assert found == ([said] if said else [])
    assert "nil" not in "".join(lines)


def test_a_name_is_the_same_in_whichever_case_as_it_is_to_slurm() -> None:
    lines = [line for line in with_slurm({"config": {"killwait": 7, "TASKPROLOG": None}}) if "=" in line]
    assert [line for line in lines if line.lower().startswith(("killwait", "taskprolog"))] == ["killwait=7"]
    with pytest.raises(ClusterError, match=r"slurm\.config has KillWait and killwait, which are one name to Slurm"):
        with_slurm({"config": {"KillWait": 8, "killwait": 7}})


def test_a_sites_own_filters_are_its_own_wherever_it_names_them() -> None:
    for named in ({"config": {"jobsubmitplugins": "x"}}, {"extraConfig": "jobsubmitplugins=x"}):
        lines = with_slurm({"version": "26.05", **named})
        assert "JobSubmitPlugins=lua" not in lines and "CliFilterPlugins=cli_filter/lua" in lines
    for named in ({"config": {"CLIFILTERPLUGINS": "x"}}, {"extraConfig": "clifilterplugins=x"}):
        assert "CliFilterPlugins=cli_filter/lua" not in with_slurm(named)


@pytest.mark.parametrize("name", PROFILES)
def test_a_profile_is_lines_of_slurm_conf_and_the_sites_own_are_over_them(name: str) -> None:
    lines = with_slurm({"profile": name})
    every = {key for profile in PROFILES.values() for key in profile}
    assert {line for line in lines if line.partition("=")[0] in every} == {
        f"{key}={value}" for key, value in PROFILES[name].items()
    }
    own = with_slurm({"profile": name, "config": {"SchedulerParameters": "defer", "CompleteWait": None}})
    assert "SchedulerParameters=defer" in own and not [line for line in own if line.startswith("CompleteWait=")]


@pytest.mark.parametrize("name", PROFILES)
def test_under_no_profile_the_end_of_a_job_waits_for_the_turn_of_a_second(name: str) -> None:
    """No profile has `defer` in its SchedulerParameters.

    slurmctld searches for these letters only: with `defer_batch` too, the end of a job waits for the loop that runs
    once a second.
    """
    assert "defer" not in PROFILES[name]["SchedulerParameters"]


@pytest.mark.parametrize(
    ("slurm", "wanted"),
    [
        ({}, None),
        ({"fastScripts": False}, None),
        ({"fastScripts": True}, "yes"),
        ({"profile": "huge"}, None),
        ({"profile": "short"}, "yes"),
        ({"profile": "short", "fastScripts": None}, "yes"),
        ({"profile": "short", "fastScripts": False}, None),
    ],
)
def test_scripts_are_started_faster_where_the_site_says_so_or_with_short(
    slurm: dict[str, Any], wanted: str | None
) -> None:
    documents = render({"slurm": slurm}, release="slurm", namespace="hpc")
    (worker,) = (
        item for item in documents if (item["kind"], item["metadata"]["name"]) == ("StatefulSet", "slurm-worker")
    )
    variables = {item["name"]: item.get("value") for item in worker["spec"]["template"]["spec"]["containers"][0]["env"]}
    assert variables.get("MINIVM_FAST_SCRIPTS") == wanted


def test_a_bit_of_everything_is_what_nobody_chose_and_a_profile_that_is_not_there_is_refused() -> None:
    assert with_slurm({}) == with_slurm({"profile": "mixed"})
    with pytest.raises(ClusterError, match="profile"):
        with_slurm({"profile": "fast"})
    # The schema lists exactly the profiles of the file.
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert schema["properties"]["slurm"]["properties"]["profile"]["enum"] == list(PROFILES)


def test_a_digest_is_pulled_and_no_tag() -> None:
    """A digest applies to every pod of the role, and to the keys Job, which uses the controller's image."""
    digest = f"sha256:{'ab' * 32}"
    image = {"registry": "r.site", "repository": "hpc", "tag": "26.05.5-debian-0123456789ab"}
    documents = render({"image": image | {"digests": {"controller": digest}}}, release="slurm", namespace="hpc")
    found = set(re.findall(r'"?image"?: "?([^"\s,}]+)', yaml.safe_dump(documents)))
    assert found == {
        f"r.site/hpc/controller:{image['tag']}@{digest}",
        *(f"r.site/hpc/{role}:{image['tag']}" for role in ("login", "worker")),
    }
    with pytest.raises(ClusterError, match="digests"):
        render({"image": {"digests": {"worker": "latest"}}}, release="slurm", namespace="hpc")


PROMETHEUS = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]


def test_slurms_own_metrics_are_for_whom_they_are_named_and_nobody_else() -> None:
    """Readers of Slurm's metrics reach only the slurmctld port, and only on the controller."""
    wished = {
        "slurm": {"version": "26.05", "metrics": True},
        "podMonitor": {"enabled": True},
        "networkPolicy": {"metricsFrom": PROMETHEUS},
    }
    documents = render(wished, release="slurm", namespace="hpc")
    assert "MetricsType=metrics/openmetrics" in config(version="26.05", metrics=True)["slurm.conf"].splitlines()
    (policy,) = [item for item in kind(documents, "NetworkPolicy") if item["metadata"]["name"] == "slurm-slurm-metrics"]
    assert policy["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "controller"
    assert policy["spec"]["ingress"] == [{"ports": [{"port": "slurmctld", "protocol": "TCP"}], "from": PROMETHEUS}]
    (monitor,) = [item for item in kind(documents, "PodMonitor") if item["metadata"]["name"] == "slurm-slurm"]
    assert monitor["spec"]["selector"]["matchLabels"]["app.kubernetes.io/component"] == "controller"
    pages = {(end["port"], end["path"]) for end in monitor["spec"]["podMetricsEndpoints"]}
    assert ("slurmctld", "/metrics/jobs") in pages and len(pages) == 5
    # Without a configured reader nothing is admitted; without the `metrics` setting nothing is rendered.
    nobody = render({"slurm": wished["slurm"]}, release="slurm", namespace="hpc")
    assert not [item for item in kind(nobody, "NetworkPolicy") if item["metadata"]["name"] == "slurm-slurm-metrics"]
    plain = render(wished | {"slurm": {"version": "26.05"}}, release="slurm", namespace="hpc")
    assert not [item for item in plain if item["metadata"]["name"] in ("slurm-slurm-metrics", "slurm-slurm")]
    assert "MetricsType" not in config(version="26.05")["slurm.conf"]


@pytest.mark.parametrize(
    ("slurm", "said"),
    [
        ({"version": "24.11"}, "this release of Slurm has no metrics of its own"),
        (
            {"version": "26.05", "config": {"PrivateData": "jobs"}},
            "with PrivateData slurmctld gives its metrics to nobody",
        ),
        ({"version": "26.05", "extraConfig": "privatedata = jobs"}, "with PrivateData slurmctld gives"),
        ({"version": "26.05", "config": {"CommunicationParameters": "NoInAddrAny,disable_http"}}, "takes them away"),
        ({"version": "26.05", "extraConfig": "CommunicationParameters=disable_http"}, "takes them away"),
        ({"version": "26.05", "config": {"privatedata": "jobs"}}, "with PrivateData slurmctld gives"),
    ],
)
def test_metrics_that_nobody_could_read_are_refused_with_the_reason(slurm: dict[str, Any], said: str) -> None:
    with pytest.raises(ClusterError, match=said):
        with_slurm(slurm | {"metrics": True})


@pytest.mark.parametrize(
    "slurm",
    [
        {"config": {"JobContainerType": "job_container/tmpfs"}},
        {"version": "26.05", "config": {"NamespaceType": "namespace/tmpfs"}},
        {"version": "26.05", "extraConfig": "DebugFlags=none\nnamespacetype = namespace/linux"},
    ],
)
def test_a_tmp_of_a_jobs_own_that_slurmd_may_not_mount_is_refused(slurm: dict[str, Any]) -> None:
    """Refuse a job-private /tmp that slurmd may not mount: the node would be idle, and every job on it would fail."""
    with pytest.raises(ClusterError, match="takes SYS_ADMIN"):
        with_slurm(slurm)
    render({"slurm": slurm, "workers": {"capabilities": ["SYS_ADMIN"]}}, release="slurm", namespace="hpc")
    with_slurm({"config": {"JobContainerType": "job_container/none"}})
    with_slurm({**slurm, "extraConfig": "JobContainerType=job_container/none\nNamespaceType=namespace/none"})


def test_so_it_is_where_no_setting_does() -> None:
    """Slurm 26.05 has no setting for the user environment: a job submit filter does it, unless the site has its own."""
    data = config(version="26.05")
    lines = data["slurm.conf"].splitlines()
    assert not [line for line in lines if line.startswith("GetEnvTimeout")], "every daemon would complain of it"
    assert "JobSubmitPlugins=lua" in lines and "SLURM_GET_USER_ENV" in data["job_submit.lua"]
    assert data["job_submit.lua"].startswith("local has = {brings_back = true, hides_user_env = true}\n")
    older = config(version="24.11")["job_submit.lua"]
    assert older.startswith("local has = {brings_back = true, hides_user_env = false}\n")
    assert "job_submit.lua" not in config(version="24.11", bringBackJobs=False)
    without = config(version="26.05", bringBackJobs=False)
    assert without["job_submit.lua"].startswith("local has = {brings_back = false, hides_user_env = true}\n")
    assert "brings_back = false," in without["cli_filter.lua"].splitlines()[0]
    own = config(version="26.05", files={"job_submit.lua": "-- ours\n"})
    assert own["job_submit.lua"] == "-- ours\n" and "JobSubmitPlugins" not in own["slurm.conf"]
    assert "brings_back = false," in own["cli_filter.lua"].splitlines()[0], "nothing would take the options out again"
    assert "job_submit.lua" not in config(version="26.05", config={"JobSubmitPlugins": "all_partitions"})


def test_the_filters_know_whether_a_job_needs_an_account() -> None:
    enforcing = config(version="24.11", config={"AccountingStorageEnforce": "Associations,limits"})
    assert enforcing["job_submit.lua"].splitlines()[0].endswith(", enforces = true}")
    assert "enforces = true}" in enforcing["cli_filter.lua"].splitlines()[0]
    for kind in ("none", "nojobs"):
        assert "enforces = true" not in str(config(version="24.11", config={"AccountingStorageEnforce": kind}))


def test_slurm_config_changes_adds_and_removes_lines() -> None:
    values = {"slurm": {"config": {"SlurmdTimeout": 300, "JobRequeue": None, "Licenses": "matlab:4"}}}
    (config,) = [
        document
        for document in render(values, release="slurm", namespace="hpc")
        if document["metadata"]["name"] == "slurm-config"
    ]
    lines = config["data"]["slurm.conf"].splitlines()
    assert {"SlurmdTimeout=300", "Licenses=matlab:4"} <= set(lines)
    assert not [line for line in lines if line.startswith(("JobRequeue=", "SlurmdTimeout=120"))]


def test_the_notes_say_how_to_get_in() -> None:
    (notes,) = [
        text
        for name, text in render_texts(example("minimal"), release="slurm", namespace="hpc").items()
        if name.endswith("NOTES.txt")
    ]
    assert "kubectl -n hpc port-forward service/slurm-ssh 2222:22" in notes
    assert "minivm why" in notes


def test_values_and_schema_name_the_same_settings() -> None:
    import json

    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert not compare_keys(values, schema, "")


def compare_keys(values: Any, schema: dict[str, Any], path: str) -> list[str]:
    """Return the settings that only the values or only the schema has."""
    properties = schema.get("properties")
    if not isinstance(values, dict) or properties is None or path.endswith(".resources"):
        return []
    found = [f"{path}.{key}" for key in set(values) ^ (set(properties) - {"global"}) if values]
    for key in set(values) & set(properties):
        found += compare_keys(values[key], properties[key], f"{path}.{key}")
    return found


def test_values_of_a_chart_without_alerts_still_render() -> None:
    """`helm upgrade --reuse-values` has the older chart's values alone."""
    documents = render({"prometheusRule": None}, release="slurm", namespace="hpc")
    assert not kind(documents, "PrometheusRule")


def served(name: str) -> bool:
    """Tell if PID 1 serves a metric, as its own or from a service's file, or the fleet does."""
    from init.view import metrics

    source = Path(metrics.__file__).read_text()
    own = set(re.findall(r'family\(\s*"(minivm[a-z_]*)"', source)) | {
        f"minivm_{counter}" for counter in metrics.COUNTERS
    }
    prefixes = tuple(f"minivm_{Path(service).name}_" for service in (*metrics.SERVICES, "fleet"))
    return name.removesuffix("_total") in own or name.startswith(prefixes)


def test_the_dashboard_asks_for_metrics_that_are_served() -> None:
    dashboard = json.loads(one("h100-infiniband", "ConfigMap", "hall2-dashboard")["data"]["minivm.json"])
    asked = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"\bminivm_(?!io_)[a-z_]+", target["expr"])
    }
    assert asked and not [name for name in asked if not served(name)]


def test_alerts_ask_for_metrics_that_are_served() -> None:
    """An alert about a metric that no page has never fires."""
    text = (CHART / "files/alerts.yaml").read_text()
    expressions = " ".join(re.findall(r"expr: (.*)", text))
    asked = set(re.findall(r"\b(minivm_(?!io_)[a-z_]+)(?=[{\[)])", expressions))
    assert len(asked) > 10 and not [name for name in asked if not served(name)]


@pytest.mark.parametrize("name", EXAMPLES)
def test_system_calls_are_kept_from_every_pod_that_is_not_privileged(name: str) -> None:
    for document in rendered(name):
        if document["kind"] in ("StatefulSet", "Job"):
            spec = document["spec"]["template"]["spec"]
            security = spec.get("securityContext", {}) | container(document)["securityContext"]
            wanted = None if security.get("privileged") else {"type": "RuntimeDefault"}
            assert security.get("seccompProfile") == wanted, document["metadata"]["name"]


def test_a_pool_may_have_another_profile_and_the_others_keep_theirs() -> None:
    local = {"type": "Localhost", "localhostProfile": "profiles/enroot.json"}
    pools = {"a": {"seccompProfile": "Localhost/profiles/enroot.json"}, "b": {}}
    documents = render({"workers": {"pools": pools}}, release="slurm", namespace="n")
    found = {
        document["metadata"]["name"]: container(document)["securityContext"]["seccompProfile"]
        for document in kind(documents, "StatefulSet")
    }
    runtime = {"type": "RuntimeDefault"}
    assert found == {"slurm-a": local, "slurm-b": runtime, "slurm-controller": runtime, "slurm-login": runtime}
    with pytest.raises(ClusterError, match="seccompProfile"):
        render({"workers": {"defaults": {"seccompProfile": "none"}}}, release="slurm", namespace="n")


def test_containers_in_jobs_are_one_switch() -> None:
    digest = f"sha256:{'ab' * 32}"
    values = {
        "image": {"digests": {"worker-containers": digest, "fleet": digest}},
        "containers": {"enabled": True, "registries": "unqualified = 1"},
        "workers": {"pools": {"a": {}, "b": {"seccompProfile": "Unconfined", "podAnnotations": {"mine": "kept"}}}},
    }
    documents = render(values, release="slurm", namespace="n")
    (config,) = [item for item in documents if item["metadata"]["name"] == "slurm-config"]
    assert config["data"]["oci.conf"] == (CHART / "files/oci.conf").read_text()
    assert config["data"]["cli_filter.lua"].startswith("local has = {containers = true,")
    pods = {document["metadata"]["name"]: document for document in kind(documents, "StatefulSet")}
    assert container(pods["slurm-a"])["image"] == f"minivm/worker-containers:latest@{digest}"
    assert container(pods["slurm-login"])["image"].startswith("minivm/login:")
    security = container(pods["slurm-a"])["securityContext"]
    assert security["seccompProfile"] == {"type": "Localhost", "localhostProfile": "minivm-containers.json"}
    assert security["appArmorProfile"] == {"type": "Unconfined"} and "SYS_ADMIN" not in security["capabilities"]["add"]
    assert container(pods["slurm-b"])["securityContext"]["seccompProfile"] == {"type": "Unconfined"}
    assert env(pods["slurm-a"])["MINIVM_CONTAINERS"] == "yes"
    mounted = [item["mountPath"] for item in container(pods["slurm-a"])["volumeMounts"]]
    assert "/etc/containers/registries.conf.d" in mounted
    assert [each["data"] for each in documents if each["metadata"]["name"] == "slurm-registries"] == [
        {"site.conf": "unqualified = 1"}
    ]


def test_containers_by_pyxis_are_slurms_own_and_a_plug_in_that_no_node_may_lack() -> None:
    values: dict[str, Any] = {"containers": {"enabled": True, "by": "pyxis", "enroot": "ENROOT_ALLOW_HTTP y"}}
    documents = render(values, release="slurm", namespace="n")
    by_name = {item["metadata"]["name"]: item for item in documents if item["kind"] == "ConfigMap"}
    config = by_name["slurm-config"]["data"]
    lines = [line for line in config["plugstack.conf"].splitlines() if not line.startswith("#")]
    # Slurm ignores a missing optional plug-in, and would start the job outside of its container.
    assert len(lines) == 1 and lines[0].startswith("required spank_pyxis.so ") and "oci.conf" in config
    assert by_name["slurm-enroot"]["data"] == {"site.conf": "ENROOT_ALLOW_HTTP y"}
    pods = {document["metadata"]["name"]: document for document in kind(documents, "StatefulSet")}
    images = {name: container(pod)["image"].partition(":")[0] for name, pod in pods.items()}
    assert images["slurm-worker"] == "minivm/worker-pyxis" and images["slurm-login"] == "minivm/login-pyxis"
    security = container(pods["slurm-worker"])["securityContext"]
    assert security["seccompProfile"]["localhostProfile"] == "minivm-containers.json"
    assert "SYS_ADMIN" not in security["capabilities"]["add"]
    mounted = [item["mountPath"] for item in container(pods["slurm-worker"])["volumeMounts"]]
    assert "/etc/enroot/enroot.conf.d" in mounted
    with pytest.raises(ClusterError, match="makes a plugstack"):
        render(values | {"slurm": {"files": {"plugstack.conf": "x"}}}, release="slurm", namespace="n")
    with pytest.raises(ClusterError, match="value must be one of"):
        render({"containers": {"enabled": True, "by": "enroot"}}, release="slurm", namespace="n")


def test_without_the_switch_nothing_of_containers_is_there() -> None:
    documents = render({"containers": {"registries": "x", "by": "pyxis"}}, release="slurm", namespace="n")
    assert not [each for each in documents if each["metadata"]["name"] == "slurm-registries"]
    text = json.dumps(documents)
    for word in ("MINIVM_CONTAINERS", "appArmorProfile", "oci.conf: ", "worker-containers", "pyxis", "plugstack"):
        assert word not in text


def test_a_site_s_own_oci_conf_wins() -> None:
    values = {"containers": {"enabled": True}, "slurm": {"files": {"oci.conf": "mine"}}}
    (config,) = [
        each for each in render(values, release="slurm", namespace="n") if each["metadata"]["name"] == "slurm-config"
    ]
    assert config["data"]["oci.conf"] == "mine\n"


def test_a_file_that_the_chart_makes_itself_is_refused_with_its_setting() -> None:
    files = {"gres.conf": "Name=gpu", "cgroup.conf": "", "slurm.conf": "x", "pools.json": "{}", "burst_buffer.conf": ""}
    with pytest.raises(ClusterError) as caught:
        render({"slurm": {"files": files}}, release="slurm", namespace="n")
    assert "slurm.files: the chart makes gres.conf itself: write it to slurm.gresConfig" in str(caught.value)
    assert str(caught.value).count("slurm.files: ") == 4 and "burst_buffer" not in str(caught.value)


def test_nothing_that_a_user_writes_stands_unquoted_in_the_line_that_a_shell_reads() -> None:
    """The shell command line contains only safe substitutions.

    slurmstepd quotes only %@, so an image name (%b) would pass the user's text to a shell unquoted.
    """
    text = (CHART / "files/oci.conf").read_text()
    assert set(re.findall(r"%(.)", text)) == {"j", "s", "m", "e", "@"}
    assert 'RunTimeEnvExclude="="' in text, "slurmd's environment is no user's"


def test_the_seccomp_profile_denies_what_it_does_not_name() -> None:
    """The profile answers unlisted calls with ENOSYS, so that a newer C library falls back to an older call."""
    profile = json.loads((CHART / "files/seccomp-containers.json").read_text())
    assert (profile["defaultAction"], profile["defaultErrnoRet"]) == ("SCMP_ACT_ERRNO", 38)
    rules = [(name, rule) for rule in profile["syscalls"] for name in rule["names"]]
    allowed = {name for name, rule in rules if rule["action"] == "SCMP_ACT_ALLOW" and "args" not in rule}
    dangerous = {"bpf", "kexec_load", "init_module", "io_uring_setup", "keyctl", "perf_event_open", "userfaultfd"}
    assert not allowed & (dangerous | {"clone", "clone3", "unshare", "socket", "fsopen"})
    assert {"mount", "pivot_root", "umount2", "execve", "openat"} <= allowed, "what bubblewrap lives by"


def test_the_seccomp_profile_lets_nobody_have_a_network_of_his_own() -> None:
    profile = json.loads((CHART / "files/seccomp-containers.json").read_text())
    network = 0x40000000
    for name in ("clone", "unshare"):
        rules = {rule["action"]: rule["args"] for rule in profile["syscalls"] if name in rule["names"]}
        assert rules == {
            action: [{"index": 0, "value": value, "valueTwo": two, "op": "SCMP_CMP_MASKED_EQ"}]
            for action, value, two in (("SCMP_ACT_ERRNO", network, network), ("SCMP_ACT_ALLOW", network, 0))
        }
    # clone3 fails with ENOSYS and not EPERM: the C library then uses clone, which the rule above checks.
    (clone3,) = [rule for rule in profile["syscalls"] if "clone3" in rule["names"]]
    assert clone3["errnoRet"] == 38


def test_a_demo_by_itself_is_whole(tmp_path: Path) -> None:
    """A demo release includes a directory with its users, and every pod queries it."""
    documents = render({"demo": PEOPLE}, release="try", namespace="hpc")
    (directory,) = [each for each in kind(documents, "ConfigMap") if each["metadata"]["name"] == "try-demo"]
    entries = [
        dict(line.split(": ", 1) for line in each.splitlines())
        for each in directory["data"]["users.ldif"].strip().split("\n\n")
    ]
    assert entries[-1]["uid"] == "alice" and entries[-1]["uidNumber"] == "20001"
    assert entries[-1]["sshPublicKey"] == "ssh-ed25519 AAAA alice@example.org"
    (sssd,) = [each for each in kind(documents, "Secret") if each["metadata"]["name"] == "try-sssd"]
    conf = base64.b64decode(sssd["data"]["sssd.conf"]).decode().splitlines()
    assert "ldap_uri = ldap://try-demo" in conf
    # Without the wait, a login pod that starts together with the directory would reject every user for over a minute.
    again = [
        int(line.partition("=")[2]) for line in conf if line.startswith(("offline_timeout =", "offline_timeout_random"))
    ]
    assert len(again) == 2
    assert sum(again) <= 10
    for document in kind(documents, "StatefulSet"):
        volumes = {item["name"]: item for item in document["spec"]["template"]["spec"]["volumes"]}
        name = document["metadata"]["name"]
        assert ("sssd" in volumes) == (name != "try-demo"), name


def test_a_demo_without_people_is_refused_in_words() -> None:
    with pytest.raises(ClusterError, match="a directory without people lets nobody log in: name them") as caught:
        render({"demo": {"enabled": True}}, release="try", namespace="hpc")
    assert "demo.users" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("alice", "AAAA"),
        ("alice", "ssh-ed25519 AAAA\nuidNumber: 0"),
        ("Alice,ou=x", "ssh-ed25519 AAAA"),
        ("a b", "ssh-rsa A"),
    ],
)
def test_no_line_of_the_directory_hides_in_a_name_or_a_key(name: str, key: str) -> None:
    with pytest.raises(ClusterError, match="does not match pattern"):
        render({"demo": {"enabled": True, "users": {name: key}}}, release="try", namespace="hpc")


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ("{not json", "scripts.policy.policy.json: not JSON"),
        ("[]", "scripts.policy.policy.json: not JSON, or not a mapping"),
        ('{"brokr": {}}', "unknown key brokr; known: runner, gate, broker"),
        ('{"broker": {"guard": {}, "cheks": {}}}', "unknown key broker.cheks; known: raise_after, clear_after"),
        ('{"runner": {"prologs": {}}}', "unknown key runner.prologs; known: prolog, epilog"),
        ('{"gate": {"wait": 3}}', "unknown key gate.wait; known: wait_s, unconfirmed"),
        ('{"gate": 3}', "gate: wanted a mapping"),
    ],
)
def test_a_policy_that_nodes_would_leave_aside_is_refused(policy: str, said: str) -> None:
    """Refuse a policy that nodes would ignore: they would drain by a policy other than the site's."""
    with pytest.raises(ClusterError, match=re.escape(said)):
        render({"scripts": {"policy": {"policy.json": policy}}}, release="slurm", namespace="n")


def test_what_the_code_takes_as_policy_the_chart_takes() -> None:
    text = (CHART.parents[1] / "scripts/lib/policy.json").read_text()
    whole = json.loads(text)
    broker_policy(whole, "policy.json")
    assert {key: set(part) for key, part in whole.items()}["broker"] == {
        "raise_after", "clear_after", "clear_wait_s", "guard", "rate", "offender", "checks",
    }  # fmt: skip
    for policy in (text, "{}", '{"broker": {}}'):
        render({"scripts": {"policy": {"policy.json": policy}}}, release="slurm", namespace="n")


def test_the_chart_knows_gitsyncs_settings_and_no_others() -> None:
    """The schema accepts exactly gitsync's settings.

    A misspelled setting would end gitsync on every node, and the scripts would stay as they are.
    """
    schema = json.loads((CHART / "values.schema.json").read_text())
    known = schema["properties"]["scripts"]["properties"]["env"]["propertyNames"]["enum"]
    assert known == sorted(f"{PREFIX}{field.name.upper()}" for field in fields(GitsyncSettings))
    with pytest.raises(ClusterError, match="MINIVM_GITSYNC_PERIODE"):
        render({"scripts": {"env": {"MINIVM_GITSYNC_PERIODE": "5"}}}, release="slurm", namespace="n")


def test_every_mistake_of_a_values_file_is_told_at_once_with_field_found_and_expected() -> None:
    wrong: dict[str, Any] = {
        "clusterNam": "x",
        "controller": {"graceSeconds": 1},
        "home": {"mountPath": "/usr/bin"},
        "mounts": {"data": {"mountPath": "/data"}},
        "networkPolicy": {"nodeCidrs": ["anywhere"]},
        "scripts": {"env": {"MINIVM_GITSYNC_PERIODE": "5"}},
        "secrets": {"munge": {"key": 5}, "jwt": {"key": "YWJj"}},
        "slurm": {"proctrack": "foo", "partitions": {"p": {"pools": ["nowhere"]}}},
        "workers": {"defaults": {"graceSeconds": "x"}, "pools": {"a": {"replicas": -1, "repliccas": 3}, "login": {}}},
    }
    with pytest.raises(ClusterError) as caught:
        chart_render.render(new(wrong), release="s", namespace="n", file="/site/values.yaml")
    head, *lines, hint = str(caught.value).splitlines()
    assert head.strip() == "cannot use the values of /site/values.yaml:"
    assert hint == "hint: docs/reference/chart.md has the keys"
    assert sorted(line.strip() for line in lines) == [
        "controller.graceSeconds: it must be at least 20, not 1",
        "home.mountPath: /usr/bin hides /usr/bin, which minivm needs: choose another path",
        "mounts.data: one of claim, nfs, hostPath is missing",
        "networkPolicy.nodeCidrs.0: 'anywhere' does not match pattern '^[0-9a-fA-F.:]+/[0-9]+$'",
        "scripts.env: no such key: 'MINIVM_GITSYNC_PERIODE' (did you mean MINIVM_GITSYNC_PERIOD?)",
        "secrets.jwt.key has 3 bytes, and a key has 32 to 8192: leave it empty and the cluster makes one",
        "secrets.munge.key: it must be string, not number",
        "slurm.partitions.p names the pool nowhere, which workers.pools does not have",
        "slurm.proctrack: value must be one of 'linuxproc', 'cgroup', not 'foo'",
        "the values: no such key: 'clusterNam' (did you mean clusterName?)",
        "workers.defaults.graceSeconds: it must be integer, not 'x'",
        "workers.pools.a.replicas: it must be at least 0, not -1",
        "workers.pools.a: no such key: 'repliccas' (did you mean replicas?)",
        "workers.pools.login: the name belongs to another part of the cluster",
    ]


def test_one_mistake_is_told_on_one_line_and_a_secret_is_not_shown() -> None:
    with pytest.raises(ClusterError, match=r"^cannot use the values: the values: no such key: 'clusterNam' \("):
        render({"clusterNam": "x"}, release="s", namespace="n")
    with pytest.raises(ClusterError) as caught:
        render({"accounting": {"database": {"password": 424242}}}, release="s", namespace="n")
    assert "accounting.database.password: it must be string, not number" in str(caught.value)
    assert "424242" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"slurm": {"version": 26.05}}, "slurm.version: it must be string, not 26.05: put it in quotes"),
        ({"controller": {"backups": {"every": 24}}}, "controller.backups.every: it must be 0 or string, not 24"),
        (
            {"controller": {"backups": {"every": "24"}}},
            "controller.backups.every: it must be 0 or a text that matches '^(0|[1-9][0-9]*(m|h|d))$', not '24'",
        ),
        (
            {"fleet": {"policy": {"dead": "5 minutes"}}},
            "fleet.policy.dead: it must be number or a text that matches '^[0-9.]+(ms|s|m|h)$', not '5 minutes'",
        ),
        (
            {"slurm": {"partitions": {"a b": {"pools": ["worker"]}}}},
            "slurm.partitions: no such key: 'a b', which does not match pattern '^[A-Za-z0-9_-]+$'",
        ),
    ],
)
def test_a_mistake_names_all_that_the_schema_takes(values: dict[str, Any], line: str) -> None:
    with pytest.raises(ClusterError) as caught:
        chart_render.render(new(values), release="s", namespace="n")
    assert str(caught.value).splitlines()[0] == f"cannot use the values: {line}"


@pytest.mark.parametrize("every", [0, "0", "30m"])
def test_copies_may_be_off_or_have_a_period(every: object) -> None:
    assert render({"controller": {"backups": {"every": every}}}, release="s", namespace="n")


def test_a_refused_value_causes_no_second_mistake() -> None:
    """The checks see the default in its place, and say nothing about the same field."""
    with pytest.raises(ClusterError) as caught:
        chart_render.render({"slurm": {"auth": "kerberos"}}, release="s", namespace="n")
    assert str(caught.value).splitlines()[0] == (
        "cannot use the values: slurm.auth: value must be one of '', 'munge', 'slurm', not 'kerberos'"
    )


def test_mistakes_that_only_the_charts_checks_find_are_told_at_once() -> None:
    text = {"services": {"a.yaml": "colour: red", "b.yaml": "[]"}}
    wrong = {"dropIns": {"worker": text}, "notifications": {"mail": {"relay": "smtp://relay", "user": "u"}}}
    with pytest.raises(ClusterError) as caught:
        render(wrong, release="s", namespace="n")
    lines = str(caught.value).splitlines()
    for start in ("dropIns.worker.services.a.yaml: unknown key colour", "dropIns.worker.services.a.yaml: command is",
                  "dropIns.worker.services.b.yaml: not a service file", "notifications.mail.from is empty",
                  "notifications.mail: a password over smtp://"):  # fmt: skip
        assert any(line.strip().startswith(start) for line in lines), start
