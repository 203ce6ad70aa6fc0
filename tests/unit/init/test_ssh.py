"""SSH in a pod: the PAM module that lets users into a worker, and the groups of a login pool."""

from __future__ import annotations

from pathlib import Path

import pytest

from init.pod.pod import Pod, PrepareError
from init.prepare import ssh
from init.slurm.conf import setting

ROOT = Path(__file__).resolve().parents[3]
ADOPT, ASK = "pam_slurm_adopt.so", "pam_slurm.so"


@pytest.mark.parametrize(
    ("conf", "have", "module"),
    [
        ("ProctrackType=proctrack/cgroup\nPrologFlags=Alloc,Contain\n", {ADOPT, ASK}, ssh.ADOPT),
        ("proctracktype = proctrack/cgroup # x\nPROLOGFLAGS=contain\n", {ADOPT}, ssh.ADOPT),
        ("ProctrackType=proctrack/cgroup\n", {ADOPT, ASK}, ASK),  # pam_slurm_adopt would deny every user
        ("ProctrackType=proctrack/linuxproc\nPrologFlags=Contain\n", {ADOPT, ASK}, ASK),
        ("#ProctrackType=proctrack/cgroup\nPrologFlags=Contain\n", {ADOPT}, "pam_permit.so"),
    ],
)
def test_the_pam_module_fits_how_slurm_tracks_jobs(conf: str, have: set[str], module: str) -> None:
    line, _ = ssh.choose(setting(conf, "ProctrackType"), setting(conf, "PrologFlags"), have)
    assert line == f"account required {module}"


def test_until_slurm_is_known_the_image_lets_nobody_in() -> None:
    """The image denies every login until Slurm is configured.

    By default pam_slurm_adopt ignores a missing slurm.conf, and then every user could log in.
    """
    image = Path(__file__).resolve().parents[3] / "images/rootfs/worker/etc/pam.d/slurm-adopt"
    (line,) = [line for line in image.read_text().splitlines() if not line.startswith("#")]
    assert " ".join(line.split()) == f"account required {ssh.ADOPT}"
    assert "action_generic_failure=deny" in ssh.ADOPT


@pytest.mark.parametrize(
    ("others", "said"),
    [
        (["allowgroups lab", "allowgroups Domain Users"], None),
        (["allowgroups Domain Users", "allowgroups lab", "denygroups x"], None),
        (["allowgroups lab", "allowgroups Domain Users", "allowgroups staff"], "sshd lets in Domain Users, lab, staff"),
        (["allowgroups lab"], "sshd lets in lab"),
        (["usepam yes"], "sshd lets in everybody"),
    ],
)
def test_sshd_must_take_the_groups_of_the_login_pool_alone(others: list[str], said: str | None) -> None:
    """The image's own AllowGroups count too, and a file that the image does not include counts for nothing."""
    mounted, effective = 'AllowGroups "lab" "Domain Users"\n', "\n".join(["port 22", *others, ""])
    if said is None:
        ssh.check_allowed_groups(mounted, effective)
        return
    with pytest.raises(PrepareError) as refused:
        ssh.check_allowed_groups(mounted, effective)
    assert refused.value.why.endswith(said)


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("sshd_config", "Match User eve\n  AllowGroups staff lab"),
        ("sshd_config.d/20-site.conf", "Match Address 10.0.0.0/8\n\tallowgroups=staff # x"),
        ("more/site", 'Match all\nALLOWGROUPS = "staff"'),
    ],
)
def test_groups_of_a_match_block_are_found(tmp_path: Path, file: str, line: str) -> None:
    """`sshd -T` shows no Match block, and its AllowGroups replace the pool's."""
    folder, mounted = tmp_path / "etc/ssh", 'AllowGroups "lab"\n'
    for name, text in (
        ("sshd_config", "Include /etc/ssh/sshd_config.d/*.conf\nMatch Group x\n  Include more/*\n# AllowGroups no\n"),
        ("sshd_config.d/10-allowed-groups.conf", mounted),
        ("sshd_config.d/20-site.conf", "Include sshd_config\n"),  # sshd refuses a circle, and this read ends
        ("more/site", ""),
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    pod = Pod({}, tmp_path)
    ssh.check_allowed_groups(mounted, "allowgroups lab\n", ssh.allow_groups(pod, folder / "sshd_config"))
    with (folder / file).open("a") as stream:
        stream.write(f"{line}\n")
    with pytest.raises(PrepareError, match="sshd lets in lab, staff"):
        ssh.check_allowed_groups(mounted, "allowgroups lab\n", ssh.allow_groups(pod, folder / "sshd_config"))


def test_without_cgroups_the_images_own_question_comes_before_pam_slurm() -> None:
    """Without cgroups the image's own has-job test replaces pam_slurm.

    pam_slurm looks the node up in slurm.conf, which does not list dynamic nodes, and denies every user.
    """
    line, why = ssh.choose("proctrack/linuxproc", "", {ADOPT, ASK}, "/usr/libexec/minivm/has-job w1")
    assert line == "account required pam_exec.so quiet stdout /usr/libexec/minivm/has-job w1"
    assert "not contained" in why
    line, _ = ssh.choose("proctrack/cgroup", "Contain", {ADOPT, ASK}, "/usr/libexec/minivm/has-job w1")
    assert line == f"account required {ssh.ADOPT}"
