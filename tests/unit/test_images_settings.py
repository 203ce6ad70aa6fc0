"""Settings: the default, then the environment, then --set; a name that does not exist is never a default."""

from __future__ import annotations

import pytest

from images.errors import ImagesError
from images.settings import read


def test_the_command_line_goes_over_the_environment_and_that_over_the_default() -> None:
    assert read({}).variant == "debian"
    assert read({"MINIVM_BUILD_VARIANT": "nvidia", "OTHER": "x"}).variant == "nvidia"
    assert read({"MINIVM_BUILD_VARIANT": "nvidia"}, ["variant=debian"]).variant == "debian"


def test_a_value_may_hold_an_equals_sign() -> None:
    settings = read({}, ["mirrors=debian=http://a.invalid/debian,security=http://b.invalid"])
    assert settings.mirror_map == {"debian": "http://a.invalid/debian", "security": "http://b.invalid"}


@pytest.mark.parametrize(
    ("environment", "assignments", "why", "hint"),
    [
        ({"MINIVM_BUILD_MIRROS": "x"}, [], "no setting 'mirros'", "mirrors"),
        ({}, ["varaint=x"], "no setting 'varaint'", "variant"),
        ({}, ["variant"], "is not NAME=VALUE", None),
        ({}, ["slurm=sources"], "slurm cannot be 'sources'", "source"),
        ({}, ["builder=buildkit"], "builder cannot be 'buildkit'", "buildx"),
        ({}, ["jobs=many"], "jobs cannot be 'many'", "number"),
    ],
)
def test_a_wrong_setting_is_an_error(
    environment: dict[str, str], assignments: list[str], why: str, hint: str | None
) -> None:
    with pytest.raises(ImagesError) as caught:
        read(environment, assignments)
    assert why in caught.value.why
    if hint:
        assert hint in str(caught.value.hint)


@pytest.mark.parametrize("text", ["debian", "debian=here", "=http://x.invalid"])
def test_a_mirror_is_a_name_and_an_address(text: str) -> None:
    settings = read({}, [f"mirrors={text}"])
    with pytest.raises(ImagesError, match="NAME=URI"):
        _ = settings.mirror_map
