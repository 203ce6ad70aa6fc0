"""Verdict of every check on recorded output of real tools, for every recorded GPU model."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from health.api import Capture, Failure, Result, When
from health.checks.cases import Case, examine, judge_case, read_case, write_case
from health.checks.load import load_checks, load_limits

ROOT = Path(__file__).resolve().parents[3]
TREE = ROOT / "scripts"
CASES = [
    path.parent
    for path in sorted([*(ROOT / "tests/recordings").rglob("case.json"), *TREE.glob("*/recordings/*/case.json")])
]
ACTIVE = load_checks(TREE, kind="active.d")
LOADED = load_checks(TREE)
CHECKS = {**LOADED.checks, **ACTIVE.checks}


def test_every_check_of_the_default_tree_loads() -> None:
    assert not LOADED.broken
    assert not ACTIVE.broken
    assert len(LOADED.checks) >= 30


@pytest.mark.parametrize("path", CASES, ids=lambda path: "/".join(path.parts[-2:]))
def test_a_recording_gets_the_verdict_that_it_is_known_to_mean(path: Path) -> None:
    case = read_case(path)
    assert case.origin, "a recording says where it comes from"
    assert case.expect, "a recording that nothing is expected of proves nothing"
    for check, (result, class_) in case.expect.items():
        got = judge_case(CHECKS[check], TREE, case)
        assert not got.broken, f"{check}: {got.broken}"
        said = f"{check}: {got.verdict.result} {got.verdict.class_}: {got.verdict.reason}"
        assert got.verdict.result is result, said
        if class_ is not None:
            assert got.verdict.class_ is class_, said
        assert got.verdict.reason


def test_every_check_has_a_healthy_and_a_sick_recording() -> None:
    seen: dict[str, set[Result]] = {}
    for path in CASES:
        for check, (result, _) in read_case(path).expect.items():
            seen.setdefault(check, set()).add(result)
    for name in CHECKS:
        assert {Result.OK, Result.PROBLEM} <= seen.get(name, set()), f"{name}: {seen.get(name)}"


def test_several_gpu_models_are_recorded_both_healthy_and_sick() -> None:
    names = {path.name for path in CASES}
    for model in ("v100", "a100", "l40s", "h100", "h200", "b200"):
        assert f"{model}-healthy" in names
        assert any(name.startswith(f"{model}-") and name != f"{model}-healthy" for name in names)


@pytest.mark.parametrize("failure", list(Failure))
@pytest.mark.parametrize("name", sorted(LOADED.checks))
def test_a_source_that_failed_is_never_ok(name: str, failure: Failure) -> None:
    module = LOADED.checks[name]
    captures = {source.name: Capture("", failure, f"{source.name}: {failure}") for source in module.CHECK.sources}
    got = judge_case(module, TREE, Case(Path("none"), captures))
    assert got.verdict.result is not Result.OK
    if failure is Failure.MISSING:
        assert got.verdict.result is Result.UNKNOWN


def test_no_check_runs_a_slurm_command_in_a_prolog() -> None:
    for name, module in LOADED.checks.items():
        programs = {getattr(source, "argv", ("",))[0] for source in module.CHECK.sources}
        if When.PROLOG in module.CHECK.when or When.EPILOG in module.CHECK.when:
            assert not programs & {"scontrol", "sinfo", "squeue", "sacctmgr"}, name


def test_threshold_files_hold_numbers_for_every_model_they_name() -> None:
    for path in (TREE / "lib/thresholds").glob("*.json"):
        limits = load_limits(TREE, path.stem)
        known = set(limits.data["default"])
        for model, values in limits.data.get("models", {}).items():
            assert set(values) <= known, f"{path.name}: {model}: {set(values) - known}"


def test_the_longest_matching_model_wins() -> None:
    limits = load_limits(TREE, "gpu")
    assert limits.model("NVIDIA H200").number("fabric_expected") == 1
    assert limits.model("NVIDIA H200 NVL").number("fabric_expected") == 0
    assert limits.model("Tesla V100-SXM2-16GB").number("nvlinks") == 6
    assert limits.model("Tesla V100-PCIE-16GB").number("nvlinks") == 0
    assert limits.model("Some new GPU").number("ecc_required") == 1


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TREE, tmp_path / "tree"))


def test_the_default_tree_passes_its_own_selftest(tree: Path) -> None:
    assert examine(tree).faults == ()


def test_selftest_names_a_check_that_does_not_load(tree: Path) -> None:
    (tree / "health.d/gpu_ecc.py").write_text("def parse(:\n")
    assert any("gpu_ecc.py: SyntaxError" in fault for fault in examine(tree).faults)


def test_selftest_names_a_check_that_judges_a_recording_wrongly(tree: Path) -> None:
    path = tree / "lib/thresholds/gpu.json"
    path.write_text(path.read_text().replace('"temperature_max_c": 85', '"temperature_max_c": 850'))
    assert [
        fault
        for fault in examine(tree).faults
        if fault.startswith("gpu_temperature on sick-gpu: wanted problem, got ok")
    ]


def test_selftest_names_a_check_that_crashes_on_a_recording(tree: Path) -> None:
    path = tree / "health.d/load.py"
    path.write_text(path.read_text().replace("return Load(", "return Load(1 / 0 +"))
    assert any("load on healthy: ZeroDivisionError" in fault for fault in examine(tree).faults)


def test_selftest_refuses_two_meanings_of_one_source(tree: Path) -> None:
    path = tree / "health.d/uptime.py"
    path.write_text(
        path.read_text().replace('Files("uptime", ("/proc/uptime",))', 'Files("meminfo", ("/proc/uptime",))')
    )
    assert any("declare the source 'meminfo' differently" in fault for fault in examine(tree).faults)


def test_selftest_refuses_a_tree_without_recordings(tree: Path) -> None:
    shutil.rmtree(tree / "health.d/recordings")
    assert any("holds no case" in fault for fault in examine(tree).faults)


def test_a_misspelt_key_of_a_threshold_file_is_refused(tree: Path) -> None:
    path = tree / "lib/thresholds/ib.json"
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "modells": {}}))
    assert any("wanted only about, default, models" in fault for fault in examine(tree).faults)


def test_a_capsule_is_bounded_and_what_was_cut_is_no_longer_ok(tmp_path: Path) -> None:
    case = read_case(TREE / "health.d/recordings/healthy")
    flood = Capture(case.captures["df"].text + "x" * (5 * 1024 * 1024))
    path = write_case(tmp_path, "one", {**case.captures, "df": flood}, {"about": "", "origin": "test", "now": 1.0})
    assert sum(file.stat().st_size for file in path.iterdir()) < 3 * 1024 * 1024
    again = read_case(path)
    assert judge_case(LOADED.checks["disk_space"], TREE, again).verdict.result is Result.UNKNOWN
    assert judge_case(LOADED.checks["gpu_bus"], TREE, again).verdict.result is Result.OK


def test_only_the_newest_capsules_are_kept(tmp_path: Path) -> None:
    for number in range(25):
        write_case(tmp_path, f"{number:03}", {"df": Capture("x")}, {"about": "", "origin": "test"})
    assert len(list(tmp_path.iterdir())) == 20


def test_the_documentation_lists_every_check_with_its_class() -> None:
    text = (ROOT / "docs/health.md").read_text()
    listed = {row.split("`")[1]: row.split("|")[3].strip() for row in text.splitlines() if row.startswith("| `")}
    classes = {name: module.CHECK.class_.value for name, module in LOADED.checks.items()}
    assert {name: class_ for name, class_ in listed.items() if name in classes} == classes


def test_the_example_of_the_how_to_works(tree: Path) -> None:
    text = (ROOT / "docs/how-to/add-a-health-check.md").read_text()
    (tree / "health.d/fans.py").write_text(text.split("```python\n")[1].split("```")[0])
    (tree / "lib/thresholds/fans.json").write_text('{"default": {"rpm_min": 600}, "models": {}}')
    check = load_checks(tree, ["fans"]).checks["fans"]
    for rpm, result in (("5000.000", Result.OK), ("0.000", Result.PROBLEM), ("fast", Result.UNKNOWN)):
        case = Case(Path("x"), {"sensors": Capture(f"coretemp-isa-0000\nfan2:\n  fan2_input: {rpm}\n")})
        assert judge_case(check, tree, case).verdict.result is result


def test_the_selftest_says_what_it_proved_and_what_it_did_not(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from health import cli as health_cli

    assert health_cli.main(["selftest", str(tree)]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert re.fullmatch(
        r"\d\d checks load; on \d+ recordings \d+ verdicts are as they should be, \d+ of them problems", first
    )
    unseen = second.removeprefix("no recording here is sick for: ").split(", ")
    assert "nccl_allreduce" in unseen and "gpu_ecc" not in unseen
