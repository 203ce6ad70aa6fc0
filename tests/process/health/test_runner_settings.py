"""A task prolog without a shell prints byte for byte what the image's scripts print, or the scripts run."""

from __future__ import annotations

import os
import random
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from gitsync.layout import Layout
from health.places import Places
from health.policy import KindPolicy, RunnerPolicy
from health.runner import plan
from health.script import environment
from tests.process.runner_world import ROOT, SOURCES

pytestmark = pytest.mark.root

USER = 61236
SCRIPTS = tuple(plan.KNOWN)


@dataclass(slots=True)
class Node:
    root: Path

    @property
    def tree(self) -> Path:
        return self.root / "tree"

    @property
    def script(self) -> Path:
        return self.tree / "task_prolog.d"

    def lay(self, file: str, text: str | bytes, mode: int = 0o644) -> Path:
        path = self.tree / file
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        path.chmod(mode)
        return path

    def plan(self, policy: RunnerPolicy | None = None) -> str:
        places = Places(plan=self.root / "plan", policy=self.root / "none")
        plan.write(places, Layout(self.root / "sync", self.tree), "zero", policy or RunnerPolicy())
        return (self.root / "plan").read_text()

    def port(self, name: str, layer: str | bytes | None, state: str | bytes | None = "4: ACTIVE\n") -> None:
        folder = self.root / "sys/class/infiniband" / name
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in (("link_layer", layer), ("state", state)):
            if text is not None:
                (folder / file).write_bytes(text.encode() if isinstance(text, str) else text)

    def run(self, program: str | Path, given: Mapping[str, str], before: Callable[[], object] = int) -> bytes:
        done = subprocess.run(
            [program],
            env=dict(given),
            user=USER,
            group=USER,
            extra_groups=[],
            preexec_fn=before,
            capture_output=True,
            timeout=60,
        )
        return done.stdout

    def alone(self, **given: str) -> bytes:
        """Return the output where no process can be made: neither a shell nor one that looks at adapters."""
        variables = {"SLURM_JOB_ID": "42", **given}
        return self.run(self.root / "program", variables, lambda: resource.setrlimit(resource.RLIMIT_NPROC, (0, 0)))

    def said(self, **given: str) -> bytes:
        return self.run(self.root / "program", {"SLURM_JOB_ID": "42", **given})

    def by_scripts(self, **given: str) -> bytes:
        """Run the scripts as the program does, except for the places, which this build has compiled in."""
        seen = environment("task_prolog", {"SLURM_JOB_ID": "42", **given}, "zero", str(self.tree), 80)
        places = {"WORK": "work", "LOGS": "logs"}
        seen |= {f"MINIVM_JOB_{name}": str(self.root / place) for name, place in places.items()}
        seen["MINIVM_SYSFS"] = str(self.root / "sys")
        return b"".join(self.run(self.script / name, seen) for name in SCRIPTS)


@pytest.fixture(scope="module")
def root() -> Iterator[Path]:
    """Compile the program, with all places below one directory."""
    # The user must get there: another session of pytest may close the directory above `tmp_path` to all but root.
    with tempfile.TemporaryDirectory(prefix="minivm-node-") as directory:
        made = Path(directory)
        made.chmod(0o755)
        places = {"PLAN": "plan", "WORK": "work", "LOGS": "logs", "SYSFS": "sys", "PYTHON": "no-python"}
        gcc = [
            "gcc",
            "-std=c17",
            "-O1",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-fsanitize=undefined",
            f"-DOWNER={os.getuid()}",
        ]
        gcc += [f'-D{name}="{made / place}"' for name, place in places.items()]
        subprocess.run([*gcc, "-o", made / "program", SOURCES / "task_prolog.c"], check=True)
        yield made


@pytest.fixture
def node(root: Path) -> Node:
    for path in root.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != "program":
            path.unlink()
    made = Node(root)
    for name in ("task_prolog.d", "lib/nccl"):
        shutil.copytree(ROOT / "scripts" / name, made.tree / name)
    shutil.copy(ROOT / "scripts/lib/caches.env", made.tree / "lib/caches.env")
    for path in made.script.iterdir():
        if path.name not in SCRIPTS:
            path.unlink()
    (made.root / "sync").mkdir()
    for place in ("work/42", "logs/42"):
        (made.root / place).mkdir(parents=True)
        os.chown(made.root / place, USER, USER)
    made.plan()
    return made


def test_a_task_is_told_its_settings_where_no_process_can_be_had(node: Node) -> None:
    said = node.alone()
    assert said == node.by_scripts()
    assert f"export TMPDIR={node.root}/work/42\n".encode() in said and b"export NCCL_SOCKET_IFNAME=eth0\n" in said


@pytest.mark.parametrize("parts", [("42", "43"), ("42", "44", "43"), ("42", "../../tmp", "43"), ("42", "", "43")])
def test_a_task_of_a_heterogeneous_job_has_its_own_part_s_directory(node: Node, parts: tuple[str, ...]) -> None:
    """Each part's prolog makes a directory of its own number; the step carries the first part's number everywhere."""
    for place in ("work", "logs"):
        (node.root / place / "42").rename(node.root / place / "43")
    given = {f"SLURM_JOB_ID_HET_GROUP_{number}": part for number, part in enumerate(parts)}
    said = node.alone(**given)
    assert said == node.by_scripts(**given)
    line = f"export TMPDIR={node.root}/work/43\n".encode()
    assert (line in said) == (b"TMPDIR" in said) == all(map(str.isdigit, parts))


def a_python(node: Node) -> None:
    """Install a stand-in for the slow path that prints everything from the beginning."""
    python = node.root / "no-python"
    python.write_text("#!/bin/sh\necho export ALL=1\n")
    python.chmod(0o755)


def test_who_goes_the_slow_way_after_all_has_said_nothing_yet(node: Node) -> None:
    """Otherwise lines would appear twice, and the last line would merge with the first one of the slow path."""
    a_python(node)
    node.lay("lib/caches.env", "".join(f"PLACE_{number}=@job@/{'x' * 40}\n" for number in range(64)))
    node.lay("task_prolog.d/30-own", "#!/bin/sh\necho export OWN=1\n", 0o755)
    assert "directories" in node.plan()
    assert len(node.said()) > 4096 and node.said().endswith(b"\nexport OWN=1\n")
    assert node.said(**{f"MANY_{number}": "1" for number in range(5000)}) == b"export ALL=1\n"


def test_what_has_run_is_not_run_once_more_for_want_of_descriptors(node: Node) -> None:
    a_python(node)
    for name in SCRIPTS:
        (node.script / name).unlink()
    ran = node.root / "work/42/ran"
    watched = "until ls -l /proc/$PPID/fd | grep -q pidfd; do sleep 0.01; done"  # that descriptor it still gets
    node.lay(
        "task_prolog.d/30-own",
        f"#!/bin/sh\necho x >> {ran}\n{watched}\nprlimit --nofile=3:3 --pid $PPID\necho export OWN=1\n",
        0o755,
    )
    node.lay("task_prolog.d/40-more", "#!/bin/sh\necho export MORE=1\n", 0o755)
    patient = KindPolicy(budget_s=50.0, deadline_s=40.0)  # on a busy machine `prlimit` alone may take seconds
    node.plan(RunnerPolicy(kinds={"task_prolog": patient}))
    assert node.said() == b"export OWN=1\n"
    assert ran.read_text() == "x\n"


@pytest.mark.parametrize(
    "given",
    [
        {"TMPDIR": "/scratch", "NCCL_DEBUG": "INFO"},
        {"TMPDIR": "", "NCCL_DEBUG": "", "NCCL_IB_HCA": ""},
        {"TMPDIR": "WORK/41", "CUDA_CACHE_PATH": "WORK/41/\nexport X=1"},
        {"TMPDIR": "WORK", "TRITON_CACHE_DIR": "WORKS/41", "NUMBA_CACHE_DIR": "/x/WORK/41"},
        {"MINIVM_JOB_ENV_TMPDIR": "/chosen", "MINIVM_JOB_ENV_NCCL_DEBUG": "INFO"},
        {"MINIVM_JOB_ENV_TMPDIR": "/chosen", "TMPDIR": ""},
        {"MINIVM_JOB_ENV_MINIVM_JOB_ENV_TMPDIR": "/chosen"},
        {"TMPDIR": "$(id)`id`'\"\\\n*", "NCCL_DEBUG": "${X:?}", "TMPDIR ": "x", "XTMPDIR": "x", "TMPDI": "x"},
        {"TMPDIR": "\udcff\udc80"},
        {"SLURM_JOB_ID": "43"},
        {"SLURM_JOB_ID": "0042"},
        {"SLURM_JOB_ID": "99999999999999999999"},
    ],
    ids=lambda given: "+".join(given),
)
def test_what_a_user_has_set_counts_as_it_does_for_the_scripts(node: Node, given: dict[str, str]) -> None:
    given = {name: value.replace("WORK", f"{node.root}/work") for name, value in given.items()}
    assert node.alone(**given) == node.by_scripts(**given) != b""


@pytest.mark.parametrize(
    "given",
    [
        {"SLURM_JOB_ID": "1\nexport LD_PRELOAD=/x"},
        {"SLURM_JOB_ID": "../42"},
        {"SLURM_JOB_ID": "9" * 21},
        {"SLURM_JOB_ID": ""},
        {"MINIVM_JOB_WORK": "/elsewhere"},
        {"MINIVM_JOB_LOGS": "/elsewhere"},
    ],
    ids=lambda given: "+".join(given),
)
def test_what_is_out_of_the_ordinary_is_the_script_s(node: Node, given: dict[str, str]) -> None:
    """Nothing is said of it without one; with one, what it always was."""
    assert b"TMPDIR" not in node.alone(**given) and b"LD_PRELOAD" not in node.alone(**given)
    assert b"NCCL_DEBUG" in node.alone(**given)
    assert b"NCCL" not in node.alone(MINIVM_SYSFS="/elsewhere")


def test_places_that_cannot_be_written_are_not_named(node: Node) -> None:
    for place in ("work/42", "logs/42"):
        os.chown(node.root / place, 0, 0)
        assert node.alone() == node.by_scripts()
    assert str(node.root).encode() not in node.alone()
    node.lay("lib/caches.env", "A=/shared\nB=@job@/b\n")
    node.plan()
    assert node.alone() == node.by_scripts()
    assert b"export A=/shared\n" in node.alone() and b"export B" not in node.alone()


@pytest.mark.parametrize(
    "ports",
    [
        {"mlx5_0/ports/1": ("InfiniBand\n",), "mlx5_1/ports/1": ("InfiniBand\n", "1: DOWN\n")},
        {"mlx5_0/ports/1": ("Ethernet\n",), "mlx5_1/ports/1": ("InfiniBand\n",)},
        {"mlx5_0/ports/1": ("Ethernet\n",), "mlx5_0/ports/2": ("Ethernet\n",)},
        {"mlx5_1/ports/1": ("Ethernet\n",), "mlx5_10/ports/1": ("Ethernet\n",), "mlx5-1/ports/1": ("Ethernet\n",)},
        {"mlx5_0/ports/1": ("InfiniBand\n", "2: INIT\n")},
        {"a/ports/1": ("  InfiniBand \t\n", "ACTIVE"), "b/ports/1": ("InfiniBand", "5: ACTIVE_DEFER\nx\n")},
        {"a/ports/1": ("InfiniBand\n", None), "b/ports/1": (None,), "c/ports/1": ("", ""), "d/ports/1": ("\n",)},
        {"a/ports/1": ("\n", "  "), "b/ports/1": ("  ",), ".c/ports/1": ("InfiniBand\n",), "d/ports/.1": ("\n",)},
        {"a": (None, None), "b/ports": (None, None), "*/ports/[x]": ("InfiniBand\n",), "q r/ports/1": ("x y\n",)},
        {"a/ports/1": ("\\n\n", "AC\\TIVE\n"), "b/ports/1": ("InfiniBand\\\n", "ACTIVE\\\n")},
        {f"mlx5_{number}/ports/1": ("InfiniBand\n",) for number in range(64)},
    ],
    ids=range(11),
)
def test_a_fabric_is_seen_as_the_script_sees_it(node: Node, ports: dict[str, tuple[str | bytes | None, ...]]) -> None:
    for name, files in ports.items():
        node.port(name, *files)
    for given in ({}, {"NCCL_IB_HCA": "mlx5_9"}, {"NCCL_IB_HCA": "", "NCCL_IB_TC": "1"}):
        assert node.said(**given) == node.by_scripts(**given)


def test_of_a_fabric_no_shell_is_asked_either(node: Node) -> None:
    node.port("mlx5_0/ports/1", "InfiniBand\n")
    wanted = node.by_scripts()
    for name in SCRIPTS:
        (node.script / name).chmod(0)
    assert node.said() == wanted
    assert b"export NCCL_IB_HCA==mlx5_0\n" in wanted


@pytest.mark.parametrize("what", ["no text", "a flood", "a pipe", "a folder", "many", "a name"])
def test_what_no_adapter_is_like_is_the_script_s_to_look_at(node: Node, what: str) -> None:
    """Which has a deadline for it. Here it cannot be started, and nothing is said in its place."""
    state = node.root / "sys/class/infiniband/mlx5_0/ports/1/state"
    node.port("mlx5_0/ports/1", b"Infini\0Band\n" if what == "no text" else "InfiniBand\n", None)
    match what:
        case "no text":
            state.write_text("4: ACTIVE\n")
        case "a flood":
            state.write_text("4: ACTIVE\n" + "x" * 300)
        case "a pipe":
            os.mkfifo(state, 0o644)
        case "a folder":
            state.mkdir()
        case "many":
            for number in range(65):
                node.port(f"mlx5_{number}/ports/1", "InfiniBand\n")
        case "a name":
            node.port("mlx5\n0/ports/1", "InfiniBand\n")
    for name in SCRIPTS:
        (node.script / name).chmod(0)
    assert b"TMPDIR" in node.said() and b"NCCL" not in node.said()


ALPHABET = [
    "A",
    "b",
    "_",
    "9",
    "=",
    "=",
    "@job@",
    "@",
    "job",
    "/",
    " ",
    "\\n",
    "$(id)",
    "'",
    '"',
    "%s",
    "\t",
    "ü",
    "\r",
]


def test_whatever_is_in_a_file_of_settings_is_said_as_the_scripts_say_it(node: Node) -> None:
    turns, without = random.Random(14), 0

    def text(prefixes: tuple[str, ...]) -> str:
        def word(most: int) -> str:
            return "".join(turns.choices(ALPHABET[: turns.choice((12, 16, 19))], k=turns.randrange(most)))

        lines = [f"{turns.choice(prefixes)}{word(2)}={word(7)}" for _ in range(turns.randrange(5))]
        return "\n".join(lines) + turns.choice(("\n", "\n", "\n\n", ""))

    for turn in range(60):
        node.lay("lib/caches.env", text(("", "A", "TMPDIR", "A_", "9", "#", " A")))
        node.lay("lib/nccl/ethernet.env", text(("NCCL_", "NCCL_A", "A", "NCCL_a", "# NCCL_")))
        known = node.plan().count("\tdirectories\n") + node.plan().count("\tnccl\n")
        given = turns.choice(({}, {"A": "", "TMPDIR": "x"}, {"NCCL_A": "x", "A": f"{node.root}/work/1"}))
        if known == 2:
            without += 1
            assert node.alone(**given) == node.by_scripts(**given), turn
    assert 20 < without < 60


@pytest.mark.parametrize(
    "change",
    ["its text", "its mode", "a secret", "a closed folder", "a link", "a folder that is a link", "a flood", "no text"],
)
def test_a_site_s_own_is_run(node: Node, change: str) -> None:
    """Root would read more than the job's user may, and the plan is for all to read."""
    secret = node.root / "secret"
    secret.write_text("SECRET=1\n")
    script, file = node.script / "10-directories", node.tree / "lib/caches.env"
    match change:
        case "its text":
            script.write_text(script.read_text() + "# ours\n")
        case "its mode":
            script.chmod(0o744)
        case "a secret":
            node.lay("lib/caches.env", "SECRET=1\n", 0o640)
        case "a closed folder":
            (node.tree / "lib").chmod(0o700)
        case "a link":
            file.unlink()
            file.symlink_to(secret)
        case "a folder that is a link":
            (node.tree / "lib").rename(node.root / "lib")
            (node.tree / "lib").symlink_to(node.root / "lib")
        case "a flood":
            node.lay("lib/caches.env", "A=1\n" * 65)
        case "no text":
            node.lay("lib/caches.env", b"A=1\0\n")
    text = node.plan()
    assert "\tdirectories\n" not in text and "SECRET" not in text
    assert "caches.env" not in text, "of what its users may not see it says nothing"


def test_settings_that_are_not_there_are_none(node: Node) -> None:
    (node.tree / "lib/caches.env").unlink()
    shutil.rmtree(node.tree / "lib/nccl")
    assert "\tdirectories\n" in node.plan()
    assert node.alone() == node.by_scripts() == f"export MINIVM_JOB_LOG={node.root}/logs/42\n".encode()
    node.lay("lib/caches.env", "A=1\n")
    assert node.alone() == b"", "the plan is of before"


def test_what_the_program_knows_are_the_scripts_of_the_image(node: Node) -> None:
    """Changing one of the scripts changes the program's output (images/src/runner/settings.h) and this digest."""
    assert list(plan.read_settings(ROOT / "scripts", SCRIPTS).known) == list(SCRIPTS)
