"""Count the findings in the corpus of silent bugs for which `everyrank audit --fix` has a checked patch.

Run: python benchmarks/audit_fix.py [--json F] [NAME ...]

Each script of benchmarks/silent_bugs/ that runs under `everyrank audit` is audited with --fix. A finding has a checked
patch if an audit of the edited script no longer reports it, and reports nothing new.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from silent_bugs import CORPUS_FOLDER, MISTAKE_MARK, header_field, provenance


def audit_with_fix(script: Path) -> dict[str, Any]:
    """Return the row of one script: its findings, those with a patch, and why the others have none."""
    with tempfile.TemporaryDirectory() as folder:
        out, start = Path(folder) / "audit.json", time.monotonic()
        command = [sys.executable, "-m", "everyrank", "audit", "--fix", "--json", str(out)]
        if "nproc-per-node 4" in script.read_text():
            command += ["--processes", "4"]
        subprocess.run([*command, str(script)], cwd=folder, capture_output=True, text=True, timeout=1200, check=False)
        audit = json.loads(out.read_text()) if out.exists() else {}
    patch = audit.get("patch", {"mended": [], "left": [], "audits": 0, "diff": ""})
    return {
        "name": script.stem,
        "found": [finding["rule"] for finding in audit.get("findings", []) if finding["level"] in ("FAIL", "WARN")],
        "mended": [finding["rule"] for finding in patch["mended"]],
        "left": {finding["rule"]: finding["reason"] for finding in patch["left"]},
        "changed_lines": sum(
            line[:1] in "+-" and line[:3] not in ("+++", "---") for line in patch["diff"].splitlines()
        ),
        "audits": patch["audits"],
        "seconds": round(time.monotonic() - start, 1),
    }


def summary(rows: list[dict[str, Any]]) -> str:
    """Return a line such as `31 of 60 findings have a checked patch. 28 of 46 scripts have no finding left. ...`."""
    num_findings, num_patched = sum(len(row["found"]) for row in rows), sum(len(row["mended"]) for row in rows)
    fully_patched = [row for row in rows if row["mended"] and not row["left"]]
    reasons = Counter(reason for row in rows for reason in row["left"].values())
    num_unknown = reasons["no edit is known for this kind of mistake"]
    with_findings = [row for row in rows if row["found"]]
    return (
        f"{num_patched} of {num_findings} findings have a checked patch. "
        f"{len(fully_patched)} of {len(with_findings)} scripts have no finding left. "
        f"No edit is known for {num_unknown} findings."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for script in sorted(CORPUS_FOLDER.glob("*.py")):
        text = script.read_text()
        if (
            MISTAKE_MARK not in text
            or header_field(text, "Kind") == "parallelize"
            or (args.names and script.stem not in args.names)
        ):
            continue
        row = audit_with_fix(script)
        rows.append(row)
        print(
            f"{row['name']}: patched {', '.join(row['mended']) or 'nothing'}, left {row['left'] or 'nothing'}",
            flush=True,
        )
    if args.names and args.json and args.json.exists():  # keep the rows of scripts that were not run again
        new_rows = {row["name"]: row for row in rows}
        rows = [new_rows.get(row["name"], row) for row in json.loads(args.json.read_text())["rows"]]
    print(summary(rows))
    if args.json:
        args.json.write_text(json.dumps({"rows": rows, "provenance": provenance()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
