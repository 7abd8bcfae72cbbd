"""Every mutation of the test-suite, one by one: a mistake put into the code of a layout, which verify has to find.

    python benchmarks/mutations.py [--json benchmarks/records/mutations-cpu.json]

The cases are those of tests/parity/test_mutations.py and tests/integration/test_mutations_model_parallel.py, on 2 to 4
ranks that stay; a Record of each says what was found, or with which words it was refused. Ends with 1 where one passed.
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
    """(name, layout, ranks, function, its arguments but the key)."""
    found: list[Any] = []
    for mutation, strategies, name, optimizer, count, keys, _ in test_mutations.CASES:
        for strategy in strategies:
            arguments = (mutation, strategy, name, optimizer, keys)
            found.append((mutation.__name__, strategy + keys, count, test_mutations.check, arguments))
    for mutation, text, trait, optimizer, count, _ in test_mutations_model_parallel.CASES:
        arguments = (mutation, text, trait, optimizer)
        found.append((mutation.__name__, text, count, test_mutations_model_parallel.check, arguments))
    return found


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
            found = pool.call(function, (*arguments, f"benchmark/{next(keys)}"), timeout=300)[0]
            parity = found if isinstance(found, Parity) else Parity("refused", reason=found)
            print(f"{name:32} {layout:44} {parity.status:10} {parity.cause or parity.reason or ''}"[:200], flush=True)
            records.append(Record(name, layout, "spawn", "gloo", "cpu", count, parity=parity))
    finally:
        for pool in pools.values():
            pool.close()
        server.close()
    passed = [record for record in records if record.parity.status not in ("different", "refused")]
    print(f"{len(records)} mutations, {len(records) - len(passed)} found or refused")
    if args.json is not None:
        write_records(records, args.json)
    return 1 if passed else 0


if __name__ == "__main__":
    sys.exit(main())
