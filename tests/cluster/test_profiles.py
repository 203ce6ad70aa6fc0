"""Each profile of slurm.conf on a running cluster: taken by a real slurmctld, live, and jobs run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import yaml

from cluster.render import CHART
from cluster.values import merge
from tests.cluster.researcher import Researcher, World
from tests.waiting import until

pytestmark = [pytest.mark.docker, pytest.mark.cluster]

PROFILES: dict[str, dict[str, str]] = yaml.safe_load((CHART / "files/profiles.yaml").read_text())


@pytest.fixture(scope="module")
def become(world: World) -> Iterator[Callable[[str], None]]:
    """Another profile, as an operator's `up` brings it; the first one in the end."""
    before = world.cluster.options

    def up(overrides: dict[str, Any]) -> None:
        world.cluster.options = replace(before, overrides=merge(before.overrides, overrides))
        world.cluster.up(timeout=240)
        world.manifests = world.cluster.manifests()

    yield lambda name: up({"slurm": {"profile": name}})
    up({})


def live(world: World, keys: dict[str, str]) -> dict[str, str]:
    """Return slurmctld's settings for these keys; of a number with its unit only the number."""
    lines = (line.partition("=") for line in world.slurm("scontrol", "show", "config").splitlines())
    said = {key.strip(): value.strip() for key, _, value in lines}
    return {key: said[key].partition(" ")[0] for key in keys}


@pytest.mark.parametrize("name", [*PROFILES, "mixed"])
def test_a_profile_is_what_slurmctld_lives_by_and_jobs_run(
    healthy: World, alice: Researcher, become: Callable[[str], None], name: str
) -> None:
    become(name)
    wanted = PROFILES[name]
    until(lambda: live(healthy, wanted) == wanted, f"{name} is live", seen=lambda: live(healthy, wanted))
    # What the last profile had more than this one is gone.
    others = {key for profile in PROFILES.values() for key in profile if key not in wanted}
    defaults = {"CompleteWait": "0", "EpilogMsgTime": "2000", "MaxJobCount": "10000", "MaxArraySize": "1001"}
    assert live(healthy, dict.fromkeys(others, "")) == {key: defaults[key] for key in others}
    assert sorted(alice("srun -N2 hostname").split()) == ["slurm-worker-0", "slurm-worker-1"]
    healthy.wait_idle()


def test_an_array_larger_than_slurm_itself_would_take_is_taken_and_outlives_the_profile(
    healthy: World, alice: Researcher, become: Callable[[str], None]
) -> None:
    become("short")
    until(lambda: live(healthy, PROFILES["short"]) == PROFILES["short"], "short is live")
    submit = "sbatch --parsable -H -J large --mem=1M -o /dev/null --array=19998-20000 --wrap true"
    job = alice(f"cd /tmp && {submit}").strip()
    try:
        become("mixed")
        until(lambda: live(healthy, PROFILES["mixed"]) == PROFILES["mixed"], "mixed is live")
        assert alice(f"squeue -h -o %K -j {job}").strip() == "19998-20000"
        alice(f"scontrol release {job}")
        until(lambda: not alice(f"squeue -h -j {job}").strip(), "its tasks have run")
    finally:
        alice(f"scancel {job}")

    def accounted() -> list[str]:
        return alice(f"sacct -nXP -j {job} -o state").split()

    until(lambda: accounted() == ["COMPLETED"] * 3, "all are accounted", seen=accounted)
    healthy.wait_idle()
