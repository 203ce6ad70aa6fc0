"""`helm`, as far as the pages and the tests use it, by Helm's own engine; a Kubernetes is KUBECONFIG's."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import ssl
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import helm_python
import yaml
from helm_python import _native

from cluster import ClusterError
from cluster.render import CHART, render_texts
from cluster.values import merge
from tests.support.rendered_chart import new

# The chart's own kinds, which Helm installs before everything else.
KINDS = CHART / "charts/crds/crds"
# The first minor release of Kubernetes that takes validation rules in a kind.
KNOWS_RULES = 25
WORDS = ("template", "lint", "install", "upgrade", "uninstall")
# Helm keeps what it knows of an API at home if nobody says where, and is told by what its process starts with.
CACHE = {"KUBECACHEDIR": str(Path(__file__).resolve().parents[1] / "build/helm")}


def helm(kubeconfig: Path, *words: str, values: Mapping[str, Any] | None = None) -> None:
    own = () if values is None else ("--values", "/dev/stdin")
    done = subprocess.run(
        [sys.executable, "-m", "tests.helm", *words, *own],
        input=yaml.safe_dump(values),
        env=os.environ | CACHE | {"KUBECONFIG": str(kubeconfig)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"helm {' '.join(words)}: {done.returncode}\n{done.stdout}{done.stderr}"


def server(namespace: str) -> helm_python.Config:
    return helm_python.Config(kubeconfig_path=os.environ["KUBECONFIG"], namespace=namespace)


def rendered_for(
    version: str, values: Mapping[str, Any], *, release: str, namespace: str, chart: Path = CHART
) -> dict[str, str]:
    """`helm template --kube-version`, of a new cluster unless the values name an authentication.

    The library takes the version, and its Python half does not hand it on.
    """
    options = {"name": release, "namespace": namespace, "kube_version": version}
    try:
        with helm_python.Chart.load(chart) as loaded:
            text = _native.call_string("helm_render", loaded._raw(), json.dumps(new(values)), json.dumps(options))
    except helm_python.HelmError as error:
        raise ClusterError(f"render {chart.name} for {version}", str(error).strip()) from error
    texts: dict[str, str] = json.loads(text)
    return texts


def minor_release() -> int:
    """Return the API server's minor release: 20 of 1.20. It tells everybody."""
    cluster = yaml.safe_load(Path(os.environ["KUBECONFIG"]).read_text())["clusters"][0]["cluster"]
    trusts = ssl._create_unverified_context()
    with urllib.request.urlopen(f"{cluster['server']}/version", context=trusts, timeout=60) as reply:
        return int(json.load(reply)["minor"].rstrip("+"))


def without_rules(chart: Path, folder: Path) -> Path:
    """Copy the chart with kinds that every API server takes: one before 1.25 refuses a field that it does not know."""
    shutil.copytree(chart, folder / chart.name)
    for file in (folder / chart.name).glob("charts/crds/crds/*.json"):
        kind = json.loads(file.read_text())
        for version in kind["spec"]["versions"]:
            schema = version["schema"]["openAPIV3Schema"]
            for part in (schema, schema["properties"]["spec"]):
                part.pop("x-kubernetes-validations", None)
        file.write_text(json.dumps(kind))
    return folder / chart.name


def main() -> int:
    parser = argparse.ArgumentParser(prog="helm")
    words = parser.add_subparsers(dest="word", required=True)
    template, lint, install, upgrade, uninstall = (words.add_parser(word) for word in WORDS)
    template.add_argument("--show-only")
    template.add_argument("--set", default="")
    upgrade.add_argument("--reuse-values", action="store_true")
    for command in (template, install, upgrade, uninstall):
        command.add_argument("release")
    for command in (template, lint, install, upgrade):
        command.add_argument("chart", type=Path)
        command.add_argument("-f", "--values", type=Path, required=True)
    for command in (template, lint, install, upgrade, uninstall):
        command.add_argument("-n", "--namespace", default="default")
    install.add_argument("--create-namespace", action="store_true")
    uninstall.add_argument("--ignore-not-found", action="store_true")
    asked = parser.parse_args()
    if asked.word == "uninstall":
        with server(asked.namespace) as config:
            # The command line's own default, which bounds the hooks.
            config.uninstall(asked.release, ignore_not_found=asked.ignore_not_found, timeout=300)
        return 0
    values = yaml.safe_load(asked.values.read_text())
    if asked.word == "install":
        with server(asked.namespace) as config, tempfile.TemporaryDirectory() as folder:
            made = {"namespace": asked.namespace, "create_namespace": asked.create_namespace}
            chart = asked.chart if minor_release() >= KNOWS_RULES else without_rules(asked.chart, Path(folder))
            config.install(chart, asked.release, values, **made)
        return 0
    if asked.word == "upgrade":
        with server(asked.namespace) as config:
            config.upgrade(
                asked.chart, asked.release, values, namespace=asked.namespace, reuse_values=asked.reuse_values
            )
        return 0
    if asked.word == "lint":
        report = helm_python.lint(asked.chart, values, strict=True, namespace=asked.namespace)
        print(*report["messages"], *report["errors"], sep="\n")
        return 1 if report["errors"] else 0
    try:
        values = merge(values, helm_python.parse_set_string(asked.set) if asked.set else {})
        texts = render_texts(values, release=asked.release, namespace=asked.namespace, chart=asked.chart)
    except ClusterError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    for name, text in sorted(texts.items()):
        inside = name.partition("/")[2]
        if inside == asked.show_only or (not asked.show_only and name.endswith(".yaml")):
            print(f"---\n# Source: {name}\n{text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
