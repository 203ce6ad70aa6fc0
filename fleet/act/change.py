"""Each change of what Kubernetes keeps, to whoever makes changes of its kind."""

from __future__ import annotations

from fleet.act import fencing, machines
from fleet.act.kubernetes import Api, ToKubernetes
from fleet.act.pools import pods
from fleet.decide.actions import (
    Adopt,
    Annotate,
    CallHook,
    CreatePod,
    Delete,
    Fence,
    Make,
    NotePool,
    Record,
    StartJob,
    Unfence,
    Withdraw,
)

Kept = (
    ToKubernetes
    | Make
    | Record
    | Annotate
    | Withdraw
    | StartJob
    | CallHook
    | Fence
    | Unfence
    | Delete
    | CreatePod
    | Adopt
    | NotePool
)


async def made(api: Api, change: Kept) -> bool:
    """False: it is no longer the object that was seen, and nothing is done."""
    if isinstance(change, Fence | Unfence | Delete):
        return await fencing.change(api, change)
    if isinstance(change, Make | Record | Annotate | Withdraw | StartJob | CallHook):
        return await machines.change(api, change)
    if isinstance(change, CreatePod | Adopt | NotePool):
        return await pods.change(api, change)
    return await api.change(change)
