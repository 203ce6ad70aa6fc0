"""Readiness watches: the services being probed, and their probes."""

from __future__ import annotations

from init.engine.states import Passed, Phase, Said
from init.fields import expand
from init.pid1.spawn.procs import with_files
from init.pid1.wait import Scope
from init.plan.service import Probe

TYPE_CHECKING = False
if TYPE_CHECKING:
    from init.pid1.children import Children
    from init.pid1.core import Core
    from init.pid1.inotify import Inotify
    from init.pid1.probes import ExecProbe, PathProbe, TcpProbe
    from init.pid1.wait import Timer


class Watches:
    """The running probes. A probe that fails reports the reason in its service's name and starts again."""

    def __init__(self, core: Core, children: Children) -> None:
        self._core, self._children = core, children
        self._probes: dict[str, PathProbe | ExecProbe | TcpProbe] = {}
        self._scopes: dict[str, Scope] = {}
        self._again: dict[str, Timer] = {}
        self._inotify: Inotify | None = None

    def begin(self, name: str) -> None:
        self.end(name)
        scope = Scope(self._core.poller, lambda reason: self._failed(name, scope, reason))
        self._scopes[name] = scope
        scope.attempt(self._begin, name, scope)

    def _begin(self, name: str, scope: Scope) -> None:
        from init.pid1 import probes  # loads ctypes: only a pod with probes pays for it

        core, ready = self._core, self._core.engine.spec(name).ready

        def heard(event: Said | Passed) -> None:
            if isinstance(event, Passed):
                self._probes.pop(name, None)
                self._scopes.pop(name, None)
            core.handle(name, event)

        try:
            # A prepare command may have written the address: the controller's with its port, for example.
            target = expand(ready.target, with_files(core.engine.spec(name), core.settings.env))
        except KeyError as missing:
            core.handle(name, Said(f"${{{missing.args[0]}}} is not set"))
            return
        probe: PathProbe | ExecProbe | TcpProbe
        if ready.probe is Probe.EXEC:
            probe = probes.ExecProbe(
                scope,
                ready,
                heard,
                lambda command, output, ended: self._children.run_helper(name, command, output, ended),
                self._children.kill_helper,
            )
        elif ready.probe in (Probe.TCP, Probe.HTTP):
            probe = probes.TcpProbe(scope, ready, target, heard, self._children.run_own, self._children.kill_helper)
        else:
            probe = probes.PathProbe(scope, self._watched, ready, target, heard)
        self._probes[name] = probe
        probe.begin()

    def _watched(self) -> Inotify:
        if self._inotify is None:
            from init.pid1.inotify import Inotify

            self._inotify = Inotify(self._core.poller)
        return self._inotify

    def _failed(self, name: str, scope: Scope, why: str) -> None:
        core, state = self._core, self._core.engine.states.get(name)
        if self._scopes.get(name, scope) is not scope or state is None or state.phase is not Phase.STARTING:
            core.troubled(f"a probe of {name} that is over: {why}")
            return
        self.end(name)
        core.handle(name, Said(f"cannot probe its readiness: {why}"))
        interval = core.engine.spec(name).ready.interval
        self._again[name] = core.poller.after(interval, lambda: self.begin(name))

    def end(self, name: str) -> None:
        scope, probe, again = self._scopes.pop(name, None), self._probes.pop(name, None), self._again.pop(name, None)
        if again is not None:
            again.cancel()
        if probe is not None and scope is not None:
            scope.attempt(probe.close)
