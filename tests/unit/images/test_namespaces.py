"""Diagnosis by errno of what prevents user containers, as each cause has another remedy."""

from __future__ import annotations

import errno
import importlib.machinery
import importlib.util
from pathlib import Path

import pytest

PROGRAM = Path(__file__).resolve().parents[3] / "images/src/containers/container"


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ("", ""),
        (f"u{errno.EPERM}", "the pod's seccomp profile forbids it (workers.defaults.seccompProfile)"),
        # An emulated pod, which no profile can fix.
        (f"u{errno.EINVAL}", "the kernel has none, or this pod runs in an emulator (qemu)"),
        (f"u{errno.ENOSPC}", "user.max_user_namespaces"),
        (f"m{errno.EACCES}", "the pod's AppArmor profile forbids it"),
    ],
)
def test_what_keeps_users_from_containers_is_told_by_its_cause(
    told: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = importlib.machinery.SourceFileLoader("container", str(PROGRAM))
    spec = importlib.util.spec_from_loader("container", loader)
    assert spec is not None
    program = importlib.util.module_from_spec(spec)
    loader.exec_module(program)
    monkeypatch.setattr(program, "attempt", lambda: told)
    monkeypatch.setattr(program, "sysctl", lambda _: "1")
    said = program.why_not()
    assert why in said
    assert bool(said) == bool(told)
