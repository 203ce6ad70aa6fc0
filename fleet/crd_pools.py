"""The CustomResourceDefinition of `WorkerPool`, which `fleet crd workerpool` prints."""

from __future__ import annotations

from collections.abc import Mapping

from fleet.crd import defined, mapping, text, time_, whole

KIND, PLURAL = "WorkerPool", "workerpools"
FIXED, PER_NODE, ELASTIC = "fixed", "perNode", "elastic"
MODES = (FIXED, PER_NODE, ELASTIC)
IDLE, DEADLINE, NOW = "idle", "deadline", "now"
WHEN = (IDLE, DEADLINE, NOW)
# A pod's name is its hostname, of 63 letters at most: this leaves room for a number or a Node's name.
NAME = r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?"
MOST = 65533
REPLICAS = 1
# The most pods of a pool with counted ends.
ENDED = 128
# Bytes of the last good spec that is kept: with the spec itself it must fit into an object.
LAST_GOOD = 262144
# Letters of a condition's message; the API server refuses a status with a longer one.
SAID = 1024
# CEL rules, for API servers from 1.25 on; the chart leaves them out before. The fleet refuses the same itself.
RULES = [
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
NAMED = [
    {
        "rule": f"self.metadata.name.matches('^{NAME}$')",
        "message": "the name begins those of its pods: a label of DNS of 40 letters at most",
    }
]


def whole_of(about: str, least: int) -> dict[str, object]:
    return {**whole(about), "minimum": least, "maximum": MOST}


SPEC = {
    **mapping(
        "The pods that people want.",
        mode={
            "type": "string",
            "enum": list(MODES),
            "description": "fixed: replicas pods, named NAME-0 and on. perNode: one on each Node that nodeSelector "
            "matches, named after the Node. elastic: as many as jobs ask for, named as with fixed.",
        },
        # The default of a Deployment: a manifest may leave the number to `kubectl scale` or an autoscaler.
        replicas={**whole("The number of pods, with mode fixed."), "maximum": MOST, "default": REPLICAS},
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
                idleSeconds={**whole("A pod without jobs goes after so long."), "default": 600},
                pendingSeconds={**whole("A job waits so long before pods are created for it."), "default": 30},
                step={**whole_of("The most pods on their way at a time; min is created at once.", 1), "default": 10},
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
                "default": 1,
                "maximum": MOST,
            },
            when={
                "type": "string",
                "enum": list(WHEN),
                "default": IDLE,
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

STATUS = mapping(
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
                message=text("Details.", SAID),
                lastTransitionTime=time_("When the status last changed."),
            ),
            "required": ["type", "status", "reason", "lastTransitionTime"],
        },
        # Atomic: applied field by field, an obsolete message would stay as an empty one.
        "x-kubernetes-list-type": "atomic",
    },
    adopted=text("The template that adopted pods count as made of.", 64),
    lastGood=text(
        "The last spec that the fleet could read, as JSON: it holds while the present one is wrong.", LAST_GOOD
    ),
    ended={
        "type": "array",
        "maxItems": ENDED,
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

COLUMNS = [
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


def definition() -> Mapping[str, object]:
    schema = {
        **mapping("Workers of one template.", spec={**SPEC, "x-kubernetes-validations": RULES}, status=STATUS),
        "required": ["spec"],
        "x-kubernetes-validations": NAMED,
    }
    return defined(KIND, PLURAL, "mvp", schema, COLUMNS, {"status": {}, "scale": SCALE})
