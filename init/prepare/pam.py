"""Access rules for ssh to a worker: users with a job there, adopted into it if cgroups contain jobs.

pam_slurm_adopt finds a job by its cgroup; without cgroups it finds none and denies everybody. pam_slurm asks slurmctld,
but looks for the node in slurm.conf, which has no dynamic nodes, and denies everybody too. So then the image's own
query of slurmctld takes their place.
"""

from __future__ import annotations

from init.pod.pod import Pod, PrepareError, write
from init.slurm.conf import setting

FETCHED = "/run/slurm/conf/slurm.conf"
FILE = "/etc/pam.d/slurm-adopt"
HAS_JOB = "/usr/libexec/minivm/has-job"
# Errors must deny: by default the module returns "ignore", and no other module allows or denies.
ADOPT = "pam_slurm_adopt.so action_no_jobs=deny action_generic_failure=deny"
HEAD = "# Written at boot by minivm from ProctrackType and PrologFlags of slurm.conf.\n"


def run(pod: Pod) -> str:
    text = pod.text(FETCHED)
    if text is None:
        raise PrepareError("choose the PAM module of ssh", f"{FETCHED} is missing: slurmd has not fetched it")
    have = {path.name for path in pod.path("/usr/lib").glob("*/security/pam_slurm*.so")}
    asks = f"{HAS_JOB} {pod.name}" if pod.has(HAS_JOB) else ""
    line, reason = choose(setting(text, "ProctrackType"), setting(text, "PrologFlags"), have, asks)
    write(pod.path(FILE), f"{HEAD}{line}\n".encode(), mode=0o644, owner=(0, 0))
    return reason


def choose(proctrack: str, prolog_flags: str, have: set[str], asks: str = "") -> tuple[str, str]:
    contained = "cgroup" in proctrack.lower() and "contain" in prolog_flags.lower()
    if contained and "pam_slurm_adopt.so" in have:
        return f"account required {ADOPT}", "ssh needs a job here and is adopted into it"
    reason = "jobs are not contained in cgroups" if not contained else "the image has no pam_slurm_adopt"
    if asks:
        return (
            f"account required pam_exec.so quiet stdout {asks}",
            f"ssh needs a job here, not adopted into it: {reason}",
        )
    if "pam_slurm.so" in have:
        return "account required pam_slurm.so", f"ssh needs a job here, and is not adopted into it: {reason}"
    return "account required pam_permit.so", f"ssh is open to every user: {reason}"
