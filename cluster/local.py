"""A whole cluster on one machine: the chart's pods as docker containers, reconciled by `up`.

`LocalCluster` is behind `build.py up`, `status`, `delete`, `config` and `down` (`cli.py`). `up` works as a Helm upgrade
does on Kubernetes:

1. `decide` chooses the image of each pod (`change/pinning.py`), and renders and parses the chart.
2. `plan` compares the pods with those that run, and tells the user what would be lost (`change/plan.py`).
3. `reconcile` removes, creates and replaces pods, servers before clients, through `Kubelet` (`pods.py`).
4. `wait_ready` waits for each pod's readiness probe. Options, keys, pins and files are in build/cluster/NAME.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from cluster import ClusterError, cgroups, manifests, names, report, slurm_conf, values
from cluster.change import pinning, plan, records
from cluster.change.pinning import Checkout, ImageChoice, ReleaseFit, Wish
from cluster.change.plan import (
    MOST_THREADS,
    JobAtStake,
    PlanStep,
    StepKind,
    UpPlan,
    in_roll_order,
    in_start_order,
)
from cluster.manifests import Manifests, PodSpec
from cluster.names import Addresses
from cluster.pods import Kubelet, RunningPod, description, fingerprint, map_published_ports, write_private
from cluster.render import render
from cluster.report import Row, Stages
from cluster.roles import SERVERS
from cluster.values import CONTROLLER, NAMESPACE, RELEASE, Options
from ground.errors import counted, one_line
from images import pins
from images.pins import EngineImage, Pins

STATE = Path(__file__).resolve().parents[1] / "build" / "cluster"
POLL = 0.1
NO_WISH = Wish()
REFRESH_S = "30"

Log = Callable[[str], None]


class LocalCluster:
    def __init__(
        self,
        client: Any,
        options: Options,
        *,
        root: Path = STATE,
        log: Log = lambda _: None,
        checkout: Checkout | None = None,
    ) -> None:
        self.options = options
        self.checkout = checkout
        self.state = root / options.name
        self.kubelet = Kubelet(client, options.name, self.state)
        self.addresses = Addresses(self.kubelet, self.state)
        self.log = log
        self.stages = Stages(time.monotonic)
        self.records = records.RecordsCarrier(self.kubelet, self.state, self.accounting_pod, log)

    @classmethod
    def load(cls, client: Any, name: str, *, root: Path = STATE, log: Log = lambda _: None) -> LocalCluster:
        """Load the cluster with its last options."""
        options = read_options(name, root)
        if options is None:
            if client is not None:
                names.check_owner(client.api, name, root / name, f"find the cluster {name}")
            hint = names.hint(names.list_started_here(root)) or "make up"
            raise ClusterError(f"find the cluster {name}", "it is not up", hint=hint)
        return cls(client, options, root=root, log=log)

    @contextlib.contextmanager
    def changing(self, cannot: str, *, make: bool = False) -> Iterator[LocalCluster]:
        """Hold the cluster for a change: it belongs to this directory, and no other command changes it meanwhile."""
        names.check_owner(self.kubelet.api, self.options.name, self.state, cannot)
        if make:
            self.state.mkdir(parents=True, exist_ok=True, mode=0o700)
        with names.hold_lock(self.state, cannot):
            yield self

    # Desired state

    def keys(self) -> values.Keys:
        return values.load_or_make_keys(self.state / "keys", users=values.USERS)

    def manifests(self) -> Manifests:
        """Render the chart's objects; a pod names the image that the cluster is pinned to, by its id."""
        images = self.pins(self.kubelet.list_pods()).images
        return self.render(images).starting_from({reference: image.id for reference, image in images.items()})

    def render(self, images: Mapping[str, EngineImage]) -> Manifests:
        """Render the chart's objects, for the Slurm of the controller's image among these."""
        reference = self.options.image("controller")
        image = images.get(reference)
        labels = self.kubelet.labels(image.id if image else reference)
        slurm = values.name_slurm(labels or {report.VERSION_LABEL: image.slurm if image else ""})
        chosen = values.local_values(self.options, self.keys(), slurm)
        documents = render(chosen, release=RELEASE, namespace=NAMESPACE, file=self.options.values_file)
        return manifests.parse(documents, namespace=NAMESPACE)

    def find_image(self, image: str) -> EngineImage | None:
        """Find an image of this machine by its reference or its id."""
        inspected = self.kubelet.inspect_image(image)
        return report.image(inspected) if inspected else None

    def pins(self, running: Mapping[str, RunningPod]) -> Pins:
        """Return the images of this cluster. An older version stored none, so the pods' images count."""
        pinned = pins.read(self.state)
        started = {item.reference: EngineImage(item.image, self.slurm_in(item.image)) for item in running.values()}
        controllers = [
            self.slurm_in(item.image)
            for name, item in running.items()
            if item.role == "controller" or name == CONTROLLER
        ]
        return replace(pinned, images={**started, **pinned.images}, state=max([pinned.state, *controllers]))

    def slurm_in(self, image: str) -> str:
        inspected = self.find_image(image)
        return inspected.slurm if inspected else ""

    def saved_port(self) -> int:
        """Return the login pod's current port."""
        options = read_options(self.options.name, self.state.parent)
        return options.port if options else self.options.port

    def changes_auth(self, running: Mapping[str, RunningPod]) -> bool:
        """Return whether the options change the authentication; ClusterError while that would end steps."""
        before = read_options(self.options.name, self.state.parent)
        if before is None or not running or values.auth(before) == values.auth(self.options):
            return False
        cannot = f"change the authentication from {values.auth(before)} to {values.auth(self.options)}"
        command = ["timeout", "10", "squeue", "--noheader", "--states=R,CG,S,CF,SI,SO", "--format=%A"]
        code, output = self.run_slurm(command)
        if code:
            raise ClusterError(cannot, "slurmctld does not answer whether jobs run", hint="mend the cluster first")
        if jobs := output.split():
            shown = ", ".join(jobs[:5]) + (", ..." if len(jobs) > 5 else "")
            raise ClusterError(cannot, f"jobs run ({shown})", hint="wait until they end, or cancel them")
        return True

    def save(self) -> None:
        write_private(self.state / "options.json", values.dump(self.options))

    # Reconciliation

    def up(
        self,
        *,
        timeout: float = 180.0,
        port: int = 0,
        wish: Wish = NO_WISH,
        agree: Callable[[UpPlan], None] | None = None,
    ) -> None:
        """Apply the options to the cluster. `agree` gets the plan before any pod changes, and may raise to stop it.

        `port`: a requested port; `up` replaces a login pod with another port.
        """
        self.state.mkdir(parents=True, exist_ok=True, mode=0o700)
        before = read_options(self.options.name, self.state.parent)
        records_from = values.find_origin_of_records(before, self.options) if before else ""
        running = self.kubelet.list_pods()
        self.options = self.with_this_machine(port, running)
        changes_auth = self.changes_auth(running)
        with self.stages.stage("chart"):
            desired, choice, pinned = self.decide(running, wish)
            slurm_conf.check_drop_ins(self.kubelet, desired)
            planned = self.plan(desired, choice, running)
        if agree:
            agree(planned)
            running = self.kubelet.list_pods()
        if records_from:
            self.records.move_out(records_from, values.read_accounting_mode(self.options))
        if changes_auth and self.changes_auth(running):
            # Daemons with different authentication cannot talk to each other.
            self.log("all pods start anew, with another authentication")
            with ThreadPoolExecutor(MOST_THREADS) as pool:
                # A worker's drain asks slurmctld, so the servers stop last.
                for servers in (False, True):
                    list(pool.map(self.retire, [pod for pod in running.values() if (pod.role in SERVERS) is servers]))
            running = {}
            planned = self.plan(desired, choice, running)
        pins.write(self.state, replace(pinned, images=choice.images))
        self.save()
        public_keys = values.login_host_keys(self.options, self.keys())
        write_private(self.known_hosts, values.make_known_hosts(public_keys, self.options.port).encode())
        with self.stages.stage("pods"):
            self.revive(planned, desired, running)
            self.reconcile(desired, self.kubelet.list_pods(), timeout=timeout)
        with self.stages.stage("ready"):
            self.records.move_in(values.read_accounting_mode(self.options), timeout=timeout)
            self.wait_ready(desired, timeout=timeout)
        slurm_conf.confirm_values(self.run_slurm, running, self.options, before, self.state / "options.json")

    def rehearse(self, wish: Wish = NO_WISH) -> tuple[int, str]:
        """Start Slurm of the chosen images on a copy of the state, and report losses. Changes nothing."""
        running = self.kubelet.list_pods()
        controller = running.get(self.active_controller(running))
        if controller is None or not controller.running:
            raise ClusterError(slurm_conf.CANNOT_REHEARSE, "the controller does not run", hint="make status")
        desired, _, _ = self.decide(running, wish)
        (pod,) = [pod for pod in desired.pods if pod.name == CONTROLLER]
        slurm = self.slurm_in(pod.image)
        return slurm_conf.rehearse(self.kubelet, controller, pod.image, slurm_conf.files(desired), slurm, self.log)

    def with_this_machine(self, requested: int, running: Mapping[str, RunningPod]) -> Options:
        """Return the options with this machine's decisions: a free port, and whether pods may have cgroups."""
        port = names.choose_port(requested, default=self.options.port, own=self.saved_port() if running else 0)
        if requested not in (0, port):
            self.log(f"port {requested} of 127.0.0.1 is taken, using {port}")
        cgroups_refusal = self.cgroups_refusal()
        options = replace(self.options, port=port, own_cgroups=not cgroups_refusal)
        if cgroups_refusal and values.proctrack(options) == "cgroup":
            raise ClusterError("hold jobs in cgroups", cgroups_refusal, hint="slurm.proctrack: linuxproc")
        return options

    def decide(self, running: Mapping[str, RunningPod], wish: Wish) -> tuple[Manifests, ImageChoice, Pins]:
        """Choose the images and render the chart; ClusterError for images that this cluster cannot use."""
        pinned = self.pins(running)
        reference = self.options.image("controller")
        # Without a request a cluster stays at its state's release, also under another repository's `latest`.
        state = "" if wish.renews(reference) else pins.release(pinned.state)
        kept = self.release_fit([reference], state, pinning.find_image_of("controller", pinned.images))
        image = pinning.choose([reference], pinned.images, self.find_image, wish, kept).images[reference]
        desired = self.render({reference: image})
        fit = self.release_fit([pod.image for pod in desired.pods], image.release, image)
        choice = pinning.choose({pod.image for pod in desired.pods}, pinned.images, self.find_image, wish, fit)
        pinning.check_releases(desired.pods, choice.images, pinned)
        if self.checkout is not None:
            new_images = {name: new for name, new in choice.images.items() if new != pinned.images.get(name)}
            foreign = pinning.foreign_builds(new_images, self.kubelet.labels, self.checkout)
            choice = replace(choice, notes=(*choice.notes, *pinning.foreign_notes(foreign)))
        return desired.starting_from({name: image.id for name, image in choice.images.items()}), choice, pinned

    def release_fit(self, references: Iterable[str], release: str, like: EngineImage | None) -> ReleaseFit:
        labels = self.kubelet.labels(like.id) if like else {}
        return pinning.release_fit(self.kubelet.client, references, release, labels, self.find_image, self.checkout)

    def plan(self, desired: Manifests, choice: ImageChoice, running: Mapping[str, RunningPod]) -> UpPlan:
        """Plan `up`: the steps, what changes, and what users lose. Asks the pods and changes nothing."""
        before = read_options(self.options.name, self.state.parent) if running else None
        steps = self.plan_steps(desired, running)
        present_pods = [pod for pod in desired.pods if pod.name in running]
        changed_files = sorted(set().union(*(self.kubelet.changed_files(pod, desired) for pod in present_pods)))
        slurm = slurm_conf.NO_CHANGE
        if slurm_conf.CONFIG in changed_files:
            controller = running.get(self.active_controller(running))
            file = self.options.values_file
            slurm = slurm_conf.plan_change(self.kubelet, desired, controller, self.slurm_in, file=file)
        clients = self.waiting_clients([pod for pod in present_pods if self.gets_another_slurm(pod, running)])
        stakes = plan.find_stakes(steps, running, run_slurm=self.run_slurm, run=self.exec)
        partitions = slurm.lost_partitions
        lost = plan.losses(steps, partitions=partitions, stakes=stakes, refused=slurm.ended_jobs, clients=clients)
        changes = [
            *(plan.list_changed_settings(before, self.options) if before else ()),
            *(f"files of {name}" for name in changed_files),
            *(f"slurm.conf: {line}" for line in slurm.changes),
        ]
        notes = [*choice.notes]
        if before:
            notes += plan.note_records(values.find_origin_of_records(before, self.options))
            if values.auth(before) == values.auth(self.options):
                notes += plan.note_auth(values.auth(before))
        return UpPlan(tuple(steps), tuple(changes), tuple(notes), (*lost, *plan.list_lost_people(before, self.options)))

    def plan_steps(self, desired: Manifests, running: Mapping[str, RunningPod]) -> list[PlanStep]:
        """List what happens to each pod, in the order of the roll-out: removals first."""
        wanted_names = {pod.name for pod in desired.pods}
        removals = [PlanStep(StepKind.REMOVE, name) for name in sorted(running) if name not in wanted_names]
        with ThreadPoolExecutor(MOST_THREADS) as pool:
            steps = pool.map(lambda pod: self.step(pod, desired, running), in_roll_order(desired.pods))
            return [*removals, *filter(None, steps)]

    def gets_another_slurm(self, pod: PodSpec, running: Mapping[str, RunningPod]) -> bool:
        return self.slurm_in(running[pod.name].image) != self.slurm_in(pod.image)

    def waiting_clients(self, upgraded: Sequence[PodSpec]) -> list[JobAtStake]:
        """Return waiting jobs of srun and salloc if workers are among the upgraded pods."""
        if not any(pod.role == "worker" for pod in upgraded):
            return []
        try:
            return plan.list_waiting_clients(self.run_slurm)
        except (ClusterError, plan.NoAnswer, OSError):
            return []  # the steps' own losses say that slurmctld does not answer

    def step(self, pod: PodSpec, desired: Manifests, running: Mapping[str, RunningPod]) -> PlanStep | None:
        current = running.get(pod.name)
        if current is None:
            return PlanStep(StepKind.CREATE, pod.name)
        described = self.describe(pod, desired)
        if current.spec != fingerprint(described):
            return PlanStep(
                StepKind.REPLACE,
                pod.name,
                plan.reasons(self.kubelet.read_description(pod.name), described, self.slurm_in),
            )
        if not current.running:
            return PlanStep(StepKind.RESTART, pod.name, "it was stopped")
        return (
            PlanStep(StepKind.RESTART, pod.name, f"its {pod.alive.path} fails")
            if report.is_dead(pod, current)
            else None
        )

    def reconcile(self, desired: Manifests, running: Mapping[str, RunningPod], *, timeout: float) -> None:
        """Remove extra pods, create missing ones, replace changed ones, and publish changed files to the rest.

        Slurm's order holds throughout: a new slurmd or client never runs with an old controller.
        """
        wanted_specs = self.specs(desired)
        with ThreadPoolExecutor(MOST_THREADS) as pool:
            extra_pods = [item for name, item in running.items() if name not in wanted_specs]
            list(pool.map(self.retire, extra_pods))
            changed = [
                pod
                for pod in in_roll_order(desired.pods)
                if pod.name in running and running[pod.name].spec != wanted_specs[pod.name]
            ]
            servers = [pod for pod in changed if pod.role in SERVERS]
            self.roll(servers, desired, timeout=timeout)
            # Workers count too: an earlier `up` may have been cut after the controller.
            upgraded = [pod for pod in changed if self.gets_another_slurm(pod, running)]
            if upgraded:
                self.refresh_logins(running)
            if any(pod.role == "worker" for pod in upgraded):
                plan.end_clients(self.run_slurm, self.log)
            self.start([pod for pod in in_start_order(desired.pods) if pod.name not in running], desired, pool)
        for pod in desired.pods:
            current = running.get(pod.name)
            if current and current.spec == wanted_specs[pod.name] and self.kubelet.publish_files(pod, desired):
                self.log(f"{pod.name}: changed files published")
        self.roll([pod for pod in changed if pod.role not in SERVERS], desired, timeout=timeout)

    def roll(self, pods: Iterable[PodSpec], desired: Manifests, *, timeout: float) -> None:
        """Replace one pod at a time, each ready before the next, like a StatefulSet's rollout."""
        for pod in pods:
            self.log(f"{pod.name}: replaced, its description changed")
            self.delete(pod.name, known=desired)
            self.wait_ready(desired, timeout=timeout, only=pod.name)

    def refresh_logins(self, running: Mapping[str, RunningPod]) -> None:
        """Let the logins' sackd fetch the configuration of a controller of another release.

        A new slurmctld does not know an older sackd, and SIGHUP does not make sackd fetch: it would keep an MpiDefault
        that new workers lack, and their steps would hang. The restart is bounded: the sackd of a login whose Slurm is
        newer than the controller's does not start until the login is replaced.
        """
        for name in (name for name, item in running.items() if item.role == "login" and item.running):
            code, output = self.exec(name, ["timeout", REFRESH_S, "minivm", "restart", "sackd"])
            self.log(f"{name}: sackd {'restarted' if code == 0 else 'not restarted: ' + one_line(output)}")

    def revive(self, planned: UpPlan, desired: Manifests, running: Mapping[str, RunningPod]) -> None:
        """Start stopped pods again; no kubelet watches the pods of one machine, so `up` does this in passing."""

        def start_again(step: PlanStep) -> None:
            current = running.get(step.pod)
            if current is None:
                return
            if step.kind is StepKind.REPLACE and not current.running:
                # Its old description may be the cause: start the new one like a missing pod.
                self.log(f"{step.pod}: recreated, it did not run and its description changed")
                self.kubelet.remove(step.pod, current.container)
            elif step.kind is StepKind.RESTART:
                self.log(f"{step.pod}: started again, {step.why}")
                if current.running:
                    self.kubelet.restart(current)
                else:
                    self.kubelet.start(desired.pod(step.pod), current.container)

        with ThreadPoolExecutor(MOST_THREADS) as pool:
            list(pool.map(start_again, planned.steps))

    def describe(self, pod: PodSpec, desired: Manifests) -> dict[str, Any]:
        return description(pod, self.kubelet.image_id(pod.image), map_published_ports(pod, desired))

    def specs(self, desired: Manifests) -> dict[str, str]:
        return {pod.name: fingerprint(self.describe(pod, desired)) for pod in desired.pods}

    def start(self, pods: Iterable[PodSpec], desired: Manifests, pool: ThreadPoolExecutor) -> None:
        """Start new containers at new addresses, in parallel."""
        missing = list(pods)
        if not missing:
            return
        assigned = self.addresses.assign(missing, desired)
        starts = [pool.submit(self.launch, pod, desired, assigned) for pod in missing]
        for start in starts:
            start.result()

    def launch(self, pod: PodSpec, desired: Manifests, assigned: Mapping[str, str]) -> None:
        aliases, address = manifests.aliases(pod, desired.services), assigned[pod.name]
        hosts = self.addresses.hosts(pod, desired, assigned)
        described = self.describe(pod, desired)
        container = self.kubelet.create(
            pod, desired, address=address, described=described, aliases=aliases, hosts=hosts
        )
        if pod.role == "controller":
            # Written before the start: from then on the state may be of this Slurm.
            pinned = pins.read(self.state)
            pins.write(self.state, replace(pinned, state=max(pinned.state, self.slurm_in(described["image"]))))
        elif pod.role == "accounting":
            pinned = pins.read(self.state)
            pins.write(self.state, replace(pinned, records=max(pinned.records, self.slurm_in(described["image"]))))
        self.kubelet.start(pod, container)
        self.log(f"{pod.name}: started at {address}")

    def wait_ready(self, desired: Manifests, *, timeout: float, only: str = "") -> None:
        """Wait until every pod is ready; log each one."""
        begun = logged = time.monotonic()
        waiting = {pod.name: pod for pod in in_start_order(desired.pods) if only in ("", pod.name)}
        while True:
            running, reasons = self.kubelet.list_pods(), {}
            for name, pod in list(waiting.items()):
                answer = report.read_readiness(pod, running.get(name))
                if answer.ready:
                    self.log(f"{name}: ready after {time.monotonic() - begun:.1f} s")
                    logged = time.monotonic()
                    del waiting[name]
                else:
                    reasons[name] = answer.reason
                    report.refuse_hopeless(pod, running.get(name))
            if not waiting:
                return
            if time.monotonic() - logged >= report.QUIET_S:
                # The first pod in start order is the likely cause of the others.
                logged, (name, reason) = time.monotonic(), next(iter(reasons.items()))
                more = f" (and {counted(len(reasons) - 1, 'more pod')})" if len(reasons) > 1 else ""
                self.log(f"waits for {name}{more}: {reason}")
            if time.monotonic() - begun > timeout:
                # Includes pods outside this wait, which may be the cause.
                pods = in_start_order(desired.pods)
                readings = [(pod.name, report.read_readiness(pod, running.get(pod.name))) for pod in pods]
                causes = plan.not_ready([(name, answer.reason) for name, answer in readings if not answer.ready])
                raise ClusterError(
                    "bring the cluster up", f"after {timeout:.0f} s not ready:{causes}", hint="make status"
                )
            time.sleep(POLL)

    # One pod

    def delete(self, name: str, *, known: Manifests | None = None, force: bool = False) -> None:
        """Delete a pod like `kubectl delete pod`: it stops within its grace period, and a new one takes its place.

        `force` simulates a failed machine: no preStop, no TERM.
        """
        known = known or self.manifests()
        pod, running = known.pod(name), self.kubelet.list_pods()
        self.check_image(pod)
        if name in running:
            if not force:
                self.stop(running[name], pod)
            self.kubelet.remove(name, running[name].container)
        with ThreadPoolExecutor(1) as pool:
            self.start([pod], known, pool)

    def stop(self, running: RunningPod, pod: PodSpec | None = None) -> None:
        """Stop a pod, and log meanwhile what its drain waits for."""

        def describe() -> str:
            reason = f": {report.read_readiness(pod, running).reason}" if pod else ""
            return f"{running.pod}: stops, within {running.grace} s in all{reason}"

        with report.progress(self.log, describe):
            self.kubelet.stop(running)

    def check_image(self, pod: PodSpec) -> None:
        """Raise ClusterError if the pod's image was removed: the running pod is better than none."""
        for reference, image in pins.read(self.state).images.items():
            if image.id == pod.image and self.find_image(image.id) is None:
                pinning.refuse_removed(reference, image)

    def retire(self, running: RunningPod) -> None:
        """Remove a pod that the chart no longer creates."""
        self.stop(running)
        self.kubelet.remove(running.pod, running.container)
        shutil.rmtree(self.state / "pods" / running.pod, ignore_errors=True)
        self.log(f"{running.pod}: gone")

    def exec(self, pod: str, command: Iterable[str], *, user: str = "") -> tuple[int, str]:
        running = self.kubelet.list_pods()
        if pod not in running:
            raise ClusterError(f"run a command in {pod}", "there is no such pod")
        return self.kubelet.exec(running[pod].container, command, user=user)

    def active_controller(self, running: Mapping[str, RunningPod]) -> str:
        """Return the name of the active controller's pod, or of the first one while none says that it is active."""
        controllers = [item for item in running.values() if item.role == "controller"]
        if len(controllers) > 1:
            for item in controllers:
                if report.read_turn(item).startswith("active"):
                    return item.pod
        return CONTROLLER

    def accounting_pod(self, mode: str) -> RunningPod | None:
        """Return the pod that has slurmdbd in this mode."""
        running = self.kubelet.list_pods()
        name = records.POD[mode]
        return running.get(self.active_controller(running) if name == CONTROLLER else name)

    def run_slurm(self, command: Iterable[str]) -> tuple[int, str]:
        """Run a command like `exec`, in the pod of the active controller."""
        return self.exec(self.active_controller(self.kubelet.list_pods()), command)

    # Status

    def status(self) -> list[Row]:
        desired, running = self.manifests(), self.kubelet.list_pods()
        with ThreadPoolExecutor(MOST_THREADS) as pool:
            slurm = pool.submit(self.slurm_states, running)
            readings = pool.map(lambda pod: (pod.name, report.read_status(pod, running.get(pod.name))), desired.pods)
            images = {item.image: self.kubelet.inspect_image(item.image) or {} for item in running.values()}
            return report.rows(desired.pods, running, dict(readings), slurm.result(), images)

    def slurm_states(self, running: Mapping[str, RunningPod]) -> dict[str, str]:
        """Ask the controller once for the nodes' states, with a short timeout."""
        controller = self.active_controller(running)
        if controller not in running or not running[controller].running:
            return {}
        command = ["timeout", "3", "sinfo", "-h", "-N", "-o", "%N|%T|%E"]
        code, output = self.kubelet.exec(running[controller].container, command)
        if code != 0:
            return {controller: "slurmctld does not answer"}
        return report.slurm_states(output) | {controller: "up"}

    def not_granted(self) -> list[str]:
        info = self.kubelet.api.info()
        options = [str(option) for option in info.get("SecurityOptions") or ()]
        return report.not_granted(self.manifests().pods, cgroups=cgroups.explain_refusal(info), security=options)

    def cgroups_refusal(self) -> str:
        """Return why pods cannot have cgroups of their own here; "" if they can."""
        return cgroups.explain_refusal(self.kubelet.api.info())

    # Login and removal

    @property
    def known_hosts(self) -> Path:
        return self.state / "known_hosts"

    def ssh_command(self, user: str, *command: str) -> list[str]:
        return values.ssh_command(self.keys(), user, *command, port=self.options.port, known_hosts=self.known_hosts)

    def down(self) -> bool:
        """Remove everything of this cluster by its label; return whether there was anything.

        Containers, volumes, the network, and the state on disk.
        """
        existed = self.state.exists() or self.options.name in names.list_in_engine(self.kubelet.api)
        running = self.kubelet.list_pods()
        with ThreadPoolExecutor(MOST_THREADS) as pool:
            list(pool.map(lambda item: self.kubelet.remove(item.pod, item.container), running.values()))
        for volume in self.kubelet.volumes():
            self.kubelet.api.remove_volume(volume, force=True)
        self.kubelet.remove_network()
        cgroups.remove(self.options.name)
        shutil.rmtree(self.state, ignore_errors=True)
        return existed


def read_options(name: str, root: Path = STATE) -> Options | None:
    """Return a cluster's last options; None without any."""
    path = root / name / "options.json"
    try:
        return values.load(path.read_bytes(), str(path))
    except FileNotFoundError:
        return None
