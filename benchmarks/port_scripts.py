"""Count the public single-device scripts that `everyrank port` turns into equivalent distributed scripts.

Run: python benchmarks/port_scripts.py FOLDER [NAME ...] [--to accelerate|fabric|workload] [--json F]

FOLDER has the folders seen/ and unseen/, each with scripts and a cases.json. A case has a name, script, cwd, args, env,
source and kind. The scripts are not part of this repository; `source` in the Record has the address of each. Scripts in
seen/ were used to develop `port`. Scripts in unseen/ were not read before their first run; FIRST_RUN has its results.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from silent_bugs import provenance

# results before any change of `port` that these scripts led to
FIRST_RUN = {
    "ex_super_resolution": "equal",
    "ex_mnist_rnn": "equal",
    "yj_birnn": "equal",
    "cifar_kuangliu": "equal",
    "ex_gcn": "refused",
    "ex_reinforce": "refused",
    "ex_word_language_model": "not equal",
    "ex_fast_neural_style": "not equal",
    "kfold": "not equal",
    "tcn_adding": "not equal",
}
# why DistributedDataParallel cannot train a script, judged by hand
RIGHTLY_REFUSED = {
    "ex_gcn": "nodes of one graph depend on each other",
    "ex_reinforce": "an episode, not a batch, is trained on",
    "ex_forward_forward": "layers train themselves in methods other than forward",
    "simclr": "the loss compares samples of a batch",
}
# what a workload cannot express, judged by hand (`--to workload`)
NO_WORKLOAD = {
    "ex_dcgan": "two optimizers",
    "yj_gan": "two optimizers",
    "ex_vae": "noise is drawn in forward",
    "cond_diffusion": "noise is drawn in forward",
    "ex_forward_forward": "an optimizer for each layer",
    "ex_time_sequence": "LBFGS",
    "ex_regression": "updates by hand",
    "simclr": "the loss compares samples of a batch",
    "yj_language_model": "hidden states are carried along",
    "ex_word_language_model": "updates by hand",
    "ex_gcn": "nodes of one graph depend on each other",
    "ex_reinforce": "an episode, not a batch, is trained on",
    "kfold": "several trainings",
    "ncf": "each epoch changes the data set",
    "unet": "the schedule follows a metric to its maximum",
    "makemore": "samples are drawn with replacement",
    "tcn_adding": "the batches come from no DataLoader",
    "mingpt_adder": "the training loop is in another file",
    "yj_birnn": "forward makes tensors of torch's default type",
}
_TIMEOUT_SECONDS = 900


def port_script(folder: Path, case: dict[str, Any], to: str = "ddp") -> dict[str, Any]:
    """Port a copy of one script, and return its row: the result, and the lines that the port adds and changes."""
    with tempfile.TemporaryDirectory() as copy:
        project = Path(case["cwd"]).parts[0]
        shutil.copytree(folder / project, Path(copy) / project)
        cwd = Path(copy) / case["cwd"]
        script, out = Path(os.path.relpath(Path(copy) / case["script"], cwd)), Path(copy) / "port.json"
        start = time.monotonic()
        options = [] if to == "ddp" else ["--to", to]
        status, text = _port(cwd, out, case, script, options)
        second_script = re.search(r"--with (\S+\.py)", text) if status == 3 else None
        if second_script is not None:  # the message asks for this option
            status, text = _port(cwd, out, case, script, [*options, "--with", second_script[1]])
        seconds = time.monotonic() - start
        port = json.loads(out.read_text()) if out.exists() else {}
        lines = _count_lines((cwd / script).read_text(), port["text"]) if port and to != "workload" else {}
        if port and to == "workload":
            lines = {"lines": len([line for line in port["text"].splitlines() if line.strip()])}
        if port and second_script is not None:
            second_lines = _count_lines((cwd / second_script[1]).read_text(), port["other_text"])
            lines = {name: lines[name] + second_lines[name] for name in lines}
    commit = re.search(r"[0-9a-f]{40}", case["source"])
    messages = [line for line in text.splitlines() if line.startswith(("everyrank: ", "error: "))]
    return {
        "name": case["name"],
        "kind": case["kind"],
        "source": case["source"],
        "commit": commit[0] if commit else "",
        "seen": folder.name == "seen",
        "first_run": FIRST_RUN.get(case["name"]) if folder.name != "seen" and to == "ddp" else None,
        "result": {0: "equal", 1: "not equal", 3: "refused"}.get(status, f"exit status {status}"),
        "rightly": (NO_WORKLOAD if to == "workload" else RIGHTLY_REFUSED).get(case["name"])
        if status in (1, 3)
        else None,
        "with": second_script[1] if second_script else None,
        "reason": (messages or [""])[-1].partition(": ")[2] if status == 3 else _difference(port),
        "updates": min((each["updates"] for each in port.get("comparisons", [])), default=0),
        "largest": max(
            (
                max(each["largest"][kind] for kind in ("losses", "gradients", "weights"))
                for each in port.get("comparisons", [])
            ),
            default=None,
        ),
        "without_dropout": port.get("without_dropout"),
        "left_to_you": [each["sentence"] for each in port.get("left_to_you", [])],
        "findings": [each["rule"] for each in port.get("audit", [])],
        "doubts": port.get("doubts", []),
        **lines,
        "seconds": round(seconds, 1),
    }


def _port(cwd: Path, out: Path, case: dict[str, Any], script: Path, options: list[str]) -> tuple[int, str]:
    """Run `everyrank port`, and return its exit status and its output."""
    command = [sys.executable, "-m", "everyrank", "port", "--dry-run", "--json", str(out), *options, str(script)]
    process = subprocess.run(
        [*command, *case["args"]],
        cwd=cwd,
        env={**os.environ, **case["env"]},
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_SECONDS,
        check=False,
    )
    return process.returncode, process.stdout + process.stderr


def _difference(port: dict[str, Any]) -> str:
    """Return the first difference that the comparisons report, or ""."""
    return next((each["difference"] for each in port.get("comparisons", []) if each["difference"]), "")


def _count_lines(before: str, after: str) -> dict[str, int]:
    """Return how many lines a port changes and adds, and how many lines its helper functions have."""
    counts = {"changed": 0, "added": 0, "helpers": 0}
    old_lines, new_lines = before.splitlines(), after.splitlines()
    for kind, start, end, first, last in difflib.SequenceMatcher(
        None, old_lines, new_lines, autojunk=False
    ).get_opcodes():
        inserted = [line for line in new_lines[first:last] if line.strip()]
        if kind == "equal":
            continue
        if any(line.startswith("def ") for line in inserted):
            counts["helpers"] += len(inserted)
        else:
            counts["changed"] += end - start
            counts["added"] += max(0, len(inserted) - (end - start))
    return counts


def summary(rows: list[dict[str, Any]]) -> str:
    """Return the counts of results: `of 30 scripts 24 equal, 4 refused, 2 not equal; of 10 unseen scripts ...`."""
    texts = []
    for name, subset in (("scripts", rows), ("unseen scripts", [row for row in rows if not row["seen"]])):
        counts = Counter(row["result"] for row in subset)
        texts.append(
            f"of {len(subset)} {name} " + ", ".join(f"{count} {result}" for result, count in counts.most_common())
        )
    first = Counter(row["first_run"] for row in rows if row["first_run"])
    if first:
        texts.append(
            "first run of the unseen: " + ", ".join(f"{count} {result}" for result, count in first.most_common())
        )
    return "; ".join(texts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--to", default="ddp", help="as in `everyrank port`")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    cases = [
        (args.folder / name, case)
        for name in ("seen", "unseen")
        for case in json.loads((args.folder / name / "cases.json").read_text())
    ]
    rows = {}
    if args.json and args.json.exists():  # rows of scripts that are not run now stay
        rows = {row["name"]: row for row in json.loads(args.json.read_text())["rows"]}
    for folder, case in cases:
        if not args.names or case["name"] in args.names:
            row = port_script(folder, case, args.to)
            if args.to == "workload":  # `--to workload` was developed without these scripts
                row["first_run"] = rows.get(case["name"], row).get("first_run") or row["result"]
            rows[case["name"]] = row
            print(f"{row['name']}: {row['result']} {row['reason']} ({row['seconds']} s)", flush=True)
            if args.json:
                ordered = [rows[case["name"]] for _, case in cases if case["name"] in rows]
                args.json.write_text(json.dumps({"rows": ordered, "provenance": provenance()}, indent=1) + "\n")
    print(summary([rows[case["name"]] for _, case in cases if case["name"] in rows]))


if __name__ == "__main__":
    main()
