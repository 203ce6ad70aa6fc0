"""Rules that the tables of both operators share: parts of pods and lines of slurm.conf, read into the chart's values.

`read_X` is the function of a rule, `use_X` makes a rule from names, `settle_X` runs after a table, for what depends on
several fields.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from typing import Any

from cluster.migrate.fates import SECRET, Lines, Reading, Report, Use
from cluster.migrate.objects import NAME, Fields, show_path
from ground.errors import counted

GPU = re.compile(r"nvidia\.com/(gpu|mig-[a-z0-9.-]+)|amd\.com/gpu|gpu\.intel\.com/[a-z0-9]+")
GRES = re.compile(r"[a-z][a-z0-9_]*(:[A-Za-z0-9_.-]+)?:[0-9]+[KMG]?")
MODEL = re.compile(r"[a-z0-9_.-]+")
FEATURE = re.compile(r"[A-Za-z0-9_.-]+")
VARIABLE = re.compile(r"[A-Z][A-Z0-9_]*")
DATA_KEY = re.compile(r"[A-Za-z0-9._-]+")
WORD = re.compile(r"[A-Za-z]+")
PARTITION = re.compile(r"[A-Za-z0-9_-]+")
RELEASE = re.compile(r"(:v?|slurm-?)(?P<release>[0-9]{2}\.(?:05|11))\b")
# Paths that the chart keeps for itself (templates/_checks.tpl).
OWN = (
    "/bin", "/dev", "/etc/minivm", "/etc/munge", "/etc/pam.d", "/etc/slurm", "/etc/ssh", "/etc/sssd", "/lib",
    "/mnt/minivm", "/opt/minivm", "/proc", "/run", "/sbin", "/sys", "/usr/bin", "/usr/lib", "/usr/libexec", "/usr/sbin",
    "/usr/share/minivm", "/var/lib/minivm", "/var/lib/sss", "/var/run", "/var/spool",
)  # fmt: skip
HOME = "/home"
# Lines of slurm.conf that the chart writes itself, in lower case, with what a site does instead.
BY_CHART = "the chart writes this line: leave it out"
SCRIPT = "a path of the old image: put the script into the tree of scripts (docs/gitsync.md)"
OWN_LINES = dict.fromkeys(
    (
        "accountingstoragehost", "accountingstorageport", "accountingstoragetype", "authaltparameters",
        "authalttypes", "authinfo", "authtype", "clustername", "credtype", "include", "nodename", "plugindir",
        "slurmctldaddr", "slurmctldhost", "slurmctldlogfile", "slurmctldpidfile", "slurmctldport", "slurmdlogfile",
        "slurmdpidfile", "slurmdport", "slurmdspooldir", "slurmduser", "slurmschedlogfile", "slurmuser",
        "statesavelocation", "suspendprogram", "resumeprogram", "resumefailprogram",
    ),
    BY_CHART,
) | dict.fromkeys(
    (
        "epilog", "epilogslurmctld", "healthcheckprogram", "prolog", "prologslurmctld", "rebootprogram", "srunepilog",
        "srunprolog", "taskepilog", "taskprolog", "unkillablestepprogram",
    ),
    SCRIPT,
) | {
    "plugstackconfig": "put the file into slurm.files, and its libraries into images of your own",
    "jobsubmitplugins": "put job_submit.lua into slurm.files; other plug-ins need images of your own",
    "mailprog": "see docs/how-to/get-told.md",
}  # fmt: skip
# What the chart sets in SlurmctldParameters and every cluster of it needs.
PARAMETERS = ("enable_configless", "conmgr_max_connections=8192")


def keep(*keys: str, expects: type = dict, base: Fields | None = None) -> Use:
    """Copy the value into the chart's values, below the object's part or below `base`."""

    def read(reading: Reading, value: Any) -> None:
        reading.put(value, *keys, base=base)

    return Use(read, expects)


def use_secret(name: str, wanted: str) -> Use:
    """Read a reference to a key of a Secret. The chart fixes the key's name, so another name needs a copy."""

    def read(reading: Reading, value: Mapping[str, Any]) -> None:
        existing, key = value.get("name"), value.get("key") or wanted
        target = ("accounting", "database") if name == "database" else ("secrets", name)
        if not isinstance(existing, str) or not NAME.fullmatch(existing):
            reading.report(f"name a Secret with the key {wanted}, and set {'.'.join(target)}.existingSecret to it")
        elif not isinstance(key, str) or not DATA_KEY.fullmatch(key):
            reading.report(f"the key is no key of a Secret: copy it to the key {wanted} of a Secret of your own")
        elif key == wanted:
            reading.put(existing, "existingSecret", base=target)
        elif reading.put(copy := f"minivm-{name.lower()}", "existingSecret", base=target):
            space = reading.item.namespace
            command = (
                f"kubectl -n {space} get secret {existing} -o jsonpath='{{.data.{key.replace('.', chr(92) + '.')}}}'"
                f" | base64 -d | kubectl -n {space} create secret generic {copy} --from-file={wanted}=/dev/stdin"
            )
            found = f"the key {key} of the Secret {existing}; the chart reads the key {wanted}"
            reading.plan.note(reading.item, show_path(reading.at), found, f"copy it: {command}")
            reading.plan.secrets[copy] = existing, command

    return Use(read)


def as_text(value: Any) -> Any:
    return str(value) if isinstance(value, float) else value


def read_resources(reading: Reading, value: Mapping[str, Any]) -> None:
    """Read requests and limits; GPUs and RDMA devices of a pool become its `gpu` and `rdma`."""
    for kind, amounts in value.items():
        if kind not in ("requests", "limits"):
            reading.report("the chart has requests and limits; devices by claims are resourceClaims of the pool", kind)
            continue
        reading.expect(amounts, dict, kind)
        for name, amount in amounts.items():
            if isinstance(amount, bool) or not isinstance(amount, str | int | float):
                reading.report("it is no quantity: correct it", kind, name)
            elif reading.base[:1] == ("workers",) and (GPU.fullmatch(name) or name.startswith("rdma/")):
                read_device(reading, str(amount), kind, name)
            else:
                reading.put(as_text(amount), "resources", kind, name)


def read_device(reading: Reading, amount: str, *field: str) -> None:
    """Read the number of GPUs or RDMA devices; the last part of the field is Kubernetes' name of them."""
    name = field[-1]
    group, most = ("gpu", 64) if GPU.fullmatch(name) else ("rdma", 1024)
    if not amount.isdigit() or not 1 <= int(amount) <= most:
        reading.report(f"a pod has 1 to {most} of them: correct the number", *field)
    elif reading.get(group, "resource") in (None, name) and reading.get(group, "count") in (None, int(amount)):
        reading.put(name, group, "resource")
        reading.put(int(amount), group, "count")
        if group == "rdma":
            reading.put(True, group, "enabled")
    else:
        reading.report(f"a pool has one kind and number of {group}: make two pools of it", *field)


def read_environment(reading: Reading, value: list[Any]) -> None:
    for index, entry in reading.mappings(value):
        name, text = entry.get("name"), entry.get("value", "")
        if "valueFrom" in entry or not isinstance(text, str) or not isinstance(name, str):
            reading.report(
                "the chart's env has texts alone: see docs/how-to/add-to-the-pods.md for other sources", index
            )
        elif not VARIABLE.fullmatch(name) or name.startswith(("MINIVM_", "POD_", "SLURM")):
            reading.report("the chart's env has names in capitals, none of minivm or Slurm: use another name", index)
        elif SECRET.search(name) or SECRET.search(text):
            reading.report("it may be a secret: mount a Secret by extraVolumes instead of a variable", index)
        else:
            reading.put(text, "env", name)


def read_pod_labels(reading: Reading, value: Mapping[str, Any]) -> None:
    for name, text in value.items():
        if re.match(r"(app\.kubernetes\.io|minivm\.io|helm\.sh|slinky\.slurm\.net)/", name):
            reading.ignore("a label of the old chart", name)
        elif not isinstance(text, str):
            reading.report("a label is text: correct it", name)
        else:
            reading.put(text, "podLabels", name)


def read_pod_annotations(reading: Reading, value: Mapping[str, Any]) -> None:
    for name, text in value.items():
        if re.match(r"(kubectl\.kubernetes\.io|meta\.helm\.sh|.*slinky\.slurm\.net)/", name):
            reading.ignore("an annotation of kubectl, Helm or the old operator", name)
        elif not isinstance(text, str):
            reading.report("an annotation is text: correct it", name)
        else:
            reading.put(text, "podAnnotations", name)


def read_grace(reading: Reading, value: int) -> None:
    if value >= 20:
        reading.put(value, "graceSeconds")
    else:
        reading.report("minivm needs at least 20 s to end a pod; its default stays")


def read_pull_secrets(reading: Reading, value: list[Any]) -> None:
    before = reading.get("pullSecrets", base=("image",)) or []
    names = [{"name": entry["name"]} for _, entry in reading.mappings(value) if isinstance(entry.get("name"), str)]
    reading.plan.values.setdefault("image", {})["pullSecrets"] = before + [
        entry for entry in names if entry not in before
    ]


def read_release(reading: Reading, image: str) -> None:
    """Read Slurm's release from the image of slurmctld; images are never taken over."""
    if match := RELEASE.search(image):
        reading.put(match["release"], "version", base=("slurm",))
    reading.report(
        "slurm.version in the values is this image's release: build minivm's images with it (build.py --slurm), or "
        "with a later one that reads its state, and set that one"
    )


def read_image(reading: Reading, value: str) -> None:
    reading.report(
        "minivm's image takes its place; for programs that jobs use build one FROM it (docs/how-to/add-to-the-pods.md)"
    )


# The volumes of a pod and their mounts


def read_volumes(reading: Reading, value: list[Any]) -> None:
    for index, entry in reading.mappings(value):
        name = entry.get("name")
        reading.expect(name, str, index, "name")
        reading.volumes[str(name)] = ((*reading.at, index), entry)


def read_mounts(reading: Reading, value: list[Any]) -> None:
    for index, entry in reading.mappings(value):
        reading.expect(entry.get("name"), str, index, "name")
        reading.expect(entry.get("mountPath"), str, index, "mountPath")
        reading.mounts.append(((*reading.at, index), entry))


def settle_volumes(reading: Reading) -> None:
    """Put the site's volumes into the values. A claim at /home is the cluster's home; the old operator's own go."""
    kept: list[Mapping[str, Any]] = []
    home: set[str] = set()
    for path, mount in reading.mounts:
        reading.at = path
        target = posixpath.normpath(mount["mountPath"])
        volume = reading.volumes.get(mount["name"], (None, {}))[1]
        if not volume:
            reading.report("its volume is not among the pod's: it is the old operator's, and minivm has its own")
        elif target == HOME and find_home_claim(mount, volume):
            if reading.put(find_home_claim(mount, volume), "existingClaim", base=("home",)):
                home.add(mount["name"])
        elif target == HOME:
            reading.report("set home.existingClaim or home.nfs: logins and workers share one home")
        elif target == "/" or any(
            f"{target}/".startswith(f"{own}/") or f"{own}/".startswith(f"{target}/") for own in OWN
        ):
            reading.report("minivm needs this path: mount it at another one")
        else:
            kept.append(mount)
    left = [entry for name, (_, entry) in reading.volumes.items() if name not in home]
    left += [
        entry for name, (_, entry) in reading.volumes.items() if name in home and name in {m["name"] for m in kept}
    ]
    if left:
        reading.put(left, "extraVolumes")
    if kept:
        reading.put(kept, "extraVolumeMounts")


def find_home_claim(mount: Mapping[str, Any], volume: Mapping[str, Any]) -> str:
    claim = volume.get("persistentVolumeClaim")
    name = claim.get("claimName") if isinstance(claim, Mapping) and not mount.get("subPath") else None
    return name if isinstance(name, str) else ""


def use_more_containers(key: str) -> Use:
    def read(reading: Reading, value: list[Any]) -> None:
        kept = []
        for index, entry in reading.mappings(value):
            mounted = entry.get("volumeMounts") or []
            reading.expect(mounted, list, index, "volumeMounts")
            names = {mount.get("name") for mount in mounted if isinstance(mount, Mapping)}
            spec = reading.item.data.get("spec", {})
            if not (isinstance(entry.get("name"), str) and isinstance(entry.get("image"), str)):
                reading.report(
                    "it is a change of one of the old operator's containers: minivm has none of that name", index
                )
            elif names - list_volume_names(spec):
                reading.report("it mounts volumes of the old operator: write it anew for minivm's pods", index)
            else:
                kept.append(entry)
        if kept:
            reading.put(kept, key)

    return Use(read, list)


def list_volume_names(spec: Any) -> set[Any]:
    pod = spec
    for part in ("template", "spec"):
        pod = pod.get(part, {}) if isinstance(pod, Mapping) else {}
    volumes = pod.get("volumes") if isinstance(pod, Mapping) else None
    entries = volumes if isinstance(volumes, list) else []
    return {entry.get("name") for entry in entries if isinstance(entry, Mapping)}


# Lines of slurm.conf, partitions and the configuration of nodes


def read_slurm_line(reading: Reading, line: str) -> None:
    """Read one line of slurm.conf: into a setting of the chart, into slurm.extraConfig, or the report."""
    text = re.sub(r"(?<!\\)#.*", "", line).strip()
    key, equals, value = (part.strip() for part in text.partition("="))
    if not text:
        reading.ignore("a comment or an empty line")
    elif not equals or not WORD.fullmatch(key):
        reading.report(
            OWN_LINES.get(text.split()[0].lower(), "it is no KEY=VALUE: add it to slurm.extraConfig by hand")
        )
    elif SECRET.search(key):
        reading.report("it may be a secret: minivm's daemons get theirs from Secrets")
    elif key.lower() == "partitionname":
        name, *tokens = value.split()
        add_partition(reading, name, tokens)
    elif key.lower() in OWN_LINES:
        reading.report(OWN_LINES[key.lower()])
    elif key.lower() == "slurmctldparameters":
        added = [
            word for word in value.split(",") if word.partition("=")[0] not in {p.partition("=")[0] for p in PARAMETERS}
        ]
        reading.put(",".join((*PARAMETERS, *added)), "config", "SlurmctldParameters", base=("slurm",))
    elif key.lower() == "maxnodecount" and value.isdigit() and 1 <= int(value) <= 65533:
        reading.put(int(value), "maxNodes", base=("slurm",))
    elif key.lower() == "proctracktype":
        if value in ("proctrack/cgroup", "proctrack/linuxproc"):
            set_proctrack(reading, value.removeprefix("proctrack/"))
        else:
            reading.report("the chart has proctrack/cgroup and proctrack/linuxproc: choose slurm.proctrack")
    elif key.lower() == "nodeset" and re.search(r"\bNodes=", value, re.IGNORECASE):
        reading.report("names of nodes change: write it with Feature=POOL into slurm.extraConfig")
    else:
        before = reading.get("extraConfig", base=("slurm",)) or ""
        reading.plan.values.setdefault("slurm", {})["extraConfig"] = f"{before}{text}\n"


def set_proctrack(reading: Reading, value: str) -> None:
    reading.plan.values.setdefault("slurm", {})["proctrack"] = value
    if value == "linuxproc":
        reading.plan.values.get("workers", {}).pop("defaults", None)


def add_partition(reading: Reading, name: str, tokens: list[str], pools: list[str] | None = None) -> None:
    """Make a partition of the chart of `Nodes=...` and the options of its line."""
    made: dict[str, Any] = {"pools": pools or [], "default": False, "options": {}}
    for token in tokens:
        key, equals, value = token.partition("=")
        if not equals or not WORD.fullmatch(key) or '"' in token or not value:
            reading.report(
                "an option is not KEY=VALUE without quotes: write the partition into slurm.partitions by hand"
            )
            return
        if key.lower() == "nodes":
            known = reading.plan.pools
            names = list(known) if value.upper() == "ALL" else value.split(",")
            if set(names) - set(known):
                reading.report("Nodes= names nodes, whose names change: set slurm.partitions with pools")
                return
            made["pools"] = sorted({known[node_set] for node_set in names})
        elif key.lower() == "default":
            made["default"] = value.upper() == "YES"
        elif (key.lower(), value.upper()) != ("state", "UP"):
            made["options"][key] = value
    if not PARTITION.fullmatch(name) or name.upper() == "DEFAULT" or not made["pools"]:
        reading.report("the chart has partitions with a plain name and pools: write it into slurm.partitions by hand")
    else:
        if not made["options"]:
            del made["options"]
        reading.put(made, "partitions", name, base=("slurm",))


def read_node_parameters(reading: Reading, text: str) -> None:
    """Read `Features=a,b Gres=gpu:h100:8 Weight=10` of a pool's nodes."""
    remaining: list[str] = []
    for token in text.split():
        key, equals, value = token.partition("=")
        if not equals or not value:
            reading.report("a node's parameter is KEY=VALUE: correct it")
            return
        if key.lower() in ("feature", "features"):
            add_features(reading, value.split(","))
        elif key.lower() == "gres":
            for gres in value.split(","):
                add_gres(reading, gres)
        elif key.lower() in ("state", "nodename", "nodeaddr", "nodehostname", "nodecpus", "port", "topology"):
            reading.report(f"{key} is set by minivm: leave it out")
            return
        else:
            remaining.append(token)
    if remaining:
        reading.put(" ".join(remaining), "nodeConfig")


def add_features(reading: Reading, names: list[str]) -> None:
    before = reading.get("features") or []
    if wrong := [name for name in names if not FEATURE.fullmatch(name)]:
        reading.report(f"{counted(len(wrong), 'feature')} with letters that the chart refuses: rename them")
        return
    pool = reading.base[-1]
    added = [name for name in dict.fromkeys(names) if name not in before and name != pool]
    if added:
        reading.plan.values["workers"]["pools"][pool]["features"] = [*before, *added]


def add_gres(reading: Reading, gres: str) -> None:
    kind, *model, count = re.sub(r"\(.*\)", "", gres).split(":") if ":" in gres else (gres, "1")
    if kind == "gpu" and count.isdigit() and len(model) <= 1 and all(MODEL.fullmatch(part) for part in model):
        if reading.get("gpu", "count") in (None, int(count)) and 1 <= int(count) <= 64:
            reading.put(int(count), "gpu", "count")
            if model:
                reading.put(model[0], "gpu", "model")
            return
        reading.report("the pod's GPUs and those of Gres differ: set gpu.count of the pool")
    elif GRES.fullmatch(f"{kind}:{':'.join([*model, count])}") and kind != "gpu":
        before = reading.get("gres") or []
        reading.plan.values["workers"]["pools"][reading.base[-1]]["gres"] = [*before, ":".join([kind, *model, count])]
    else:
        reading.report("the chart cannot hold this Gres: set gpu or gres of the pool")


SLURM_CONF = Lines(read_slurm_line)
NODE = Use(read_node_parameters, str)
RESOURCES = Use(read_resources)
ENVIRONMENT = Use(read_environment, list)
NOT_IN_CHART = Report("the chart has no setting for it; a change of the chart or an image of your own has to do it")
