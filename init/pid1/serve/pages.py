"""What each HTTP path answers. Whoever reaches the pod asks here, so nothing that a service said is quoted."""

from __future__ import annotations

from init.view import reasons as health

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from init.pid1.loop import Init
    from init.view.handed import Handed

JSON = "application/json"
TEXT = "text/plain; charset=utf-8"


def pages(init: Init) -> Callable[[str], tuple[int, str, str]]:
    """Path in; status, content type and body out."""
    handed: list[Handed] = []

    def answer(path: str) -> tuple[int, str, str]:
        now = init.poller.now()
        if path == "/livez":
            return 200, TEXT, "ok\n"
        if path in ("/readyz", "/startupz"):
            reasons = health.pod_reasons(init.engine, now, quoting=False)
            if path == "/startupz" and init.engine.ready_at is not None:
                reasons = ()
            return 503 if reasons else 200, TEXT, "".join(f"{reason}\n" for reason in reasons or ("ok",))
        if path == "/status":
            from json import dumps

            from init.view.snapshot import to_mapping

            found = to_mapping(health.snapshot(init.engine, init.settings.pod, now, quoting=False))
            return 200, JSON, dumps(found, indent=1) + "\n"
        if path == "/metrics":
            from init.view import metrics
            from init.view.handed import Handed

            if not handed:
                handed.append(Handed(f"{init.settings.run}/metrics.d"))
            counters = {"log_bytes": init.logs.written, "log_lost_bytes": init.logs.lost_ever}
            counters |= {"reaped": init.children.reaped, "wakeups": init.turns}
            counters |= {"syslog_dropped_lines": init.syslog.meter.refused if init.syslog else 0}
            snapshot = health.snapshot(init.engine, init.settings.pod, now, quoting=False)
            return 200, metrics.CONTENT_TYPE, metrics.render(snapshot, counters, handed[0].lines())
        return 404, TEXT, "known: /livez /readyz /startupz /status /metrics\n"

    return answer
