"""Pods that have ended: their kubelet has evicted them, their machine was shut down, all in them is over. Nothing makes
such a pod run again: it goes, and its pool makes the next one. Where that ends too it goes after ever longer.

How often stands in the pool's status before the pod goes: killed between the two, the next fleet counts it once.
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
# One that has been well for so long begins anew.
WELL_S = 600.0


def pause(times: int) -> float:
    """From its end to when it goes, where it is the so manieth."""
    return 0.0 if times < 2 else min(LONGEST_S, FIRST_S * 2.0 ** min(times - 2, 10))


def counted(
    before: Iterable[EndedPod], wanted: Callable[[str], bool], pods: Mapping[str, Pod], now: float
) -> tuple[EndedPod, ...]:
    """`wanted`: whether one of that name is to be, or may be when a job asks."""
    kept = {one.name: one for one in before if wanted(one.name) and not _past(one, pods.get(one.name), now)}
    new = [pod for name, pod in pods.items() if pod.ended and wanted(name) and _uid(kept, name) != pod.uid]
    # So many are counted at a time, and so many made anew: who is ready again makes room for who is not.
    ready = sorted((one.since, name) for name, one in kept.items() if name in pods and pods[name].ready)
    for pod in sorted(new, key=lambda one: one.name):
        if pod.name not in kept and len(kept) >= crd_pools.ENDED:
            if not ready:
                break
            del kept[ready.pop(0)[1]]
        times = kept[pod.name].times if pod.name in kept else 0
        kept[pod.name] = EndedPod(pod.name, pod.uid, times + 1, int(now), plain(pod.ended))
    return tuple(kept[name] for name in sorted(kept))


def _uid(kept: Mapping[str, EndedPod], name: str) -> str:
    return kept[name].uid if name in kept else ""


def _past(one: EndedPod, pod: Pod | None, now: float) -> bool:
    """It is well, or nobody has asked for one of its name since."""
    return (pod is None or pod.ready) and now - one.since >= WELL_S + pause(one.times)


def ended(
    noted: Iterable[EndedPod], wanted: Callable[[str], bool], workers: Iterable[Worker], slurm: Slurm, now: float
) -> Iterator[Evict | Notice]:
    """`noted`: as it stands in the status."""
    known = {one.uid: one for one in noted}
    for worker in workers:
        pod = worker.pod
        if not pod.ended or (wanted(pod.name) and pod.uid not in known):
            continue
        times = known[pod.uid].times if wanted(pod.name) else 1
        said, due = plain(pod.ended), not wanted(pod.name) or now >= known[pod.uid].since + pause(times)
        if not over(worker, slurm):
            yield Notice(
                pod.name,
                "ended",
                f"has ended ({said}), and stays until Slurm does not hear its slurmd either, and has no job there",
            )
        elif due:
            node = worker.slurm
            yield Evict(pod.name, pod.uid, pod.version, said, node.seen if node else None)
        else:
            yield Notice(pod.name, "ended", f"has ended {times} times ({said}): made anew after {pause(times):g} s")


def over(worker: Worker, slurm: Slurm) -> bool:
    """What its phase says others may write. Slurm's word counts: nothing runs there, and nothing comes."""
    node = worker.slurm
    if node is None:
        return worker.name not in slurm.unread
    if node.down:
        return True
    # One that is not heard for a moment may have its jobs still.
    quiet = node.drained or not node.record.responds
    return quiet and not node.record.busy and slurm.holding(worker.name) == ()
