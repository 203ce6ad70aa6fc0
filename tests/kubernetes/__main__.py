"""`python -m tests.kubernetes`: a Kubernetes of several machines on this one, by hand.

build                     its programs, once a machine (minutes)
up [--nodes N] [--images PREFIX]
status | down
node NAME off|on          a power cut, and back
node NAME cut|heal        the network cable
node NAME kubelet-kill|kubelet-start|containerd-kill|containerd-start
node NAME run WORD...     a command on the node
hold                      up for as long as standard input is open; the tests' own
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable

from tests.kubernetes import machine as power
from tests.kubernetes import network, plan, programs
from tests.kubernetes.errors import LabError
from tests.kubernetes.host import attempt
from tests.kubernetes.lab import STATE, Lab, kept

ROLES = ("controller", "login", "worker", "demo", "fleet")
BEGUN = time.monotonic()


def say(text: str) -> None:
    print(f"[{time.monotonic() - BEGUN:5.1f} s] {text}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.kubernetes", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    words = parser.add_subparsers(dest="word", required=True, metavar="WORD")
    for name in ("build", "status", "down"):
        words.add_parser(name)
    for name in ("up", "hold"):
        one = words.add_parser(name)
        one.add_argument("--nodes", type=int, default=3, choices=range(1, plan.MOST_NODES + 1), metavar="N")
        one.add_argument("--images", default=os.environ.get("MINIVM_BUILD_PREFIX") or "minivm", metavar="PREFIX")
    node = words.add_parser("node")
    node.add_argument("name")
    node.add_argument("what", choices=list(NODE_WORDS))
    node.add_argument("command", nargs=argparse.REMAINDER)
    asked = parser.parse_args()
    try:
        return act(asked)
    except LabError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def act(asked: argparse.Namespace) -> int:
    if asked.word == "build":
        print(programs.build().root)
    elif asked.word == "up":
        lab = Lab(programs.build(), STATE, asked.nodes, say)
        STATE.mkdir(parents=True, exist_ok=True)
        (STATE / "stays").touch()
        lab.up(names(asked.images))
        print(f"export KUBECONFIG={lab.kubeconfig} PATH={lab.programs.bin}:$PATH")
    elif asked.word == "hold":
        with kept(asked.nodes, names(asked.images), say) as lab:
            print(f"ready {lab.state}", flush=True)
            sys.stdin.read()
    elif asked.word == "down":
        Lab.found(say).down()
    elif asked.word == "status":
        status(Lab.found(say))
    else:
        lab = Lab.found(say)
        sys.stdout.write(NODE_WORDS[asked.what](lab, asked.name, asked.command) or "")
    return 0


def names(prefix: str) -> list[str]:
    return [f"{prefix}/{role}:latest" for role in ROLES]


def status(lab: Lab) -> None:
    for machine in lab.machines:
        runs = " ".join(f"{name}{'' if well else ' (dead)'}" for name, well in power.daemons(machine).items())
        print(f"{machine.name:3} {machine.address:11} {runs if power.number(machine) else 'off'}")
    print(lab.kubectl("get", "nodes", "-o", "wide"), end="")
    print(f"export KUBECONFIG={lab.kubeconfig} PATH={lab.programs.bin}:$PATH")


NODE_WORDS: dict[str, Callable[[Lab, str, list[str]], str | None]] = {
    "off": lambda lab, name, _: lab.power_cut(name),
    "on": lambda lab, name, _: lab.power_back(name),
    "cut": lambda lab, name, _: network.plug(lab.node(name), "down"),
    "heal": lambda lab, name, _: network.plug(lab.node(name), "up"),
    "kubelet-kill": lambda lab, name, _: power.kill(lab.node(name), "kubelet"),
    "kubelet-start": lambda lab, name, _: lab.start_kubelet(lab.node(name)),
    "containerd-kill": lambda lab, name, _: power.kill(lab.node(name), "containerd"),
    "containerd-start": lambda lab, name, _: lab.start_containerd(lab.node(name)),
    "run": lambda lab, name, words: attempt(*power.entered(lab.node(name)), *words).stdout,
}

if __name__ == "__main__":
    sys.exit(main())
