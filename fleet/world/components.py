"""The components of a release: the label `app.kubernetes.io/component` of its pods, and what the fleet knows of each.

A component is a role of images/roles/; tests/unit/test_roles.py compares this table with the chart's and the images'.
"""

from __future__ import annotations

from dataclasses import dataclass

CONTROLLER, WORKER = "controller", "worker"


@dataclass(frozen=True, slots=True)
class Component:
    """One component."""

    name: str
    # The port of its daemon: an answer there shows that the pod's machine is alive.
    port: int
    # Its pods write conditions on their page `/conditions`.
    has_page: bool
    # A StatefulSet makes its pods: one comes back under its name, and only once the old pod is gone. Other pods have a
    # successor already, and the fleet has no right to delete them.
    returns: bool


COMPONENTS = {
    component.name: component
    for component in (
        Component(CONTROLLER, 6817, has_page=True, returns=True),
        Component("login", 22, has_page=True, returns=True),
        Component(WORKER, 6818, has_page=True, returns=True),
        Component("demo", 389, has_page=False, returns=True),
        Component("fleet", 8650, has_page=False, returns=False),
    )
}
WITH_PAGE = frozenset(name for name, component in COMPONENTS.items() if component.has_page)
RETURNING = frozenset(name for name, component in COMPONENTS.items() if component.returns)
