"""The corpus of silent bugs under `everyrank audit`: found or not, what was named, and false alarms.

Run: python benchmarks/silent_bugs.py [--blind] [--json F] [--markdown F] [NAME ...]

Each script of benchmarks/silent_bugs/ is audited as it is, then with --right, its smallest correction; then the scripts
of silent_bugs/correct/. Found: a FAIL or WARN that the corrected script does not get. Line: the line of the mistake is
the one that is named, or among those shown with it.

--blind audits benchmarks/blind_set/ in their place: 15 mistakes and 10 correct scripts by a writer who had seen neither
the rules nor the corpus. Its first result is what counts; since then it has been looked at, like the others.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

FOLDER, BLIND = Path(__file__).parent / "silent_bugs", Path(__file__).parent / "blind_set"
MISTAKE = "# <- the mistake"


def audited(script: Path, *words: str) -> dict[str, Any]:
    """What an audit of the script comes to: its JSON, or the error that it ended with."""
    found = re.search(r"nproc-per-node (\d)", script.read_text()) or re.search(r"needs (\d) ranks", script.read_text())
    with tempfile.TemporaryDirectory() as folder:
        out, begin = Path(folder) / "found.json", time.monotonic()
        command = [sys.executable, "-m", "everyrank", "audit"]
        if "spawn(" not in script.read_text():  # else it starts its ranks itself
            command += ["--processes", found[1] if found else "2"]
        done = subprocess.run(
            [*command, "--json", str(out), str(script), *words],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        result = json.loads(out.read_text()) if out.exists() else {"error": done.stderr.strip().splitlines()[-1:]}
    return {**result, "seconds": round(time.monotonic() - begin, 1)}


def alarms(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What is wrong, by rule."""
    return {f["rule"]: f for f in reversed(result.get("findings", [])) if f["level"] in ("FAIL", "WARN")}


def row_of(script: Path) -> dict[str, Any]:
    """One script of the corpus: wrong, then right."""
    text = script.read_text()
    line = next(number for number, content in enumerate(text.splitlines(), 1) if MISTAKE in content)
    reported = re.search(r"^Reported:\s*(.*?)$", text, re.MULTILINE)
    corrected = script.with_name(f"{script.stem}_right.py")
    wrong, right = audited(script), audited(corrected) if corrected.exists() else audited(script, "--right")
    false = alarms(right)
    found = {rule: finding for rule, finding in alarms(wrong).items() if rule not in false}
    places = [place for finding in found.values() for place in (finding["place"], *finding["also"])]
    return {
        "name": script.stem,
        "reported": reported[1] if reported else "",
        "found": bool(found),
        "line": any(place.endswith(f"{script.name}:{line}") for place in places),
        "rules": list(found),
        "named": next((finding["text"] for finding in found.values()), ""),
        "error": (wrong.get("error") or [""])[0],
        "false_alarms": list(false),
        "seconds": wrong["seconds"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--blind", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args()
    folder = BLIND if args.blind else FOLDER
    scripts = [p for p in sorted(folder.glob("*.py")) if not args.names or p.stem in args.names]
    rows: list[dict[str, Any]] = []
    for script in scripts:
        text = script.read_text()
        if MISTAKE in text and (args.blind or re.search(r"^Kind:\s*script", text, re.MULTILINE)):
            rows.append(row_of(script))
            print(line_of(rows[-1]), flush=True)
    correct = {}
    for script in sorted((folder / "correct").glob("*.py")) if not args.names else ():
        result = audited(script)
        correct[script.stem] = {"alarms": list(alarms(result)), "error": (result.get("error") or [""])[0]}
        print(
            f"correct/{script.stem}: {', '.join(correct[script.stem]['alarms']) or 'nothing wrong found'}", flush=True
        )
    print(summary(rows, correct))
    if args.json:
        content = {
            "rows": rows,
            "correct": correct,
            "provenance": {
                "torch": torch.__version__,
                "cores": os.cpu_count(),
                "date": f"{datetime.now(UTC):%Y-%m-%d}",
            },
        }
        args.json.write_text(json.dumps(content, indent=1) + "\n")
    if args.markdown:
        args.markdown.write_text(markdown(rows))


def line_of(row: dict[str, Any]) -> str:
    said = ", ".join(row["rules"]) + ("" if row["line"] else " (another line)") if row["found"] else "not found"
    alarm = f"  FALSE ALARM with --right: {', '.join(row['false_alarms'])}" if row["false_alarms"] else ""
    return f"{row['name']}: {row['error'] or said}{alarm}"


def summary(rows: list[dict[str, Any]], correct: dict[str, Any]) -> str:
    false = [row["name"] for row in rows if row["false_alarms"]]
    false += [name for name, found in correct.items() if found["alarms"]]
    found, lines = sum(row["found"] for row in rows), sum(row["line"] for row in rows)
    return (
        f"{found} of {len(rows)} found, {lines} with the line of the mistake; false alarms on {len(false)} of "
        f"{len(rows) + len(correct)} correct scripts{': ' if false else ''}{', '.join(false)}"
    )


def markdown(rows: list[dict[str, Any]]) -> str:
    head = "| bug | found | what was named | seconds |\n| --- | --- | --- | ---: |\n"
    lines = [
        f"| `{row['name']}` | {'yes' if row['line'] else 'yes, another line' if row['found'] else 'no'} | "
        f"{(', '.join(row['rules']) + ': ' + row['named']) if row['found'] else ''} | {row['seconds']:.0f} |"
        for row in rows
    ]
    return head + "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
