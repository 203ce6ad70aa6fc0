"""Stand-ins for Slurm's commands in a pod."""

from __future__ import annotations

from pathlib import Path

import pytest

from init.slurm import client


def install(directory: Path, monkeypatch: pytest.MonkeyPatch, **scripts: str) -> None:
    """Let the client run these scripts in place of the commands that they are named after."""
    for name, script in scripts.items():
        program = directory / name
        program.write_text(script)
        program.chmod(0o755)
        monkeypatch.setattr(client, name.upper(), str(program))
