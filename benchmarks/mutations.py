"""Run every mutation of the test suite: a mistake in the code of a layout, which `verify` must detect.

    python benchmarks/mutations.py [--json benchmarks/records/mutations-cpu.json]

The cases are those of tests/parity/test_mutations.py and tests/integration/test_mutations_model_parallel.py, on 2 to 4
ranks that all cases share. Each Record has the reported difference, or the error message. The exit code is 1 if
a mutation was not detected.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "parity"), str(TESTS / "integration")]

import test_mutations  # noqa: E402
import test_mutations_model_parallel  # noqa: E402

from everyrank.record import Parity, Record, write_records  # noqa: E402
from forkserver import ForkServer  # noqa: E402
from processes import Pool  # noqa: E402


def cases() -> list[tuple[str, str, int, Any, tuple[Any, ...]]]:
    """Return (name, layout, number of ranks, function, its arguments except the key) of each mutation."""
    result: list[Any] = []
    for mutation, strategies, name, optimizer, count, keys, _ in test_mutations.CASES:
        for strategy in strategies:
            arguments = (mutation, strategy, name, optimizer, keys)
            result.append((mutation.__name__, strategy + keys, count, test_mutations.check, arguments))
    for mutation, text, trait, optimizer, count, _ in test_mutations_model_parallel.CASES:
        arguments = (mutation, text, trait, optimizer)
        result.append((mutation.__name__, text, count, test_mutations_model_parallel.check, arguments))
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    server = ForkServer()
    pools: dict[int, Pool] = {}
    keys = itertools.count()
    records: list[Record] = []
    try:
        for name, layout, count, function, arguments in cases():
            pool = pools[count] if count in pools else pools.setdefault(count, Pool(server, count))
            result = pool.call(function, (*arguments, f"benchmark/{next(keys)}"), timeout=300)[0]
            parity = result if isinstance(result, Parity) else Parity("refused", reason=result)
            print(f"{name:32} {layout:44} {parity.status:10} {parity.cause or parity.reason or ''}"[:200], flush=True)
            records.append(Record(name, layout, "spawn", "gloo", "cpu", count, parity=parity))
    finally:
        for pool in pools.values():
            pool.close()
        server.close()
    undetected = [record for record in records if record.parity.status not in ("different", "refused")]
    print(f"{len(records)} mutations, {len(records) - len(undetected)} detected or refused")
    if args.json is not None:
        write_records(records, args.json)
    return 1 if undetected else 0


if __name__ == "__main__":
    sys.exit(main())
