"""Parse slurm.conf as far as a change can end jobs: settings, partitions, nodes. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import islice

from init.fields import number as decimal
from init.lean import record

MAIN = "slurm.conf"
# Keys that start a record; every other line has settings.
RECORDS = ("partitionname", "nodename", "nodeset", "downnodes", "frontendname", "slurmsiteconf")
# Settings that form a list when repeated.
MANY = ("slurmctldhost", "prolog", "epilog", "prologslurmctld", "epilogslurmctld", "include")
DEPTH = 8  # for files that include files
LARGEST = 1 << 16  # for a range of nodes: Slurm's own limit

UNLIMITED = (1 << 32) - 1

_NUMBER = re.compile(r"\+?(?:0x([0-9a-f]{1,16})|(0[0-7]{0,16})|([1-9][0-9]{0,16}))(k?)", re.ASCII | re.IGNORECASE)
PAIR = re.compile(r'([^\s=]+?)\s*=\s*("[^"]*"|\S*)')
_BRACKET = re.compile(r"\[([^\]]*)\]")

Line = Mapping[str, str]  # of a partition or a node: lower-case key -> value


@record(frozen=True, slots=True)
class Configuration:
    settings: Mapping[str, str]  # lower-case key -> value
    names: Mapping[str, str]  # lower-case key -> original spelling
    partitions: Mapping[str, Line]
    nodes: Mapping[str, Line]  # listed nodes; dynamic ones are not in the file

    def value(self, key: str) -> str:
        return self.settings.get(key, "")

    def number(self, key: str, default: int) -> int:
        return default if (parsed := number(self.value(key))) is None else parsed

    def words(self, key: str) -> frozenset[str]:
        return words(self.value(key))


def number(value: str) -> int | None:
    """Parse a number as Slurm does: 100, 0x64, 0144, 1k for 1024, UNLIMITED."""
    if value.strip().upper() in ("UNLIMITED", "INFINITE"):
        return UNLIMITED
    match = _NUMBER.fullmatch(value.strip())
    if match is None:
        return None
    base, digits = next((base, text) for base, text in zip((16, 8, 10), match.groups(), strict=False) if text)
    return int(digits, base) * (1024 if match[4] else 1)


def words(value: str) -> frozenset[str]:
    return frozenset(word for word in value.split(",") if word)


def setting(conf: str, name: str) -> str:
    r"""Return one setting of slurm.conf or slurmdbd.conf: the last line of that name, parsed like Slurm.

    `\\#` is no comment, and quotes contain blanks.
    """
    last = ""
    for line in conf.splitlines():
        key, equals, value = _strip_comment(line).partition("=")
        if equals and key.strip().lower() == name.lower():
            last = re.sub(r"\\([\\#])", r"\1", value.strip().strip('"'))
    return last


def _strip_comment(line: str) -> str:
    return re.split(r"(?<!\\)#", line, maxsplit=1)[0]


def read(files: Mapping[str, bytes]) -> Configuration:
    """Parse slurm.conf with the files beside it that it includes."""
    settings: dict[str, str] = {}
    names: dict[str, str] = {}
    partitions: dict[str, dict[str, str]] = {}
    nodes: dict[str, dict[str, str]] = {}
    defaults: dict[str, dict[str, str]] = {"partitionname": {}, "nodename": {}}
    for line in whole_lines(files):
        pairs = [(key, value.strip('"')) for key, value in PAIR.findall(line)]
        if not pairs:
            continue
        kind, name = pairs[0][0].lower(), pairs[0][1]
        if kind not in RECORDS:
            for written, value in pairs:
                key = written.lower()
                names[key] = written
                settings[key] = f"{settings[key]},{value}" if key in MANY and key in settings else value
            continue
        fields = {key.lower(): value for key, value in pairs[1:]}
        if kind not in defaults:
            continue
        if name.upper() == "DEFAULT":
            defaults[kind].update(fields)
            continue
        records = partitions if kind == "partitionname" else nodes
        for record_name in [name] if kind == "partitionname" else expand(name):
            records[record_name] = {**defaults[kind], **records.get(record_name, {}), **fields}
    return Configuration(settings, names, partitions, nodes)


def whole_lines(files: Mapping[str, bytes], name: str = MAIN, depth: int = DEPTH) -> Iterator[str]:
    """Yield whole lines without comments, included files in their place."""
    line = ""
    for written in files.get(name, b"").decode(errors="replace").split("\n"):
        # A comment ends with its own line, even after a backslash; a continued line is joined without a blank.
        line += _strip_comment(written).rstrip()
        if (len(line) - len(line.rstrip("\\"))) % 2:
            line = line[:-1]
            continue
        pair = line.split(maxsplit=1)
        if len(pair) == 2 and pair[0].lower() == "include" and not pair[1].startswith("="):
            if depth:
                yield from whole_lines(files, pair[1].rpartition("/")[2], depth - 1)
        elif pair:
            yield line
        line = ""
    if line:
        yield line


def find_missing_includes(files: Mapping[str, bytes]) -> list[str]:
    """List the files that a file includes and that are not among these."""
    missing = set()
    for data in (data for name, data in files.items() if name.endswith(".conf")):
        for line in data.decode(errors="replace").splitlines():
            pair = _strip_comment(line).split(maxsplit=1)
            is_include = len(pair) == 2 and pair[0].lower() == "include" and not pair[1].startswith("=")
            if is_include and pair[1].strip().rpartition("/")[2] not in files:
                missing.add(pair[1].strip())
    return sorted(missing)


def expand(hosts: str) -> list[str]:
    """Expand a host list: w[1-3,07],x -> w1 w2 w3 w07 x."""
    hosts_: list[str] = []
    for part in _split(hosts):
        names = list(islice(_expand_parts(part), LARGEST + 2))
        hosts_ += names if len(names) <= LARGEST + 1 else [part]  # nested ranges multiply
    return hosts_


def _split(hosts: str) -> list[str]:
    """Split at commas outside of brackets."""
    return [part for part in re.split(r",(?![^\[]*\])", hosts.strip()) if part]


def _expand_parts(part: str) -> Iterator[str]:
    bracket = _BRACKET.search(part)
    if bracket is None:
        yield part
        return
    before, after = part[: bracket.start()], part[bracket.end() :]
    for piece in bracket[1].split(","):
        first, _, last = piece.partition("-")
        low, high = decimal(first), decimal(last or first)
        if low is None or high is None or high - low > LARGEST:
            yield part  # an unknown kind of range: kept unchanged
            return
        for index in range(low, high + 1):
            for rest in _expand_parts(after):
                yield f"{before}{index:0{len(first)}d}{rest}"
