"""Topology of workers in the network fabric: labels of Nodes, and the places set in Slurm."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.act.slurm_client import body
from fleet.decide.actions import Drain, FleetMemory, Place
from fleet.decide.decide import MANY, decide
from fleet.decide.topology import MOST, OFTEN, ROOT, block, blocks, conf, find_due_place, part, place, switches, tree
from fleet.policy import Blocks, Policy, Topology, parse_policy_text
from fleet.report.events import describe_action
from fleet.world.kubernetes import KubeNode, KubePod, KubernetesView
from fleet.world.slurm import SlurmView, slurm_node
from fleet.world.snapshot import FleetSnapshot, Worker
from init.errors import ConfigError
from tests.fleet_world import Worlds

ROW, RACK = "example.com/row", "example.com/rack"
CLIQUE = "nvidia.com/gpu.clique"
TREE = Policy(topology=Topology((ROW, RACK)))
NOWHERE = "default:/:unknown/:unknown/unknown"


@pytest.mark.parametrize(
    ("labels", "tiers", "wanted"),
    [
        ({RACK: "r7"}, (RACK,), "default:/:r7"),
        ({ROW: "4", RACK: "7"}, (ROW, RACK), "default:/:4/:4/7"),
        ({ROW: "5", RACK: "7"}, (ROW, RACK), "default:/:5/:5/7"),
        ({ROW: "dc1", RACK: "dc1"}, (ROW, RACK), "default:/:dc1/:dc1/dc1"),
        ({}, (ROW, RACK), NOWHERE),
        ({RACK: "r7"}, (ROW, RACK), "default:/:unknown/:unknown/r7"),
        ({ROW: "4"}, (ROW, RACK), "default:/:4/:4/unknown"),
        ({ROW: "4", RACK: "7", "z": "n"}, (ROW, RACK, "z"), "default:/:4/:4/7/:4/7/n"),
    ],
)
def test_labels_are_a_path_from_the_root_to_the_leaf(
    labels: dict[str, str], tiers: tuple[str, ...], wanted: str
) -> None:
    assert place(labels, Topology(tiers)) == wanted


LABELS = st.dictionaries(st.sampled_from(("a", "b", "c", "d")), st.text(max_size=80) | st.sampled_from("xy"))
TIERS = st.lists(st.sampled_from(("a", "b", "c", "d")), min_size=1, unique=True)


@given(st.lists(st.tuples(LABELS, TIERS), max_size=8))
def test_a_switch_has_one_parent_and_is_a_leaf_always_or_never_whatever_labels_and_tiers_say(
    nodes: list[tuple[dict[str, str], list[str]]],
) -> None:
    """Each switch has one parent, and is always a leaf or never one, for any labels and tiers.

    This includes places of an earlier policy: slurmctld keeps places, and does not start when one contradicts another.
    """
    parents: dict[str, str] = {}
    leaves, inner = set(), {ROOT}
    for labels, tiers in nodes:
        path = switches(labels, tiers)
        assert place(labels, Topology(tuple(tiers))).split(":") == ["default", *path]
        assert len(path) == len(tiers) + 1
        assert all(parents.setdefault(name, above) == above for above, name in pairwise(path))
        leaves.add(path[-1])
        inner |= set(path[:-1])
    assert not leaves & inner
    for name in leaves | inner:
        assert not set(name) - set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-+/")
        assert len(name) <= MOST


@given(st.text(min_size=1), st.text(min_size=1))
def test_labels_that_differ_are_switches_that_differ(one: str, other: str) -> None:
    assert (part(one) == part(other)) is (one == other)


def test_a_dot_and_a_long_name_are_told_apart_from_what_they_look_like() -> None:
    assert len({switches({"a": said}, "a") for said in ("a.b", "a_b", "a" * 80, "a" * 81)}) == 4


def placed(worlds: Worlds) -> list[Place]:
    return [one for one in worlds.decide(worlds.world()).changes if isinstance(one, Place)]


def test_a_label_that_changes_moves_the_node_and_no_other() -> None:
    worlds = Worlds(policy=TREE)
    assert {one.place for one in placed(worlds)} == {NOWHERE}
    worlds.look()
    worlds.nodes["n1"].labels.update({ROW: "4", RACK: "r7"})
    (one,) = placed(worlds)
    assert (one.name, one.place, one.old_place) == ("w1", "default:/:4/:4/r7", NOWHERE)
    assert describe_action(one) == "place w1 at 4/r7 in Slurm"
    assert body(one) == {"topology_str": "default:/:4/:4/r7"}, "and nothing else of it is touched"
    worlds.look()
    assert not placed(worlds)


def test_a_pod_on_another_node_is_placed_where_that_one_is() -> None:
    worlds = Worlds(policy=TREE)
    worlds.nodes["n1"].labels.update({ROW: "4", RACK: "r7"})
    worlds.look()
    worlds.replace("w0", "n1")
    worlds.look()
    assert worlds.slurm["w0"].place == worlds.slurm["w1"].place == "default:/:4/:4/r7"


def test_unasked_no_place_is_told() -> None:
    worlds = Worlds()
    worlds.nodes["n1"].labels.update({ROW: "4", RACK: "r7"})
    assert not placed(worlds)


def test_a_slurm_that_tells_no_places_is_told_none() -> None:
    """Set no places in Slurm before 25.05, nor for a static node, whose place slurm.conf defines."""
    item = {"name": "w0", "state": ["IDLE", "DYNAMIC_NORM"]}
    older, newer = slurm_node(item), slurm_node({**item, "topology": ""})
    assert (older.topology, newer.topology) == (None, "")
    node, pod = KubeNode("n0", "uid"), KubePod("w0", "uid", node="n0")
    for known in (older, slurm_node({**item, "state": ["IDLE"], "topology": ""}), None):
        assert find_due_place(Worker("w0", pod, node, known), TREE.topology) is None
    assert find_due_place(Worker("w0", pod, None, newer), TREE.topology) is None
    assert find_due_place(Worker("w0", pod, node, newer), TREE.topology)
    world = FleetSnapshot(KubernetesView({"n0": node}, {"w0": pod}), SlurmView({"w0": older}))
    (told,) = [one for one in decide(world, FleetMemory(), 1.0, TREE).notices if one.kind == "topology"]
    assert (told.about, told.text) == ("fleet", "Slurm before 25.05 takes no places; see `fleet topology` for a file")


def test_a_machine_that_calls_itself_ever_anew_costs_slurm_few_switches() -> None:
    worlds = Worlds(policy=TREE)
    worlds.look()
    seen = set()
    for number in range(50):
        worlds.nodes["n0"].labels[RACK] = f"r{number}"
        worlds.look()
        worlds.now += 1
        seen.add(worlds.slurm["w0"].place)
    assert len(seen) <= OFTEN + 1
    told = {one.about: one.text for one in worlds.decide(worlds.world()).notices if one.kind == "topology"}
    assert told == {"w0": "changed its place too often; the fleet sets it again after an hour without changes"}
    worlds.now += 3700
    worlds.look()
    assert worlds.slurm["w0"].place.endswith("/r49")


def test_no_place_keeps_a_drain_from_its_turn() -> None:
    worlds = Worlds(policy=Policy(topology=TREE.topology, changes=1))
    worlds.cordon("n2")
    (one,) = [change for change in worlds.decide(worlds.world()).changes if not isinstance(change, MANY)]
    assert isinstance(one, Drain)


def test_a_domain_that_the_policy_names_is_a_block_and_what_it_does_not_name_is_told() -> None:
    """A domain named in the policy becomes a block, and one that is not named is reported.

    Setting a place does not create a block that is missing in Slurm's file.
    """
    blocks = Blocks(CLIQUE, frozenset(("d.1", "d2")), (2,))
    worlds = Worlds(policy=Policy(topology=Topology((ROW,), blocks)))
    worlds.nodes["n0"].labels.update({ROW: "4", CLIQUE: "d2"})
    worlds.nodes["n1"].labels.update({ROW: "4", CLIQUE: "d.1"})
    worlds.nodes["n2"].labels.update({ROW: "4", CLIQUE: "d9"})
    found = {one.name: one for one in placed(worlds)}
    assert found["w0"].place == "default:/:4,blocks:d2"
    assert describe_action(found["w0"]) == "place w0 at 4, in block d2, in Slurm"
    assert found["w1"].place == f"default:/:4,blocks:{part('d.1')}"
    assert found["w2"].place == "default:/:4,blocks:unknown"
    (told,) = [one for one in worlds.decide(worlds.world()).notices if one.kind == "topology"]
    assert told.text == "workers are in no block; add their domains to topology.blocks.domains: d9"
    worlds.look()
    assert not placed(worlds)
    worlds.policy = Policy(topology=Topology((ROW,)))
    assert {one.place.partition(",")[0] for one in placed(worlds)} == {one.place for one in placed(worlds)}
    worlds.look()
    assert worlds.slurm["w0"].place == "default:/:4", "and out of it again, before the file has it no more"


def test_with_blocks_alone_all_are_in_one_switch_that_no_other_policy_contradicts() -> None:
    """With blocks alone, all nodes are in one switch, which fits any other policy.

    slurmctld keeps places, and does not start when one contradicts another.
    """
    alone, row = Topology((), Blocks(CLIQUE, frozenset("a"), (1,))), Topology((ROW,))
    assert place({CLIQUE: "a"}, alone) == "default:/:unknown,blocks:a"
    assert place({}, row) == "default:/:unknown"
    assert not placed(Worlds(policy=Policy(topology=Topology((), Blocks("", frozenset("a"), (1,))))))


@given(st.lists(st.text(min_size=1, max_size=63), unique=True))
def test_blocks_of_domains_that_differ_differ_and_none_is_as_unknown(domains: list[str]) -> None:
    named = [one for one in domains if one != "unknown"]
    assert len({block(one) for one in named} | {"unknown"}) == len(named) + 1
    assert all(len(block(one)) <= MOST for one in named)


@pytest.mark.parametrize(
    "said",
    ['{"tier": ["a"]}', '{"tiers": ["a", "a"]}', '{"tiers": ["a", "b", "c", "d", "e", "f", "g"]}'],
)
def test_tiers_are_few_labels_and_each_once(said: str) -> None:
    with pytest.raises(ConfigError):
        parse_policy_text(f'{{"topology": {said}}}')
    assert parse_policy_text('{"topology": {"tiers": ["a", "b"]}}').topology.tiers == ("a", "b")


def test_a_file_says_the_same_of_the_same_world_whatever_its_order() -> None:
    paths = {"w2": ("/", "4/", "4/r1"), "w10": ("/", "4/", "4/r1"), "w1": ("/", "4/", "4/r2"), "x": ("/", "5/", "5/r1")}
    text = (
        "SwitchName=/ Switches=4/,5/\nSwitchName=4/ Switches=4/r1,4/r2\nSwitchName=5/ Switches=5/r1\n"
        "SwitchName=4/r1 Nodes=w10,w2\nSwitchName=4/r2 Nodes=w1\nSwitchName=5/r1 Nodes=x\n"
    )
    assert tree(paths) == text
    assert tree(dict(reversed(paths.items()))) == text


def test_a_file_has_each_worker_once_also_one_without_a_node() -> None:
    nodes = {"n0": KubeNode("n0", "u", labels={ROW: "4", RACK: "r.1"}), "n9": KubeNode("n9", "u", labels={ROW: "9"})}
    pods = {"w0": KubePod("w0", "u", node="n0"), "w1": KubePod("w1", "u"), "w2": KubePod("w2", "u", node="gone")}
    lines = conf(KubernetesView(nodes, pods), TREE.topology).splitlines()
    assert [line.partition("Nodes=")[2] for line in lines if "Nodes=" in line] == ["w0", "w1,w2"]
    assert "SwitchName=unknown/unknown Nodes=w1,w2" in lines
    assert not any("n9" in line or "9/" in line for line in lines), "a Node without a worker is none"


def test_a_domain_is_a_block_and_no_block_is_smaller_than_the_first_size() -> None:
    nodes = {f"n{number}": KubeNode(f"n{number}", "u", labels={CLIQUE: f"d.{number % 2}"}) for number in range(5)}
    pods = {f"w{number}": KubePod(f"w{number}", "u", node=f"n{number}") for number in range(5)}
    one, other = (part(f"d.{number}") for number in range(2))
    wanted = sorted((f"BlockName={one} Nodes=w0,w2,w4", f"BlockName={other} Nodes=w1,w3"))
    assert blocks(KubernetesView(nodes, pods), CLIQUE).splitlines() == [*wanted, "BlockSizes=2"]
    assert blocks(KubernetesView(nodes, pods), CLIQUE, (2, 4)).splitlines()[-1] == "BlockSizes=2,4"
    assert blocks(KubernetesView({}, pods), CLIQUE) == "BlockName=unknown Nodes=w0,w1,w2,w3,w4\nBlockSizes=5\n"


def test_what_slurmd_is_born_with_is_not_compared_with_its_record() -> None:
    """The place given to slurmd at its start is separate from its node record.

    If the two were compared, the record of each returning pod would be recreated.
    """
    text = (Path(__file__).resolve().parents[3] / "init/services/slurmd.yaml").read_text()
    assert "${MINIVM_SLURMD_CONF} ${MINIVM_NODE_PLACE:-} " in text
