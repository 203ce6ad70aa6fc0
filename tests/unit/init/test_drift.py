"""The machine against what its image was made for: every sentence, and what is read for it, without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from images.definition.load import load
from images.definition.spec import Choice, SlurmSource
from images.make.expects import expects
from init.helpers import drift
from init.helpers.drift import Expected, Machine, State
from init.pod.pod import Pod
from init.records import replace
from init.view.handed import open_metrics

ROOT = Path(__file__).resolve().parents[3]
IMAGE = Expected("13.5", "580", (("12.9", "525.60.13"), ("11.8", "450.80")), "5.3", "25.07")
HERE = Machine("580.65.06", 8, True, "6.12.9", "25.07")


def said(**changes: object) -> dict[str, tuple[State, str]]:
    """What is told of a machine that is as it should be but for these."""
    found = drift.compare(IMAGE, replace(HERE, **changes))
    return {item.what: (item.state, item.text) for item in found}


def test_a_machine_that_fits_differs_in_nothing() -> None:
    assert {state for state, _ in said().values()} == {State.FITS}


@pytest.mark.parametrize(
    ("changes", "what", "text"),
    [
        (
            {"driver": "550.163.01"}, "driver",
            "driver 550.163.01 is older than CUDA 13.5 needs (580): take an image of CUDA 12.9, or upgrade the driver",
        ),
        (
            {"driver": "470.57.02"}, "driver",
            "driver 470.57.02 is older than CUDA 13.5 needs (580): take an image of CUDA 11.8, or upgrade the driver",
        ),
        (
            {"driver": "390.1"}, "driver",
            "driver 390.1 is older than CUDA 13.5 needs (580): upgrade the driver",
        ),
        (
            {"drivers_own": False}, "runtime",
            "8 GPUs and no libcuda.so.1: the container runtime does not hand in the driver; install NVIDIA's for it",
        ),
        (
            {"kernel": "4.18.0"}, "kernel",
            "kernel 4.18.0 is older than this image needs (5.3): upgrade the machine's kernel",
        ),
        (
            {"ofed": "24.10.1"}, "fabric",
            "the host's OFED is 24.10.1 and the image's user space 25.07: bring both to one release",
        ),
    ],
)  # fmt: skip
def test_what_differs_is_a_sentence_with_the_way_out(changes: dict[str, object], what: str, text: str) -> None:
    found = said(**changes)
    assert found[what] == (State.DIFFERS, text)
    assert [name for name, (state, _) in found.items() if state is State.DIFFERS] == [what]


@pytest.mark.parametrize("found", ["580", "580.0", "580.65.06", "1000.1"])
def test_a_driver_that_is_new_enough_fits(found: str) -> None:
    assert said(driver=found)["driver"][0] is State.FITS


def test_a_machine_without_hardware_differs_in_nothing() -> None:
    """A pod of a pool without GPUs, a laptop, a machine that tests this."""
    found = said(driver="", gpus=0, drivers_own=False, ofed="")
    assert {name: state for name, (state, _) in found.items()} == {
        "driver": State.NOT_HERE, "kernel": State.FITS, "fabric": State.NOT_HERE,
    }  # fmt: skip


def test_an_image_that_expects_nothing_finds_nothing() -> None:
    assert drift.compare(Expected(), HERE) == []


FILES = {
    "sys/module/nvidia/version": "580.65.06\n",
    "proc/sys/kernel/osrelease": "6.8.0-90-generic\n",
    "sys/module/mlx5_core/version": "25.07-0.9.7\n",
    "dev/nvidia0": "", "dev/nvidia1": "", "dev/nvidiactl": "", "dev/nvidia-uvm": "",
    "usr/lib/aarch64-linux-gnu/libcuda.so.1": "",
}  # fmt: skip


def scratch(tmp_path: Path, files: dict[str, str], expects: object = None) -> Pod:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    if expects is not None:
        target = tmp_path / drift.EXPECTS.lstrip("/")
        target.parent.mkdir(parents=True)
        target.write_text(expects if isinstance(expects, str) else json.dumps(expects))
    return Pod({}, tmp_path)


def test_the_machine_is_read_where_every_container_sees_it(tmp_path: Path) -> None:
    assert drift.machine(scratch(tmp_path, FILES)) == Machine("580.65.06", 2, True, "6.8.0", "25.07")


@pytest.mark.parametrize(
    "text",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.163.01  Tue Apr  8\nGCC version: 14.2.0\n",
        "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  550.163.01  Release Build\n",
    ],
)
def test_the_drivers_own_page_is_read_where_sysfs_has_none(tmp_path: Path, text: str) -> None:
    assert drift.machine(scratch(tmp_path, {"proc/driver/nvidia/version": text})).driver == "550.163.01"


@pytest.mark.parametrize("text", ["", "\0" * 5000, "a" * 100_000, "9" * 5000, "version\n1.2.3\n"])
def test_a_strange_file_is_no_version(tmp_path: Path, text: str) -> None:
    found = drift.machine(scratch(tmp_path, {"sys/module/nvidia/version": text, "proc/sys/kernel/osrelease": text}))
    assert (found.driver, found.kernel) == ("", "")


def test_the_last_line_is_the_reason_and_the_numbers_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = {"format": 1, "kernel": "5.3", "cuda": {"name": "13.5", "driver": "580", "others": {"12.9": "525.60.13"}}}
    pod = scratch(tmp_path, {**FILES, "sys/module/nvidia/version": "550.163.01\n"}, wanted)
    assert drift.main(["--tell"], pod) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("driver 550.163.01 is older than CUDA 13.5 needs (580): take an image of CUDA 12.9")
    told = open_metrics((tmp_path / drift.METRICS.lstrip("/")).read_text(), "minivm_drift_")
    assert 'minivm_drift_differs{check="driver"} 1' in told and 'minivm_drift_differs{check="kernel"} 0' in told


def test_json_says_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert drift.main(["--json"], scratch(tmp_path, FILES, {"format": 1, "kernel": "7.1"})) == 1
    (item,) = json.loads(capsys.readouterr().out)
    assert (item["what"], item["state"]) == ("kernel", "differs")


def test_an_image_of_before_expects_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert drift.main([], scratch(tmp_path, FILES)) == 0
    assert capsys.readouterr().out == "this image expects nothing of its machine\n"


@pytest.mark.parametrize("text", ["{", "[]", '{"cuda": [1]}', '{"cuda": {"others": 3}}', "[" * 30_000])
def test_what_cannot_be_read_is_told(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = drift.main([], scratch(tmp_path, FILES, text))
    assert code == 78
    assert "cannot read what the image expects: damaged" in capsys.readouterr().out


def test_a_policy_that_does_not_exist_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pod = scratch(tmp_path, FILES, {"format": 1})
    pod.env = {"MINIVM_DRIFT": "refuze"}
    assert drift.main([], pod) == 78
    assert "MINIVM_DRIFT is 'refuze'" in capsys.readouterr().out


@pytest.mark.parametrize(("cuda", "driver", "others"), [("13.5", "580", {"12.9"}), ("12.9", "525.60.13", {"13.5"})])
def test_the_build_writes_what_the_chosen_cuda_needs(cuda: str, driver: str, others: set[str]) -> None:
    versions = load(ROOT).versions
    data = json.loads(expects(versions, Choice("debian", SlurmSource.PACKAGE, cuda), ("cuda", "nccl", "rdma")))
    assert data["cuda"]["driver"] == driver and set(data["cuda"]["others"]) == others
    assert data["kernel"] == "5.3" and "ofed" not in data


def test_what_a_role_does_not_have_it_does_not_expect() -> None:
    versions = load(ROOT).versions
    assert set(json.loads(expects(versions, Choice("debian", SlurmSource.PACKAGE, "13.5"), ("pmix",)))) == {
        "format", "kernel",
    }  # fmt: skip
    nvidia = json.loads(expects(versions, Choice("nvidia", SlurmSource.SOURCE), ("cuda", "rdma")))
    assert "cuda" not in nvidia and nvidia["ofed"] == "25.07"
