"""Choice of the cluster's number from slurmctld's state and the database, and when neither can be trusted."""

from __future__ import annotations

from pathlib import Path

import pytest

from init.pod.pod import Pod
from init.prepare import database
from init.prepare.database import Numbers


@pytest.mark.parametrize(
    ("what", "seen", "may_pair", "mends"),
    [
        ("both are new", Numbers("c", 0, False, 0, ("", "")), True, False),
        ("a new state, and a database that was there", Numbers("c", 0, False, 7, ("", "x")), True, False),
        ("a state whose number was taken away", Numbers("c", 0, True, 7, ("", "x")), False, False),
        ("an old pair without a stamp agrees", Numbers("c", 7, True, 7, ("", "")), True, False),
        ("an old pair without a stamp differs", Numbers("c", 8, True, 7, ("", "")), False, False),
        ("a pair agrees", Numbers("c", 7, True, 7, ("x", "x")), False, False),
        ("a pair differs", Numbers("c", 8, True, 7, ("x", "x")), False, True),
        ("a pair whose database is silent", Numbers("c", 8, True, 0, ("x", "x")), False, False),
        ("another cluster's state", Numbers("c", 8, True, 7, ("y", "x")), False, False),
        ("another cluster's state, before it has a number", Numbers("c", 0, False, 7, ("y", "x")), False, False),
        ("another's, and no stamp beside the database", Numbers("c", 8, True, 7, ("y", "")), False, False),
    ],
)
def test_only_a_known_pair_is_mended(what: str, seen: Numbers, may_pair: bool, mends: bool) -> None:
    assert (seen.may_pair, seen.differs and seen.paired) == (may_pair, mends), what


@pytest.mark.parametrize("accounting", ["none", "external"])
def test_a_database_of_the_site_s_is_not_looked_at(accounting: str, tmp_path: Path) -> None:
    said = database.number(Pod({"MINIVM_ACCOUNTING": accounting}, tmp_path))
    assert said == "the site's own database keeps the cluster's number"


def test_what_cannot_be_looked_at_keeps_slurmctld_from_nothing(tmp_path: Path) -> None:
    assert "is not compared" in database.number(Pod({}, tmp_path))
