"""Move the accounting records from one database to another, so that exactly one of them is in use.

`move_out` closes a database to slurmdbd and writes its records; `move_in` loads them elsewhere, compares every table's
rows with what was written, and only then lets slurmdbd start. A mark beside each database keeps this over restarts:
slurmdbd does not start with one whose records are elsewhere (`guard`). Both can be cut at any step, and run again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, Protocol

from ground.errors import counted
from ground.files import locked, read_plain, sync_directory, write_whole
from init.errors import ConfigError, InitError
from init.lean import fields, record, replace
from init.pod import release as slurm
from init.pod.client import Client, control_socket, service
from init.pod.pod import Pod
from init.slurm import accounting
from init.slurm.conf import setting
from init.slurm.place import CONFIGURATION, read_release
from init.state.copies import CopyError
from init.state.save import CHUNK, COMPLETED, DATA, DUMP, TABLES, check_room, measure_size

OUT, LOADING, IN = "moved-out", "loading", "moved-in"
# Beside the embedded database; of an external one beside the controller's last good configuration.
MARKS = {"embedded": "/var/lib/mysql/.minivm-records", "external": "/var/lib/minivm/slurm/records"}
FROM = "MINIVM_ACCOUNTING_FROM"
LOCK = "/run/minivm/accounting-move.lock"
HEAD, TAIL = b"-- minivm records: ", b"-- minivm end: "
TAIL_SIZE = len(TAIL) + 64 + 1
LONGEST_HEAD = 1 << 20
VERSION = 1
NAME = re.compile(r"[A-Za-z0-9_$-]+")
WITHIN = 60.0  # for the database of a pod that has just started
NOTHING = "has no records of"
# slurmdbd's tables that belong to no single cluster (24.11 to 26.05), and the rows that it makes itself at its first
# start: the account and the user root, the QOS normal. None: more rows do not tell that a person made them.
GLOBAL_TABLES: dict[str, int | None] = {
    "acct_coord_table": 0,
    "acct_table": 1,
    "clus_res_table": 0,
    "cluster_table": None,
    "convert_version_table": None,
    "federation_table": 0,
    "qos_table": 1,
    "res_table": 0,
    "table_defs_table": None,
    "tres_table": None,
    "txn_table": None,
    "user_table": 1,
}
PAGE = "docs/how-to/accounting-pod.md"

Report = Callable[[str], None]


class Sink(Protocol):
    """A stream that records are written to."""

    def write(self, data: bytes, /) -> object: ...

    def flush(self) -> object: ...


class MoveError(InitError):
    """Records that cannot be moved."""


class NothingHere(MoveError):
    """A database to which the records were never moved completely: they are still in the one before."""


@record(frozen=True, slots=True)
class RecordsMark:
    """Progress of a move, kept beside each database; a database without a mark never took part in one."""

    phase: str = ""
    token: str = ""  # of the last move: each time that records leave a database it gets a new one
    history: tuple[str, ...] = ()  # every move that these records have behind them
    replaces: str = ""  # while loading: the move by which the records that were here before had left
    place: str = ""  # of an external database, which the settings may change: HOST:PORT/NAME
    time: int = 0


@record(frozen=True, slots=True)
class RecordsHead:
    """First line of moved records."""

    cluster: str
    protocol: int  # of the Slurm that wrote them; 0: unknown
    token: str
    history: tuple[str, ...]
    counts: Mapping[str, int]  # rows by table
    size: int  # bytes of the tables

    @property
    def jobs(self) -> int:
        return self.counts.get(f"{self.cluster}_job_table", 0)


def head_of_line(line: bytes) -> RecordsHead:
    try:
        if not line.startswith(HEAD) or not line.endswith(b"\n"):
            raise ValueError("the first line is not `minivm accounting move-out`'s")
        data = json.loads(line.removeprefix(HEAD))
        if data.pop("version") != VERSION:
            raise ValueError("another version of minivm wrote them")
        head = RecordsHead(**{**data, "history": tuple(data["history"])})
        counts_are_whole = all(type(count) is int and count >= 0 for count in head.counts.values())
        texts = (head.cluster, head.token, *head.history, *head.counts)
        if not (counts_are_whole and all(isinstance(text, str) and NAME.fullmatch(text) for text in texts)):
            raise ValueError("the first line is damaged")
        if type(head.size) is not int or type(head.protocol) is not int:
            raise ValueError("the first line is damaged")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        problem = str(error) if type(error) is ValueError else "the first line is damaged"
        raise MoveError("load the records", problem, hint="write them again: minivm accounting move-out") from None
    return head


def format_line(head: RecordsHead) -> bytes:
    return HEAD + json.dumps({"version": VERSION, **fields(head)}, sort_keys=True).encode() + b"\n"


# The mark


def mark_file(pod: Pod) -> Path:
    place = MARKS.get(pod.accounting)
    if place is None:
        problem = {"pod": "the database is in the accounting pod", "none": "the cluster has no accounting"}
        raise MoveError("move the records", problem[pod.accounting], hint="run this in the pod that has slurmdbd")
    return pod.path(place)


def read_mark(file: Path) -> RecordsMark:
    if not os.path.lexists(file):
        return RecordsMark()
    try:
        data = json.loads(read_plain(file, 1 << 20) or b"")
        mark = RecordsMark(**{**data, "history": tuple(data["history"])})
        if mark.phase in (OUT, LOADING, IN):
            return mark
    except (ValueError, TypeError, KeyError):
        pass
    raise ConfigError("read whose records these are", "the mark is damaged", file=str(file), hint=PAGE)


def _write_mark(file: Path, mark: RecordsMark) -> None:
    data = {**fields(mark), "time": int(time.time())}
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_whole(file, json.dumps(data), mode=0o600)
        sync_directory(file.parent)
    except OSError as error:
        raise MoveError("write down the move", error.strerror or str(error), file=str(file)) from error


def guard(pod: Pod) -> str:
    """Refuse to start slurmdbd while the cluster's records are in another database. Reads only."""
    file = mark_file(pod)
    mark, source = read_mark(file), pod.setting(FROM)
    if mark.phase == OUT:
        day = time.strftime("%Y-%m-%d", time.gmtime(mark.time))
        hint = (f"bring them back: move-out there, then `minivm accounting move-in` here ({PAGE}); if no place loaded"
                " them: `minivm accounting reopen`")  # fmt: skip
        raise ConfigError("start slurmdbd", f"its records were moved out on {day}", file=str(file), hint=hint)
    if mark.phase == LOADING:
        hint = "repeat it: minivm accounting move-in < FILE"
        raise ConfigError("start slurmdbd", "a load of its records was cut or is under way", file=str(file), hint=hint)
    if not mark.phase and source:
        hint = f'minivm accounting move-in < FILE ({PAGE}); a cluster that never had them elsewhere: accounting.from ""'
        raise ConfigError("start slurmdbd", f"it waits for the records of the {source} database", hint=hint)
    return "its records were moved in" if mark.phase else "its records were always here"


# The database


@record(frozen=True, slots=True)
class RecordsDatabase:
    name: str
    options: tuple[str, ...]
    password: str
    place: str = ""  # as in the mark

    @property
    def env(self) -> dict[str, str]:
        """The password is in no command line, and so in no list of processes."""
        return {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"} | ({"MYSQL_PWD": self.password} if self.password else {})

    def sql(self, statement: str) -> list[str]:
        argv = [accounting.CLIENT, *self.options, "--batch", "--skip-column-names", self.name]
        done = subprocess.run(
            argv, input=statement, capture_output=True, text=True, errors="replace", env=self.env, check=False
        )
        if done.returncode:
            raise MoveError("ask the database", done.stderr.strip()[-400:], hint="see `minivm why mariadb`")
        return done.stdout.splitlines()

    def counts(self) -> dict[str, int]:
        """Count every table's rows. A view, and a name that Slurm never gives a table, are listed with 0 rows."""
        question = "SELECT table_name, table_type FROM information_schema.tables WHERE table_schema = DATABASE()"
        kinds = dict(line.rsplit("\t", 1) for line in self.sql(question))
        plain = [name for name, kind in kinds.items() if kind == "BASE TABLE" and NAME.fullmatch(name)]
        counted = self.sql("".join(f"SELECT '{name}', COUNT(*) FROM `{name}`;\n" for name in plain))
        return dict.fromkeys(kinds, 0) | {
            name: int(count) for name, _, count in (line.partition("\t") for line in counted)
        }

    def size(self) -> int:
        total = "SELECT COALESCE(SUM(data_length + index_length), 0) FROM information_schema.tables"
        return int(self.sql(f"{total} WHERE table_schema = DATABASE()")[0])

    def clear(self, tables: Iterable[str]) -> None:
        """Drop the tables; the database itself stays, with the character set that a site gave it."""
        drops = "".join(f"DROP TABLE `{name}`;\n" for name in tables)
        self.sql(f"SET foreign_key_checks = 0;\n{drops}")


def database(pod: Pod, *, answers: bool = True) -> RecordsDatabase:
    """Wait until the database is known, and answers: the pod may have just started."""
    what, deadline = "find the database", time.monotonic() + WITHIN
    while True:
        conf = pod.text(accounting.CONFIGURATION)
        problem = MoveError(what, "this pod has no slurmdbd.conf", hint="run this in the pod that has slurmdbd")
        if conf is not None:
            base = database_of(conf)
            try:
                if answers:
                    base.sql("SELECT 1")
                return base
            except MoveError as error:
                problem = error
        if time.monotonic() > deadline:
            raise problem
        time.sleep(0.2)


def database_of(conf: str) -> RecordsDatabase:
    options, password, name = accounting.connection(conf)
    host, port = setting(conf, "StorageHost") or "localhost", setting(conf, "StoragePort") or "3306"
    place = "" if host == "localhost" else f"{host.lower()}:{port}/{name}"
    return RecordsDatabase(name, tuple(options), password, place)


def check_place(what: str, file: Path, mark: RecordsMark, place: str) -> None:
    """Refuse another database than the one for which the mark was written: nothing is known of its records."""
    if mark.place and mark.place != place:
        place = place or "localhost"
        raise MoveError(what, f"the last move was in the database {mark.place}, and the settings name {place}",
                        file=str(file), hint="set accounting.database as it was; where the same database only got"
                        f' another address: write "{place}" as "place" into this file')  # fmt: skip


def other_clusters(counts: Mapping[str, int], cluster: str) -> list[str]:
    """List other clusters in the same database: each has accounts from its first contact with slurmdbd on."""
    return sorted(
        {
            name.removesuffix(kind)
            for name, rows in counts.items()
            for kind in ("_assoc_table", "_job_table")
            if name.endswith(kind) and name != f"{cluster}{kind}" and (rows or kind == "_assoc_table")
        }
    )


def foreign_tables(
    counts: Mapping[str, int], cluster: str, written: Mapping[str, int] = MappingProxyType({})
) -> list[str]:
    """List tables that are neither slurmdbd's own nor among the written ones: their rows would be lost."""
    own = re.compile(rf"{re.escape(cluster)}_[A-Za-z0-9_]+_table")
    return sorted(name for name in counts.keys() - GLOBAL_TABLES.keys() - written.keys() if not own.fullmatch(name))


def find_made_by_people(counts: Mapping[str, int]) -> list[str]:
    """List tables with more rows than slurmdbd makes itself in a new database."""
    return sorted(name for name, fresh in GLOBAL_TABLES.items() if fresh is not None and counts.get(name, 0) > fresh)


def _check_tables(
    what: str, counts: Mapping[str, int], cluster: str, written: Mapping[str, int] = MappingProxyType({})
) -> None:
    if clusters := other_clusters(counts, cluster):
        raise MoveError(what, f"other clusters use the database, too: {', '.join(clusters)}",
                        hint="give this cluster a database of its own, by the database's own tools")  # fmt: skip
    if tables := foreign_tables(counts, cluster, written):
        raise MoveError(what, f"the database has tables that are not slurmdbd's: {', '.join(tables[:5])}",
                        hint="move them to another database, or give this cluster one of its own")  # fmt: skip


def _cluster(pod: Pod) -> str:
    return setting(pod.text(CONFIGURATION) or "", "ClusterName").lower()


@contextlib.contextmanager
def _hold_lock(pod: Pod, what: str) -> Iterator[None]:
    fd = os.open(pod.path(LOCK), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        if not locked(fd):
            raise MoveError(what, "another move of records is running here", hint="try again when it has ended")
        yield
    finally:
        os.close(fd)


# slurmdbd


def _states() -> dict[str, str]:
    with Client(control_socket()) as client:
        return {view.name: view.state for view in client.snapshot().services}


def _check_active(what: str) -> None:
    """Refuse on a standby: the active controller's slurmdbd writes."""
    state = _states().get("lease", "ready")
    if state != "ready":
        raise MoveError(what, f"this controller stands by (lease is {state})", hint="run this in the active one")


def _stop(what: str) -> bool:
    """Stop slurmdbd; return whether it ran."""
    before = state = _states().get("slurmdbd", "absent")
    if state not in ("stopped", "failed"):
        with Client(control_socket(), within=None) as client:
            client.request("stop", service="slurmdbd", wait=True)
        state = _states().get("slurmdbd", "absent")
    if state not in ("stopped", "failed"):
        raise MoveError(what, f"slurmdbd is {state}, expected stopped", hint="minivm stop slurmdbd")
    return before != state


def _request_start() -> dict[str, Any]:
    """Start slurmdbd; return its state, which is `waiting` if a service that it needs stays away."""
    deadline = time.monotonic() + WITHIN
    with Client(control_socket(), within=None) as client:
        client.request("start", service="slurmdbd", wait=False)
        while (view := service(client, "slurmdbd")) and view.state == "waiting":
            if time.monotonic() > deadline:
                return {"state": view.state, "reasons": view.reasons}
            time.sleep(0.2)
        return client.request("start", service="slurmdbd", wait=True)


def _start() -> None:
    reply = _request_start()
    if reply["state"] in ("failed", "backoff", "waiting"):
        raise MoveError("start slurmdbd", "; ".join(reply.get("reasons", [])) or reply["state"],
                        hint="its records are all here; when that is mended: minivm start slurmdbd")  # fmt: skip


def _update_condition(pod: Pod) -> None:
    """Let the pod's status say why slurmdbd is closed: by its state alone it was stopped on request."""
    try:
        guard(pod)
        reason = ""
    except ConfigError as error:
        reason = f"{error.why}; {error.hint}"
    with contextlib.suppress(InitError, OSError, EOFError), Client(control_socket()) as client:
        view = service(client, "slurmdbd")
        is_required = view is not None and view.required  # where the pod is not ready without it
        client.request("condition", name="records", text=reason, blocking=is_required)


# Out and in


def move_out(pod: Pod, out: Sink, report: Report) -> None:
    """Close the database to slurmdbd, and write its records. slurmctld goes on and keeps what it has to account."""
    what = "move the records out"
    file = mark_file(pod)
    with _hold_lock(pod, what):
        _check_active(what)
        mark = read_mark(file)
        # Check this before the database is asked: a silent database may be why the operator gives the move up.
        if mark.phase == LOADING or (not mark.phase and pod.setting(FROM)):
            raise NothingHere(what, "their load into this database was never completed",
                              hint=f"complete it here, or reopen the database before it ({PAGE})")  # fmt: skip
        base, cluster = database(pod), _cluster(pod)
        check_place(what, file, mark, base.place)
        counts = base.counts()
        if f"{cluster}_job_table" not in counts:
            raise MoveError(what, f"the database {NOTHING} the cluster {cluster}")
        _check_tables(what, counts, cluster)
        if mark.phase != OUT:
            token = os.urandom(16).hex()
            mark = RecordsMark(OUT, token, (*mark.history, token), place=base.place)
            _write_mark(file, mark)
        _update_condition(pod)
        _stop(what)
        release = read_release(pod)
        protocol = release.protocol if release else 0
        head = RecordsHead(cluster, protocol, mark.token, mark.history, base.counts(), base.size())
        digest = hashlib.sha256()
        for part in _dump(base, format_line(head)):
            digest.update(part)
            out.write(part)
        if base.counts() != head.counts:
            raise MoveError(what, "something else than slurmdbd wrote into the database meanwhile",
                            hint="find it, then run this again")  # fmt: skip
        out.write(TAIL + digest.hexdigest().encode() + b"\n")
        out.flush()
    report(
        f"{counted(head.jobs, 'job')} in {counted(len(head.counts), 'table')} written, and slurmdbd stays stopped here"
    )


def _dump(base: RecordsDatabase, head: bytes) -> Iterator[bytes]:
    yield head
    argv = [DUMP, *base.options, "--single-transaction", "--quick", "--no-tablespaces", base.name]
    last = b""
    with subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=base.env
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        try:
            while chunk := process.stdout.read(CHUNK):
                yield chunk
                last = (last + chunk)[-200:]
            errors = process.stderr.read(2000).decode(errors="replace").strip()
        finally:
            process.kill()
    if process.returncode or COMPLETED not in last:
        raise MoveError("dump the accounting database", errors or "the dump ended early",
                        hint="see `minivm why mariadb`, then run this again")  # fmt: skip


def check_target(mark: RecordsMark, head: RecordsHead, counts: Mapping[str, int], cluster: str) -> None:
    """Refuse records that are not this database's next ones; its present ones would be lost. Pure."""
    what = "load the records"
    if head.cluster != cluster:
        raise MoveError(what, f"they are of the cluster {head.cluster}, and this is {cluster}")
    _check_tables(what, counts, cluster, head.counts)
    jobs = counts.get(f"{cluster}_job_table", 0)
    if mark.phase == IN or (not mark.phase and jobs):
        raise MoveError(what, f"the database is in use: it has {counted(jobs, 'job')} of its own",
                        hint=f"move those out first, or give this pod an empty volume ({PAGE})")  # fmt: skip
    if not mark.phase and (tables := find_made_by_people(counts)):
        raise MoveError(what, f"the database has records that slurmdbd did not make itself, in {', '.join(tables)}",
                        hint=f"keep a dump of it, then give this cluster an empty database ({PAGE})")  # fmt: skip
    needed = mark.token if mark.phase == OUT else mark.replaces
    if needed and head.token == needed:
        raise MoveError(what, "they were written here, and the place that got them may have newer ones",
                        hint="move-out there; or, if no place got them: minivm accounting reopen")  # fmt: skip
    if needed and needed not in head.history:
        raise MoveError(what, "they do not contain the records that were moved out of here",
                        hint="use the newest file: run move-out where the records are now")  # fmt: skip


def move_in(pod: Pod, source: BinaryIO, report: Report) -> None:
    """Load records into this database, compare them with what was written, and start slurmdbd."""
    what = "load the records"
    file = mark_file(pod)
    with _hold_lock(pod, what):
        _check_active(what)
        line = source.readline(LONGEST_HEAD)
        head = head_of_line(line)
        mark, base, cluster = read_mark(file), database(pod), _cluster(pod)
        check_place(what, file, mark, base.place)
        if (mark.phase, mark.token) == (IN, head.token):
            report("these records were loaded before: nothing was changed")
            _start()
            return
        check_target(mark, head, base.counts(), cluster)
        _check_release(pod, head)
        if pod.accounting == "embedded":
            _check_room(pod, head)
        replaces = mark.token if mark.phase == OUT else mark.replaces
        loading = RecordsMark(LOADING, head.token, head.history, replaces, place=base.place)
        ran = _stop(what)
        try:  # slurmdbd may have acknowledged records since the first look
            counts = base.counts()
            check_target(mark, head, counts, cluster)
        except MoveError:
            if ran:
                _request_start()
            raise
        _write_mark(file, loading)
        _update_condition(pod)
        base.clear(counts)
        _load(base, source, line)
        problem = difference(head.counts, base.counts())
        if problem:
            raise MoveError(what, problem, hint="run this again; the database stays closed until all are there")
        _write_mark(file, replace(loading, phase=IN, replaces=""))
        _update_condition(pod)
        report(f"{counted(head.jobs, 'job')} in {counted(len(head.counts), 'table')} loaded, as many as were written")
        _start()


def difference(written: Mapping[str, int], loaded: Mapping[str, int]) -> str:
    for table in sorted({*written, *loaded}):
        if written.get(table) != loaded.get(table):
            return f"{table} has {loaded.get(table, 'no')} rows, expected {written.get(table, 'none')}"
    return ""


def _check_release(pod: Pod, head: RecordsHead) -> None:
    release = read_release(pod)
    if release is not None:
        reason, hint = slurm.refusal(release, head.protocol or None, "the file of records")
        if reason:
            raise ConfigError("load the records", reason, hint=hint)


def _check_room(pod: Pod, head: RecordsHead) -> None:
    """Refuse what would fill the volume; slurmctld's state may be on it. The tables here now are replaced."""
    needed = head.size + head.size // 2 - measure_size(pod.path(TABLES))
    try:
        check_room(pod.path(DATA), max(needed, 0), "load the records")
    except CopyError as error:
        raise MoveError(error.what, error.why, file=error.file, hint="use a larger volume") from None


def _load(base: RecordsDatabase, source: BinaryIO, line: bytes) -> None:
    """Feed the client all but the last line, which proves that everything came."""
    argv = [accounting.CLIENT, *base.options, base.name]
    digest, held, ended = hashlib.sha256(line), b"", False
    # A file, not a pipe: with its error the client writes the whole statement, and reads on only after that.
    with tempfile.TemporaryFile() as errors:
        with subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=errors, env=base.env
        ) as client:
            assert client.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # its error says why
                while chunk := source.read(CHUNK):
                    held += chunk
                    part, held = held[:-TAIL_SIZE], held[-TAIL_SIZE:]
                    digest.update(part)
                    client.stdin.write(part)
                ended = True
            with contextlib.suppress(BrokenPipeError):
                client.stdin.close()
        if ended and held != TAIL + digest.hexdigest().encode() + b"\n":
            raise MoveError("load the records", "the file is not whole: its last line is missing or does not fit",
                            hint="write it again: minivm accounting move-out")  # fmt: skip
        if client.returncode:
            errors.seek(0)
            error = re.search(
                rb"^ERROR .*", errors.read(), re.MULTILINE
            )  # without the statement, which has users' data
            text = error[0].decode(errors="replace")[-400:] if error else f"exit code {client.returncode}"
            raise MoveError("load the records", text, hint="when that is mended run this again")


def reopen(pod: Pod) -> str:
    """Let slurmdbd use a database again whose records were written out and not loaded anywhere."""
    file = mark_file(pod)
    with _hold_lock(pod, "reopen the database"):
        _check_active("reopen the database")
        mark = read_mark(file)
        if mark.phase != OUT:
            problem = {LOADING: "records are being loaded into it", IN: "it is in use", "": "it is in use"}[mark.phase]
            raise MoveError("reopen the database", problem)
        if mark.place:
            check_place("reopen the database", file, mark, database(pod, answers=False).place)
        # Without this move: a file that was written by it is no longer an ancestor of these records.
        _write_mark(file, RecordsMark(IN, "", mark.history[:-1], place=mark.place))
        _update_condition(pod)
        _start()
    return "slurmdbd uses this database again"
