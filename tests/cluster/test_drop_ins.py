"""An operator's own services on pods that run: a typo costs nobody anything, and what is right is taken live."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from cluster import ClusterError
from cluster.values import merge
from tests.cluster.researcher import World
from tests.waiting import until

pytestmark = [pytest.mark.docker, pytest.mark.cluster]


@pytest.fixture
def drop_in(healthy: World) -> Iterator[Callable[[str], None]]:
    """`up` with a file of this text for the login role; in the end without."""
    before = healthy.cluster.options

    def become(text: str) -> None:
        values = {"dropIns": {"login": {"services": {"extra.yaml": text}}}}
        healthy.cluster.options = replace(before, overrides=merge(before.overrides, values))
        healthy.cluster.up(timeout=240)

    yield become
    healthy.cluster.options = before
    healthy.cluster.up(timeout=240)


def test_the_first_drop_in_is_asked_about_and_taken_live(healthy: World, drop_in: Callable[[str], None]) -> None:
    """A typo rolled people's login pod into a crash loop, and said `exited 78`."""
    pod = healthy.running("slurm-login-0").container
    with pytest.raises(ClusterError, match="unknown key neds"):
        drop_in("command: [/bin/sleep, '1000']\nneds: [munged]\n")
    with pytest.raises(ClusterError, match=r"cannot take the drop-ins of login: .*did you mean munged\?"):
        drop_in("command: [/bin/sleep, '1000']\nneeds: [mungd]\n")  # the chart cannot know: the image does
    healthy.wait_ready("slurm-login-0")
    assert healthy.running("slurm-login-0").container == pod
    drop_in("command: [/bin/sleep, '1000']\nneeds: [munged]\n")

    def extra() -> str:
        return healthy.cluster.exec("slurm-login-0", ["minivm", "why", "extra"])[1]

    until(lambda: extra() == "extra is ready\n", "it is taken", seen=extra)
    assert healthy.running("slurm-login-0").container == pod, "the pod that people are in is the same"
