"""The plan from another operator's objects: each field has one fate, and the chart takes the values."""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import build
from cluster import ClusterError
from cluster.migrate import objects, parts, plan, slinky, soperator
from cluster.migrate.fates import EMPTY, READ, FieldFate, Ignore, Migration, Reading, Rules
from cluster.migrate.objects import Object
from cluster.render import CHART, render
from tests.pages import blocks
from tests.reader import ROOT, checkout, follow_all, programs

FIXTURES = Path(__file__).parent / "fixtures"
READERS = {"slinky": slinky, "soperator": soperator}
Paths = dict[tuple[str, ...], Any]


def loaded(operator: str) -> list[dict[str, Any]]:
    """Return the objects of the fixtures as mappings that a test may change."""
    found: list[dict[str, Any]] = []
    for file in sorted((FIXTURES / operator).glob("*.yaml")):
        for document in yaml.safe_load_all(file.read_text()):
            found += document["items"] if document["kind"] == "List" else [document]
    return found


def saved(directory: Path, items: list[dict[str, Any]]) -> str:
    file = directory / "objects.yaml"
    file.write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "List", "items": items}))
    return str(file)


def find(items: list[dict[str, Any]], kind: str, name: str = "") -> dict[str, Any]:
    return next(item for item in items if item["kind"] == kind and name in item["metadata"]["name"])


def changed(tmp_path: Path, change: Callable[[list[dict[str, Any]]], object], operator: str = "slinky") -> Migration:
    items = loaded(operator)
    change(items)
    return plan.make(operator, [saved(tmp_path, items)])


def refusal(tmp_path: Path, change: Callable[[list[dict[str, Any]]], object]) -> str:
    with pytest.raises(ClusterError) as caught:
        changed(tmp_path, change)
    assert "objects.yaml" in str(caught.value)
    assert caught.value.hint
    return str(caught.value)


def reported(made: Migration) -> dict[str, str]:
    return {item.field: item.text for item in made.reported}


def slurm_conf(made: Migration) -> str:
    documents = render(made.values, release="minivm", namespace="hpc")
    return str(next(item for item in documents if item["metadata"]["name"] == "minivm-config")["data"]["slurm.conf"])


# What stays


def test_the_values_keep_what_a_cluster_of_slinky_is() -> None:
    made = plan.make("slinky", [str(FIXTURES / "slinky")])
    values = made.values
    assert values["clusterName"] == "lab_one"
    assert values["slurm"]["auth"] == "slurm"
    assert values["secrets"] == {
        "slurm": {"existingSecret": "slurm-auth-slurm"},
        "jwt": {"existingSecret": "minivm-jwt"},
        "sssd": {"existingSecret": "slurm-sssd-conf"},
        "sshHostKeys": {"existingSecret": "slurm-login-slinky-ssh-host-keys"},
    }
    assert values["controller"]["persistence"] == {"existingClaim": "statesave-slurm-controller-0"}
    assert values["accounting"] == {
        "mode": "external",
        "database": {
            "host": "mariadb", "port": 3306, "name": "slurm_acct_db", "user": "slurm",
            "existingSecret": "mariadb-password",
        },
    }  # fmt: skip
    gpu = values["workers"]["pools"]["slurm-worker-gpu"]
    assert gpu["replicas"] == 4
    assert gpu["gpu"] == {"resource": "nvidia.com/gpu", "count": 8, "model": "h100"}
    assert gpu["nodeSelector"]["gpu"] == "h100"
    assert gpu["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists"}]
    assert values["login"]["replicas"] == 2
    assert values["login"]["service"] == {
        "port": 22, "type": "LoadBalancer", "loadBalancerSourceRanges": ["10.0.0.0/8"],
    }  # fmt: skip
    assert values["home"] == {"existingClaim": "shared-home"}
    (copy_key,) = [note.text for note in made.notes if note.field == "spec.jwtKeyRef"]
    assert r"{.data.jwt\.key}" in copy_key
    assert "--from-file=jwt_hs256.key=/dev/stdin" in copy_key


def test_slurm_conf_keeps_lines_and_the_partitions_that_people_know() -> None:
    made = plan.make("slinky", [str(FIXTURES / "slinky")])
    conf = slurm_conf(made)
    assert "SchedulerParameters=defer,max_rpc_cnt=150" in conf
    assert re.search(r"^SlurmctldParameters=enable_configless,\S*power_save_interval=30$", conf, re.MULTILINE)
    partitions = re.findall(r"^PartitionName=(\S+) .*?Default=(\S+)", conf, re.MULTILINE)
    assert sorted(partitions) == [("all", "YES"), ("cpu", "NO"), ("gpu", "NO")]
    assert "PartitionName=gpu Nodes=pool_slurm-worker-gpu Default=NO State=UP MaxTime=2-0 PriorityTier=5" in conf
    assert "old-prolog" not in conf
    assert reported(made)["spec.extraConf[line 5]"] == parts.SCRIPT
    assert list(made.scripts) == ["prolog.d/90-scratch.sh"]


def test_the_values_keep_what_a_cluster_of_soperator_is() -> None:
    made = plan.make("soperator", [str(FIXTURES / "soperator")])
    values = made.values
    assert (values["clusterName"], values["slurm"]["auth"]) == ("soperator", "munge")
    assert values["secrets"]["munge"] == {"existingSecret": "soperator-munge"}
    assert values["controller"]["persistence"] == {"existingClaim": "controller-spool-pvc"}
    assert values["controller"]["nodeSelector"] == {"pool": "system"}
    assert values["accounting"]["database"] == {
        "host": "db.example.org", "port": 3307, "user": "slurm", "existingSecret": "slurm-db",
    }  # fmt: skip
    pool = values["workers"]["pools"]["worker-h100"]
    assert pool["gpu"] == {"resource": "nvidia.com/gpu", "count": 8, "model": "h100"}
    assert pool["shmSize"] == "64Gi"
    conf = slurm_conf(made)
    assert "PartitionName=main Nodes=pool_worker-h100 Default=YES State=UP MaxTime=INFINITE PriorityTier=10" in conf
    assert "MinJobAge=28800" in conf
    assert "spec.populateJail" in reported(made)
    assert reported(made)["spec.volumeSources[1]"].startswith("name claims that stay")
    assert "spec.volumeSources[0]" not in reported(made), "it has slurmctld's state"


def test_a_database_and_a_state_that_soperator_names_by_itself_stay(tmp_path: Path) -> None:
    def change(items: list[dict[str, Any]]) -> None:
        nodes = find(items, "SlurmCluster")["spec"]["slurmNodes"]
        nodes["accounting"]["externalDB"]["enabled"] = False
        del nodes["accounting"]["externalDB"]["passwordSecretKeyRef"]
        nodes["accounting"]["mariadbOperator"]["enabled"] = True
        nodes["controller"]["volumes"]["spool"] = {"volumeClaimTemplateSpec": {"accessModes": ["ReadWriteOnce"]}}

    made = changed(tmp_path, change, "soperator")
    assert made.values["accounting"]["database"] == {
        "host": "soperator-acct-db", "existingSecret": "mariadb-password", "user": "slurm",
    }  # fmt: skip
    claim = "controller-spool-soperator-controller-0"
    assert made.values["controller"]["persistence"] == {"existingClaim": claim}
    told = {note.field: note.text for note in made.notes}
    assert "ownerReferences" in told["spec.slurmNodes.accounting.mariadbOperator"]
    assert "kubectl get pvc" in told["spec.slurmNodes.controller.volumes.spool"]


def test_a_cluster_without_a_name_has_the_one_that_slinky_makes(tmp_path: Path) -> None:
    made = changed(tmp_path, lambda items: find(items, "Controller")["spec"].pop("clusterName"))
    assert made.values["clusterName"] == "hpc_slurm"


def test_a_cluster_without_a_directory_is_told_that_pods_have_to_know_the_users() -> None:
    fields = {name: [n.field for n in plan.make(name, [str(FIXTURES / name)]).notes] for name in READERS}
    assert "secrets.sssd" in fields["soperator"]
    assert "secrets.sssd" not in fields["slinky"]


def test_two_controllers_and_a_claim_of_the_site_stay(tmp_path: Path) -> None:
    def change(items: list[dict[str, Any]]) -> None:
        spec = find(items, "Controller")["spec"]
        spec["ha"] = {"enabled": True, "backups": 1}
        spec["persistence"]["existingClaim"] = "shared-state"

    made = changed(tmp_path, change)
    assert made.values["controller"]["replicas"] == 2
    assert made.values["controller"]["persistence"] == {"existingClaim": "shared-state"}


def test_a_daemonset_becomes_a_pool_with_one_worker_a_machine(tmp_path: Path) -> None:
    made = changed(tmp_path, lambda items: find(items, "NodeSet", "gpu")["spec"].update(scalingMode="DaemonSet"))
    pool = made.values["workers"]["pools"]["slurm-worker-gpu"]
    assert (pool["kind"], pool["perNode"]) == ("WorkerPool", True)
    assert "replicas" not in pool
    assert made.values["fleet"] == {"enabled": True, "workerPools": {"enabled": True}}
    assert "spec.updateStrategy.rollingUpdate.maxUnavailable" in reported(made)


def test_a_slurmdbd_outside_and_no_accounting_are_told_apart(tmp_path: Path) -> None:
    def outside(items: list[dict[str, Any]]) -> None:
        find(items, "Accounting")["spec"] = {"external": True, "externalConfig": {"host": "dbd.site", "port": 6819}}

    made = changed(tmp_path, outside)
    conf = slurm_conf(made)
    assert "AccountingStorageHost=dbd.site" in conf
    assert "AccountingStorageType=accounting_storage/slurmdbd" in conf
    none = changed(tmp_path, lambda items: find(items, "Controller")["spec"].pop("accountingRef"))
    assert none.values["accounting"] == {"mode": "none"}


# No field is lost, and no secret is shown


def flat(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    below = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    if not value or not isinstance(value, dict | list):
        yield path, value
    for key, item in below:
        yield from flat(item, (*path, str(key)))


def expected_fields(item: dict[str, Any], fates: Paths) -> set[tuple[str, ...]]:
    """Return the fields that need a fate; a text that was read by lines needs one for each line."""
    fields = set()
    for path, value in flat(item):
        lines = [(*path, f"line {n}") for n, text in enumerate(str(value).splitlines(), 1) if text]
        fields |= {path} if path in fates or not lines or lines[0] not in fates else set(lines)
    return fields


NAMES = st.from_regex(r"[a-z]{1,6}", fullmatch=True)
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(codec="ascii"), max_size=8),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(NAMES, below, max_size=3),
    max_leaves=6,
)
# Where an operator's newer version may have more fields.
PLACES = (
    (), ("spec",), ("spec", "slurmd"), ("spec", "login"), ("spec", "service"), ("spec", "service", "spec"),
    ("spec", "template", "spec"), ("spec", "updateStrategy"), ("spec", "storageConfig"),
    ("spec", "slurmNodes", "login"),
    ("spec", "slurmNodes", "controller", "slurmctld"), ("spec", "slurmConfig"), ("spec", "nodeConfig"),
)  # fmt: skip


# Shrinking would take minutes, and the path says what is wrong.
@settings(deadline=None, max_examples=60, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(st.data())
@pytest.mark.parametrize("operator", READERS)
def test_each_field_of_each_object_has_exactly_one_fate(operator: str, data: st.DataObject) -> None:
    items = loaded(operator)
    for item in items:
        for path, _ in list(flat(item.get("spec", {}))):
            if len(path) > 1 and data.draw(st.integers(0, 9)) == 0:
                remove(item["spec"], path)
        for place in data.draw(st.lists(st.sampled_from(PLACES), max_size=3)):
            target: Any = item
            for part in place:
                target = target.get(part) if isinstance(target, dict) else None
            if isinstance(target, dict):
                target[data.draw(st.from_regex(r"zz[a-z.]{0,5}", fullmatch=True))] = data.draw(JUNK)
    made = fates_of(operator, items)
    for item in items:
        found = {path: fate for (owner, path), fate in made.fates.items() if owner.data is item}
        if not found:
            continue  # it belongs to nothing, and `report_unread` tells of it
        assert set(found) == expected_fields(item, found)
        for path, (fate, text) in found.items():
            assert (fate is FieldFate.USED) == (text == "")
            unknown = any(part.startswith("zz") for part in path) and text != EMPTY
            if unknown:
                assert fate is FieldFate.REPORTED, path
            if fate is FieldFate.REPORTED:
                shown = objects.show_path(path)
                assert any(
                    told.text == text and shown.startswith(told.field) and told.object.startswith(item["kind"])
                    for told in made.reported
                ), path


def remove(value: Any, path: tuple[str, ...]) -> None:
    for part in path[:-1]:
        value = value.get(part) if isinstance(value, dict) else None
    if isinstance(value, dict):
        value.pop(path[-1], None)


def fates_of(operator: str, items: list[dict[str, Any]]) -> Migration:
    found = [objects.parse("file", "document", item) for item in items]
    module: Any = READERS[operator]
    chosen = next(iter(module.list_clusters(found).values()))
    mine = plan.select_members(operator, found, chosen)
    made = Migration(config_maps=[item for item in found if item.kind == "ConfigMap"])
    module.fill_plan(made, mine, chosen, plan.choose_pool_names(mine, module.GROUP, {}))
    return made


# Fields that choose something, and whose own text is in no value.
CHOICES = re.compile(
    r"enabled$|external$|controllerRef|accountingRef|hostname$|clusterName$|configType$|isAll$|privileged$"
    r"|existingClaim$|FilterName$|k8sNodeFilters\[\d+\]\.name|volumeSource(s|Name)|scalingMode|imagePullPolicy|Ref\.key$"
    r"|jwtKeyRef\.name|(configFile|ScriptRef)s?|volumeMounts|volumes\["
)


@pytest.mark.parametrize("operator", READERS)
def test_a_used_field_is_in_the_values(operator: str) -> None:
    made = plan.make(operator, [str(FIXTURES / operator)])
    text = (json.dumps(made.values) + json.dumps(made.scripts)).lower()
    for (item, path), (fate, _) in made.fates.items():
        if fate is not FieldFate.USED or CHOICES.search(objects.show_path(path)) or item.kind == "ConfigMap":
            continue
        value: Any = item.data
        for part in path:
            if part.startswith("line "):
                value = value.splitlines()[int(part.removeprefix("line ")) - 1]
            else:
                value = value[int(part)] if isinstance(value, list) else value[part]
        words = re.split(r"[\s=,:/]+", str(value).lower())
        skipped = {"features", "gres", "partitionname", "nodes", "all", "default", "yes", "no", "state", "up"}
        missing = [word for word in words if word not in text and word not in skipped]
        assert not missing, (str(item), path)


@pytest.mark.parametrize("operator", READERS)
def test_every_object_that_was_given_is_in_the_plan(operator: str) -> None:
    made = plan.make(operator, [str(FIXTURES / operator)])
    given = {(item["kind"], item["metadata"]["name"]) for item in loaded(operator)}
    assert {(item.kind.partition(".")[0], item.name) for item, _ in made.fates} == given


def test_no_secret_is_shown_or_written(tmp_path: Path) -> None:
    secret = "never-show-me"

    def change(items: list[dict[str, Any]]) -> None:
        gpu = find(items, "NodeSet", "gpu")["spec"]
        gpu["slurmd"]["args"] = [f"--token={secret}"]
        gpu["slurmd"]["env"] = [{"name": "PLAIN", "value": f"password={secret}"}]
        gpu["unknown"] = {"apiKey": secret, "password": secret}
        find(items, "Controller")["spec"]["extraConf"] += f"AccountingStoragePass={secret}\n"
        find(items, "Controller")["metadata"]["annotations"]["kubectl.kubernetes.io/last-applied"] = secret
        find(items, "LoginSet")["spec"]["template"]["metadata"] = {"annotations": {"kubectl.kubernetes.io/x": secret}}

    made = changed(tmp_path, change)
    text = plan.render_report(made, "slinky")
    assert secret not in text
    assert "bmV2ZXItc2hvdy1tZQ" not in text
    assert secret not in json.dumps(made.values)
    assert "spec.slurmd.args[0]" in reported(made)


def test_the_paths_that_the_chart_keeps_are_the_charts() -> None:
    text = (CHART / "templates/_checks.tpl").read_text()
    (own,) = re.findall(r"\$own := list (.*?) -}}", text)
    assert list(parts.OWN) == re.findall(r'"(.*?)"', own)


# Hostile and mistaken input


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a: &a [1]\nb: *a\n", "alias *a"),
        ("a: [b", "not YAML"),
        ("a: 1\na: 2\n", "'a' is given twice"),
        ("[" * 100 + "]" * 100, "levels of nesting"),
        ("- 1\n", "found a list, expected an object"),
        ("text\n", "found str, expected an object"),
        ("nodesets: {gpu: {}}\n", "values of a Helm chart are no objects"),
        ("{apiVersion: v1, kind: X, metadata: []}", "found a list, expected a mapping with a name"),
        ("{apiVersion: v1, kind: X, metadata: {name: '$(id)'}}", "expected a name that Kubernetes takes"),
        ("{apiVersion: v1, kind: X, metadata: {name: x}, spec: {1: 2}}", "expected a key that is text"),
        ("{apiVersion: v1, kind: List, items: 7}", "found int, expected a list"),
        ("!!python/object/apply:os.system [id]", "not YAML"),
        ("", "the files hold no objects"),
        ("{apiVersion: v1, kind: X, metadata: {name: x}}", "found no Controller"),
    ],
)
def test_what_is_no_object_is_refused_with_its_file(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(text)
    with pytest.raises(ClusterError) as caught:
        plan.make("slinky", [str(file)])
    assert told in str(caught.value)
    assert "cannot plan the migration" in str(caught.value)


def test_a_huge_file_a_missing_one_and_bytes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "LARGEST", 1 << 20)
    (tmp_path / "huge.yaml").write_bytes(b"#" * ((1 << 20) + 1))
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    for name, told in (("huge", "more than 1 MiB"), ("missing", "no such file"), ("bytes", "not UTF-8")):
        with pytest.raises(ClusterError, match=told):
            plan.make("slinky", [str(tmp_path / f"{name}.yaml")])


def without_node_sets(items: list[dict[str, Any]]) -> None:
    items[:] = [item for item in items if item["kind"] != "NodeSet"]


def bad_spec(items: list[dict[str, Any]]) -> None:
    find(items, "Controller")["spec"] = []


CHANGES: list[tuple[Callable[[list[dict[str, Any]]], object], str]] = [
    (lambda items: items.append(copy.deepcopy(items[0])), "found Controller hpc/slurm twice"),
    (lambda items: find(items, "NodeSet")["spec"].update(replicas="many"), "found str, expected a number"),
    (lambda items: find(items, "NodeSet")["spec"].update(slurmd={"env": ["x"]}), "expected a mapping"),
    (lambda items: find(items, "NodeSet").update(apiVersion="slinky.slurm.net/v1alpha1"), "the version 'v1alpha1'"),
    (lambda items: find(items, "NodeSet", "gpu")["metadata"].update(name="8xh100"), "--pool 8xh100=NAME"),
    (lambda items: find(items, "NodeSet", "gpu")["metadata"].update(name="login"), "none of accounting, controller"),
    (lambda items: find(items, "Controller")["spec"].update(clusterName="8lab"), "found the ClusterName '8lab'"),
    (lambda items: find(items, "Controller")["spec"].update(external=True), "slurmctld is outside Kubernetes"),
    (without_node_sets, "found no NodeSet of it"),
    (bad_spec, "found no spec, expected a mapping"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "told"), CHANGES)
def test_an_object_that_cannot_be_planned_is_refused(
    tmp_path: Path, change: Callable[[list[dict[str, Any]]], object], told: str
) -> None:
    assert told in refusal(tmp_path, change)


def test_a_part_that_is_read_early_and_has_another_type_is_reported_or_refused(tmp_path: Path) -> None:
    made = changed(tmp_path, lambda items: find(items, "NodeSet")["spec"].update(template={"spec": True}))
    assert "spec.template.spec" in reported(made)
    made = changed(tmp_path, lambda items: find(items, "SlurmCluster")["spec"].update(secrets="x"), "soperator")
    assert "spec.secrets" in reported(made)
    volumes = [{"name": ["x"]}]
    with pytest.raises(ClusterError, match=r"found a list, expected text .*volumeSources\[0\].name"):
        changed(tmp_path, lambda items: find(items, "SlurmCluster")["spec"].update(volumeSources=volumes), "soperator")


def test_what_kubernetes_would_refuse_is_refused_by_the_plan(tmp_path: Path) -> None:
    def change(items: list[dict[str, Any]]) -> None:
        spec = find(items, "NodeSet", "gpu")["spec"]
        spec["template"]["spec"]["volumes"].append({"name": "shm", "emptyDir": {}})

    with pytest.raises(ClusterError, match="'shm' twice"):
        changed(tmp_path, change)


def test_of_two_clusters_one_has_to_be_chosen(tmp_path: Path) -> None:
    items = loaded("slinky")
    other = copy.deepcopy(find(items, "Controller"))
    other["metadata"] |= {"namespace": "test", "name": "slurm"}
    spare = copy.deepcopy(find(items, "NodeSet", "cpu"))
    spare["metadata"]["namespace"] = "test"
    file = saved(tmp_path, [*items, other, spare])
    with pytest.raises(ClusterError, match=r"found 2 clusters \(hpc/slurm, test/slurm\)") as caught:
        plan.make("slinky", [file])
    assert caught.value.hint == "choose one: --cluster NAMESPACE/NAME"
    with pytest.raises(ClusterError, match="known: hpc/slurm, test/slurm"):
        plan.make("slinky", [file], cluster="nobody")
    made = plan.make("slinky", [file], cluster="hpc/slurm")
    assert sorted(made.values["workers"]["pools"]) == ["slurm-worker-cpu", "slurm-worker-gpu"]
    left = {str(item) for (item, _), (_, text) in made.fates.items() if text == "it belongs to another cluster"}
    assert left == {"Controller test/slurm", "NodeSet test/slurm-worker-cpu"}


def test_a_pool_gets_the_name_that_the_person_gives() -> None:
    made = plan.make("slinky", [str(FIXTURES / "slinky")], renamed={"slurm-worker-gpu": "gpu"})
    assert "gpu" in made.values["workers"]["pools"]
    assert "PartitionName=gpu Nodes=pool_gpu " in slurm_conf(made)
    with pytest.raises(ClusterError, match="would be the pool slurm-worker-cpu"):
        plan.make("slinky", [str(FIXTURES / "slinky")], renamed={"slurm-worker-gpu": "slurm-worker-cpu"})


def test_a_longer_rule_wins_and_a_pattern_fits_one_part() -> None:
    rules: Rules = {"a": Ignore("a"), "a.*.c": READ, "a.b": Ignore("b")}
    made = Migration()
    item = Object("f", "K", "n", "x", {"a": {"b": {"c": 1, "d": 2}, "e": 3}, "f": 4})
    Reading(made, item).apply(rules)
    found = {objects.show_path(path): text for (_, path), (_, text) in made.fates.items()}
    assert found == {"a.b.c": "", "a.b.d": "b", "a.e": "a", "f": "this plan does not know the field: "
                     "look for its like in docs/reference/chart.md"}  # fmt: skip


# The script that moves the cluster. The move of the state itself: tests/container/init/test_under_slinky.py

# Stand-ins that write down each call; kubectl answers from files of the directory WORLD.
KUBECTL = """#!/bin/sh
cd "$WORLD"
echo "$*" >> calls
case "$*" in
    *"get statefulset slurm-controller"*readyReplicas*) cat ready-slurm ;;
    *"get statefulset minivm-controller"*readyReplicas*) cat ready-minivm ;;
    *"get statefulset"*"-o name") echo statefulset ;;
    *"get pods -o jsonpath"*) cat claims ;;
    *"get pods -l app.kubernetes.io/name=slurmd"*"{range"*) echo "slurm-worker-gpu-0/gpu-0 slurm-worker-gpu-1/gpu-1 " ;;
    *"get pods -l app.kubernetes.io/name=slurmd"*) echo gpu-0 gpu-1 ;;
    *squeue*--nodelist=gpu-0*) cat jobs ;;
    *"get job move-state"*succeeded*) echo 1 ;;
    *"apply -f -"*) cat >> calls ;;
esac
"""
HELM = """#!/bin/sh
echo "helm $1" >> "$WORLD/calls"
"""


class Mover:
    """move.sh of the fixture's cluster, and a cluster of files."""

    def __init__(self, directory: Path) -> None:
        made = plan.make("slinky", [str(FIXTURES / "slinky")])
        plan.write(made, "slinky", directory / "migration")
        self.world, self.script = directory, directory / "migration/move.sh"
        self.tell("ready-slurm", "1")
        self.tell("ready-minivm", "")
        self.tell("claims", "slurm-login-slinky-7 shared-home\n")
        self.tell("jobs", "")
        (directory / "bin").mkdir()
        for name, text in (("kubectl", KUBECTL), ("helm", HELM), ("sleep", "#!/bin/sh\n")):
            (directory / "bin" / name).write_text(text)
            (directory / "bin" / name).chmod(0o755)

    def tell(self, name: str, text: str) -> None:
        (self.world / name).write_text(text)

    def run(self, *words: str) -> tuple[int, str, list[str]]:
        """Return the exit status, what the script says, and the calls that change something, in order."""
        (self.world / "calls").write_text("")
        env = os.environ | {"PATH": f"{self.world}/bin:{os.environ['PATH']}", "WORLD": str(self.world)}
        done = subprocess.run(["sh", self.script, *words], env=env, capture_output=True, text=True, check=False)
        calls = (self.world / "calls").read_text().splitlines()
        wanted = ("scale ", "drain", "kind: ", "helm upgrade", "delete pod", "patch service", "create secret")
        return done.returncode, done.stderr, [call for call in calls if any(word in call for word in wanted)]


@pytest.fixture
def mover(tmp_path: Path) -> Mover:
    return Mover(tmp_path)


def places(calls: list[str], *wanted: str) -> list[int]:
    return [next(index for index, call in enumerate(calls) if words in call) for words in wanted]


def test_the_old_controller_ends_before_its_state_moves_and_minivm_starts(mover: Mover) -> None:
    mover.tell("jobs", "17\n")
    status, told, calls = mover.run("over", "chart")
    assert status == 0, told
    order = places(
        calls, "scale deployment slurm-operator --replicas=0", "nodename=gpu-0,gpu-1 state=drain",
        "scale statefulset slurm-controller --replicas=0", "kind: Job", "helm upgrade",
        "patch service slurm-controller",
    )  # fmt: skip
    assert order == sorted(order), calls
    assert "gpu-0 (17)" in told and "run this again" in told
    assert [call for call in calls if "delete pod" in call] == ["-n hpc delete pod slurm-worker-gpu-1"]


def test_a_second_run_moves_no_state_and_ends_the_last_worker(mover: Mover) -> None:
    mover.tell("ready-slurm", "")
    mover.tell("ready-minivm", "1")
    status, told, calls = mover.run("over", "chart")
    assert status == 0, told
    assert "kind: Job" not in calls and not any("drain" in call for call in calls)
    assert "-n hpc delete pod slurm-worker-gpu-0" in calls
    assert "minivm runs all jobs" in told


@pytest.mark.parametrize(("way", "ready"), [(("over", "chart"), "1"), (("back",), "")])
def test_a_claim_that_a_pod_uses_is_not_touched(mover: Mover, way: tuple[str, ...], ready: str) -> None:
    mover.tell("ready-slurm", ready)
    mover.tell("claims", "move-state-x statesave-slurm-controller-0\nother-0 home statesave-slurm-controller-0\n")
    status, told, calls = mover.run(*way)
    assert status == 1
    assert "the claim statesave-slurm-controller-0 is used by other-0: a controller runs there" in told
    assert "kind: Job" not in calls and "helm upgrade" not in calls


def test_the_way_back_ends_minivms_controller_before_the_operator_starts(mover: Mover) -> None:
    mover.tell("ready-slurm", "")
    mover.tell("ready-minivm", "1")
    status, told, calls = mover.run("back")
    assert status == 0, told
    order = places(
        calls, "scale statefulset minivm-controller --replicas=0", "kind: Job", "patch service minivm-slurmctld",
        "scale deployment slurm-operator --replicas=1",
    )  # fmt: skip
    assert order == sorted(order), calls


def test_without_a_claim_there_is_no_state_to_move(tmp_path: Path) -> None:
    off = {"persistence": {"enabled": False}}
    assert changed(tmp_path, lambda items: find(items, "Controller")["spec"].update(off)).move == ""


# The command


def test_the_command_writes_values_that_the_chart_takes_and_overwrites_nothing(tmp_path: Path) -> None:
    out = tmp_path / "migration"
    words = ["migrate", "plan", "--from", "slinky", "--out", str(out), str(FIXTURES / "slinky")]
    done = CliRunner().invoke(build.main, words)
    assert done.exit_code == 0, done.output
    values = yaml.safe_load((out / "values.yaml").read_text())
    assert render(values, release="anything", namespace="hpc")
    assert (out / "report.txt").read_text() in done.output
    assert (out / "scripts/prolog.d/90-scratch.sh").read_text().startswith("#!/bin/sh\n")
    again = CliRunner().invoke(build.main, words)
    assert again.exit_code == 1
    assert "the directory is there already" in again.output


def test_the_page_can_be_followed(tmp_path: Path) -> None:
    """The blocks of come-from-slinky.md that need no cluster, with the fixture as what kubectl wrote."""
    directory = checkout(tmp_path / "checkout")
    (directory / "slinky.yaml").write_text((FIXTURES / "slinky/cluster.yaml").read_text())
    bin_directory = programs(tmp_path / "bin")
    (bin_directory / "python").symlink_to(sys.executable)
    env = os.environ | {"PATH": f"{bin_directory}:{os.environ['PATH']}"}
    follow_all(blocks(ROOT / "docs/how-to/come-from-slinky.md"), env, directory)
    kinds = {item["kind"] for item in yaml.safe_load_all((directory / "migration/objects.yaml").read_text()) if item}
    assert {"StatefulSet", "ConfigMap", "Service"} <= kinds


def test_the_command_reads_what_a_pipe_brings(tmp_path: Path) -> None:
    text = (FIXTURES / "soperator/cluster.yaml").read_text()
    words = ["build.py", "migrate", "plan", "--from", "soperator", "--out", str(tmp_path / "out"), "-"]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, input=text, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "standard input: SlurmCluster soperator/soperator" in done.stdout
