"""Which services may start now. Pure."""

from __future__ import annotations

from init.engine.states import Phase, satisfied

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from init.engine.states import State
    from init.plan.service import Service


def waits_for(service: Service, states: Mapping[str, State]) -> tuple[str, ...]:
    """What still keeps it from starting: unready needs, then soft ones without any outcome yet."""
    hard = [name for name in service.needs if name in states and not satisfied(states[name])]
    soft = [
        name
        for name in service.after
        if name in states and name not in hard and not satisfied(states[name]) and not had_its_turn(states[name])
    ]
    return (*hard, *soft)


def had_its_turn(state: State) -> bool:
    """A soft need is over once it has failed or been stopped: whoever comes after it does not wait for ever."""
    return state.streak > 0 or state.phase in (Phase.FAILED, Phase.STOPPED, Phase.STOPPING)


def startable(specs: Mapping[str, Service], states: Mapping[str, State]) -> list[str]:
    return [
        name
        for name, state in states.items()
        if state.phase is Phase.WAITING and name in specs and not waits_for(specs[name], states)
    ]
