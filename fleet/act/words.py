"""Changes and tells in words, for a log, a plan and an Event."""

from __future__ import annotations

from fleet.decide.actions import Change, Cordon, Drain, Evict, Forget, ShowOnPod, Tell, Uncordon, Undrain


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
        case ShowOnPod(pod, _, seen):
            return f"show on {pod}: {seen.reason} {seen.message}".rstrip()
        case Cordon(node, _, _, why):
            return f"cordon {node}: {why}"
        case Uncordon(node):
            return f"uncordon {node}"
        case Tell(about, _, text):
            return f"{about}: {text}"
