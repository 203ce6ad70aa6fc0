"""Every right that the chart grants in Kubernetes is on docs/reference/rights.md with its reason, and no other."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import yaml

from cluster.render import CHART
from tests.helm import rendered_for

PAGE = Path(__file__).resolve().parents[3] / "docs/reference/rights.md"
HOOK = 'not (.Capabilities.APIVersions.Has "apps/v1beta1")'
REMEDY = {"job": {"template": {"spec": {"containers": [{"name": "r", "image": "r"}], "restartPolicy": "Never"}}}}
FLEET: dict[str, Any] = {
    "enabled": True,
    "machines": {"enabled": True},
    "policy": {"fencing": "act", "cordon": True, "machines": {"mode": "act", "remedies": {"reboot": REMEDY}}},
}
POOLS = {"cpu": {"replicas": 1}}
# Together these values render every object that grants a right.
CASES: tuple[dict[str, Any], ...] = (
    {"podConditions": {"enabled": True}, "workers": {"pools": POOLS}},
    {"podConditions": {"enabled": True}, "accounting": {"mode": "pod"}},
    {"accounting": {"mode": "none"}, "controller": {"replicas": 2, "persistence": {"existingClaim": "state"}}},
    {"podConditions": {"enabled": True}, "workers": {"pools": POOLS}, "fleet": FLEET},
    {"login": {"keepSeconds": 43200}, "people": {"existingConfigMap": "lab"}},
    {
        "login": {"keepSeconds": 43200},
        "people": {"existingSecret": "lab", "scim": {"enabled": True, "tokenSecret": "token"}},
    },
    {
        "secrets": {"sshHostKeys": {"existingSecret": "brought"}},
        "workers": {"pools": {"gpu": {"kind": "WorkerPool", "replicas": 1}}},
        "fleet": FLEET
        | {"workerPools": {"enabled": True}}
        | {"policy": {**FLEET["policy"], "lend": {"pools": {"gpu": 1}, "namespaces": ["llm"]}}},
    },
)


def rights(values: dict[str, Any], chart: Path) -> set[tuple[str, str, str, str]]:
    """Return role, verbs, resource, and whether the right is limited to named objects."""
    texts = rendered_for("v1.31.0", values, release="slurm", namespace="hpc", chart=chart)
    found = set()
    for name, text in texts.items():
        for item in yaml.safe_load_all(text) if name.endswith(".yaml") else ():
            if not item or item["kind"] not in ("Role", "ClusterRole"):
                continue
            where = item["metadata"].get("namespace", "")
            role = f"{item['kind']} {item['metadata']['name']}" + (f" in {where}" if where else "")
            for rule in item["rules"]:
                for resource in rule["resources"]:
                    group = rule["apiGroups"][0]
                    of = f"{group}/{resource}" if group else resource
                    named = "named" if rule.get("resourceNames") else "all"
                    found.add((role, " ".join(rule["verbs"]), of, named))
    return found


def test_the_page_has_each_right_and_no_other(tmp_path: Path) -> None:
    chart = tmp_path / "chart"
    shutil.copytree(CHART, chart)
    page = chart / "templates/uninstall.yaml"
    page.write_text(page.read_text().replace(HOOK, "true"))
    given = {right for values in CASES for right in rights(values, chart)}
    rows = re.findall(r"^\| `(.+?)` \| (.+?) \| `(.+?)` \| (named|all) \| (.+?) \|$", PAGE.read_text(), re.MULTILINE)
    told = {(role, verbs, resource, named) for role, verbs, resource, named, _ in rows}
    assert told == given
    assert not [right for right in given if "*" in "".join(right)], "no right is for everything"
    assert not [right for right in given if "secrets" in right[2] and right[3] == "all"], "Secrets are named"
