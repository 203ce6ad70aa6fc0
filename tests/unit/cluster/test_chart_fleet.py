"""Fleet in the chart: off by default, with only the rights that it needs and a policy that it accepts."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster import ClusterError
from cluster.render import CHART, Document
from fleet.decide.topology import BLOCKS, NAME, UNKNOWN, block, place
from fleet.policy import MACHINES_KEYS, POLICY_KEYS, WEBHOOK_FILES, Policy, Webhook, parse_policy_text, read_settings
from fleet.world.kubernetes import FREE, RESTART, RETURNING
from fleet.world.slurm import Offer
from fleet.world.worker_pool import ElasticSpec, parse_pool
from init.errors import ConfigError
from init.helpers.configwatch import REQUEST_DIRECTORY, REQUEST_FILE
from tests.support.rendered_chart import render

ROOT = Path(__file__).resolve().parents[3]


def rendered(**values: Any) -> list[Document]:
    fleet = {"enabled": True} | values.pop("fleet", {})
    return render({"fleet": fleet} | values, release="slurm", namespace="hpc")


def only(documents: list[Document], kind: str, name: str = "slurm-fleet") -> dict[str, Any]:
    (found,) = [one for one in documents if (one["kind"], one["metadata"]["name"]) == (kind, name)]
    return dict(found)


def rules(documents: list[Document]) -> dict[str, dict[str, Any]]:
    found = {}
    for one in documents:
        if one["kind"] in ("Role", "ClusterRole") and one["metadata"]["name"].endswith(("-fleet", "-fleet-guests")):
            for rule in one["rules"]:
                for resource in rule["resources"]:
                    where = f" in {one['metadata']['namespace']}" if "namespace" in one["metadata"] else ""
                    named = " of the workers" if resource == "pods" and "resourceNames" in rule else ""
                    found[f"{one['kind']} {resource}{named}{where}"] = rule
    return found


def pod(documents: list[Document]) -> dict[str, Any]:
    found: dict[str, Any] = only(documents, "Deployment")["spec"]["template"]["spec"]
    return found


def test_unasked_there_is_nothing_of_it() -> None:
    documents = render({}, release="slurm", namespace="hpc")
    assert "fleet" not in yaml.safe_dump_all(documents)
    assert "SLURMRESTD" not in yaml.safe_dump_all(documents)


@pytest.mark.parametrize("kind", ["StatefulSet", "WorkerPool"])
def test_what_the_fleet_asks_of_a_worker_is_shown_to_it_and_to_no_other_pod(kind: str) -> None:
    """Mount the restart request in workers only, at the path that the worker reads.

    The volume exists without a fleet too, so that enabling the fleet restarts no pod.
    """
    owned = kind == "WorkerPool"
    documents = render(
        {"fleet": {"enabled": owned, "workerPools": {"enabled": owned}}, "workers": {"pools": {"gpu": {"kind": kind}}}},
        release="slurm", namespace="hpc",
    )  # fmt: skip
    specs = {
        one["metadata"]["name"]: one["spec"]["template"]["spec"]
        for one in documents
        if one["kind"] in ("StatefulSet", "WorkerPool", "Deployment")
    }
    shown = {name: [one for one in spec["volumes"] if "downwardAPI" in one] for name, spec in specs.items()}
    assert {name for name, volumes in shown.items() if volumes} == {"slurm-gpu"}
    field = {"fieldPath": f"metadata.annotations['{RESTART}']"}
    assert shown["slurm-gpu"] == [
        {"name": "asked", "downwardAPI": {"items": [{"path": REQUEST_FILE, "fieldRef": field}]}}
    ]
    mounts = specs["slurm-gpu"]["containers"][0]["volumeMounts"]
    assert {"name": "asked", "mountPath": str(REQUEST_DIRECTORY), "readOnly": True} in mounts


def test_it_may_do_what_it_does_and_nothing_else() -> None:
    found = rules(rendered(workers={"pools": {"gpu": {"replicas": 3}, "cpu": {}}}))
    may = {name: rule["verbs"] for name, rule in found.items()}
    assert may == {
        "Role pods": ["get", "list", "watch"],
        "Role pods of the workers": ["patch"],
        "Role pods/status": ["patch"],
        "Role pods/eviction": ["create"],
        "Role leases": ["update"],
        "Role statefulsets": ["list", "watch"],
        "ClusterRole nodes": ["get", "list", "watch"],
        "ClusterRole nodes/status": ["patch"],
        "ClusterRole events": ["create"],
        "ClusterRole leases": ["get"],
    }
    workers = ["slurm-cpu-0", "slurm-gpu-0", "slurm-gpu-1", "slurm-gpu-2"]
    for writes in ("Role pods of the workers", "Role pods/status", "Role pods/eviction"):
        assert sorted(found[writes]["resourceNames"]) == workers, "no controller, no login pod, no user's pod"
    assert found["Role leases"]["resourceNames"] == ["slurm-fleet"]


PEOPLE = {"enabled": True, "users": {"alice": "ssh-ed25519 AAAA"}}


def test_of_a_dead_machine_it_may_delete_each_pod_that_comes_back_under_its_name() -> None:
    values: dict[str, Any] = {
        "demo": PEOPLE,
        "accounting": {"mode": "pod"},
        "login": {"replicas": 2},
        "workers": {"pools": {"gpu": {"replicas": 2}}},
    }
    documents = rendered(fleet={"policy": {"fencing": "act"}}, **values)
    sets = [one for one in documents if one["kind"] == "StatefulSet"]
    named = {f"{one['metadata']['name']}-{i}" for one in sets for i in range(one["spec"]["replicas"])}
    components = {one["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/component"] for one in sets}
    role = only(documents, "Role")["rules"]
    (rule,) = [rule for rule in role if rule["resources"] == ["pods"] and "delete" in rule["verbs"]]
    assert (set(rule["resourceNames"]), components) == (named, set(RETURNING))


def test_it_may_change_a_node_only_where_the_policy_cordons() -> None:
    cordons = rules(rendered(fleet={"policy": {"cordon": True}}))
    assert cordons["ClusterRole nodes"]["verbs"] == ["get", "list", "watch", "patch"]
    assert "ClusterRole nodes/status" not in rules(rendered(fleet={"policy": {"nodeCondition": ""}}))


def test_machines_are_kept_only_where_they_are_asked_for() -> None:
    documents = rendered(fleet={"machines": {"enabled": True}})
    assert rules(documents)["Role machines"]["verbs"] == ["list", "watch", "create"]
    assert rules(documents)["Role machines/status"]["verbs"] == ["patch"]
    assert "patch" in rules(documents)["ClusterRole nodes"]["verbs"], "a machine that is not to be up is cordoned"
    given = {one["name"]: one.get("value", "x") for one in pod(documents)["containers"][0]["env"]}
    assert read_settings(given).machines
    assert "Role machines" not in rules(rendered())


def test_pods_are_made_only_where_pools_are_asked_for() -> None:
    pools = {"workerPools": {"enabled": True}}
    documents = rendered(fleet=pools)
    found = rules(documents)
    assert found["Role workerpools"]["verbs"] == ["list", "watch"], "what people want of a pool is people's to write"
    assert found["Role workerpools/status"]["verbs"] == ["patch"]
    assert found["Role pods"]["verbs"] == ["create", "patch"] and "resourceNames" not in found["Role pods/eviction"]
    assert rules(rendered(fleet={**pools, "policy": {"fencing": "act"}}))["Role pods"]["verbs"][-1] == "delete"
    given = {one["name"]: one.get("value", "x") for one in pod(documents)["containers"][0]["env"]}
    assert read_settings(given).pools
    assert not read_settings({one["name"]: one.get("value", "x") for one in env_of(rendered())}).pools
    assert not [one for one in rules(rendered()).values() if "pods" in one["resources"] and "create" in one["verbs"]]


POOL = "WorkerPool"
OWNED: dict[str, Any] = {"enabled": True, "workerPools": {"enabled": True}}


def pool_of(**pool: Any) -> dict[str, Any]:
    return only(rendered(fleet=OWNED, workers={"pools": {"gpu": pool}}), POOL, "slurm-gpu")


def test_a_pool_is_a_workerpool_or_a_statefulset_of_the_same_template() -> None:
    usual: dict[str, Any] = {"replicas": 3, "gpu": {"count": 8}, "nodeSelector": {"gpu": "yes"}}
    made = pool_of(kind=POOL, **usual)
    before = only(rendered(fleet=OWNED, workers={"pools": {"gpu": usual}}), "StatefulSet", "slurm-gpu")
    assert made["spec"]["template"] == before["spec"]["template"]
    assert made["metadata"] == before["metadata"]
    read = parse_pool({**made, "metadata": {**made["metadata"], "uid": "u"}})
    assert (read.replicas, read.max_unavailable, read.deadline_s, read.label) == (3, 1, None, "gpu")


def test_a_pool_on_each_node_and_how_long_jobs_keep_a_pod() -> None:
    made = pool_of(
        kind=POOL, perNode=True, nodeSelector={"gpu": "yes"}, maxUnavailable=0,
        update={"when": "deadline", "deadlineSeconds": 3600},
    )  # fmt: skip
    read = parse_pool({**made, "metadata": {**made["metadata"], "uid": "u"}})
    assert (read.replicas, read.selector, read.max_unavailable, read.deadline_s) == (None, {"gpu": "yes"}, 0, 3600.0)


def test_a_pool_that_grows_serves_its_partitions() -> None:
    pools = {"gpu": {"kind": POOL, "elastic": {"min": 0, "max": 3, "idleSeconds": 60}, "gpu": {"count": 8}}}
    documents = rendered(fleet=OWNED, workers={"pools": {**pools, "cpu": {"replicas": 1}}})
    made = only(documents, POOL, "slurm-gpu")
    read = parse_pool({**made, "metadata": {**made["metadata"], "uid": "u"}})
    says = Offer(features=frozenset({"minivm", "gpu"}), gpus=8)
    assert read.elastic == ElasticSpec(0, 3, 60.0, 30.0, 10, frozenset({"all", "gpu"}), says)
    counts = json.loads(only(documents, "ConfigMap", "slurm-config")["data"]["pools.json"])["pools"]
    assert counts == {"slurm-gpu": 3, "slurm-cpu": 1}, "the controller keeps the records of those that sleep"


def test_the_number_of_a_pool_that_is_scaled_from_outside_is_in_no_manifest() -> None:
    made = pool_of(kind=POOL, replicas=3, externalScaling=True)
    assert "replicas" not in made["spec"]


def test_no_object_of_the_fleet_is_in_another_namespace() -> None:
    documents = rendered(fleet=OWNED | {"machines": {"enabled": True}, "policy": {"fencing": "act", "cordon": True}})
    assert [one["metadata"]["name"] for one in documents if "namespace" in one["metadata"]] == []


@pytest.mark.parametrize(
    ("fleet", "wrong", "why"),
    [
        (OWNED, {"externalScaling": True, "kind": "StatefulSet"}, "externalScaling needs kind: WorkerPool"),
        (
            OWNED,
            {"externalScaling": True, "elastic": {"min": 0, "max": 1}},
            "externalScaling needs a pool with replicas",
        ),
        ({"enabled": True}, {}, "needs the fleet"),
        ({"enabled": False}, {}, "needs the fleet"),
        (OWNED, {"perNode": True}, "needs a nodeSelector"),
        (OWNED, {"perNode": True, "nodeSelector": {"a": "b"}, "perPodServices": True}, "dynamic nodes"),
        (OWNED, {"perNode": True, "kind": "StatefulSet"}, "needs kind: WorkerPool"),
        (OWNED, {"elastic": {"min": 3, "max": 2}}, "is more than"),
        (OWNED, {"elastic": {"min": 0, "max": 2}, "perPodServices": True}, "elastic needs dynamic nodes"),
        (OWNED, {"elastic": {"min": 0, "max": 2}, "perNode": True, "nodeSelector": {"a": "b"}}, "not with perNode"),
        (OWNED, {"elastic": {"min": 0, "max": 2}, "kind": "StatefulSet"}, "elastic needs kind: WorkerPool"),
        (OWNED, {"elastic": {"max": 2}}, "elastic"),
        (OWNED, {"maxUnavailable": "10%"}, "is a number"),
        (OWNED, {"update": {"when": "deadline"}}, "needs deadlineSeconds"),
    ],
)
def test_a_pool_that_the_fleet_could_not_make_is_refused(
    fleet: dict[str, Any], wrong: dict[str, Any], why: str
) -> None:
    with pytest.raises(ClusterError, match=why):
        rendered(fleet=fleet, workers={"pools": {"gpu": {"kind": POOL, **wrong}}})


def test_where_the_fleet_writes_the_conditions_no_pod_of_slurm_has_a_token_or_a_right() -> None:
    """The fleet reads the conditions from the pods' pages, so no pod needs a right to write a status, even its own."""
    pools = {"gpu": {"replicas": 2}, "all": {"kind": POOL, "perNode": True, "nodeSelector": {"a": "b"}}}
    documents = rendered(fleet=OWNED, workers={"pools": pools}, podConditions={"enabled": True})
    bound = {
        subject["name"]
        for one in documents
        if one["kind"] in ("RoleBinding", "ClusterRoleBinding")
        for subject in one["subjects"]
    }
    assert bound <= {"slurm-fleet", "slurm-keys", "slurm-uninstall"}
    specs = [one["spec"]["template"]["spec"] for one in documents if one["kind"] in ("StatefulSet", POOL)]
    assert len(specs) == 4
    for spec in specs:
        assert spec["automountServiceAccountToken"] is False and "readinessGates" not in spec
        assert "serviceAccountToken" not in json.dumps(spec)
    assert {"name": "MINIVM_FLEET_CONDITIONS", "value": "yes"} in env_of(documents)


def test_without_conditions_the_fleet_writes_none_of_the_pods_own() -> None:
    documents = rendered()
    assert "MINIVM_FLEET_CONDITIONS" not in [each["name"] for each in env_of(documents)]
    assert not [one for one in documents if one["metadata"]["name"] == "slurm-conditions"]


def test_the_fleet_writes_conditions_of_the_controller_and_the_logins_and_changes_nothing_else_there() -> None:
    values: dict[str, Any] = {"login": {"replicas": 2}, "demo": PEOPLE, "workers": {"pools": {"gpu": {}}}}
    documents = rendered(podConditions={"enabled": True}, **values)
    slurm = {"slurm-controller-0", "slurm-login-0", "slurm-login-1"}
    naming = [rule for rule in only(documents, "Role")["rules"] if slurm & set(rule.get("resourceNames", ()))]
    assert [(set(rule["resourceNames"]), rule["resources"], rule["verbs"]) for rule in naming] == [
        (slurm, ["pods/status"], ["patch"])
    ]
    spec = only(documents, "NetworkPolicy", "slurm-conditions")["spec"]
    (rule,) = spec["ingress"]
    assert rule["ports"] == [{"port": "http", "protocol": "TCP"}]
    (peer,) = rule["from"]
    assert peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "fleet"
    assert spec["policyTypes"] == ["Ingress"]


def env_of(documents: list[Document]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pod(documents)["containers"][0]["env"]
    return found


def test_jobs_are_started_only_where_a_remedy_is_one() -> None:
    job: dict[str, Any] = {"reboot": {"job": {"template": {}}}, "replace": {"job": {"template": {}}}}
    annotates = {"down": {"annotate": {"a": "b"}}}
    for mode, remedies, may in (("act", job, True), ("propose", job, False), ("act", annotates, False)):
        policy = {"machines": {"mode": mode, "remedies": remedies}}
        documents = rendered(fleet={"machines": {"enabled": True}, "policy": policy})
        assert ("Role jobs" in rules(documents)) is may
        assert parse_policy_text(only(documents, "ConfigMap")["data"]["policy.json"]).machines.mode == mode


REPAIR = {"url": "https://repair.example/machines", "tokenFile": "token", "caFile": "ca.crt"}


def test_deep_checks_are_a_proof_where_a_pod_may_tell_of_them() -> None:
    def proof(*, told: bool, **machines: Any) -> str:
        values = {"machines": {"enabled": True}, "policy": {"machines": machines}}
        documents = rendered(fleet=values, podConditions={"enabled": told})
        found = parse_policy_text(only(documents, "ConfigMap")["data"]["policy.json"]).machines
        assert found.at_once == machines.get("atOnce", 1)
        return found.proof

    assert (proof(told=True), proof(told=False), proof(told=False, atOnce=3)) == ("deep", "verdict", "verdict")
    assert (proof(told=True, proof="verdict"), proof(told=True, proof="deep")) == ("verdict", "deep")
    with pytest.raises(ClusterError, match=r"set podConditions\.enabled, or proof: verdict"):
        proof(told=False, proof="deep")


def calls(hook: dict[str, Any], **fleet: Any) -> list[Document]:
    policy = {"machines": {"mode": "act", "remedies": {"replace": {"webhook": hook}}}}
    return rendered(fleet={"machines": {"enabled": True}, "policy": policy, **fleet})


def test_webhooks_have_the_files_of_the_secret_that_is_named_and_no_right_for_it() -> None:
    documents = calls(REPAIR, webhookSecret="repair")
    said = parse_policy_text(only(documents, "ConfigMap")["data"]["policy.json"])
    assert said.machines.remedies["replace"].webhook == Webhook(REPAIR["url"], "token", "ca.crt")
    (volume,) = [one for one in pod(documents)["volumes"] if one["name"] == "webhook"]
    assert volume["secret"] == {"secretName": "repair", "defaultMode": 0o440}
    (mount,) = [one for one in pod(documents)["containers"][0]["volumeMounts"] if one["name"] == "webhook"]
    assert (mount["mountPath"], mount["readOnly"]) == (WEBHOOK_FILES, True)
    assert rules(documents).keys() == rules(rendered(fleet={"machines": {"enabled": True}})).keys()
    assert "webhook" not in [one["name"] for one in pod(calls({"url": REPAIR["url"]}))["volumes"]]
    with pytest.raises(ClusterError, match=r"replace\.webhook: tokenFile and caFile .* fleet\.webhookSecret"):
        calls(REPAIR)


@pytest.mark.parametrize(
    ("slurm", "closed"),
    [({}, True), ({"userTokenSeconds": 600}, False)],
    ids=["users make no tokens", "slurmrestd is for users too"],
)
def test_users_connections_reach_slurmrestd_only_where_they_may_have_tokens(
    slurm: dict[str, Any], *, closed: bool
) -> None:
    documents = rendered(slurm=slurm)
    (rule,) = only(documents, "NetworkPolicy", "slurm-inside")["spec"]["ingress"]
    ranges = [(each["port"], each["endPort"]) for each in rule["ports"] if each["protocol"] == "TCP"]
    assert any(first <= 6820 <= last for first, last in ranges) is not closed
    for port in (6817, 6818, 6819, 6821, 22, 40000):
        assert any(first <= port <= last for first, last in ranges)
    (asks,) = only(documents, "NetworkPolicy", "slurm-slurmrestd")["spec"]["ingress"]
    (peer,) = asks["from"]
    assert peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "fleet"
    ports = only(documents, "StatefulSet", "slurm-controller")["spec"]["template"]["spec"]["containers"][0]["ports"]
    assert {"name": "slurmrestd", "containerPort": 6820} in ports and asks["ports"][0]["port"] == "slurmrestd"


def test_no_network_policy_of_ours_keeps_the_fleet_from_whom_it_calls() -> None:
    policies = [one for one in calls({"url": REPAIR["url"]}) if one["kind"] == "NetworkPolicy"]
    assert policies
    assert all(one["spec"]["policyTypes"] == ["Ingress"] for one in policies)


@pytest.mark.parametrize(
    "wrong",
    [{"url": ""}, {"url": "repair.example"}, {"tokenFile": "../slurm/key"}, {"caFile": "/etc/x"}, {"token": "x"}],
)
def test_a_webhook_that_the_fleet_would_refuse_is_refused_by_the_chart(wrong: dict[str, Any]) -> None:
    with pytest.raises(ClusterError):
        calls({**REPAIR, **wrong}, webhookSecret="repair")


@pytest.mark.parametrize("path", sorted((CHART / "examples").glob("remedies-*.yaml")), ids=lambda path: str(path.stem))
def test_examples_of_remedies_are_policies_and_their_scripts_are_read_by_a_shell(path: Path) -> None:
    documents = render(yaml.safe_load(path.read_text()), release="slurm", namespace="hpc")
    said = parse_policy_text(only(documents, "ConfigMap")["data"]["policy.json"]).machines
    assert said.mode == "act"
    assert said.remedies
    for remedy in said.remedies.values():
        # A Job that is retried after an interruption might run on a machine that is up again and has jobs.
        assert (remedy.job or {"backoffLimit": 0})["backoffLimit"] == 0
        for container in job_spec(remedy.job)["containers"] if remedy.job else []:
            shell, options, script = container["command"]
            assert (shell, options) == ("sh", "-ec")
            subprocess.run(["sh", "-n", "-c", script], check=True)
            told = set(re.findall(r"\$\{?([A-Z_]+)", script))
            # Machine names and user-supplied text stay out of the script.
            assert told <= {"MINIVM_NODE", *(one["name"] for one in container["env"])}


def job_spec(job: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = job["template"]["spec"]
    return found


LENDS = {"namespaces": ["llm"], "classes": ["inference"], "pools": {"gpu": 0.5}, "notice": "10m"}


def test_pods_of_others_are_read_where_the_policy_names_their_namespace_and_nowhere_else() -> None:
    documents = rendered(fleet={**OWNED, "policy": {"lend": LENDS}})
    found = rules(documents)
    assert found.keys() - rules(rendered(fleet=OWNED)).keys() == {"Role pods in llm"}
    assert found["Role pods in llm"] == {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]}
    env = {one["name"]: one.get("value", "x") for one in env_of(documents)}
    assert read_settings(env).guests == ("llm",)
    assert parse_policy_text(only(documents, "ConfigMap")["data"]["policy.json"]).lend.pools == {"gpu": 0.5}
    with pytest.raises(ClusterError, match="workerPools"):
        rendered(fleet={"policy": {"lend": LENDS}})
    for wrong in ({"pools": {"gpu": 2}}, {"namespaces": ["a b"]}, {"class": ["x"]}):
        with pytest.raises(ClusterError):
            rendered(fleet={**OWNED, "policy": {"lend": {**LENDS, **wrong}}})


def test_the_chart_knows_all_of_the_policy_of_machines() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    known = schema["properties"]["fleet"]["properties"]["policy"]["properties"]["machines"]["properties"]
    assert set(known) == set(MACHINES_KEYS)


TIERS = {"topology": {"tiers": ["example.com/row", "example.com/rack"]}}


def test_a_topology_is_one_root_and_workers_are_born_below_it() -> None:
    documents = rendered(fleet={"policy": TIERS}, slurm={"version": "26.05"})
    data = only(documents, "ConfigMap", "slurm-config")["data"]
    (tree,) = yaml.safe_load(data["topology.yaml"])
    assert tree == {"topology": NAME, "cluster_default": True, "tree": {"switches": [{"switch": "/"}]}}
    assert "TopologyPlugin" not in data["slurm.conf"]
    (container,) = only(documents, "StatefulSet", "slurm-worker")["spec"]["template"]["spec"]["containers"]
    env = {one["name"]: one.get("value") for one in container["env"]}
    policy = parse_policy_text(only(documents, "ConfigMap")["data"]["policy.json"])
    assert env["MINIVM_NODE_PLACE"] == f"Topology={place({}, policy.topology)}"
    assert rules(documents) == rules(rendered(slurm={"version": "26.05"})), "it needs no further leave"


def test_a_domain_is_a_block_by_the_name_that_the_fleet_tells_of_it() -> None:
    domains = ["c1", "07", "4f2a-9b.0", "a" * 63, f"{'b' * 61}.c"]
    blocks = {"label": "nvidia.com/gpu.clique", "domains": domains, "sizes": [18, 72]}
    for tiers in (TIERS["topology"]["tiers"], []):
        policy = {"topology": {"tiers": tiers, "blocks": blocks}}
        documents = rendered(fleet={"policy": policy}, slurm={"version": "26.05"})
        tree, found = yaml.safe_load(only(documents, "ConfigMap", "slurm-config")["data"]["topology.yaml"])
        assert (tree["topology"], tree["cluster_default"]) == (NAME, True)
        named = [{"block": block(one)} for one in domains]
        wanted = {"block_sizes": [18, 72], "blocks": [*named, {"block": UNKNOWN}]}
        assert found == {"topology": BLOCKS, "cluster_default": False, "block": wanted}
        (container,) = only(documents, "StatefulSet", "slurm-worker")["spec"]["template"]["spec"]["containers"]
        env = {one["name"]: one.get("value") for one in container["env"]}
        told = parse_policy_text(only(documents, "ConfigMap")["data"]["policy.json"]).topology
        assert env["MINIVM_NODE_PLACE"] == f"Topology={place({}, told)}"


@pytest.mark.parametrize(
    ("blocks", "why"),
    [
        ({"domains": ["a"]}, "sizes"),
        ({"domains": ["a"], "sizes": [4, 6]}, "6 is not the first one's double"),
        ({"domains": ["a"], "sizes": [4, 2]}, "2 is not the first one's double"),
        ({"domains": ["a", "a"], "sizes": [4]}, "domains"),
        ({"domains": ["unknown"], "sizes": [4]}, "domains"),
        ({"domains": ["a"], "sizes": [0]}, "sizes"),
        ({"domain": ["a"], "sizes": [4]}, "domain"),
    ],
)
def test_blocks_on_which_slurmctld_would_end_are_refused(blocks: dict[str, Any], why: str) -> None:
    policy = {"topology": {"blocks": {"label": "a", **blocks}}}
    with pytest.raises(ClusterError, match=why):
        rendered(fleet={"policy": policy}, slurm={"version": "26.05"})
    with pytest.raises(ConfigError):
        parse_policy_text(json.dumps(policy))


def test_a_worker_of_an_older_slurm_is_born_without_what_it_does_not_know() -> None:
    image = {"tags": {"controller": "26.05.5-debian-0123456789ab", "worker": "24.11.5-debian-0123456789ab"}}
    documents = rendered(fleet={"policy": TIERS}, image=image)
    assert "MINIVM_NODE_PLACE" not in yaml.safe_dump_all(documents)


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"slurm": {"version": "24.11"}}, "use 25.05 or newer"),
        ({"slurm": {"version": "26.05", "topologyConfig": "- topology: b\n"}}, "says it already"),
        ({"slurm": {"version": "26.05", "files": {"topology.conf": "SwitchName=a Nodes=b\n"}}}, "says it already"),
        ({"slurm": {"version": "26.05", "nodeMode": "static"}}, "is static"),
    ],
)
def test_a_topology_that_could_not_be_is_refused(values: dict[str, Any], why: str) -> None:
    with pytest.raises(ClusterError, match=why):
        rendered(fleet={"policy": TIERS}, **values)


def test_it_may_give_up_a_machine_only_where_the_policy_does() -> None:
    documents = rendered(fleet={"policy": {"fencing": "act"}}, workers={"pools": {"cpu": {"replicas": 2}}})
    assert rules(documents)["ClusterRole nodes"]["verbs"] == ["get", "list", "watch", "patch"]
    (deletes,) = [rule for rule in only(documents, "Role")["rules"] if rule["verbs"] == ["delete"]]
    assert deletes["resourceNames"] == ["slurm-controller-0", "slurm-login-0", "slurm-cpu-0", "slurm-cpu-1"]
    without = rules(rendered(fleet={"policy": {"fencing": "off"}}))
    assert "ClusterRole leases" not in without
    assert without["Role leases"]["verbs"] == ["get", "update"]


def test_a_pool_lets_go_of_pods_that_are_drained_and_idle_and_of_no_others() -> None:
    def budget(**fleet: Any) -> dict[str, Any]:
        found = only(rendered(fleet=fleet), "PodDisruptionBudget", "slurm-worker")
        return dict(found["spec"])

    kept = budget()
    assert kept["maxUnavailable"] == 0
    assert kept["selector"]["matchExpressions"] == [{"key": FREE, "operator": "DoesNotExist"}]
    assert kept["selector"]["matchLabels"]["minivm.io/pool"] == "worker"
    for other in (budget(protect=False), budget(enabled=False)):
        assert other["maxUnavailable"] == 1 and set(other["selector"]) == {"matchLabels"}


@pytest.mark.parametrize("wish", [{"perNode": True, "nodeSelector": {"a": "b"}}, {"elastic": {"min": 0, "max": 3}}])
def test_a_budget_of_a_pool_without_a_number_is_not_one_of_how_many_are_missing(wish: dict[str, Any]) -> None:
    """A pool without `replicas` has no percentage budget: Kubernetes would look for `replicas` and compute nothing."""
    workers = {"pools": {"gpu": {"kind": POOL, **wish}}}
    spec = only(rendered(fleet=OWNED, workers=workers), "PodDisruptionBudget", "slurm-gpu")["spec"]
    assert "maxUnavailable" not in spec and spec["minAvailable"] == 1000000
    assert spec["selector"]["matchExpressions"] == [{"key": FREE, "operator": "DoesNotExist"}]
    unprotected: dict[str, Any] = {"fleet": {**OWNED, "protect": False}, "workers": workers}
    with pytest.raises(ClusterError, match="protect is false"):
        rendered(**unprotected)
    none = rendered(**unprotected, podDisruptionBudget={"enabled": False})
    assert "PodDisruptionBudget" not in {one["kind"] for one in none}


def test_who_it_is_given_to_is_its_own_account_and_no_pods_of_the_cluster() -> None:
    documents = rendered()
    for one in documents:
        if one["kind"].endswith("RoleBinding") and one["metadata"]["name"].endswith(("-fleet", "-fleet-guests")):
            assert one["subjects"] == [{"kind": "ServiceAccount", "name": "slurm-fleet", "namespace": "hpc"}]
    using = [
        one["metadata"]["name"]
        for one in documents
        if one["kind"] in ("StatefulSet", "Deployment", "Job")
        and one["spec"]["template"]["spec"]["serviceAccountName"] == "slurm-fleet"
    ]
    assert using == ["slurm-fleet"]


def test_its_pod_has_no_rights_on_its_machine() -> None:
    spec = pod(rendered())
    user = yaml.safe_load((ROOT / "images/versions.yaml").read_text())["users"]["fleet"]["uid"]
    assert spec["securityContext"] == {
        "runAsNonRoot": True, "runAsUser": user, "runAsGroup": user, "fsGroup": user,
        "seccompProfile": {"type": "RuntimeDefault"},
    }  # fmt: skip
    (container,) = spec["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
    }  # fmt: skip
    assert all(mount["readOnly"] for mount in container["volumeMounts"])
    assert not spec["automountServiceAccountToken"]
    secrets = [volume["secret"]["secretName"] for volume in spec["volumes"] if "secret" in volume]
    assert secrets == ["slurm-jwt"], "of the cluster's keys its own alone"


def test_its_settings_are_those_that_it_takes() -> None:
    documents = rendered()
    given = {one["name"]: one.get("value", "x") for one in pod(documents)["containers"][0]["env"]}
    settings = read_settings(given)
    instance = only(documents, "Deployment")["spec"]["selector"]["matchLabels"]["app.kubernetes.io/instance"]
    assert (settings.release, settings.slurm) == (instance, "slurm-slurmctld:6820")
    assert only(documents, "Lease")["metadata"]["name"] == settings.lease
    assert settings.http == ("0.0.0.0", 8650)
    assert settings.page == ("127.0.0.1", 8651), "nobody reaches it but by forwarding a port"
    mounts = {one["mountPath"] for one in pod(documents)["containers"][0]["volumeMounts"]}
    assert {str(settings.key.parent), str(settings.policy.parent)} <= mounts


@pytest.mark.parametrize(("said", "port"), [(None, 6820), ("0.0.0.0:7000", 7000), ("[::]:6821", 6821)])
def test_slurmrestd_is_where_it_asks(said: str | None, port: int) -> None:
    documents = rendered(controller={"env": {"MINIVM_SLURMRESTD": said} if said else {}})
    spec = only(documents, "StatefulSet", "slurm-controller")["spec"]["template"]["spec"]["containers"][0]
    env = {one["name"]: one.get("value") for one in spec["env"]}
    assert env["MINIVM_SLURMRESTD"] == (said or "0.0.0.0:6820")
    assert {"name": "slurmrestd", "containerPort": port} in spec["ports"]
    service = only(documents, "Service", "slurm-slurmctld")
    assert {one["name"]: one["port"] for one in service["spec"]["ports"]}["slurmrestd"] == port
    asked = {one["name"]: one.get("value") for one in pod(documents)["containers"][0]["env"]}
    assert asked["MINIVM_FLEET_SLURM"] == f"slurm-slurmctld:{port}"


def test_a_slurmrestd_without_a_port_is_refused() -> None:
    with pytest.raises(ClusterError, match="the fleet asks slurmrestd by its port"):
        rendered(controller={"env": {"MINIVM_SLURMRESTD": "unix:/run/rest"}})


def test_two_of_them_are_not_evicted_at_once_and_do_not_lie_on_one_machine() -> None:
    documents = rendered()
    deployment, budget = only(documents, "Deployment")["spec"], only(documents, "PodDisruptionBudget")["spec"]
    assert deployment["replicas"] == 2
    assert budget == {"maxUnavailable": 1, "selector": deployment["selector"]}
    (term,) = pod(documents)["affinity"]["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert term["podAffinityTerm"]["labelSelector"] == deployment["selector"]


def test_its_policy_is_one_that_it_takes() -> None:
    said = {"cordon": True, "conditions": ["Bad"], "notReady": "2m", "away": 3, "share": 0.1}
    text = only(rendered(fleet={"policy": said}), "ConfigMap")["data"]["policy.json"]
    assert json.loads(text) == said
    assert parse_policy_text(text) == Policy(cordon=True, conditions=("Bad",), not_ready_s=120.0, away=3, share=0.1)
    assert parse_policy_text(only(rendered(), "ConfigMap")["data"]["policy.json"]) == Policy()


@pytest.mark.parametrize(
    "wrong",
    [
        {"cordons": True},
        {"share": 2},
        {"notReady": "soon"},
        {"fencing": "acts"},
        {"machines": {"remedies": {"reboot": {}}}},
    ],
)
def test_a_policy_that_it_would_refuse_is_refused_by_the_chart(wrong: dict[str, Any]) -> None:
    with pytest.raises(ClusterError):
        rendered(fleet={"policy": wrong})


def test_the_chart_knows_all_of_its_policy() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert set(schema["properties"]["fleet"]["properties"]["policy"]["properties"]) == set(POLICY_KEYS)
