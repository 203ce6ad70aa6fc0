"""The conformance suite: its adapters, its report, and that each check can fail."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.conformance import conftest
from tests.conformance.adapter import Adapter, AdapterError, Field, load, pairs
from tests.conformance.report import GROUPS, Report, Result, check_name, table

SUITE = Path(__file__).resolve().parents[1] / "conformance"
ROOT = SUITE.parents[1]
ADAPTERS = sorted(SUITE.glob("adapters/*.yaml"))
SUITE_MAIN = (sys.executable, "-m", "tests.conformance", "-p", "tests.support.hollow_kubectl")
MAY = {"pytest", "yaml", "tests"}
# Everything that an adapter can say, so that no check is left out for want of a word.
WHOLE = {
    "product": "hollow", "namespace": "hpc", "patience": 0.001,
    "roles": {
        "controller": {"selector": "role=controller", "container": "slurm"},
        "login": {"selector": "role=login", "container": "slurm"},
        "worker": {"selector": "role=worker", "container": "slurm"},
        "accounting": {"selector": "role=controller", "container": "slurm"},
    },
    "administrator": {"name": "root", "role": "controller"},
    "user": {"name": "alice", "role": "login"}, "other_user": {"name": "bob", "role": "login"},
    "daemons": {"slurmctld": "controller", "slurmd": "worker", "slurmdbd": "accounting"},
    "shared_directory": "/home/alice", "ssh": {"service": "ssh", "port": 22},
    "scale": {"object": "statefulset/w", "path": ["spec", "replicas"]},
    "roll": {role: {"object": "statefulset/w", "path": ["spec"]} for role in ("controller", "login", "worker")},
    "configuration": {"object": "configmap/c", "path": ["data", "slurm.conf"]},
    "metrics": [{"role": "worker", "port": 1, "path": "/metrics", "shows": "up"}],
}  # fmt: skip


def checks() -> dict[str, ast.FunctionDef]:
    return {
        node.name: node
        for path in sorted(SUITE.glob("test_*.py"))
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def test_each_check_has_a_promise_of_one_sentence() -> None:
    found = {name: " ".join((ast.get_docstring(node) or "").split()) for name, node in checks().items()}
    assert len(found) > 60
    wrong = {name: doc for name, doc in found.items() if not doc.endswith(".") or re.search(r"\. [A-Z]", doc)}
    assert not wrong


def test_the_groups_are_the_files_and_those_that_disturb_come_last() -> None:
    stems = sorted(path.stem for path in SUITE.glob("test_*.py"))
    assert sorted(conftest.ORDER) == stems == sorted(f"test_{group}" for group in GROUPS)
    assert conftest.ORDER[-len(conftest.DISTURBING) :] == conftest.DISTURBING


def test_the_suite_needs_pytest_and_yaml_only() -> None:
    """The suite imports none of minivm's packages: it is for clusters that have nothing of minivm."""
    for path in SUITE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                top = name.partition(".")[0]
                assert top in sys.stdlib_module_names | MAY, f"{path.name}: {name}"
                if top == "tests":
                    assert name.startswith("tests.conformance"), f"{path.name}: {name}"


def run(tmp_path: Path, world: str, adapter: dict[str, object], *words: str) -> dict[str, dict[str, str]]:
    """Run the suite with the hollow kubectl, and return its results by check."""
    (tmp_path / "adapter.yaml").write_text(yaml.safe_dump(adapter))
    out = tmp_path / "out.json"
    done = subprocess.run(
        [*SUITE_MAIN, f"--adapter={tmp_path}/adapter.yaml", f"--json={out}", *words],
        cwd=ROOT, env=os.environ | {"HOLLOW_WORLD": world}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert out.exists(), done.stdout + done.stderr
    return {each["check"]: each for each in json.loads(out.read_text())["checks"]}


def test_each_check_fails_where_its_promise_is_broken(tmp_path: Path) -> None:
    """No check passes both without anything and with every fault: nothing that it reads would make it fail."""
    passed = []
    for world in ("wrong", "empty"):
        (tmp_path / world).mkdir()
        found = run(tmp_path / world, world, WHOLE)
        assert set(found) == {check_name(name) for name in checks()}
        passed.append({name for name, each in found.items() if each["outcome"] != "failed"})
    assert passed[0] & passed[1] == set()
    # What the empty world alone shows.
    assert passed[0] == {"every_pod_is_ready", "every_ready_worker_is_a_node_that_takes_jobs"}


def test_what_is_not_offered_or_left_out_is_neither_passed_nor_failed(tmp_path: Path) -> None:
    few = {key: WHOLE[key] for key in ("product", "namespace", "roles", "administrator", "user", "patience")}
    few["not_offered"] = {"a_batch_job_runs": "it has no batch jobs"}
    few["not_tried"] = {"a_job_array_runs_whole": "arrays are left for later"}
    found = run(tmp_path, "wrong", few, "--gentle")
    assert (found["a_batch_job_runs"]["outcome"], found["a_batch_job_runs"]["detail"]) == (
        "not offered", "it has no batch jobs",
    )  # fmt: skip
    assert found["a_job_array_runs_whole"]["outcome"] == "not tried"
    assert found["ssh_takes_no_password"]["outcome"] == "not offered"
    assert found["a_killed_slurmctld_keeps_the_queue"]["outcome"] == "not tried"
    assert found["no_pod_is_privileged"]["outcome"] == "failed"


@pytest.mark.parametrize("path", ADAPTERS, ids=lambda path: path.stem)
def test_each_adapter_is_read_and_names_checks_that_exist(path: Path) -> None:
    adapter = load(path)
    names = {check_name(name) for name in checks()}
    assert set(adapter.not_offered) | set(adapter.not_tried) <= names
    assert "${" not in repr(adapter)
    assert ("not run" in adapter.note) == (adapter.product != "minivm")


def test_names_are_substituted_and_unknown_ones_refused(tmp_path: Path) -> None:
    adapter = load(SUITE / "adapters/minivm.yaml", {"release": "blue", "namespace": "lab"})
    assert (adapter.namespace, adapter.ssh and adapter.ssh.service) == ("lab", "blue-ssh")
    assert adapter.scale == Field("statefulset/blue-worker", ("spec", "replicas"))
    with pytest.raises(AdapterError, match="names has no 'relase': did you mean release"):
        load(SUITE / "adapters/minivm.yaml", {"relase": "x"})
    assert pairs(["a=b=c", "d="]) == {"a": "b=c", "d": ""}
    with pytest.raises(AdapterError, match="--name release: expected NAME=VALUE"):
        pairs(["release"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"produkt": "x"}, "the file has no 'produkt': did you mean product"),
        ({"roles": {"worker": {}}}, "roles.controller is missing"),
        ({"user": {"name": "a", "role": "logn"}}, "user.role has no 'logn': did you mean login"),
        ({"ssh": {"service": "x", "port": "22"}}, "ssh.port is '22': expected a whole number"),
        ({"scale": {"object": "a/b", "path": []}}, "scale.path is empty"),
        ({"metrics": {}}, "metrics is {}: expected a list"),
        ({"patience": 0}, "patience is 0: expected a number above 0"),
        ({"namespace": "${nowhere}"}, "cannot substitute 'nowhere'"),
        ({"daemons": {"slurmd": "nobody"}}, "daemons.slurmd has no 'nobody'"),
    ],
)
def test_a_wrong_adapter_is_refused_with_its_field(tmp_path: Path, change: dict[str, object], said: str) -> None:
    path = tmp_path / "adapter.yaml"
    path.write_text(yaml.safe_dump(WHOLE | change))
    with pytest.raises(AdapterError, match=re.escape(said)) as error:
        load(path)
    assert str(path) in str(error.value)


def test_a_field_is_read_and_written_by_its_path() -> None:
    field = Field("configmap/x", ("data", "slurm.conf"))
    assert field.merge_patch("a") == {"data": {"slurm.conf": "a"}}
    assert field.value_in({"data": {"slurm.conf": "b"}}) == "b"
    assert field.value_in({"data": None}) is None
    assert Adapter.__dataclass_fields__["node_name"].default == ("metadata", "name")


def test_the_table_holds_nothing_that_a_terminal_obeys() -> None:
    result = Result("jobs", "a_check", "", "failed", "red \x1b[31m\nsecond line", 1.0)
    assert table([result]) == "\nsubmission and jobs\n  a_check  failed          1.0 s  red ?[31m"


def test_the_report_keeps_the_worst_of_a_checks_phases() -> None:
    report = Report()
    node = "tests/conformance/test_jobs.py::test_a_batch_job_runs"
    for when, outcome in (("setup", "passed"), ("call", "passed"), ("teardown", "failed"), ("teardown", "passed")):
        phase = pytest.TestReport(node, ("", 0, ""), {}, outcome, "why" if outcome == "failed" else None, when)  # type: ignore[arg-type]
        report.pytest_runtest_logreport(phase)
    (result,) = report.results.values()
    assert (result.group, result.check, result.outcome, result.detail) == ("jobs", "a_batch_job_runs", "failed", "why")
    assert report.counts() == {"passed": 0, "failed": 1, "not offered": 0, "not tried": 0}
