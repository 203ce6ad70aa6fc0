"""Settings: the default, then the environment, then --set; an unknown name is an error and never ignored."""

from __future__ import annotations

from pathlib import Path

import pytest

from images import ImagesError
from images.settings import check_certificates, read


def test_the_command_line_goes_over_the_environment_and_that_over_the_default() -> None:
    assert read({}).variant == "debian"
    assert read({"MINIVM_BUILD_VARIANT": "nvidia", "OTHER": "x"}).variant == "nvidia"
    assert read({"MINIVM_BUILD_VARIANT": "nvidia"}, ["variant=debian"]).variant == "debian"


def test_an_empty_value_asks_for_the_default() -> None:
    assert read({"MINIVM_BUILD_BUILDER": "", "MINIVM_BUILD_JOBS": "3"}, ["jobs="]) == read({})


@pytest.mark.parametrize(("content", "why"), [(b"\xff\xfe", "not a PEM file"), (b"hello", "no certificate in it")])
def test_what_is_no_certificate_is_told_before_anything_is_built(tmp_path: Path, content: bytes, why: str) -> None:
    file = tmp_path / "site.pem"
    with pytest.raises(ImagesError, match="No such file"):
        check_certificates(str(file))
    file.write_bytes(content)
    with pytest.raises(ImagesError, match=why):
        check_certificates(str(file))


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
        ({}, ["jobs=0"], "jobs cannot be '0'", "number from 1"),
        ({}, ["prefix=Site A"], "prefix cannot be 'Site A'", "small letters"),
        ({}, ["http_proxy=proxy.site"], "http_proxy cannot be 'proxy.site'", "http://proxy.site:3128"),
        ({}, ["slurm_sha256=abc"], "slurm_sha256 cannot be 'abc'", "64 hexadecimal"),
        ({}, ["slurm_version=24.11 5"], "slurm_version cannot be", "24.11.5"),
        ({}, ["mirrors=debian=here"], "'debian=here' is not NAME=URI", None),
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
    with pytest.raises(ImagesError, match="NAME=URI"):
        read({}, [f"mirrors={text}"])
