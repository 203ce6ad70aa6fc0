"""Drop-ins in the chart: errors are reported before any pod changes, and the first drop-in needs no new pod."""

from __future__ import annotations

import re
from typing import Any

import pytest

from cluster import ClusterError
from cluster.render import CHART, Document
from init.plan.spec import KEYS
from tests.support.rendered_chart import render

GOOD = {
    "extra.yaml": "command: [/bin/sleep, inf]\nneeds: [munged]\n",
    "sssd.yaml": "disabled: true\n",
    "later.yaml": "kind: gate\nready: {tcp: 'x:1'}\n",
}


def rendered(**login: dict[str, Any]) -> list[Document]:
    return list(render({"dropIns": {"login": login}}, release="slurm", namespace="hpc"))


def pods(documents: list[Document]) -> list[Any]:
    return [document["spec"] for document in documents if document["kind"] == "StatefulSet"]


def test_the_first_drop_in_of_a_role_changes_no_pod() -> None:
    """The first drop-in restarts no pod: its volume exists from the start.

    Regression: a volume that did not exist before restarted the users' login pod.
    """
    without, first = rendered(), rendered(services=GOOD, supervisor={"old.conf": "[program:old]\ncommand=/bin/x\n"})
    assert pods(without) == pods(first)
    maps = [document for document in first if document["kind"] == "ConfigMap"]
    data: dict[str, Any] = {document["metadata"]["name"]: document.get("data") for document in maps}
    assert data["slurm-login-services"] == GOOD and set(data["slurm-login-supervisor"]) == {"old.conf"}
    assert data["slurm-worker-services"] == {}


@pytest.mark.parametrize(
    ("kind", "files", "words"),
    [
        ("services", {"extra.yaml": "comand: [/bin/x]\n"}, "extra.yaml: unknown key comand; known: "),
        ("services", {"extra.yaml": "command: [/bin/x\n"}, "extra.yaml: not a service file: "),
        ("services", {"extra.yaml": "- a list\n"}, "extra.yaml: not a service file: "),
        ("services", {"extra.yaml": "about: nothing\n"}, "extra.yaml: command is missing"),
        ("services", {"extra.yaml": "disabled: false\n"}, "extra.yaml: command is missing"),
    ],
)
def test_a_wrong_drop_in_is_refused_by_the_render(kind: str, files: dict[str, Any], words: str) -> None:
    with pytest.raises(ClusterError, match=re.escape(words)) as caught:
        rendered(**{kind: files})
    assert f"dropIns.login.{kind}" in str(caught.value)


def test_the_chart_knows_the_keys_that_init_knows() -> None:
    text = (CHART / "templates" / "_helpers.tpl").read_text()
    (line,) = [line for line in text.splitlines() if line.startswith("{{- $known := list ")]
    assert set(re.findall(r'"([^"]+)"', line)) == {*KEYS, "disabled"}
