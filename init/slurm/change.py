"""What a changed configuration does to a cluster that runs: what is different, whom it costs, what has to start anew.

Pure. What slurmctld 24.11 does with jobs whose partition, node or state is gone was seen, not read: they end, at once
or at the next reconfigure, without a word to anybody.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from init.slurm.conf import MAIN, Configuration, Line, read, words
from init.slurm.jobs import Job

# Settings by which slurmctld finds and reads what it has saved: with others it starts as one that knows no jobs.
STATE = ("clustername", "slurmuser", "statesavelocation")
# Settings that slurmctld and the nodes must share with what runs already, or that tell one side where the other is.
RUNNING = ("authtype", "credtype", "selecttype", "slurmdport", "slurmdspooldir")
# Settings that a daemon takes when it starts and at no other time, and who has to start anew.
ANEW = {
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
SHOWN = 10  # jobs by their number; the others are counted
# What holds where nothing is said: of jobs that slurmctld knows at once, of their numbers.
MOST_JOBS, FIRST_JOB, LAST_JOB = 10_000, 1, 0x03FF0000

# Words with commas between them up to a zero. From its beginning and without a way back: a job's arguments and its line
# of submission stand there too, a hundred thousand letters that its user chose.
LISTED = re.compile(rb"(?<![\w.,-])[\w.,-]++(?=\x00)")

Takes = Callable[[Job], bool]


@dataclass(frozen=True, slots=True)
class Loss:
    """Something that goes, and the jobs that go with it; None: nobody could say which."""

    what: str
    jobs: tuple[str, ...] | None

    def __str__(self) -> str:
        if self.jobs is None:
            return f"{self.what}, and slurmctld could not be asked whose jobs that ends"
        return f"{self.what}: {counted(self.jobs)}" if self.jobs else self.what


@dataclass(frozen=True, slots=True)
class Effect:
    changes: tuple[str, ...]
    losses: tuple[Loss, ...]
    anew: tuple[str, ...]

    @property
    def cost(self) -> str:
        """The losses in a sentence; empty where there are none."""
        return "; ".join(str(loss) for loss in self.losses)


def counted(jobs: Sequence[str]) -> str:
    some = ", ".join(jobs[:SHOWN]) + (", ..." if len(jobs) > SHOWN else "")
    return f"job {some}" if len(jobs) == 1 else f"{len(jobs)} jobs ({some})"


def effect(
    old: Mapping[str, bytes],
    new: Mapping[str, bytes],
    jobs: Sequence[Job] | None,
    hidden: Sequence[str] = (),
    known: int | None = None,
) -> Effect:
    """`hidden`: lists of partitions that running jobs were submitted to, of which Slurm shows only the one they got.
    `known`: how many jobs slurmctld knows, with those that ended lately and each of an array.
    """
    before, after = read(old), read(new)
    losses = []
    for what, takes in dangers(before, after):
        if jobs is None:
            losses.append(Loss(what, None))
        elif lost := tuple(job.id for job in jobs if takes(job)):
            losses.append(Loss(what, lost))
    losses += [
        Loss(f"partition {name} goes: running jobs that were submitted to {asked}", ())
        for name in sorted(before.partitions.keys() - after.partitions.keys())
        for asked in sorted(hidden)
        if name in asked.split(",")
    ]
    losses += _forgotten(before, after, known)
    others = sorted(name for name in {*old, *new} if name != MAIN and old.get(name) != new.get(name))
    changed = [*changes(before, after), *(f"{name}: {_how(old, new, name)}" for name in others)]
    return Effect(tuple(changed), tuple(losses), tuple(_anew(before, after)))


def impossible(new: Configuration, saved_of: str) -> str:
    """What slurmctld refuses and a client of it reads without a word; `saved_of`: the cluster whose state is there."""
    name = new.value("clustername").lower()
    if saved_of and name and name != saved_of:
        return (
            f"ClusterName is {name}, and the state in StateSaveLocation is that of {saved_of}: a cluster keeps its name"
        )
    lists = [("NodeName", one) for one in new.nodes]
    lists += [(f"partition {name}: Nodes", line.get("nodes", "")) for name, line in new.partitions.items()]
    for where, hosts in lists:
        if hosts.count("[") != hosts.count("]"):
            return f"{where}={hosts}: a bracket is not closed, or not opened"
    return ""


def dangers(old: Configuration, new: Configuration) -> Iterator[tuple[str, Takes]]:
    """What goes, and how to tell a job that goes with it."""
    yield from _settings(old, new)
    for name in sorted(old.partitions.keys() - new.partitions.keys()):
        yield f"partition {name} goes", lambda job, name=name: name in job.partitions  # type: ignore[misc]
    gone = old.nodes.keys() - new.nodes.keys()
    if gone:
        shown = ", ".join(sorted(gone)[:SHOWN]) + (", ..." if len(gone) > SHOWN else "")
        yield f"node {shown} goes", lambda job: bool((job.nodes | job.wanted) & gone)
    # Dynamic nodes have no line; they have room up to this number.
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
        yield from _shut_out(name, old.partitions[name], new.partitions[name])


def _settings(old: Configuration, new: Configuration) -> Iterator[tuple[str, Takes]]:
    enforced = new.words("accountingstorageenforce") - {"none"}
    if enforced and not old.words("accountingstorageenforce") - {"none"}:
        # What runs, runs on.
        what = f"AccountingStorageEnforce becomes {','.join(sorted(enforced))}, and who has no account is not let in"
        yield what, lambda job: not job.holds and not job.account
    for key in (*STATE, *RUNNING):
        # What one of the two leaves to Slurm's default is not compared: a line that spells the default changes nothing.
        if key in old.settings and key in new.settings and old.value(key) != new.value(key):
            what = f"{old.names[key]} {old.value(key)} becomes {new.value(key)}"
            if key in STATE:
                yield f"{what}, and the saved jobs are not found again", lambda job: True
            else:
                yield f"{what}, and what runs is not found again", lambda job: job.holds


def has_less_room(old: Configuration, new: Configuration) -> bool:
    """Whether slurmctld may know fewer jobs than it might."""
    return _room(new) < _room(old)


def _room(configuration: Configuration) -> int:
    return min(configuration.number("maxjobcount", MOST_JOBS), _numbers(configuration))


def _numbers(configuration: Configuration) -> int:
    """slurmctld knows no more jobs than it has numbers for, whatever MaxJobCount says."""
    return configuration.number("maxjobid", LAST_JOB) - configuration.number("firstjobid", FIRST_JOB) + 1


def _forgotten(old: Configuration, new: Configuration, known: int | None) -> Iterator[Loss]:
    """slurmctld reads its jobs anew up to this number, and leaves the others away: nobody hears of them again."""
    if not has_less_room(old, new):
        return
    why = " (the numbers from FirstJobId to MaxJobId)" if _room(new) == _numbers(new) else ""
    what = f"MaxJobCount {_room(old)} becomes {_room(new)}{why}"
    if known is None:
        yield Loss(what, None)
    elif known >= _room(new):
        yield Loss(f"{what}, and slurmctld forgets jobs beyond it: it knows {known}, ended ones too", ())


def _shut_out(name: str, old: Line, new: Line) -> Iterator[tuple[str, Takes]]:
    """Waiting jobs that could never start: their account or QOS is let in no more. What runs, runs on."""

    def waits_in_vain(kind: str, listed: frozenset[str], *, inside: bool) -> Takes:
        return lambda job: not job.holds and job.partitions == {name} and (getattr(job, kind) in listed) is inside

    for kind, allow, deny in (("account", "allowaccounts", "denyaccounts"), ("qos", "allowqos", "denyqos")):
        if new.get(allow, "ALL").upper() != "ALL" and new.get(allow) != old.get(allow):
            what = f"partition {name} lets {kind} {new[allow]} in and no other"
            yield what, waits_in_vain(kind, words(new[allow]), inside=False)
        if denied := words(new.get(deny, "")) - words(old.get(deny, "")):
            what = f"partition {name} turns {kind} {','.join(sorted(denied))} away"
            yield what, waits_in_vain(kind, denied, inside=True)


def changes(old: Configuration, new: Configuration) -> Iterator[str]:
    """One line for each thing that differs, values and all: for who may read the files."""
    yield from _differing("", old.settings, new.settings, {**new.names, **old.names})
    for kind, before, after in (("partition", old.partitions, new.partitions), ("node", old.nodes, new.nodes)):
        for name in sorted(before.keys() | after.keys()):
            if name not in after:
                yield f"{kind} {name}: goes"
            elif name not in before:
                yield f"{kind} {name}: comes"
            else:
                yield from _differing(f"{kind} {name}: ", before[name], after[name], {})


def _differing(head: str, old: Line, new: Line, names: Mapping[str, str]) -> Iterator[str]:
    for key in sorted(old.keys() | new.keys()):
        if old.get(key) != new.get(key):
            yield f"{head}{names.get(key, key)}: {old.get(key, '-')} -> {new.get(key, '-')}"


def _how(old: Mapping[str, bytes], new: Mapping[str, bytes], name: str) -> str:
    return "comes" if name not in old else "goes" if name not in new else "changes"


def _anew(old: Configuration, new: Configuration) -> Iterator[str]:
    for key, who in ANEW.items():
        if old.value(key) != new.value(key):
            yield f"{(old.names | new.names)[key]}: {who}"  # type: ignore[operator]


def hidden_lists(state: bytes, partitions: Mapping[str, Line], shown: Sequence[frozenset[str]]) -> tuple[str, ...]:
    """Lists of partitions in slurmctld's saved jobs that no job of `shown` has: of a running one it tells just the one.

    The state, a few seconds old, is not decoded: a list is a text that ends with a zero, and nothing else in it looks
    like one.
    """
    found = set()
    for text in LISTED.findall(state):
        first, *rest = text.decode().lstrip(",").split(",")
        # The byte before the text is its length, and may be a letter.
        name = next((name for name in (first, first[1:]) if name in partitions), "")
        names = {name, *rest}
        if len(names) > 1 and names <= partitions.keys() and names not in shown:
            found.add(",".join(sorted(names)))  # slurmctld puts the one that the job got first
    return tuple(sorted(found))
