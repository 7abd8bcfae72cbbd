"""Audit public scripts with the rules only, and with the comparison with one rank; report findings and seconds.

Run: python benchmarks/public_audits.py SOURCES DATA SHIMS [--json F] [NAME ...]
     python benchmarks/public_audits.py --docs

public_scripts.json lists the scripts with their commits, their arguments, and the changes that let them run on small
data. SOURCES has the clones as OWNER+NAME, DATA has the small data, and SHIMS has folders with substitutes of missing
packages. The environment needs accelerate, lightning and transformers. Results are added to F after each script.
With --docs the tables of both documentation pages are generated from F.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any

from silent_bugs import alarm_details, alarms_by_rule, provenance

SCRIPTS = Path(__file__).parent / "public_scripts.json"
RECORD = Path(__file__).parent / "records" / "public-audits-cpu.json"
DOCS = Path(__file__).parents[1] / "docs"
BEGIN, END = "<!-- generated: python benchmarks/public_audits.py --docs -->", "<!-- end of audits -->"
WAYS = {"rules": "--no-compare", "both": "--compare"}
HEADS = (
    "| script | rules find | seconds (CPU) | the comparison adds | seconds with it (CPU) | not compared, because |",
    "| 脚本 | 规则找到 | 秒（CPU） | 比较另外找到 | 加上比较后的秒数（CPU） | 没有比较的原因（英文原文） |",
)
NONE = ("nothing", "没有")


def cpu_seconds() -> float:
    """Return the CPU seconds of all ended child processes. Other programs change them less than the wall time."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def run_audit(script: dict[str, Any], way: str, roots: dict[str, Path]) -> dict[str, Any]:
    """Audit a script in a fresh copy of its repository, and return the findings and seconds.

    way    a key of WAYS
    roots  the folders SOURCES, DATA and SHIMS, by name
    """
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(shutil.copytree(roots["SOURCES"] / script["source"], Path(scratch) / "copy", symlinks=True))
        home, out = Path(scratch) / "home", Path(scratch) / "audit.json"
        home.mkdir()
        script_variables = script.get("environment", {})
        shim = str(roots["SHIMS"] / script["shim"]) if "shim" in script else ""
        paths = [shim, script_variables.get("PYTHONPATH", ""), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            **script_variables,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "HOME": str(home),
            "DATA": str(roots["DATA"]),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "WANDB_MODE": "offline",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        }
        folder = copy / script["folder"]
        if "setup" in script:
            subprocess.run(["bash", "-c", script["setup"]], cwd=folder, env=environment, check=True)
        command = [sys.executable, "-m", "everyrank", "audit", "--limit", "240", WAYS[way], "--json", str(out)]
        start, cpu_start = time.monotonic(), cpu_seconds()
        process = subprocess.run(
            [*command, *script["command"].split()],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        seconds = round(time.monotonic() - start, 1)
        result = json.loads(out.read_text()) if out.exists() else {}
        return {
            "status": process.returncode,
            "findings": alarm_details(alarms_by_rule(result)),
            "not_compared": [
                reason.partition("not compared, because ")[2] or reason.partition(": ")[2]
                for reason in result.get("not_checked", [])
                if "not compared, because" in reason or reason.startswith("comparison with one rank: ")
            ],
            "compared": next((note for note in result.get("altered", []) if "compute the same as one" in note), ""),
            "error": "" if result else process.stderr.strip()[-300:],
            "seconds": seconds,
            "cpu_seconds": round(cpu_seconds() - cpu_start, 1),
        }


def table(record: dict[str, Any], language: int) -> str:
    """Return a Markdown table: for each script the rules that apply, what the comparison adds, and the seconds."""
    lines = [BEGIN, "", HEADS[language], "| --- | --- | ---: | --- | ---: | --- |"]
    for row in record["rows"]:
        found_by_rules, found_by_both = ({finding["rule"] for finding in row[way]["findings"]} for way in WAYS)
        cells = [f"`{row['name']}`"]
        for rules, way in ((found_by_rules, "rules"), (found_by_both - found_by_rules, "both")):
            seconds, cpu = row[way]["seconds"], row[way].get("cpu_seconds")
            cells += [", ".join(f"`{rule}`" for rule in sorted(rules)) or NONE[language]]
            cells += [f"{seconds:.0f}" if cpu is None else f"{seconds:.0f} ({cpu:.0f})"]
        reason = (row["both"]["not_compared"] or [row["both"]["error"]])[0].replace("|", "\\|")
        lines.append(f"| {' | '.join(cells)} | {textwrap.shorten(reason, 100, placeholder=' ...')} |")
    return "\n".join([*lines, "", END])


def write_docs(record: dict[str, Any]) -> None:
    """Write the table into the English and the Chinese documentation page."""
    for language, page in enumerate((DOCS / "audit-results.md", DOCS / "zh" / "audit-results.md")):
        before, _, rest = page.read_text().partition(BEGIN)
        page.write_text(f"{before}{table(record, language)}{rest.partition(END)[2]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", metavar="SOURCES DATA SHIMS [NAME ...]")
    parser.add_argument("--json", type=Path, default=RECORD)
    parser.add_argument("--docs", action="store_true")
    args = parser.parse_intermixed_args()
    if args.docs:
        write_docs(json.loads(args.json.read_text()))
        return
    if len(args.folders) < 3:
        parser.error("missing folders: give SOURCES, DATA and SHIMS, or --docs")
    names = args.folders[3:]
    roots = {
        name: Path(folder).resolve() for name, folder in zip(("SOURCES", "DATA", "SHIMS"), args.folders, strict=False)
    }
    rows = json.loads(args.json.read_text())["rows"] if args.json.exists() else []
    for script in json.loads(SCRIPTS.read_text()):
        if (names and script["name"] not in names) or any(row["name"] == script["name"] for row in rows):
            continue
        row = {
            "name": script["name"],
            "commit": script["commit"],
            **{way: run_audit(script, way, roots) for way in WAYS},
        }
        rows.append(row)
        print(json.dumps(row), flush=True)
        record = {"command": "python benchmarks/public_audits.py SOURCES DATA SHIMS", "rows": rows}
        args.json.write_text(json.dumps({**record, "provenance": provenance()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
