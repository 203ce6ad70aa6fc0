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
    user: Researcher, target: str, idle: int, busy: int = 0, *, seconds: int = 900, within: str = ""
) -> Iterator[int]:
    """Hold connections open from the login pod, or from a job that the words `within` start.

    `seconds` bounds a flood whose test was killed.
    """
    line = user.command(f"{within} python3 - {target} {idle} {busy} {seconds}")
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as attack:
        try:
            assert attack.stdin and attack.stdout
            attack.stdin.write(FLOOD)
            attack.stdin.close()
            words = attack.stdout.readline().split()
            assert words[:1] == ["open"], words
            yield int(words[1])
        finally:
            attack.terminate()
            user.try_("pkill", "-u", user.user, "python3")
            if within:
                # A srun whose connection has gone keeps its job, which would last for as long as the flood.
                user.world.slurm("scancel", f"--user={user.user}")
