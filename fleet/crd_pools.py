"""The kind `WorkerPool` as the API server is told of it: written here alone (`fleet crd workerpool`)."""

from __future__ import annotations

from collections.abc import Mapping

from fleet.crd import defined, mapping, text, time_, whole

KIND, PLURAL = "WorkerPool", "workerpools"
FIXED, PER_NODE, ELASTIC = "fixed", "perNode", "elastic"
MODES = (FIXED, PER_NODE, ELASTIC)
IDLE, DEADLINE, NOW = "idle", "deadline", "now"
WHEN = (IDLE, DEADLINE, NOW)
# A pod's name is its host's, of 63 letters at most: so much is left for a number, or for a Node's name.
NAME = r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?"
MOST = 65533
# Of so many of a pool's pods it is counted at a time how often they ended.
ENDED = 128
# Letters of a condition's message: a longer one, and with it the whole status, is refused.
SAID = 1024
# Known to API servers from 1.25 on; the chart leaves them out before. The fleet itself refuses the same.
RULES = [
    {"rule": "self.mode != 'fixed' || has(self.replicas)", "message": "mode fixed says how many, in replicas"},
    {
        "rule": "self.mode != 'perNode' || has(self.nodeSelector)",
        "message": "mode perNode says which Nodes, in nodeSelector",
    },
    {
        "rule": "self.mode != 'elastic' || has(self.elastic)",
        "message": "mode elastic says between how many, in elastic",
    },
    {
        "rule": "!has(self.elastic) || self.elastic.min <= self.elastic.max",
        "message": "elastic.min is no more than elastic.max",
    },
    {
        "rule": "!has(self.update) || !has(self.update.when) || (self.update.when == 'deadline') == "
        "has(self.update.deadlineSeconds)",
        "message": "update.when deadline says when, in update.deadlineSeconds, and no other does",
    },
]
NAMED = [
    {
        "rule": f"self.metadata.name.matches('^{NAME}$')",
        "message": "its name begins those of its pods: a label of DNS of 40 letters at most",
    }
]


def whole_of(about: str, least: int) -> dict[str, object]:
    return {**whole(about), "minimum": least, "maximum": MOST}


SPEC = {
    **mapping(
        "What people want.",
        mode={
            "type": "string",
            "enum": list(MODES),
            "description": "fixed: so many as replicas says, named NAME-0 and on. perNode: one on each Node that "
            "nodeSelector matches, named after it. elastic: as many as jobs ask for, named as those of fixed.",
        },
        replicas={**whole("How many, with mode fixed."), "maximum": MOST},
        nodeSelector={
            "type": "object",
            "minProperties": 1,
            "maxProperties": 16,
            "additionalProperties": {"type": "string", "maxLength": 63},
            "description": "Labels of the Nodes that have a pod each, with mode perNode.",
        },
        elastic={
            **mapping(
                "Between how many, with mode elastic, and how quick.",
                min=whole_of("So many there are always.", 0),
                max=whole_of("And never more; what its numbers end at.", 1),
                idleSeconds={**whole("A pod that nothing has run on for so long goes."), "default": 600},
                pendingSeconds={**whole("A job waits so long before pods are made for it."), "default": 30},
                step={**whole_of("So many are on their way at a time; min comes at once.", 1), "default": 10},
                partitions={
                    "type": "array",
                    "maxItems": 64,
                    "items": text("", 64),
                    "description": "Of Slurm, whose jobs it serves. None: those of all.",
                },
            ),
            "required": ["min", "max"],
        },
        update=mapping(
            "How a pod that is to be another one, or none, is taken away.",
            maxUnavailable={
                **whole("So many may be away, or idle and kept from jobs, at a time. 0: none is taken away."),
                "default": 1,
                "maximum": MOST,
            },
            when={
                "type": "string",
                "enum": list(WHEN),
                "default": IDLE,
                "description": "idle: its jobs end by themselves. deadline: they have deadlineSeconds, and then run "
                "elsewhere. now: they run elsewhere at once.",
            },
            deadlineSeconds={**whole("From when it takes no new jobs."), "minimum": 1},
        ),
        template={
            **mapping(
                "Of its pods. Whoever writes it has any pod run in this namespace.",
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
    "What the fleet sees and does.",
    wanted=whole("How many there are to be."),
    replicas=whole("How many there are."),
    ready=whole("Of them ready."),
    updated=whole("Of them made of the present template."),
    away=whole("Of those that are to be missing, going or not ready."),
    template=text("A hash of the present template; the label minivm.io/template of its pods.", 64),
    generation=whole("Of the object that this is about."),
    conditions={
        "type": "array",
        "maxItems": 8,
        "description": "Ready: all are there and ready. Updated: all are of the present template, and none too many. "
        "Fits, of an elastic one: what jobs ask for is to be had here. Whole, of one that lends: none of its machines "
        "is with pods of others, or wanted by them.",
        "items": {
            **mapping(
                "",
                type=text("Which.", 64),
                status={"type": "string", "enum": ["True", "False"]},
                reason=text("In a word.", 64),
                message=text("In words.", SAID),
                lastTransitionTime=time_("Since when."),
            ),
            "required": ["type", "status", "reason", "lastTransitionTime"],
        },
        # Applied as a whole: field by field, a message that is over would leave an empty one.
        "x-kubernetes-list-type": "atomic",
    },
    adopted=text("The template that those count as made of which were taken over.", 64),
    ended={
        "type": "array",
        "maxItems": ENDED,
        "description": "Pods that ran no more: each goes, and is made anew, the next time after longer.",
        "items": {
            **mapping(
                "",
                name=text("Which.", 64),
                uid=text("The last one of that name.", 64),
                times=whole("How often."),
                since=time_("When that was seen of the last one."),
                why=text("Its phase, and what its kubelet said."),
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
