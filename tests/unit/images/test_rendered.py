"""Cache of rendered Dockerfiles: valid until anything changes that determines the text."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from images.make import plan
from images.make.plan import BuildState, DockerfileContent, Rendered

ROOT = Path(__file__).resolve().parents[3]
STEP = DockerfileContent("one: a layer", "minivm/layer-root:debian-1", 1, True, commands=("true",))


@pytest.fixture
def templates(tmp_path: Path) -> Path:
    copied = tmp_path / "templates"
    shutil.copytree(ROOT / "images/templates", copied)
    return copied


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[DockerfileContent]:
    """Record the steps that are rendered."""
    steps: list[DockerfileContent] = []
    real = plan.render_dockerfile

    def dockerfile(step: DockerfileContent, templates: Path) -> str:
        steps.append(step)
        return real(step, templates)

    monkeypatch.setattr(plan, "render_dockerfile", dockerfile)
    return steps


def kept(templates: Path, *steps: DockerfileContent) -> Rendered:
    found = Rendered(templates, templates.parent / "state/debian.rendered.json")
    for step in steps:
        assert found.hash_instructions(step) == Rendered(templates).hash_instructions(step)
    found.keep()
    return found


def test_nothing_is_rendered_twice(templates: Path, made: list[DockerfileContent]) -> None:
    kept(templates, STEP)
    made.clear()
    again = Rendered(templates, templates.parent / "state/debian.rendered.json")
    assert again.hash_instructions(STEP)
    assert made == []
    before = again.path.stat() if again.path else None
    again.keep()
    assert again.path is not None and again.path.stat() == before


@pytest.mark.parametrize(
    "step",
    [
        replace(STEP, commands=("false",)),
        replace(STEP, commands=("true', 'false",)),
        replace(STEP, base="minivm/layer-root:debian-2"),
        replace(STEP, settings=(("QEMU_CPU", "max"),)),
        replace(STEP, epoch=2),
    ],
)
def test_another_step_is_another(step: DockerfileContent, templates: Path, made: list[DockerfileContent]) -> None:
    kept(templates, STEP)
    made.clear()
    Rendered(templates, templates.parent / "state/debian.rendered.json").hash_instructions(step)
    assert made == [step]


def test_a_template_of_the_same_size_and_time_is_another(templates: Path, made: list[DockerfileContent]) -> None:
    kept(templates, STEP)
    path = templates / "Dockerfile.j2"
    time, before = path.stat().st_mtime_ns, kept(templates).hash_instructions(STEP)
    path.write_text(path.read_text().replace("umask 022", "umask 077"))
    os.utime(path, ns=(time, time))
    plan.load_templates.cache_clear()  # simulates another process
    made.clear()
    assert kept(templates, STEP).hash_instructions(STEP) != before
    assert made[0] == STEP


def test_another_jinja_renders_anew(
    templates: Path, made: list[DockerfileContent], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kept(templates, STEP)
    *others, library = plan.list_makers(templates)
    assert "__version__" in library.read_text() and library.parent.name == "jinja2"
    newer = tmp_path / "__init__.py"
    newer.write_text(library.read_text() + "# newer\n")
    monkeypatch.setattr(plan, "list_makers", lambda _: [*others, newer])
    made.clear()
    Rendered(templates, templates.parent / "state/debian.rendered.json").hash_instructions(STEP)
    assert made == [STEP]


@pytest.mark.parametrize("text", ["", "[]", "7", '{"a": 1}', "\xff", "[" * 100_000, '{"a": "b"'])
def test_a_damaged_file_costs_time_alone(text: str, templates: Path, made: list[DockerfileContent]) -> None:
    found = kept(templates, STEP)
    assert found.path is not None
    found.path.write_text(text, encoding="latin-1")
    made.clear()
    kept(templates, STEP)
    assert made[0] == STEP
    made.clear()
    assert Rendered(templates, found.path).hash_instructions(STEP) and made == []


def test_where_it_cannot_be_written_nothing_is_said(templates: Path) -> None:
    (templates.parent / "state").write_text("a file where the directory should be")
    kept(templates, STEP)


def test_what_is_no_digest_is_not_believed(templates: Path) -> None:
    found = kept(templates, STEP)
    assert found.path is not None
    (key,) = found.used
    for value in ('""', '"latest"', f'"{"A" * 64}"', f'"{"0" * 63}"', "1" * 64, "[]"):
        found.path.write_text(f'{{"{key}": {value}}}')
        assert Rendered(templates, found.path).hash_instructions(STEP) == Rendered(templates).hash_instructions(STEP)


def test_what_was_rendered_while_somebody_edited_is_not_kept(templates: Path) -> None:
    path = templates / "Dockerfile.j2"
    before = path.read_text()
    found = Rendered(templates, templates.parent / "state/debian.rendered.json")
    path.write_text(before.replace("umask 022", "umask 077"))
    found.hash_instructions(STEP)
    found.keep()
    path.write_text(before)
    plan.load_templates.cache_clear()
    kept(templates, STEP)


def test_what_somebody_edited_and_took_back_meanwhile_is_not_kept_either(templates: Path) -> None:
    path = templates / "Dockerfile.j2"
    before = path.read_text()
    found = Rendered(templates, templates.parent / "state/debian.rendered.json")
    path.write_text(before.replace("umask 022", "umask 077"))
    found.hash_instructions(STEP)
    path.write_text(before)
    found.keep()
    plan.load_templates.cache_clear()
    kept(templates, STEP)


def test_two_builds_at_once_keep_what_each_has_made(templates: Path, made: list[DockerfileContent]) -> None:
    other = replace(STEP, epoch=2)
    place = templates.parent / "state/debian.rendered.json"
    both = Rendered(templates, place), Rendered(templates, place)
    for one, step in zip(both, (STEP, other), strict=True):
        one.hash_instructions(step)
    for one in both:
        one.keep()
    made.clear()
    last = Rendered(templates, place)
    assert last.hash_instructions(STEP) != last.hash_instructions(other) and made == []
    place = place.with_name("debian.json")
    inputs = BuildState(place), BuildState(place)
    for one_state, name in zip(inputs, ("a", "b"), strict=True):
        one_state.record(name, {"of": name})
    assert (BuildState(place).inputs("a"), BuildState(place).inputs("b")) == ({"of": "a"}, {"of": "b"})


def test_it_does_not_grow(templates: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "KEPT", 3)
    steps = [replace(STEP, epoch=number) for number in range(5)]
    for step in steps:
        kept(templates, step)
    found = Rendered(templates, templates.parent / "state/debian.rendered.json")
    assert len(found.known) == 3
    assert found.known.keys() == {key(templates, step) for step in steps[2:]}


def key(templates: Path, step: DockerfileContent) -> str:
    found = Rendered(templates)
    found.hash_instructions(step)
    (one,) = found.used
    return one
