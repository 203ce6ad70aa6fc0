"""The plan of a migration: choose the cluster, read its objects, check the values by the chart, write the report."""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from cluster import ClusterError
from cluster.migrate import slinky, soperator
from cluster.migrate.fates import FieldFate, Ignore, Migration, Reading, Use
from cluster.migrate.objects import WHAT, Object, read, show_path
from cluster.render import render
from ground.errors import counted, one_line

MOVE = Path(__file__).with_name("move.sh")
OPERATORS = ("slinky", "soperator")
RELEASE = "minivm"
POOL = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
CLUSTER = re.compile(r"[a-z][a-z0-9_-]{0,39}")
# Names of the chart's other parts (templates/workers.yaml); a pod's name, and its hash, has to fit a label.
TAKEN = frozenset({"accounting", "controller", "demo", "fleet", "login", "slurmctld", "ssh"})
LONGEST_POOL = 40
NOT_READ = {"Secret": "no content of a Secret is read", "ConfigMap": "no object names it"}
VERSIONS = {slinky.GROUP: re.compile(r"v(1beta[1-9]|[1-9])"), soperator.GROUP: re.compile(r"v1(alpha1|beta1)?")}


def make(
    operator: str, sources: Iterable[str], *, cluster: str = "", renamed: Mapping[str, str] | None = None
) -> Migration:
    """Return the plan for one cluster of the objects; the chart takes its values."""
    objects = read(sources)
    module: Any = slinky if operator == "slinky" else soperator
    for item in objects:
        check(item, module.GROUP)
    files = ", ".join(dict.fromkeys(item.file for item in objects))
    chosen = choose(operator, module.list_clusters(objects), cluster, files)
    mine = select_members(operator, objects, chosen)
    plan = Migration(config_maps=[item for item in objects if item.kind == "ConfigMap"])
    module.fill_plan(plan, mine, chosen, choose_pool_names(mine, module.GROUP, renamed or {}))
    for item in objects:
        if item not in mine:
            report_unread(plan, item, module.GROUP)
    finish(plan, chosen)
    if operator == "slinky":
        plan.move = write_move_script(plan, chosen)
    return plan


def check(item: Object, group: str) -> None:
    """Refuse an object of the operator without a spec, or of a version whose fields are others."""
    if not item.kind.endswith(f".{group}"):
        return
    version = str(item.data["apiVersion"]).partition("/")[2]
    if not VERSIONS[group].fullmatch(version):
        hint = "let the operator write it anew: upgrade it, then kubectl get again"
        problem = f"{item}: found the version {one_line(version)[:30]!r}, which this plan does not know"
        raise ClusterError(WHAT, problem, file=item.file, field="apiVersion", hint=hint)
    if not isinstance(item.data.get("spec"), dict):
        hint = "write it again with kubectl get -o yaml"
        raise ClusterError(WHAT, f"{item}: found no spec, expected a mapping", file=item.file, field="spec", hint=hint)


def choose(operator: str, candidates: Mapping[str, Object], wanted: str, files: str) -> Object:
    kind = "Controller" if operator == "slinky" else "SlurmCluster"
    fitting = [item for name, item in candidates.items() if wanted in ("", name, name.partition("/")[2])]
    if len(fitting) == 1:
        return fitting[0]
    if not candidates:
        hint = f"kubectl get the {kind} too, or choose the right --from"
        raise ClusterError(
            WHAT, f"found no {kind} among the objects, expected one", file=files, field="kind", hint=hint
        )
    known = ", ".join(sorted(candidates))
    if wanted and not fitting:
        raise ClusterError(
            WHAT, f"found no cluster {one_line(wanted)[:60]!r}", field="--cluster", hint=f"known: {known}"
        )
    files = ", ".join(dict.fromkeys(item.file for item in fitting))
    problem = f"found {len(fitting)} clusters ({known}), expected one"
    raise ClusterError(WHAT, problem, file=files, field="kind", hint="choose one: --cluster NAMESPACE/NAME")


def select_members(operator: str, objects: Sequence[Object], chosen: Object) -> list[Object]:
    """Return the operator's objects of the chosen cluster."""
    if operator == "soperator":
        sets = f"NodeSet.{soperator.GROUP}"
        return [
            item
            for item in objects
            if item is chosen or (item.kind == sets and soperator.belongs_to_cluster(item, chosen))
        ]
    reference = chosen.data["spec"].get("accountingRef")
    accounting = str(reference.get("name")) if isinstance(reference, Mapping) else ""
    kinds = {f"{kind}.{slinky.GROUP}" for kind in slinky.KINDS} - {chosen.kind}
    return [
        item
        for item in objects
        if item is chosen or (item.kind in kinds and slinky.belongs_to_cluster(item, chosen, accounting))
    ]


def choose_pool_names(mine: Sequence[Object], group: str, renamed: Mapping[str, str]) -> dict[str, str]:
    """Return the pool of each node set: its own name, or the one that the person gave."""
    sets = {item.name: item for item in mine if item.kind == f"NodeSet.{group}"}
    if unknown := sorted(set(renamed) - set(sets)):
        hint = f"known: {', '.join(sorted(sets)) or 'none'}"
        raise ClusterError(WHAT, f"found no NodeSet {unknown[0][:60]!r}", field="--pool", hint=hint)
    pools = {name: renamed.get(name, name) for name in sets}
    for name, pool in pools.items():
        if not POOL.fullmatch(pool) or pool in TAKEN or len(pool) > LONGEST_POOL:
            problem = (
                f"{sets[name]}: found {pool[:60]!r}, expected a pool's name: at most {LONGEST_POOL} small letters, "
                f"digits and dashes, first a letter, and none of {', '.join(sorted(TAKEN))}"
            )
            hint = f"give the pool another name: --pool {name}=NAME"
            raise ClusterError(WHAT, problem, file=sets[name].file, field="metadata.name", hint=hint)
    for pool, count in Counter(pools.values()).items():
        if count > 1:
            raise ClusterError(
                WHAT, f"{count} NodeSets would be the pool {pool}", field="--pool", hint="name them apart"
            )
    return pools


def report_unread(plan: Migration, item: Object, group: str) -> None:
    """Give every field of an object that is not read its fate."""
    kind = item.kind.partition(".")[0]
    if item in plan.used_maps:
        Reading(plan, item).apply({"data": Use(lambda _reading, _value: None), **slinky.META})
        return
    reason = NOT_READ.get(item.kind, "it belongs to another cluster" if item.kind.endswith(group) else "")
    if not reason:
        found = f"an object of the kind {one_line(kind)[:60]}"
        plan.note(item, "kind", found, "this plan does not read the kind: see whether something of it stays")
        reason = "its kind is not read"
    Reading(plan, item).apply({part: Ignore(reason) for part in item.data} or slinky.META)


def finish(plan: Migration, chosen: Object) -> None:
    """Settle what no single object says, and let the chart check the values."""
    values = plan.values
    values["fullnameOverride"] = RELEASE if chosen.name != RELEASE else f"{RELEASE}-slurm"
    name = values["clusterName"]
    if not CLUSTER.fullmatch(name):
        problem = (
            f"{chosen}: found the ClusterName {name[:60]!r}, expected at most 40 small letters, digits, _ and -, first "
            "a letter; it stands in the state and in the accounting records, and cannot change"
        )
        hint = "this cluster cannot move with its state; a new cluster can have a new name"
        raise ClusterError(WHAT, problem, file=chosen.file, field="spec.clusterName", hint=hint)
    if not values["workers"]["pools"]:
        raise ClusterError(WHAT, f"{chosen}: found no NodeSet of it, expected one", file=chosen.file, field="kind",
                           hint="kubectl get the NodeSets too")  # fmt: skip
    if values.get("home", {}).get("existingClaim"):
        values["home"] = {"existingClaim": values["home"]["existingClaim"]}
    else:
        plan.note(chosen, "home", "no claim at /home", "set home in the values, unless people need none")
    drop_absent_partitions(plan, chosen)
    for pool, settings in values["workers"]["pools"].items():
        if settings.get("gpu", {}).get("count") and "resource" not in settings["gpu"]:
            settings["gpu"]["resource"] = ""
        old = next(slurm for slurm, to in plan.pools.items() if to == pool)
        found = f"nodes of {old}"
        todo = f"they are called {values['fullnameOverride']}-{pool}-N: change reservations and scripts that name nodes"
        plan.note(chosen, f"workers.pools.{pool}", found, todo)
    found = "images of the old operator"
    plan.note(chosen, "image", found, "set image.registry, image.repository and image.tag to minivm's (build.py push)")
    if values["workers"].get("defaults", {}).get("cgroup"):
        todo = (
            "pods of the pools are privileged, as the old ones are; a runtimeClassName with writable cgroups makes it"
        )
        plan.note(
            chosen,
            "workers.defaults.cgroup",
            "jobs in cgroups",
            f"{todo} needless (docs/how-to/contain-jobs-and-people.md)",
        )
    if "sssd" not in values.get("secrets", {}):
        todo = "set secrets.sssd or people: every pod, the controller's too, has to know who submits jobs"
        plan.note(chosen, "secrets.sssd", "no directory of users", todo)
    if plan.scripts:
        found = f"{counted(len(plan.scripts), 'script')}, written to scripts/"
        todo = "add them to a tree of scripts in git, with minivm's own beside them, and set scripts.repository"
        plan.note(chosen, "scripts", found, todo)
    documents = render(values, release=RELEASE, namespace=chosen.namespace, file="this plan")
    for document in documents:
        check_pod(document)


def write_move_script(plan: Migration, chosen: Object) -> str:
    """Return move.sh for this cluster; empty if its state is on no claim, since then there is nothing to move."""
    claim = plan.values.get("controller", {}).get("persistence", {}).get("existingClaim")
    if not claim:
        return ""
    settings = {
        "namespace": chosen.namespace,
        "controller": chosen.name,
        "release": plan.values["fullnameOverride"],
        "claim": claim,
        "uid": str(slinky.SLURM_UID),
        "pull_secrets": json.dumps(plan.values.get("image", {}).get("pullSecrets", [])),
        "operator_namespace": "slinky",
        "operator": "slurm-operator",
    }
    lines = [
        "#!/bin/sh",
        f"# Moves the cluster {plan.values['clusterName']} from Slinky to minivm, or back. Read it before you run it.",
        "set -eu",
        *(f"{name}={shlex.quote(value)}" for name, value in settings.items()),
        "",
        "secrets() { # keys that the chart reads under another name",
        *(
            f'    if [ -z "$(k get secret {copy} --ignore-not-found -o name)" ]; then\n'
            f"        k get secret {existing} -o name\n        {command}\n    fi"
            for copy, (existing, command) in plan.secrets.items()
        ),
        "    :",
        "}",
        "",
    ]
    return "\n".join(lines) + MOVE.read_text()


def drop_absent_partitions(plan: Migration, chosen: Object) -> None:
    """Take away the chart's built-in partitions that the old cluster did not have."""
    made = plan.values["slurm"].get("partitions")
    if not made:
        plan.note(
            chosen, "slurm.partitions", "no partition", "the chart makes `all`, and one for each of several pools"
        )
        return
    pools = plan.values["workers"]["pools"]
    for name in ("all", *(pools if len(pools) > 1 else ())):
        if name not in made:
            made[name] = None


def check_pod(document: Mapping[str, Any]) -> None:
    """Refuse volumes and mounts that come twice, which Kubernetes would refuse at the installation."""
    spec = document.get("spec")
    pod = spec.get("template", {}).get("spec", {}) if isinstance(spec, Mapping) else {}
    volumes = [volume["name"] for volume in pod.get("volumes", [])]
    targets = [mount["mountPath"] for mount in pod["containers"][0].get("volumeMounts", [])] if pod else []
    for what, names in (("volumes", volumes), ("mountPath", targets)):
        if twice := [name for name, count in Counter(names).items() if count > 1]:
            problem = f"the pods of {document['metadata']['name']} would have {twice[0]!r} twice: the chart has its own"
            raise ClusterError(WHAT, problem, field=what, hint="rename it in the file, and plan again")


class WithoutAliases(yaml.SafeDumper):
    """Write values in full where two settings share them."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


# The report


def render_report(plan: Migration, operator: str) -> str:
    """Return what has no counterpart, what a person has to do, and how many fields had which fate."""
    lines = [f"From {operator} to minivm's chart: cluster {plan.values['clusterName']}", ""]
    for title, items in (("No counterpart", plan.reported), ("Do yourself", plan.notes)):
        lines.append(f"{title}: {len(items)}")
        for number, item in enumerate(items, start=1):
            lines += [f"{number:3}. {item.file}: {item}"]
        lines.append("")
    reasons: dict[str, list[str]] = {}
    for (owner, path), (fate, text) in plan.fates.items():
        if fate is FieldFate.IGNORED and text != "nothing is set":
            reasons.setdefault(text, []).append(f"{owner.kind.partition('.')[0]} {owner.name}: {show_path(path)}")
    lines.append(f"Without meaning under minivm: {plan.count(FieldFate.IGNORED)} fields")
    for reason, fields in reasons.items():
        more = f", and {len(fields) - 1} more" if len(fields) > 1 else ""
        lines.append(f"  - {reason}: {fields[0]}{more}")
    lines += ["", f"Used in values.yaml: {plan.count(FieldFate.USED)} fields", ""]
    return "\n".join(lines)


def write(plan: Migration, operator: str, out: Path) -> list[Path]:
    """Write values.yaml, report.txt, move.sh and the scripts into a new directory."""
    head = f"# Made by `build.py migrate plan --from {operator}`. Read report.txt beside it before you install it.\n"
    files = {
        "values.yaml": head
        + yaml.dump(plan.values, Dumper=WithoutAliases, sort_keys=False, allow_unicode=True, width=120),
        "report.txt": render_report(plan, operator),
        **({"move.sh": plan.move} if plan.move else {}),
        **{f"scripts/{name}": text for name, text in plan.scripts.items()},
    }
    written = []
    try:
        out.mkdir(parents=True, mode=0o700)
        for name, text in files.items():
            file = out / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
            file.chmod(0o755 if name.startswith("scripts/") else 0o600)
            written.append(file)
    except FileExistsError as error:
        raise ClusterError(
            "write the plan", "the directory is there already", file=out, hint="name another --out"
        ) from error
    except OSError as error:
        raise ClusterError("write the plan", error.strerror or str(error), file=out) from error
    return written
