"""Changes and notices as sentences for the log, the plan and Events."""

from __future__ import annotations

from fleet.decide import actions
from ground.errors import one_line


def in_words(action: actions.Change | actions.Notice) -> str:
    """Render one line, whatever users and machines wrote into the quoted parts."""
    return one_line(_words(action))


def _words(action: actions.Change | actions.Notice) -> str:  # noqa: C901, PLR0911, PLR0912 - one case for each change
    match action:
        case actions.Drain(name, reason, _, _, down):
            return f"{'set down' if down else 'drain'} {name} in Slurm: {reason}"
        case actions.Undrain(name, _, _, _, down):
            return f"{'resume' if down else 'undrain'} {name} in Slurm"
        case actions.Remove(name):
            return f"remove the record of {name} from Slurm: its name does not come back, and nobody names it"
        case actions.Forget(name):
            return f"forget that {name} was drained"
        case actions.Evict(pod, _, _, why):
            return f"evict {pod}: {why}"
        case actions.Free(pod):
            return f"let others evict {pod}: it is drained, and nothing holds it"
        case actions.RestartSlurmd(pod, _, _, word):
            return f"restart slurmd of {pod}: Slurm does not know it" if word else f"Slurm knows {pod} again"
        case actions.Protect(pod):
            return f"protect {pod}: it may get a job"
        case actions.ShowOnPod(name, _, seen) | actions.ShowOnNode(name, _, seen):
            return f"show on {name}: {seen.reason} {seen.message}".rstrip()
        case actions.HideOnNode(node):
            return f"show nothing on {node}: no worker is on it"
        case actions.Cordon(node, _, _, why):
            return f"cordon {node}: {why}"
        case actions.Fence(node, _, _, why):
            return f"give {node} up, out of service: {why}"
        case actions.Unfence(node):
            return f"take {node} back into service"
        case actions.Delete(pod, _, node):
            return f"delete {pod} by force: {node} is given up"
        case actions.Uncordon(node):
            return f"uncordon {node}"
        case actions.Make(name, node):
            return f"keep the machine of {node} as {name}"
        case actions.Record(name, _, status):
            last = f": {status.history[-1].what} {status.history[-1].text}".rstrip() if status.history else ""
            return f"note of {name}: {status.state}{last}"
        case actions.Annotate(node, _, _, values):
            return f"ask for a remedy of {node}: {' '.join(f'{key}={value}' for key, value in values)}"
        case actions.Withdraw(node):
            return f"ask for no remedy of {node} any more"
        case actions.StartJob(name, node, _, goal, why):
            return f"start {name}, to {goal} {node}: {why}"
        case actions.CallHook(name, node, _, goal, why, hook):
            return f"call {hook.where} for {name}, to {goal} {node}: {why}"
        case actions.Place(name, place):
            switch, *block = (part.rpartition(":")[2] for part in place.split(","))
            return f"place {name} at {switch}{''.join(f', in block {name_},' for name_ in block)} in Slurm"
        case actions.CreatePod(name, node, pool):
            return f"create {name} of {pool.name}{f' on {node}' if node else ''}: template {pool.hash}"
        case actions.Adopt(pod, _, _, pool):
            return f"take {pod} over into {pool.name}, as it is"
        case actions.NotePool(name, _, status):
            return f"note of {name}: {status.ready} of {status.wanted} ready, {status.updated} updated"
        case actions.Notice(about, _, text):
            return f"{about}: {text}"
