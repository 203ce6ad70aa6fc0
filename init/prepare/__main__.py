"""`python3 -I -m init.prepare STEP...`: run preparation steps, in order, in one short process.

Exit 0: done. Exit 1: another try may succeed. Exit 78: the configuration is wrong, and no try will. All output goes to
one stream: its last line is the reason in `minivm why`, and two streams have no common order.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from init.errors import ConfigError, InitError, nearest
from init.plan.service import STEPS
from init.pod.pod import Pod

EX_CONFIG = 78


def main(names: Sequence[str]) -> int:
    pod = Pod(os.environ)
    for name in names:
        try:
            if name not in STEPS:
                raise ConfigError("prepare the pod", f"no step {name!r}", hint=nearest(name, [*STEPS]))
            module, function = STEPS[name]
            text = getattr(importlib.import_module(f"init.prepare.{module}"), function)(pod)
        except ConfigError as error:
            print(error)
            return EX_CONFIG
        except InitError as error:
            print(error)
            return 1
        except OSError as error:
            print(f"cannot do {name}: {error}")
            return 1
        print(f"{name}: {text}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
