"""Which services are being probed, and with what."""

from __future__ import annotations

from init.fields import expand
from init.procs import with_files
from init.service import Probe
from init.states import Passed, Said

TYPE_CHECKING = False
if TYPE_CHECKING:
    from init.inotify import Inotify
    from init.loop import Init
    from init.probes import ExecProbe, PathProbe, TcpProbe


class Watches:
    def __init__(self, init: Init) -> None:
        self._init = init
        self._probes: dict[str, PathProbe | ExecProbe | TcpProbe] = {}
        self._inotify: Inotify | None = None

    def begin(self, name: str) -> None:
        from init import probes  # and with them ctypes: only a pod that probes pays for it

        self.end(name)
        init, ready = self._init, self._init.engine.spec(name).ready

        def heard(event: Said | Passed) -> None:
            if isinstance(event, Passed):
                self._probes.pop(name, None)
            init.feed(name, event)

        try:
            # A preparation may have found out where to look: the controller's address with its port, say.
            target = expand(ready.target, with_files(init.engine.spec(name), init.settings.env))
        except KeyError as missing:
            init.feed(name, Said(f"${{{missing.args[0]}}} is not set"))
            return
        probe: PathProbe | ExecProbe | TcpProbe
        if ready.probe is Probe.EXEC:
            probe = probes.ExecProbe(
                init.poller,
                ready,
                heard,
                lambda command, output, ended: init.children.run_helper(name, command, output, ended),
                init.children.kill_helper,
            )
        elif ready.probe is Probe.TCP:
            probe = probes.TcpProbe(init.poller, ready, target, heard, init.children.run_own, init.children.kill_helper)
        else:
            if self._inotify is None:
                from init.inotify import Inotify

                self._inotify = Inotify(init.poller)
            probe = probes.PathProbe(init.poller, self._inotify, ready, target, heard)
        self._probes[name] = probe
        probe.begin()

    def end(self, name: str) -> None:
        probe = self._probes.pop(name, None)
        if probe is not None:
            probe.close()
