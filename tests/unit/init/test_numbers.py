"""Numbers from outside: text that passes `str.isdigit` but not `int` must not reach `int`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from init.errors import ConfigError
from init.fields import number
from init.pid1.notify import parse
from init.pid1.serve.server import listen
from init.plan.spec import parse_service
from init.pod.addresses import host_and_port

ROOT = Path(__file__).resolve().parents[3]
SUPERSCRIPT, ENDLESS = "\u00b2", "9" * 5000


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("0", 0), ("42", 42), ("9" * 18, 10**18 - 1), ("", None), ("-1", None), ("1.0", None), (" 1", None), ("1_0", None),
     (SUPERSCRIPT, None), ("1" + SUPERSCRIPT, None), ("\u0663", None), ("9" * 19, None), (ENDLESS, None)],
)  # fmt: skip
def test_a_number_is_a_few_ascii_digits(text: str, wanted: int | None) -> None:
    assert number(text) == wanted


@pytest.mark.parametrize("text", [SUPERSCRIPT, ENDLESS, "1" + SUPERSCRIPT, "\u0663", "-1", "1\u0000"])
def test_a_mainpid_that_is_no_number_is_none(text: str) -> None:
    """An invalid MAINPID counts as none.

    Any process of a service with notify may send one, and PID 1 once crashed on it.
    """
    assert parse(f"READY=1\nMAINPID={text}".encode()).main_pid == 0


def test_addresses_and_settings_with_such_numbers_are_refused_in_words() -> None:
    for port in (SUPERSCRIPT, ENDLESS):
        assert host_and_port(f"controller:{port}")[1] == 6817
        with pytest.raises(ConfigError):
            listen(f"127.0.0.1:{port}")
    for mapping in (
        {"limits": {"nofile": SUPERSCRIPT}},
        {"limits": {"nofile": ENDLESS}},
        {"restart": {"fatal-codes": [SUPERSCRIPT]}},
        {"kind": "periodic", "every": float("inf")},
        {"kind": "periodic", "every": float("nan")},
        {"kind": "periodic", "every": 10**400},
        {"kind": "periodic", "every": f"{ENDLESS}d"},
    ):
        with pytest.raises(ConfigError):
            parse_service("a", {"command": ["/x"], **mapping}, "a.yaml")


def test_nothing_in_init_asks_isdigit() -> None:
    """init does not call isdigit, which accepts a superscript that `int` refuses; `init.fields.number` handles both."""
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in sorted((ROOT / "init").rglob("*.py"))
        for line, text in enumerate(path.read_text().splitlines(), 1)
        if re.search(r"\.(isdigit|isnumeric)\(", text)
    ]
    assert not found, "\n".join(found)
