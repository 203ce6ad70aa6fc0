"""Effects of a changed slurm.conf on the running cluster: differences, lost jobs, restarts, and the saved result.

It asks slurmctld only if something is removed that a job may need; pure additions are evaluated without it.
Experiments showed what slurmctld 24.11 does with jobs whose partition, node or state is gone: they end, at once or at
the next reconfigure, without a notice.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ground.files import read_plain
from init.errors import InitError
from init.pod.pod import write
from init.slurm.conf import MAIN, Configuration, Line, read, words
from init.slurm.daemon import KnownJob, Slurmctld
from init.slurm.files import CANDIDATE, SlurmFiles

# Settings by which slurmctld finds and reads its saved state: when they change, it starts without any jobs.
STATE = ("clustername", "slurmuser", "statesavelocation")
# Settings that slurmctld and the nodes share with what is running, or that tell one side where the other is.
RUNNING = ("authtype", "credtype", "selecttype", "slurmdport", "slurmdspooldir")
# Settings that a daemon reads only at its start, and the pods that must restart.
RESTARTS = {
    "authtype": "every pod, the controller's first",
    "credtype": "every pod, the controller's first",
    "jobacctgathertype": "the workers' pods",
    "mpiparams": "the workers' pods",
    "proctracktype": "the workers' pods",
    "slurmctldport": "every pod, the controller's first",
    "slurmdport": "the workers' pods",
    "slurmdspooldir": "the workers' pods",
    "switchtype": "the workers' pods",
    "taskplugin": "the workers' pods",
}
# Plug-ins that slurmctld loads and a client's test does not, with the beginning of their files' names.
PLUGINS = {
    "accountingstoragetype": "accounting_storage",
    "acctgatherenergytype": "acct_gather_energy",
    "acctgatherfilesystemtype": "acct_gather_filesystem",
    "acctgatherinterconnecttype": "acct_gather_interconnect",
    "authalttypes": "auth",
    "burstbuffertype": "burst_buffer",
    "jobacctgathertype": "jobacct_gather",
    "jobcomptype": "jobcomp",
    "jobsubmitplugins": "job_submit",
    "mcsplugin": "mcs",
    "nodefeaturesplugins": "node_features",
    "preempttype": "preempt",
    "prepplugins": "prep",
    "prioritysitefactorplugin": "site_factor",
    "prioritytype": "priority",
    "schedulertype": "sched",
    "selecttype": "select",
    "switchtype": "switch",
    "topologyplugin": "topology",
}
# Plug-ins that only workers, logins and job steps load: their images may have more of them than the controller's.
PLUGINS_ELSEWHERE = {
    "clifilterplugins": "cli_filter",
    "jobcontainertype": "job_container",
    "mpidefault": "mpi",
    "proctracktype": "proctrack",
    "taskplugin": "task",
}
# Kinds of which slurmctld refuses `none` (measured with 24.11); of the others `none` needs no file.
WITHOUT_NONE = ("auth", "burst_buffer", "job_submit", "node_features", "prep", "priority", "sched", "select")
# Kinds that Slurm takes also without the kind before the name, as in JobSubmitPlugins=lua; `mpi` without it only. All
# others need it (measured with 24.11 and 26.05).
BARE = (
    "acct_gather_energy", "acct_gather_interconnect", "burst_buffer", "cli_filter", "job_container", "job_submit",
    "mcs", "mpi", "node_features", "prep", "task",
)  # fmt: skip
# Values of TopologyPlugin with which slurmctld ends a minute after its start if there is none of the files.
NEED_A_FILE = ("topology/tree", "topology/block")
TOPOLOGY_FILES = ("topology.conf", "topology.yaml")
SHOWN = 10  # jobs listed by number; the rest is counted
# Defaults: most jobs that slurmctld knows at once, and the range of job numbers.
MOST_JOBS, FIRST_JOB, LAST_JOB = 10_000, 1, 0x03FF0000

JUDGEMENT = Path("/run/minivm/slurm-config.json")
LARGEST_STATE = 1 << 30  # bytes, enough for 200,000 jobs
LONGEST_NAME = 4096
LIVE, REFUSED, PENDING = "live", "refused", "pending"

# Words separated by commas, up to a zero byte. Anchored at the start and possessive: the state also contains a job's
# arguments and its submit line, up to a hundred thousand bytes chosen by its user.
LISTED = re.compile(rb"(?<![\w.,-])[\w.,-]++(?=\x00)")

EndsJob = Callable[[KnownJob], bool]


@dataclass(frozen=True, slots=True)
class Loss:
    """Something that is removed, and the jobs that end with it; None: unknown, because slurmctld did not answer."""

    what: str
    jobs: tuple[str, ...] | None

    def __str__(self) -> str:
        if self.jobs is None:
            return f"{self.what}, and slurmctld did not answer which jobs that ends"
        return f"{self.what}: {job_list(self.jobs)}" if self.jobs else self.what


@dataclass(frozen=True, slots=True)
class Effect:
    changes: tuple[str, ...]
    losses: tuple[Loss, ...]
    restarts: tuple[str, ...]

    @property
    def cost(self) -> str:
        """Describe the losses in one sentence; "" without any."""
        return "; ".join(str(loss) for loss in self.losses)


def job_list(jobs: Sequence[str]) -> str:
    some = ", ".join(jobs[:SHOWN]) + (", ..." if len(jobs) > SHOWN else "")
    return f"job {some}" if len(jobs) == 1 else f"{len(jobs)} jobs ({some})"


def effect(
    old: Mapping[str, bytes],
    new: Mapping[str, bytes],
    jobs: Sequence[KnownJob] | None,
    hidden: Sequence[str] = (),
    known: int | None = None,
) -> Effect:
    """Compare two configurations.

    `hidden`: partition lists of running jobs, of which Slurm shows only the partition in use. `known`: the number of
    jobs that slurmctld knows, including recently ended ones and each array task.
    """
    before, after = read(old), read(new)
    losses = []
    for what, ends in removals(before, after):
        if jobs is None:
            losses.append(Loss(what, None))
        elif lost := tuple(job.id for job in jobs if ends(job)):
            losses.append(Loss(what, lost))
    losses += [
        Loss(f"partition {name} goes: running jobs that were submitted to {submitted}", ())
        for name in sorted(before.partitions.keys() - after.partitions.keys())
        for submitted in sorted(hidden)
        if name in submitted.split(",")
    ]
    losses += _forgotten(before, after, known)
    files = sorted(name for name in {*old, *new} if name != MAIN and old.get(name) != new.get(name))
    changed = [*changes(before, after), *(f"{name}: {_file_change(old, new, name)}" for name in files)]
    return Effect(tuple(changed), tuple(losses), tuple(_restarts(before, after)))


def impossible_settings(new: Configuration, saved_of: str) -> str:
    """Return errors that slurmctld would report but a client ignores; `saved_of`: the cluster of the saved state."""
    errors = []
    name = new.value("clustername").lower()
    if saved_of and name and name != saved_of:
        errors.append(
            f"ClusterName is {name}, and the state in StateSaveLocation is that of {saved_of}: a cluster keeps its name"
        )
    lists = [("NodeName", hosts_) for hosts_ in new.nodes]
    lists += [(f"partition {name}: Nodes", line.get("nodes", "")) for name, line in new.partitions.items()]
    for where, hosts in lists:
        if hosts.count("[") != hosts.count("]"):
            errors.append(f"{where}={hosts}: a bracket is not closed, or not opened")
    return "; ".join(errors)


def find_missing_plugins(new: Configuration, present: frozenset[str]) -> str:
    """Return an error for each plug-in that slurmctld would load and that is not among these (`priority_basic`)."""
    lines = [
        f"{line}: this Slurm has no plug-in {plugin}, but {names}"
        for line, plugin, names in _find_missing(new, present, PLUGINS)
    ]
    return "; ".join([*lines, *_find_misspelled(new, present)])


def _find_misspelled(new: Configuration, present: frozenset[str]) -> Iterator[str]:
    """Yield an error for each plug-in that exists, but that Slurm does not find as written: SchedulerType=backfill."""
    for key, kind in (PLUGINS | PLUGINS_ELSEWHERE).items():
        for word in sorted(new.words(key)):
            name = word.rpartition("/")[2]
            expected = [name] if kind in BARE else []
            expected += [f"{kind}/{name}"] if kind != "mpi" else []
            if f"{kind}_{name}" in present and word not in expected:
                yield (
                    f"slurm.conf: {new.names[key]}: found {word}, expected {expected[0]}: Slurm finds this plug-in by"
                    " that name only; correct the line"
                )


def find_missing_topology(files: Mapping[str, bytes]) -> str:
    """Return an error for a TopologyPlugin without its file: slurmctld looks for it for a minute and ends."""
    new = read(files)
    plugin = new.value("topologyplugin")
    if plugin not in NEED_A_FILE or any(name in files for name in TOPOLOGY_FILES):
        return ""
    return (
        f"topology.conf: found no such file, expected one for TopologyPlugin={plugin} in slurm.conf: slurmctld ends"
        " without it; set slurm.topologyConfig, or remove the line"
    )


def warn_about_elsewhere(new: Configuration, present: frozenset[str]) -> list[str]:
    """Warn about each plug-in for other pods that this image lacks; those pods' images may have it."""
    return [
        f"unknown: {line}: this image has no plug-in {plugin}, but {names}; pods that lack it too run no job"
        for line, plugin, names in _find_missing(new, present, PLUGINS_ELSEWHERE)
    ]


def _find_missing(
    new: Configuration, present: frozenset[str], kinds: Mapping[str, str]
) -> Iterator[tuple[str, str, str]]:
    """Yield each line with a missing plug-in, that plug-in, and the names that exist of its kind."""
    for key, kind in kinds.items():
        names = sorted(file.removeprefix(f"{kind}_") for file in present if file.startswith(f"{kind}_"))
        without_file = () if kind in WITHOUT_NONE else ("none",)
        if "topology_flat" in present and kind == "topology":
            without_file = (*without_file, "default")  # its name before 25.05, which Slurm still takes
        for word in sorted(new.words(key)):
            name = word.partition("/")[2] or word
            if names and name not in (*without_file, *names):
                yield f"{new.names[key]}={new.value(key)}", f"{kind}/{name}", ", ".join(names)


_PARAMETER = re.compile(rb"\0([a-z]{2,16}_[a-z_]{2,32})(?==?\0)")
# Read by programs that a controller's image does not have: slurmd, srun, salloc and sbatch.
ELSEWHERE = frozenset({
    "conmgr_threads", "default_gbytes", "disable_hetjob_steps", "enable_hetjob_steps", "ignore_numa", "no_env_cache",
    "requeue_setup_env_fail", "salloc_wait_nodes", "sbatch_wait_nodes", "time_min_as_soft_limit",
})  # fmt: skip


def find_unknown_parameters(new: Configuration, programs: bytes) -> list[str]:
    """List the SchedulerParameters that Slurm's programs do not contain: slurmctld ignores them without a word.

    `programs`: the bytes of slurmctld, its library and its plug-ins.
    """
    parameters = {word.partition("=")[0].strip() for word in new.words("schedulerparameters")}
    lower = programs.lower() if parameters else b""
    unknown = sorted(
        name
        for name in parameters
        if name.lower() not in ELSEWHERE
        and not any(b"\0%s%s" % (name.lower().encode(), end) in lower for end in (b"\0", b"="))
    )
    accepted = (
        sorted({text.decode() for text in _PARAMETER.findall(programs)} | ELSEWHERE | {"defer"}) if unknown else []
    )
    from difflib import get_close_matches  # imported late: only a typo needs it

    lines = []
    for name in unknown:
        close = get_close_matches(name, accepted, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        lines.append(f"ignored: SchedulerParameters: this Slurm has no {name[:64]!r}{hint}")
    return lines


def removals(old: Configuration, new: Configuration) -> Iterator[tuple[str, EndsJob]]:
    """Yield each removal with a predicate for the jobs that end with it."""
    yield from _settings(old, new)
    for name in sorted(old.partitions.keys() - new.partitions.keys()):
        yield f"partition {name} goes", lambda job, name=name: name in job.partitions  # type: ignore[misc]
    removed = old.nodes.keys() - new.nodes.keys()
    if removed:
        shown = ", ".join(sorted(removed)[:SHOWN]) + (", ..." if len(removed) > SHOWN else "")
        yield f"node {shown} goes", lambda job: bool((job.nodes | job.wanted) & removed)
    # Dynamic nodes have no line; this number limits them.
    if new.number("maxnodecount", 0) < old.number("maxnodecount", 0):
        listed = new.nodes.keys() | old.nodes.keys()
        yield (
            f"MaxNodeCount {old.value('maxnodecount')} becomes {new.value('maxnodecount') or 'none'}, and nodes that"
            " registered themselves may find no room",
            lambda job: bool(job.nodes - listed),
        )
    for name in sorted(old.words("grestypes") - new.words("grestypes")):
        yield f"gres {name} goes", lambda job, name=name: name in job.gres  # type: ignore[misc]
    for name in sorted(old.partitions.keys() & new.partitions.keys()):
        yield from _excluded_jobs(name, old.partitions[name], new.partitions[name])


def _settings(old: Configuration, new: Configuration) -> Iterator[tuple[str, EndsJob]]:
    enforced = new.words("accountingstorageenforce") - {"none"}
    if enforced and not old.words("accountingstorageenforce") - {"none"}:
        # Running jobs continue.
        what = f"AccountingStorageEnforce becomes {','.join(sorted(enforced))}, and who has no account is not let in"
        yield what, lambda job: not job.holds and not job.account
    for key in (*STATE, *RUNNING):
        # A setting that one side leaves to Slurm's default is not compared: writing the default explicitly changes
        # nothing.
        if key in old.settings and key in new.settings and old.value(key) != new.value(key):
            what = f"{old.names[key]} {old.value(key)} becomes {new.value(key)}"
            if key in STATE:
                yield f"{what}, and the saved jobs are not found again", lambda job: True
            else:
                yield f"{what}, and what runs is not found again", lambda job: job.holds


def has_less_room(old: Configuration, new: Configuration) -> bool:
    """Tell if slurmctld may keep fewer jobs than before."""
    return _room(new) < _room(old)


def _room(configuration: Configuration) -> int:
    return min(configuration.number("maxjobcount", MOST_JOBS), _numbers(configuration))


def _numbers(configuration: Configuration) -> int:
    """Return the number of job ids: slurmctld knows no more jobs than that, even with a larger MaxJobCount."""
    return configuration.number("maxjobid", LAST_JOB) - configuration.number("firstjobid", FIRST_JOB) + 1


def _forgotten(old: Configuration, new: Configuration, known: int | None) -> Iterator[Loss]:
    """Yield the loss if the limit shrinks: slurmctld reloads jobs up to the limit and silently drops the rest."""
    if not has_less_room(old, new):
        return
    cause = " (the numbers from FirstJobId to MaxJobId)" if _room(new) == _numbers(new) else ""
    what = f"MaxJobCount {_room(old)} becomes {_room(new)}{cause}"
    if known is None:
        yield Loss(what, None)
    elif known >= _room(new):
        yield Loss(f"{what}, and slurmctld forgets jobs beyond it: it knows {known}, ended ones too", ())


def _excluded_jobs(name: str, old: Line, new: Line) -> Iterator[tuple[str, EndsJob]]:
    """Yield waiting jobs that could never start because their account or QOS loses access. Running jobs continue."""

    def waits_in_vain(kind: str, listed: frozenset[str], *, inside: bool) -> EndsJob:
        return lambda job: not job.holds and job.partitions == {name} and (getattr(job, kind) in listed) is inside

    for kind, allow, deny in (("account", "allowaccounts", "denyaccounts"), ("qos", "allowqos", "denyqos")):
        if new.get(allow, "ALL").upper() != "ALL" and new.get(allow) != old.get(allow):
            what = f"partition {name} lets {kind} {new[allow]} in and no other"
            yield what, waits_in_vain(kind, words(new[allow]), inside=False)
        if denied := words(new.get(deny, "")) - words(old.get(deny, "")):
            what = f"partition {name} turns {kind} {','.join(sorted(denied))} away"
            yield what, waits_in_vain(kind, denied, inside=True)


def changes(old: Configuration, new: Configuration) -> Iterator[str]:
    """Yield one line per difference, with values: for people who may read the files."""
    yield from _describe_differing("", old.settings, new.settings, {**new.names, **old.names})
    for kind, before, after in (("partition", old.partitions, new.partitions), ("node", old.nodes, new.nodes)):
        for name in sorted(before.keys() | after.keys()):
            if name not in after:
                yield f"{kind} {name}: goes"
            elif name not in before:
                yield f"{kind} {name}: comes"
            else:
                yield from _describe_differing(f"{kind} {name}: ", before[name], after[name], {})


def _describe_differing(head: str, old: Line, new: Line, names: Mapping[str, str]) -> Iterator[str]:
    for key in sorted(old.keys() | new.keys()):
        if old.get(key) != new.get(key):
            yield f"{head}{names.get(key, key)}: {old.get(key, '-')} -> {new.get(key, '-')}"


def _file_change(old: Mapping[str, bytes], new: Mapping[str, bytes], name: str) -> str:
    return "comes" if name not in old else "goes" if name not in new else "changes"


def _restarts(old: Configuration, new: Configuration) -> Iterator[str]:
    for key, pods in RESTARTS.items():
        if old.value(key) != new.value(key):
            yield f"{(old.names | new.names)[key]}: {pods}"  # type: ignore[operator]


def hidden_lists(state: bytes, partitions: Mapping[str, Line], shown: Sequence[frozenset[str]]) -> tuple[str, ...]:
    """Return partition lists in slurmctld's saved jobs that no job of `shown` has; for a running job it shows only one.

    The state, a few seconds old, is not decoded: a list is a text that ends with a zero byte, and nothing else in the
    state looks like one.
    """
    lists = set()
    for text in LISTED.findall(state):
        first, *rest = text.decode().lstrip(",").split(",")
        # The byte before the text is its length, and may look like a letter.
        name = next((name for name in (first, first[1:]) if name in partitions), "")
        names = {name, *rest}
        if len(names) > 1 and names <= partitions.keys() and names not in shown:
            lists.add(",".join(sorted(names)))  # slurmctld puts the partition in use first
    return tuple(sorted(lists))


class SlurmConfigError(InitError):
    """A configuration is missing or not accepted."""


@dataclass(frozen=True, slots=True)
class SavedJudgement:
    """The saved result for a set of files, by their hash."""

    hash: str
    state: str
    why: str = ""


def assess(files: SlurmFiles, daemon: Slurmctld, candidate: Mapping[str, bytes]) -> Effect:
    """Return changes and losses. A file that is no longer mounted stays installed."""
    old = files.read_installed()
    new = {**old, **candidate}
    first = effect(old, new, None)
    if not first.losses:
        return first
    jobs = daemon.jobs()
    if jobs is None:
        return first
    running = read(old)
    after = read(new)
    goes = running.partitions.keys() - after.partitions.keys()
    state = _read_saved(running, "job_state", LARGEST_STATE) if goes else b""
    hidden = hidden_lists(state, running.partitions, [job.partitions for job in jobs])
    return effect(old, new, jobs, hidden, daemon.known_jobs() if has_less_room(running, after) else None)


def objections(files: SlurmFiles, daemon: Slurmctld, candidate: Mapping[str, bytes], tried: Path = CANDIDATE) -> str:
    """Return every known error of a candidate, which a Slurm client reads below `tried`, or ""."""
    new = read({**files.read_installed(), **candidate})
    saved = _read_saved(new, "clustername", LONGEST_NAME).decode(errors="replace").partition("|")[0]  # NAME|NUMBER
    errors = (
        daemon.objects_to(files.write_candidate(candidate, tried)),
        impossible_settings(new, saved.strip().lower()),
        find_missing_plugins(new, plugins()),
        find_missing_topology({**files.read_installed(), **candidate}),
    )
    return "; ".join(filter(None, errors))


def list_ignored(candidate: Mapping[str, bytes]) -> list[str]:
    """List what slurmctld would ignore without a word: misspelled parameters, and plug-ins of other pods."""
    paths = [Path("/usr/sbin/slurmctld"), *sorted(Path("/usr/lib").glob("*/slurm*/*.so"))]
    new = read(candidate)
    programs = b"".join(data for path in paths if (data := _bytes(path)))
    return [*find_unknown_parameters(new, programs), *warn_about_elsewhere(new, plugins())]


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def plugins() -> frozenset[str]:
    """Return the names of this image's plug-ins of Slurm, without `.so`."""
    return frozenset(path.stem for path in Path("/usr/lib").glob("*/slurm*/*_*.so"))


def _read_saved(configuration: Configuration, name: str, most: int) -> bytes:
    """Read a file of slurmctld's state, to which its user may have written anything; empty if there is none."""
    directory = configuration.value("statesavelocation")
    if not directory:
        return b""
    path = Path(directory, name)
    try:
        return read_plain(path, min(path.lstat().st_size, most)) or b""
    except OSError:
        return b""


def save_judgement(judgement: SavedJudgement, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, json.dumps(asdict(judgement)).encode(), mode=0o600)


def load_judgement(path: Path = JUDGEMENT) -> SavedJudgement | None:
    try:
        data = json.loads(path.read_text())
        return SavedJudgement(str(data["hash"]), str(data["state"]), str(data["why"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
