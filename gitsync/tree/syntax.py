"""Compile the Python and read the JSON and TOML files named on standard input; print one line per broken file.

A process of its own (`python -I -S syntax.py`): source that crashes the compiler must not take the cycle with it.
Nothing is executed and no byte code is written.
"""

import json
import os
import sys
import tomllib
import warnings


def main() -> int:
    warnings.simplefilter("ignore")
    broken = 0
    for name in sys.stdin.read().split("\0"):
        if not name:
            continue
        try:
            with open(name, "rb") as source:  # noqa: PTH123  # pathlib costs more than the rest
                content = source.read()
            if name.endswith(".json"):
                json.loads(content)
            elif name.endswith(".toml"):
                tomllib.loads(content.decode())
            else:
                compile(content, name, "exec", dont_inherit=True)
        except (SyntaxError, ValueError, RecursionError, MemoryError, OSError) as error:
            broken += 1
            print(f"{os.path.normpath(name)}: {type(error).__name__}: {error}"[:500].replace("\n", " "))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
