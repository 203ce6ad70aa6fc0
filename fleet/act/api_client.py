"""The API server, asked and told. The only importer of kubernetes_asyncio.

Its models are not used: they cost five times the processor time, and we read the answers ourselves. Every read has a
deadline: a connection that is dead and does not say so must not pass for a world in which nothing happens.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp
from kubernetes_asyncio import client, config
from kubernetes_asyncio.config import ConfigException

from fleet import crd, crd_pools
from fleet.act.clock import ClockSkew
from fleet.decide.actions import (
    Cordon,
    Evict,
    Free,
    HideOnNode,
    Protect,
    RestartSlurmd,
    ShowOnNode,
    ShowOnPod,
    Uncordon,
    Versions,
)
from fleet.errors import FleetError
from fleet.world import fields
from fleet.world.kubernetes import CORDONED, FREE, LABEL, LOST, RESTART, WORKER, Condition, mark

Object = dict[str, Any]
# Its own words for: not this object, not any more, not as it was seen.
CHANGED_MEANWHILE = (404, 409, 410, 412)
BUDGET = 429
DENIED = "admission webhook "


class ApiError(FleetError):
    def __init__(
        self, what: str, why: str, status: int = 0, said: str = "", causes: tuple[tuple[str, str], ...] = ()
    ) -> None:
        """`said`: in its own words, whole. `causes`: which field, and what is wrong with it."""
        super().__init__(what, why)
        self.status, self.said, self.causes = status, said, causes


def read(what: str, text: bytes) -> Object:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ApiError(what, "the answer is no JSON object")
    return found


def refusal(what: str, status: int, text: str) -> ApiError:
    """Another uid than the object's is invalid to the server, as is what a policy refuses; and a webhook refuses with
    whatever status it likes, also with that of what has changed meanwhile."""
    try:
        said = fields.mapping(json.loads(text), "")
        causes = fields.items(fields.mapping(said.get("details"), "details").get("causes"), "causes")
        each = [fields.mapping(cause, "causes") for cause in causes]
    except (FleetError, ValueError, RecursionError):
        said, each = {"message": text}, []
    found = tuple((str(one.get("field") or ""), str(one.get("message") or "")) for one in each)
    message = str(said.get("message", text))
    another = 409 if status == 422 and {field for field, _ in found} == {"metadata.uid"} else status
    status_ = 403 if message.startswith(DENIED) else another
    return ApiError(what, f"{status} {message[:200]}", status_, message, found)


def reason(error: BaseException) -> str:
    return str(error) or type(error).__name__


ToKubernetes = Free | Protect | RestartSlurmd | Evict | ShowOnPod | ShowOnNode | HideOnNode | Cordon | Uncordon
MACHINES = {"group": crd.GROUP, "version": crd.VERSION, "plural": crd.PLURAL}
POOLS = {**MACHINES, "plural": crd_pools.PLURAL}
PAGE = 500
GUESTS = "Guest in "  # a namespace of others
# Beside our label on a Node that we have cordoned, for people.
WHY = "minivm.io/cordoned"
# The API server ends a watch after so long, and it is begun anew where it was.
WATCH_S = 30
WITHIN_S = 15.0
MERGE, STRATEGIC = "application/merge-patch+json", "application/strategic-merge-patch+json"
# The newer first; servers before 1.22 know the other alone.
EVICTIONS = ("policy/v1", "policy/v1beta1")


class ApiClient:
    """One API server, as far as the fleet needs it: Nodes, and the pods of one release."""

    def __init__(self, connection: client.ApiClient, namespace: str, release: str) -> None:
        self.clocks = ClockSkew()
        self.core = client.CoreV1Api(connection)
        self._connection = connection
        self.server = str(connection.configuration.host)
        self.namespace = namespace
        self._apps = client.AppsV1Api(connection)
        self.batch = client.BatchV1Api(connection)
        self.custom = client.CustomObjectsApi(connection)
        self.leases = client.CoordinationV1Api(connection)
        self.labels = f"{LABEL}/name=minivm,{LABEL}/instance={release}"
        self.mark = mark(namespace, release)

    @classmethod
    async def open(cls, namespace: str, release: str) -> ApiClient:
        """The pod's own account, or a person's kubeconfig."""
        try:
            settings = client.Configuration()
            try:
                config.load_incluster_config(client_configuration=settings)  # type: ignore[no-untyped-call]  # no types
            except ConfigException:
                await config.load_kube_config(client_configuration=settings)
        except (ConfigException, OSError) as error:
            raise FleetError("find the API server", str(error)) from error
        # Python 3.13 asks of certificates what Kubernetes' own often lack: a key usage in the authority's, the
        # authority's key identifier in the server's. Its other clients do not ask; chain, name and time still count.
        settings.disable_strict_ssl_verification = True
        return cls(client.ApiClient(settings), namespace, release)

    async def close(self) -> None:
        await self._connection.close()

    async def list(self, kind: str) -> AsyncIterator[tuple[list[Object], str]]:
        """Everything of a kind ("Node", "Pod", "StatefulSet"), page by page, with the version at which a watch goes on.

        Ten thousand objects as they come are 700 MB; nobody holds more than a page of them.
        """
        more = ""
        while True:
            further = {"_continue": more} if more else {}
            page = await self.ask(f"list {kind}s", self._lister(kind), limit=PAGE, **further)
            metadata = page.get("metadata") or {}
            if not isinstance(page.get("items"), list) or not metadata.get("resourceVersion"):
                raise ApiError(f"list {kind}s", "the answer is no list")
            yield page["items"], metadata["resourceVersion"]
            more = metadata.get("continue", "")
            if not more:
                return

    async def watch(self, kind: str, version: str) -> AsyncIterator[tuple[str, Object]]:
        """ADDED, MODIFIED, DELETED and BOOKMARK, until the server ends it."""
        ask, words = self._lister(kind)
        what = f"watch {kind}s"
        further = {"watch": True, "resource_version": version, "timeout_seconds": WATCH_S}
        reply = await self._reply(what, (ask, words), allow_watch_bookmarks=True, **further)
        kept = b""
        try:
            while True:
                async with asyncio.timeout(WATCH_S + WITHIN_S):
                    chunk = await reply.content.readany()
                if not chunk:
                    return
                *lines, kept = (kept + chunk).split(b"\n")
                for line in lines:
                    event = read(what, line)
                    if event.get("type") == "ERROR":
                        status = event.get("object", {})
                        raise ApiError(what, str(status.get("message")), int(status.get("code") or 0))
                    yield str(event.get("type")), event["object"]
        except (aiohttp.ClientError, OSError, TimeoutError, KeyError) as error:
            raise ApiError(what, reason(error)) from error
        finally:
            reply.close()

    def _lister(self, kind: str) -> tuple[Any, Mapping[str, object]]:
        words = {"namespace": self.namespace, "label_selector": self.labels}
        match kind:
            case "Node":
                return self.core.list_node, {}
            case "StatefulSet":
                words["label_selector"] += f",{LABEL}/component={WORKER}"
                return self._apps.list_namespaced_stateful_set, words
            case "Machine" | "WorkerPool":
                return self.custom.list_namespaced_custom_object, words | (POOLS if kind == "WorkerPool" else MACHINES)
        if kind.startswith(GUESTS):
            return self.core.list_namespaced_pod, {"namespace": kind.removeprefix(GUESTS)}
        return self.core.list_namespaced_pod, words

    async def change(self, act: ToKubernetes) -> bool:
        """False: it is no longer the object that was seen, and nothing is done."""
        try:
            match act:
                case ShowOnPod(pod, uid, seen):
                    words = {"name": pod, "namespace": self.namespace}
                    await self._show(pod, uid, self.core.patch_namespaced_pod_status, words, _condition(seen))
                case ShowOnNode(node, uid, seen):
                    # Tools that list Nodes print the heartbeat, which would be of year 1 without a value.
                    heard = {**_condition(seen), "lastHeartbeatTime": _stamp(time.time())}
                    await self._show(node, uid, self.core.patch_node_status, {"name": node}, heard)
                case HideOnNode(node, uid, type_):
                    gone = {"type": type_, "$patch": "delete"}
                    await self._show(node, uid, self.core.patch_node_status, {"name": node}, gone)
                case Free(pod, uid, version, was):
                    await self._mark(pod, uid, version, labels={FREE: "true" if was else LOST})
                case Protect(pod, uid, version):
                    await self._mark(pod, uid, version, labels={FREE: None})
                case RestartSlurmd(pod, uid, version, word):
                    await self._mark(pod, uid, version, annotations={RESTART: word})
                case Evict():
                    await self._evict(act)
                case Cordon(node, uid, version, why):
                    await self._patch_node(node, uid, version, {"unschedulable": True}, why)
                case Uncordon(node, uid, version):
                    await self._patch_node(node, uid, version, {"unschedulable": None}, None)
        except ApiError as error:
            if error.status in CHANGED_MEANWHILE:
                return False
            raise
        return True

    async def tell(self, event: Object) -> None:
        words = {"namespace": event["metadata"]["namespace"], "body": event}
        await self.ask("write an Event", (self.core.create_namespaced_event, words))

    async def lease(self, name: str) -> Object:
        return await self._lease(self.leases.read_namespaced_lease, name)

    async def put_lease(self, name: str, lease: Object) -> Object:
        """Refused by the server, with 409, where it is no longer the version that `lease` names."""
        return await self._lease(self.leases.replace_namespaced_lease, name, body=lease)

    async def _lease(self, ask: Any, name: str, **further: object) -> Object:
        return await self.ask(f"hold the Lease {name}", (ask, {"name": name, "namespace": self.namespace}), **further)

    async def still(self, at: Versions) -> bool:
        """Whether a worker's pod and Node are as they were seen."""
        calls = (
            (self.core.read_namespaced_pod, {"name": at.pod, "namespace": self.namespace}, at.pod_version),
            (self.core.read_node, {"name": at.node}, at.node_version),
        )
        try:
            for ask, words, version in calls:
                found = await self.ask(f"read {words['name']}", (ask, words))
                if found.get("metadata", {}).get("resourceVersion") != version:
                    return False
        except ApiError as error:
            if error.status == 404:
                return False
            raise
        return True

    async def _show(self, name: str, uid: str, patch: Any, words: Object, item: Object) -> None:
        """Conditions are merged by their type; another object of the name has another uid, and refuses."""
        body = {"metadata": {"uid": uid}, "status": {"conditions": [item]}}
        await self.ask(f"show Slurm's state on {name}", (patch, {**words, "body": body, "_content_type": STRATEGIC}))

    async def _mark(self, pod: str, uid: str, version: str, **marks: Mapping[str, str | None]) -> None:
        body = {"metadata": {"uid": uid, "resourceVersion": version, **marks}}
        words = {"name": pod, "namespace": self.namespace, "body": body, "_content_type": MERGE}
        await self.ask(f"mark {pod}", (self.core.patch_namespaced_pod, words))

    async def _evict(self, act: Evict) -> None:
        conditions = {"uid": act.uid, "resourceVersion": act.version}
        about = {"name": act.pod, "namespace": self.namespace}
        for version in EVICTIONS:
            body = {
                "apiVersion": version,
                "kind": "Eviction",
                "metadata": about,
                "deleteOptions": {"preconditions": conditions},
            }
            try:
                await self.ask(f"evict {act.pod}", (self.core.create_namespaced_pod_eviction, {**about, "body": body}))
                return
            except ApiError as error:
                if error.status == BUDGET:
                    raise ApiError(error.what, f"its PodDisruptionBudget says not yet: {error.why}", BUDGET) from error
                if error.status != 400 or version == EVICTIONS[-1]:
                    raise

    async def _patch_node(self, name: str, uid: str, version: str, spec: Object, why: str | None) -> None:
        ours = {"labels": {CORDONED: self.mark if why else None}, "annotations": {WHY: why}}
        metadata = {"uid": uid, "resourceVersion": version, **ours}
        words = {"name": name, "body": {"metadata": metadata, "spec": spec}, "_content_type": MERGE}
        await self.ask(f"cordon or uncordon {name}", (self.core.patch_node, words))

    async def ask(self, what: str, call: tuple[Any, Mapping[str, object]], **further: object) -> Object:
        reply = await self._reply(what, call, **further)
        try:
            async with asyncio.timeout(WITHIN_S):
                return read(what, await reply.read())
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise ApiError(what, reason(error)) from error
        finally:
            reply.release()

    async def _reply(self, what: str, call: tuple[Any, Mapping[str, object]], **further: object) -> Any:
        ask, words = call
        began = time.monotonic()
        try:
            async with asyncio.timeout(WITHIN_S):
                reply = await ask(**words, **further, _preload_content=False)
        except client.ApiException as error:
            raise refusal(what, int(error.status or 0), str(error.body or error.reason)) from error
        except (aiohttp.ClientError, OSError, TimeoutError, ConfigException) as error:
            # The last is about the account's token, which is read again now and then.
            raise ApiError(what, reason(error)) from error
        self.clocks.http(began, reply.headers.get("Date"))
        if reply.status >= 300:
            raise refusal(what, int(reply.status), await _said(reply))
        return reply


async def _said(reply: Any) -> str:
    """With a refusal, which is one also where its words break off or do not come: whoever stands before an API server
    that is away answers for it."""
    try:
        async with asyncio.timeout(WITHIN_S):
            return str((await reply.read()).decode(errors="replace"))
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        return reason(error)
    finally:
        reply.close()


def _condition(seen: Condition) -> Object:
    said = {"status": seen.status, "reason": seen.reason, "message": seen.message}
    return {"type": seen.type, **said, "lastTransitionTime": _stamp(seen.since or time.time())}


def _stamp(at: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))
