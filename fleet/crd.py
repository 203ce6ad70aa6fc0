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
# CEL rules, for API servers from 1.25 on; the chart leaves them out before.
RULES = [
    {
        "rule": "!has(self.goal) || self.goal == 'up' || (has(self.reason) && self.reason.size() > 0)",
        "message": "a goal other than up needs a reason",
    }
]


def text(about: str, most: int = TEXT) -> dict[str, object]:
    return {"type": "string", "maxLength": most, "description": about}


def whole(about: str) -> dict[str, object]:
    return {"type": "integer", "format": "int64", "minimum": 0, "description": about}


def time_(about: str) -> dict[str, object]:
    return {"type": "string", "format": "date-time", "description": about}


def mapping(about: str, **properties: object) -> dict[str, object]:
    return {"type": "object", "description": about, "properties": properties}


SPEC = mapping(
    "The goal that people set. The fleet never writes here.",
    goal={
        "type": "string",
        "enum": list(GOALS),
        "description": "up: takes jobs; counted verdicts are forgiven. drain: takes no new jobs. reboot, replace, "
        "down: takes no new jobs, and the policy's remedy follows once it is idle. Without a goal the policy decides.",
    },
    reason={**text("Why; shown in the reason of the drain."), "pattern": r"^[^\n\r]*$"},
)

STATUS = mapping(
    "What the fleet observed and did.",
    goal={**text("The goal that counts: a person's, or the policy's."), "enum": list(GOALS)},
    state={**text("Its state in Slurm, or why it has none."), "enum": list(STATES)},
    why=text("Why it takes no jobs, or what it waits for."),
    node=text("Its Node; empty: at no Node now."),
    nodeUid=text("The uid of that Node."),
    boot=text("The boot id of that Node when it was last seen: within one boot no GPU comes or goes."),
    providerId=text("The provider's id of it.", 512),
    gpus={
        "type": "array",
        "maxItems": GPUS,
        "items": {"type": "string", "maxLength": 64},
        "description": "UUIDs of its GPUs.",
    },
    worker=text("Its worker, by the name in Kubernetes and Slurm; several are separated by spaces.", 2048),
    verdict=text("The last verdict against it."),
    ill={"type": "boolean", "description": "Whether the verdict still holds."},
    repeats=whole("Verdicts against it within the policy's window, since it was last forgiven."),
    history={
        "type": "array",
        "maxItems": EVENTS,
        "description": "The last entries, the latest last.",
        "items": {
            **mapping("", at=time_("The time."), what=text("The kind of event.", 32), text=text("Details.")),
            "required": ["at", "what"],
        },
    },
    remedy={
        **mapping(
            "The remedy in progress.",
            goal=text("Its goal.", 32),
            number=whole("The number of the remedy for this machine."),
            done={"type": "boolean", "description": "True once the remedy was requested; completion is pending."},
            boot=text("The boot id before the remedy.", 64),
            at=time_("When it began."),
        ),
        "required": ["goal", "number", "at"],
        # Atomic: applied field by field, an ended remedy would stay as an empty object.
        "x-kubernetes-map-type": "atomic",
    },
    remedies=whole("The number of remedies so far."),
    fulfilled=whole("The generation of the object whose reboot is complete."),
)

COLUMNS: list[Mapping[str, object]] = [
    {"name": "Goal", "type": "string", "jsonPath": ".status.goal"},
    {"name": "State", "type": "string", "jsonPath": ".status.state"},
    {"name": "Node", "type": "string", "jsonPath": ".status.node"},
    {"name": "Worker", "type": "string", "jsonPath": ".status.worker"},
    {"name": "Repeats", "type": "integer", "jsonPath": ".status.repeats"},
    {"name": "Why", "type": "string", "jsonPath": ".status.why"},
    {"name": "Verdict", "type": "string", "jsonPath": ".status.verdict", "priority": 1},
    {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
]


def definition() -> Mapping[str, object]:
    spec = {**SPEC, "x-kubernetes-validations": RULES}
    schema = mapping("One machine, known by its hardware; it outlives pods and Nodes.", spec=spec, status=STATUS)
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
    {
        "rule": "self.mode != 'perNode' || has(self.nodeSelector)",
        "message": "mode perNode needs nodeSelector",
    },
    {
        "rule": "self.mode != 'elastic' || has(self.elastic)",
        "message": "mode elastic needs elastic",
    },
    {
        "rule": "!has(self.elastic) || self.elastic.min <= self.elastic.max",
        "message": "elastic.min must not exceed elastic.max",
    },
    {
        "rule": "!has(self.update) || !has(self.update.when) || (self.update.when == 'deadline') == "
        "has(self.update.deadlineSeconds)",
        "message": "update.deadlineSeconds is needed with update.when deadline, and allowed with no other",
    },
]
POOL_NAME_RULE = [
    {
        "rule": f"self.metadata.name.matches('^{POOL_NAME}$')",
        "message": "the name begins those of its pods: a label of DNS of 40 letters at most",
    }
]


def whole_of(about: str, least: int) -> dict[str, object]:
    return {**whole(about), "minimum": least, "maximum": MOST_PODS}


POOL_SPEC = {
    **mapping(
        "The pods that people want.",
        mode={
            "type": "string",
            "enum": list(MODES),
            "description": "fixed: replicas pods, named NAME-0 and on. perNode: one on each Node that nodeSelector "
            "matches, named after the Node. elastic: as many as jobs ask for, named as with fixed.",
        },
        # The default of a Deployment: a manifest may leave the number to `kubectl scale` or an autoscaler.
        replicas={
            **whole("The number of pods, with mode fixed."),
            "maximum": MOST_PODS,
            "default": DEFAULTS["replicas"],
        },
        nodeSelector={
            "type": "object",
            "minProperties": 1,
            "maxProperties": 16,
            "additionalProperties": {"type": "string", "maxLength": 63},
            "description": "The labels of the Nodes that get a pod each, with mode perNode.",
        },
        elastic={
            **mapping(
                "The limits of the number of pods, and how quickly it changes, with mode elastic.",
                min=whole_of("The least number of pods.", 0),
                max=whole_of("The greatest number of pods.", 1),
                idleSeconds={**whole("A pod without jobs goes after so long."), "default": DEFAULTS["idleSeconds"]},
                pendingSeconds={
                    **whole("A job waits so long before pods are created for it."),
                    "default": DEFAULTS["pendingSeconds"],
                },
                step={
                    **whole_of("The most pods on their way at a time; min is created at once.", 1),
                    "default": DEFAULTS["step"],
                },
                partitions={
                    "type": "array",
                    "maxItems": 64,
                    "items": text("", 64),
                    "description": "The Slurm partitions whose jobs it serves; empty: all.",
                },
            ),
            "required": ["min", "max"],
        },
        update=mapping(
            "How outdated and surplus pods go.",
            maxUnavailable={
                **whole("The most pods that are away, or idle and kept from jobs, at a time. 0: no pod is replaced."),
                "default": DEFAULTS["maxUnavailable"],
                "maximum": MOST_PODS,
            },
            when={
                "type": "string",
                "enum": list(WHEN),
                "default": WHEN_IDLE,
                "description": "idle: jobs run to their end. deadline: jobs have deadlineSeconds, then they are "
                "requeued. now: jobs are requeued at once.",
            },
            deadlineSeconds={**whole("Counted from when the pod takes no new jobs."), "minimum": 1},
        ),
        template={
            **mapping(
                "The template of its pods. A user who may write it can run any pod in this namespace.",
                metadata=mapping(
                    "Their labels and annotations.",
                    **{
                        key: {"type": "object", "additionalProperties": {"type": "string"}}
                        for key in ("labels", "annotations")
                    },
                ),
                spec={"type": "object", "x-kubernetes-preserve-unknown-fields": True},
            ),
            "required": ["spec"],
        },
    ),
    "required": ["mode", "template"],
}

POOL_STATUS = mapping(
    "What the fleet observed and did.",
    wanted=whole("The number of pods that should exist."),
    replicas=whole("The number of pods."),
    ready=whole("Ready pods."),
    updated=whole("Pods of the present template."),
    away=whole("Pods that are missing, being deleted or not ready."),
    template=text("The hash of the present template, as in the label minivm.io/template of its pods.", 64),
    generation=whole("The generation that this status describes."),
    conditions={
        "type": "array",
        "maxItems": 8,
        "description": "Ready: all pods exist and are ready. Updated: all pods are of the present template, and none "
        "is surplus. Fits, of an elastic pool: it can serve the waiting jobs. Whole, of a lending pool: no machine is "
        "lent or wanted by guest pods.",
        "items": {
            **mapping(
                "",
                type=text("The type.", 64),
                status={"type": "string", "enum": ["True", "False"]},
                reason=text("The reason, one word.", 64),
                message=text("Details.", MOST_MESSAGE),
                lastTransitionTime=time_("When the status last changed."),
            ),
            "required": ["type", "status", "reason", "lastTransitionTime"],
        },
        # Atomic: applied field by field, an obsolete message would stay as an empty one.
        "x-kubernetes-list-type": "atomic",
    },
    adopted=text("The template that adopted pods count as made of.", 64),
    lastGood=text(
        "The last spec that the fleet could read, as JSON: it holds while the present one is wrong.", MOST_LAST_GOOD
    ),
    ended={
        "type": "array",
        "maxItems": MOST_ENDED,
        "description": "Pods that ended: each is replaced, the next time after longer.",
        "items": {
            **mapping(
                "",
                name=text("The pod's name.", 64),
                uid=text("The uid of the last pod of that name.", 64),
                times=whole("How often it ended."),
                since=time_("When the last end was seen."),
                why=text("The phase, and the kubelet's reason."),
            ),
            "required": ["name", "uid", "times", "since"],
        },
        "x-kubernetes-list-type": "atomic",
    },
)

POOL_COLUMNS = [
    {"name": "Mode", "type": "string", "jsonPath": ".spec.mode"},
    {"name": "Wanted", "type": "integer", "jsonPath": ".status.wanted"},
    {"name": "Ready", "type": "integer", "jsonPath": ".status.ready"},
    {"name": "Updated", "type": "integer", "jsonPath": ".status.updated"},
    {"name": "Away", "type": "integer", "jsonPath": ".status.away"},
    {"name": "Max", "type": "integer", "jsonPath": ".spec.elastic.max"},
    {"name": "When", "type": "string", "jsonPath": ".spec.update.when"},
    {"name": "Why", "type": "string", "jsonPath": ".status.conditions[?(@.type=='Updated')].message"},
    {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
]
SCALE = {"specReplicasPath": ".spec.replicas", "statusReplicasPath": ".status.replicas"}


def pool_definition() -> Mapping[str, object]:
    schema = {
        **mapping(
            "Workers of one template.", spec={**POOL_SPEC, "x-kubernetes-validations": POOL_RULES}, status=POOL_STATUS
        ),
        "required": ["spec"],
        "x-kubernetes-validations": POOL_NAME_RULE,
    }
    return defined(POOL_KIND, POOL_PLURAL, "mvp", schema, POOL_COLUMNS, {"status": {}, "scale": SCALE})
