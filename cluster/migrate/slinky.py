"""Objects of Slinky's slurm-operator (group slinky.slurm.net, from v1beta1 on) as values of the chart.

Each kind has a table of rules, from the path of a field to its fate (`cluster.migrate.fates`): `Use(read_X)` calls a
function that puts the field into the values, `Ignore` and `Report` say why the values do not have it. `fill_plan`
applies the tables to the objects of one cluster: its NodeSets become pools of workers, the Controller `controller` and
`slurm`, the first LoginSet `login`, the Accounting `accounting`. A function `settle_X` runs after a table, for what
depends on several fields.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from cluster import ClusterError
from cluster.migrate import parts
from cluster.migrate.fates import READ, Default, Ignore, Migration, Reading, Report, Rules, Use
from cluster.migrate.objects import NAME, WHAT, Object
from cluster.migrate.parts import ENVIRONMENT, NODE, NOT_IN_CHART, RESOURCES, SLURM_CONF, keep, use_secret

GROUP = "slinky.slurm.net"
# The user slurm in its images and pods: a slurmd obeys a controller of its own user alone.
SLURM_UID = 401
FILE = re.compile(r"[a-z_]+\.(conf|lua)")
SCRIPT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
BY_MINIVM = "minivm's own is used"
LOGS = "minivm's logs go to the container's output"
WITH_CONTROLLER = "slurmdbd runs in the controller's pod: set it under controller, if it is needed there"
META: Rules = {
    "apiVersion": Ignore("the kind's version"),
    "kind": Ignore("the kind"),
    "metadata": Ignore("the object's own data"),
    "status": Ignore("the old operator's state"),
}


def make_container_rules(prefix: str, *, volumes: bool = True) -> Rules:
    rules: Rules = {
        "image": Use(parts.read_image, str),
        "imagePullPolicy": Ignore("image.pullPolicy is for minivm's images"),
        "name": Ignore(BY_MINIVM),
        "env": ENVIRONMENT,
        "resources": RESOURCES,
        "args": Report("minivm starts the daemon: parameters of nodes go into nodeConfig, others into slurm.config"),
        "ports": Ignore(BY_MINIVM),
        "livenessProbe": Ignore(BY_MINIVM),
        "readinessProbe": Ignore(BY_MINIVM),
        "startupProbe": Ignore(BY_MINIVM),
        "lifecycle": Ignore("minivm drains before it stops"),
        "terminationMessagePath": Ignore(BY_MINIVM),
        "terminationMessagePolicy": Ignore(BY_MINIVM),
        "securityContext.privileged": Default((False,), "minivm's pods are not", "set cgroup: true of the pool"),
    }
    if volumes:
        rules["volumeMounts"] = Use(parts.read_mounts, list)
    return {prefix: NOT_IN_CHART} | {f"{prefix}.{name}": rule for name, rule in rules.items()}


def make_pod_rules(*, extendable: bool = True) -> Rules:
    rules: Rules = {
        "metadata.annotations": Use(parts.read_pod_annotations),
        "spec": NOT_IN_CHART,
        "spec.affinity": keep("affinity"),
        "spec.nodeSelector": keep("nodeSelector"),
        "spec.tolerations": keep("tolerations", expects=list),
        "spec.terminationGracePeriodSeconds": Use(parts.read_grace, int),
        "spec.imagePullSecrets": Use(parts.read_pull_secrets, list),
        "spec.hostname": READ,
        "spec.dnsPolicy": Default(("ClusterFirst",), BY_MINIVM, parts.NOT_IN_CHART.todo),
        "spec.restartPolicy": Ignore(BY_MINIVM),
        "spec.automountServiceAccountToken": Default((False,), BY_MINIVM, parts.NOT_IN_CHART.todo),
        "spec.enableServiceLinks": Ignore(BY_MINIVM),
        "spec.schedulerName": Default(("default-scheduler",), BY_MINIVM, parts.NOT_IN_CHART.todo),
    }
    if extendable:
        rules |= {
            "metadata.labels": Use(parts.read_pod_labels),
            "spec.initContainers": parts.use_more_containers("initContainers"),
            "spec.containers": parts.use_more_containers("sidecars"),
            "spec.volumes": Use(parts.read_volumes, list),
            "spec.runtimeClassName": keep("runtimeClassName", expects=str),
            "spec.schedulerName": keep("schedulerName", expects=str),
            "spec.topologySpreadConstraints": keep("topologySpreadConstraints", expects=list),
        }
    else:
        rules |= {"metadata.labels": NOT_IN_CHART}
    return {f"spec.template.{name}": rule for name, rule in rules.items()}


# NodeSet


def read_scaling_mode(reading: Reading, mode: str) -> None:
    if mode == "DaemonSet":
        reading.put("WorkerPool", "kind")
        reading.put(True, "perNode")
        reading.put(True, "enabled", base=("fleet",))
        reading.put(True, "enabled", base=("fleet", "workerPools"))
    elif mode != "StatefulSet":
        reading.report("choose kind: StatefulSet or WorkerPool of the pool")


def read_max_unavailable(reading: Reading, value: Any) -> None:
    if not isinstance(value, int) and reading.item.data["spec"].get("scalingMode") == "DaemonSet":
        reading.report("a WorkerPool's maxUnavailable is a number: set it")
    elif isinstance(value, bool) or not re.fullmatch(r"[0-9]+%?", str(value)):
        reading.report("maxUnavailable is a number or a percentage: set it")
    else:
        reading.put(value, "maxUnavailable")


def read_own_partition(reading: Reading, value: Mapping[str, Any]) -> None:
    config = value.get("config") or ""
    reading.expect(config, str, "config")
    if value.get("enabled") is True:
        name = find_slurm_name(reading.item)
        parts.add_partition(reading, name, [token for token in config.split() if token], [reading.base[-1]])
    elif config:
        reading.report("the partition is not enabled: its settings have no effect", "config")


def settle_per_node(reading: Reading) -> None:
    if reading.get("perNode") and not reading.get("nodeSelector"):
        reading.put({"kubernetes.io/os": "linux"}, "nodeSelector")
        found = "a DaemonSet without a nodeSelector"
        todo = f"a worker would run on every Linux machine: set workers.pools.{reading.base[-1]}.nodeSelector"
        reading.plan.note(reading.item, "spec.template.spec.nodeSelector", found, todo)
    if reading.get("perNode"):
        reading.plan.values["workers"]["pools"][reading.base[-1]].pop("replicas", None)
        reading.at = ("spec", "replicas")
        reading.ignore("there is one worker a machine")


NODE_SET: Rules = (
    META
    | make_container_rules("spec.slurmd")
    | make_pod_rules()
    | {
        "spec.controllerRef": READ,
        "spec.replicas": keep("replicas", expects=int),
        "spec.scalingMode": Use(read_scaling_mode, str),
        "spec.logfile": Ignore(LOGS),
        "spec.ssh.enabled": Ignore("each of minivm's workers has sshd, for people with a job there"),
        "spec.ssh.extraSshdConfig": NOT_IN_CHART,
        "spec.ssh.sssdConfRef": use_secret("sssd", "sssd.conf"),
        "spec.extraConf": NODE,
        "spec.partition": Use(read_own_partition),
        "spec.volumeClaimTemplates": Report("workers have no claims of their own: use local scratch or a shared claim"),
        "spec.persistentVolumeClaimRetentionPolicy": Ignore("it is about volumeClaimTemplates"),
        "spec.updateStrategy.type": Default(
            ("RollingUpdate",), "pools roll", "kind: WorkerPool rolls when nothing runs: update.when of the pool"
        ),
        "spec.updateStrategy.rollingUpdate.maxUnavailable": Use(read_max_unavailable, object),
        "spec.revisionHistoryLimit": Ignore("Kubernetes' default is used"),
        "spec.minReadySeconds": Default((0,), "the default", "a worker counts once it is ready: nothing to set"),
        "spec.ordinalPadding": Default((0,), "the default", "names are NAME-0, NAME-1: change scripts that name nodes"),
        "spec.pinToNode": Default((False,), "the default", "kind: WorkerPool with perNode: true ties pods to machines"),
        "spec.workloadDisruptionProtection": Default(
            (True,), "the fleet protects busy pods, if it is on", "set protect: false of the fleet"
        ),
        "spec.pruneSlurmNodeRecords": Ignore("a dynamic node's record is deleted when its pod is scaled away"),
        "spec.oversubscribeNode": Ignore("workers may share a machine; affinity of the pool keeps them apart"),
        "spec.template.spec.priorityClassName": keep("priorityClass", expects=str),
        "spec.template.spec.hostNetwork": Report("set hostNetwork of the pool, and networkPolicy.nodeCidrs with it"),
    }
)


# Controller


def read_cluster_name(reading: Reading, value: str) -> None:
    reading.put(value.lower(), "clusterName", base=())


def read_standby(reading: Reading, value: Mapping[str, Any]) -> None:
    if value.get("enabled") is not True:
        reading.ignore("there is one controller")
        return
    reading.put(2, "replicas")
    if value.get("backups", 1) != 1:
        reading.report("minivm has one standby: nothing else is possible", "backups")


def read_state_volume(reading: Reading, value: Mapping[str, Any]) -> None:
    claim = value.get("existingClaim") or f"statesave-{reading.item.name}-controller-0"
    if value.get("enabled") is False:
        reading.report("the state of Slurm is on no volume: waiting jobs do not outlive slurmctld, nor the move")
    elif not isinstance(claim, str) or not NAME.fullmatch(claim):
        reading.report("this is no name of a claim: correct it")
    else:
        reading.put(claim, "persistence", "existingClaim")


def settle_metrics(reading: Reading) -> None:
    value = reading.item.data["spec"].get("metrics")
    enabled = isinstance(value, Mapping) and value.get("enabled") is True
    reading.at = ("spec", "metrics", "enabled")
    if enabled and str(reading.get("version", base=("slurm",)) or "") >= "25.11":
        reading.put(True, "metrics", base=("slurm",))
    elif enabled:
        reading.report("slurm.metrics needs Slurm 25.11: set it with such an image")


def read_config_maps(reading: Reading, value: list[Any]) -> None:
    """Put files of /etc/slurm into the values; their ConfigMaps have to be among the objects."""
    special = {"gres.conf": "gresConfig", "topology.conf": "topologyConfig", "topology.yaml": "topologyConfig"}
    for index, entry in reading.mappings(value):
        data = take_config_map(reading, index, entry)
        for name, text in data.items():
            if name == "cgroup.conf":
                read_cgroup_conf(reading, text)
            elif name in special:
                reading.put(text, special[name], base=("slurm",))
            elif FILE.fullmatch(name) and name != "slurm.conf":
                reading.put(text, "files", name, base=("slurm",))
            else:
                reading.report(f"{name[:60]}: the chart takes no file of that name in slurm.files", index)


def read_cgroup_conf(reading: Reading, text: str) -> None:
    """Add the lines of cgroup.conf that the chart does not write itself."""
    chart = ("cgroupplugin", "ignoresystemd", "enablecontrollers", "constraincores", "constrainramspace")
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    kept = [line for line in lines if line.partition("=")[0].strip().lower() not in chart]
    if kept:
        reading.put("\n".join(kept) + "\n", "cgroupConfig", base=("slurm",))


def use_scripts(directory: str) -> Use:
    def read(reading: Reading, value: list[Any]) -> None:
        for index, entry in reading.mappings(value):
            for name, text in take_config_map(reading, index, entry).items():
                if not SCRIPT.fullmatch(name):
                    reading.report(
                        f"{name[:60]}: rename the script; a name has letters, digits, dots and dashes", index
                    )
                elif reading.plan.scripts.setdefault(f"{directory}/{name}", text) != text:
                    reading.report(f"two scripts are called {name}: rename one of them", index)

    return Use(read, list)


def take_config_map(reading: Reading, index: str, entry: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the texts of a ConfigMap that an object names, and mark it as used."""
    name, space = entry.get("name"), reading.item.namespace
    reading.expect(name, str, index, "name")
    for item in reading.plan.config_maps:
        if (item.name, item.namespace) == (name, space):
            reading.plan.used_maps.add(item)
            data = item.data.get("data") or {}
            if isinstance(data, Mapping) and all(isinstance(text, str) for text in data.values()):
                return data
    shell = str(name) if NAME.fullmatch(str(name)) else "NAME"
    reading.report(f"add the ConfigMap: kubectl -n {space} get configmap {shell} -o yaml > config-{shell}.yaml", index)
    return {}


CONTROLLER: Rules = (
    META
    | make_container_rules("spec.slurmctld", volumes=False)
    | make_pod_rules(extendable=False)
    | {
        "spec.clusterName": Use(read_cluster_name, str),
        "spec.slurmKeyRef": use_secret("slurm", "slurm.key"),
        "spec.jwtKeyRef": use_secret("jwt", "jwt_hs256.key"),
        "spec.jwtHs256KeyRef": use_secret("jwt", "jwt_hs256.key"),
        "spec.jwksKeyRef": Report("the chart knows one key for tokens: tokens of another issuer are not accepted"),
        "spec.accountingRef": READ,
        "spec.external": Ignore("it is false"),
        "spec.externalConfig": Ignore("it counts for an external controller"),
        "spec.ha": Use(read_standby),
        "spec.inplaceReconfigure": Ignore("minivm always reconfigures in place"),
        "spec.reconfigure": Ignore("minivm's own configwatch does it"),
        "spec.logfile": Ignore(LOGS),
        "spec.slurmctld.image": Use(parts.read_release, str),
        "spec.extraConf": SLURM_CONF,
        "spec.configFileRefs": Use(read_config_maps, list),
        "spec.prologScriptRefs": use_scripts("prolog.d"),
        "spec.epilogScriptRefs": use_scripts("epilog.d"),
        "spec.prologSlurmctldScriptRefs": Report("minivm runs no PrologSlurmctld: use a prolog on the node"),
        "spec.epilogSlurmctldScriptRefs": Report("minivm runs no EpilogSlurmctld: use an epilog on the node"),
        "spec.persistence": Ignore("the claim is there already"),
        "spec.persistence.enabled": READ,
        "spec.persistence.existingClaim": READ,
        "spec.service": Report("clients inside reach the Service NAME-slurmctld; make another one for clients outside"),
        "spec.metrics.enabled": READ,
        "spec.metrics.serviceMonitor": Report("podMonitor.enabled, or a ServiceMonitor of your own, reads the metrics"),
    }
)

# LoginSet


def read_service_type(reading: Reading, value: str) -> None:
    if value in ("ClusterIP", "NodePort", "LoadBalancer"):
        reading.put(value, "service", "type")
    else:
        reading.report("login.service.type is ClusterIP, NodePort or LoadBalancer")


def use_port(*keys: str) -> Use:
    def read(reading: Reading, value: int) -> None:
        if 1 <= value <= 65535:
            reading.put(value, *keys)
        elif value:
            reading.report("a port is 1 to 65535: correct it")
        else:
            reading.ignore("no port is set")

    return Use(read, int)


ROOT_KEYS = (
    "root does not log in by ssh under minivm: use kubectl exec, or give people accounts (docs/how-to/add-a-user.md)"
)
LOGIN_SET: Rules = (
    META
    | make_container_rules("spec.login")
    | make_pod_rules()
    | {
        "spec.controllerRef": READ,
        "spec.replicas": keep("replicas", expects=int),
        "spec.initconf": Ignore("minivm's pods take the key themselves"),
        "spec.logfile": Ignore(LOGS),
        "spec.rootSshAuthorizedKeys": Report(ROOT_KEYS),
        "spec.extraSshdConfig": NOT_IN_CHART,
        "spec.sssdConfRef": use_secret("sssd", "sssd.conf"),
        "spec.strategy": Report("login.keepSeconds keeps the sessions of a pod that is replaced"),
        "spec.service.port": use_port("service", "port"),
        "spec.service.nodePort": use_port("service", "nodePort"),
        "spec.service.spec": NOT_IN_CHART,
        "spec.service.spec.type": Use(read_service_type, str),
        "spec.service.spec.loadBalancerSourceRanges": keep("service", "loadBalancerSourceRanges", expects=list),
        "spec.service.metadata.annotations": keep("service", "annotations"),
    }
)

# Accounting, RestApi and Token

ACCOUNTING: Rules = META | {
    "spec.slurmKeyRef": use_secret("slurm", "slurm.key"),
    "spec.jwtKeyRef": use_secret("jwt", "jwt_hs256.key"),
    "spec.jwtHs256KeyRef": use_secret("jwt", "jwt_hs256.key"),
    "spec.jwksKeyRef": Report("the chart knows one key for tokens"),
    "spec.external": READ,
    "spec.externalConfig": Ignore("it counts for an external slurmdbd"),
    "spec.logfile": Ignore(LOGS),
    "spec.slurmdbd": Report(WITH_CONTROLLER),
    "spec.slurmdbd.image": Ignore("slurmdbd is in the controller's image"),
    "spec.slurmdbd.imagePullPolicy": Ignore("image.pullPolicy is for minivm's images"),
    "spec.template": Report(WITH_CONTROLLER),
    "spec.storageConfig.host": keep("host", expects=str),
    "spec.storageConfig.port": use_port("port"),
    "spec.storageConfig.database": keep("name", expects=str),
    "spec.storageConfig.username": keep("user", expects=str),
    "spec.storageConfig.passwordKeyRef": use_secret("database", "password"),
    "spec.extraConf": Report("the chart has no further lines for slurmdbd.conf: purge and archive by sacctmgr"),
    "spec.service": Report("slurmdbd is reached inside the cluster by the controller's Service"),
}
EXTERNAL_ACCOUNTING: Rules = META | {
    "spec": Ignore("slurmdbd is outside"),
    "spec.external": READ,
    "spec.externalConfig.host": keep("AccountingStorageHost", expects=str, base=("slurm", "config")),
    "spec.externalConfig.port": keep("AccountingStoragePort", expects=int, base=("slurm", "config")),
    "spec.slurmKeyRef": use_secret("slurm", "slurm.key"),
}
REST_API: Rules = META | {"spec": Report("the chart runs slurmrestd for the fleet alone; users need one of their own")}
TOKEN: Rules = META | {"spec": Report("make the token by scontrol token; slurm.userTokenSeconds lets users do it")}
FURTHER_LOGIN_SET: Rules = META | {
    "spec": Report("the plan has the first LoginSet: write this one as a pool of login.pools (docs/reference/chart.md)")
}
KINDS = ("NodeSet", "Controller", "LoginSet", "Accounting", "RestApi", "Token")


def find_slurm_name(item: Object) -> str:
    """Return the name that Slurm knows the node set by: the pods' hostname without its dash, or the object's name."""
    pod_spec = item.data.get("spec", {}).get("template") or {}
    inner = pod_spec.get("spec") if isinstance(pod_spec, Mapping) else None
    hostname = inner.get("hostname") if isinstance(inner, Mapping) else None
    return hostname.strip().strip("-") if isinstance(hostname, str) and hostname.strip("- ") else item.name


def list_clusters(objects: Sequence[Object]) -> dict[str, Object]:
    return {f"{item.namespace}/{item.name}": item for item in objects if item.kind == f"Controller.{GROUP}"}


def belongs_to_cluster(item: Object, controller: Object, accounting: str) -> bool:
    """Tell whether the object is part of the cluster; what names no cluster is, in the same namespace."""
    if item.kind == f"Accounting.{GROUP}":
        return item.namespace == controller.namespace and item.name == accounting
    reference = item.data.get("spec", {}).get("controllerRef")
    name = reference.get("name") if isinstance(reference, Mapping) else controller.name
    return item.namespace == controller.namespace and name == controller.name


def fill_plan(plan: Migration, objects: Sequence[Object], controller: Object, pools: Mapping[str, str]) -> None:
    """Fill the plan from the objects of one cluster."""
    by_kind = {kind: [item for item in objects if item.kind == f"{kind}.{GROUP}"] for kind in KINDS}
    spec = controller.data["spec"]
    if spec.get("external") is True:
        hint = "minivm's chart runs slurmctld itself; move it into the cluster first"
        problem = f"{controller}: slurmctld is outside Kubernetes"
        raise ClusterError(WHAT, problem, file=controller.file, field="spec.external", hint=hint)
    plan.values |= {
        "slurm": {"auth": "slurm", "uid": SLURM_UID, "proctrack": "cgroup"},
        "workers": {"defaults": {"cgroup": True}, "pools": {}},
        "home": {"enabled": False},
    }
    for item in by_kind["NodeSet"]:
        plan.pools[find_slurm_name(item)] = pools[item.name]
        plan.values["workers"]["pools"][pools[item.name]] = (
            {"replicas": 1} if "replicas" not in item.data["spec"] else {}
        )
    first = Reading(plan, controller, ("controller",))
    first.apply(CONTROLLER, settle_state_claim, settle_metrics)
    if "clusterName" not in plan.values:
        plan.values["clusterName"] = f"{controller.namespace}_{controller.name}".lower()
    for item in by_kind["NodeSet"]:
        Reading(plan, item, ("workers", "pools", pools[item.name])).apply(
            NODE_SET, parts.settle_volumes, settle_per_node
        )
    for number, item in enumerate(by_kind["LoginSet"]):
        reading = Reading(plan, item, ("login",))
        if number:
            reading.apply(FURTHER_LOGIN_SET)
            continue
        reading.apply(LOGIN_SET, parts.settle_volumes)
        plan.values.setdefault("secrets", {})["sshHostKeys"] = {"existingSecret": f"{item.name}-ssh-host-keys"}
    read_accounting(plan, by_kind["Accounting"])
    for item in by_kind["RestApi"]:
        Reading(plan, item).apply(REST_API)
    for item in by_kind["Token"]:
        Reading(plan, item).apply(TOKEN)


def settle_state_claim(reading: Reading) -> None:
    """Name the claim of the state, which has a name of its own without a field."""
    reading.at = ("spec", "persistence")
    value = reading.item.data["spec"].get("persistence") or {}
    reading.expect(value, dict)
    read_state_volume(reading, value)


def read_accounting(plan: Migration, databases: Sequence[Object]) -> None:
    """Read the objects of the kind Accounting; without one the values have no accounting."""
    values = plan.values
    if not databases:
        values["accounting"] = {"mode": "none"}
    for item in databases:
        if item.data["spec"].get("external") is True:
            values["accounting"] = {"mode": "none"}
            values["slurm"].setdefault("config", {})["AccountingStorageType"] = "accounting_storage/slurmdbd"
            Reading(plan, item).apply(EXTERNAL_ACCOUNTING)
        else:
            values["accounting"] = {"mode": "external"}
            Reading(plan, item, ("accounting", "database")).apply(ACCOUNTING)
