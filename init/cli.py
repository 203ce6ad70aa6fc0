"""The `minivm` command: requests to PID 1 in a pod, and checks before a pod runs.

Imports are late: a probe calls `minivm ready` every few seconds on a thousand pods.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import click

from ground.version import VERSION
from init.command import PASSED_ON, pass_on
from init.errors import ConfigError, InitError, ManyErrors, RequestError, nearest
from init.places import PLAN, SOCKET, pod_name
from init.slurm import client
from init.slurm.client import SlurmError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from init.plan.compile import Plan
    from init.pod.client import Client
    from init.slurm.node import Node
    from init.view.status import Snapshot

# The reason why no jobs come to this pod's node, from slurmctld, for a person who asks.
# Only on request: pods that polled the controller would cost it a thousand calls.
DAEMONS = frozenset({"slurmd", "slurmd-static"})
COPIES = "/run/minivm/state.json"  # what the controller's service wrote about its copies
WITHIN = 3.0  # a person is waiting


def describe_node(snapshot: Snapshot) -> str:
    """Return one line; "" if jobs come to the node or there is none."""
    if not any(view.name in DAEMONS and view.ready for view in snapshot.services):
        return ""
    name = pod_name(os.environ)
    try:
        node = client.node(name, client.address(os.environ), within=WITHIN)
    except SlurmError as error:
        return f"the node's state in Slurm is unknown: {error.why}"
    return words(node) if node is not None else f"slurmctld knows no node {name}"


def words(node: Node) -> str:
    """Describe the author, the time and the reason, and how a person can undo it."""
    if not (node.held_by_us or node.held_by_others):
        return "" if node.responds else f"the node does not answer slurmctld at {node.address}, so no jobs come"
    user, _, since = node.author.partition("@")
    by = f" by {user} since {since}" if user else ""
    state = "drained" if "DRAIN" in node.flags else "down"
    return f"no jobs come: the node is {state} in Slurm{by}: {node.reason or 'no reason given'}"


class Group(click.Group):
    """The one place where ordinary errors become a line and an exit code."""

    def resolve_command(self, context: click.Context, args: list[str]) -> Any:
        if not args[0].startswith("-") and self.get_command(context, args[0]) is None:
            hint = nearest(args[0], self.list_commands(context))
            raise click.UsageError(f"no command {args[0]!r} ({hint})", context)
        return super().resolve_command(context, args)

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except (ConfigError, ManyErrors) as error:
            click.echo(f"minivm: {error}", err=True)
            sys.exit(78)
        except InitError as error:
            click.echo(f"minivm: {error}", err=True)
            sys.exit(1)
        except EOFError as error:
            click.echo(f"minivm: {error}", err=True)
            sys.exit(1)
        except (KeyboardInterrupt, BrokenPipeError):
            sys.exit(130)


# The connection reports a socket that cannot be used; click's check ("not readable") would hide the reason.
SOCKET_PATH = click.Path(readable=False, path_type=Path)
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(VERSION, prog_name="minivm")
@click.option("--socket", type=SOCKET_PATH, default=SOCKET, hidden=True, envvar=["MINIVM_SOCKET", "MINIVM_CONTROL"])
@click.pass_context
def main(context: click.Context, socket: Path) -> None:
    """Look after the services of this pod."""
    context.obj = socket


def connect(context: click.Context, within: float | None = 10.0) -> Client:
    from init.pod.client import Client

    return Client(context.obj, within=within)


def service_names(context: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """Complete a service's name from the running pod; nothing if PID 1 does not answer."""
    try:
        root = context.find_root()
        with connect(root if root.obj else _with_socket(root), 1.0) as client:
            return [view.name for view in client.snapshot().services if view.name.startswith(incomplete)]
    except InitError:
        return []


def _with_socket(context: click.Context) -> click.Context:
    from init.pod.client import control_socket

    context.obj = control_socket()
    return context


SERVICE = click.argument("service", shell_complete=service_names)
OPTIONAL_SERVICE = click.argument("service", required=False, shell_complete=service_names)


def emit(data: object) -> None:
    import json

    click.echo(json.dumps(data, indent=2))


@main.command()
@JSON
@click.pass_context
def status(context: click.Context, as_json: bool) -> None:
    """Show a table of the services, their states, and why any are not ready."""
    try:
        with connect(context) as client:
            snapshot = client.snapshot()
    except RequestError as error:
        snapshot = without_rights(error)
    if as_json:
        from init.view.status import to_mapping

        emit(to_mapping(snapshot))
        return
    from init.view.status import table, terminal_width

    click.echo(table(snapshot, colour=sys.stdout.isatty(), width=terminal_width()))
    if Path(COPIES).exists():
        from init.state.copies import read_status_line

        click.echo("\n" + read_status_line(time.time()))


@main.command()
@OPTIONAL_SERVICE
@JSON
@click.pass_context
def why(context: click.Context, service: str | None, as_json: bool) -> None:
    """Show the leaf causes why the pod, or one SERVICE, is not ready. Exit 0 when it is."""
    may_ask = True
    try:
        with connect(context) as client:
            reply = client.request("why", **({"service": service} if service else {}))
            snapshot = client.snapshot()
    except RequestError as error:
        snapshot, may_ask = without_rights(error), False
        reply = public_why(snapshot, service)

    node = "" if service else describe_node(snapshot)
    if as_json:
        emit({"ready": reply["ready"], "reasons": reply["reasons"], "node": node})
    else:
        from init.view.status import reasons

        click.echo(reasons(service, bool(reply["ready"]), reply["reasons"], snapshot))
        if node:
            click.echo(f"  {node}")
        if not may_ask:
            click.echo("This is about the pod. Why a job waits, fails or ended: `minivm job`.")
    sys.exit(0 if reply["ready"] else 1)


def without_rights(error: RequestError) -> Snapshot:
    """Return PID 1's public status if the error is a lack of rights; raise the error otherwise."""
    from init.pod.client import public_snapshot

    snapshot = public_snapshot() if isinstance(error.__cause__, PermissionError) else None
    if snapshot is None:
        raise error
    return snapshot


def public_why(snapshot: Snapshot, service: str | None) -> dict[str, Any]:
    """Answer `why` from a snapshot, as PID 1 does."""
    if not service:
        return {"ready": snapshot.ready, "reasons": snapshot.reasons}
    view = next((view for view in snapshot.services if view.name == service), None)
    if view is None:
        names = [view.name for view in snapshot.services]
        hint = f"a job? `minivm job {service}`" if service[:1].isdecimal() else nearest(service, names)
        raise RequestError(f"tell why {service} is not ready", "no such service", hint=hint)
    return {"ready": view.ready, "reasons": view.reasons}


@main.command()
@click.pass_context
def ready(context: click.Context) -> None:
    """For exec probes: exit 0 when the pod is ready, else 1 and the reasons on one line."""
    with connect(context, 2.0) as client:
        reply = client.request("why")
    if not reply["ready"]:
        click.echo("; ".join(reply["reasons"]) or "not ready")
        sys.exit(1)
    click.echo("ready")


def write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise InitError("write the trace", error.strerror or str(error), file=str(path)) from error


@main.command()
@click.option("--chrome", type=click.Path(path_type=Path), help="Write Chrome's trace-event JSON (Perfetto reads it).")
@click.option("--svg", type=click.Path(path_type=Path), help="Write the waterfall as SVG.")
@click.option("--all", "everything", is_flag=True, help="Show the whole life, not only the boot.")
@JSON
@click.pass_context
def trace(context: click.Context, chrome: Path | None, svg: Path | None, everything: bool, as_json: bool) -> None:
    """Show the boot as a waterfall: when each service waited, prepared, started and was ready."""
    from init.view import waterfall
    from init.view.status import terminal_width

    with connect(context) as client:
        reply = client.request("trace")
        needs = {view.name: view.needs for view in client.snapshot().services}
    events = reply["events"]
    if as_json:
        emit({"events": events, "now": reply["now"]})
        return
    until = float(reply["now"]) if everything else waterfall.boot_end(events, float(reply["now"]))
    spans = waterfall.spans(events, until)
    if chrome:
        write(chrome, waterfall.to_chrome(events, float(reply["now"])))
    if svg:
        write(svg, waterfall.to_svg(spans, until))
    if not (chrome or svg):
        click.echo(waterfall.waterfall(spans, until, needs, colour=sys.stdout.isatty(), width=terminal_width()))


@main.command()
@OPTIONAL_SERVICE
@click.option("-f", "--follow", is_flag=True, help="Keep printing new lines.")
@click.option("-n", "--lines", type=click.IntRange(0), default=100, show_default=True, help="Number of last lines.")
@click.pass_context
def logs(context: click.Context, service: str | None, follow: bool, lines: int) -> None:
    """Show the last lines of a SERVICE, or of init: what ended, what was requested, when the pod was ready."""
    keys: dict[str, Any] = {"lines": lines, "follow": follow} | ({"service": service} if service else {})
    with connect(context) as client:
        for reply in client.stream("logs", **keys) if follow else [client.request("logs", **keys)]:
            for line in reply["lines"]:
                click.echo(line)
            if lines and not (reply["lines"] or follow):
                click.echo(f"minivm: {service or 'the init'} has written nothing", err=True)


WAIT = click.option("--no-wait", "wait", flag_value=False, default=True, help="Return at once.")


def action(op: str, about: str) -> None:
    """Define start, stop, restart or reload; exit 1 when the service did not reach the requested state."""

    @main.command(op, help=about)
    @SERVICE
    @WAIT
    @click.pass_context
    def act(context: click.Context, service: str, wait: bool) -> None:
        with connect(context, None if wait else 10.0) as client:
            reply = client.request(op, service=service, wait=wait)
        state, reasons = reply["state"], reply.get("reasons", [])
        click.echo(f"{service}: {state}" + (f" ({'; '.join(reasons)})" if reasons else ""))
        sys.exit(1 if wait and state in ("failed", "backoff", "starting") else 0)


action("start", "Start a SERVICE (or try one again that has failed).")
action("stop", "Stop a SERVICE alone: services that need it keep running, as after a crash.")
action("restart", "Stop and start a SERVICE.")
action("reload", "Let a SERVICE read its configuration again, without a restart.")


def drain_action(op: str, about: str) -> None:
    @main.command(op, help=about)
    @WAIT
    @click.pass_context
    def act(context: click.Context, wait: bool) -> None:
        with connect(context, None if wait else 10.0) as client:
            text = str(client.request(op, wait=wait).get("drain") or "takes work again")
        click.echo(text)
        sys.exit(1 if text.startswith("failed") else 0)


drain_action(
    "drain", "Prepare the pod for its end: no new jobs, time for running ones. A second request joins the first."
)
drain_action("resume", "Take a drain back.")


@main.command("hand-over")
@click.option("--to", "wanted", default="", help="The pod that takes over, such as slurm-controller-1.")
@JSON
def hand_over(wanted: str, as_json: bool) -> None:
    """In the controller's pod that acts: let a standby act at once, and wait until its slurmctld answers."""
    from init.lean import fields
    from init.pod.pod import Pod
    from init.state import hand_over as planned

    def report(text: str) -> None:
        click.echo(text, err=as_json)

    done = planned.hand_over(Pod(os.environ), wanted, report=report)
    if as_json:
        emit(fields(done))
        return
    click.echo(str(done))


@main.command()
@SERVICE
@click.pass_context
def env(context: click.Context, service: str) -> None:
    """Show the environment with which a SERVICE starts; secrets are masked."""
    with connect(context) as client:
        reply = client.request("env", service=service)
    for name, value in sorted(reply["environment"].items()):
        click.echo(f"{name}={value}")


@main.command()
@click.argument("files", nargs=-1, type=click.Path(exists=True, path_type=Path))
@click.option(
    "--plan", "plan_file", type=click.Path(path_type=Path), help="Check over this plan instead of the image's."
)
def check(files: tuple[Path, ...], plan_file: Path | None) -> None:
    """Check service files (default: the mounted drop-ins) before a start; errors name file, key and fix."""
    from init.dropins.merge import check_files

    for line in check_files(files, plan_file or Path(PLAN)):
        click.echo(line)


@main.command()
@click.argument("role", required=False)
@click.option("--file", "plan_file", type=click.Path(path_type=Path), default=PLAN, show_default=True)
@click.option("--boot", is_flag=True, help="Show only the services whose conditions hold here.")
@JSON
def plan(role: str | None, plan_file: Path, boot: bool, as_json: bool) -> None:
    """Show the services of this image's ROLE: start order, stop order, and each one's dependencies."""
    from init.dropins.merge import load_plan
    from init.view.waterfall import order

    selected: Plan = load_plan(plan_file, role, boot=boot)
    if as_json:
        from init.plan.compile import plan_to_json

        click.echo(plan_to_json(selected), nl=False)
        return
    click.echo(order(selected, colour=sys.stdout.isatty()))


def define_passed_on(name: str) -> None:
    """Define a command of another package, with its own options."""
    settings: dict[str, Any] = {"ignore_unknown_options": True, "help_option_names": []}

    @main.command(name, help=PASSED_ON[name][2], context_settings=settings)
    @click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
    def run(arguments: tuple[str, ...]) -> None:
        pass_on(name, arguments)


for command in PASSED_ON:
    define_passed_on(command)


@main.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script for a SHELL: eval "$(minivm completion bash)"."""
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    if kind is not None:
        click.echo(kind(main, {}, "minivm", "_MINIVM_COMPLETE").source())


if __name__ == "__main__":
    main()
