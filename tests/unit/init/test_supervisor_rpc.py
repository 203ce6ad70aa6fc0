"""Mapping of init's service states to supervisor's for supervisorctl."""

from __future__ import annotations

import pytest

from init.engine.states import Phase
from init.helpers.supervisor_rpc import process_info
from tests.support.cli_view import view


@pytest.mark.parametrize("state", ["reloading", *(phase.value for phase in Phase)])
def test_every_state_of_a_service_has_one_of_supervisors(state: str) -> None:
    assert process_info(view("a", state), 100.0)["statename"] != "UNKNOWN"


def test_a_service_whose_main_process_changes_is_running() -> None:
    assert process_info(view("a", "handover"), 100.0)["state"] == 20
