"""The `minivm people` command: check a `people.yaml`, compare it with this pod's people, show them."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import click

from ground.errors import counted
from ground.files import read_json
from init.cli import JSON, Group, emit
from init.errors import InitError
from init.lean import replace
from init.people import directory, keep, read, removed_jobs
from init.people.spec import FILE, PeopleList, Person, has_access, settle, timestamp, valid_keys
from init.pod.pod import Pod

FILE_ARGUMENT = click.argument("file", type=click.Path(path_type=Path))


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Users of a file instead of a directory service: check it, compare it, show who is known."""


def state_here() -> keep.PeopleState:
    """Read what this pod took over; InitError where there is nothing or it may not be read."""
    pod = Pod(os.environ)
    file = pod.path(f"{keep.STATE}/state.json")
    if os.geteuid():
        raise InitError("read this pod's people", f"found user {os.geteuid()}, expected root", file=str(file))
    if not read_json(file):
        hint = f"mount {keep.MOUNT}/{FILE}: the chart's value `people`"
        raise InitError("read this pod's people", "it has taken over no file", file=str(file), hint=hint)
    return keep.load(pod)


@main.command()
@FILE_ARGUMENT
def check(file: Path) -> None:
    """Check a FILE as each pod does, here or on your own machine."""
    people, now = read.read_file(file), time.time()
    active = sum(has_access(person, now) for person in people.users)
    keyless = [person.name for person in people.users if has_access(person, now) and not valid_keys(person, now)]
    click.echo(f"{file}: {directory.numbers(people, active)}")
    if keyless:
        click.echo(f"without a valid key: {', '.join(keyless[:10])}" + (", ..." if len(keyless) > 10 else ""))


@main.command()
@JSON
def show(as_json: bool) -> None:
    """Show the people whom this pod knows by its file, their keys, and what is wrong with the file."""
    state, now = state_here(), time.time()
    if as_json:
        emit({"people": [row(person, now) for person in state.people.users], "problems": state.problems})
        return
    names = {person.name for person in state.people.users}
    click.echo(f"{'name':<20} {'uid':>10}  {'groups':<24} {'keys':<5} until")
    for person in state.people.users:
        keys = valid_keys(person, now)
        until = timestamp(person.until) if person.until else ""
        until += "" if has_access(person, now) else " (no access)"
        groups = ",".join([person.group, *person.groups])
        click.echo(f"{person.name:<20} {person.uid:>10}  {groups:<24} {len(keys):<5} {until}".rstrip())
        for key in keys:
            if key.expires:
                click.echo(f"    {key.line.partition(' ')[0]} {key.comment} expires {timestamp(key.expires)}")
    if removed := sorted(set(state.ids) - names):
        click.echo(f"known before, without access: {', '.join(f'{name} ({state.ids[name]})' for name in removed)}")
    for problem in state.problems:
        click.echo(f"problem: {problem}")


def row(person: Person, now: float) -> dict[str, object]:
    keys = [
        {
            "type": key.line.partition(" ")[0],
            "comment": key.comment,
            "expires": timestamp(key.expires) if key.expires else "",
        }
        for key in valid_keys(person, now)
    ]
    return {
        "name": person.name, "uid": person.uid, "group": person.group, "groups": [*person.groups], "keys": keys,
        "access": has_access(person, now), "until": timestamp(person.until) if person.until else "",
    }  # fmt: skip


@main.command()
@FILE_ARGUMENT
def diff(file: Path) -> None:
    """Show what a FILE would change in this pod. Exit code 1 if entries of it would be refused."""
    state = state_here()
    settled = settle(read.read_file(file), state.ids, state.people, keep.read_taken(Pod(os.environ)))
    lines = changes(state.people, settled.people, time.time())
    click.echo("\n".join(lines) if lines else "no change")
    for problem in settled.refused:
        click.echo(f"refused: {problem}")
    sys.exit(1 if settled.refused else 0)


def changes(before: PeopleList, after: PeopleList, now: float) -> list[str]:
    """Name the people who come and go, and what changes of those who stay."""
    old = {person.name: person for person in before.users if has_access(person, now)}
    new = {person.name: person for person in after.users if has_access(person, now)}
    lines = [f"added: {name} ({new[name].uid})" for name in new if name not in old]
    lines += [f"removed: {name} ({old[name].uid}): keys and sessions end" for name in old if name not in new]
    for name in old.keys() & new.keys():
        present, next_ = old[name], new[name]
        fields = [
            part
            for part in ("group", "groups", "shell", "gecos", "until")
            if getattr(present, part) != getattr(next_, part)
        ]
        old_keys, new_keys = ({key.line for key in valid_keys(person, now)} for person in (present, next_))
        fields += [counted(len(new_keys - old_keys), "new key")] * bool(new_keys - old_keys)
        fields += [counted(len(old_keys - new_keys), "key gone", "keys gone")] * bool(old_keys - new_keys)
        if fields:
            lines.append(f"changed: {name}: {', '.join(fields)}")
    gids = {group.name: group.gid for group in before.groups}
    lines += [
        f"group {group.name}: gid {gids.get(group.name, 'none')}, will be {group.gid}"
        for group in after.groups
        if gids.get(group.name) != group.gid
    ]
    return sorted(lines)


@main.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--group", help="Only those of this group of the directory.")
def export(names: tuple[str, ...], group: str | None) -> None:
    """Print the people of this pod's directory as a people.yaml: all, or the NAMEs.

    What does not fit a people.yaml is named in comments at its start.
    """
    if os.geteuid():
        raise InitError(directory.WHAT, f"found user {os.geteuid()}, expected root", file=directory.CONF)
    pod, now = Pod(os.environ), time.time()
    sections = directory.settings(pod)
    if names:
        listed, source = list(names), "sssd"
    else:
        searches = [search for name, domain in directory.domains(sections).items()
                    for search in directory.searches(name, domain)]  # fmt: skip
        listed = [name for search in searches for name in directory.list_names(search)]
        source = ", ".join(dict.fromkeys(f"{search.uris} ({search.base})" for search in searches))
    if len(listed) > read.USERS:
        raise InitError(directory.WHAT, f"found {len(listed):,}, and a file has at most {read.USERS:,}",
                        hint="give names")  # fmt: skip
    accounts = directory.accounts(listed)
    known = {account.name.casefold() for account in accounts}
    unknown = sorted({name for name in listed if name.casefold() not in known})
    if names and unknown:
        raise InitError(directory.WHAT, f"sssd does not know {', '.join(map(directory.quote, unknown))}")
    if group:
        gid = directory.group_id(group)
        accounts = [account for account in accounts if gid in (account.gid, *account.gids)]
    if not accounts:
        raise InitError(directory.WHAT, f"found nobody in {source}" + f" of the group {group}" * bool(group))
    present = [account.name for account in accounts]
    exported = directory.compose(
        accounts,
        directory.find_group_names(gid for account in accounts for gid in (account.gid, *account.gids)),
        directory.keys(present),
        homes=pod.setting("MINIVM_HOME", keep.HOMES),
        refused=directory.find_refused(present) if directory.has_access_rules(sections) else (),
        ended=timestamp(int(now)),
    )
    more_notes = [f"{directory.quote(name)} is left out: sssd does not know the name" for name in unknown]
    more_notes += settle(exported.people, {}, taken=keep.read_taken(pod)).refused
    exported = replace(exported, notes=(*exported.notes, *more_notes))
    click.echo(directory.render(exported, source, timestamp(int(now))), nl=False)
    click.echo(f"{directory.summary(exported, now)}; {counted(len(exported.notes), 'note')} in the file", err=True)


@main.command()
@click.argument("name")
def forget(name: str) -> None:
    """Allow another uid for a NAME that is not in the file any more, or its uid for another name."""
    state_here()
    pod = Pod(os.environ)
    with keep.hold_state(pod):
        state = keep.load(pod)
        if name in {person.name for person in state.people.users}:
            raise InitError(f"forget {name}", "the file has this name", hint="take it out of the file first")
        if name not in state.ids:
            raise InitError(f"forget {name}", "this pod has not seen the name")
        ids = {other: uid for other, uid in state.ids.items() if other != name}
        keep.save(pod, replace(state, ids=ids, digest=""))
    click.echo(f"{name} ({state.ids[name]}) is forgotten: files and jobs of this uid stay")


@main.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--all", "everybody", is_flag=True, help="All who wait.")
def confirm(names: tuple[str, ...], everybody: bool) -> None:
    """Let the jobs of people without access end, on the acting controller, as people.removedJobs says.

    Without a NAME it lists those whose jobs wait for this.
    """
    pod, now = Pod(os.environ), time.time()
    state_here()
    with keep.hold_state(pod):
        losses = removed_jobs.read_record(pod)
        waiting = sorted(loss.name for loss in losses.people.values() if loss.waits) if losses else []
        if unknown := sorted(set(names) - set(waiting)):
            raise InitError("confirm", f"the jobs of {', '.join(unknown)} do not wait", hint="`minivm people confirm`")
        chosen = waiting if everybody else names
        if losses and chosen:
            removed_jobs.write_record(pod, removed_jobs.confirm_losses(losses, chosen, now))
    if chosen:
        click.echo(f"confirmed: {', '.join(chosen)}; the grace starts now")
    else:
        click.echo("\n".join(waiting) if waiting else "nobody's jobs wait")


if __name__ == "__main__":
    main(prog_name="minivm people")
