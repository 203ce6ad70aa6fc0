"""A flood of one user's connections, held open beside the work of other users."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.cluster.researcher import Researcher

FLOOD = (Path(__file__).resolve().parents[2] / "bench/flood.py").read_text()


@contextmanager
def flood(
    user: Researcher,
    target: str,
    idle: int,
    busy: int = 0,
    *,
    least: int = 100,
    seconds: int = 900,
    within: str = "",
    is_guarded: bool = False,
) -> Iterator[None]:
    """Hold `least` connections or more open from the login pod, or from a job that the words `within` start.

    `seconds` bounds a flood whose test was killed. A guard may end one before the flood has said that it is there.
    """
    line = user.command(f"{within} python3 - {target} {idle} {busy} {seconds} {least}")
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as attack:
        try:
            assert attack.stdin and attack.stdout
            attack.stdin.write(FLOOD)
            attack.stdin.close()
            words = attack.stdout.readline().split()
            if words or not is_guarded:
                assert words[:1] == ["open"] and int(words[1]) >= least, words
            yield
        finally:
            attack.terminate()
            user.try_("pkill", "-u", user.user, "python3")
            if within:
                # A srun whose connection has gone keeps its job, which would last for as long as the flood.
                user.world.slurm("scancel", f"--user={user.user}")
