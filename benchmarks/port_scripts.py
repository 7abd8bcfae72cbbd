"""How many public scripts for one device `everyrank port` turns into equal scripts for several processes.

Run: python benchmarks/port_scripts.py FOLDER [NAME ...] [--to accelerate|fabric|workload] [--json F]

FOLDER has seen/ and unseen/, each with the scripts and a cases.json: name, script, cwd, args, env, source, kind. The
scripts are not part of this repository; `source` in the Record has the address of each. Those in seen/ were used while
port was written. Those in unseen/ were not looked at before their first run, whose results stand in FIRST_RUN.
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

# before any change that these scripts led to
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
# judged by hand: why DistributedDataParallel does not fit
RIGHTLY_REFUSED = {
    "ex_gcn": "nodes of one graph depend on each other",
    "ex_reinforce": "an episode, not a batch, is trained on",
    "ex_forward_forward": "layers train themselves in methods other than forward",
    "simclr": "the loss compares samples of a batch",
}
# of `--to workload`, judged by hand: what a workload cannot say
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
_SECONDS = 900


def ported(folder: Path, case: dict[str, Any], to: str = "ddp") -> dict[str, Any]:
    """One script: the result, and what the port adds and changes."""
    with tempfile.TemporaryDirectory() as copy:
        top = Path(case["cwd"]).parts[0]
        shutil.copytree(folder / top, Path(copy) / top)
        working = Path(copy) / case["cwd"]
        script, out = Path(os.path.relpath(Path(copy) / case["script"], working)), Path(copy) / "port.json"
        begin = time.monotonic()
        options = [] if to == "ddp" else ["--to", to]
        status, text = _port(working, out, case, script, options)
        other = re.search(r"--with (\S+\.py)", text) if status == 3 else None
        if other is not None:  # as the message says
            status, text = _port(working, out, case, script, [*options, "--with", other[1]])
        seconds = time.monotonic() - begin
        port = json.loads(out.read_text()) if out.exists() else {}
        lines = _lines((working / script).read_text(), port["text"]) if port and to != "workload" else {}
        if port and to == "workload":
            lines = {"lines": len([line for line in port["text"].splitlines() if line.strip()])}
        if port and other is not None:
            more = _lines((working / other[1]).read_text(), port["other_text"])
            lines = {name: lines[name] + more[name] for name in lines}
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
        "with": other[1] if other else None,
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


def _port(working: Path, out: Path, case: dict[str, Any], script: Path, options: list[str]) -> tuple[int, str]:
    """The exit status of the command, and what it printed."""
    command = [sys.executable, "-m", "everyrank", "port", "--dry-run", "--json", str(out), *options, str(script)]
    run = subprocess.run(
        [*command, *case["args"]],
        cwd=working,
        env={**os.environ, **case["env"]},
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=False,
    )
    return run.returncode, run.stdout + run.stderr


def _difference(port: dict[str, Any]) -> str:
    return next((each["difference"] for each in port.get("comparisons", []) if each["difference"]), "")


def _lines(before: str, after: str) -> dict[str, int]:
    """Lines of the script that are changed and added, and lines of the helper functions."""
    counts = {"changed": 0, "added": 0, "helpers": 0}
    one, other = before.splitlines(), after.splitlines()
    for kind, start, end, first, last in difflib.SequenceMatcher(None, one, other, autojunk=False).get_opcodes():
        inserted = [line for line in other[first:last] if line.strip()]
        if kind == "equal":
            continue
        if any(line.startswith("def ") for line in inserted):
            counts["helpers"] += len(inserted)
        else:
            counts["changed"] += end - start
            counts["added"] += max(0, len(inserted) - (end - start))
    return counts


def summary(rows: list[dict[str, Any]]) -> str:
    """`24 equal, 4 refused, 2 not equal (not written), of 30; ...`."""
    parts = []
    for name, part in (("scripts", rows), ("unseen scripts", [row for row in rows if not row["seen"]])):
        counts = Counter(row["result"] for row in part)
        parts.append(
            f"of {len(part)} {name} " + ", ".join(f"{count} {result}" for result, count in counts.most_common())
        )
    first = Counter(row["first_run"] for row in rows if row["first_run"])
    if first:
        parts.append(
            "on the first run of the unseen: " + ", ".join(f"{n} {result}" for result, n in first.most_common())
        )
    return "; ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--to", default="ddp", help="as of everyrank port")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    cases = [
        (args.folder / part, case)
        for part in ("seen", "unseen")
        for case in json.loads((args.folder / part / "cases.json").read_text())
    ]
    rows = {}
    if args.json and args.json.exists():  # some are run again: the others stay
        rows = {row["name"]: row for row in json.loads(args.json.read_text())["rows"]}
    for folder, case in cases:
        if not args.names or case["name"] in args.names:
            row = ported(folder, case, args.to)
            if args.to == "workload":  # it was written with none of them at hand
                row["first_run"] = rows.get(case["name"], row).get("first_run") or row["result"]
            rows[case["name"]] = row
            print(f"{row['name']}: {row['result']} {row['reason']} ({row['seconds']} s)", flush=True)
            if args.json:
                kept = [rows[case["name"]] for _, case in cases if case["name"] in rows]
                args.json.write_text(json.dumps({"rows": kept, "provenance": provenance()}, indent=1) + "\n")
    print(summary([rows[case["name"]] for _, case in cases if case["name"] in rows]))


if __name__ == "__main__":
    main()
