"""One worker's drain in Slurm, by its causes in Kubernetes. Never over a drain of others, and never one of theirs away.

Of a drain of ours that somebody lifts while its cause stays it is believed that he did not know: it is set once more,
and then he has said it twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from fleet import reasons
from fleet.decide.actions import Drain, Forget, Notice, Undrain, Versions
from fleet.decide.causes import causes as of
from fleet.policy import Policy
from fleet.world.slurm import SlurmNode
from fleet.world.snapshot import Worker

MOST_TIMES = 2
Held = Drain | Undrain | Forget | Notice | None


# What somebody says of this one machine: no budget counts it.
SAID = frozenset({"cordon", "maintenance", "going", "leave"})


def hurried(
    workers: Iterable[Worker], marks: Mapping[str, reasons.Mark], now: float, policy: Policy
) -> Iterator[Drain]:
    """The drains that need not wait until Slurm has told of all its nodes once more; whether each is still as it was is
    asked when it is drained. Whatever else follows from the same causes follows later."""
    for worker in workers:
        if worker.node is None or worker.slurm is None or worker.slurm.drained or worker.slurm.down:
            continue
        found = of(worker, policy, now)
        if found and found.keys() <= SAID:
            one = hold(worker, found, worker.slurm.mark or marks.get(worker.name))
            if isinstance(one, Drain):
                yield one


def hold(worker: Worker, causes: Mapping[str, str], mark: reasons.Mark | None) -> Held:
    """`mark`: Slurm's, or what is remembered where the node's comment is somebody else's."""
    if worker.slurm is None:
        return None
    return held_for(worker.slurm, causes, mark) if causes else released(worker, worker.slurm)


def held_for(node: SlurmNode, causes: Mapping[str, str], mark: reasons.Mark | None) -> Held:
    if node.ours:
        if node.down:
            # As long as it is down by us its reason says so: whoever lifts it knows by that whose it is.
            before = reasons.kinds(node.reason) & reasons.DOWN
            causes = {**dict.fromkeys(before, "and its jobs run elsewhere"), **causes}
        kinds, down = frozenset(causes), not node.down and ends(node, causes)
        # Other words for the same causes are not worth another author and time; nor is it that it is down no more.
        if reasons.kinds(node.reason) - reasons.DOWN == kinds - reasons.DOWN and not down:
            return None
        return drain(node, causes, mark.times if mark else 1, kinds, down=down)
    kinds = frozenset(causes)
    wanted = reasons.reason(causes)
    if node.drained or node.down:
        state = "drained" if node.drained else "down"
        return Notice(
            node.name, "held", f"{state} by others ({node.reason or 'no reason'}) and stays so; also: {wanted}"
        )
    if mark is None or not kinds <= mark.kinds:
        return drain(node, causes, 1, kinds)
    if mark.times >= MOST_TIMES:
        return Notice(node.name, "lifted", f"resumed by a person {mark.times} times: takes jobs in spite of {wanted}")
    return drain(node, causes, mark.times + 1, mark.kinds)


def ends(node: SlurmNode, causes: Mapping[str, str]) -> bool:
    """Whether it is to be set down. Where a slurmd lives it registers again at once, and the node is down no more: its
    jobs are over by then, and to do it twice would end nothing."""
    return bool(causes.keys() & reasons.DOWN - {"deadline"}) or ("deadline" in causes and node.runs)


def drain(
    node: SlurmNode, causes: Mapping[str, str], times: int, kinds: frozenset[str], *, down: bool = False
) -> Drain:
    mark, place = reasons.Mark(times, kinds), reasons.free(node.comment)
    return Drain(node.name, reasons.reason(causes, times), reasons.comment(mark) if place else None, node.seen, down)


def released(worker: Worker, node: SlurmNode) -> Held:
    pod, machine = worker.pod, worker.node
    if node.ours and machine is not None:
        # A pod is ready when Slurm has heard its slurmd at its address: what stands there is not of the pod before. A
        # younger one cannot get ready while the node is down; a resumed node gets no job before its slurmd answers.
        back = pod.ready or 0 < node.since < pod.created
        if not (back if node.downed else pod.ready and node.record.responds and not node.down):
            return Notice(node.name, "waits", f"is undrained once its pod is ready: {node.reason}")
        if pod.free:
            return None  # others may evict it: that it is protected again comes first
        at = Versions(pod.name, machine.name, pod.version, machine.version)
        return Undrain(node.name, "" if reasons.free(node.comment) else None, node.seen, at, node.downed)
    # Somebody else has lifted it, or has drained it for reasons of his own: the mark alone is ours.
    return Forget(node.name, node.seen) if reasons.marked(node.comment) else None
