"""Orders of a user to Slurm's daemons: slurmctld, slurmdbd and slurmd refuse what only root and SlurmUser may order.

slurmd understands some requests of `scontrol` to slurmctld. A slurm.conf that names the worker as the controller sends
them there. It names root as SlurmUser, so that Slurm's clients of the user address what runs as root.
"""

from __future__ import annotations

from tests.cluster.researcher import Researcher

CONF = """ClusterName=any
SlurmctldHost={worker}({address})
SlurmctldPort=6818
SlurmUser=root
AuthType=auth/{auth}
CredType=cred/{auth}
"""
LOGIN, CONTROLLER = "slurm-login-0", "slurm-controller-0"
REFUSED = ("Invalid user id", "denied")
# Of slurmctld and slurmdbd, by the cluster's own slurm.conf.
OTHER_ORDERS = ("scontrol shutdown", "scontrol reconfigure", "scontrol setdebug debug5", "sacctmgr shutdown")


def check_orders_are_refused(honest: Researcher, hostile: Researcher, worker: str, auth: str) -> None:
    """Let one user order daemons to end while another's job runs; then let root give slurmd an order by the same file.

    Without root's success the user's failure would prove nothing.
    """
    world = honest.world
    job = honest.submit("-w", worker, "-o", "/dev/null", script="until test -e ordered; do sleep 1; done; srun true")
    honest.wait_for(job, "RUNNING")
    daemons = ((worker, "slurmd"), (CONTROLLER, "slurmctld"), (CONTROLLER, "slurmdbd"))
    before = [world.run(pod, "pgrep", "-ox", daemon) for pod, daemon in daemons]
    conf = CONF.format(worker=worker, address=world.running(worker).address, auth=auth)
    hostile("cat > /tmp/as-a-controller.conf", stdin=conf)
    to_slurmd = "SLURM_CONF=/tmp/as-a-controller.conf timeout 60 scontrol"
    try:
        for order in ("setdebug debug5", "reconfigure", "shutdown"):
            done = hostile.try_(f"{to_slurmd} {order}")
            assert done.returncode, (order, done)
            # slurmd closes the connection without an answer to the orders that end it.
            assert any(words in done.stderr for words in (*REFUSED, "Zero Bytes")), (order, done.stderr)
        for order in OTHER_ORDERS:
            done = hostile.try_(f"timeout 60 {order}")
            assert done.returncode, (order, done)
            assert any(words in done.stdout + done.stderr for words in REFUSED), (order, done)
        assert [world.run(pod, "pgrep", "-ox", daemon) for pod, daemon in daemons] == before
        assert honest.state(job) == "RUNNING"
        honest("touch ordered")
        honest.wait_for(job, "COMPLETED")
        world.run(LOGIN, "sh", "-c", f"{to_slurmd} setdebug verbose")
    finally:
        hostile("rm -f /tmp/as-a-controller.conf")
        honest("rm -f ordered; scancel", job)
