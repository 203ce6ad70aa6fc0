"""Apply changes to Kubernetes, each with the read object's uid and version as its precondition."""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fleet import crd
from fleet.act.api_client import (
    CHANGED_MEANWHILE,
    MACHINES,
    MERGE,
    POOLS,
    STRATEGIC,
    ApiClient,
    KubernetesError,
    Object,
)
from fleet.decide import actions
from fleet.decide.actions import CreatePod, Delete, Evict, NodeChange, PodChange, StartJob
from fleet.world.guests import REQUIRED
from fleet.world.kubernetes import CORDONED, FENCED, FREE, LABEL, LOST, RESTART, TAINT, WORKER, KubeCondition
from fleet.world.machine import MachineStatus, machine_status_json, rfc3339
from fleet.world.worker_pool import (
    MADE_OF,
    POOL,
    TEMPLATE,
    PoolStatus,
    WorkerPool,
    copy_template,
    pool_status_json,
)

# Annotations that tell people why the fleet cordoned a Node or gave it up.
CORDON_REASON, FENCE_REASON = "minivm.io/cordoned", "minivm.io/fenced"
BUDGET = 429
# Newest first: API servers before 1.22 know only v1beta1.
EVICTIONS = ("policy/v1", "policy/v1beta1")
# The field manager of applied status: the server removes a field that the manager no longer applies.
MANAGER = "fleet"
APPLY = "application/apply-patch+yaml"
MACHINE_KIND = {"apiVersion": f"{crd.GROUP}/{crd.VERSION}", "kind": crd.KIND}
POOL_KIND = {**MACHINE_KIND, "kind": crd.POOL_KIND}
# The label by which a Service of one pod selects.
POD_NAME = "statefulset.kubernetes.io/pod-name"
# The statuses of a refused pod: it cannot be parsed; it is invalid.
WRONG = (400, 422)
NAMED = 2
# Letters kept of a long message: its beginning has the wrong value, its end the expected one.
BEGINNING, END = 60, 240
# Fields of a pod that its template does not set.
NOT_IN_TEMPLATE = ("spec.hostname", "spec.subdomain")
_IN_TEMPLATE = re.compile(r"(spec|metadata\.(labels|annotations))\b")
# Where JSON cannot be parsed, older servers name each type on the way, newer ones the path.
_TYPES, _PATH = re.compile(r"\bv1\.\w+\.(\w+):"), re.compile(r"Go struct field \w+\.(\S+) of type")


async def apply_change(api: ApiClient, change: actions.Change) -> bool:
    """Apply a change. False: the object is gone or has changed since it was read, and nothing was done."""
    try:
        return await _apply(api, change)
    except KubernetesError as error:
        if error.status in CHANGED_MEANWHILE:
            return False
        raise


async def _apply(api: ApiClient, change: actions.Change) -> bool:
    match change:
        case actions.ShowOnPod() | actions.ShowStates() | actions.ShowOnNode() | actions.HideOnNode():
            await _show_conditions(api, change)
        case PodChange():
            await _change_pod(api, change)
        case NodeChange():
            return await _change_node(api, change)
        case Delete():
            return await _delete(api, change)
        case CreatePod():
            await _create_pod(api, change)
        case _:
            await _change_object(api, change)
    return True


async def _show_conditions(
    api: ApiClient, change: actions.ShowOnPod | actions.ShowStates | actions.ShowOnNode | actions.HideOnNode
) -> None:
    """Write or remove the conditions of a pod or a Node that show Slurm's state."""
    match change:
        case actions.ShowOnPod(pod, uid, condition):
            await _patch_pod_status(api, pod, uid, _render_condition(condition))
        case actions.ShowStates(pod, uid, conditions, removed):
            items = [*map(_render_condition, conditions), *({"type": type_, "$patch": "delete"} for type_ in removed)]
            await _patch_pod_status(api, pod, uid, *items)
        case actions.ShowOnNode(node, uid, condition):
            # Tools that list Nodes print the heartbeat, which would be in year 1 without a value.
            item = {**_render_condition(condition), "lastHeartbeatTime": rfc3339(time.time())}
            await patch_status(api, node, uid, api.core.patch_node_status, {"name": node}, item)
        case actions.HideOnNode(node, uid, type_):
            item = {"type": type_, "$patch": "delete"}
            await patch_status(api, node, uid, api.core.patch_node_status, {"name": node}, item)


async def _change_pod(api: ApiClient, change: PodChange) -> None:
    """Mark or evict a pod that exists."""
    match change:
        case actions.Free():
            await _mark_pod(api, change, labels={FREE: "true" if change.precondition else LOST})
        case actions.Protect():
            await _mark_pod(api, change, labels={FREE: None})
        case actions.RestartSlurmd():
            await _mark_pod(api, change, annotations={RESTART: change.value})
        case Evict():
            await _evict(api, change)
        case actions.Adopt(pod, _, _, pool):
            labels = {TEMPLATE: pool.status.adopted or pool.hash, POD_NAME: pod}
            await _mark_pod(api, change, labels=labels, ownerReferences=[_render_owner(pool)])
        case _:
            raise TypeError(f"{type(change).__name__} is no change of a pod")


async def _change_node(api: ApiClient, change: NodeChange) -> bool:
    """Cordon, taint or annotate a Node, or take that back. False: the Node has changed since it was read."""
    match change:
        case actions.Cordon():
            marks: Object = {"labels": {CORDONED: api.mark}, "annotations": {CORDON_REASON: change.reason}}
            await _patch_node(api, "cordon", change, marks, {"unschedulable": True})
        case actions.Uncordon():
            marks = {"labels": {CORDONED: None}, "annotations": {CORDON_REASON: None}}
            await _patch_node(api, "uncordon", change, marks, {"unschedulable": None})
        case actions.Annotate():
            await _patch_node(api, "annotate", change, {"annotations": dict(change.values)})
        case actions.Withdraw():
            await _patch_node(api, "annotate", change, {"annotations": dict.fromkeys(change.names)})
        case actions.Fence():
            return await _taint(api, change, change.reason)
        case actions.Unfence():
            return await _taint(api, change, None)
        case _:
            raise TypeError(f"{type(change).__name__} is no change of a Node")
    return True


async def _change_object(api: ApiClient, change: actions.Change) -> None:
    """Create a Machine, perform its remedy, or write the status of a Machine or a WorkerPool."""
    match change:
        case actions.Make(name):
            body: Object = {**MACHINE_KIND, "metadata": {"name": name, "labels": api.labels}, "spec": {}}
            words = {**MACHINES, "namespace": api.namespace, "body": body}
            await api.ask(f"keep {name}", (api.custom.create_namespaced_custom_object, words))
        case actions.Record(name, version, status):
            await _record(api, name, version, status)
        case StartJob():
            await _start_job(api, change)
        case actions.CallHook():
            # The receiver has answered already.
            await _record(api, change.machine.name, change.machine.version, change.new_status)
        case actions.NotePool(name, version, pool_status):
            await _note_pool(api, name, version, pool_status)
        case _:
            raise TypeError(f"{type(change).__name__} is no change of Kubernetes")


async def _patch_pod_status(api: ApiClient, pod: str, uid: str, *items: Object) -> None:
    words = {"name": pod, "namespace": api.namespace}
    await patch_status(api, pod, uid, api.core.patch_namespaced_pod_status, words, *items)


async def patch_status(api: ApiClient, name: str, uid: str, patch: Any, words: Object, *items: Object) -> None:
    """Merge conditions by their types. The uid makes the server refuse another object of that name."""
    body = {"metadata": {"uid": uid}, "status": {"conditions": list(items)}}
    await api.ask(f"show Slurm's state on {name}", (patch, {**words, "body": body, "_content_type": STRATEGIC}))


def _render_condition(condition: KubeCondition) -> Object:
    texts = {"status": condition.status, "reason": condition.reason, "message": condition.message}
    return {"type": condition.type, **texts, "lastTransitionTime": rfc3339(condition.since or time.time())}


async def _mark_pod(api: ApiClient, act: PodChange, **marks: Any) -> None:
    """Merge labels, annotations or owners into a pod's metadata."""
    body = {"metadata": {"uid": act.uid, "resourceVersion": act.version, **marks}}
    words = {"name": act.pod, "namespace": api.namespace, "body": body, "_content_type": MERGE}
    await api.ask(f"mark {act.pod}", (api.core.patch_namespaced_pod, words))


async def _evict(api: ApiClient, act: Evict) -> None:
    about = {"name": act.pod, "namespace": api.namespace}
    options = {"preconditions": {"uid": act.uid, "resourceVersion": act.version}}
    for version in EVICTIONS:
        body = {"apiVersion": version, "kind": "Eviction", "metadata": about, "deleteOptions": options}
        try:
            await api.ask(f"evict {act.pod}", (api.core.create_namespaced_pod_eviction, {**about, "body": body}))
            return
        except KubernetesError as error:
            if error.status == BUDGET:
                raise KubernetesError(
                    error.what, f"its PodDisruptionBudget says not yet: {error.why}", BUDGET
                ) from error
            if error.status != 400 or version == EVICTIONS[-1]:
                raise


async def _patch_node(api: ApiClient, verb: str, act: NodeChange, marks: Object, spec: Object | None = None) -> None:
    body: Object = {"metadata": {"uid": act.uid, "resourceVersion": act.version, **marks}}
    body |= {"spec": spec} if spec else {}
    words = {"name": act.node, "body": body, "_content_type": MERGE}
    await api.ask(f"{verb} {act.node}", (api.core.patch_node, words))


async def _taint(api: ApiClient, act: NodeChange, why: str | None) -> bool:
    """Set or lift the out-of-service taint. A patch replaces all taints, so read the present ones first."""
    node = await api.ask(f"read {act.node}", (api.core.read_node, {"name": act.node}))
    metadata = node.get("metadata") or {}
    if (metadata.get("uid"), metadata.get("resourceVersion")) != (act.uid, act.version):
        return False
    taints = [taint for taint in (node.get("spec") or {}).get("taints") or [] if taint.get("key") != TAINT]
    taints += [] if why is None else [{"key": TAINT, "value": "nodeshutdown", "effect": "NoExecute"}]
    marks = {"labels": {FENCED: "true" if why else None}, "annotations": {FENCE_REASON: why}}
    await _patch_node(api, "taint", act, marks, {"taints": taints})
    return True


async def _delete(api: ApiClient, act: Delete) -> bool:
    node = await api.ask(f"read {act.node}", (api.core.read_node, {"name": act.node}))
    if (node.get("metadata") or {}).get("resourceVersion") != act.node_version:
        return False
    body = {"gracePeriodSeconds": 0, "preconditions": {"uid": act.uid}}
    words = {"name": act.pod, "namespace": api.namespace, "body": body}
    await api.ask(f"delete {act.pod}", (api.core.delete_namespaced_pod, words))
    return True


# Machines and their remedies.


async def _record(api: ApiClient, name: str, version: str, status: MachineStatus) -> None:
    await _apply_status(api, MACHINES, MACHINE_KIND, name, version, machine_status_json(status))


async def _apply_status(
    api: ApiClient, resource: Mapping[str, str], kind: Object, name: str, version: str, status: Object
) -> None:
    # Only the version is a precondition: when status is applied, Kubernetes 1.20 ignores the uid.
    body: Object = {**kind, "metadata": {"name": name, "resourceVersion": version}, "status": status}
    words = {**resource, "namespace": api.namespace, "name": name, "body": body}
    ask = api.custom.patch_namespaced_custom_object_status
    # The fleet owns the status, so force takes over fields of other managers.
    await api.ask(f"note of {name}", (ask, words), field_manager=MANAGER, force=True, _content_type=APPLY)


async def _note_pool(api: ApiClient, name: str, version: str, status: PoolStatus) -> None:
    try:
        await _apply_status(api, POOLS, POOL_KIND, name, version, pool_status_json(status))
    except KubernetesError as error:
        # A definition of an older version does not have this field.
        if not status.last_good or "lastGood" not in f"{error.message} {error}":
            raise
        await _apply_status(api, POOLS, POOL_KIND, name, version, pool_status_json(replace(status, last_good="")))


async def _start_job(api: ApiClient, act: StartJob) -> None:
    """Start a Job and record it. A Job that exists was started before an interruption; it is recorded now."""
    try:
        words = {"namespace": api.namespace, "body": build_job(act)}
        await api.ask(f"start {act.name}", (api.batch.create_namespaced_job, words))
    except KubernetesError as error:
        if error.status != 409:
            raise
    await _record(api, act.machine.name, act.machine.version, act.new_status)


def build_job(act: StartJob) -> Object:
    """Build the Job: the template, owned by its Machine, with the facts in its environment and in no command."""
    spec: Object = copy.deepcopy(dict(act.spec))
    pod = spec.setdefault("template", {}).setdefault("spec", {})
    pod.setdefault("restartPolicy", "Never")
    if act.on_node:
        pod["nodeName"] = act.node
    facts = {"MACHINE": act.machine.name, "NODE": act.node, "GOAL": act.goal, "REASON": act.reason}
    for container in [*pod.get("initContainers", []), *pod.get("containers", [])]:
        # The kubelet expands $(NAME) in values; a doubled dollar gives one.
        env = [{"name": f"MINIVM_{key}", "value": value.replace("$", "$$")} for key, value in facts.items()]
        container["env"] = [*container.get("env", []), *env]
    owner = {**MACHINE_KIND, "name": act.machine.name, "uid": act.machine.uid}
    return {"metadata": {"name": act.name, "ownerReferences": [owner]}, "spec": spec}


# Pods of pools, made as a StatefulSet makes its own.


async def _create_pod(api: ApiClient, act: CreatePod) -> None:
    """Create a pod. Never apply it: an existing pod of that name may belong to another owner."""
    name, body = act.name, build_pod(act, api.labels)
    try:
        await api.ask(f"create {name}", (api.core.create_namespaced_pod, {"namespace": api.namespace, "body": body}))
    except KubernetesError as error:
        if error.status == 409:
            raise KubernetesError(f"create {name}", "a pod of that name is there") from error
        if error.status in WRONG:
            problem = explain_template_error(act.pool.name, error.message, error.causes)
            raise KubernetesError(f"create {name}", problem) from error
        raise


def _render_owner(pool: WorkerPool) -> Object:
    return {**POOL_KIND, "name": pool.name, "uid": pool.uid, "controller": True}


def build_pod(act: CreatePod, labels: Mapping[str, str]) -> Object:
    """Build a pod from its pool's template. `labels`: the release's."""
    pool = act.pool
    template = copy_template(pool.template)
    own, spec = template.get("metadata") or {}, template["spec"]
    fleets = {f"{LABEL}/component": WORKER, POOL: pool.label, TEMPLATE: pool.hash, POD_NAME: act.name}
    # The pod's name is its hostname, and resolves in the domain of the pool's Service.
    spec |= {"hostname": act.name, "subdomain": pool.name}
    for container in spec["containers"][:1]:
        env = [variable for variable in container.get("env") or [] if variable.get("name") != MADE_OF]
        container["env"] = [*env, {"name": MADE_OF, "value": pool.hash}]
    if act.node:
        affinity = spec.get("affinity") or {}
        field = {"key": "metadata.name", "operator": "In", "values": [act.node]}
        of_node = {**(affinity.get("nodeAffinity") or {}), REQUIRED: {"nodeSelectorTerms": [{"matchFields": [field]}]}}
        spec["affinity"] = {**affinity, "nodeAffinity": of_node}
    metadata = {
        "name": act.name,
        "labels": {**(own.get("labels") or {}), **labels, **fleets},
        "annotations": own.get("annotations") or {},
        "ownerReferences": [_render_owner(pool)],
    }
    return {"metadata": metadata, "spec": spec}


def explain_template_error(pool: str, message: str, causes: Sequence[tuple[str, str]]) -> str:
    """Name the wrong field of a WorkerPool's template, from the API server's refusal of a pod."""
    problems = [_describe(*cause) for cause in causes[:NAMED]] or [_describe(*_parse_message(message))]
    more = [f"and {len(causes) - NAMED} more"] if len(causes) > NAMED else []
    return f"mend the template of WorkerPool {pool}, which the API server refuses: {'; '.join([*problems, *more])}"


def _parse_message(message: str) -> tuple[str, str]:
    """Return field and error from a message about JSON of the wrong type; an empty field if none is named."""
    if named := _PATH.search(message):
        return named[1], message
    types = list(_TYPES.finditer(message))
    if not types:
        return "", message
    # The rest quotes a piece of the pod, then a larger one.
    problem = message[types[-1].end() :].partition(", bigger context")[0].strip()
    return ".".join(name[1][:1].lower() + name[1][1:] for name in types), problem


def _describe(field: str, why: str) -> str:
    """Name the field as it is in the WorkerPool. A policy's refusal names none."""
    in_template = not field.startswith(NOT_IN_TEMPLATE) and _IN_TEMPLATE.match(field)
    where = f"spec.template.{field}" if in_template else field
    return f"{_short(where, BEGINNING)}: {_short(why)}" if field else _short(why)


def _short(text: str, end: int = END) -> str:
    return text if len(text) <= BEGINNING + end else f"{text[:BEGINNING]} ... {text[-end:]}"
