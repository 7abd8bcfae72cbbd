"""How many findings of the corpus of silent bugs have a patch that `everyrank audit --fix` has checked.

Run: python benchmarks/audit_fix.py [--json F] [NAME ...]

Each script of benchmarks/silent_bugs/ that runs under `everyrank audit` is audited with --fix. A finding has a patch if
an audit of the edited script does not find it again, and finds nothing that was not there before.
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

from silent_bugs import FOLDER, MISTAKE, field, provenance


def fixed(script: Path) -> dict[str, Any]:
    """One script: its findings, those with a patch, and why the others have none."""
    with tempfile.TemporaryDirectory() as folder:
        out, begin = Path(folder) / "audit.json", time.monotonic()
        command = [sys.executable, "-m", "everyrank", "audit", "--fix", "--json", str(out)]
        if "nproc-per-node 4" in script.read_text():
            command += ["--processes", "4"]
        subprocess.run([*command, str(script)], cwd=folder, capture_output=True, text=True, timeout=1200, check=False)
        audit = json.loads(out.read_text()) if out.exists() else {}
    patch = audit.get("patch", {"mended": [], "left": [], "audits": 0, "diff": ""})
    return {
        "name": script.stem,
        "found": [each["rule"] for each in audit.get("findings", []) if each["level"] in ("FAIL", "WARN")],
        "mended": [each["rule"] for each in patch["mended"]],
        "left": {each["rule"]: each["reason"] for each in patch["left"]},
        "changed_lines": sum(
            line[:1] in "+-" and line[:3] not in ("+++", "---") for line in patch["diff"].splitlines()
        ),
        "audits": patch["audits"],
        "seconds": round(time.monotonic() - begin, 1),
    }


def summary(rows: list[dict[str, Any]]) -> str:
    """`31 of 60 findings have a checked patch, in 28 of 46 scripts; ...`."""
    found, mended = sum(len(row["found"]) for row in rows), sum(len(row["mended"]) for row in rows)
    whole = [row for row in rows if row["mended"] and not row["left"]]
    reasons = Counter(reason for row in rows for reason in row["left"].values())
    unknown = reasons["no edit is known for this kind of mistake"]
    wrong = [row for row in rows if row["found"]]
    return (
        f"{mended} of {found} findings have a checked patch; {len(whole)} of {len(wrong)} scripts have none left; "
        f"for {unknown} findings no edit is known"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for script in sorted(FOLDER.glob("*.py")):
        text = script.read_text()
        if (
            MISTAKE not in text
            or field(text, "Kind") == "parallelize"
            or (args.names and script.stem not in args.names)
        ):
            continue
        rows.append(fixed(script))
        row = rows[-1]
        print(
            f"{row['name']}: mended {', '.join(row['mended']) or 'nothing'}; left {row['left'] or 'nothing'}",
            flush=True,
        )
    if args.names and args.json and args.json.exists():  # some are run again: the others stay
        anew = {row["name"]: row for row in rows}
        rows = [anew.get(row["name"], row) for row in json.loads(args.json.read_text())["rows"]]
    print(summary(rows))
    if args.json:
        args.json.write_text(json.dumps({"rows": rows, "provenance": provenance()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
