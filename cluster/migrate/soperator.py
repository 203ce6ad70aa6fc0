"""Objects of Nebius' soperator (SlurmCluster of slurm.nebius.ai, NodeSet of slurm.nebius.ai) as values of the chart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cluster.migrate import parts
from cluster.migrate.fates import READ, Default, Ignore, Lines, Migration, Reading, Report, Rules, Use
from cluster.migrate.objects import Fields, Object
from cluster.migrate.parts import ENVIRONMENT, NOT_IN_CHART, SLURM_CONF, keep
from cluster.migrate.slinky import BY_MINIVM, META, ROOT_KEYS, read_service_type, use_port

GROUP = "slurm.nebius.ai"
JAIL = (
    "minivm's jobs see the worker image's files, not a shared root: build an image of your own FROM minivm's worker, "
    "and name shared data in home and mounts"
)
IN_ITS_POD = "minivm's pods have it themselves"
OWN_DEFAULTS = "a default of the old operator; minivm's profile has its own: set slurm.config if jobs need it"
# Defaults that soperator writes into every object: no person chose them.
DEFAULTS: Mapping[str, Any] = {
    "defMemPerNode": 0, "defCpuPerGPU": 4, "completeWait": 5, "maxJobCount": 20000, "minJobAge": 1800,
    "messageTimeout": 60, "topologyPlugin": "topology/tree", "topologyParam": "SwitchAsNodeRank",
}  # fmt: skip


def read_setting(reading: Reading, value: Any) -> None:
    """Set a line of slurm.conf, which soperator names with a small first letter."""
    name = reading.at[-1]
    reading.put(value, name[0].upper() + name[1:], base=("slurm", "config"))


def use_unless_default(name: str) -> Use:
    """Set the line unless it has soperator's own default."""

    def read(reading: Reading, value: Any) -> None:
        if value == DEFAULTS.get(name):
            reading.ignore(OWN_DEFAULTS)
        else:
            read_setting(reading, value)

    return Use(read, object)


def read_resources(reading: Reading, value: Mapping[str, Any]) -> None:
    """Read the flat list of resources, which soperator takes as requests and limits."""
    pool = reading.base[:1] == ("workers",)
    for name, amount in value.items():
        if isinstance(amount, bool) or not isinstance(amount, str | int | float):
            reading.report("it is no quantity: correct it", name)
        elif pool and (parts.GPU.fullmatch(name) or name.startswith("rdma/")):
            parts.read_device(reading, str(amount), name)
        else:
            reading.put(parts.as_text(amount), "resources", "requests", name)
            if name != "cpu":
                reading.put(parts.as_text(amount), "resources", "limits", name)


def use_below(base: Fields, rule: Use) -> Use:
    """Apply the rule with another part of the chart's values."""

    def read(reading: Reading, value: Any) -> None:
        before, reading.base = reading.base, base or reading.base
        rule.read(reading, value)
        reading.base = before

    return Use(read, rule.expects)


def make_container_rules(prefix: str, base: Fields = ()) -> Rules:
    rules: Rules = {
        "image": Use(parts.read_image, object),
        "imagePullPolicy": Ignore("image.pullPolicy is for minivm's images"),
        "imagePullSecrets": Use(parts.read_pull_secrets, list),
        "customEnv": use_below(base, ENVIRONMENT),
        "resources": use_below(base, Use(read_resources)),
        "port": Default((22, 6817, 6818, 6819), BY_MINIVM, "minivm's daemons have Slurm's own ports"),
        "livenessProbe": Ignore(BY_MINIVM),
        "readinessProbe": Ignore(BY_MINIVM),
        "securityLimitsConfig": Report("minivm's daemons and jobs have high limits: see docs/limits-and-defaults.md"),
        "appArmorProfile": Default(("unconfined",), "minivm's pods take the runtime's", "set it on the machines"),
    }
    return {prefix: NOT_IN_CHART} | {f"{prefix}.{name}": rule for name, rule in rules.items()}


def read_features(reading: Reading, value: list[Any]) -> None:
    for index, name in enumerate(value):
        reading.expect(name, str, str(index))
    parts.add_features(reading, value)


NODE_SET: Rules = (
    META
    | make_container_rules("spec.slurmd")
    | {
        "spec.clusterName": READ,
        "spec.replicas": keep("replicas", expects=int),
        "spec.maxUnavailable": Default((500, "500"), "no limit", "set maxUnavailable of the pool"),
        "spec.ephemeralNodes": Default((False,), "the default", "pools with elastic grow and shrink with the jobs"),
        "spec.initialNumberEphemeralNodes": Ignore("it counts for ephemeralNodes"),
        "spec.ephemeralTopologyWaitTimeout": Ignore("it counts for ephemeralNodes"),
        "spec.enableHostUserNamespace": Default((False,), "the default", parts.NOT_IN_CHART.todo),
        "spec.workerInitRandomDelaySeconds": Ignore("minivm's workers wait for slurmctld by themselves"),
        "spec.slurmd.volumes": Report(JAIL),
        "spec.slurmd.volumes.spool": Ignore("slurmd's spool is the pod's own"),
        "spec.slurmd.volumes.customVolumeMounts": Report(
            "mount them by extraVolumes and extraVolumeMounts of the pool"
        ),
        "spec.slurmd.volumes.sharedMemorySize": keep("shmSize", expects=str),
        "spec.slurmd.volumes.persistentVolumeClaimRetentionPolicy": Ignore("workers have no claims of their own"),
        "spec.slurmd.security": NOT_IN_CHART,
        "spec.munge": Ignore(IN_ITS_POD),
        "spec.sssd": Ignore(IN_ITS_POD),
        "spec.sssdDebugLevel": Ignore("sssd.conf says it"),
        "spec.sssdConfSecretRefName": keep("existingSecret", expects=str, base=("secrets", "sssd")),
        "spec.sssdLdapCAConfigMapRefName": Report("mount the certificates by extraVolumes of the pool and of login"),
        "spec.nodeConfig.features": Use(read_features, list),
        "spec.nodeConfig.autoResume": Default((True,), "the default", "nodeConfig of the pool"),
        "spec.nodeConfig.static": parts.NODE,
        "spec.nodeConfig.dynamic": Report("put constants into nodeConfig of the pool"),
        "spec.nodeConfig.gresConfig": Report("write gres.conf into slurm.gresConfig, or gpu and gres of the pool"),
        "spec.gpu.enabled": Ignore("gpu.count of the pool, from the resources, says it"),
        "spec.gpu.nvidia": Default((False,), "the default", NOT_IN_CHART.todo),
        "spec.docker": Default((False,), "the default", "jobs run containers by docs/how-to/run-containers.md"),
        "spec.topology": Default(
            ("root",), "the default", "the fleet places nodes by labels (docs/fleet.md, topology)"
        ),
        "spec.configMapRefSupervisord": Report("services of your own are drop-ins (docs/reference/service-files.md)"),
        "spec.configMapRefSshd": NOT_IN_CHART,
        "spec.nodeSelector": keep("nodeSelector"),
        "spec.affinity": keep("affinity"),
        "spec.tolerations": keep("tolerations", expects=list),
        "spec.priorityClass": keep("priorityClass", expects=str),
        "spec.workerAnnotations": Use(parts.read_pod_annotations),
        "spec.customInitContainers": Report(
            "write them as initContainers of the pool, without the old operator's volumes"
        ),
        "spec.imagePullSecrets": Use(parts.read_pull_secrets, list),
        "spec.updateStrategy": Default(
            ("rollingUpdate",), "pools roll", "kind: WorkerPool rolls when nothing runs: update.when of the pool"
        ),
    }
)

# SlurmCluster


def read_spool(reading: Reading, value: Mapping[str, Any]) -> None:
    """Find the claim with slurmctld's state: of a named volume source, or of the controller's claim template."""
    source, cluster = value.get("volumeSourceName"), reading.item
    if not source:
        reading.put(
            f"controller-spool-{cluster.name}-controller-0", "persistence", "existingClaim", base=("controller",)
        )
        found = "a claim template"
        reading.plan.note(
            cluster, "spec.slurmNodes.controller.volumes.spool", found, "compare the claim's name: kubectl get pvc"
        )
        return
    for entry in find_named_entries(reading, "volumeSources"):
        claim = (
            entry.get("persistentVolumeClaim") if isinstance(entry, Mapping) and entry.get("name") == source else None
        )
        if isinstance(claim, Mapping) and isinstance(claim.get("claimName"), str):
            reading.named.add(("volumeSources", source))
            reading.put(claim["claimName"], "persistence", "existingClaim", base=("controller",))
            return
    reading.report(
        "slurmctld's state is on no claim: name one with a copy of it in controller.persistence.existingClaim"
    )


def find_named_entries(reading: Reading, key: str) -> list[Any]:
    """Return a list of the spec whose entries other fields name."""
    entries = reading.item.data["spec"].get(key)
    return entries if isinstance(entries, list) else []


def use_node_filter(part: str) -> Use:
    def read(reading: Reading, value: str) -> None:
        for entry in find_named_entries(reading, "k8sNodeFilters"):
            if isinstance(entry, Mapping) and entry.get("name") == value:
                reading.named.add(("k8sNodeFilters", value))
                for key in ("nodeSelector", "affinity", "tolerations"):
                    if entry.get(key):
                        reading.put(entry[key], key, base=(part,))
                return
        reading.report("no entry of k8sNodeFilters has this name: set nodeSelector and tolerations by hand")

    return Use(read, str)


def settle_named(reading: Reading) -> None:
    """Report volumes and node filters that nothing of the plan names."""
    todos = {"volumeSources": f"name claims that stay in mounts or home; {JAIL}", "k8sNodeFilters": "no part needs it"}
    for key, todo in todos.items():
        reading.at = ("spec", key)
        entries = reading.item.data["spec"].get(key) or []
        reading.expect(entries, list)
        for index, entry in reading.mappings(entries):
            reading.expect(entry.get("name"), str, index, "name")
            if (key, entry.get("name")) not in reading.named:
                reading.report(todo, index)


def read_partitions(reading: Reading, value: list[Any]) -> None:
    at = reading.at
    for index, entry in reading.mappings(value):
        name, config, refs = entry.get("name"), entry.get("config") or "", entry.get("nodeSetRefs") or []
        reading.expect(name, str, index, "name")
        reading.expect(config, str, index, "config")
        reading.expect(refs, list, index, "nodeSetRefs")
        reading.at = (*at, index)
        nodes = "ALL" if entry.get("isAll") else ",".join(str(ref) for ref in refs)
        parts.add_partition(reading, str(name), [f"Nodes={nodes}", *config.split()])
        reading.at = at


def read_raw_partitions(reading: Reading, value: list[Any]) -> None:
    at = reading.at
    for index, line in enumerate(value):
        reading.expect(line, str, str(index))
        reading.at = (*at, str(index))
        parts.read_slurm_line(reading, line)
    reading.at = at


def read_external_database(reading: Reading, value: Mapping[str, Any]) -> None:
    if value.get("enabled") is not True:
        reading.ignore("there is no external database")
        return
    base = ("accounting", "database")
    for key, name, kind in (("host", "host", str), ("port", "port", int), ("user", "user", str)):
        if key in value:
            reading.expect(value[key], kind, key)
            reading.put(value[key], name, base=base)
    for key in ("tls", "storageParameters"):
        if value.get(key):
            reading.report("the chart connects without it: give the database an account that needs none", key)


def read_operator_database(reading: Reading, value: Mapping[str, Any]) -> None:
    if value.get("enabled") is not True:
        reading.ignore("there is no database of its operator")
        return
    base, name = ("accounting", "database"), reading.item.name
    for key, text in (("host", f"{name}-acct-db"), ("existingSecret", "mariadb-password"), ("user", "slurm")):
        reading.put(text, key, base=base)
    found = "a database that mariadb-operator runs"
    reading.plan.note(reading.item, "spec.slurmNodes.accounting.mariadbOperator", found,
                      "keep the MariaDB object when the SlurmCluster goes: take its ownerReferences away")  # fmt: skip


def read_accounting_switch(reading: Reading, enabled: bool) -> None:
    reading.plan.values["accounting"]["mode"] = "external" if enabled else "none"


def read_cgroup_line(reading: Reading, line: str) -> None:
    text = line.partition("#")[0].strip()
    if not text:
        reading.ignore("a comment or an empty line")
    else:
        before = reading.get("cgroupConfig", base=("slurm",)) or ""
        reading.plan.values["slurm"]["cgroupConfig"] = f"{before}{text}\n"


def read_sshd_keys(reading: Reading, name: str) -> None:
    reading.put(name, "existingSecret", base=("secrets", "sshHostKeys"))


NODES = "spec.slurmNodes"
SLURM = "spec.slurmConfig"
MAIN: Rules = (
    META
    | make_container_rules(f"{NODES}.controller.slurmctld", ("controller",))
    | make_container_rules(f"{NODES}.login.sshd")
    | {
        "spec.crVersion": Ignore("the old operator's version"),
        "spec.maintenance": Default(("none",), "the default", "end the maintenance before you move"),
        "spec.populateJail": Report(JAIL),
        "spec.k8sNodeFilters": READ,
        "spec.volumeSources": READ,
        "spec.secrets.sshdKeysName": Use(read_sshd_keys, str),
        f"{NODES}.controller": NOT_IN_CHART,
        f"{NODES}.controller.slurmctld.image": Use(parts.read_release, str),
        f"{NODES}.controller.k8sNodeFilterName": use_node_filter("controller"),
        f"{NODES}.controller.munge": Ignore(IN_ITS_POD),
        f"{NODES}.controller.sssd": Ignore(IN_ITS_POD),
        f"{NODES}.controller.sssdConfSecretRefName": keep("existingSecret", expects=str, base=("secrets", "sssd")),
        f"{NODES}.controller.volumes.spool": Use(read_spool),
        f"{NODES}.controller.volumes.jail": Report(JAIL),
        f"{NODES}.controller.openMetrics": Report("set slurm.metrics: true with Slurm 25.11 or later"),
        f"{NODES}.login": NOT_IN_CHART,
        f"{NODES}.login.size": keep("replicas", expects=int, base=("login",)),
        f"{NODES}.login.k8sNodeFilterName": use_node_filter("login"),
        f"{NODES}.login.munge": Ignore(IN_ITS_POD),
        f"{NODES}.login.sssd": Ignore(IN_ITS_POD),
        f"{NODES}.login.sssdConfSecretRefName": keep("existingSecret", expects=str, base=("secrets", "sssd")),
        f"{NODES}.login.sshdServiceType": Use(read_service_type, str),
        f"{NODES}.login.sshdServiceAnnotations": keep("service", "annotations", base=("login",)),
        f"{NODES}.login.sshdServiceNodePort": use_port("service", "nodePort"),
        f"{NODES}.login.sshdServiceLoadBalancerSourceRanges": keep(
            "service", "loadBalancerSourceRanges", expects=list, base=("login",)
        ),
        f"{NODES}.login.sshRootPublicKeys": Report(ROOT_KEYS),
        f"{NODES}.login.userIsolation": Report("login.perUser limits each person's memory and processes"),
        f"{NODES}.login.volumes": Report(JAIL),
        f"{NODES}.accounting.enabled": Use(read_accounting_switch, bool),
        f"{NODES}.accounting": Report("slurmdbd runs in the controller's pod: nothing to set there"),
        f"{NODES}.accounting.munge": Ignore(IN_ITS_POD),
        f"{NODES}.accounting.slurmdbd": Ignore("slurmdbd runs in the controller's pod"),
        f"{NODES}.accounting.externalDB": Use(read_external_database),
        f"{NODES}.accounting.externalDB.passwordSecretKeyRef": parts.use_secret("database", "password"),
        f"{NODES}.accounting.mariadbOperator": Use(read_operator_database),
        f"{NODES}.accounting.slurmdbdConfig": Report("the chart has no further lines for slurmdbd.conf"),
        f"{NODES}.accounting.slurmConfig": Report(f"set it in slurm.config: {OWN_DEFAULTS}"),
        f"{NODES}.exporter": Ignore("minivm's pods export metrics (podMonitor)"),
        f"{NODES}.rest.enabled": Default((False,), "it is off", "users of slurmrestd need one of their own"),
        f"{NODES}.rest": Report("the chart runs slurmrestd for the fleet alone"),
        "spec.partitionConfiguration.configType": READ,
        "spec.partitionConfiguration.partitions": Use(read_partitions, list),
        "spec.partitionConfiguration.rawConfig": Use(read_raw_partitions, list),
        f"{SLURM}.epilog": Report(parts.SCRIPT),
        f"{SLURM}.prolog": Report(parts.SCRIPT),
        f"{SLURM}.taskProlog": Report(parts.SCRIPT),
        f"{SLURM}.taskPluginParam": Use(read_setting, str),
        **{f"{SLURM}.{name}": use_unless_default(name) for name in DEFAULTS},
        f"{SLURM}.suspendTime": Ignore("pools of the fleet sleep instead"),
        f"{SLURM}.resumeTimeout": Ignore("pools of the fleet sleep instead"),
        "spec.topology": Report("the fleet places nodes by labels, in blocks too (docs/fleet.md, topology)"),
        "spec.customSlurmConfig": SLURM_CONF,
        "spec.customCgroupConfig": Lines(read_cgroup_line),
        "spec.cgroupVersion": Default(
            ("v2",), "Slurm finds it", "minivm's pools need cgroup v2, or proctrack: linuxproc"
        ),
        "spec.mpiConfig": Report("put the variables into the jobs' environment by a task prolog"),
        "spec.plugStackConfig": Report(
            "containers: docs/how-to/run-containers.md; other plug-ins: an image of your own"
        ),
        "spec.sConfigController": Ignore("minivm's configwatch does it"),
        "spec.useDefaultAppArmorProfile": Default((False,), "the default", NOT_IN_CHART.todo),
        "spec.healthCheckConfig": Report("minivm's health checks are files of the tree of scripts (docs/health.md)"),
    }
)


def list_clusters(objects: Sequence[Object]) -> dict[str, Object]:
    return {f"{item.namespace}/{item.name}": item for item in objects if item.kind == f"SlurmCluster.{GROUP}"}


def belongs_to_cluster(item: Object, cluster: Object) -> bool:
    name = item.data.get("spec", {}).get("clusterName") or cluster.name
    return item.namespace == cluster.namespace and name == cluster.name


def fill_plan(plan: Migration, objects: Sequence[Object], cluster: Object, pools: Mapping[str, str]) -> None:
    """Fill the plan from a SlurmCluster and its NodeSets."""
    sets = [item for item in objects if item.kind == f"NodeSet.{GROUP}"]
    plan.values |= {
        "clusterName": cluster.name.lower(),
        "accounting": {"mode": "none"},
        "slurm": {"auth": "munge", "proctrack": "cgroup"},
        "secrets": {
            "munge": {"existingSecret": f"{cluster.name}-munge"},
        },
        "workers": {"defaults": {"cgroup": True}, "pools": {}},
        "home": {"enabled": False},
    }
    secrets = cluster.data["spec"].get("secrets")
    if not (isinstance(secrets, Mapping) and secrets.get("sshdKeysName")):
        plan.values["secrets"]["sshHostKeys"] = {"existingSecret": f"{cluster.name}-sshd-keys"}
    for item in sets:
        plan.pools[item.name] = pools[item.name]
        plan.values["workers"]["pools"][pools[item.name]] = {} if "replicas" in item.data["spec"] else {"replicas": 1}
    Reading(plan, cluster, ("login",)).apply(MAIN, settle_named)
    for item in sets:
        Reading(plan, item, ("workers", "pools", pools[item.name])).apply(NODE_SET)
