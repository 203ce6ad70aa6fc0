"""Answers to HTTP paths. Anybody who reaches the pod can read them, so no service's output is quoted."""

from __future__ import annotations

from init.view import reasons

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from init.pid1.core import Core
    from init.view.metrics import Handed

JSON = "application/json"
TEXT = "text/plain; charset=utf-8"


def pages(core: Core, counters: Callable[[], Mapping[str, int]]) -> Callable[[str], tuple[int, str, str]]:
    """Return a function from a path to status, content type and body."""
    handed: list[Handed] = []

    def answer(path: str) -> tuple[int, str, str]:
        now = core.poller.now()
        if path == "/livez":
            return 200, TEXT, "ok\n"
        if path in ("/readyz", "/startupz"):
            causes = reasons.pod_reasons(core.engine, now, quoting=False)
            if path == "/startupz" and core.engine.ready_at is not None:
                causes = ()
            return 503 if causes else 200, TEXT, "".join(f"{reason}\n" for reason in causes or ("ok",))
        if path == "/status":
            from json import dumps

            from init.view.snapshot import to_mapping

            shown = reasons.snapshot(core.engine, core.settings.pod, now, quoting=False)
            return 200, JSON, dumps(to_mapping(shown), indent=1) + "\n"
        if path == "/conditions":
            from json import dumps

            from init.view.conditions import read_conditions

            conditions = read_conditions(core.engine, now, core.settings.run)
            return 200, JSON, dumps({"pod": core.settings.pod, "conditions": conditions}) + "\n"
        if path == "/metrics":
            from init.view import metrics
            from init.view.metrics import Handed

            if not handed:
                handed.append(Handed(f"{core.settings.run}/metrics.d"))
            shown = reasons.snapshot(core.engine, core.settings.pod, now, quoting=False)
            return 200, metrics.CONTENT_TYPE, metrics.render(shown, counters(), handed[0].lines())
        return 404, TEXT, "known: /livez /readyz /startupz /status /conditions /metrics\n"

    return answer
