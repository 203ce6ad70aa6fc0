"""What was found of a machine that looks dead, asked for just now and in several ways."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Proof:
    # Seconds since its kubelet renewed its lease, as we have seen it; None: not known.
    lease_age: float | None
    # Whether its kubelet's port answers; None: it has no address.
    kubelet: bool | None
    # Those of its pods that answer.
    pods: tuple[str, ...]
    # Whether a machine that is well was reached in the same way: else the network may be cut on our side.
    witness: bool
