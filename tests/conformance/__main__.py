"""`python -m tests.conformance --adapter FILE`: run the checks against the cluster of KUBECONFIG and report.

It needs pytest, PyYAML and kubectl (or $MINIVM_CONFORMANCE_KUBECTL). The exit code is 0 where no check failed. The
cluster is disturbed and put back: use one that nobody works on, or --gentle. Further words are pytest's, such as -k.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import pytest

from tests.conformance.adapter import AdapterError, load, pairs
from tests.conformance.report import Report, as_json, table

HERE = Path(__file__).resolve().parent


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.conformance", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--adapter", type=Path, required=True, help="a file, as those in tests/conformance/adapters")
    parser.add_argument("--name", action="append", default=[], metavar="NAME=VALUE", help="a value of its `names`")
    parser.add_argument("--json", type=Path, help="write the report there as well")
    parser.add_argument("--gentle", action="store_true", help="leave out the checks that disturb the cluster")
    asked, rest = parser.parse_known_args(arguments)
    try:
        adapter = load(asked.adapter, pairs(asked.name))
    except AdapterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        # Before the run, not after half an hour.
        (asked.json or Path(os.devnull)).touch()
    except OSError as error:
        print(f"error: cannot write the report: {error}", file=sys.stderr)
        return 2
    report = Report()
    own = ["-c", str(HERE / "pytest.ini"), "--rootdir", str(HERE.parents[1]), "--confcutdir", str(HERE)]
    own += ["-q", "-p", "no:cacheprovider", "--tb=short", f"--adapter={asked.adapter.resolve()}"]
    own += [f"--name={name}" for name in asked.name] + ["--gentle"] * asked.gentle
    code = pytest.main([*own, str(HERE), *rest], plugins=[report])
    results = list(report.results.values())
    print(f"{adapter.product}: {adapter.note or asked.adapter}\n{table(results)}\n")
    print(", ".join(f"{count} {outcome}" for outcome, count in report.counts().items()))
    if asked.json:
        asked.json.write_text(as_json(adapter.product, adapter.note, report))
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
