"""Times of elastic pools in tests on a real API server."""

from __future__ import annotations

from tests.kubernetes.apiserver import Object

NOW: Object = {"gracePeriodSeconds": 0, "kind": "DeleteOptions", "apiVersion": "v1"}
