"""Follow a page as a reader: type each command where the page says; stand in for programs that this machine lacks."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.helm import CACHE
from tests.pages import Block

ROOT = Path(__file__).resolve().parents[1]
# They know what the pages use of them, and refuse anything else. The pods are those of this machine; a Secret is a
# line of what it would hold, in the file made.txt.
KUBECTL = """#!/bin/sh
set -eu
[ "$1" != -n ] || shift 2
case "$1 $2" in
    exec\\ *) shift ;;
    "create secret")
        [ "$3" = generic ]; name=$4; shift 4
        for file in "$@"; do
            file=${file#--from-file=}
            test -s "${file#*=}"; echo "$name ${file%%=*}" >> made.txt
        done
        exit ;;
    "create namespace") exit ;;
    *) echo "kubectl: no $1 on this machine" >&2; exit 1 ;;
esac
interactive=
case $1 in -i|--stdin) interactive=-i; shift ;; esac
pod=$1; [ "$2" = -- ]; shift 2
exec docker exec $interactive "minivm-$MINIVM_NAME-$pod" "$@"
"""
HELM = f"""#!/bin/sh
KUBECACHEDIR='{CACHE["KUBECACHEDIR"]}' PYTHONPATH='{ROOT}' exec '{sys.executable}' -m tests.helm "$@"
"""
# Commands that end with 1 while a pod is not ready, which a busy machine makes it for a moment: they are typed again.
ASKS = re.compile(r"^(?=(?:kubectl exec \S+ -- )?minivm why\b[^|;&]*$|make status$)", re.MULTILINE)
AGAIN = (
    'again() { end=$(($(date +%s) + 120)); until "$@"; do [ "$(date +%s)" -lt $end ] || return 1; sleep 1; done; }\n'
)


def programs(directory: Path) -> Path:
    directory.mkdir()
    for name, text in (("kubectl", KUBECTL), ("helm", HELM)):
        (directory / name).write_text(text)
        (directory / name).chmod(0o755)
    return directory


def checkout(directory: Path) -> Path:
    """Link this repository under another name: files that a page writes into its directory must not stay here."""
    directory.mkdir()
    for entry in ROOT.iterdir():
        (directory / entry.name).symlink_to(entry)
    return directory


def follow(block: Block, env: Mapping[str, str], directory: Path) -> str:
    """Type it, and be told where the page is wrong. Who logs in gets what is typed there by `make ssh`."""
    there = ["make", "-s", "ssh"] if block.user else ["bash", "-o", "pipefail", "-s"]
    if block.pod:
        there = ["kubectl", "exec", "-i", block.pod, "--", *there]
    done = subprocess.run(
        there, cwd=directory, env=dict(env), input=patient(block.script), capture_output=True, text=True, check=False,
        timeout=500,
    )  # fmt: skip
    said = done.stdout + done.stderr
    assert done.returncode == 0, f"docs/{block.page}:{block.line}: exit {done.returncode}\n{block.text}\n{said}"
    return said


def patient(script: str) -> str:
    """Let a command that asks whether pods are ready wait until they are."""
    return AGAIN + ASKS.sub("again ", script) if ASKS.search(script) else script


def follow_all(page: Iterable[Block], env: Mapping[str, str], directory: Path) -> dict[int, str]:
    """Line -> what was said there. A file of the page is there from its place on, if it is not there already."""
    said = {}
    for block in page:
        if block.file and not (directory / block.file).exists():
            (directory / block.file).write_text(block.text)
        if block.runs:
            said[block.line] = follow(block, env, directory)
    return said
