"""Machines, as the API server keeps them: made once, and their status applied onto what was seen; and what is done to
them."""

from __future__ import annotations

import copy
from collections.abc import Mapping

from fleet import crd
from fleet.act.answers import CHANGED_MEANWHILE, ApiError, Object
from fleet.act.kubernetes import MACHINES, MERGE, Api
from fleet.decide.actions import Annotate, CallHook, Make, Record, StartJob, Withdraw
from fleet.world.machine import Status, written

# Of the fields that are applied by this name, those go that are applied no more.
US = "fleet"
APPLY = "application/apply-patch+yaml"
KIND = {"apiVersion": f"{crd.GROUP}/{crd.VERSION}", "kind": crd.KIND}


async def change(api: Api, act: Make | Record | Annotate | Withdraw | StartJob | CallHook) -> bool:
    """False: it is no longer the object that was seen, or there already, and nothing is done."""
    try:
        match act:
            case Make(name):
                labels = dict(label.split("=") for label in api.labels.split(","))
                body: Object = {**KIND, "metadata": {"name": name, "labels": labels}, "spec": {}}
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


async def record(api: Api, name: str, version: str, status: Status) -> None:
    # The version alone holds: of an object's status that is applied, 1.20 does not look at the uid.
    body: Object = {**KIND, "metadata": {"name": name, "resourceVersion": version}, "status": written(status)}
    words = {**MACHINES, "namespace": api.namespace, "name": name, "body": body}
    ask = api.custom.patch_namespaced_custom_object_status
    # Nobody else writes there; what somebody has written all the same is not kept for him.
    await api.ask(f"note of {name}", (ask, words), field_manager=US, force=True, _content_type=APPLY)


async def annotate(api: Api, node: str, uid: str, version: str, values: Mapping[str, str | None]) -> None:
    body = {"metadata": {"uid": uid, "resourceVersion": version, "annotations": values}}
    words = {"name": node, "body": body, "_content_type": MERGE}
    await api.ask(f"annotate {node}", (api.core.patch_node, words))


async def start(api: Api, act: StartJob) -> None:
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
    owner = {**KIND, "name": act.machine.name, "uid": act.machine.uid}
    return {"metadata": {"name": act.name, "ownerReferences": [owner]}, "spec": spec}
