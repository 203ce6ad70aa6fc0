"""Comparison of the machine with what its image needs: each message and its inputs, without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from images.definition.load import load
from images.definition.spec import BuildChoice, SlurmSource
from images.make.compose import serialise_expectations
from init.helpers import drift, links
from init.helpers.drift import Expected, Machine
from init.helpers.links import LinkState
from init.lean import replace
from init.pod.pod import Pod
from init.view.metrics import open_metrics

ROOT = Path(__file__).resolve().parents[3]
IMAGE = Expected("13.5", "580", (("12.9", "525.60.13"), ("11.8", "450.80")), "5.3", "25.07")
HERE = Machine("580.65.06", 8, True, "6.12.9", "25.07")


def said(**changes: object) -> dict[str, tuple[LinkState, str]]:
    """Return the messages for a machine that fits except for the given changes."""
    found = drift.compare(IMAGE, replace(HERE, **changes))
    return {item.what: (item.state, item.text) for item in found}


def test_a_machine_that_fits_differs_in_nothing() -> None:
    assert {state for state, _ in said().values()} == {LinkState.FITS}


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
    assert found[what] == (LinkState.DIFFERS, text)
    assert [name for name, (state, _) in found.items() if state is LinkState.DIFFERS] == [what]


@pytest.mark.parametrize("found", ["580", "580.0", "580.65.06", "1000.1"])
def test_a_driver_that_is_new_enough_fits(found: str) -> None:
    assert said(driver=found)["driver"][0] is LinkState.FITS


def test_a_machine_without_hardware_differs_in_nothing() -> None:
    """A machine without GPUs fits: a pod of a CPU pool, a laptop, or a machine that runs these tests."""
    found = said(driver="", gpus=0, drivers_own=False, ofed="")
    assert {name: state for name, (state, _) in found.items()} == {
        "driver": LinkState.NOT_HERE, "kernel": LinkState.FITS, "fabric": LinkState.NOT_HERE,
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


GPU = """
GPU 00000000:18:00.0
    Product Name                          : NVIDIA GB200
    Fabric
        State                             : {state}
        Status                            : Success
        CliqueId                          : 32766
        ClusterUUID                       : {uuid}
    Processes                             : {processes}
"""
UUID = "ec12f6d6-1f1a-4b5a-9f0a-2f4e8a1f7c11"
NOBODY = "00000000-0000-0000-0000-000000000000"


def smi(*states: str, uuid: str = NOBODY, processes: str = "None") -> str:
    """Return an nvidia-smi program that prints the given GPUs."""
    text = "".join(GPU.format(state=state, uuid=uuid, processes=processes) for state in states)
    return f"#!/bin/sh\ncat <<'EOF'\n{text}EOF\n"


def machine_of(
    tmp_path: Path, files: dict[str, str], env: dict[str, str] | None = None
) -> dict[str, tuple[LinkState, str]]:
    pod = scratch(tmp_path, {**FILES, **files})
    for name in files:
        if name.endswith("nvidia-smi"):
            (tmp_path / name).chmod(0o755)
    found = drift.compare(replace(IMAGE, ofed=""), drift.machine(Pod(env or {}, pod.root)))
    return {item.what: (item.state, item.text) for item in found if item.what in ("manager", "imex", "rdma")}


def pci(vendor: str, kind: str, address: str) -> dict[str, str]:
    at = f"sys/bus/pci/devices/0000:{address}"
    return {f"{at}/vendor": f"{vendor}\n", f"{at}/class": f"{kind}\n"}


SWITCH = pci("0x10de", "0x068000", "07:00.0")
OTHERS = pci("0x10de", "0x030200", "18:00.0") | pci("0x8086", "0x068000", "00:1f.0")
CHANNELS = {"proc/devices": "Character devices:\n  1 mem\n503 nvidia-caps-imex-channels\n"}
SMI = "usr/bin/nvidia-smi"


@pytest.mark.parametrize(
    ("files", "state", "text"),
    [
        (
            SWITCH | {SMI: smi("Completed", "Completed")}, LinkState.FITS,
            "the fabric manager has registered 2 of 2 GPUs",
        ),
        (
            SWITCH | {SMI: smi("Completed", "In Progress")}, LinkState.DIFFERS,
            "the fabric manager has registered 1 of 2 GPUs: it does not run on the machine, or is not of the driver's"
            " version (580.65.06)",
        ),
        (
            SWITCH | OTHERS | {SMI: "#!/bin/sh\nexit 9\n"}, LinkState.NOT_HERE,
            "1 NVSwitch; what the fabric manager has done is seen in a pod with a GPU",
        ),
    ],
)  # fmt: skip
def test_what_the_fabric_manager_has_done_is_seen_by_the_gpus(
    tmp_path: Path, files: dict[str, str], state: LinkState, text: str
) -> None:
    assert machine_of(tmp_path, files)["manager"] == (state, text)


def test_a_machine_without_a_fabric_has_no_manager(tmp_path: Path) -> None:
    """A machine without NVLink fabric needs no fabric manager.

    It has GPUs on PCI alone, or bridges and GPUs that are not NVSwitches.
    """
    assert machine_of(tmp_path, OTHERS | {SMI: smi("N/A", "N/A")}) == {}


@pytest.mark.parametrize(
    ("files", "state", "text"),
    [
        ({"dev/nvidia-caps-imex-channels/channel0": ""}, LinkState.FITS, "and the pod has 1 IMEX channels"),
        (CHANNELS, LinkState.NOT_HERE, "without one, or Slurm's, jobs over nodes use the network"),
        ({}, LinkState.DIFFERS, "the driver knows no IMEX channels: upgrade it, or start nvidia-imex on the machine"),
    ],
)
def test_gpus_of_a_domain_over_machines_want_a_channel(
    tmp_path: Path, files: dict[str, str], state: LinkState, text: str
) -> None:
    found = machine_of(tmp_path, {SMI: smi("Completed", uuid=UUID), **files})["imex"]
    assert found[0] is state and found[1].startswith(f"the GPUs are of the NVLink domain {UUID}") and text in found[1]


def test_a_process_on_a_gpu_is_no_line_of_its_fabric(tmp_path: Path) -> None:
    """A process name is not parsed as part of the fabric section: a job's user chooses its processes' names."""
    lines = ("", "        Process ID : 7", "            Name : x", "    Fabric", "        State : In Progress")
    evil = "\n".join((*lines, f"        ClusterUUID : {UUID}"))
    found = machine_of(tmp_path, {SMI: smi("Completed", processes=evil)})
    assert found == {"manager": (LinkState.FITS, "the fabric manager has registered 1 of 1 GPUs")}


@pytest.mark.parametrize("answer", ["sleep 60", "head -c 20000000 /dev/zero", "printf '\\377\\376'", "kill -9 $$"])
def test_a_driver_that_hangs_or_babbles_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    monkeypatch.setattr(links, "PATIENCE", 0.5)
    assert machine_of(tmp_path, {SMI: f"#!/bin/sh\nexec {answer}\n"}) == {}


ADAPTERS = {"sys/class/infiniband/mlx5_0/node_type": "1: CA\n", "sys/class/infiniband/mlx5_1/node_type": "1: CA\n"}


@pytest.mark.parametrize(
    ("files", "env", "state", "text"),
    [
        ({"dev/infiniband/uverbs0": "", "dev/infiniband/rdma_cm": ""}, {}, LinkState.FITS,
         "2 RDMA adapters on the machine, 1 in the pod"),
        ({}, {}, LinkState.NOT_HERE,
         "2 RDMA adapters on the machine, and none in the pod: /dev/infiniband/uverbs* is not handed in"),
        ({}, {"MINIVM_EXPECT_IB": "2"}, LinkState.DIFFERS,
         "2 RDMA adapters on the machine, and none in the pod: /dev/infiniband/uverbs* is not handed in, though"
         " MINIVM_EXPECT_IB says that the node has some"),
    ],
)  # fmt: skip
def test_adapters_are_told_from_adapters_in_the_pod(
    tmp_path: Path, files: dict[str, str], env: dict[str, str], state: LinkState, text: str
) -> None:
    assert machine_of(tmp_path, ADAPTERS | files, env)["rdma"] == (state, text)


def test_without_adapters_nothing_is_said_of_them(tmp_path: Path) -> None:
    assert machine_of(tmp_path, {}) == {}
    wanted = machine_of(tmp_path, {}, {"MINIVM_EXPECT_IB": "8"})["rdma"]
    assert wanted[0] is LinkState.DIFFERS and wanted[1].startswith("0 RDMA adapters on the machine")


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
    data = json.loads(
        serialise_expectations(versions, BuildChoice("debian", SlurmSource.PACKAGE, cuda), ("cuda", "nccl", "rdma"))
    )
    assert data["cuda"]["driver"] == driver and set(data["cuda"]["others"]) == others
    assert data["kernel"] == "5.3" and "ofed" not in data


def test_what_a_role_does_not_have_it_does_not_expect() -> None:
    versions = load(ROOT).versions
    choice = BuildChoice("debian", SlurmSource.PACKAGE, "13.5")
    assert set(json.loads(serialise_expectations(versions, choice, ("pmix",)))) == {"format", "kernel"}
    nvidia = json.loads(serialise_expectations(versions, BuildChoice("nvidia", SlurmSource.SOURCE), ("cuda", "rdma")))
    assert "cuda" not in nvidia and nvidia["ofed"] == "25.07"
