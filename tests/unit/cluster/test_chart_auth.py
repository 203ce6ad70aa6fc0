"""The chart's choice of authentication: slurm for a new cluster, and never another one for a cluster that is there."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import helm_python
import pytest
import yaml

from cluster import ClusterError
from cluster.render import CHART, render_texts
from tests.support.kube_objects import Object, cluster_of

UNKNOWN = "this render sees no cluster, and must not change how a running one authenticates: set slurm.auth"
MUNGE_KEY = {"secrets": {"munge": {"key": "bXVu" * 12}}}
SLURM_KEY = {"secrets": {"slurm": {"key": "bXVu" * 12}}}


def render_in(
    folder: Path, objects: list[Object], values: dict[str, Any], *, chart: Path = CHART, forbidden: tuple[str, ...] = ()
) -> dict[str, str]:
    """Render as `helm install` and `helm upgrade` do, with what the cluster has."""
    with cluster_of(objects, folder, forbidden=forbidden) as config, helm_python.Chart.load(chart) as loaded:
        loaded.validate_schema(loaded.merge_values(values))
        return config.render(loaded, values, name="slurm", namespace="hpc", is_upgrade=bool(objects))


def auth_of(texts: dict[str, str]) -> str:
    """Return the authentication, by slurm.conf, every pod and the Secrets, which have to agree."""
    documents = [item for name, text in texts.items() if name.endswith(".yaml") for item in yaml.safe_load_all(text)]
    named = {(item["kind"], item["metadata"]["name"]): item for item in documents if item}
    conf = named["ConfigMap", "slurm-config"]["data"]["slurm.conf"].splitlines()
    (auth,) = [str(line).removeprefix("AuthType=auth/") for line in conf if line.startswith("AuthType=")]
    assert f"CredType=cred/{auth}" in conf
    for (kind, _), item in named.items():
        if kind == "StatefulSet":
            pod = item["spec"]["template"]["spec"]
            env = {one["name"]: one.get("value") for one in pod["containers"][0]["env"]}
            assert env.get("MINIVM_AUTH", "munge") == auth
            mounted = {volume["name"] for volume in pod["volumes"]} & {"munge", "slurm-key"}
            assert mounted == {"munge" if auth == "munge" else "slurm-key"}
    return auth


def config(text: str) -> Object:
    """Return the ConfigMap of a cluster that is there."""
    return {"kind": "ConfigMap", "apiVersion": "v1", "metadata": {"name": "slurm-config"}, "data": {"slurm.conf": text}}


def key(name: str) -> Object:
    return {"kind": "Secret", "apiVersion": "v1", "metadata": {"name": f"slurm-{name}"}, "data": {}}


MUNGE, SLURM = (config(f"ClusterName=c\nAuthType=auth/{name}\nCredType=cred/{name}\n") for name in ("munge", "slurm"))


@pytest.mark.parametrize(
    ("there", "values", "auth"),
    [
        ([], {}, "slurm"),
        ([], {"slurm": {"auth": "munge"}}, "munge"),
        # Its owner brings munge's key.
        ([], MUNGE_KEY, "munge"),
        ([], {"secrets": {"munge": {"existingSecret": "mine"}}}, "munge"),
        ([], SLURM_KEY, "slurm"),
        # A cluster that runs: with default values, or with keys that its owner prepares for the other mode.
        ([MUNGE, key("munge")], {}, "munge"),
        ([MUNGE], {}, "munge"),
        ([MUNGE, key("munge")], {"slurm": {"auth": ""}}, "munge"),
        ([MUNGE, key("munge"), key("slurm-key")], SLURM_KEY, "munge"),
        ([SLURM, key("munge"), key("slurm-key")], {}, "slurm"),
        ([SLURM, key("slurm-key")], MUNGE_KEY, "slurm"),
        ([config("authtype = auth/slurm\nAuthType=auth/munge\n# AuthType=auth/slurm\n")], {}, "munge"),
        # Its owner's word.
        ([MUNGE, key("munge")], {"slurm": {"auth": "slurm"}}, "slurm"),
        ([SLURM, key("slurm-key")], {"slurm": {"auth": "munge"}}, "munge"),
        # Uninstalled and installed again: the keys are left.
        ([key("munge")], {}, "munge"),
        ([key("slurm-key")], {}, "slurm"),
    ],
)
def test_a_new_cluster_has_slurm_and_one_that_is_there_keeps_what_it_has(
    there: list[Object], values: dict[str, Any], auth: str, tmp_path: Path
) -> None:
    assert auth_of(render_in(tmp_path, there, values)) == auth


@pytest.mark.parametrize(
    ("there", "values", "words"),
    [
        ([key("munge"), key("slurm-key")], {}, "there are keys of munge and of auth/slurm"),
        ([key("slurm-key")], MUNGE_KEY, "there are keys of munge and of auth/slurm"),
        ([config("ClusterName=c\nAuthType=auth/none\n")], {}, "the ConfigMap slurm-config has no AuthType of"),
        ([config("# AuthType=auth/slurm\n")], {}, "the ConfigMap slurm-config has no AuthType of"),
    ],
)
def test_what_does_not_say_one_mode_is_refused(
    there: list[Object], values: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(helm_python.HelmError, match=words):
        render_in(tmp_path, there, values)
    named = values | {"slurm": {"auth": "munge"}}
    assert auth_of(render_in(tmp_path, there, named)) == "munge"


def test_an_account_that_may_not_look_is_told_so_and_names_the_mode(tmp_path: Path) -> None:
    with pytest.raises(helm_python.HelmError, match="forbidden"):
        render_in(tmp_path, [], {}, forbidden=("ServiceAccount",))
    assert auth_of(render_in(tmp_path, [], {"slurm": {"auth": "slurm"}}, forbidden=("ServiceAccount",))) == "slurm"


@pytest.mark.parametrize("values", [{}, {"slurm": {"auth": ""}}, {"slurm": {"auth": None}}, MUNGE_KEY, SLURM_KEY])
def test_a_render_without_a_cluster_has_to_be_told(values: dict[str, Any]) -> None:
    """Argo CD and `helm template`: the cluster may be there already, and use either mode."""
    with pytest.raises(ClusterError, match=UNKNOWN):
        render_texts(values, release="slurm", namespace="hpc")
    for auth in ("munge", "slurm"):
        named = values | {"slurm": {"auth": auth}}
        assert auth_of(render_texts(named, release="slurm", namespace="hpc")) == auth


def test_lint_asks_no_cluster_and_needs_no_mode() -> None:
    report = helm_python.lint(CHART, {"secrets": {"sssd": {"existingSecret": "s"}}}, strict=True, namespace="hpc")
    assert not report["errors"], report


@pytest.mark.parametrize(("auth", "told"), [("munge", True), ("slurm", False)])
def test_the_notes_tell_a_munge_cluster_how_to_move(auth: str, told: bool, tmp_path: Path) -> None:
    (notes,) = [text for name, text in render_in(tmp_path, [config(f"AuthType=auth/{auth}\n")], {}).items()
                if name.endswith("NOTES.txt")]  # fmt: skip
    assert ("docs/how-to/change-authentication.md moves this one" in notes) == told


@pytest.mark.parametrize("before", ["", "  auth: munge\n"])
def test_values_of_an_older_chart_leave_a_cluster_as_it_is(before: str, tmp_path: Path) -> None:
    """`helm upgrade --reuse-values` has the older chart's defaults in place of this one's."""
    shutil.copytree(CHART, tmp_path / "chart")
    values = tmp_path / "chart/values.yaml"
    text = values.read_text()
    assert '  auth: ""\n' in text
    values.write_text(text.replace('  auth: ""\n', before))
    assert auth_of(render_in(tmp_path, [MUNGE], {}, chart=tmp_path / "chart")) == "munge"
