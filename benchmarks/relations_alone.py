"""Count the silent bugs that audit finds with rules only, with relations only, and with both.

Run: python benchmarks/relations_alone.py [--json F] [--reports DIR] [--only rules|relations] [--docs]
         [SET ...] [--scripts NAME ...]

A rule knows one mistake. A relation holds for every correct training, for example "N ranks with the same batches train
as one rank does". So it also finds mistakes that are in no list. Each script runs with its mistake and corrected:

    rules      everyrank audit --no-compare
    relations  only the comparisons, without any rule
    both       a FAIL or WARN of the rules or of the relations

SET is corpus, reports, or blind1 to blind7. corpus has the scripts of silent_bugs/. reports is the folder DIR with
pairs NAME.py and NAME_ok.py, which are not in this repository. Results are added to F after each script. Results that F
already has are not measured again, so you can stop a run and continue it later. --docs writes the tables of
docs/silent-bugs.md and docs/zh/silent-bugs.md from F.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from silent_bugs import (
    BLIND_SETS,
    CORPUS_FOLDER,
    MISTAKE_MARK,
    alarms_by_rule,
    copy_with_mistakes,
    provenance,
    run_audit,
)

from everyrank.audit.finding import Findings
from everyrank.relations import judge_script
from everyrank.rerun import ScriptHost

RECORD = Path(__file__).parent / "records" / "relations-alone-cpu.json"
DOCS = Path(__file__).parents[1] / "docs"
# scripts of the reports that have a mistake and no corrected version
WRONG_WITHOUT_CORRECTION = {"v01_noaug", "v02_shuffle", "v19_softplus", "v19b_two_or_more"}
BEGIN_MARK, END_MARK = "<!-- generated: python benchmarks/relations_alone.py --docs -->", "<!-- end of relations -->"
SET_TITLES = {  # set -> title in English and Chinese
    "corpus": ("public bugs, used while the rules were written", "公开的错误，写规则时参考过"),
    "blind1": ("blind set 1", "盲测集 1"),
    "blind2": ("blind set 2", "盲测集 2"),
    "blind3": ("blind set 3", "盲测集 3"),
    **{f"blind{number}": (f"blind set {number}", f"盲测集 {number}") for number in range(4, 8)},
    "reports": ("more public reports", "其他公开报告"),
}
TABLE_HEADERS = (  # in English and Chinese
    "| scripts | mistakes | rules alone | relations alone | both | false alarms of rules | of relations |",
    "| 脚本 | 错误 | 只用规则 | 只用关系 | 合起来 | 规则的误报 | 关系的误报 |",
)
OF_TEXTS = ("of", "/")  # "0 of 44" in English and Chinese


def find_scripts(folder: Path) -> list[tuple[Path, list[str], list[str] | None]]:
    """Return (script, its command, the corrected command) of each script. A correct script has no corrected command."""
    scripts: list[tuple[Path, list[str], list[str] | None]] = []
    for script in sorted(folder.glob("*.py")):
        if script.stem.endswith(("_ok", "_right")):
            continue
        text = script.read_text()
        corrected_paths = [script.with_name(f"{script.stem}{suffix}.py") for suffix in ("_ok", "_right")]
        corrected_path = next((path for path in corrected_paths if path.exists()), None)
        if corrected_path is not None:
            scripts.append((script, [str(script)], [str(corrected_path)]))
        elif MISTAKE_MARK in text and "Kind: parallelize" not in text:
            scripts.append((script, [str(script)], [str(script), "--right"]))
        elif MISTAKE_MARK not in text and "Kind:" not in text:
            scripts.append((script, [str(script)], None))
    return [*scripts, *((script, [str(script)], None) for script in sorted((folder / "correct").glob("*.py")))]


def check_relations(host: ScriptHost, script: Path, command: list[str]) -> dict[str, Any]:
    """Check only the relations of a command, and return the result like the JSON of an audit.

    The number of ranks is that in the docstring of `script`.
    """
    text, findings, start = script.read_text(), Findings(), time.monotonic()
    if "spawn(" in text:
        findings.add_unchecked("the script starts its ranks itself")
    else:
        ranks = re.search(r"nproc-per-node (\d)", text) or re.search(r"needs (\d) ranks", text)
        default_ranks = 1 if f"python {script.name}" in text else 2
        judge_script(host, command, int(ranks[1]) if ranks else default_ranks, findings)
    seconds = round(time.monotonic() - start, 1)
    return {
        "findings": [finding.as_json() for finding in findings],
        "not_checked": findings.unchecked,
        "seconds": seconds,
    }


def make_result(script: Path, wrong_audit: dict[str, Any], corrected_audit: dict[str, Any] | None) -> dict[str, Any]:
    """Return the result of the rules or of the relations for one script.

    found  names of the rules or relations that find the mistake
    line   whether a finding shows the marked line; None if no line is marked
    false  names of those with a false alarm
    why    what could not be checked, and the error of the audit; empty if the mistake was found
    """
    marked_lines = [number for number, line in enumerate(script.read_text().splitlines(), 1) if MISTAKE_MARK in line]
    alarms = alarms_by_rule(wrong_audit)
    if corrected_audit is None:
        has_mistake = script.stem in WRONG_WITHOUT_CORRECTION
        return {
            "found": list(alarms) if has_mistake else [],
            "line": None,
            "false": [] if has_mistake else list(alarms),
            "why": wrong_audit.get("not_checked", []),
            "seconds": wrong_audit["seconds"],
        }
    false_alarms = alarms_by_rule(corrected_audit)
    true_alarms = {rule: alarm for rule, alarm in alarms.items() if rule not in false_alarms}
    shown_lines = [location for alarm in true_alarms.values() for location in alarm["lines"]]
    shows_marked_line = any(
        location.endswith(f"{script.name}:{line}") for location in shown_lines for line in marked_lines
    )
    reasons = [] if true_alarms else [*wrong_audit.get("not_checked", []), *wrong_audit.get("error", [])]
    return {
        "found": list(true_alarms),
        "line": shows_marked_line if marked_lines else None,
        "false": list(false_alarms),
        "why": reasons[:4],
        "seconds": wrong_audit["seconds"],
    }


def run_set(
    set_name: str,
    folder: Path,
    record_path: Path,
    record: dict[str, Any],
    methods: list[str],
    script_names: Collection[str] = (),
) -> None:
    """Run the scripts of a set, and write each result into the Record. Results that it already has are kept.

    methods       "rules", "relations" or both
    script_names  run only these scripts; empty for all
    """
    rows = record.setdefault("rows", {}).setdefault(set_name, {})
    with ScriptHost([str(next(folder.glob("*.py")))], timeout_seconds=60.0) as host:
        for script, wrong_command, corrected_command in find_scripts(folder):
            if script_names and script.stem not in script_names:
                continue
            has_mistake = corrected_command is not None or script.stem in WRONG_WITHOUT_CORRECTION
            row = rows.setdefault(script.stem, {"has_mistake": has_mistake})
            for method in methods:
                if method in row:
                    continue
                wrong_audit, corrected_audit = (
                    None
                    if command is None
                    else check_relations(host, script, command)
                    if method == "relations"
                    else run_audit(Path(command[0]), *command[1:], audit_flags=("--no-compare",))
                    for command in (wrong_command, corrected_command)
                )
                assert wrong_audit is not None
                row[method] = make_result(script, wrong_audit, corrected_audit)
                print(f"{set_name} {script.stem} {method}: {row[method]}", flush=True)
                save_row(record_path, record, set_name, script.stem)


def save_row(record_path: Path, record: dict[str, Any], set_name: str, script_name: str) -> None:
    """Write one row into the file. The file is read again, because a run of a different set may write to it, too."""
    stored_record = (
        json.loads(record_path.read_text())
        if record_path.exists()
        else {"command": "python benchmarks/relations_alone.py", "rows": {}}
    )
    stored_record["rows"].setdefault(set_name, {})[script_name] = record["rows"][set_name][script_name]
    stored_record["provenance"] = provenance()
    temporary_path = record_path.with_suffix(f".{set_name}")
    temporary_path.write_text(json.dumps(stored_record, indent=1) + "\n")
    temporary_path.replace(record_path)


def make_table(record: dict[str, Any], language: int) -> str:
    """Return a Markdown table with the mistakes found and the false alarms of each set.

    language  0 for English, 1 for Chinese
    """
    lines = [BEGIN_MARK, "", TABLE_HEADERS[language], "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"]
    for set_name, titles in SET_TITLES.items():
        rows = list(record["rows"].get(set_name, {}).values())
        rows_with_mistake = [row for row in rows if row["has_mistake"]]
        cells = [
            found_text(rows_with_mistake, methods) for methods in (["rules"], ["relations"], ["rules", "relations"])
        ]
        cells += [false_alarms_text(rows, method, OF_TEXTS[language]) for method in ("rules", "relations")]
        if rows:
            lines.append(f"| {titles[language]} | {len(rows_with_mistake)} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", END_MARK])


def found_text(rows: list[dict[str, Any]], methods: list[str]) -> str:
    """Return `21 (17)`: how many mistakes one of these methods finds, and for how many it shows the marked line.

    Returns `21` if no lines are marked, and `-` if not all results are there.
    """
    if not all(method in row for row in rows for method in methods):
        return "-"
    num_found, num_lines = (
        sum(any(row[method][key] for method in methods) for row in rows) for key in ("found", "line")
    )
    has_marked_lines = any(row[method]["line"] is not None for row in rows for method in methods)
    return f"{num_found} ({num_lines})" if has_marked_lines else f"{num_found}"


def false_alarms_text(rows: list[dict[str, Any]], method: str, of_text: str) -> str:
    """Return `0 of 44`: how many correct programs have a false alarm; `-` if no results are there."""
    results = [row[method] for row in rows if method in row]
    return f"{sum(bool(result['false']) for result in results)} {of_text} {len(results)}" if results else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="*", metavar="SET")
    parser.add_argument("--json", type=Path, default=RECORD)
    parser.add_argument("--reports", type=Path, metavar="DIR")
    parser.add_argument("--only", choices=("rules", "relations"))
    parser.add_argument("--scripts", nargs="+", default=(), metavar="NAME", help="run only these scripts of the sets")
    parser.add_argument("--docs", action="store_true")
    args = parser.parse_args()
    if args.docs:
        table_record = json.loads(args.json.read_text())
        for language, page in enumerate((DOCS / "silent-bugs.md", DOCS / "zh" / "silent-bugs.md")):
            before, _, rest = page.read_text().partition(BEGIN_MARK)
            page.write_text(f"{before}{make_table(table_record, language)}{rest.partition(END_MARK)[2]}")
        return
    methods = [args.only] if args.only else ["rules", "relations"]
    record: dict[str, Any] = json.loads(args.json.read_text()) if args.json.exists() else {}
    for set_name in args.sets or [name for name in SET_TITLES if name != "reports" or args.reports]:
        with tempfile.TemporaryDirectory() as scratch:
            if set_name == "corpus":
                folder = CORPUS_FOLDER
            elif set_name == "reports":
                folder = args.reports
            else:
                folder = copy_with_mistakes(BLIND_SETS[int(set_name.removeprefix("blind"))], Path(scratch))
            run_set(set_name, folder, args.json, record, methods, args.scripts)


if __name__ == "__main__":
    main()
