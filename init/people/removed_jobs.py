"""Cancel jobs of people who lost access, as the chart's `people.removedJobs` says; on the acting controller alone.

    python3 -I -m init.people.removed_jobs

A file can be emptied or cut by mistake, and no cancelled job comes back. So each loss of access is dated, jobs end only
after a grace in which the person may return, and more losses than usual wait for `minivm people confirm`. A refused,
absent or empty file cancels nothing.

Level-triggered: each run looks at all jobs and finishes the work of a run that was killed. Exit code 1 and one line if
an operator is needed: it has no names, for the pod's public page shows it. The pod's log has them.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ground.errors import one_line
from ground.files import read_json, write_json
from init.errors import ConfigError, InitError
from init.lean import record, replace
from init.people import directory, keep, read
from init.people.spec import has_access, timestamp
from init.pod.client import log
from init.pod.pod import Pod
from init.slurm import client
from init.slurm.node import PREFIX

# On the volume that two controllers share.
RECORD = "/var/lib/minivm/slurm/removed-people.json"
POLICIES = ("cancel-pending", "cancel")
GRACE = range(60, 30 * 86400 + 1)
PENDING, ENDING = "PD", ("CG", "CA", "CD", "F", "TO", "NF", "OOM", "DL", "BF", "PR")
COLUMNS = "userid:|,jobarrayid:|,statecompact:|,admin_comment:|"
# By default squeue cuts the tasks of a long array short.
LIST = ("/usr/bin/env", "SLURM_BITSTR_LEN=0", client.SQUEUE, "--noheader", "--all", "--Format", COLUMNS)
ROW = re.compile(r"([0-9]+)\|([0-9]+)(_[0-9]+|_\[[0-9,:-]+(?=[\]%])|\+[0-9]+)?[^|]*\|([A-Z]+)\|(.*)", re.ASCII)
STEPS = re.compile(r"([0-9]+)-([0-9]+):([0-9]+)", re.ASCII)
# Tasks of an array that do not fit: the whole array is named, and `--state` still spares those that run.
LONGEST = 2000
AT_ONCE = 100
# More people than this share, and than this number, within this time wait for `minivm people confirm`.
SHARE, FEW, WINDOW = 0.2, 2, 3600.0


@record(frozen=True, slots=True)
class AccessLoss:
    """A person without access, since when, and whether an operator must confirm that their jobs end."""

    name: str
    since: float
    waits: bool = False


@record(frozen=True, slots=True)
class Losses:
    """All people without access by uid, and the uids that a directory has taken over."""

    people: Mapping[int, AccessLoss] = {}  # never written to
    moved: frozenset[int] = frozenset()


def parse_losses(data: Mapping[str, Any]) -> Losses | None:
    """Read what `to_json` wrote; None if there is nothing, or it is damaged."""
    try:
        people = {
            int(uid): AccessLoss(str(name), float(since), bool(waits))
            for uid, (name, since, waits) in data["people"].items()
        }
        return Losses(people, frozenset(map(int, data["moved"])))
    except (KeyError, ValueError, TypeError, AttributeError):
        return None


def losses_to_json(losses: Losses) -> dict[str, Any]:
    people = {str(uid): [loss.name, loss.since, loss.waits] for uid, loss in sorted(losses.people.items())}
    return {"people": people, "moved": sorted(losses.moved)}


def update_losses(
    before: Losses | None,
    lost: Mapping[int, str],
    moved: Collection[int],
    active: int,
    now: float,
    *,
    sure: bool = True,
) -> Losses:
    """Date new losses; forget people who are back. Without a record all jobs stay: the time of a loss is unknown.

    `sure`: no directory may know them. One that is away answers as one that does not.
    """
    if before is None:
        return Losses({uid: AccessLoss(name, now, waits=True) for uid, name in lost.items()}, frozenset(moved))
    people = {
        uid: replace(loss, since=min(loss.since, now))
        for uid, loss in before.people.items()
        if lost.get(uid) == loss.name
    }
    new = lost.keys() - people.keys()
    recent = len(new) + sum(now - loss.since < WINDOW for loss in people.values())
    waits = not sure or not active or recent > most(active + recent)
    return Losses(people | {uid: AccessLoss(lost[uid], now, waits) for uid in new}, frozenset(moved))


def most(people: int) -> int:
    return max(FEW, int(people * SHARE))


def find_due_losses(losses: Losses, grace: float, now: float) -> dict[int, AccessLoss]:
    return {uid: loss for uid, loss in losses.people.items() if not loss.waits and now >= loss.since + grace}


def confirm_losses(losses: Losses, names: Collection[str], now: float) -> Losses:
    """Let the policy count for these people. Their grace starts now: a wrong word can be taken back by the file."""
    people = {
        uid: replace(loss, since=now, waits=False) if loss.waits and loss.name in names else loss
        for uid, loss in losses.people.items()
    }
    return replace(losses, people=people)


@record(frozen=True, slots=True)
class ListedJob:
    uid: int
    id: str
    is_pending: bool
    comment: str


def settings(env: Mapping[str, str]) -> tuple[str, float]:
    """Return policy and grace; ConfigError for anything else than the chart writes."""
    policy, grace = env.get("MINIVM_REMOVED_JOBS", ""), env.get("MINIVM_REMOVED_JOBS_GRACE", "600")
    what = "cancel the jobs of removed people"
    if policy not in POLICIES:
        raise ConfigError(what, f"found {policy!r}, expected {' or '.join(POLICIES)}", field="MINIVM_REMOVED_JOBS")
    if not grace.isdecimal() or int(grace) not in GRACE:
        expected = f"expected {GRACE[0]} to {GRACE[-1]} seconds"
        raise ConfigError(what, f"found {grace!r}, {expected}", field="MINIVM_REMOVED_JOBS_GRACE")
    return policy, float(grace)


def read_record(pod: Pod) -> Losses | None:
    return parse_losses(read_json(pod.path(RECORD)))


def write_record(pod: Pod, losses: Losses) -> None:
    write_json(pod.path(RECORD), losses_to_json(losses), mode=0o600)


class NotTakenOverError(InitError):
    """people.yaml is not there, or not the one that this pod has taken over: the service `people` says why."""


def look(pod: Pod, now: float) -> tuple[Losses, int]:
    """Bring the record up to date; return it, and how many people have access. InitError while nothing is certain."""
    what = "cancel the jobs of removed people"
    with keep.hold_state(pod):
        state, before = keep.load(pod), read_record(pod)
        if state.problems:
            raise InitError(what, "people.yaml is refused, or a part of it", hint="mend the file: `minivm people show`")
        try:
            mounted = keep.compute_digest(read.read_bytes(keep.file_to_read(pod)))
        except InitError as error:
            raise NotTakenOverError(what, error.why) from error
        if mounted != state.digest:
            raise NotTakenOverError(what, "the mounted people.yaml is another than the one taken over")
        if not keep.directory_answers(pod):
            raise InitError(what, "sssd does not answer, and may know them", hint="`minivm why`")
        present = {person.uid for person in state.people.users if has_access(person, now)}
        # Of two controllers each has its own ids, and both have one record.
        seen = {uid: loss.name for uid, loss in before.people.items()} if before else {}
        seen |= {uid: name for name, uid in state.ids.items()}
        gone = {uid: name for uid, name in seen.items() if uid not in present}
        moved = (state.moved | (before.moved if before else frozenset())) & gone.keys()
        # Whom the directory had once it may have again: it may be away.
        sure = not pod.path(directory.CONF).exists()
        if not sure:
            moved |= directory.find_known_uids(gone.keys() - moved)
        lost = {uid: name for uid, name in gone.items() if uid not in moved}
        losses = update_losses(before, lost, moved, len(present), now, sure=sure)
        if losses != before:
            write_record(pod, losses)
    for uid, loss in losses.people.items():
        if not before or uid not in before.people:
            consequence = "; the jobs stay until `minivm people confirm`" if loss.waits else ""
            log(f"{loss.name} ({uid}) has no access any more{consequence}")
    return losses, len(present)


def parse_jobs(text: str) -> list[ListedJob]:
    """Read squeue's rows."""
    jobs = []
    for line in text.splitlines():
        if not (match := ROW.fullmatch(line)):
            continue
        uid, number, part, state, comment = match.groups()
        if state in ENDING:
            continue
        part = part or ""
        if part.startswith("_["):
            part = f"{STEPS.sub(write_out, part)}]"
            part = part if len(part) < LONGEST else ""
        if part.startswith("+") and state == PENDING:
            part = ""  # scancel ends no single component of a job that waits
        jobs.append(ListedJob(int(uid), number + part, state == PENDING, comment.rstrip("|").strip()))
    return list({(job.id, job.is_pending): job for job in jobs}.values())


def write_out(steps: re.Match[str]) -> str:
    """Write squeue's 1-9:4 as 1,5,9: scontrol and scancel refuse steps."""
    first, last, step = map(int, steps.groups())
    return ",".join(str(task) for task in range(first, last + 1, max(step, 1))[:LONGEST])


def cancel(loss: AccessLoss, jobs: Sequence[ListedJob], policy: str, controller: str) -> None:
    """Write the reason into the jobs' AdminComment, except where a site has written something, and cancel them."""
    text = f"{PREFIX} cancelled: {loss.name} has no access since {timestamp(int(loss.since))}"
    for is_pending in (True, False):
        chosen = [job for job in jobs if job.is_pending == is_pending]
        for at in range(0, len(chosen), AT_ONCE):
            part = chosen[at : at + AT_ONCE]
            free = [job.id for job in part if job.comment in ("", "(null)") or job.comment.startswith(PREFIX)]
            try:
                if free:
                    client.run([client.SCONTROL, "update", f"jobid={','.join(free)}", f"admincomment={text}"],
                               controller)  # fmt: skip
            except client.SlurmError as error:  # such as a job that ended just now
                log(f"cannot comment on jobs of {loss.name}: {error.why}")
            # A job that starts meanwhile runs on where only pending ones are to end.
            only = ["--state=PENDING"] if is_pending else []
            client.run([client.SCANCEL, "--cron", *only, *(job.id for job in part)], controller)
            log(f"{loss.name}: cancelled by people.removedJobs ({policy}): {', '.join(job.id for job in part)}"[:2000])


def run(pod: Pod, env: Mapping[str, str], now: float) -> str:
    """Do it once; return what an operator must do, "" for nothing."""
    policy, grace = settings(env)
    try:
        losses, active = look(pod, now)
    except NotTakenOverError:
        return ""
    if not losses.people:
        return ""
    due = find_due_losses(losses, grace, now)
    waiting = {uid: loss for uid, loss in losses.people.items() if loss.waits}
    if not due and not waiting:
        return ""
    controller = client.address(env)
    by_uid: dict[int, list[ListedJob]] = {}
    for job in parse_jobs(client.run(LIST, controller, within=20)):
        by_uid.setdefault(job.uid, []).append(job)
    if not active:
        names = [loss.name for uid, loss in losses.people.items() if uid in by_uid]
        return (
            f"cannot cancel the jobs of {count_people(names)}: people.yaml gives nobody access; mend it"
            if names
            else ""
        )
    failed: list[str] = []
    for uid, loss in due.items():
        jobs = [job for job in by_uid.get(uid, ()) if job.is_pending or policy == "cancel"]
        try:
            if jobs:
                cancel(loss, jobs, policy, controller)
        except client.SlurmError as error:  # continue with the next person's jobs; the next run tries again
            log(f"cannot cancel the jobs of {loss.name}: {error.why}")
            failed.append(loss.name)
    problems = [f"cannot cancel the jobs of {count_people(failed)}: `minivm logs removed-jobs`"] if failed else []
    if names := [loss.name for uid, loss in waiting.items() if uid in by_uid]:
        problems.append(
            f"the jobs of {count_people(names)} stay: {len(waiting)} lost access together, before this policy, or "
            "beside a directory that may know them (`minivm logs removed-jobs`); mend people.yaml, or confirm in this "
            "pod: `minivm people confirm --all`"
        )
    return "; ".join(problems)


def count_people(names: Sequence[str]) -> str:
    return "1 person" if len(names) == 1 else f"{len(names)} people"


def main() -> int:
    try:
        problem = run(Pod(os.environ), os.environ, time.time())
    except client.SlurmError as error:
        print(error, file=sys.stderr)  # slurmctld's absence is reported elsewhere, and the next run does it
        return 0
    except (InitError, OSError) as error:
        problem = str(error)
    if problem:
        print(one_line(problem))
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main())
