"""The pages' own commands, as written and in order: a page that lies fails."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from cluster.values import local_values, merge
from tests.cluster.conftest import IMAGES, NAME
from tests.cluster.researcher import World
from tests.pages import Block, blocks
from tests.reader import ROOT, checkout, follow, follow_all, programs
from tests.slurm import version_of

pytestmark = [pytest.mark.docker, pytest.mark.cluster]

DOCS = ROOT / "docs"
HOW_TO = DOCS / "how-to"


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Mapping[str, str]]:
    """Build the environment of a reader who follows a page: a cluster of its own name, the images of this run."""
    values = tmp_path / "values.yaml"
    values.write_text(yaml.safe_dump({"image": {"repository": IMAGES}}))
    # `make up` makes images first: those of this run, and not another's.
    own = {"MINIVM_NAME": f"{NAME}-reader", "MINIVM_VALUES": str(values), "MINIVM_BUILD_PREFIX": IMAGES}
    env = os.environ | own
    # He has not called make with what this run was called with: ARGS would reach the page's own `make up`.
    for name in ("MAKEFLAGS", "MAKEOVERRIDES", "MFLAGS", "MAKELEVEL", "ARGS"):
        env.pop(name, None)
    env["PATH"] = f"{programs(tmp_path / 'bin')}:{env['PATH']}"
    yield env
    subprocess.run([".venv/bin/python", "build.py", "down"], cwd=ROOT, env=env, check=False, timeout=240)


def test_the_tutorial_can_be_followed(reader: Mapping[str, str]) -> None:
    everything = "\n".join(follow_all(blocks(DOCS / "tutorial.md"), reader, ROOT).values())
    assert "slurm-worker-1: ready after" in everything
    assert "COMPLETED" in everything and everything.count("slurm-worker-0\n") >= 2, "srun's answers and the job's file"
    assert not list((ROOT / "build" / "cluster").glob(f"{NAME}-reader")), "nothing is left"


# Page -> what is said in following it.
SAYS = {
    "operate-a-pod": ("",),
    "add-a-user": ("Adding User(s)",),
    "first-hour-for-researchers": ("part 3", "/home/alice/env", "CPU Efficiency"),
    "drain": ("look at fan 3",),
    "replace-a-gpu-node": ("Reservation created: look", "unknown"),
    "contain-jobs-and-people": ("cgroup", "ssh needs a job here", "a person has 2000 processes"),
    "install-on-kubernetes": ("slurmctld",),
    "change-slurm-conf": ("partition long: comes", "no job ends", "changed files published", "slurm-login-0"),
    "upgrade": ("stage ready", "nothing to change"),
}


def of_this_release(block: Block) -> Block:
    """Replace the page's default Slurm version by this run's: Slurm cannot go back to an older one."""
    here = f"--slurm-version {version_of(f'{IMAGES}/worker:latest')}"
    return replace(block, text=re.sub(r"--slurm-version [0-9.]+", here, block.text))


@pytest.mark.parametrize("page", SAYS)
def test_an_operators_page_can_be_followed(
    healthy: World, reader: Mapping[str, str], tmp_path: Path, page: str
) -> None:
    before = healthy.cluster.options
    directory = checkout(tmp_path / "checkout")
    env = dict(reader) | {"MINIVM_NAME": before.name}
    found = [of_this_release(block) for block in blocks(HOW_TO / f"{page}.md")]
    # Whose cluster it is has said more in his values than the page shows.
    theirs = merge(local_values(before, healthy.cluster.keys()), {"image": {"repository": IMAGES}})
    for file in (Path(env["MINIVM_VALUES"]), directory / "values.yaml"):
        file.write_text(yaml.safe_dump(theirs))
    for block in found:
        if block.file:
            (directory / block.file).write_text(yaml.safe_dump(merge(theirs, yaml.safe_load(block.text))))
    (directory / "sssd.conf").write_text("[sssd]\n")
    try:
        said = "\n".join(follow_all(found, env, directory).values())
        for words in SAYS[page]:
            assert words in said, said
        assert "pools.json" not in said, "it is none of Slurm's files"
    finally:
        healthy.reload()
        if healthy.cluster.options != before:
            healthy.cluster.options = before
            healthy.cluster.up(timeout=240)
            healthy.manifests = healthy.cluster.manifests()


def test_keys_and_the_authentication_change_as_the_pages_say(reader: Mapping[str, str], tmp_path: Path) -> None:
    """Follow the pages on a cluster by munge with a running and a queued job; neither is lost."""
    directory = checkout(tmp_path / "checkout")
    (directory / "my-values.yaml").write_text(Path(reader["MINIVM_VALUES"]).read_text())

    def type_in(text: str, user: str = "") -> str:
        return follow(Block("typed here", 0, text, user=user), reader, directory)

    def start_jobs() -> None:
        """Start a job on both workers, and queue one behind it."""
        script = "until test -e go; do sleep 1; done; srun true"
        type_in(
            f"rm -f go\nsbatch --parsable -N2 --mem=50 -o /dev/null --wrap '{script}' > runs\n"
            "sbatch --parsable -N2 --mem=50 -o /dev/null -d afterok:$(cat runs) --wrap 'srun true' > waits\n"
            "until squeue -h -j $(cat runs) -t R -o %i | grep .; do sleep 1; done",
            "alice",
        )

    def end_jobs() -> None:
        """Check that neither job was lost or requeued, and let the first one's last step find both nodes."""
        type_in(
            "squeue -h -j $(cat runs) -t R -o %i | grep .\nsqueue -h -j $(cat waits) -t PD -o %i | grep .\ntouch go\n"
            "until sacct -nXP -j $(cat waits) -o state | grep COMPLETED; do sleep 1; done\n"
            "sacct -nXP -j $(cat runs) -o state | grep COMPLETED\n"
            "test $(scontrol -o show job $(cat runs) | grep -o 'Restarts=[0-9]*') = Restarts=0",
            "alice",
        )

    def keys() -> dict[str, bytes]:
        path = ROOT / "build/cluster" / reader["MINIVM_NAME"] / "keys"
        return {file.name: file.read_bytes() for file in path.glob("*key")}

    type_in(".venv/bin/python build.py up --workers 2 --auth munge")
    start_jobs()
    before = keys()
    follow_all(blocks(HOW_TO / "rotate-keys.md"), reader, directory)
    after = keys()
    assert {name for name in before if before[name] != after[name]} == {
        "ssh_host_ed25519_key", "worker_host_ed25519_key", "munge.key", "jwt_hs256.key",
    }  # fmt: skip
    end_jobs()

    type_in("sbatch --parsable --hold -o /dev/null --wrap true > held", "alice")
    change, *rotate = blocks(HOW_TO / "change-authentication.md")
    assert "slurm-controller-0: gone" in follow(change, reader, directory)
    type_in("squeue -h -j $(cat held) -t PD -o %i | grep .\nscontrol release $(cat held)", "alice")
    type_in("until sacct -nXP -j $(cat held) -o state | grep COMPLETED; do sleep 1; done", "alice")
    start_jobs()
    follow_all(rotate, reader, directory)
    mounted = type_in("kubectl exec slurm-worker-1 -- cat /etc/slurm/slurm.jwks")
    assert mounted.strip() == (directory / "3.jwks").read_text().strip() and '"old"' not in mounted
    end_jobs()
    assert "slurm-worker-0\n" in type_in("srun -Q -N2 hostname", "alice")
