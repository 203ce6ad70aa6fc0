"""The client of the API server, the only importer of kubernetes_asyncio.

Does not use the library's models, which cost five times the processor time. Every read has a deadline: a dead
connection must not look like a cluster in which nothing happens.

Also the fleet's clock: the wall time at its start, advanced by the monotonic clock, so that setting a clock passes no
time. The API server and slurmctld report their time. If one disagrees with the fleet's clock, either may be wrong, and
decisions that end jobs because time has passed wait. The fleet resets its clock once its machine and the API server
agree.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp
from kubernetes_asyncio import client, config
from kubernetes_asyncio.config import ConfigException

from fleet import FleetError, crd
from fleet.decide.actions import SeenVersions
from fleet.world.fields import Fields
from fleet.world.kubernetes import LABEL, WORKER, make_fleet_mark

KUBERNETES, SLURM = "the API server", "slurmctld"
# A smaller difference changes no proof and no deadline.
MOST_SKEW_S = 30.0
# The fleet's clock is `_began` plus the monotonic clock.
_began = time.time() - time.monotonic()


def steady() -> float:
    """Return the time by the fleet's clock."""
    return _began + time.monotonic()


def clock_offset(sent: float, received: float, reported: float) -> float:
    """Return by how much the fleet's clock is ahead at least: the server read its clock between request and answer."""
    return max(0.0, sent - (reported + 1.0)) or min(0.0, received - reported)


class ClockSkew:
    """The difference of the fleet's clock from each server's."""

    def __init__(self) -> None:
        self.offsets: dict[str, float] = {}
        self._reset = False

    def note_date(self, began: float, date: str | None) -> None:
        """Note the API server's time from a Date header. `began`: the request's start by the monotonic clock."""
        try:
            reported = parsedate_to_datetime(date or "").timestamp()
        except (ValueError, OverflowError):
            return
        self.note(KUBERNETES, began, reported)
        passed = time.monotonic() - began
        wall = time.time()
        if self.wrong(KUBERNETES) and abs(clock_offset(wall - passed, wall, reported)) <= MOST_SKEW_S:
            global _began
            _began, self._reset = wall - time.monotonic(), True
            self.note(KUBERNETES, began, reported)

    def note(self, server: str, began: float, reported: float) -> None:
        self.offsets[server] = clock_offset(_began + began, steady(), reported)

    def was_reset(self) -> bool:
        """Return whether the clock was reset since the last call: then remembered times are invalid."""
        reset, self._reset = self._reset, False
        return reset

    def wrong(self, server: str) -> bool:
        return abs(self.offsets.get(server, 0.0)) > MOST_SKEW_S

    def why(self) -> str:
        """Return why the time is not trusted; empty: it is. Omit the difference: each new number would be news."""
        texts = [
            f"{server}'s clock is {'behind' if ahead > 0 else 'ahead of'} the fleet's"
            for server, ahead in sorted(self.offsets.items())
            if self.wrong(server)
        ]
        return f"{', and '.join(texts)} by over {MOST_SKEW_S:g} s" if texts else ""


Object = dict[str, Any]
# Statuses that mean: the object is gone, or has changed since the fleet read it.
CHANGED_MEANWHILE = (404, 409, 410, 412)
DENIED = "admission webhook "
MACHINES = {"group": crd.GROUP, "version": crd.VERSION, "plural": crd.PLURAL}
POOLS = {**MACHINES, "plural": crd.POOL_PLURAL}
PAGE = 500
GUESTS = "Guest in "  # followed by a namespace: the kind of guest pods
NO_SUCH_KIND = "404 page not found"  # what an API server answers without the kind's definition
BRING_KINDS = "kubectl apply --server-side --force-conflicts -f cluster/chart/charts/crds/crds/"
# The API server ends a watch after this time; the fleet then resumes it.
WATCH_S = 30
WITHIN_S = 15.0
MERGE, STRATEGIC = "application/merge-patch+json", "application/strategic-merge-patch+json"


class KubernetesError(FleetError):
    """The API server refused a request, or did not answer."""

    def __init__(
        self, what: str, why: str, status: int = 0, message: str = "", causes: tuple[tuple[str, str], ...] = ()
    ) -> None:
        """`message`: the server's own, whole. `causes`: a field, and what is wrong with it."""
        super().__init__(what, why)
        self.status, self.message, self.causes = status, message, causes


def parse_answer(what: str, text: bytes) -> Object:
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict):
        raise KubernetesError(what, "the answer is no JSON object")
    return answer


def refusal(what: str, status: int, text: str) -> KubernetesError:
    """Parse a refusal.

    A wrong uid and the refusal of a policy are both 422, and an admission webhook may choose any status, also one that
    means a conflict: the first becomes 409, the last 403.
    """
    try:
        answer = Fields(json.loads(text))
        causes = [cause.data for cause in answer.sub("details").subs("causes")]
        message = str(answer.data.get("message", text))
    except (FleetError, ValueError, RecursionError):
        causes, message = [], text
    field_errors = tuple((str(cause.get("field") or ""), str(cause.get("message") or "")) for cause in causes)
    if status == 422 and {field for field, _ in field_errors} == {"metadata.uid"}:
        meaning = 409
    else:
        meaning = 403 if message.startswith(DENIED) else status
    if status == 404 and message.strip() == NO_SUCH_KIND:
        return KubernetesError(what, f"Kubernetes does not know this kind: {BRING_KINDS} brings it", meaning, message)
    return KubernetesError(what, f"{status} {message[:200]}", meaning, message, field_errors)


def error_text(error: BaseException) -> str:
    return str(error) or type(error).__name__


class ApiClient:
    """The client of one API server, for the Nodes and the pods of one release."""

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
        # The labels of all objects of the release.
        self.labels = {f"{LABEL}/name": "minivm", f"{LABEL}/instance": release}
        self.mark = make_fleet_mark(namespace, release)

    @classmethod
    async def open(cls, namespace: str, release: str) -> ApiClient:
        """Connect with the pod's service account, or a user's kubeconfig."""
        try:
            settings = client.Configuration()
            try:
                config.load_incluster_config(client_configuration=settings)  # type: ignore[no-untyped-call]  # no types
            except ConfigException:
                await config.load_kube_config(client_configuration=settings)
        except (ConfigException, OSError) as error:
            raise FleetError("find the API server", str(error)) from error
        # Python 3.13 wants extensions that certificates of Kubernetes often lack: a key usage in the authority's, the
        # authority's key identifier in the server's. Chain, name and time are still verified.
        settings.disable_strict_ssl_verification = True
        return cls(client.ApiClient(settings), namespace, release)

    async def close(self) -> None:
        await self._connection.close()

    async def list(self, kind: str) -> AsyncIterator[tuple[list[Object], str]]:
        """Yield all objects of a kind, page by page, with the version from which a watch continues.

        Ten thousand objects are 700 MB of JSON; only one page is in memory at a time.
        """
        more = ""
        while True:
            further = {"_continue": more} if more else {}
            page = await self.ask(f"list {kind}s", self._lister(kind), limit=PAGE, **further)
            metadata = page.get("metadata") or {}
            if not isinstance(page.get("items"), list) or not metadata.get("resourceVersion"):
                raise KubernetesError(f"list {kind}s", "the answer is no list")
            yield page["items"], metadata["resourceVersion"]
            more = metadata.get("continue", "")
            if not more:
                return

    async def watch(self, kind: str, version: str) -> AsyncIterator[tuple[str, Object]]:
        """Yield ADDED, MODIFIED, DELETED and BOOKMARK events until the server ends the watch."""
        what = f"watch {kind}s"
        further = {"watch": True, "resource_version": version, "timeout_seconds": WATCH_S}
        reply = await self._reply(what, self._lister(kind), allow_watch_bookmarks=True, **further)
        rest = b""
        try:
            while True:
                async with asyncio.timeout(WATCH_S + WITHIN_S):
                    chunk = await reply.content.readany()
                if not chunk:
                    return
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    event = parse_answer(what, line)
                    if event.get("type") == "ERROR":
                        status = event.get("object", {})
                        raise KubernetesError(what, str(status.get("message")), int(status.get("code") or 0))
                    yield str(event.get("type")), event["object"]
        except (aiohttp.ClientError, OSError, TimeoutError, KeyError) as error:
            raise KubernetesError(what, error_text(error)) from error
        finally:
            reply.close()

    def _lister(self, kind: str) -> tuple[Any, Mapping[str, object]]:
        selector = ",".join(f"{key}={value}" for key, value in self.labels.items())
        words = {"namespace": self.namespace, "label_selector": selector}
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

    async def create_event(self, event: Object) -> None:
        words = {"namespace": event["metadata"]["namespace"], "body": event}
        await self.ask("write an Event", (self.core.create_namespaced_event, words))

    async def pod(self, name: str) -> Object:
        words = {"name": name, "namespace": self.namespace}
        return await self.ask(f"read the pod {name}", (self.core.read_namespaced_pod, words))

    async def lease(self, name: str) -> Object:
        return await self._lease(self.leases.read_namespaced_lease, name)

    async def put_lease(self, name: str, lease: Object) -> Object:
        """Replace the Lease. The server answers 409 if its version is no longer the one in `lease`."""
        return await self._lease(self.leases.replace_namespaced_lease, name, body=lease)

    async def _lease(self, ask: Any, name: str, **further: object) -> Object:
        return await self.ask(f"hold the Lease {name}", (ask, {"name": name, "namespace": self.namespace}), **further)

    async def secret(self, name: str) -> Object:
        words = {"name": name, "namespace": self.namespace}
        return await self.ask(f"read the Secret {name}", (self.core.read_namespaced_secret, words))

    async def put_secret(self, name: str, secret: Object) -> Object:
        """Replace the Secret. The server answers 409 if its version is no longer the one in `secret`."""
        words = {"name": name, "namespace": self.namespace, "body": secret}
        return await self.ask(f"write the Secret {name}", (self.core.replace_namespaced_secret, words))

    async def is_unchanged(self, at: SeenVersions) -> bool:
        """Return whether a worker's pod and Node still have the versions that were seen."""
        calls = (
            (self.core.read_namespaced_pod, {"name": at.pod, "namespace": self.namespace}, at.pod_version),
            (self.core.read_node, {"name": at.node}, at.node_version),
        )
        try:
            for ask, words, version in calls:
                item = await self.ask(f"read {words['name']}", (ask, words))
                if item.get("metadata", {}).get("resourceVersion") != version:
                    return False
        except KubernetesError as error:
            if error.status == 404:
                return False
            raise
        return True

    async def ask(self, what: str, call: tuple[Any, Mapping[str, object]], **further: object) -> Object:
        """Make a request. `what` names it in errors; `call`: a method of the library, and its arguments."""
        reply = await self._reply(what, call, **further)
        try:
            async with asyncio.timeout(WITHIN_S):
                return parse_answer(what, await reply.read())
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise KubernetesError(what, error_text(error)) from error
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
            # ConfigException: the service account's token, which the library reads again now and then.
            raise KubernetesError(what, error_text(error)) from error
        self.clocks.note_date(began, reply.headers.get("Date"))
        if reply.status >= 300:
            raise refusal(what, int(reply.status), await _body(reply))
        return reply


async def _body(reply: Any) -> str:
    """Read the body of a refusal. Without a body it is still a refusal: a proxy may answer for an absent API server."""
    try:
        async with asyncio.timeout(WITHIN_S):
            return str((await reply.read()).decode(errors="replace"))
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        return error_text(error)
    finally:
        reply.close()
