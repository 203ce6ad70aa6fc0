"""Prove a copy: restore it into a throw-away slurmctld and compare its jobs with those that the copy must hold.

With a dump a throw-away MariaDB and slurmdbd serve it. All run as an unprivileged user in a temporary directory, with a
munge key of their own and no network but their own ports on loopback (init.state.sandbox). They schedule nothing and
run none of the site's programs.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from ground.errors import counted
from ground.files import locked, read_plain, write_whole
from init.errors import InitError
from init.fields import number
from init.pod.pod import Pod, user
from init.slurm.conf import MAIN, PAIR, RECORDS, whole_lines
from init.slurm.daemon import objection
from init.slurm.place import read_release
from init.state import copies, sandbox
from init.state.copies import ACCOUNTING, CONFIG, JOBS_LIST, STATE_TAR, CopyError, Manifest, Proof
from init.state.restore import UNPACKED, check_fits, unpack
from init.state.save import USER_NAME, check_room

# An account of Debian that runs nothing in a pod. Slurm 26.05 does not take `nobody` for SlurmUser.
USER = "_apt"
ROOT = Path("/var/tmp")
START_WITHIN = 300.0
STOP_WITHIN = 10.0
PAUSE = 0.2
MOST_TOLD = 5
LARGEST_LIST = 1 << 30
# What a throw-away slurmctld has of its own, or must not have.
OWN = re.compile(
    r"slurmctldhost|controlmachine|controladdr|backup.*|slurmctldport|slurmctldaddr|slurmdport|slurmuser|slurmduser"
    r"|statesavelocation|slurmctldpidfile|slurmctldlogfile|slurmctldsyslogdebug|slurmctlddebug|slurmschedlog.*|authtype"
    r"|authinfo|authalt.*|credtype|accountingstorage(type|host|port|pass|backuphost|externalhost|parameters)"
    r"|jobcomp.*|jobsubmitplugins|scheduler.*|slurmctldparameters|communicationparameters|.*program|.*prog|.*prolog.*"
    r"|.*epilog.*|prep.*plugins|burstbuffer.*|acctgather.*|jobacctgather.*|federationparameters|fedparameters|metricstype"
    r"|plugstackconfig|mpiparams|mcs.*|nodefeaturesplugins|slurmctldtimeout|slurmdtimeout|include|debugflags|plugindir"
    r"|tls.*|cert.*|clifilterplugins|hashplugin"
)
# The part of that which keeps even a client from reading the file, or that a client would load.
UNREADABLE = re.compile(
    r"slurmctldhost|controlmachine|controladdr|backup.*|slurmctldport|slurmctldaddr|authtype|authinfo|authalt.*|credtype"
    r"|plugindir|plugstackconfig|clifilterplugins|hashplugin|tls.*|cert.*|include"
)
CLIENT_CONF = """
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={closed}
AuthType=auth/munge
AuthInfo=socket={root}/munge/socket
"""
ADDRESS = re.compile(r"\s(?:nodeaddr|nodehostname|port|bcastaddr)\s*=\s*\S+", re.IGNORECASE)
CONF = """
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={slurmctld}
SlurmdPort={closed}
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={root}/state
SlurmctldPidFile={root}/slurmctld.pid
SlurmctldTimeout=300
SlurmdTimeout=65533
AuthType=auth/munge
AuthInfo=socket={root}/munge/socket
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=-1,defer
MailProg=/bin/true
"""
DBD = """\
AuthType=auth/munge
AuthInfo=socket={root}/munge/socket
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={slurmdbd}
SlurmUser={user}
PidFile={root}/slurmdbd.pid
LogFile={root}/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser={user}
StorageLoc=slurm_acct_db
"""


def prove(
    pod: Pod, directory: Path, manifest: Manifest, *, now: Callable[[], float] = time.time, within: float = START_WITHIN
) -> Proof:
    """Prove a copy and record the result beside it; an error of the copy or of its daemons is a result, too."""
    try:
        copies.verify(directory, manifest)
        check_here(manifest)
        proof = Proof(now(), True, _proven(pod, directory, manifest, within))
    except NotHere:
        raise
    except (InitError, OSError, ValueError, subprocess.SubprocessError) as error:
        proof = Proof(now(), False, str(error))
    copies.record_proof(directory, manifest.name, proof)
    return proof


class NotHere(CopyError):
    """This pod cannot prove a copy, which says nothing about the copy."""


def check_here(manifest: Manifest) -> None:
    """Raise where the daemons could reach a network."""
    if not sandbox.is_possible():
        raise NotHere(
            f"prove {manifest.name}",
            "this kernel cannot keep a program from the network (Landlock of 6.7 on)",
            hint="its files are whole; prove the copy in a pod on another machine",
        )


def configuration(files: Mapping[str, bytes], values: Mapping[str, object], *, accounting: bool) -> str:
    """Return the throw-away's slurm.conf: the cluster's, without its places, keys and programs. Pure."""
    text = CONF
    if accounting:
        text += "AccountingStorageType=accounting_storage/slurmdbd\nAccountingStorageHost=127.0.0.1\n"
        text += "AccountingStoragePort={slurmdbd}\nAccountingStoragePass={root}/munge/socket\n"
    pattern = OWN if accounting else re.compile(rf"{OWN.pattern}|accountingstorage.*")
    return _without(pattern, files) + text.format(**values)


def _without(pattern: re.Pattern[str], files: Mapping[str, bytes]) -> str:
    """Return slurm.conf in one file, without the settings of that pattern."""
    lines = []
    for line in whole_lines(files):
        kind, _, name = (part.strip().lower() for part in line.partition("="))
        if kind in RECORDS:
            # slurmctld waits ten seconds for each node whose name does not resolve, and drops it.
            is_node = kind == "nodename" and not re.match(r"default\b", name)
            lines.append(f"{ADDRESS.sub('', line)} NodeAddr=127.0.0.1" if is_node else line)
            continue
        for written, value in PAIR.findall(line):  # a line may have several
            key = written.lower().rstrip("+-*/")  # Slurm also takes KEY+=VALUE
            if not pattern.fullmatch(key):
                lines.append(f"{written}={value}")
    return "\n".join(lines)


class Daemons:
    """The throw-away daemons, started one by one and stopped in reverse."""

    def __init__(self, root: Path, ports: Mapping[str, int]) -> None:
        self.root, self.ports = root, ports
        self.owner = user(USER)
        self.running: list[tuple[str, subprocess.Popen[bytes]]] = []
        # Seconds until each answered.
        self.took: dict[str, float] = {}
        # Files beside slurm.conf, of the last configuration.
        self.placed: frozenset[str] = frozenset()

    def command(self, argv: Iterable[str]) -> list[str]:
        ports = ",".join(str(self.ports[name]) for name in ("slurmctld", "slurmdbd"))
        return [sys.executable, "-I", "-m", "init.state.sandbox", ports, *argv]

    @property
    def env(self) -> dict[str, str]:
        return {
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            "LC_ALL": "C.UTF-8",
            "SLURM_CONF": str(self.root / "slurm.conf"),
            "HOME": str(self.root),
        }

    def start(self, name: str, *argv: str) -> None:
        with (self.root / f"{name}.out").open("wb") as log:
            process = subprocess.Popen(
                self.command(argv),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.env,
                user=self.owner[0],
                group=self.owner[1],
                extra_groups=[],
                cwd=self.root,
                start_new_session=True,
            )
        self.running.append((name, process))

    def ask(self, *argv: str, within: float = 60.0, conf: str = "slurm.conf") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(argv),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            errors="replace",
            env={**self.env, "SLURM_CONF": str(self.root / conf)},
            user=self.owner[0],
            group=self.owner[1],
            extra_groups=[],
            cwd=self.root,
            timeout=within,
        )

    def wait(self, what: str, is_there: Callable[[], bool], until: float) -> None:
        begun = time.monotonic()
        while not is_there():
            ended = [name for name, process in self.running if process.poll() is not None]
            if ended or time.monotonic() > until:
                name = ended[0] if ended else self.running[-1][0]
                problem = (
                    f"the throw-away {name} {'ended' if ended else f'is late with {what}'}: {self._last_line(name)}"
                )
                raise CopyError("prove the copy", problem)
            time.sleep(PAUSE)
        self.took[self.running[-1][0]] = time.monotonic() - begun

    def _last_line(self, name: str) -> str:
        text = (self.root / f"{name}.out").read_text(errors="replace")
        lines = [line for line in text.splitlines() if line.strip()]
        fatal = [line for line in lines if "fatal" in line or "error" in line.lower()]
        if fatal and "Unable to process configuration file" in fatal[-1]:
            del fatal[:-3]  # the lines before tell which setting
            return "; ".join(fatal)[-300:]
        return (fatal or lines or ["it said nothing"])[-1][-300:]

    def is_running(self, name: str) -> bool:
        return any(known == name for known, _ in self.running)

    def stop(self) -> None:
        while self.running:
            self.stop_last()

    def stop_last(self) -> None:
        _, process = self.running.pop()
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            process.wait(STOP_WITHIN)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _proven(pod: Pod, directory: Path, manifest: Manifest, within: float) -> str:
    with throw_away(pod, directory, manifest, within) as (daemons, accounted, until):
        if not manifest.has_state:
            return accounted
        return f"{_compare_jobs(directory, manifest, start_and_list_jobs(daemons, until))}; {accounted}".removesuffix(
            "; "
        )


@contextlib.contextmanager
def throw_away(pod: Pod, directory: Path, manifest: Manifest, within: float) -> Iterator[tuple[Daemons, str, float]]:
    """Restore a copy into throw-away daemons, all but slurmctld started.

    Also yields what the restored database holds ("" without one), and the time at which slurmctld must answer.
    """
    file = str(directory / manifest.name / copies.MANIFEST)
    check_fits(manifest, f"ClusterName={manifest.cluster}\n", read_release(pod), file)
    until = time.monotonic() + within
    files = read_copied_files(directory, manifest)
    with _temporary(directory / manifest.name) as root, _ports(4) as numbers:
        ports = dict(zip(("slurmctld", "slurmdbd", "closed", "spare"), numbers, strict=True))
        daemons = Daemons(root, ports)
        _place(daemons, directory, manifest, files)
        try:
            _start_munged(daemons, until)
            accounted = ""
            if manifest.has_accounting:
                conf_of_slurmdbd = DBD.format(**ports, root=root, user=USER)
                accounted = _prove_accounting(daemons, directory, manifest, conf_of_slurmdbd, until)
            yield daemons, accounted, until
        finally:
            daemons.stop()


@contextlib.contextmanager
def _temporary(copy: Path) -> Iterator[Path]:
    """Make a directory that only the throw-away's user can enter, with room for the unpacked copy."""
    needed = sum(path.stat().st_size * (UNPACKED if path.name == ACCOUNTING else 1) for path in copy.iterdir())
    check_room(ROOT, needed + (200 << 20), "prove the copy")
    for leftover in ROOT.glob("minivm-proof-*"):
        with _lock(leftover) as is_over:
            if is_over:
                shutil.rmtree(leftover, ignore_errors=True)  # of a proof that was killed
    root = Path(tempfile.mkdtemp(prefix="minivm-proof-", dir=ROOT))
    try:
        with _lock(root):
            os.chown(root, *user(USER))
            yield root
    finally:
        shutil.rmtree(root, ignore_errors=True)


@contextlib.contextmanager
def _lock(directory: Path) -> Iterator[bool]:
    """Hold the lock of a throw-away's directory; yield False if another proof or rehearsal holds it."""
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        yield False
        return
    try:
        yield locked(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def _ports(count: int) -> Iterator[list[int]]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    numbers = [each.getsockname()[1] for each in sockets]
    for each in sockets[:2]:
        each.close()
    try:
        yield numbers  # the remaining ports stay bound and closed: no daemon of the pod answers there
    finally:
        for each in sockets[2:]:
            each.close()


def _write_files(root: Path, files: Mapping[str, bytes], owner: tuple[int, int]) -> None:
    for name, data in files.items():
        write_whole(root / Path(name).name, data, 0o600, owner)  # never through a link: the daemons own the directory


def _unpack_state(directory: Path, manifest: Manifest, root: Path, owner: tuple[int, int]) -> None:
    state = root / "state"
    shutil.rmtree(state, ignore_errors=True)
    state.mkdir(mode=0o700)
    unpack(directory / manifest.name / STATE_TAR, manifest, state, owner)
    os.chown(state, *owner)
    # Triggers run programs. The cluster's number is slurmdbd's to give, and without one there is none.
    (state / "trigger_state").unlink(missing_ok=True)
    (state / "clustername").write_text(manifest.cluster.lower())
    os.chown(state / "clustername", *owner)


def _start_munged(daemons: Daemons, until: float) -> None:
    """Start a munged whose key exists only here: no daemon of the real cluster accepts what it signs."""
    place = daemons.root / "munge"
    place.mkdir(mode=0o755)
    key = place / "key"
    key.touch(0o600)
    key.write_bytes(os.urandom(128))
    for path in (place, key):
        os.chown(path, *daemons.owner)
    # munged wants directories above its socket that no other user writes to, and /var/tmp is sticky.
    daemons.root.chmod(0o711)
    files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    argv = [f"--{option}={place / name}" for option, name in files.items()]
    daemons.start("munged", "/usr/sbin/munged", "--foreground", "--num-threads=2", *argv)
    daemons.wait("its socket", (place / "socket").exists, until)


def place_again(daemons: Daemons, directory: Path, manifest: Manifest, conf: Mapping[str, bytes]) -> None:
    """Stop slurmctld if it runs, and put the copy's state and these files in place for its next start."""
    if daemons.is_running("slurmctld"):
        daemons.stop_last()
    _place(daemons, directory, manifest, conf)


def find_objection(daemons: Daemons, files: Mapping[str, bytes]) -> str:
    """Return why Slurm cannot read these files, or "": the throw-away slurmctld reads only a part of slurm.conf."""
    text = _without(UNREADABLE, files) + CLIENT_CONF.format(**daemons.ports, root=daemons.root)
    _write_files(daemons.root, {"slurm-whole.conf": text.encode("utf-8", "surrogateescape")}, daemons.owner)
    answer = daemons.ask("/usr/bin/scontrol", "ping", conf="slurm-whole.conf")
    return objection(answer.stderr, str(daemons.root))


def _place(daemons: Daemons, directory: Path, manifest: Manifest, files: Mapping[str, bytes]) -> None:
    """Put the copy's state and these files in place."""
    values = {**daemons.ports, "root": daemons.root, "user": USER}
    for name in daemons.placed - files.keys():
        (daemons.root / Path(name).name).unlink(missing_ok=True)
    daemons.placed = frozenset(files)
    conf = configuration(files, values, accounting=manifest.has_accounting)
    _write_files(daemons.root, {**files, MAIN: conf.encode("utf-8", "surrogateescape")}, daemons.owner)
    if manifest.has_state:
        _unpack_state(directory, manifest, daemons.root, daemons.owner)


def start_and_list_jobs(daemons: Daemons, until: float) -> dict[str, str]:
    """Start slurmctld and return its unfinished jobs."""
    daemons.start("slurmctld", "/usr/sbin/slurmctld", "-D", "-f", str(daemons.root / "slurm.conf"))
    restored: dict[str, str] = {}

    def answers() -> bool:
        done = daemons.ask(*copies.SQUEUE)
        if done.returncode == 0:
            restored.update(copies.parse_jobs(done.stdout))
        return done.returncode == 0

    daemons.wait("an answer", answers, until)
    return restored


def read_copied_files(directory: Path, manifest: Manifest) -> dict[str, bytes]:
    """Return the copy's slurm.conf and the files beside it."""
    texts = json.loads(read_plain(directory / manifest.name / CONFIG, LARGEST_LIST) or b"{}")
    return {str(name): str(text).encode("utf-8", "surrogateescape") for name, text in texts.items()}


def read_listed_jobs(directory: Path, manifest: Manifest) -> copies.JobsAround | None:
    """Return the jobs that the copy must hold; None if it has no list."""
    if not manifest.listed:
        return None
    listed = json.loads(read_plain(directory / manifest.name / JOBS_LIST, LARGEST_LIST) or b"")
    return copies.JobsAround(listed["settled"], frozenset(listed["changing"]))


def read_listed_users(directory: Path, manifest: Manifest) -> dict[str, tuple[int, int]]:
    """Return the users whom slurmctld knew when the copy was made, with their numbers."""
    listed = json.loads(read_plain(directory / manifest.name / JOBS_LIST, LARGEST_LIST) or b"{}")
    return {
        str(name): (int(uid), int(gid))
        for name, (uid, gid) in listed.get("users", {}).items()
        if USER_NAME.fullmatch(name)
    }


def _compare_jobs(directory: Path, manifest: Manifest, restored: Mapping[str, str]) -> str:
    if (expected := read_listed_jobs(directory, manifest)) is None:
        return f"{counted(len(restored), 'unfinished job')} restored; the copy has no list to compare with"
    different = copies.list_differences(expected, restored)
    if different:
        more = f" and {len(different) - MOST_TOLD} more" if len(different) > MOST_TOLD else ""
        raise CopyError("prove the copy", "; ".join(different[:MOST_TOLD]) + more)
    ended = copies.count_unlisted(expected, restored)
    more = f", and {ended} had just ended" if ended else ""
    return f"{counted(len(expected.settled), 'unfinished job is', 'unfinished jobs are')} the same{more}"


def _prove_accounting(daemons: Daemons, directory: Path, manifest: Manifest, conf: str, until: float) -> str:
    """Load the copy's dump into a throw-away database, count its jobs, and serve it by slurmdbd."""
    root, connection = daemons.root, daemons.root / "mysql.sock"
    client = ("/usr/bin/mariadb", "--no-defaults", f"--socket={connection}", "--batch", "--skip-column-names")
    _start_mariadb(daemons, connection, client, until)
    _load_dump(daemons, directory / manifest.name / ACCOUNTING, client)
    (root / "slurmdbd.conf").touch(0o600)
    (root / "slurmdbd.conf").write_text(f"{conf}StoragePort=3306\n")
    os.chown(root / "slurmdbd.conf", *daemons.owner)
    table = f"`{manifest.cluster.lower()}_job_table`"
    answer = daemons.ask(*client, f"--execute=SELECT COUNT(*) FROM {table}", "slurm_acct_db")
    rows = number(answer.stdout.strip())
    low, high = manifest.accounted
    if rows is None or not low <= rows <= max(low, high):
        raise CopyError("prove the copy", f"the accounting dump has {rows} jobs, expected {low} to {high}")
    return counted(rows, "accounted job") + _prove_slurmdbd(daemons, connection, until)


def _start_mariadb(daemons: Daemons, connection: Path, client: Sequence[str], until: float) -> None:
    """Start a MariaDB with an empty database, reached by the socket `connection` alone."""
    data, root = daemons.root / "mysql", daemons.root
    install = daemons.ask(
        "/usr/bin/mariadb-install-db",
        "--no-defaults",
        "--skip-test-db",
        "--skip-log-bin",
        "--auth-root-authentication-method=socket",
        f"--auth-root-socket-user={USER}",
        f"--datadir={data}",
        within=120.0,
    )
    if install.returncode:
        raise CopyError("prove the copy", f"mariadb-install-db: {install.stderr.strip()[-300:]}")
    setup = root / "setup.sql"
    # mariadbd reads one statement per line.
    setup.write_text(
        "CREATE DATABASE IF NOT EXISTS slurm_acct_db;\n"
        f"CREATE USER IF NOT EXISTS {USER}@localhost IDENTIFIED VIA unix_socket;\n"
        f"GRANT ALL ON *.* TO {USER}@localhost;\n"
    )
    setup.chmod(0o644)
    daemons.start(
        "mariadbd",
        "/usr/sbin/mariadbd",
        "--no-defaults",
        f"--datadir={data}",
        f"--socket={connection}",
        f"--pid-file={root}/mysql.pid",
        "--skip-networking",
        f"--init-file={setup}",
        "--innodb-buffer-pool-size=64M",
        "--loose-innodb-buffer-pool-size-max=64M",
        "--innodb-lock-wait-timeout=900",
        "--innodb-snapshot-isolation=OFF",
        "--max-allowed-packet=16M",
    )
    daemons.wait(
        "its database", lambda: daemons.ask(*client, "--execute=SELECT 1", "slurm_acct_db").returncode == 0, until
    )


def _load_dump(daemons: Daemons, dump: Path, client: Sequence[str]) -> None:
    plain = daemons.root / "dump.sql"
    with gzip.open(dump, "rb") as packed, plain.open("wb") as file:
        shutil.copyfileobj(packed, file)
    os.chown(plain, *daemons.owner)
    loaded = daemons.ask(*client, f"--execute=SOURCE {plain}", "slurm_acct_db", within=3600.0)
    if loaded.returncode:
        raise CopyError("prove the copy", f"the accounting dump: {loaded.stderr.strip()[-300:]}")
    plain.unlink()


def _prove_slurmdbd(daemons: Daemons, connection: Path, until: float) -> str:
    """Serve the restored database by slurmdbd, and read a job from it."""
    daemons.start("slurmdbd", "/usr/bin/env", f"MYSQL_UNIX_PORT={connection}", "/usr/sbin/slurmdbd", "-D")
    cluster = ("/usr/bin/sacctmgr", "--noheader", "--parsable2", "show", "cluster", "format=cluster")
    daemons.wait("an answer", lambda: daemons.ask(*cluster).returncode == 0, until)
    return " by slurmdbd"
