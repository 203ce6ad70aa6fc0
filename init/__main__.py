"""Entrypoint of every image, run by its path: `python3 -I -S .../init/__main__.py [--plan FILE]`.

`python3 -I -m init` does the same, but later: -S skips the search for site-packages, a path the search for a module.
Python compiles a file run by its path at each start, so this file is short; the rest is in `init.pid1.start`.
"""

from __future__ import annotations

import sys
import time

BEGAN = time.monotonic()

if __package__ in (None, ""):  # run by its path: init's package is beside this file; search it after Python's own
    sys.path.append(__file__.rpartition("/init/")[0] or "/")

try:
    from init.pid1.modules import hurry

    hurry()
    from init.pid1.start import end, main
except (OSError, MemoryError, ImportError) as error:  # same text as in init.pid1.start, which could not be imported
    import posix  # built in

    posix.write(2, f"minivm: cannot begin: {error}\n".encode(errors="replace"))
    posix._exit(71)

if __name__ == "__main__":
    end(main(sys.argv[1:], BEGAN))
