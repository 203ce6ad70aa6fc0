"""Mounted keys that differ from the keys in use."""

from __future__ import annotations

from pathlib import Path

from init.helpers.keys import KEYS, SECRETS, find_unused
from init.pod.pod import Pod


def put(root: Path, path: str, text: str) -> None:
    place = root / path.lstrip("/")
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(text)


def test_each_key_that_changed_is_told_with_its_way_and_never_shown(tmp_path: Path) -> None:
    pod = Pod({}, tmp_path)
    assert list(find_unused(pod)) == []
    for key in KEYS:
        put(tmp_path, f"{SECRETS}/{key.mounted[-1]}", "hidden-new")
        if not key.beside:
            assert list(find_unused(pod)) == [], "not installed yet: its service says what it waits for"
        put(tmp_path, key.installed, "hidden-new")
        assert list(find_unused(pod)) == []
        put(tmp_path, key.installed, "hidden-old")
        (told,) = find_unused(pod)
        assert told.startswith(f"the mounted {key.name} is not the one in use, since 20") and told.endswith(key.way)
        assert "hidden" not in told
        put(tmp_path, key.installed, "hidden-new")


def test_a_second_key_that_comes_beside_the_first_is_told(tmp_path: Path) -> None:
    pod = Pod({}, tmp_path)
    for path in (f"{SECRETS}/slurm-key/slurm.key", "/etc/slurm/slurm.key"):
        put(tmp_path, path, "one")
    put(tmp_path, f"{SECRETS}/slurm-jwks/slurm.jwks", "several")
    (told,) = find_unused(pod)
    assert told.startswith("the mounted slurm.jwks is not the one in use")
