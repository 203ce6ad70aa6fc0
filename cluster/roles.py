"""The roles of a cluster's pods on one machine, and their properties for `up`.

To add a role:

1. images/roles/NAME.yaml names its layer and its services; a service that is new is a file in init/services/.
2. A row of `TABLE` here.
3. A row of `COMPONENTS` in fleet/world/kubernetes.py.
4. A row of `minivm.roles` in cluster/chart/templates/_helpers.tpl, and a template there with its pod.

tests/unit/test_roles.py compares all four.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PodRole:
    """One role. Its image has its name."""

    name: str
    # Larger images, built only on request, that may replace the role's image.
    more_images: tuple[str, ...] = ()
    # Its Slurm may be older than the controller's, never newer.
    is_client: bool = False
    # Its Slurm must not be older than that of the roles after it: `up` replaces its pods first.
    is_server: bool = False
    # Only some clusters have its pods: `up` starts the others without its image.
    is_optional: bool = False
    # Hierarchies of cgroup v1 in which Slurm creates directories for jobs, and the login pod for users.
    hierarchies: tuple[str, ...] = ()


# In the order of starts and replacements: slurmdbd, slurmctld, then slurmd and the clients. Each understands older
# peers, not newer ones.
TABLE = (
    PodRole("accounting", is_server=True, is_optional=True),
    PodRole("controller", is_server=True),
    PodRole("demo"),
    PodRole(
        "worker",
        more_images=("worker-containers", "worker-pyxis"),
        is_client=True,
        hierarchies=("freezer", "cpuset", "memory", "devices", "cpuacct"),
    ),
    PodRole("login", more_images=("login-pyxis",), is_client=True, hierarchies=("cpu", "memory", "pids")),
)
ROLES = tuple(role.name for role in TABLE)
MORE_IMAGES = tuple(image for role in TABLE for image in role.more_images)
CLIENTS = frozenset(role.name for role in TABLE if role.is_client)
OPTIONAL = frozenset(role.name for role in TABLE if role.is_optional)
SERVERS = frozenset(role.name for role in TABLE if role.is_server)
HIERARCHIES = {role.name: role.hierarchies for role in TABLE}
