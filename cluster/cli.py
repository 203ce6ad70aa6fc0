"""Commands `build.py up | ssh | status | scripts | delete | down`: thin calls of cluster.local."""

from __future__ import annotations

import io
import json
import math
import os
import shutil
import sys
import tarfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click

from cluster import ClusterError, names, slurm_conf
from cluster.change.pinning import Checkout, Wish, find_newest_here, parse_tags
from cluster.change.plan import UpPlan
from cluster.local import STATE, LocalCluster, read_options
from cluster.render import read_overrides
from cluster.report import table
from cluster.values import AUTHS, RELEASE, Options, UpRequest, repository_of, settle

# Try a tree of scripts on this machine's cluster, as the newest commit of the demo's repository.
# Each pod reports its result. The demo's git server accepts no push: everything in that repository runs as root on
# every node, unsigned, and every job can reach the port. Only users of the engine may write to it.
DEMO = f"{RELEASE}-demo-0"
NOBODY = 65534
POLL = 0.2
# Directories of a developer's tools in a tree of scripts.
LEFT_OUT = frozenset({".git", "__pycache__", ".pytest_cache", ".ruff_cache", ".mypy_cache"})


@dataclass(frozen=True, slots=True)
class PodResult:
    """Result of a commit in one pod; `why` it was refused, or "" if the pod took it."""

    pod: str
    why: str


def pack(tree: Path, name: str) -> bytes:
    """Pack the tree under `name`, owned by the user `nobody`: plain files, directories and links."""

    def keep(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        if LEFT_OUT & set(member.name.split("/")) or not (member.isreg() or member.isdir() or member.issym()):
            return None
        member.uid = member.gid = NOBODY
        member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
        return member

    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        archive.add(tree, arcname=name, filter=keep)
    return out.getvalue()


def commit(cluster: LocalCluster, tree: Path) -> str:
    """Commit the tree; return its hash, or the newest commit's if that has the same tree."""
    running = cluster.kubelet.list_pods()
    if DEMO not in running:
        raise ClusterError("try the scripts", f"there is no pod {DEMO} whose repository they could become")
    name = f"scripts-{os.urandom(6).hex()}"
    cluster.kubelet.api.put_archive(running[DEMO].container, "/tmp", pack(tree, name))
    code, output = cluster.exec(DEMO, ["/usr/libexec/minivm/demo-commit", f"/tmp/{name}"], user="nobody")
    if code != 0:
        raise ClusterError("try the scripts", output.strip() or f"demo-commit ended with {code}")
    return output.split()[-1]


def read_result(status: str, commit_hash: str) -> str | None:
    """Evaluate `gitsync status --json`: the reason of a refusal, "" if published, None while neither."""
    try:
        state = json.loads(status)
    except ValueError:
        return None
    if state.get("current") == commit_hash:
        return ""
    refused = state.get("quarantine") or {}
    return str(refused.get("reason")) if refused.get("commit") == commit_hash else None


def follow(cluster: LocalCluster, commit_hash: str, timeout: float) -> Iterable[PodResult]:
    """Yield each pod that runs scripts when it takes or refuses the commit."""
    waiting = [pod.name for pod in cluster.manifests().pods if pod.role != "demo"]
    deadline = time.monotonic() + timeout
    for pod in waiting:
        cluster.exec(pod, ["gitsync", "now"])
    while waiting:
        for pod in list(waiting):
            _, output = cluster.exec(pod, ["gitsync", "status", "--json"])
            reason = read_result(output, commit_hash)
            if reason is not None:
                waiting.remove(pod)
                yield PodResult(pod, reason)
        if waiting and time.monotonic() > deadline:
            reason = f"after {timeout:.0f} s neither taken nor refused by {', '.join(waiting)}"
            raise ClusterError("try the scripts", reason, hint="gitsync why, in the pod")
        time.sleep(POLL)


name_option = click.option(
    "--name", default="local", envvar="MINIVM_NAME", show_default=True, help="Name of the cluster; several can be up."
)


class Seconds(click.FloatRange):
    """A waiting time in seconds; NaN and infinity are refused, since a comparison with them never ends a wait."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        seconds = super().convert(value, param, ctx)
        if not math.isfinite(seconds):
            self.fail(f"{value!r} is not a waiting time", param, ctx)
        return seconds


def connect() -> Any:
    from images.engine.docker import DockerEngine

    return DockerEngine().client


@click.command()
@name_option
@click.option("--workers", type=int, help="Number of worker pods.  [default: the current one; a new cluster: 2]")
@click.option(
    "--controllers",
    type=click.IntRange(1, 2),
    help="2: one acts, one stands by; not with embedded accounting.  [default: the current one; a new cluster: 1]",
)
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    help="Port of 127.0.0.1 for ssh; the next free one if taken.  [default: the current one; a new cluster: 2222]",
)
@click.option("--slurm-version", "slurm", default="", help="Images of this Slurm, as in 26.05 or 24.11.5.")
@click.option("--variant", default="", help="Images of this variant: debian, nvidia.")
@click.option("--tag", "given_tags", multiple=True, help="Images of this tag: TAG, or ROLE=TAG, several times.")
@click.option(
    "--proctrack",
    type=click.Choice(["cgroup", "linuxproc"]),
    help="How Slurm tracks jobs.  [default: cgroup if pods here can have cgroups]",
)
@click.option(
    "--auth",
    type=click.Choice(AUTHS),
    help="How Slurm's daemons prove who they are.  [default: as the cluster has it; a new cluster: slurm]",
)
@click.option(
    "--values",
    "values_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    envvar="MINIVM_VALUES",
    help="Chart values that override the defaults. They are stored: a later `up` keeps them.",
)
@click.option(
    "--people",
    "people_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="A people.yaml: its users may log in. They are stored: a later `up` keeps them.",
)
@click.option(
    "--reset", is_flag=True, help="Forget the stored --workers, --controllers, --values, --people and --proctrack."
)
@click.option("--keep-images", is_flag=True, help="Leave the pods on their images, also where these were built anew.")
@click.option(
    "--rehearse",
    is_flag=True,
    help="Change nothing: start the wanted Slurm on a copy of the state, and tell what would be lost.",
)
@click.option("--yes", is_flag=True, help="Agree to what is lost: pods, partitions, jobs, ssh sessions.")
@click.option(
    "--timeout", type=Seconds(1), default=180.0, show_default=True, help="Seconds within which all pods must be ready."
)
def up(
    name: str,
    workers: int | None,
    controllers: int | None,
    port: int | None,
    slurm: str,
    variant: str,
    given_tags: tuple[str, ...],
    proctrack: str | None,
    auth: str | None,
    values_file: Path | None,
    people_file: Path | None,
    reset: bool,
    keep_images: bool,
    rehearse: bool,
    yes: bool,
    timeout: float,
) -> None:
    """Start a whole cluster on this machine, or change what you name and keep every other setting.

    It prints its plan, and asks before a pod, a partition, a job or an ssh session is lost.
    """
    root = click.get_current_context().find_root()
    refuse_build_options(root.params)
    every, single = parse_tags(given_tags)
    stored_options = read_options(name)
    request = UpRequest(
        workers=workers,
        controllers=controllers,
        proctrack=proctrack,
        auth=auth,
        overrides=read_overrides(values_file) if values_file else None,
        values_file=str(values_file.resolve()) if values_file else "",
        repository=choose_prefix(root.obj.assignments, is_new=stored_options is None),
        people=read_people(people_file) if people_file else None,
        reset=reset,
    )
    options = settle(name, stored_options, request)
    client, started_at = connect(), time.monotonic()
    checkout = Checkout(root.obj.repository, root.obj.assignments)
    if slurm or variant:
        repository = repository_of(options.overrides, options.repository)
        tags = find_newest_here(client, repository, slurm=slurm, variant=variant, builder=checkout)
        options = replace(options, tags=tags)
    if every:
        options = replace(options, tag=every, tags={})
    options = replace(options, tags={**options.tags, **single})
    wish = Wish(anew=bool(slurm or variant or every), roles=frozenset(single), keep=keep_images)

    def log(text: str) -> None:
        click.echo(f"{time.monotonic() - started_at:6.1f} s  {text}")

    cluster = LocalCluster(client, options, log=log, checkout=checkout)
    if rehearse:
        sys.exit(rehearse_change(cluster, wish, is_up=stored_options is not None))
    with cluster.changing("bring the cluster up", make=True):
        cluster.up(timeout=timeout, port=port or 0, wish=wish, agree=lambda plan: agree(plan, name, yes=yes))
    for stage, seconds in cluster.stages.spent.items():
        log(f"stage {stage}: {seconds:.1f} s")
    print_logins(cluster)


def rehearse_change(cluster: LocalCluster, wish: Wish, *, is_up: bool) -> int:
    """Print what the change would lose, and return the exit code."""
    if not is_up:
        raise ClusterError("rehearse the change", f"the cluster {cluster.options.name} is not up", hint="make up")
    with cluster.changing("rehearse the change"):
        code, text = cluster.rehearse(wish)
    click.echo(text, nl=False)
    return code


def print_logins(cluster: LocalCluster) -> None:
    """Print what this machine did not grant to the pods, and how a person logs in."""
    name = cluster.options.name
    for line in cluster.not_granted():
        click.echo(f"not granted: {line}")
    click.echo("\nlog in:  make ssh" + (f" ARGS='--name {name}'" if name != "local" else ""))
    click.echo(f"     or  {' '.join(cluster.ssh_command('alice'))}")


def refuse_build_options(options: Mapping[str, Any]) -> None:
    """Refuse build.py's options for builds before `up`, which has options of its own for images."""
    if options.get("variant") or options.get("slurm") or options.get("arch"):
        raise ClusterError("bring up what --variant, --slurm and --arch before `up` say", "they are for what builds",
                           hint="up --variant NAME --slurm-version VERSION")  # fmt: skip


def choose_prefix(assignments: Sequence[str], *, is_new: bool) -> str:
    """Return the prefix of the images' names, for a new cluster or where the user gave one; "" keeps the stored one."""
    from images import settings

    prefix = settings.read(assignments=assignments).prefix
    is_given = os.environ.get("MINIVM_BUILD_PREFIX") or any(text.startswith("prefix=") for text in assignments)
    return prefix if is_new or is_given else ""


def read_people(file: Path) -> dict[str, Any]:
    """Check a people.yaml as each pod does; return it as values of the chart."""
    from init.errors import InitError, ManyErrors
    from init.people.read import read_file
    from init.people.spec import to_mapping

    try:
        return to_mapping(read_file(file))
    except ManyErrors as error:
        mistakes = [f"{each.field}: {each.why}" + (f" ({each.hint})" if each.hint else "") for each in error.errors]
        raise ClusterError(error.what, "\n  ".join([f"mistakes in {file}:", *mistakes])) from error
    except InitError as error:
        place = error.field or None
        raise ClusterError(error.what, error.why, file=error.file, field=place, hint=error.hint or None) from error


def agree(plan: UpPlan, name: str, *, yes: bool) -> None:
    """Show the plan; if users lose something, continue only if the person agrees."""
    click.echo("\n".join(plan.lines()))
    if not plan.losses or yes:
        return
    what = f"change the cluster {name}"
    if not sys.stdin.isatty():
        raise ClusterError(what, "the plan loses what its lines `lost` name, and there is no terminal to ask at;"
                           " nothing was changed", hint="`--yes` agrees to it: make up ARGS='... --yes'")  # fmt: skip
    if not click.confirm("Go on, and lose that?"):
        raise ClusterError(what, "you did not agree; nothing was changed")


@click.command(context_settings={"ignore_unknown_options": True})
@name_option
@click.option("--user", default="alice", show_default=True, help="alice or bob.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def ssh(name: str, user: str, command: tuple[str, ...]) -> None:
    """Log in to the login pod as a demo user.

    With -A first: go on to a worker with the same key, where your job runs.
    """
    line = LocalCluster.load(None, name).ssh_command(user, *command)
    if command[:1] == ("-A",):
        # An agent for this session with this key only: a person's own agent must not be forwarded to a demo.
        line = ["ssh-agent", line[0], "-o", "AddKeysToAgent=yes", *line[1:]]
    os.execvp(line[0], line)


@click.command()
@name_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def status(name: str, as_json: bool) -> None:
    """Show each pod: ready, or why not. Exit code 1 if one is not ready."""
    cluster = LocalCluster.load(connect(), name)
    rows = cluster.status()
    if as_json:
        click.echo(json.dumps([asdict(row) for row in rows]))
    else:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 1000
        click.echo("\n".join(table(rows, width=width)))
        for line in cluster.not_granted():
            click.echo(f"not granted: {line}")
    sys.exit(0 if all(row.ready for row in rows) else 1)


@click.command()
@name_option
def down(name: str) -> None:
    """Stop the cluster and leave nothing behind. Exit code 0 even if there is none."""
    client = connect()
    with LocalCluster(client, Options(name=name)).changing("stop the cluster") as cluster:
        existed = cluster.down()
    if existed:
        click.echo(f"the cluster {name} is gone")
        return
    hint = names.hint(names.list_started_here(STATE) | names.list_in_engine(client.api))
    click.echo(f"nothing to do: there is no cluster {name}" + (f"\nhint: {hint}" if hint else ""))


@click.command()
@name_option
@click.option("--force", is_flag=True, help="Delete like a machine failure: no drain, no TERM.")
@click.argument("pod")
def delete(name: str, pod: str, force: bool) -> None:
    """Delete a pod like kubectl; a new one of the same name takes its place."""
    with LocalCluster.load(connect(), name, log=click.echo).changing(f"delete {pod}") as cluster:
        cluster.delete(pod, force=force)


@click.command()
@name_option
@click.option(
    "--timeout",
    type=Seconds(1),
    default=90.0,
    show_default=True,
    help="Seconds within which every pod must take or refuse them.",
)
@click.argument("tree", type=click.Path(exists=True, file_okay=False, path_type=Path))
def scripts(name: str, timeout: float, tree: Path) -> None:
    """Try TREE, a directory of scripts: every pod takes it as its newest commit, or says why not."""
    cluster = LocalCluster.load(connect(), name)
    commit_hash = commit(cluster, tree)
    click.echo(f"{tree} is commit {commit_hash}")
    refused = False
    for result in follow(cluster, commit_hash, timeout):
        refused |= bool(result.why)
        click.echo(f"{result.pod}: {f'refused: {result.why}' if result.why else 'taken'}")
    sys.exit(1 if refused else 0)


@click.command("hand-over")
@name_option
def hand_over(name: str) -> None:
    """Let the standby of two controllers act at once, and wait until its slurmctld answers; exit code 1 if not."""
    cluster = LocalCluster.load(connect(), name)
    code, text = cluster.run_slurm(["minivm", "hand-over"])
    click.echo(text, nl=False)
    sys.exit(code)


# `build.py config`: the controller's `minivm config`, for values that are not applied yet.


values_option = click.option(
    "--values",
    "values_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Chart values as for `up`.  [default: the applied ones]",
)


@click.group()
def config() -> None:
    """Preview what a changed slurm.conf does to the running cluster, and accept one."""


@config.command("diff")
@name_option
@values_option
def config_diff(name: str, values_file: Path | None) -> None:
    """Show what the values would change: lines, jobs, and daemons that restart."""
    ask_controller("diff", name, values_file)


@config.command("check")
@name_option
@values_option
def config_check(name: str, values_file: Path | None) -> None:
    """Like diff, but exit with 1 if the controller would refuse it."""
    ask_controller("check", name, values_file)


@config.command("status")
@name_option
def config_status(name: str) -> None:
    """Show if the applied slurm.conf is the one that runs, or why not."""
    run_config(name, "status")


@config.command("accept")
@name_option
@click.argument("hash")
def config_accept(name: str, hash: str) -> None:
    """Apply the refused slurm.conf with this HASH, even if it ends jobs."""
    run_config(name, "accept", hash)


def ask_controller(word: str, name: str, values_file: Path | None) -> None:
    cluster = LocalCluster.load(connect(), name)
    if values_file is not None:
        cluster.options = replace(
            cluster.options, overrides=read_overrides(values_file), values_file=str(values_file.resolve())
        )
    running = cluster.kubelet.list_pods()
    controller = running.get(cluster.active_controller(running))
    if controller is None or not controller.running:
        raise ClusterError("ask the controller", "it does not run", hint="make status")
    code, text = slurm_conf.ask(cluster.kubelet, controller, word, slurm_conf.files(cluster.manifests()))
    click.echo(text, nl=False)
    sys.exit(code)


def run_config(name: str, *words: str) -> None:
    code, text = LocalCluster.load(connect(), name).run_slurm(["minivm", "config", *words])
    click.echo(text, nl=False)
    sys.exit(code)


# `build.py migrate`: from another operator's objects to values of the chart. It asks no cluster.


@click.group()
def migrate() -> None:
    """Move a cluster of another Slurm operator to this chart."""


@migrate.command("plan")
@click.option("--from", "operator", required=True, type=click.Choice(("slinky", "soperator")), help="The old operator.")
@click.option("--cluster", default="", metavar="[NAMESPACE/]NAME", help="Which one, if the files hold several.")
@click.option("--pool", "pools", multiple=True, metavar="NODESET=POOL", help="Call the pool of a NodeSet so.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("migration"),
    show_default=True,
    help="Directory for values.yaml and report.txt; it must not exist yet.",
)
@click.argument("files", nargs=-1, required=True)
def migrate_plan(operator: str, cluster: str, pools: tuple[str, ...], out: Path, files: tuple[str, ...]) -> None:
    """Write values.yaml of the chart from the objects in FILES, and report what has no counterpart.

    FILES are what `kubectl get ... -o yaml` printed, directories of such files, or `-`. Nothing is changed anywhere.
    """
    from cluster.migrate import plan as planning

    renamed = dict(pool.partition("=")[::2] for pool in pools)
    if not all(renamed.values()):
        raise ClusterError("plan the migration", "--pool takes NODESET=POOL")
    made = planning.make(operator, files, cluster=cluster, renamed=renamed)
    written = planning.write(made, operator, out)
    click.echo(planning.render_report(made, operator))
    click.echo("written: " + ", ".join(str(file) for file in written))
