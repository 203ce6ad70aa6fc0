"""Parsing of guest pods, to which machines may be lent: what they request, and where they may run."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fleet import FleetError
from fleet.act.api_client import ApiClient
from fleet.act.watch_cache import WatchCache
from fleet.world.fields import Fields
from fleet.world.guests import amount, parse_guest, requests
from fleet.world.kubernetes import KubernetesView
from fleet.world.slurm import parse_slurm


@pytest.mark.parametrize(
    ("said", "thousandths"),
    [
        ("8", 8000), ("1500m", 1500), ("0.5", 500), ("2k", 2_000_000), ("1Ki", 1_024_000), ("1.5Gi", 1_610_612_736_000),
        ("1e3", 1_000_000), ("1n", 1), ("0", 0), ("3Ei", 3 * 2**60 * 1000),
    ],
)  # fmt: skip
def test_a_quantity_is_as_kubernetes_counts(said: str, thousandths: int) -> None:
    assert amount(said, "cpu") == thousandths


@pytest.mark.parametrize("said", ["", "-1", "1x", "9" * 40, "1e999999", 5, None, " 1", "0x10", "1\n"])
def test_what_is_no_quantity_is_refused(said: object) -> None:
    with pytest.raises(FleetError, match="no quantity"):
        amount(said, "cpu")


NO = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}


def waiting(spec: dict[str, Any]) -> dict[str, Any]:
    return {"metadata": {"name": "a", "namespace": "llm"}, "spec": spec, "status": {"conditions": [NO]}}


def of(**kinds: Any) -> dict[str, Any]:
    return {"resources": {"requests": kinds}}


def test_a_pod_asks_for_what_its_containers_ask_for() -> None:
    spec = {
        "containers": [of(cpu="1"), of(cpu="500m", gpu="2"), {}],
        "initContainers": [of(cpu="4"), {**of(cpu="1"), "restartPolicy": "Always"}],
        "overhead": {"cpu": "100m"},
    }
    assert requests(Fields(spec)) == {"cpu": 4000, "gpu": 2000}
    limited = {"resources": {"limits": {"gpu": "8", "cpu": "4"}, "requests": {"cpu": "1"}}}
    assert requests(Fields({"containers": [limited]})) == {"gpu": 8000, "cpu": 1000}, "as the API server fills it in"


AFFINITY = {
    "nodeAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": {
            "nodeSelectorTerms": [
                {"matchExpressions": [{"key": "gpu", "operator": "In", "values": ["h200"]}]},
                {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n7"]}]},
            ]
        }
    }
}


@pytest.mark.parametrize(
    ("spec", "labels", "taints", "fits"),
    [
        ({}, {}, [], True),
        ({"nodeSelector": {"a": "b"}}, {"a": "b"}, [], True),
        ({"nodeSelector": {"a": "b"}}, {}, [], False),
        ({"affinity": AFFINITY}, {"gpu": "h200"}, [], True),
        ({"affinity": AFFINITY}, {"gpu": "a100"}, [], False),
        ({"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {
            "nodeSelectorTerms": [{"matchExpressions": [{"key": "n", "operator": "Gt", "values": ["1"]}]}]}}}},
         {"n": "2"}, [], False),
        ({}, {}, [("gpu", "yes", "NoSchedule")], False),
        ({}, {}, [("gpu", "yes", "PreferNoSchedule")], True),
        ({"tolerations": [{"key": "gpu", "operator": "Exists"}]}, {}, [("gpu", "yes", "NoSchedule")], True),
        ({"tolerations": [{"operator": "Exists"}]}, {}, [("gpu", "yes", "NoExecute")], True),
        ({"tolerations": [{"key": "gpu", "value": "no"}]}, {}, [("gpu", "yes", "NoSchedule")], False),
        ({"tolerations": [{"key": "gpu", "value": "yes", "effect": "NoExecute"}]}, {},
         [("gpu", "yes", "NoSchedule")], False),
    ],
)  # fmt: skip
def test_which_machines_suit(
    spec: dict[str, Any], labels: dict[str, str], taints: list[tuple[str, str, str]], fits: bool
) -> None:
    one = parse_guest(waiting(spec))
    assert one.suits("n0", labels, taints) is fits


def test_who_is_placed_going_or_over_waits_for_nothing() -> None:
    no, named = NO, {"name": "a", "namespace": "llm"}
    item = {"metadata": named, "status": {"conditions": [no]}}
    assert parse_guest(item).waits
    assert not parse_guest({**item, "spec": {"nodeName": "n0"}}).waits
    assert not parse_guest({**item, "status": {"conditions": [{**no, "reason": "SchedulingGated"}]}}).waits
    assert not parse_guest({**item, "metadata": {**named, "deletionTimestamp": "2026-11-22T00:00:00Z"}}).waits
    over = parse_guest({**item, "spec": {"nodeName": "n0"}, "status": {"phase": "Succeeded"}})
    assert (over.node, over.waits) == ("", False)


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ([], set()),
        ([{"node_list": "w-[0-1]", "flags": ["SPEC_NODES"]}, {"node_list": "w-7"}], {"w-0", "w-1", "w-7"}),
        ([{"node_list": "w-[0-1]", "flags": ["MAINT", "SPEC_NODES"]}], set()),
        ([{"node_list": "w-0"}, {"node_list": 7}], None),
        ([{"node_list": "w-0", "flags": "MAINT"}], None),
        ([7], None),
        (None, None),
    ],
)
def test_which_nodes_reservations_promise(said: list[object] | None, named: set[str] | None) -> None:
    found = parse_slurm([], [], said)
    assert found.reserved == named
    assert bool(found.doubts) == (said is not None and named is None), "that one cannot be read is no silence"


def test_which_reservation_or_job_cannot_be_read_is_known_and_why() -> None:
    later: dict[str, object] = {"name": "later", "node_list": "w-[0-9999999]", "flags": []}
    job: dict[str, object] = {"job_id": 7, "name": "hostile", "job_state": ["RUNNING"], "nodes": 5}
    found = parse_slurm([], [{**job, "nodes": "w-1"}, {**job, "job_id": 8}], [{**later, "node_list": "w-0"}, later])
    assert found.doubts == {
        "job 8": "cannot read job.nodes: wanted text, not int",
        "reservation later": "cannot read reservation.node_list: it names more nodes than can be told apart",
    }
    assert (found.jobs, found.claims, found.reserved) == (None, None, None)
    many = parse_slurm(
        [], [{**job, "job_id": number} for number in range(10_000)], [{**later, "name": "x" * 10_000}, 7]
    )
    assert len(many.doubts) == 2 and max(map(len, many.doubts)) < 100, "one of each says enough"


def terms(*each: dict[str, Any]) -> dict[str, Any]:
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": list(each)}}
    return {"affinity": {"nodeAffinity": required}}


MANY = [str(number) for number in range(5000)]
HEAVY: dict[str, dict[str, Any]] = {
    "terms": terms(*({"matchExpressions": [{"key": "n", "operator": "In", "values": [one]}]} for one in MANY)),
    "empty terms": terms(*({} for _ in MANY)),
    "wishes": terms({"matchExpressions": [{"key": one, "operator": "Exists"} for one in MANY]}),
    "values": terms({"matchExpressions": [{"key": "n", "operator": "NotIn", "values": MANY}]}),
    "names": terms({"matchFields": [{"key": "metadata.name", "operator": "In", "values": MANY}]}),
    "tolerations": {"tolerations": [{"key": one} for one in MANY]},
    "labels": {"nodeSelector": dict.fromkeys(MANY, "")},
    "resources": {"containers": [of(**dict.fromkeys(MANY, "1"))]},
}


@pytest.mark.parametrize("what", HEAVY)
def test_a_pod_whose_wishes_are_a_day_s_work_is_refused_and_seen_where_it_is_placed(what: str) -> None:
    with pytest.raises(FleetError, match="more than 256 is lent nothing"):
        parse_guest(waiting(HEAVY[what]))
    placed = parse_guest({**waiting({**HEAVY[what], "nodeName": "n0"}), "status": {}})
    assert placed.node == "n0" and not (placed.terms or placed.tolerations or placed.selector)


def test_what_is_asked_for_in_no_amount_is_not_compared() -> None:
    assert parse_guest(waiting({"containers": [of(**dict.fromkeys(MANY, "0"), gpu="1")]})).weight == 5


def test_of_thousands_that_cannot_be_read_one_is_told() -> None:
    cache = WatchCache(cast(ApiClient, SimpleNamespace(mark="lab.slurm")), guests=("llm",))
    for kind in cache.kinds():
        kind.heard = time.monotonic()
    for number in range(3000):
        item = waiting(HEAVY["labels"])
        cache.guests[0].now.take({**item, "metadata": {**item["metadata"], "name": f"a{number:04}"}})
    here = cache.world()
    assert isinstance(here, KubernetesView)
    (said,) = here.unread.values()
    assert said.startswith("a0000: ") and "5004 together" in said and said.endswith("(it is not the only one)")


def test_of_a_pod_that_cannot_be_read_its_node_is_known_and_of_namespaces_those_that_answer() -> None:
    cache = WatchCache(cast(ApiClient, SimpleNamespace(mark="lab.slurm")), guests=("llm", "lab"))
    for kind in cache.kinds():
        kind.heard = time.monotonic()
    bad = {"metadata": {"name": "w0", "uid": "u"}, "spec": {"nodeName": "n0"}, "status": {"conditions": 7}}
    cache.pods.now.take(bad)
    cache.guests[0].heard, cache.guests[0].why = 0.0, "403 Forbidden"
    cache.guests[1].now.take({**waiting({}), "metadata": {"name": "b", "namespace": "lab"}})
    here = cache.world()
    assert isinstance(here, KubernetesView)
    assert (here.can_read_pods_on("n0"), here.can_read_pods_on("n1")) == (False, True)
    assert here.guests is not None and [one.name for one in here.guests] == ["lab/b"]
    assert len(here.unknown_namespaces) == 1 and "403 Forbidden" in here.unread.values()
    cache.pods.now.take({**bad, "spec": {}})
    there = cache.world()
    assert isinstance(there, KubernetesView) and there.can_read_pods_on("n0"), "it is on none yet"
    cache.pods.now.take({**bad, "spec": {"nodeName": 7}})
    there = cache.world()
    assert isinstance(there, KubernetesView) and not there.can_read_pods_on("n1"), "it may be on any"
    cache.pods.now.drop("w0")
    cache.guests[1].heard = 0.0
    there = cache.world()
    assert isinstance(there, KubernetesView) and there.can_read_pods_on("n0") and there.guests is None
