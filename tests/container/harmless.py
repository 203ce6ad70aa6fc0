"""Changes of slurm.conf that lose, hold and move no job, drawn by a seed. The settings are those of slurm.conf(5)."""

from __future__ import annotations

import random
from collections.abc import Callable

# Setting -> values, each harmless for jobs that exist. Both 24.11 and 26.05 know them.
SETTINGS = {
    "AccountingStorageTRES": ("gres/gpu", "license/matlab", "gres/gpu,license/matlab"),
    "AccountingStoreFlags": ("job_comment", "job_script", "job_env"),
    "BatchStartTimeout": ("10", "60"),
    "CompleteWait": ("0", "4"),
    "CpuFreqDef": ("Performance",),
    "DebugFlags": ("Backfill", "Priority", "Steps,Reservation"),
    "DefMemPerCPU": ("50", "100", "200"),
    "DisableRootJobs": ("YES", "NO"),
    "EnforcePartLimits": ("ALL", "ANY", "NO"),
    "Epilog": ("/usr/local/sbin/epilog",),
    "EpilogMsgTime": ("1000", "4000"),
    "EpilogSlurmctld": ("/usr/local/sbin/epilog-slurmctld",),
    "FairShareDampeningFactor": ("1", "3"),
    "GresTypes": ("gpu,nic", "gpu,mps"),
    "HealthCheckInterval": ("60", "300"),
    "HealthCheckProgram": ("/usr/sbin/nhc",),
    "InactiveLimit": ("0", "120"),
    "JobAcctGatherFrequency": ("30", "task=15,network=60"),
    "JobRequeue": ("0", "1"),
    "KeepAliveTime": ("60",),
    "KillOnBadExit": ("0", "1"),
    "KillWait": ("10", "60"),
    "LaunchParameters": ("enable_nss_slurm",),
    "LogTimeFormat": ("thread_id", "short"),
    "MailDomain": ("example.org",),
    "MailProg": ("/usr/bin/mail",),
    "MaxArraySize": ("2001", "100001"),
    "MaxDBDMsgs": ("20000", "100000"),
    "MaxJobCount": ("20000", "100000"),
    "MaxNodeCount": ("3000", "4096"),
    "MaxStepCount": ("50000",),
    "MaxTasksPerNode": ("1024",),
    "MessageTimeout": ("20", "60"),
    "MinJobAge": ("600", "3600"),
    "OverTimeLimit": ("5", "UNLIMITED"),
    "PreemptExemptTime": ("00:10:00",),
    "PriorityCalcPeriod": ("10",),
    "PriorityDecayHalfLife": ("3-0", "14-0"),
    "PriorityFavorSmall": ("YES", "NO"),
    "PriorityMaxAge": ("1-0", "14-0"),
    "PriorityUsageResetPeriod": ("NONE", "MONTHLY"),
    "PriorityWeightAge": ("100", "5000"),
    "PriorityWeightFairshare": ("100", "5000"),
    "PriorityWeightJobSize": ("100", "5000"),
    "PriorityWeightPartition": ("100", "5000"),
    "PriorityWeightQOS": ("100", "5000"),
    "PriorityWeightTRES": ("CPU=1000,Mem=2000",),
    "Prolog": ("/usr/local/sbin/prolog",),
    "PrologEpilogTimeout": ("60", "600"),
    "PrologFlags": ("Alloc", "Contain"),
    "PrologSlurmctld": ("/usr/local/sbin/prolog-slurmctld",),
    "PropagateResourceLimitsExcept": ("MEMLOCK", "CORE,NOFILE"),
    "RebootProgram": ("/usr/sbin/reboot",),
    "RequeueExit": ("100", "100,200-210"),
    "ResumeRate": ("100", "300"),
    "ResumeTimeout": ("300", "600"),
    "ResvEpilog": ("/usr/local/sbin/resv-epilog",),
    "ResvOverRun": ("5",),
    "ResvProlog": ("/usr/local/sbin/resv-prolog",),
    "ReturnToService": ("0", "1"),
    "SchedulerParameters": (
        "bf_window=2880,bf_resolution=300", "default_queue_depth=1000,bf_continue", "bf_max_job_user=50,defer",
        "max_rpc_cnt=150", "sched_min_interval=2000000,bf_interval=60", "nohold_on_prolog_fail,enable_user_top",
    ),
    "SchedulerTimeSlice": ("30", "60"),
    "SlurmSchedLogFile": ("/var/log/slurm/sched.log",),
    "SlurmSchedLogLevel": ("0", "1"),
    "SlurmctldDebug": ("error", "info", "debug2"),
    "SlurmctldTimeout": ("60", "300"),
    "SlurmdDebug": ("error", "verbose", "debug3"),
    "SlurmdTimeout": ("120", "600"),
    "SrunPortRange": ("60001-63000",),
    "SuspendTimeout": ("60",),
    "TCPTimeout": ("2", "10"),
    "TaskEpilog": ("/usr/local/bin/task-epilog",),
    "TaskProlog": ("/usr/local/bin/task-prolog",),
    "TmpFS": ("/scratch",),
    "TopologyParam": ("TopoOptional",),
    "TreeWidth": ("64", "256"),
    "UnkillableStepTimeout": ("120", "300"),
    "VSizeFactor": ("110",),
    "WaitTime": ("0", "30"),
    "X11Parameters": ("home_xauthority",),
}  # fmt: skip
PARTITION_FIELDS = (
    "DefaultTime=10", "GraceTime=60", "MaxTime=30-0", "MaxTime=UNLIMITED", "PriorityJobFactor=7", "PriorityTier=1",
    "PriorityTier=5", "TRESBillingWeights=CPU=1.0,Mem=0.25G", "DefMemPerCPU=64", "Hidden=YES", "DisableRootJobs=YES",
    "ExclusiveUser=NO", "MinNodes=0", "MaxNodes=100", "OverTimeLimit=10", "SelectTypeParameters=CR_Core_Memory",
)  # fmt: skip


def harmless(seed: int, text: str) -> tuple[str, str]:
    """Return what the seed's change is, and the changed slurm.conf."""
    draw = random.Random(seed)
    told = []
    for change in draw.choices(KINDS, WEIGHTS, k=draw.randint(1, 3)):
        what, text = change(draw, text)
        told.append(what)
    return "; ".join(told), text


def _setting(draw: random.Random, text: str) -> tuple[str, str]:
    name = draw.choice(sorted(SETTINGS))
    value = draw.choice(SETTINGS[name])
    kept = [line for line in text.splitlines() if line.partition("=")[0].lower() != name.lower()]
    return f"{name}={value}", "\n".join([*kept, f"{name}={value}"]) + "\n"


def _comments(draw: random.Random, text: str) -> tuple[str, str]:
    lines = []
    for line in text.splitlines():
        lines += draw.choice(([line], ["# PartitionName=main State=DOWN", "", line], [f"{line}   # as it was"]))
    return "comments", "\n".join(lines) + "\n"


def _order(draw: random.Random, text: str) -> tuple[str, str]:
    """Shuffle the settings; nodes stay before sets of nodes, and those before partitions."""
    lines = text.splitlines()
    records = [line for line in lines if line.lower().startswith(("nodename", "nodeset", "partitionname"))]
    settings = [line for line in lines if line not in records]
    draw.shuffle(settings)
    return "order", "\n".join([*settings, *records]) + "\n"


def _case(draw: random.Random, text: str) -> tuple[str, str]:
    lines = [line.partition("=") for line in text.splitlines()]
    change = draw.choice((str.lower, str.upper))
    return "case", "".join(f"{change(key)}{equals}{value}\n" for key, equals, value in lines)


def _blanks(draw: random.Random, text: str) -> tuple[str, str]:
    return "blanks", "".join(
        draw.choice(("", "  ")) + line + draw.choice(("", "  ", "\t")) + "\n" for line in text.splitlines()
    )


def _nodes(draw: random.Random, text: str) -> tuple[str, str]:
    name = f"{draw.choice('abc')}{draw.randint(1000, 9999)}"
    names = draw.choice((name, f"{name}-[1-{draw.randint(2, 40)}]"))
    size = f"CPUs={draw.choice((2, 64))} RealMemory={draw.choice((800, 64000))} Weight={draw.randint(1, 9)}"
    state = draw.choice(("UNKNOWN", "CLOUD", "FUTURE"))
    return f"nodes {names}", f"NodeName={names} {size} State={state}\n{text}"


def _partition(draw: random.Random, text: str) -> tuple[str, str]:
    name = f"new{draw.randint(1000, 9999)}"
    fields = " ".join(draw.sample(PARTITION_FIELDS[3:8], 2))
    return f"partition {name}", f"{text}PartitionName={name} Nodes=ALL State={draw.choice(('UP', 'DOWN'))} {fields}\n"


def _field(draw: random.Random, text: str) -> tuple[str, str]:
    lines = text.splitlines()
    places = [number for number, line in enumerate(lines) if line.lower().startswith("partitionname")]
    number, field = draw.choice(places), draw.choice(PARTITION_FIELDS)
    words = [
        word
        for word in lines[number].split("#")[0].split()
        if not word.lower().startswith(f"{field.partition('=')[0].lower()}=")
    ]
    lines[number] = " ".join([*words, field])
    return f"{words[0]} {field}", "\n".join(lines) + "\n"


def _feature(draw: random.Random, text: str) -> tuple[str, str]:
    lines = text.splitlines()
    places = [number for number, line in enumerate(lines) if "feature=" in line.lower() and "nodename" in line.lower()]
    number, more = draw.choice(places), draw.choice(("avx512", "ib", "nvme"))
    lines[number] = " ".join(
        f"{word},{more}" if word.lower().startswith("feature=") else word
        for word in lines[number].split("#")[0].split()
    )
    weight = f" Weight={draw.randint(2, 50)}" if "weight=" not in lines[number].lower() else ""
    lines[number] += weight
    return f"feature {more}{weight}", "\n".join(lines) + "\n"


def _licences(draw: random.Random, text: str) -> tuple[str, str]:
    value = f"matlab:{draw.randint(4, 40)},abaqus:{draw.randint(1, 9)}"
    kept = [line for line in text.splitlines() if line.partition("=")[0].strip().lower() != "licenses"]
    return f"Licenses={value}", "\n".join([*kept, f"Licenses={value}"]) + "\n"


def _node_set(draw: random.Random, text: str) -> tuple[str, str]:
    name = f"set{draw.randint(1000, 9999)}"
    return f"NodeSet={name}", f"{text}NodeSet={name} Feature={draw.choice(('fast', 'none'))}\n"


Change = Callable[[random.Random, str], tuple[str, str]]
KINDS: tuple[Change, ...] = (
    _setting, _comments, _order, _case, _blanks, _nodes, _partition, _field, _feature, _licences, _node_set,
)  # fmt: skip
WEIGHTS = (12, 1, 1, 1, 1, 2, 2, 4, 2, 1, 1)
