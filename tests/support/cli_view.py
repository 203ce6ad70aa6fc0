"""A snapshot for tests of the command line."""

from __future__ import annotations

from init.lean import replace
from init.view.status import ServiceView


def view(name: str, state: str = "ready", **fields: object) -> ServiceView:
    base = ServiceView(
        name=name, about="", kind="longrun", state=state, ready=state == "ready", required=True, pid=7, since=4.0,
        uptime=5.0, starts=1, failures=0, status="", reasons=(), last_exit="", last_line="", next_start_in=None,
        needs=(), after=(),
    )  # fmt: skip
    return replace(base, **fields)
