"""What is wrong in a pool's template, in the words of the API server that refused a pod of it: which field of the
WorkerPool, what was found there, and what to do."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence

from fleet import crd, crd_pools
from fleet.act.api_client import CHANGED_MEANWHILE, MACHINES, MERGE, POOLS, ApiClient, ApiError, Object, ToKubernetes
from fleet.decide.actions import (
    Adopt,
    Annotate,
    CallHook,
    CreatePod,
    Delete,
    Fence,
    Make,
    NotePool,
    Record,
    StartJob,
    Unfence,
    Withdraw,
)
from fleet.world.kubernetes import FENCED, LABEL, TAINT, WORKER
from fleet.world.machine import MachineStatus
from fleet.world.machine import written as machine_written
from fleet.world.worker_pool import MADE_OF, POOL, TEMPLATE, WorkerPool, copied, written

# Beside our label on a Node that is given up, for people.
WHY = "minivm.io/fenced"


Kept = (
    ToKubernetes
    | Make
    | Record
    | Annotate
    | Withdraw
    | StartJob
    | CallHook
    | Fence
    | Unfence
    | Delete
    | CreatePod
    | Adopt
    | NotePool
)


async def apply_change(api: ApiClient, change: Kept) -> bool:
    """False: it is no longer the object that was seen, and nothing is done."""
    if isinstance(change, Fence | Unfence | Delete):
        return await change_fencing(api, change)
    if isinstance(change, Make | Record | Annotate | Withdraw | StartJob | CallHook):
        return await change_machine(api, change)
    if isinstance(change, CreatePod | Adopt | NotePool):
        return await change_pool(api, change)
    return await api.change(change)


# Of the fields that are applied by this name, those go that are applied no more.
US = "fleet"
APPLY = "application/apply-patch+yaml"
MACHINE_KIND = {"apiVersion": f"{crd.GROUP}/{crd.VERSION}", "kind": crd.KIND}


async def change_machine(api: ApiClient, act: Make | Record | Annotate | Withdraw | StartJob | CallHook) -> bool:
    """False: it is no longer the object that was seen, or there already, and nothing is done."""
    try:
        match act:
            case Make(name):
                labels = dict(label.split("=") for label in api.labels.split(","))
                body: Object = {**MACHINE_KIND, "metadata": {"name": name, "labels": labels}, "spec": {}}
                words = {**MACHINES, "namespace": api.namespace, "body": body}
                await api.ask(f"keep {name}", (api.custom.create_namespaced_custom_object, words))
            case Record(name, version, status):
                await record(api, name, version, status)
            case Annotate(node, uid, version, values):
                await annotate(api, node, uid, version, dict(values))
            case Withdraw(node, uid, version, names):
                await annotate(api, node, uid, version, dict.fromkeys(names))
            case StartJob():
                await start(api, act)
            case CallHook():
                # It was called, and has answered.
                await record(api, act.machine.name, act.machine.version, act.after)
    except ApiError as error:
        if error.status in CHANGED_MEANWHILE:
            return False
        raise
    return True


async def record(api: ApiClient, name: str, version: str, status: MachineStatus) -> None:
    # The version alone holds: of an object's status that is applied, 1.20 does not look at the uid.
    body: Object = {
        **MACHINE_KIND,
        "metadata": {"name": name, "resourceVersion": version},
        "status": machine_written(status),
    }
    words = {**MACHINES, "namespace": api.namespace, "name": name, "body": body}
    ask = api.custom.patch_namespaced_custom_object_status
    # Nobody else writes there; what somebody has written all the same is not kept for him.
    await api.ask(f"note of {name}", (ask, words), field_manager=US, force=True, _content_type=APPLY)


async def annotate(api: ApiClient, node: str, uid: str, version: str, values: Mapping[str, str | None]) -> None:
    body = {"metadata": {"uid": uid, "resourceVersion": version, "annotations": values}}
    words = {"name": node, "body": body, "_content_type": MERGE}
    await api.ask(f"annotate {node}", (api.core.patch_node, words))


async def start(api: ApiClient, act: StartJob) -> None:
    """One that is there already was started before a cut; that it was is noted in any case."""
    try:
        words = {"namespace": api.namespace, "body": job(act)}
        await api.ask(f"start {act.name}", (api.batch.create_namespaced_job, words))
    except ApiError as error:
        if error.status != 409:
            raise
    await record(api, act.machine.name, act.machine.version, act.after)


def job(act: StartJob) -> Object:
    """The template, with its machine as owner, and in the environment of its containers what it is for: texts of others
    stand in no command."""
    spec: Object = copy.deepcopy(dict(act.spec))
    pod = spec.setdefault("template", {}).setdefault("spec", {})
    pod.setdefault("restartPolicy", "Never")
    if act.on_node:
        pod["nodeName"] = act.node
    told = {"MACHINE": act.machine.name, "NODE": act.node, "GOAL": act.goal, "REASON": act.why}
    for container in [*pod.get("initContainers", []), *pod.get("containers", [])]:
        # A kubelet fills $(NAME) in values too, from what stands before; a doubled dollar is one.
        env = [{"name": f"MINIVM_{key}", "value": said.replace("$", "$$")} for key, said in told.items()]
        container["env"] = [*container.get("env", []), *env]
    owner = {**MACHINE_KIND, "name": act.machine.name, "uid": act.machine.uid}
    return {"metadata": {"name": act.name, "ownerReferences": [owner]}, "spec": spec}


POOL_KIND = {"apiVersion": f"{crd.GROUP}/{crd.VERSION}", "kind": crd_pools.KIND}
# What a Service of one pod selects by.
OF_ONE = "statefulset.kubernetes.io/pod-name"
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


async def change_pool(api: ApiClient, act: CreatePod | Adopt | NotePool) -> bool:
    """False: it is no longer the object that was seen, and nothing is done."""
    try:
        match act:
            case CreatePod(name):
                await _create(api, act)
            case Adopt(name, uid, version, pool):
                labels = {TEMPLATE: pool.status.adopted or pool.hash, OF_ONE: name}
                own = {"uid": uid, "resourceVersion": version, "labels": labels, "ownerReferences": [owner(pool)]}
                words = {"name": name, "namespace": api.namespace, "body": {"metadata": own}, "_content_type": MERGE}
                await api.ask(f"take {name} over", (api.core.patch_namespaced_pod, words))
            case NotePool(name, version, status):
                body: Object = {**POOL_KIND, "metadata": {"name": name, "resourceVersion": version}}
                words = {**POOLS, "namespace": api.namespace, "name": name, "body": body | {"status": written(status)}}
                ask = api.custom.patch_namespaced_custom_object_status
                await api.ask(f"note of {name}", (ask, words), field_manager=US, force=True, _content_type=APPLY)
    except ApiError as error:
        if error.status in CHANGED_MEANWHILE:
            return False
        raise
    return True


async def _create(api: ApiClient, act: CreatePod) -> None:
    """Never applied onto one that is there: that one may be anybody's."""
    name, body = act.name, pod_of(act, api.labels)
    try:
        await api.ask(f"create {name}", (api.core.create_namespaced_pod, {"namespace": api.namespace, "body": body}))
    except ApiError as error:
        if error.status == 409:
            raise ApiError(f"create {name}", "a pod of that name is there") from error
        if error.status in WRONG:
            raise ApiError(f"create {name}", to_mend(act.pool.name, error.said, error.causes)) from error
        raise


def owner(pool: WorkerPool) -> Object:
    return {**POOL_KIND, "name": pool.name, "uid": pool.uid, "controller": True}


def pod_of(act: CreatePod, labels: str) -> Object:
    """`labels`: of the release."""
    pool = act.pool
    template = copied(pool.template)
    own, spec = template.get("metadata") or {}, template["spec"]
    said = dict(label.split("=") for label in labels.split(","))
    ours = {f"{LABEL}/component": WORKER, POOL: pool.label, TEMPLATE: pool.hash, OF_ONE: act.name}
    # Its name is its host's, and resolves in the domain of the pool's Service.
    spec |= {"hostname": act.name, "subdomain": pool.name}
    for container in spec["containers"][:1]:
        of_it = [one for one in container.get("env") or [] if one.get("name") != MADE_OF]
        container["env"] = [*of_it, {"name": MADE_OF, "value": pool.hash}]
    if act.node:
        affinity = spec.get("affinity") or {}
        field = {"key": "metadata.name", "operator": "In", "values": [act.node]}
        of_node = {**(affinity.get("nodeAffinity") or {}), REQUIRED: {"nodeSelectorTerms": [{"matchFields": [field]}]}}
        spec["affinity"] = {**affinity, "nodeAffinity": of_node}
    return {
        "metadata": {
            "name": act.name,
            "labels": {**(own.get("labels") or {}), **said, **ours},
            "annotations": own.get("annotations") or {},
            "ownerReferences": [owner(pool)],
        },
        "spec": spec,
    }


# Its words for: this cannot be read as a pod; and: as a pod it is none.
WRONG = (400, 422)
NAMED = 2
# Letters of what is long: what was found stands at the beginning, what is expected at the end.
BEGINNING, END = 60, 240
# What the template has not written itself.
OURS = ("spec.hostname", "spec.subdomain")
_THEIRS = re.compile(r"(spec|metadata\.(labels|annotations))\b")
# Of what cannot be read older servers name each type on the way, newer ones the path.
_TYPES, _PATH = re.compile(r"\bv1\.\w+\.(\w+):"), re.compile(r"Go struct field \w+\.(\S+) of type")


def to_mend(pool: str, said: str, causes: Sequence[tuple[str, str]]) -> str:
    found = [_words(*cause) for cause in causes[:NAMED]] or [_words(*unread(said))]
    more = [f"and {len(causes) - NAMED} more"] if len(causes) > NAMED else []
    return f"mend the template of WorkerPool {pool}, which the API server refuses: {'; '.join([*found, *more])}"


def unread(said: str) -> tuple[str, str]:
    """Of words about JSON of the wrong type: the field, or nothing where none is named; and what is wrong with it."""
    if named := _PATH.search(said):
        return named[1], said
    types = list(_TYPES.finditer(said))
    if not types:
        return "", said
    # What follows is a piece of the pod, and then a larger one.
    why = said[types[-1].end() :].partition(", bigger context")[0].strip()
    return ".".join(one[1][:1].lower() + one[1][1:] for one in types), why


def _words(field: str, why: str) -> str:
    """A policy names no field."""
    return f"{_short(_place(field), BEGINNING)}: {_short(why)}" if field else _short(why)


def _place(field: str) -> str:
    """In the pool, where a person has written it."""
    ours = field.startswith(OURS) or not _THEIRS.match(field)
    return field if ours else f"spec.template.{field}"


def _short(text: str, end: int = END) -> str:
    return text if len(text) <= BEGINNING + end else f"{text[:BEGINNING]} ... {text[-end:]}"


async def change_fencing(api: ApiClient, act: Fence | Unfence | Delete) -> bool:
    """False: it is no longer the object that was seen, and nothing is done."""
    try:
        match act:
            case Fence(name, uid, version, why):
                return await _taint(api, name, uid, version, why)
            case Unfence(name, uid, version):
                return await _taint(api, name, uid, version, None)
            case Delete():
                return await _delete(api, act)
    except ApiError as error:
        if error.status in CHANGED_MEANWHILE:
            return False
        raise


async def _taint(api: ApiClient, name: str, uid: str, version: str, why: str | None) -> bool:
    """Taints are written as a whole: those of others as they are there, with what we do not read of them."""
    node = await api.ask(f"read {name}", (api.core.read_node, {"name": name}))
    metadata = node.get("metadata") or {}
    if (metadata.get("uid"), metadata.get("resourceVersion")) != (uid, version):
        return False
    others = [taint for taint in (node.get("spec") or {}).get("taints") or [] if taint.get("key") != TAINT]
    ours = [] if why is None else [{"key": TAINT, "value": "nodeshutdown", "effect": "NoExecute"}]
    mark = {"labels": {FENCED: "true" if why else None}, "annotations": {WHY: why}}
    body = {
        "metadata": {"uid": uid, "resourceVersion": version, **mark},
        "spec": {"taints": [*others, *ours]},
    }
    await api.ask(f"taint {name}", (api.core.patch_node, {"name": name, "body": body, "_content_type": MERGE}))
    return True


async def _delete(api: ApiClient, act: Delete) -> bool:
    node = await api.ask(f"read {act.node}", (api.core.read_node, {"name": act.node}))
    if (node.get("metadata") or {}).get("resourceVersion") != act.node_version:
        return False
    body = {"gracePeriodSeconds": 0, "preconditions": {"uid": act.uid}}
    words = {"name": act.pod, "namespace": api.namespace, "body": body}
    await api.ask(f"delete {act.pod}", (api.core.delete_namespaced_pod, words))
    return True
