"""A pool's pods, made as a StatefulSet makes its own; and its status."""

from __future__ import annotations

from fleet import crd, crd_pools
from fleet.act.answers import CHANGED_MEANWHILE, ApiError, Object
from fleet.act.kubernetes import MERGE, POOLS, Api
from fleet.act.machines import APPLY, US
from fleet.act.pools.mistake import WRONG, to_mend
from fleet.decide.actions import Adopt, CreatePod, NotePool
from fleet.world.kubernetes import LABEL, WORKER
from fleet.world.pool import MADE_OF, POOL, TEMPLATE, WorkerPool, copied, written

KIND = {"apiVersion": f"{crd.GROUP}/{crd.VERSION}", "kind": crd_pools.KIND}
# What a Service of one pod selects by.
OF_ONE = "statefulset.kubernetes.io/pod-name"
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


async def change(api: Api, act: CreatePod | Adopt | NotePool) -> bool:
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
                body: Object = {**KIND, "metadata": {"name": name, "resourceVersion": version}}
                words = {**POOLS, "namespace": api.namespace, "name": name, "body": body | {"status": written(status)}}
                ask = api.custom.patch_namespaced_custom_object_status
                await api.ask(f"note of {name}", (ask, words), field_manager=US, force=True, _content_type=APPLY)
    except ApiError as error:
        if error.status in CHANGED_MEANWHILE:
            return False
        raise
    return True


async def _create(api: Api, act: CreatePod) -> None:
    """Never applied onto one that is there: that one may be anybody's."""
    name, body = act.name, pod(act, api.labels)
    try:
        await api.ask(f"create {name}", (api.core.create_namespaced_pod, {"namespace": api.namespace, "body": body}))
    except ApiError as error:
        if error.status == 409:
            raise ApiError(f"create {name}", "a pod of that name is there") from error
        if error.status in WRONG:
            raise ApiError(f"create {name}", to_mend(act.pool.name, error.said, error.causes)) from error
        raise


def owner(pool: WorkerPool) -> Object:
    return {**KIND, "name": pool.name, "uid": pool.uid, "controller": True}


def pod(act: CreatePod, labels: str) -> Object:
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
