"""Choice of the runner's policy: the operator's, the tree's, or built-in defaults. A bad file never stops a job."""

from __future__ import annotations

from pathlib import Path

from health.policy import DEFAULTS, read_runner_policy

GOOD = '{"runner": {"prolog": {"budget_s": %d}}, "gate": {"unconfirmed": "%s"}}'


def written(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_the_operator_s_file_wins_whole_and_what_it_leaves_out_has_its_default(tmp_path: Path) -> None:
    written(tmp_path / "lib/policy.json", GOOD % (30, "fail"))
    tree = read_runner_policy(tmp_path, tmp_path / "none.json")
    assert tree.kind("prolog").budget_s == 30 and tree.gate_unconfirmed == "fail" and not tree.fault
    own = read_runner_policy(tmp_path, written(tmp_path / "own.json", '{"runner": {"prolog": {"budget_s": 20}}}'))
    assert own.kind("prolog").budget_s == 20 and own.gate_unconfirmed == "pass" and not own.fault


def test_a_bad_file_of_the_operator_is_told_and_the_tree_s_stays(tmp_path: Path) -> None:
    written(tmp_path / "lib/policy.json", GOOD % (30, "fail"))
    for text, why in (("{", "Expecting"), ('{"runer": {}}', "did you mean 'runner'?")):
        found = read_runner_policy(tmp_path, written(tmp_path / "own.json", text))
        assert found.kind("prolog").budget_s == 30
        assert why in found.fault and str(tmp_path / "own.json") in found.fault


def test_with_no_usable_file_the_defaults_hold(tmp_path: Path) -> None:
    found = read_runner_policy(tmp_path, written(tmp_path / "own.json", "[]"))
    assert found.kind("prolog") == DEFAULTS["prolog"]
    assert "own.json" in found.fault and "lib/policy.json is missing" in found.fault


def test_notes_of_failed_jobs_are_on_and_a_policy_switches_them_off(tmp_path: Path) -> None:
    def found(text: str) -> bool:
        return read_runner_policy(tmp_path, written(tmp_path / "own.json", text)).notes_failures

    assert found("{}") and not found('{"runner": {"notes_failures": false}}')
    assert found('{"runner": {"notes_failures": "no"}}'), "the file is ignored, and its fault is told"
