"""Programs of this machine, run and heard."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.kubernetes.errors import LabError


def run(*command: str | Path, stdin: str = "", cwd: Path | None = None, env: Mapping[str, str] | None = None) -> str:
    """Run a command and return its output; raise its own error message on failure."""
    done = attempt(*command, stdin=stdin, cwd=cwd, env=env)
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip() or f"exit {done.returncode}"
        raise LabError(f"run {' '.join(str(word) for word in command)[:200]}", said[-2000:])
    return done.stdout


def attempt(
    *command: str | Path, stdin: str = "", cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command and return its result, even a failure."""
    words = [str(word) for word in command]
    return subprocess.run(words, input=stdin, capture_output=True, text=True, cwd=cwd, env=env)


def wait_for(look: Callable[[], bool], what: str, *, within: float, why: Callable[[], str] = str) -> None:
    begun = time.monotonic()
    while not look():
        if time.monotonic() - begun > within:
            raise LabError(f"wait for {what}", f"it has not come within {within:.0f} s; {why()}")
        time.sleep(0.1)


def write(path: Path, text: str) -> None:
    """Left alone where it says this already: kube-proxy ends when its file is so much as touched."""
    if path.exists() and path.read_text() == text:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_text(text)
    temporary.replace(path)
