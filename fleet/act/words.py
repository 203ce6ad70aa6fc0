"""Changes and tells in words, for a log, a plan and an Event."""

from __future__ import annotations

from fleet.decide.actions import (
    Change,
    Cordon,
    Delete,
    Drain,
    Evict,
    Fence,
    Forget,
    Free,
    HideOnNode,
    Protect,
    Remove,
    ShowOnNode,
    ShowOnPod,
    Tell,
    Uncordon,
    Undrain,
    Unfence,
)


def in_words(action: Change | Tell) -> str:
    """One line, whatever people and machines have written into what it quotes."""
    return "".join(letter if letter.isprintable() else " " for letter in _words(action))


def _words(action: Change | Tell) -> str:
    match action:
        case Drain(name, reason, _, _, down):
            return f"{'set down' if down else 'drain'} {name} in Slurm: {reason}"
        case Undrain(name, _, _, _, down):
            return f"{'resume' if down else 'undrain'} {name} in Slurm"
        case Remove(name):
            return f"remove the record of {name} from Slurm: its name does not come back, and nobody names it"
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
        case Fence(node, _, _, why):
            return f"give {node} up, out of service: {why}"
        case Unfence(node):
            return f"take {node} back into service"
        case Delete(pod, _, node):
            return f"delete {pod} by force: {node} is given up"
        case Uncordon(node):
            return f"uncordon {node}"
        case Tell(about, _, text):
            return f"{about}: {text}"
