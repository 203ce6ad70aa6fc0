"""Start under Slinky's operator (MINIVM_UNDER=slinky): turn its arguments and variables into this init's settings.

The operator gives the container the daemon's arguments, and variables such as SLURMD_OPTIONS. Its own images join all
of them into one line that a shell splits: one argument may have quotes inside and name a variable. Here no shell runs.
"""

from __future__ import annotations

import re

from init.errors import ConfigError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import MutableMapping, Sequence
    from typing import NoReturn

SLINKY = "slinky"
# By the role of the image: the variable with more arguments.
OPTIONS = {"slinky-controller": "SLURMCTLD_OPTIONS", "slinky-login": "SACKD_OPTIONS", "slinky-worker": "SLURMD_OPTIONS"}
# The only variables that an argument may name: the operator sets them from the pod's annotation.
VARIABLES = ("SLINKY_TOPOLOGY", "POD_TOPOLOGY")
# How the daemon starts is this init's matter.
DROPPED = ("--systemd",)
LETTERS = "DsZ"
_VARIABLE = r"\$(?:\{(?P<braced>\w+)\}|(?P<bare>\w+))"
PIECE = re.compile(
    r"(?P<blank>[ \t]+)|'(?P<single>[^']*)'|\"(?P<double>(?:[^\"\\]|\\.)*)\"|\\(?P<escaped>.)|"
    rf"{_VARIABLE}|(?P<shell>[$`])|(?P<text>[^ \t\n'\"\\$;|&<>()`]+)"
)
# Letters without a value, such as -vv or -Dvv.
FLAGS = re.compile(r"-([cCDsvZ]+)")
INSIDE = re.compile(rf"\\(?P<escaped>[\"\\$`])|{_VARIABLE}|(?P<shell>[$`])|(?P<text>[^$`\\]+|\\)")


def adopt(role: str, arguments: Sequence[str], env: MutableMapping[str, str]) -> None:
    """Set the variables that the role's services read. ConfigError names the argument that cannot be used."""
    if env["MINIVM_UNDER"] != SLINKY:
        under = env["MINIVM_UNDER"]
        raise ConfigError(
            "start", f"MINIVM_UNDER is {under!r}, and {SLINKY} alone is known", hint="leave it as the image has it"
        )
    text = " ".join(part for part in (env.get(OPTIONS.get(role, ""), ""), *arguments) if part).strip()
    words = iter(split(text, env))
    left: list[str] = []
    for word in words:
        name, equals, value = word.partition("=")
        if word.startswith("-N") and len(word) > 2:
            name, equals, value = "-N", "=", word[2:]
        if name in ("--conf-server", "--conf", "-N"):
            value = value if equals else next(words, "")
            if not value:
                refuse(text, f"{name} has no value")
            if name == "--conf-server":
                # Of several controllers this init waits for the first one's port; the daemon gets them all.
                env["MINIVM_CONTROLLER"] = value.partition(",")[0]
                left += [name, value]
            elif name == "--conf":
                describe_node(text, value, env)
            else:
                env["MINIVM_POD_NAME"] = value
        elif short := FLAGS.fullmatch(word):
            letters = short[1].translate({ord(letter): None for letter in LETTERS})
            left += [f"-{letters}"] if letters else []
        elif word not in DROPPED:
            left.append(word)
    env["MINIVM_ARGUMENTS"] = " ".join(quote(word) for word in left)


def describe_node(text: str, value: str, env: MutableMapping[str, str]) -> None:
    """Take the words of --conf; one without a value, such as the topology of an unlabelled node, is left out."""
    settings = []
    for word in value.split():
        name, equals, setting = word.partition("=")
        if not equals:
            refuse(text, f"{word!r} in --conf is not Key=value")
        if name.lower() in ("feature", "features"):
            env["MINIVM_NODE_FEATURES"] = setting
        elif setting:
            settings.append(word)
    env["MINIVM_NODE_CONF"] = " ".join(settings)


def split(text: str, env: MutableMapping[str, str]) -> list[str]:
    """Split a line into words as a shell would: quotes, backslashes, and the known variables."""
    words: list[str] = []
    word: str | None = None  # None between two words: '' is a word, too
    at = 0
    while at < len(text):
        piece = PIECE.match(text, at)
        if piece is None:
            refuse(text, f"{text[at:]!r} is for a shell, or a quote is not closed")
        at = piece.end()
        if piece["blank"]:
            words += [] if word is None else [word]
            word = None
        elif piece["double"] is not None:
            word = (word or "") + INSIDE.sub(lambda inner: plain(text, inner, env), piece["double"])
        else:
            word = (word or "") + (piece["single"] or plain(text, piece, env))
    return words if word is None else [*words, word]


def plain(text: str, piece: re.Match[str], env: MutableMapping[str, str]) -> str:
    """Return the value of a piece: itself, the letter after a backslash, or the value of a variable."""
    name = piece["braced"] or piece["bare"]
    if name is None and not piece["shell"]:
        return piece["escaped"] or piece["text"] or ""
    if name not in VARIABLES:
        refuse(
            text, f"{piece[0]!r}: an argument runs nothing, and may name the variables {' and '.join(VARIABLES)} alone"
        )
    return env.get(name, "")


def quote(word: str) -> str:
    """Quote a word for `env -S`."""
    return "'" + word.replace("\\", "\\\\").replace("'", "\\'") + "'"


def refuse(text: str, why: str) -> NoReturn:
    raise ConfigError(
        "use the pod's arguments",
        f"{text!r}: {why}",
        hint="change `args` of the container in the NodeSet, Controller or LoginSet, or its variable *_OPTIONS",
    )
