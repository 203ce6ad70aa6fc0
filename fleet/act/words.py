"""Changes and tells in words, for a log, a plan and an Event."""

from __future__ import annotations

from fleet.decide.actions import (
    Change,
    Cordon,
    Drain,
    Evict,
    Forget,
    Free,
    HideOnNode,
    Protect,
    ShowOnNode,
    ShowOnPod,
    Tell,
    Uncordon,
    Undrain,
)


def in_words(action: Change | Tell) -> str:
    match action:
        case Drain(name, reason):
            return f"drain {name} in Slurm: {reason}"
        case Undrain(name):
            return f"undrain {name} in Slurm"
        case Forget(name):
            return f"forget that {name} was drained"
        case Evict(pod, _, _, why):
            return f"evict {pod}: {why}"
        case Free(pod):
            return f"let others evict {pod}: it is drained, and nothing holds it"
        case Protect(pod):
            return f"protect {pod}: it may get a job"
        case ShowOnPod(name, _, seen) | ShowOnNode(name, _, seen):
            return f"show on {name}: {seen.reason} {seen.message}".rstrip()
        case HideOnNode(node):
            return f"show nothing on {node}: no worker is on it"
        case Cordon(node, _, _, why):
            return f"cordon {node}: {why}"
        case Uncordon(node):
            return f"uncordon {node}"
        case Tell(about, _, text):
            return f"{about}: {text}"
