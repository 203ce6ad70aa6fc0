"""The CustomResourceDefinitions of `Machine` and `WorkerPool`.

`fleet crd` prints them; the chart has copies, which a test compares.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

GROUP, VERSION, KIND, PLURAL = "minivm.io", "v1alpha1", "Machine", "machines"
GOALS = ("up", "drain", "reboot", "replace", "down")
STATES = (
    *("TakesJobs", "NotResponding", "Draining", "Drained", "Down", "Unregistered"),
    # Without a worker; given up by the fleet; at no Node; slurmctld does not answer.
    *("NoWorker", "GivenUp", "Absent", "SlurmUnknown"),
)
# The limits of entries, GPUs and letters; the writer cuts what is longer.
EVENTS, GPUS, TEXT = 32, 64, 256
# Active checks of a machine, and the results of each.
CHECKS, RESULTS = 16, 16
# CEL rules, for API servers from 1.25 on; the chart leaves them out before.
RULES = [
    {
        "rule": "!has(self.goal) || self.goal == 'up' || (has(self.reason) && self.reason.size() > 0)",
        "message": "a goal other than up needs a reason",
    }
]


Schema = dict[str, object]


def text(about: str, most: int = TEXT, **more: object) -> Schema:
    return {"type": "string", "maxLength": most, "description": about, **more}


def choice(about: str, values: Sequence[str], **more: object) -> Schema:
    return {"type": "string", "enum": list(values), "description": about, **more}


def whole(about: str, **more: object) -> Schema:
    return {"type": "integer", "format": "int64", "minimum": 0, "description": about, **more}


def flag(about: str) -> Schema:
    return {"type": "boolean", "description": about}


def time_(about: str) -> Schema:
    return {"type": "string", "format": "date-time", "description": about}


def array(about: str, most: int, items: Schema, **more: object) -> Schema:
    return {"type": "array", "maxItems": most, "description": about, "items": items, **more}


def mapping(about: str, required: Sequence[str] = (), /, **properties: object) -> Schema:
    needed = {"required": list(required)} if required else {}
    return {"type": "object", "description": about, "properties": properties, **needed}


def column(name: str, path: str, type_: str = "string", **more: object) -> Schema:
    return {"name": name, "type": type_, "jsonPath": path, **more}


SPEC = mapping(
    "The goal that an operator sets. The fleet never writes here.",
    goal=choice(
        "up: the machine takes jobs, and its counted verdicts are forgiven. drain: it takes no new "
        "jobs. reboot, replace, down: it takes no new jobs, and once it is idle the policy's remedy starts. Without a "
        "goal the policy decides.",
        GOALS,
    ),
    reason=text(
        "Why this goal is set. Slurm shows it in the reason of the drain. Required for every goal but up.",
        pattern=r"^[^\n\r]*$",
    ),
)

STATUS = mapping(
    "What the fleet observed and did. Only the fleet writes here.",
    goal=text("The goal in effect: the operator's in spec.goal, or else the policy's.", enum=list(GOALS)),
    state=text("The state of its worker in Slurm, or why there is none.", enum=list(STATES)),
    why=text("Why the machine takes no jobs, or what it waits for."),
    node=text("The Node that it is now; empty: none."),
    nodeUid=text("The uid of that Node."),
    boot=text("The boot id of that Node when the fleet last saw it. Within one boot no GPU comes or goes."),
    providerId=text("The machine's id at the cloud provider, from the Node's spec.providerID.", 512),
    gpus=array("The UUIDs of its GPUs.", GPUS, {"type": "string", "maxLength": 64}),
    worker=text("Its workers, by their names in Kubernetes and Slurm, separated by spaces.", 2048),
    verdict=text("The last verdict of a health check against the machine."),
    ill=flag("True while that verdict holds."),
    repeats=whole("The number of verdicts within the policy's window, since they were last forgiven."),
    history=array(
        "The last events of the machine, the latest last.",
        EVENTS,
        mapping(
            "An event.",
            ("at", "what"),
            at=time_("When it happened."),
            what=text("The kind of event.", 32),
            text=text("Details."),
        ),
    ),
    activeChecks=array(
        "The last results of each active check on the machine.",
        CHECKS,
        mapping(
            "A check's last results.",
            ("check", "at", "results"),
            check=text("The check.", 64),
            at=time_("When it last passed or failed."),
            passedAt=time_("When it last passed; absent: never."),
            results=text("Its last results, the latest last. P: passed, F: failed.", RESULTS),
        ),
    ),
    remedy={
        **mapping(
            "The remedy in progress; absent: none.",
            ("goal", "number", "at"),
            goal=text("The goal that the remedy serves.", 32),
            number=whole("The number of this remedy, counted per machine. A webhook gets it in the idempotency key."),
            done=flag("True once the remedy was requested; completion is pending."),
            boot=text("The Node's boot id before the remedy.", 64),
            at=time_("When the remedy began."),
        ),
        # Atomic: applied field by field, an ended remedy would stay as an empty object.
        "x-kubernetes-map-type": "atomic",
    },
    remedies=whole("The number of remedies so far."),
    fulfilled=whole("The metadata.generation whose goal reboot is complete."),
)

COLUMNS = [
    column("Goal", ".status.goal"),
    column("State", ".status.state"),
    column("Node", ".status.node"),
    column("Worker", ".status.worker"),
    column("Repeats", ".status.repeats", "integer"),
    column("Why", ".status.why"),
    column("Verdict", ".status.verdict", priority=1),
    column("Age", ".metadata.creationTimestamp", "date"),
]


def definition() -> Mapping[str, object]:
    spec = {**SPEC, "x-kubernetes-validations": RULES}
    schema = mapping("One machine, identified by its hardware. It outlives pods and Nodes.", spec=spec, status=STATUS)
    return defined(KIND, PLURAL, "mvm", schema, COLUMNS, {"status": {}})


def defined(
    kind: str,
    plural: str,
    short: str,
    schema: Mapping[str, object],
    columns: Sequence[Mapping[str, object]],
    subresources: Mapping[str, object],
) -> Mapping[str, object]:
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": schema},
        "subresources": subresources,
        "additionalPrinterColumns": columns,
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        # Uninstalling the release keeps the kind and its objects.
        "metadata": {"name": f"{plural}.{GROUP}", "annotations": {"helm.sh/resource-policy": "keep"}},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {"kind": kind, "plural": plural, "singular": kind.lower(), "shortNames": [short]},
            "versions": [version],
        },
    }


POOL_KIND, POOL_PLURAL = "WorkerPool", "workerpools"
FIXED, PER_NODE, ELASTIC = "fixed", "perNode", "elastic"
MODES = (FIXED, PER_NODE, ELASTIC)
WHEN_IDLE, WHEN_DEADLINE, WHEN_NOW = "idle", "deadline", "now"
WHEN = (WHEN_IDLE, WHEN_DEADLINE, WHEN_NOW)
# A pod's name is its hostname, of 63 letters at most: this leaves room for a number or a Node's name.
POOL_NAME = r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?"
MOST_PODS = 65533
# What the API server fills in. One with an older definition does not, so the fleet reads the same defaults.
DEFAULTS = {"replicas": 1, "maxUnavailable": 1, "idleSeconds": 600, "pendingSeconds": 30, "step": 10}
# The most pods of a pool with counted ends.
MOST_ENDED = 128
# Bytes of the last good spec that is kept: with the spec itself it must fit into an object.
MOST_LAST_GOOD = 262144
# Letters of a condition's message; the API server refuses a status with a longer one.
MOST_MESSAGE = 1024
# CEL rules, for API servers from 1.25 on; the chart leaves them out before. The fleet refuses the same itself.
POOL_RULES = [
    {"rule": "self.mode != 'perNode' || has(self.nodeSelector)", "message": "mode perNode needs nodeSelector"},
    {"rule": "self.mode != 'elastic' || has(self.elastic)", "message": "mode elastic needs elastic"},
    {
        "rule": "!has(self.elastic) || self.elastic.min <= self.elastic.max",
        "message": "elastic.min must not exceed elastic.max",
    },
    {
        "rule": "!has(self.update) || !has(self.update.when) || (self.update.when == 'deadline') == "
        "has(self.update.deadlineSeconds)",
        "message": "update.deadlineSeconds is required with update.when deadline, and not allowed otherwise",
    },
]
POOL_NAME_RULE = [
    {
        "rule": f"self.metadata.name.matches('^{POOL_NAME}$')",
        "message": "the name must be a DNS label of at most 40 characters, because the names of its pods begin with it",
    }
]


POOL_SPEC = {
    **mapping(
        "The worker pods that the operator wants.",
        ("mode", "template"),
        mode=choice(
            "fixed: as many pods as replicas says, named NAME-0, NAME-1 and so on. perNode: one pod on "
            "each Node that nodeSelector matches, named after the Node. elastic: as many pods as jobs need, within the "
            "limits of elastic, named as with fixed.",
            MODES,
        ),
        # The default of a Deployment: a manifest may leave the number to `kubectl scale` or an autoscaler.
        replicas=whole("The number of pods with mode fixed.", maximum=MOST_PODS, default=DEFAULTS["replicas"]),
        nodeSelector={
            "type": "object",
            "minProperties": 1,
            "maxProperties": 16,
            "additionalProperties": {"type": "string", "maxLength": 63},
            "description": "With mode perNode, each Node with all of these labels gets a pod.",
        },
        elastic=mapping(
            "With mode elastic, the limits of the number of pods and how quickly it changes.",
            ("min", "max"),
            min=whole("The smallest number of pods.", maximum=MOST_PODS),
            max=whole("The largest number of pods.", minimum=1, maximum=MOST_PODS),
            idleSeconds=whole("How long a pod stays without jobs.", default=DEFAULTS["idleSeconds"]),
            pendingSeconds=whole(
                "How long a job waits before the fleet creates pods for it.", default=DEFAULTS["pendingSeconds"]
            ),
            step=whole(
                "The largest number of pods that start at a time. The pods up to min all start at once.",
                minimum=1,
                maximum=MOST_PODS,
                default=DEFAULTS["step"],
            ),
            partitions=array(
                "The Slurm partitions whose jobs the pool serves. Empty: those of its nodes.",
                64,
                text("A partition.", 64),
            ),
        ),
        update=mapping(
            "How the fleet replaces outdated pods and removes surplus ones.",
            maxUnavailable=whole(
                "The largest number of pods that are away, or idle and drained, at a time. 0: none is replaced.",
                default=DEFAULTS["maxUnavailable"],
                maximum=MOST_PODS,
            ),
            when=choice(
                "idle: the pod waits until its jobs end. deadline: its jobs have deadlineSeconds, then Slurm requeues "
                "them. now: Slurm requeues them at once.",
                WHEN,
                default=WHEN_IDLE,
            ),
            deadlineSeconds=whole(
                "The time that jobs have, from the drain of their node, with when: deadline.", minimum=1
            ),
        ),
        template=mapping(
            "The pod template. A user who may write it can run any pod in this namespace.",
            ("spec",),
            metadata=mapping(
                "The labels and annotations of the pods.",
                **{
                    key: {"type": "object", "additionalProperties": {"type": "string"}}
                    for key in ("labels", "annotations")
                },
            ),
            spec={"type": "object", "x-kubernetes-preserve-unknown-fields": True},
        ),
    ),
    "x-kubernetes-validations": POOL_RULES,
}

ATOMIC = {"x-kubernetes-list-type": "atomic"}
POOL_STATUS = mapping(
    "What the fleet observed and did. Only the fleet writes here.",
    wanted=whole("The number of pods that should exist."),
    replicas=whole("The number of pods that exist."),
    ready=whole("The number of ready pods."),
    updated=whole("The number of pods made of the current template."),
    away=whole("The number of pods that are missing, being deleted or not ready."),
    template=text("The hash of the current template, as in the label minivm.io/template of its pods.", 64),
    generation=whole("The metadata.generation that this status describes."),
    # Lists are atomic: applied field by field, an obsolete message would stay as an empty one.
    conditions=array(
        "Ready: all pods exist and are ready. Updated: all pods are made of the current template, and "
        "none is surplus. Fits, only of an elastic pool: the pool can serve the waiting jobs. Whole, only of a lending "
        "pool: no machine of it is lent, and no guest pod wants one.",
        8,
        mapping(
            "A condition.",
            ("type", "status", "reason", "lastTransitionTime"),
            type=text("The type of the condition.", 64),
            status=choice("Whether it holds.", ("True", "False")),
            reason=text("The reason in one word.", 64),
            message=text("Details.", MOST_MESSAGE),
            lastTransitionTime=time_("When the status last changed."),
        ),
        **ATOMIC,
    ),
    adopted=text("The hash of the template of which adopted pods count as made.", 64),
    lastGood=text(
        "The last spec that the fleet could read, as JSON. It applies while the current spec is wrong.", MOST_LAST_GOOD
    ),
    ended=array(
        "Pods that ended. The fleet replaces each, after a longer pause each time.",
        MOST_ENDED,
        mapping(
            "The ends of the pods of one name.",
            ("name", "uid", "times", "since"),
            name=text("The pod's name.", 64),
            uid=text("The uid of the last pod of that name.", 64),
            times=whole("How often pods of that name ended."),
            since=time_("When the fleet saw the last end."),
            why=text("The pod's phase and the kubelet's reason."),
        ),
        **ATOMIC,
    ),
)

POOL_COLUMNS = [
    column("Mode", ".spec.mode"),
    column("Wanted", ".status.wanted", "integer"),
    column("Ready", ".status.ready", "integer"),
    column("Updated", ".status.updated", "integer"),
    column("Away", ".status.away", "integer"),
    column("Max", ".spec.elastic.max", "integer"),
    column("When", ".spec.update.when"),
    column("Why", ".status.conditions[?(@.type=='Updated')].message"),
    column("Age", ".metadata.creationTimestamp", "date"),
]
SCALE = {"specReplicasPath": ".spec.replicas", "statusReplicasPath": ".status.replicas"}


def pool_definition() -> Mapping[str, object]:
    schema = {
        **mapping("A pool of worker pods made of one template.", ("spec",), spec=POOL_SPEC, status=POOL_STATUS),
        "x-kubernetes-validations": POOL_NAME_RULE,
    }
    return defined(POOL_KIND, POOL_PLURAL, "mvp", schema, POOL_COLUMNS, {"status": {}, "scale": SCALE})
