"""What collectives cost here: the algorithms beside gloo's own all-reduce, and backends beside each other.

    python benchmarks/collectives.py                         # fifteen minutes, on a machine that does nothing else
    python docs/generate.py                                  # the tables of docs/collectives.md

Each question is one `everyrank comm`, in which all that is compared takes turns. The file has the rows and
the fitted costs of all of them, each with the number of its ranks, and where they come from. One question is asked in
nine starts: an all-reduce over the first two backends alone. A tenth of gloo's calls takes ten times as long as the
rest, and where the ranks come to lie on the cores is another matter in each start: one start says little.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

DEFAULT = Path(__file__).parent / "records" / "collectives-cpu.json"
STARTS = 9


def questions(backends: list[str], sizes: list[str], seconds: float) -> list[list[str]]:
    """The words of each call: all-reduce by every algorithm on 2 and 4 ranks, and every operation on every backend.

    Horovod's thread wakes up every millisecond: it is measured beside the first alone, and disturbs no other.
    """
    common = ["--sizes", *sizes, "--seconds", str(seconds), "--device", "cpu"]
    found = [
        [*common, "--op", "all_reduce", "--algorithm", "all", "--backend", "gloo", "--processes", str(ranks)]
        for ranks in (2, 4)
    ]
    others = [name for name in backends if name != "horovod"]
    found.append([*common, "--backend", *others, "--processes", "2"])
    if "horovod" in backends:
        found.append([*common, "--backend", others[0], "horovod", "--processes", "2"])
    return found


def two_alone(backends: list[str], seconds: float) -> list[str]:
    """The words of the call that is made in several starts: all-reduce of two sizes, over the first two backends."""
    found = ["--sizes", "64KiB", "32MiB", "--seconds", str(seconds), "--device", "cpu", "--op", "all_reduce"]
    return [*found, "--backend", *backends[:2], "--processes", "2"]


def ask(words: list[str], folder: Path) -> dict[str, Any]:
    """What `everyrank comm` has measured. Ends this process where it has failed."""
    path = folder / "comm.json"
    command = [sys.executable, "-P", "-m", "everyrank", "comm", *words, "--json", str(path)]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
    if done.returncode:
        sys.exit(f"everyrank comm {' '.join(words)}: status {done.returncode}")
    found: dict[str, Any] = json.loads(path.read_text())
    if "horovod" in words:  # the first is in the file already
        for key in ("rows", "costs", "strides"):
            found[key] = [row for row in found[key] if row["backend"] == "horovod"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="What collectives cost here, by algorithm and by backend.")
    parser.add_argument(
        "--backend",
        nargs="+",
        default=["gloo", "shm", "mpi", "horovod"],
        help="default: gloo shm mpi horovod; the first is what others are compared with",
    )
    parser.add_argument("--sizes", nargs="+", default=["4:64MiB"])
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--json", type=Path, default=DEFAULT)
    args = parser.parse_args()
    asked = questions(args.backend, args.sizes, args.seconds)
    pair = two_alone(args.backend, args.seconds)
    found: list[dict[str, Any]] = []
    starts: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for number, words in enumerate(asked, 1):
            print(f"{number} of {len(asked)}: everyrank comm {' '.join(words)}", file=sys.stderr)
            found.append(ask(words, Path(folder)))
        for number in range(1, STARTS + 1):
            print(f"start {number} of {STARTS}: everyrank comm {' '.join(pair)}", file=sys.stderr)
            starts.append(ask(pair, Path(folder)))
    last = found[-1]
    machine = {key: value for key, value in last["machine"].items() if key not in ("choices", "threads_per_rank")}
    merged = {
        "provenance": {
            "date": last["time"],
            "commands": [" ".join(one["command"]) for one in (*found, starts[0])],
            **machine,
        },
        "copies": [{"ranks": one["world"]["size"], **one["copy"]} for one in found],
        **{key: [row for one in found for row in one[key]] for key in ("rows", "costs", "strides")},
        "starts": [{"start": number, **row} for number, one in enumerate(starts, 1) for row in one["rows"]],
    }
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(merged, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {args.json}")


if __name__ == "__main__":
    main()
