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
        ("both are new", Numbers(0, 0, False, "", ""), True, False),
        ("a new state, and a database that was there", Numbers(0, 7, False, "", "x"), True, False),
        ("a state whose number was taken away", Numbers(0, 7, True, "", "x"), False, False),
        ("an old pair without a stamp agrees", Numbers(7, 7, True, "", ""), True, False),
        ("an old pair without a stamp differs", Numbers(8, 7, True, "", ""), False, False),
        ("a pair agrees", Numbers(7, 7, True, "x", "x"), False, False),
        ("a pair differs", Numbers(8, 7, True, "x", "x"), False, True),
        ("a pair whose database is silent", Numbers(8, 0, True, "x", "x"), False, False),
        ("another cluster's state", Numbers(8, 7, True, "y", "x"), False, False),
        ("another cluster's state, before it has a number", Numbers(0, 7, False, "y", "x"), False, False),
        ("another's, and no stamp beside the database", Numbers(8, 7, True, "y", ""), False, False),
    ],
)
def test_only_a_known_pair_is_mended(what: str, seen: Numbers, may_pair: bool, mends: bool) -> None:
    assert (seen.may_pair, seen.differ and seen.are_paired) == (may_pair, mends), what


@pytest.mark.parametrize("accounting", ["none", "external"])
def test_a_database_of_the_site_s_is_not_looked_at(accounting: str, tmp_path: Path) -> None:
    said = database.repair_number(Pod({"MINIVM_ACCOUNTING": accounting}, tmp_path))
    assert said == "the site's own database keeps the cluster's number"


def test_what_cannot_be_looked_at_keeps_slurmctld_from_nothing(tmp_path: Path) -> None:
    assert "is not compared" in database.repair_number(Pod({}, tmp_path))
