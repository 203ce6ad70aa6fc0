"""Ended pods, evicted by the kubelet or on a machine that was shut down: nothing restarts them, so they are replaced.

If the next pod ends too, it is replaced after ever longer. The count is in the pool's status before the pod goes: if
the fleet is killed between the two, the next leader counts it once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from fleet import crd_pools
from fleet.decide.actions import Evict, Notice
from fleet.reasons import plain
from fleet.world.kubernetes import Pod
from fleet.world.slurm import Slurm
from fleet.world.snapshot import Worker
from fleet.world.worker_pool import EndedPod

FIRST_S, LONGEST_S = 30.0, 3600.0
# After so long without an end the count starts anew.
WELL_S = 600.0


def pause(times: int) -> float:
    """Seconds from a pod's end to its replacement, by how often that name has ended."""
    return 0.0 if times < 2 else min(LONGEST_S, FIRST_S * 2.0 ** min(times - 2, 10))


def counted(
    before: Iterable[EndedPod], wanted: Callable[[str], bool], pods: Mapping[str, Pod], now: float
) -> tuple[EndedPod, ...]:
    """Update the counts. `wanted`: whether a pod of that name should exist, or may when a job asks."""
    kept = {pod.name: pod for pod in before if wanted(pod.name) and not _is_past(pod, pods.get(pod.name), now)}

    def is_new(name: str, pod: Pod) -> bool:
        return bool(pod.ended) and wanted(name) and (kept[name].uid if name in kept else "") != pod.uid

    new = [pod for name, pod in pods.items() if is_new(name, pod)]
    # The number of counts is bounded: names whose pod is ready again make room.
    ready = sorted((entry.since, name) for name, entry in kept.items() if name in pods and pods[name].ready)
    for pod in sorted(new, key=lambda pod: pod.name):
        if pod.name not in kept and len(kept) >= crd_pools.ENDED:
            if not ready:
                break
            del kept[ready.pop(0)[1]]
        times = kept[pod.name].times if pod.name in kept else 0
        kept[pod.name] = EndedPod(pod.name, pod.uid, times + 1, int(now), plain(pod.ended))
    return tuple(kept[name] for name in sorted(kept))


def _is_past(entry: EndedPod, pod: Pod | None, now: float) -> bool:
    """Return whether the pod is well, or nobody has wanted one of its name, for long enough."""
    return (pod is None or pod.ready) and now - entry.since >= WELL_S + pause(entry.times)


def replace_ended(
    noted: Iterable[EndedPod], wanted: Callable[[str], bool], workers: Iterable[Worker], slurm: Slurm, now: float
) -> Iterator[Evict | Notice]:
    """Evict ended pods once their end is in the pool's status (`noted`) and their pause is over."""
    known = {entry.uid: entry for entry in noted}
    for worker in workers:
        pod = worker.pod
        if not pod.ended or (wanted(pod.name) and pod.uid not in known):
            continue
        times = known[pod.uid].times if wanted(pod.name) else 1
        why, due = plain(pod.ended), not wanted(pod.name) or now >= known[pod.uid].since + pause(times)
        if not _is_idle(worker, slurm):
            stays = "stays until Slurm does not hear its slurmd either, and has no job there"
            yield Notice(pod.name, "ended", f"has ended ({why}), and {stays}")
        elif due:
            node = worker.slurm
            yield Evict(pod.name, pod.uid, pod.version, why, node.precondition if node else None)
        else:
            yield Notice(pod.name, "ended", f"has ended {times} times ({why}): made anew after {pause(times):g} s")


def _is_idle(worker: Worker, slurm: Slurm) -> bool:
    """Return whether nothing runs there and nothing will, by Slurm's state: a pod can write its own phase."""
    node = worker.slurm
    if node is None:
        return worker.name not in slurm.unread
    # A node that does not respond for a moment may still have its jobs.
    quiet = node.drained or not node.record.responds
    return node.down or (quiet and not node.record.busy and slurm.holding(worker.name) == ())
