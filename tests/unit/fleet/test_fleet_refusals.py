"""Refusals of the API server, in words."""

from __future__ import annotations

from fleet.act.api_client import refusal


def test_a_kind_that_kubernetes_does_not_know_is_named_with_the_command_that_brings_it() -> None:
    error = refusal("list Machines", 404, "404 page not found\n")
    assert str(error) == (
        "cannot list Machines: Kubernetes does not know this kind: "
        "kubectl apply --server-side --force-conflicts -f cluster/chart/charts/crds/crds/ brings it"
    )
    assert error.status == 404
    missing = refusal("read worker-1", 404, '{"message": "pods \\"worker-1\\" not found"}')
    assert str(missing) == 'cannot read worker-1: 404 pods "worker-1" not found'
