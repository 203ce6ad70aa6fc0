"""The CustomResourceDefinition of `Machine`, and helpers for both kinds.

`fleet crd` prints it; the chart has a copy, which a test compares.
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
