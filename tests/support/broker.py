"""A health broker with a table in the controller's place."""

from __future__ import annotations

import json
import time
from pathlib import Path

from health.broker.broker import Broker, Slurm
from health.broker.decide import BrokerNode, OtherNode
from health.places import Places
from health.policy import BrokerPolicy
from init.slurm.client import SlurmError

BOOT = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
COMMIT = "9f2c1ab0000000000000000000000000deadbeef"
QUICK = BrokerPolicy(
    raise_after={"user": 0, "node": 2, "reboot": 1, "manual": 1, "rma": 1},
    clear_after=1,
    clear_wait_s={"node": 0.0, "reboot": 0.0, "manual": 0.0, "rma": -1.0},
    guard_spread_s=0.0,
    guard_recheck_s=3600.0,
)


class Controller(Slurm):
    """Slurm's side of the conversation, with every call written down."""

    def __init__(self) -> None:
        super().__init__("worker-7", "controller:6817")
        self.state = BrokerNode(False, "")
        self.fleet: list[str] = [""] * 9
        self.since = time.time()
        self.calls: list[str] = []
        self.down = False

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if self.down:
            raise SlurmError("ask slurmctld", "controller:6817 cannot be reached")

    def node(self) -> BrokerNode | None:
        self._called("node")
        return self.state

    def other_nodes(self) -> tuple[list[OtherNode], int]:
        self._called("others")
        return [OtherNode(text, self.since) for text in self.fleet], len(self.fleet) + 1

    def drain(self, text: str) -> None:
        self._called("drain")
        self.state = BrokerNode(True, text)

    def undrain(self) -> None:
        self._called("undrain")
        self.state = BrokerNode(False, "")


class Desk:
    """A broker, its places, and a hand that writes verdicts."""

    def __init__(self, root: Path, policy: BrokerPolicy = QUICK) -> None:
        self.places = Places(
            root / "verdicts", root / "health", ledger=root / "ledger", broker=root / "sock",
            broker_state=root / "state.json", scripts=root, policy=root / "policy.json", spool=root,
            cgroups=root / "cgroups",
        )  # fmt: skip
        self.places.verdicts.mkdir(exist_ok=True)
        self.slurm = Controller()
        self.broker = Broker(self.places, self.slurm, policy)
        self.clock = time.time()

    def say(self, result: str, check: str = "gpu_ecc", class_: str = "reboot", subject: str = "host") -> None:
        self.clock += 0.001
        data = {
            "check": check, "result": result, "class": class_, "reason": f"{check} says so", "subject": subject,
            "commit": COMMIT, "boot_id": BOOT, "at": self.clock, "expires": self.clock + 600,
        }  # fmt: skip
        (self.places.verdicts / f"{check}.json").write_text(json.dumps(data))
        self.broker.look()

    def index(self, *checks: str, when: tuple[str, ...] = ("background",)) -> None:
        """Write the checks of the tree's last round."""
        self.places.state.mkdir(exist_ok=True)
        listed = {check: {"when": list(when), "period_s": 60, "applies": True} for check in checks}
        data = {"boot_id": BOOT, "commit": COMMIT, "checks": listed}
        (self.places.state / "index.json").write_text(json.dumps(data))

    def remove(self, check: str) -> None:
        """Take a check out as a commit does: its verdict goes, and the index no longer names it."""
        (self.places.verdicts / f"{check}.json").unlink()
        self.broker.look()

    def calls(self) -> list[str]:
        made, self.slurm.calls = self.slurm.calls, []
        return made
