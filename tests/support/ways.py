"""Ways for a job to wait, to lag and to die, with what `minivm job` must say of each.

tests/cluster/test_forty_ways.py makes each happen on one cluster of two nodes, and docs/reference/forty-ways.md shows
them as a table.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

WAITS, RUNS, ENDED = "waits", "runs", "ended"
CODE, REQUEST, LIMIT, MACHINE = "your code", "the request", "a limit", "the machine"
CLUSTER, PERSON, WELL, UNKNOWN = "the cluster", "a person", "nothing is wrong", "not known"


@dataclass(frozen=True, slots=True)
class Way:
    key: str
    group: str
    title: str  # for the docs
    cause: str
    says: str  # words of the headline, then of the evidence; ... is any text, {key} the number of that way's job
    options: str = ""  # of sbatch; {key} is the number of another way's job
    script: str = ""  # empty: an act of the test submits it or makes it happen
    nodes: int = 1
    ask: str = ""  # what follows the job's number: _2, +1
    stage: str = "start"
    first: str = ""  # "task": the first rank that failed must be task 1, on the node that had it


PYTHON = "python3 - <<'END'\n{}\nEND"
FILL = "x = bytearray(400 << 20); x[::4096] = b'x' * len(x[::4096])"
# Both ranks note their node. Rank 1 fails, and Slurm ends rank 0 because of it.
RANKS = """cat > {name}.sh <<'END'
echo "$SLURMD_NODENAME" > {name}-$SLURM_PROCID
if [ "$SLURM_PROCID" = 1 ]; then
{way}
fi
exec sleep 300
END
srun -K -N2 -n2 bash {name}.sh"""
LOSES_IT = """trap 'sleep 2; echo "$SLURMD_NODENAME:1:2 [0] NCCL WARN NET/IB : no completion"; exit 1' TERM
sleep 300 &
wait"""
SEGFAULT = """import ctypes
ctypes.CDLL("libmpi.so.40", mode=ctypes.RTLD_GLOBAL).MPI_Init(None, None)
ctypes.string_at(0xdead0)"""


WAITS_FOR_FAULT = "until [ -e {name}-now ]; do sleep 0.2; done; exit 1"
REQUEUES = """import ctypes, os
slurm = ctypes.CDLL("/usr/lib/x86_64-linux-gnu/slurm-wlm/libslurmfull.so", mode=ctypes.RTLD_GLOBAL)
slurm.slurm_init(None)
JOB_RECONFIG_FAIL = 1 << 17
slurm.slurm_requeue(int(os.environ["SLURM_JOB_ID"]), JOB_RECONFIG_FAIL)"""


def ranks(name: str, way: str) -> str:
    return RANKS.format(name=name, way=way)


COMPUTES = "while :; do :; done"


def lagging(name: str, way: str, rest: str = COMPUTES) -> str:
    """Let rank 1 do this, and then sleep, while rank 0 does something else."""
    return RANKS.format(name=name, way=f"{way}\nelse\n{rest}")


WAITING = (
    Way("held", WAITS, "held by its user", PERSON, "It is held by its user (alice)", "-H", "true"),
    Way("admin", WAITS, "held by an operator", PERSON, "It is held by an operator", "-H", "true"),
    Way("begin", WAITS, "it has a later `--begin`", REQUEST, "waits until ... because of --begin",
        "--begin=now+2hours", "true"),
    Way("after", WAITS, "it depends on a job that waits", REQUEST, "waits for job {held}.",
        "-d afterany:{held}", "true"),
    Way("never", WAITS, "it depends on a job that failed", REQUEST,
        "can never start: ... afterok:{code} ... job {code} is failed with exit code 3", "-d afterok:{code}", "true"),
    Way("singleton", WAITS, "`--dependency=singleton`", REQUEST, "earlier jobs of the same name",
        "-d singleton -J held", "true"),
    Way("memory", WAITS, "it asks for more memory than a node has", REQUEST,
        "No node of partition all can ever run it. The nearest, slurm-worker-..., has ... the job needs 85.83 TiB",
        "-H", "true"),
    Way("nodes", WAITS, "it asks for more nodes than there are", REQUEST,
        "needs 3 nodes, and partition all has 2", "-H", "true", nodes=2),
    Way("gres", WAITS, "it asks for more of a resource than a node has", REQUEST,
        "No node of partition all can ever run it. ... has 2 of nvme and the job needs 4", "-H --gres=nvme:1", "true"),
    Way("partition-time", WAITS, "its `--time` is more than the partition's", LIMIT,
        "--time is longer than the partition allows ... short allows 1 min; it asks for 10 min",
        "-H -p short --time=10", "true"),
    Way("partition-down", WAITS, "an operator switched its partition off", PERSON,
        "operator has switched off partition off", "-p off", "true"),
    Way("account", WAITS, "the partition does not take its account", REQUEST,
        "partition closed does not take its account, physics. ... AllowAccounts chemistry", "-H -p closed", "true"),
    Way("qos-cpus", WAITS, "a QOS limits the CPUs of a user", LIMIT,
        "limit that the QOS sets on CPUs for one user ... QOS tiny...: MaxTRESPU cpu is 1...; the job asks for 2",
        "--qos=tiny -n2",
        "true"),
    Way("qos-wall", WAITS, "a QOS limits the time of a job", LIMIT,
        "the limit that the QOS sets on wall time for one job ... MaxWallPJ is 1 min...; the job asks for 5 min",
        "--qos=brief --time=5", "true"),
    Way("account-jobs", WAITS, "an association allows no more jobs", LIMIT,
        "limit that the account sets on running jobs ... user alice in account chemistry: MaxJobs is 0",
        "-A chemistry -p all", "true"),
    Way("account-cpus", WAITS, "an account's CPUs are limited", LIMIT,
        "the account sets on CPUs for all jobs together ... account geology: GrpTRES cpu is 1...; the job asks for 2",
        "-A geology -n2", "true"),
    Way("qos-gone", WAITS, "its QOS was taken from its user", REQUEST, r"its QOS does not exist or is not yours",
        "-H --qos=gone", "true"),
    Way("reservation", WAITS, "its reservation begins later", REQUEST,
        r"waits for its reservation later, which begins in", "--reservation=later", "true"),
    Way("licence", WAITS, "all licences are in use", LIMIT, "waits for licences: ... matlab: 1 of 1 in use",
        "-L matlab:1", "true"),
    Way("array", WAITS, "`--array=...%1` lets one task run", REQUEST, "--array limits how many run (1 at a time)",
        "--array=1-2%1", "sleep 600", ask="_2", stage="busy"),
    Way("resources", WAITS, "other jobs have its nodes", CLUSTER,
        "until running jobs free the processors, memory or GPUs", "-N2 --exclusive", "true", nodes=2, stage="busy"),
    Way("priority", WAITS, "other jobs are before it", CLUSTER,
        "waits its turn ... before it: the next is ...with priority", "-N2 --exclusive", "true",
        nodes=2, stage="busy"),
    Way("het", WAITS, "a component of a heterogeneous job waits", CLUSTER,
        "It waits", "-N1 --exclusive : -N1 --exclusive", "true", nodes=2, ask="+1",
        stage="busy"),
    Way("reserved", WAITS, "its node is reserved for maintenance",
        CLUSTER, "could use are reserved ... service: slurm-w",
        "-w slurm-worker-1", "true", stage="reserved"),
    Way("drained", WAITS, "an operator drained the node that it needs", PERSON,
        "nodes that take no jobs ... slurm-worker-1 is drained: new disk on Monday", "-w slurm-worker-1", "true",
        stage="drained"),
    Way("unfit", WAITS, "a check found its node broken", MACHINE,
        "nodes that take no jobs ... slurm-worker-1 is drained: minivm: ... the fabric is gone", "-w slurm-worker-1",
        "true", stage="broken"),
    Way("prolog", WAITS, "the prolog of its node failed", MACHINE,
        "held because its launch failed on slurm-worker-1 ... slurm-worker-1 is drained: Prolog error",
        "-w slurm-worker-1", "true", stage="prolog"),
    Way("again", WAITS, "it died by its machine, and `slurm.requeue` runs it again without that node", CLUSTER,
        "It was requeued and waits ... runs again without slurm-worker-1 (requeue 1 ... the fabric is gone",
        "--requeue", "until [ -e die ]; do sleep 0.2; done; exit 1", stage="broken"),
    Way("requeued", WAITS, "an operator requeued it", CLUSTER, "It was requeued and waits", "", "sleep 600",
        stage="requeued"),
)  # fmt: skip
RUNNING = (
    Way("well", RUNS, "it runs", WELL, "It runs on slurm-worker-... for", "", "sleep 600", stage="running"),
    Way("suspended", RUNS, "an operator suspended it", UNKNOWN, "It is suspended on slurm-worker-...: an operator or",
        "", "sleep 600", stage="running"),
    Way("goes-on", RUNS, "an operator drained its node", WELL,
        "slurm-worker-1 takes no new jobs; this one may go on. ... new disk on Monday", "-w slurm-worker-1",
        "sleep 600",
        stage="running"),
    Way("sick", RUNS, "a check found its node broken", MACHINE,
        "A check found a problem while it ran: slurm-worker-1: ... the fabric is gone", "-w slurm-worker-1",
        "sleep 600", stage="running"),
    Way("hung", RUNS, "it writes nothing for long", UNKNOWN, "has written nothing for ...: it may hang",
        "-o hung.out", "echo began; sleep 600", stage="running"),
    Way("rank-sleeps", RUNS, "one rank of two nodes sleeps while the other computes", UNKNOWN,
        "Task 1 on {node} uses 0 % of a processor while task 0 on slurm-worker-... uses ... %: it may be stuck or",
        "-N2 -n2", lagging("rank-sleeps", ":"), nodes=2, stage="ranks", first="task"),
    Way("rank-stopped", RUNS, "one rank of two nodes is stopped by a signal", UNKNOWN,
        "Task 1 on {node} is stopped: a signal such as SIGSTOP", "-N2 -n2",
        lagging("rank-stopped", "kill -STOP $$"), nodes=2, stage="ranks", first="task"),
    Way("rank-silent", RUNS, "one rank of two nodes writes no file", WELL,
        "for ... task 1 on {node} has written less than 1 MiB to files, task 0 on slurm-worker-... 64 MiB", "-N2 -n2",
        lagging("rank-silent", ":", "head -c 64M /dev/zero > rank-silent-file"), nodes=2, stage="ranks",
        first="task"),
)  # fmt: skip
DEAD = (
    Way("time", ENDED, "it reached its time limit", LIMIT, "reached its time limit of 1 min",
        "--time=1 -w slurm-worker-0", "sleep 600"),
    Way("code", ENDED, "its program ended with an exit code", CODE, "Its own program ended with exit code 3", "",
        "exit 3"),
    Way("command", ENDED, "a command is missing", CODE,
        "exit code 127: a command was not found. It wrote: ... no-such-program: command not found", "",
        "no-such-program"),
    Way("denied", ENDED, "a file may not be executed", CODE,
        "exit code 126: a command could not be executed. It wrote: ... Permission denied", "", "$(mktemp)"),
    Way("srun", ENDED, "srun cannot start the program", CODE,
        "It wrote: slurmstepd...: error: execve(): no-such-program: No such file or directory", "",
        "srun no-such-program"),
    Way("module", ENDED, "a Python module is missing", CODE,
        "It wrote: ModuleNotFoundError: No module named 'no_such_module'", "", "python3 -c 'import no_such_module'"),
    Way("traceback", ENDED, "a Python exception", CODE, "exit code 1. It wrote: KeyError: 'rate'.", "",
        PYTHON.format("try:\n    int('x')\nexcept ValueError:\n    pass\n{}['rate']")),
    Way("segfault", ENDED, "a segmentation fault", CODE,
        "SIGSEGV: it accessed memory that is not its own. It wrote: ... address... 0xdead0", "",
        PYTHON.format(SEGFAULT)),
    Way("abort", ENDED, "it aborts itself", CODE, "died of SIGABRT: it aborted itself", "",
        "python3 -c 'import os; os.abort()'"),
    Way("file-size", ENDED, "a file is larger than allowed", CODE, "died of SIGXFSZ: a file became larger", "",
        "ulimit -f 1; bash -c 'head -c 9999 /dev/zero > large'"),
    Way("memory-batch", ENDED, "its script uses all of its memory", REQUEST, "used all of its memory, 60M in all",
        "--mem=60M", f'exec python3 -c "{FILL}"'),
    Way("memory-step", ENDED, "a step uses all of its own memory", REQUEST,
        "step {memory-step}.0 was killed because it used all of its own memory, 60M of the job's 200M",
        "--mem=200M", f'srun --mem=60M python3 -c "{FILL}"'),
    Way("no-output", ENDED, "its output's directory does not exist", REQUEST, "could not open its output file",
        "-o /nowhere/at/all", "true"),
    Way("no-directory", ENDED, "its `--chdir` does not exist", REQUEST,
        "It wrote: slurmstepd...: error: couldn't chdir to ...nowhere", "--chdir=/nowhere -o /home/alice/no-directory",
        "cat input"),
    Way("disk-full", ENDED, "a file system is full", LIMIT, "It wrote: ... No space left on device", "",
        "echo result > /dev/full"),
    Way("quota", ENDED, "a quota is used up (stand-in)", LIMIT,
        "It wrote: ... Disk quota exceeded ... (your quota of a file system is used up)", "",
        PYTHON.format("import errno, os\nraise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), 'model.pt')")),
    Way("gpu-memory", ENDED, "a GPU's memory is full (stand-in)", REQUEST,
        "It wrote: ... OutOfMemoryError: CUDA out of memory", "",
        PYTHON.format("class OutOfMemoryError(RuntimeError): pass\n"
                      "raise OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB.')")),
    Way("gpu-fault", ENDED, "a GPU reports a fault (stand-in)", MACHINE,
        "It wrote: RuntimeError: CUDA error: uncorrectable ECC error", "",
        PYTHON.format("raise RuntimeError('CUDA error: uncorrectable ECC error encountered')")),
    Way("gpu-code", ENDED, "a kernel of it fails on the GPU (stand-in)", CODE,
        "It wrote: RuntimeError: CUDA error: an illegal memory access", "",
        PYTHON.format("raise RuntimeError('CUDA error: an illegal memory access was encountered')")),
    Way("task", ENDED, "a task of an array fails", CODE, "exit code 2", "--array=1-2", "exit $SLURM_ARRAY_TASK_ID",
        ask="_2"),
    Way("component", ENDED, "a heterogeneous job fails", CODE, "exit code 7", "-n1 : -n1", "exit 7", ask="+0"),
    Way("cancelled", ENDED, "its user cancelled it", PERSON, "own user, alice, cancelled it while it ran", "",
        'scancel "$SLURM_JOB_ID"; sleep 600'),
    Way("cancelled-early", ENDED, "its user cancelled it before it started", PERSON,
        "own user, alice, cancelled it before it started", "-H", "true"),
    Way("cancelled-by", ENDED, "an operator cancelled it", PERSON, "bob cancelled it", "-H", "true"),
    Way("rank-code", ENDED, "one rank of two nodes fails", CODE, "First failed task 1 on {node}, ...: exit code 7.",
        "-N2 -n2", ranks("rank-code", "sleep 1; exit 7"), nodes=2, first="task"),
    Way("rank-signal", ENDED, "one rank of two nodes crashes", CODE,
        "First failed task 1 on {node}, ...: killed by SIGSEGV.", "-N2 -n2",
        ranks("rank-signal", "sleep 1; kill -SEGV $$"), nodes=2, first="task"),
    Way("rank-memory", ENDED, "one rank of two nodes uses all of its memory", REQUEST,
        "First failed task 1 on {node}, ... killed because the job used all of its memory", "-N2 -n2 --mem=60M",
        ranks("rank-memory", f'sleep 1; exec python3 -c "{FILL}"'), nodes=2, first="task"),
    Way("rank-traceback", ENDED, "one rank's exception, and NCCL's error in the other (stand-in)", CODE,
        "First failed task 1 on {node} ... First rank 1 wrote: ValueError: bad batch", "-N2 -n2",
        "cat > train.py <<'END'\nimport os, sys, time\nrank = int(os.environ['SLURM_PROCID'])\n"
        "open(f'rank-traceback-{rank}', 'w').write(os.environ['SLURMD_NODENAME'])\ntime.sleep(1 + 2 * (1 - rank))\n"
        "error = 'ValueError: bad batch' if rank else 'torch.distributed.DistBackendError: NCCL error'\n"
        "print(f'[rank{rank}]: Traceback (most recent call last):', file=sys.stderr)\n"
        "print(f'[rank{rank}]: {error}', file=sys.stderr)\nsys.exit(1)\nEND\nsrun -N2 -n2 python3 train.py",
        nodes=2, first="task"),
    Way("rank-network", ENDED, "one rank ends without a word, and NCCL loses it in the other (stand-in)", CODE,
        "First failed task 1 on {node} ... NCCL WARN NET/IB", "-N2 -n2",
        ranks("rank-network", "sleep 1; exit 3").replace("exec sleep 300", LOSES_IT), nodes=2, first="task"),
    Way("boot-fail", ENDED, "a program requeues it as a job whose nodes failed to start", UNKNOWN,
        "nodes could not be configured for it ... state BOOT_FAIL", "--no-requeue",
        f"{PYTHON.format(REQUEUES)}\nsleep 600"),
    Way("link", ENDED, "the link of one node of two is lost for a moment, and NCCL's error (stand-in)", MACHINE,
        "First failed task 1 on {node} ... slurm-worker-1 lost a link ... network interface eth0 lost its link",
        "-N2 -n2 --no-requeue", ranks("link", WAITS_FOR_FAULT.format(name="link")).replace("exec sleep 300", LOSES_IT),
        nodes=2, stage="fault", first="task"),
    Way("ib-link", ENDED, "InfiniBand counts a lost link on one node of two, and NCCL's error (stand-ins)", MACHINE,
        "First failed task 1 on {node} ... slurm-worker-1 lost a link ... fabric port mlx5_0/1 lost its link",
        "-N2 -n2 --no-requeue",
        ranks("ib-link", WAITS_FOR_FAULT.format(name="ib-link")).replace("exec sleep 300", LOSES_IT),
        nodes=2, stage="fault", first="task"),
    Way("nvlink", ENDED, "an NVLink of one node of two is down (stand-in)", MACHINE,
        "First failed task 1 on {node} ... slurm-worker-1 was found broken ... 17 of 18 NVLinks are up",
        "-N2 -n2 --no-requeue", ranks("nvlink", WAITS_FOR_FAULT.format(name="nvlink")),
        nodes=2, stage="fault", first="task"),
    Way("xid", ENDED, "the kernel logs an Xid of a GPU (stand-in)", MACHINE,
        "slurm-worker-1 was found broken while it ran. ... XID 79 on 0000:3b:00: GPU has fallen off the bus",
        "-w slurm-worker-1 --no-requeue", WAITS_FOR_FAULT.format(name="xid"), stage="fault"),
    Way("preempted", ENDED, "a job of a higher priority took its place", CLUSTER,
        "took its place ... job ... of alice", "-p low -w slurm-worker-0 --exclusive --no-requeue", "sleep 600",
        stage="preempted"),
    Way("deadline", ENDED, "it could not end before its `--deadline`", REQUEST, "could not end before its --deadline",
        "-H --time=1 --deadline=now+65", "true"),
    Way("launch", ENDED, "the prolog of its node failed, and it has `--no-requeue`", MACHINE,
        "launch failed on slurm-worker-1 ... slurm-worker-1 is drained: Prolog error", "-w slurm-worker-1 --no-requeue",
        "true", stage="prolog"),
    Way("pod-replaced", ENDED, "a pod of its two was killed and started again", CLUSTER,
        "minivm ended it: the pod of node slurm-worker-1 was replaced", "-N2 --no-requeue", "srun sleep 600", nodes=2,
        stage="lost"),
    Way("node-down", ENDED, "slurmctld lost its node", MACHINE, "slurmctld lost slurm-worker-1",
        "-w slurm-worker-1 --no-requeue", "sleep 600", stage="lost"),
    Way("nodes-down", ENDED, "slurmctld lost one of its two nodes", MACHINE, "slurmctld lost slurm-worker-1",
        "-N2 --no-requeue", "srun sleep 600", nodes=2, stage="lost"),
)  # fmt: skip
WAYS = (*DEAD, *WAITING, *RUNNING)


def pattern(way: Way, names: Mapping[str, str]) -> str:
    """Return the regular expression of the words; `names` has the jobs' numbers, and the node of rank 1."""
    text = re.sub(r"\{([a-z-]+)\}", lambda match: names[match[1]], way.says)
    return ".*".join(map(re.escape, re.split(r"\s*\.\.\.\s*", text)))


def table() -> str:
    """Write the table of docs/reference/forty-ways.md."""
    lines = ["| it | because | cause | `minivm job` says |", "|---|---|---|---|"]
    for way in (*WAITING, *RUNNING, *DEAD):
        says = re.sub(r"\{[a-z-]+\}", "N", way.says.replace("{node}", "NODE"))
        lines.append(f"| {way.group} | {way.title} | {way.cause} | {says} |")
    return "\n".join(lines) + "\n"
