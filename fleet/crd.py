"""The kind `Machine` as the API server is told of it, and what the fleet's kinds have in common: written here alone.
The chart's files are made of it, and a test compares them (`fleet crd`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

GROUP, VERSION, KIND, PLURAL = "minivm.io", "v1alpha1", "Machine", "machines"
GOALS = ("up", "drain", "reboot", "replace", "down")
STATES = (
    *("TakesJobs", "NotResponding", "Draining", "Drained", "Down", "Unregistered"),
    # No worker runs there; the Node is given up; the hardware is nowhere; slurmctld does not answer.
    *("NoWorker", "GivenUp", "Absent", "SlurmUnknown"),
)
# So much is kept of each; what would be longer is cut by whoever writes it.
EVENTS, GPUS, TEXT = 32, 64, 256
# Known to API servers from 1.25 on; the chart leaves them out before.
RULES = [
    {
        "rule": "!has(self.goal) || self.goal == 'up' || (has(self.reason) && self.reason.size() > 0)",
        "message": "a goal other than up says why, in reason",
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
    "What people want of it. The fleet never writes here.",
    goal={
        "type": "string",
        "enum": list(GOALS),
        "description": "up: takes jobs, and what was counted against it is forgiven. drain: takes no new jobs. reboot, "
        "replace, down: the same, and once it is idle what the policy names for it. None: the policy decides.",
    },
    reason={**text("Why; it becomes a part of the drain's reason."), "pattern": r"^[^\n\r]*$"},
)

STATUS = mapping(
    "What the fleet sees and does.",
    goal={**text("The goal that counts, whoever set it."), "enum": list(GOALS)},
    state={**text("What Slurm says of it, or where it is."), "enum": list(STATES)},
    why=text("What holds it."),
    node=text("Its Node; empty: none at present."),
    nodeUid=text("Of that Node."),
    boot=text("Of that Node, when it was last seen: within one boot no GPU comes or goes."),
    providerId=text("The provider's name for it.", 512),
    gpus={
        "type": "array",
        "maxItems": GPUS,
        "items": {"type": "string", "maxLength": 64},
        "description": "UUIDs of its GPUs.",
    },
    worker=text("The worker on it, of this name in Kubernetes and in Slurm; several with spaces between.", 2048),
    verdict=text("What its checks said last against it."),
    ill={"type": "boolean", "description": "Whether that stands."},
    repeats=whole("Verdicts against it within the policy's window."),
    history={
        "type": "array",
        "maxItems": EVENTS,
        "description": "The latest last.",
        "items": {
            **mapping("", at=time_("When."), what=text("In a word.", 32), text=text("In words.")),
            "required": ["at", "what"],
        },
    },
    remedy={
        **mapping(
            "What is being done to it.",
            goal=text("For which goal.", 32),
            number=whole("Which one of this machine."),
            done={"type": "boolean", "description": "It is told; what follows is waited for."},
            boot=text("The boot id before it.", 64),
            at=time_("Since when."),
        ),
        "required": ["goal", "number", "at"],
        # Applied as a whole: field by field, what is over would leave an empty one.
        "x-kubernetes-map-type": "atomic",
    },
    remedies=whole("How many there were."),
    fulfilled=whole("The generation of the object whose goal is reached."),
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
    schema = mapping("One piece of hardware; it outlives pods and Nodes.", spec=spec, status=STATUS)
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
        # A release that is taken away leaves what it knew.
        "metadata": {"name": f"{plural}.{GROUP}", "annotations": {"helm.sh/resource-policy": "keep"}},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {"kind": kind, "plural": plural, "singular": kind.lower(), "shortNames": [short]},
            "versions": [version],
        },
    }
